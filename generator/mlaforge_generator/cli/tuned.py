"""What `tune` does alike whatever it measures: the GPU, and the spec that results are written into."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..write_back import WriteBackError
from .group import Failure, UsageFailure
from .output import WIDE, replace_text, writing

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

    from mlaforge.bench.timing import Gpu


@dataclasses.dataclass(frozen=True)
class Source:
    """What is tuned."""

    given: str
    """As on the command line."""
    path: Path
    name: str
    data: bytes

    def edited(self, edit: Callable[[str], str]) -> str:
        """Give the text as `edit` makes it; `UsageFailure` if its layout can't be edited."""
        try:
            return edit(self.data.decode("utf-8"))
        except WriteBackError as error:
            raise UsageFailure(f"{self.given}: {error}") from None


@dataclasses.dataclass(frozen=True)
class Output:
    """Where results go."""

    folder: Path
    spec: Path
    as_json: bool
    over: bool
    """Whether `spec` is the one that is tuned."""

    def tell(self, line: str) -> None:
        """Print progress."""
        click.echo(line, err=self.as_json)

    def write_spec(self, source: Source, text: str) -> list[str]:
        """Write the tuned spec, but not over one that was edited meanwhile; give what failed."""
        target, failures = self.spec, []
        if self.over and source.path.read_bytes() != source.data:
            target = self.folder / f"{source.name}.yaml"
            failures.append(f"{source.given}: changed while it was tuned; the tuned spec is {target}")
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        replace_text(target, text)
        self.tell(f"{target}: written")
        return failures


def choose_gpu(name: str) -> torch.device:
    """Make a CUDA device the current one."""
    import torch

    index = torch.device(name).index
    if index is not None:
        torch.cuda.set_device(index)
    return torch.device("cuda", torch.cuda.current_device())


def open_gpu(device: torch.device) -> tuple[Gpu, dict[str, Any]]:
    """Give what times calls on a device, and facts of the machine for the result."""
    import torch

    from mlaforge.bench.power import Nvml, NvmlError
    from mlaforge.bench.timing import Gpu

    gpu = Gpu(device)
    about: dict[str, Any] = {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, "sms": gpu.sms}
    # Of use, but not needed: power is not measured here.
    with contextlib.suppress(NvmlError):
        about |= Nvml(device).describe()
    return gpu, about


def abandon(show: Callable[[], None], scratch: Path) -> None:
    """End the process although a thread of it waits for a kernel that hangs: no other way leads out of that.

    Args:
        show: prints and writes what there is; its `Failure` is told.
        scratch: a folder to remove.
    """
    code = Failure.exit_code
    try:
        show()
    except Failure as failure:
        failure.show()
        code = failure.exit_code
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if sys.stderr.isatty():
            # The progress bar has hidden it.
            click.echo("\x1b[?25h", err=True, nl=False)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def as_text(parts: Iterable[RenderableType]) -> str:
    """Print tables as wide as those of files."""
    from rich.console import Console

    buffer = io.StringIO()
    console = Console(file=buffer, highlight=False, width=WIDE)
    for part in parts:
        console.print(part)
    return buffer.getvalue()


def first_error(log: str) -> str:
    """Give the line of a compiler's log that says what is wrong."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no log")
