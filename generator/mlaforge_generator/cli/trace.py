"""`trace`: the timeline of a simulated block."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from . import devices
from .group import COUNT, Failure, ToolchainFailure, UsageFailure, cli
from .inputs import complete_spec, make_folders
from .output import print_json, status, writing
from .verify import parse_decode_problem


class _Block(click.ParamType[tuple[int, int, int]]):
    """Three numbers with commas between."""

    name = "X,Y,Z"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int, int]:
        """Read the numbers."""
        if isinstance(value, tuple):
            return value
        try:
            x, y, z = map(int, value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not three numbers, as in 0,1,0", param, ctx)
        return x, y, z


@cli.command()
@click.argument("spec", metavar="SPEC|DIR", shell_complete=complete_spec)
@click.option(
    "-o",
    "--output",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where the picture goes, an SVG.  [default: the spec's name + .trace.svg]",
)
@click.option(
    "--perfetto",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write a trace for ui.perfetto.dev or chrome://tracing, as JSON.",
)
@click.option(
    "--problem", "text", metavar="TEXT", help="The problem, as in --problem of verify.  [default: two short requests]"
)
@click.option(
    "--mode",
    type=click.Choice(["eager", "lazy", "random"]),
    default="random",
    show_default=True,
    help="When asynchronous operations land.",
)
@click.option("--schedule-seed", type=int, default=0, show_default=True, help="The order of everything.")
@click.option("--block", type=_Block(), default="0,0,0", show_default=True, help="The block to draw.")
@click.option("--sms", type=COUNT, default=1, show_default=True, help="Multiprocessors that the requests are cut over.")
@click.option("--json", "as_json", is_flag=True, help="Print the files' names and what is in them as JSON.")
def trace(
    spec: str,
    file: Path | None,
    perfetto: Path | None,
    text: str | None,
    mode: str,
    schedule_seed: int,
    block: tuple[int, int, int],
    sms: int,
    as_json: bool,
) -> None:
    """Draw the timeline of one block of the decode kernel.

    Runs a small problem under the simulator and draws who issues, waits and computes, and the life of the buffers.
    Steps of the simulator are no cycles: the picture shows an order, not a speed.
    """
    with tempfile.TemporaryDirectory(prefix="mlaforge-") as scratch:
        (folder,) = make_folders([spec], Path(scratch))
        problem = parse_decode_problem(text) if text is not None else None
        devices.require_torch()
        from mlaforge.simulator import CompilerMissingError, SimulatorOptions
        from mlaforge.trace import to_perfetto, to_svg, trace_decode

        options = SimulatorOptions(seed=schedule_seed, mode=mode, sms=sms, trace_block=block)
        try:
            with status("running under the simulator"):
                timeline = trace_decode(folder, problem, options)
        except CompilerMissingError as error:
            raise ToolchainFailure(str(error)) from None
        except ValueError as error:
            raise UsageFailure(str(error)) from None
    pictures = [(file or Path(f"{folder.resolve().name}.trace.svg"), to_svg(timeline))]
    if perfetto is not None:
        pictures.append((perfetto, to_perfetto(timeline)))
    for path, content in pictures:
        with writing(path):
            path.write_text(content, encoding="utf-8")
        if not as_json:
            click.echo(f"{path}: {timeline.title}; {timeline.steps:,} steps")
    if as_json:
        lanes = {"warps": timeline.warps, "buffers": timeline.buffers}
        print_json(
            {
                "files": [str(path) for path, _ in pictures],
                "title": timeline.title,
                "steps": timeline.steps,
                "fault": timeline.fault,
                **{kind: [{"name": lane.name, "group": lane.group} for lane in of] for kind, of in lanes.items()},
            }
        )
    if timeline.fault is not None:
        raise Failure(f"{spec}: {timeline.fault}")
