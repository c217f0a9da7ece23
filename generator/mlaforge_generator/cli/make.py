"""`make`: the whole job."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from . import devices
from .compile import compile_folders, compile_tables
from .group import COUNT, cli
from .inputs import complete_spec, make_plans, write_generated
from .output import print_parts, progress
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
def make(spec: str, output: Path, examples: int | None, seed: int) -> None:
    """Do the whole job, from spec to verified kernel.

    Plans, generates, compiles and reports; then verifies, on a Hopper GPU or else under the simulator.
    """
    from ..tables import summary

    (made,) = make_plans([spec])
    click.echo(summary(made))
    folder = write_generated(made, output)
    print_parts(compile_tables(compile_folders([folder])))
    devices.require_torch()
    check_absorption_of(made.spec.model)
    device = "cuda"
    if reason := devices.why_no_hopper("cuda"):
        click.echo(f"{reason}: the kernels were compiled for it, and their text now runs on the CPU, simulated")
        device = "sim"
        compile_for_the_simulator(folder)
    verify_folder(spec, folder, Run(seed, examples, device=device))


def compile_for_the_simulator(folder: Path) -> None:
    """Compile a folder's kernels for the CPU, side by side: one after the other takes longer than to run them."""
    from mlaforge.manifest import read_manifest
    from mlaforge.simulator import compile_library

    manifest = read_manifest(folder)
    kernels = [(each.source, each.entry) for each in manifest.decodes]
    kernels += [(each.source, each.entry) for each in manifest.kernels.values()]
    with progress("compiling for the simulator", len(kernels)) as advance, ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda kernel: compile_library(*kernel), kernels):
            advance()
