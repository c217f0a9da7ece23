"""What commands print and write: results to stdout, progress and errors to stderr."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .group import UsageFailure

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def make_console(*, stderr: bool = False) -> Console:
    """Make a console; colours show on terminals alone."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def print_parts(parts: Iterable[RenderableType]) -> None:
    """Print to stdout."""
    from rich.console import Console

    console = make_console()
    # Better a line that a narrow terminal wraps than a number cut short.
    if console.width < _WIDTH:
        console = Console(highlight=False, width=_WIDTH)
    for part in parts:
        console.print(part)


_WIDTH = 120


def print_json(data: object) -> None:
    """Print data to stdout as JSON, which has no infinity and no NaN: they are null."""
    click.echo(json.dumps(_finite(data), indent=2, allow_nan=False))


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say what can't be written, and fail."""
    try:
        yield
    except OSError as error:
        raise UsageFailure(f"{error.filename or path}: can't be written: {error.strerror or error}") from None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say what can't be read, and fail."""
    try:
        yield
    except OSError as error:
        raise UsageFailure(f"{error.filename or path}: can't be read: {error.strerror or error}") from None


@contextlib.contextmanager
def status(what: str) -> Iterator[None]:
    """Show on a terminal that something takes its time, and how long it has."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = make_console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        bar.add_task(what, total=None)
        yield


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal; yields what is called for each step."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


WIDE = 150
"""Columns of tables that also go into files."""


def replace_text(path: Path, text: str) -> None:
    """Write a file aside and rename it: whoever is killed leaves a whole one."""
    with writing(path):
        aside = path.with_name(f".{path.name}.new")
        aside.write_text(text, encoding="utf-8", newline="")
        if path.exists():
            shutil.copymode(path, aside)
        aside.replace(path)


@contextlib.contextmanager
def steps() -> Iterator[tuple[Callable[[str], None], Callable[[int], None]]]:
    """Show a bar on a terminal; yields what is called as a step of some name begins, and what takes their number."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = make_console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield (
            lambda what: bar.update(task, advance=1, description=what),
            lambda total: bar.update(task, total=total),
        )
