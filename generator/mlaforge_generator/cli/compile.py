"""`compile`: cubins and what is to be known of them."""

from __future__ import annotations

import dataclasses
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..target import TARGETS
from . import devices
from .group import ToolchainFailure, UsageFailure, cli
from .inputs import complete_spec, make_folders
from .output import print_json, print_parts, progress

if TYPE_CHECKING:
    from rich.table import Table

    from mlaforge.compiler import CompiledKernel
    from mlaforge.manifest import Manifest


class _Family(click.ParamType[tuple[int, int, str, int]]):
    """Shapes that share kernels of mlaforge.flash_mla: d_qk, head_dim_v, dtype, page size."""

    name = "D_QK,D_V[,DTYPE[,PAGE]]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int, str, int]:
        """Read the family."""
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"([0-9]{1,5}),([0-9]{1,5})(?:,(bf16|fp16)(?:,([0-9]{1,5}))?)?", value)
        if match is None:
            self.fail(f"{value!r} is no family, as in 576,512 or 576,512,fp16,16", param, ctx)
        return int(match[1]), int(match[2]), match[3] or "bf16", int(match[4] or 64)


@cli.command(name="compile")
@click.argument("specs", nargs=-1, metavar="[SPEC|DIR]...", shell_complete=complete_spec)
@click.option(
    "--flash-mla",
    "families",
    type=_Family(),
    multiple=True,
    help="Also the kernels that mlaforge.flash_mla takes for these shapes: widths of q and of V, bf16 or fp16, tokens "
    "of a page.  [default: bf16, 64; may be repeated]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def compile_(specs: tuple[str, ...], families: tuple[tuple[int, int, str, int], ...], as_json: bool) -> None:
    """Compile kernels and report on them.

    Takes specs and generated folders. Needs no GPU. What it compiles is in the cache for whoever loads it.
    """
    if not (specs or families):
        raise click.UsageError("there is nothing to compile: name a spec or a folder, or give --flash-mla")
    with tempfile.TemporaryDirectory(prefix="mlaforge-") as scratch:
        compiled = compile_folders(make_folders(specs, Path(scratch)), decode_of=_render(families))
    if as_json:
        print_json([compile_json(manifest, kernel) for manifest, kernel in compiled])
    else:
        print_parts(compile_tables(compiled))


def _render(families: Sequence[tuple[int, int, str, int]]) -> list[Path]:
    """Give the folders of families."""
    if not families:
        return []
    devices.require_torch()
    from mlaforge.flash_mla import Family, render

    try:
        return [render(Family(*family)) for family in dict.fromkeys(families)]
    except ValueError as error:
        raise UsageFailure(f"--flash-mla: {error}") from None


def compile_folders(
    folders: Sequence[Path], *, decode_of: Sequence[Path] = ()
) -> list[tuple[Manifest, CompiledKernel]]:
    """Compile the kernels of folders, and give each with its manifest; `Failure` says what is wrong.

    Args:
        folders: generated ones.
        decode_of: such of which only the decode kernels are wanted.
    """
    from mlaforge.compiler import CompileError, KernelWarning, compile_many
    from mlaforge.manifest import read_manifest
    from mlaforge.toolchain import ToolchainError

    manifests = [read_manifest(folder) for folder in folders]
    sources = [(manifest, source) for manifest in manifests for source in manifest.sources]
    for manifest in map(read_manifest, decode_of):
        sources += [(manifest, kernel.source) for kernel in manifest.decodes]
    try:
        with progress("compiling", len(sources)) as advance, warnings.catch_warnings():
            # The report says it.
            warnings.simplefilter("ignore", KernelWarning)
            kernels = compile_many([source for _, source in sources], advance=advance)
            return [(manifest, kernel.with_sass()) for (manifest, _), kernel in zip(sources, kernels, strict=True)]
    except (CompileError, ToolchainError) as error:
        raise ToolchainFailure(str(error)) from None
    except OSError as error:
        raise UsageFailure(f"{error.filename}: can't be read: {error.strerror}") from None


def compile_json(manifest: Manifest, kernel: CompiledKernel) -> dict[str, Any]:
    """Give the report on a file of kernels as plain data."""
    return {
        "spec": manifest.name,
        "file": kernel.source.name,
        "key": kernel.key,
        "cubin_bytes": len(kernel.cubin),
        "cache_hit": kernel.cache_hit,
        "seconds": dict(kernel.seconds),
        "versions": dict(kernel.versions),
        "dynamic_smem": manifest.dynamic_smem[kernel.source],
        "smem_limit": TARGETS[manifest.target].smem_per_block,
        "kernels": [
            {**dataclasses.asdict(report), "serialized": report.serialized} for report in kernel.kernels.values()
        ],
    }


def compile_tables(compiled: Sequence[tuple[Manifest, CompiledKernel]]) -> Iterator[Table]:
    """Lay out registers, memory and instructions of kernels, and the seconds that they took."""
    from rich.text import Text

    from ..tables import table

    def bad_unless_zero(count: int) -> Text:
        return Text(f"{count:,}", style="bold red" if count else "")

    rows = []
    times = []
    for manifest, kernel in compiled:
        for report in kernel.kernels.values():
            sass, seconds = report.sass or {}, kernel.seconds
            rows.append(
                (
                    manifest.name,
                    report.entry,
                    report.registers,
                    bad_unless_zero(report.spill_stores + report.spill_loads),
                    bad_unless_zero(report.stack_frame),
                    f"{report.static_smem:,}",
                    f"{manifest.dynamic_smem[kernel.source]:,}",
                    sass.get("HGMMA", 0),
                    sass.get("UTMALDG", 0),
                    Text("serialised", style="bold red")
                    if report.serialized
                    else "overlap"
                    if "HGMMA" in sass
                    else "-",
                )
            )
            phases = (f"{seconds[name]:.2f}" if name in seconds else "-" for name in _PHASES)
            times.append((manifest.name, report.entry, "hit" if kernel.cache_hit else "miss", *phases))
    limit = max(TARGETS[manifest.target].smem_per_block for manifest, _ in compiled)
    versions = ", ".join(f"{name} {version}" for name, version in compiled[0][1].versions.items())
    yield table(
        "Compiled kernels, shared memory and spills in bytes",
        ("spec", "kernel", "registers>", "spills>", "stack>", "static>", "dynamic>", "HGMMA>", "UTMALDG>", "WGMMA"),
        rows,
        caption=f"a block has {limit:,} B of shared memory",
    )
    yield table(
        "Seconds of the compile that made the cubin",
        ("spec", "kernel", "cache", *(f"{name}>" for name in _PHASES)),
        times,
        caption=f"nvrtc has front end, optimizer and ptxas in it; {versions}",
    )


_PHASES = ("header search", "import", "nvrtc", "front end", "optimizer", "ptxas")
