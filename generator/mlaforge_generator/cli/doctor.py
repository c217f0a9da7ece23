"""`doctor`: what of this machine works."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from .group import DeviceFailure, ToolchainFailure, cli
from .output import make_console, print_json, status

if TYPE_CHECKING:
    from mlaforge.doctor import Diagnosis

_STYLES = {"ok": "green", "warning": "yellow", "missing": "bold red"}


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def doctor(as_json: bool) -> None:
    """Say what works on this machine, what is missing, and how to get it.

    The driver and its GPUs, torch, NVRTC and the headers that it needs, with a compile to see that they fit each other,
    the cache and the host's compiler for the simulator. The exit code is 3 if kernels can't be compiled, else 4 if they
    can't run on a Hopper GPU; what only the simulator, the reports and the cache need changes it not.
    """
    from mlaforge.doctor import diagnose

    with status("looking, and compiling a kernel"):
        diagnosis = diagnose()
    if as_json:
        print_json(
            {
                "compiles": diagnosis.compiles,
                "runs": diagnosis.runs,
                "simulates": diagnosis.simulates,
                "checks": [dataclasses.asdict(check) for check in diagnosis.checks],
            }
        )
    else:
        _show(diagnosis)
    if not diagnosis.compiles:
        raise ToolchainFailure("kernels can't be compiled here")
    if not diagnosis.runs:
        where = "under the simulator" if diagnosis.simulates else "nowhere here"
        raise DeviceFailure(f"kernels can be compiled here, and run {where}: there is no Hopper GPU that torch can use")


def _show(diagnosis: Diagnosis) -> None:
    from rich.text import Text

    width = max(len(check.name) for check in diagnosis.checks)
    console = make_console()
    for check in diagnosis.checks:
        line = Text(f"{check.state:<9}", style=_STYLES[check.state])
        line.append(f"{check.name:<{width}}  {check.found}", style="default")
        # Paths are to be copied: the terminal wraps them, and nothing is cut.
        console.print(line, soft_wrap=True)
        if check.fix:
            console.print(Text(f"{'':<9}{'':<{width}}  -> {check.fix}"), soft_wrap=True)
    can = {"compile": diagnosis.compiles, "run on a GPU": diagnosis.runs, "run simulated": diagnosis.simulates}
    click.echo("kernels " + ", ".join(f"{'can' if works else 'can not'} {what}" for what, works in can.items()))
