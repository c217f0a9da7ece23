"""`make`: the whole job."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from . import devices
from .compile import compile_folders, compile_json, compile_tables
from .group import COUNT, ToolchainFailure, cli
from .inputs import complete_spec, make_plans, write_generated
from .output import print_json, print_parts, progress
from .verify import Run, check_absorption_of, verify_folder


@cli.command()
@click.argument("spec", shell_complete=complete_spec)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("generated"),
    show_default=True,
    help="Where the folder goes.",
)
@click.option("--examples", type=COUNT, help="Random problems to verify; 200 on a GPU, 12 under the simulator.")
@click.option("--seed", type=int, default=0, show_default=True, help="Which random problems.")
@click.option("--json", "as_json", is_flag=True, help="Print what came of each step as JSON.")
def make(spec: str, output: Path, examples: int | None, seed: int, as_json: bool) -> None:
    """Do the whole job, from spec to verified kernel.

    Plans, generates, compiles and reports; then verifies, on a Hopper GPU or else under the simulator.
    """
    from ..tables import summary

    (made,) = make_plans([spec])
    generated = write_generated(made, output)
    if not as_json:
        click.echo(f"{summary(made)}\n{generated}")
    compiled = compile_folders([generated.folder])
    if not as_json:
        print_parts(compile_tables(compiled))
    results: list[dict[str, Any]] | None = [] if as_json else None
    reason: str | None = None
    try:
        devices.require_torch()
        check_absorption_of(made.spec.model, results)
        if reason := devices.why_no_hopper("cuda"):
            if not as_json:
                click.echo(f"{reason}: the kernels were compiled for it, and their text now runs on the CPU, simulated")
            compile_for_the_simulator(generated.folder)
        run = Run(seed, examples, device="sim" if reason else "cuda", results=results)
        verify_folder(spec, generated.folder, run)
    finally:
        if as_json:
            print_json(
                {
                    "plan": made.to_json(),
                    "generated": generated.to_json(),
                    "kernels": [compile_json(manifest, kernel) for manifest, kernel in compiled],
                    "simulated": reason,
                    "verification": results,
                }
            )


def compile_for_the_simulator(folder: Path) -> None:
    """Compile a folder's kernels for the CPU, side by side: one after the other takes longer than to run them.

    `Failure` says what the simulator lacks.
    """
    from mlaforge.manifest import read_manifest
    from mlaforge.simulator import CompilerMissingError, compile_library

    manifest = read_manifest(folder)
    kernels = [(each.source, each.entry) for each in manifest.decodes]
    kernels += [(each.source, each.entry) for each in manifest.kernels.values()]
    try:
        with (
            progress("compiling for the simulator", len(kernels)) as advance,
            ThreadPoolExecutor(os.cpu_count()) as pool,
        ):
            for _ in pool.map(lambda kernel: compile_library(*kernel), kernels):
                advance()
    except CompilerMissingError as error:
        raise ToolchainFailure(str(error)) from None
