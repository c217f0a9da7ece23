"""`cache`: what the compile cache holds."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from .group import Failure, UsageFailure, cli
from .output import print_json, print_parts, progress

if TYPE_CHECKING:
    from mlaforge.cache import Entry, KernelCache, Stored
    from mlaforge.rendered import Rendered

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_MIB = 1 << 20


class _Age(click.ParamType[float]):
    """A span of time, as in 30d; seconds."""

    name = "AGE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read the span."""
        match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw])", str(value))
        if match is None:
            self.fail(f"{value!r} is no age, as in 90m, 12h, 30d or 2w", param, ctx)
        return float(match.group(1)) * _UNITS[match.group(2)]


@cli.group()
def cache() -> None:
    """List, check or clear the compile cache.

    It is in $MLAFORGE_CACHE_DIR, else in $XDG_CACHE_HOME/mlaforge, else in ~/.cache/mlaforge, and holds cubins,
    libraries of the simulator, and folders of kernels' text that were rendered from YAML.
    """


@cache.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def list_(as_json: bool) -> None:
    """List entries, the newest first, with their sizes and ages."""
    kept = _open()
    stored = _stored(kept)
    entries = [(each, _about(each, held)) for each, held in _read(stored)]
    if as_json:
        print_json(
            {
                "directory": str(kept.directory),
                "bytes": sum(each.bytes for each in stored),
                "entries": [{**_json(each), **about} for each, about in entries],
            }
        )
        return
    from ..tables import table

    rows = []
    for each, about in entries:
        rows.append(
            (each.key[:12], about["kind"], about["holds"], f"{each.bytes:,}", _span(time.time() - each.written))
        )
    print_parts([table("Entries", ("key", "kind", "holds", "bytes>", "age>"), rows)] if rows else [])
    click.echo(f"{kept.directory}: {_sum(stored)}")


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def verify(as_json: bool) -> None:
    """Read all entries again and compare their checksums.

    The exit code is 1 if any is damaged. A damaged entry counts as absent: it is compiled anew when it is needed.
    """
    kept = _open()
    stored = _stored(kept)
    damaged = [each for each, held in _read(stored) if held is None]
    if as_json:
        print_json(
            {
                "directory": str(kept.directory),
                "entries": len(stored),
                "bytes": sum(each.bytes for each in stored),
                "damaged": [_json(each) for each in damaged],
            }
        )
    else:
        for each in damaged:
            click.echo(f"{each.path}: damaged")
        click.echo(f"{kept.directory}: {_sum(stored)}, {len(damaged) or 'none'} damaged")
    if damaged:
        raise Failure(f"{len(damaged)} of {len(stored)} entries are damaged; they will be compiled anew")


@cache.command()
@click.option("--older-than", type=_Age(), metavar="AGE", help="Only entries of at least this age, as in 12h or 30d.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print what was removed as JSON.")
def clear(older_than: float | None, yes: bool, as_json: bool) -> None:
    """Remove entries, and what processes that were killed left behind.

    Only files that the cache wrote are removed. Whoever uses the cache meanwhile compiles anew what is missing; text
    of which a process has loaded kernels stays.
    """
    from mlaforge.rendered import clear as clear_rendered

    kept = _open(to_read=False)
    before = None if older_than is None else time.time() - older_than
    chosen = [each for each in _stored(kept) if before is None or each.written < before]
    if chosen and not yes:
        click.confirm(f"Remove {_sum(chosen)} from {kept.directory}?", abort=True, err=True)
    try:
        removed: list[Stored | Rendered] = [*kept.clear(before)]
        folders, in_use = clear_rendered(kept.directory, before)
    except OSError as error:
        raise UsageFailure(f"{error.filename}: can't be removed: {error.strerror}") from None
    removed += folders
    if as_json:
        print_json(
            {
                "directory": str(kept.directory),
                "removed": [_json(each) for each in removed],
                "in_use": [_json(each) for each in in_use],
            }
        )
    else:
        stay = f"; {_sum(in_use)} in use" if in_use else ""
        click.echo(f"{kept.directory}: {_sum(removed)} removed{stay}")


def _open(*, to_read: bool = True) -> KernelCache:
    from mlaforge.cache import DistrustedError, KernelCache, default_directory, require_trusted

    directory = default_directory()
    if directory is None:
        raise UsageFailure("none of MLAFORGE_CACHE_DIR, XDG_CACHE_HOME and HOME names a directory")
    if to_read:
        try:
            require_trusted(directory)
        except DistrustedError as error:
            raise UsageFailure(f"{error.reason}, so it is not used; {error.fix}") from None
    return KernelCache(directory)


def _stored(kept: KernelCache) -> list[Stored | Rendered]:
    from mlaforge.rendered import stored

    try:
        both: list[Stored | Rendered] = [*kept.stored(), *stored(kept.directory)]
        return sorted(both, key=lambda each: -each.written)
    except OSError as error:
        raise UsageFailure(f"{error.filename or kept.directory}: can't be read: {error.strerror}") from None


def _read(stored: Sequence[Stored | Rendered]) -> list[tuple[Stored | Rendered, Entry | Rendered | None]]:
    """Read entries, which for a large cache takes a while; None of one that is damaged."""
    from mlaforge.cache import Stored

    made: list[tuple[Stored | Rendered, Entry | Rendered | None]] = []
    with progress("reading entries", len(stored)) as advance:
        for each in stored:
            if isinstance(each, Stored):
                made.append((each, each.read()))
            else:
                made.append((each, each if each.is_whole() else None))
            advance()
    return made


def _json(stored: Stored | Rendered) -> dict[str, Any]:
    age = max(time.time() - stored.written, 0.0)
    return {"key": stored.key, "path": str(stored.path), "bytes": stored.bytes, "age_seconds": round(age, 1)}


def _about(stored: Stored | Rendered, held: Entry | Rendered | None) -> dict[str, str]:
    """Say what an entry holds: a cubin's kernels, what a simulator's library was built of, or whose text it is."""
    from mlaforge.rendered import Rendered

    if held is None:
        return {"kind": "damaged", "holds": stored.name if isinstance(stored, Rendered) else ""}
    if isinstance(held, Rendered):
        return {"kind": "text", "holds": held.name}
    if "kernels" in held.meta:
        return {"kind": "cubin", "holds": ", ".join(str(kernel["entry"]) for kernel in held.meta["kernels"])}
    return {"kind": "simulator", "holds": str(held.meta.get("source", ""))}


def _sum(stored: Sequence[Stored | Rendered]) -> str:
    count = len(stored)
    return f"{count} {'entry' if count == 1 else 'entries'}, {sum(each.bytes for each in stored) / _MIB:.1f} MiB"


def _span(seconds: float) -> str:
    for unit in ("w", "d", "h", "m"):
        if seconds >= 2 * _UNITS[unit]:
            return f"{seconds / _UNITS[unit]:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
