"""`report`: all that is known of a spec's kernels, as a page."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlaforge import __version__

from ..emit import write_folder
from ..plan import Plan
from ..render import render
from . import devices
from .compile import compile_folders, compile_json
from .group import COUNT, Failure, UsageFailure, cli
from .inputs import complete_spec, make_plans
from .make import compile_for_the_simulator
from .output import print_json, replace_text, status, writing
from .verify import Run, check_absorption_of, verify_folder

if TYPE_CHECKING:
    from mlaforge.compiler import CompiledKernel
    from mlaforge.manifest import Manifest
    from mlaforge.trace import Timeline

    from ..report import Compiled, Edge, Verification


@cli.command()
@click.argument("spec", shell_complete=complete_spec)
@click.option(
    "-o",
    "--output",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where the page goes.  [default: the spec's name + .html]",
)
@click.option("--verify", "verifies", is_flag=True, help="Also verify, on a Hopper GPU or else under the simulator.")
@click.option("--examples", type=COUNT, help="Random problems to verify; 200 on a GPU, 12 under the simulator.")
@click.option("--seed", type=int, default=0, show_default=True, help="Which random problems.")
@click.option(
    "--bench",
    "folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Also draw the results of benches of this spec: the JSON files in DIR.",
)
@click.option("--timeline/--no-timeline", default=True, help="Whether a block is simulated and drawn.  [default: yes]")
@click.option("--json", "as_json", is_flag=True, help="Print what the page shows as JSON; the page is written, too.")
def report(
    spec: str,
    file: Path | None,
    verifies: bool,
    examples: int | None,
    seed: int,
    folder: Path | None,
    timeline: bool,
    as_json: bool,
) -> None:
    """Write a page about a spec's kernels: one HTML file that fetches nothing.

    The plan as pictures (shared memory, pipeline, registers), the compiled kernels' resources, the timeline of a
    simulated block and, if asked for, a verification and the results of benches. Needs no GPU; the timeline needs the
    host's C++ compiler, and the page says so where there is none.
    """
    from ..report import ResultsError, read_results, report_page

    (made,) = make_plans([spec])
    try:
        results = None if folder is None else read_results(folder, made.spec.name)
    except ResultsError as error:
        raise UsageFailure(str(error)) from None
    path = file or Path(f"{made.spec.name}.html")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mlaforge-") as scratch:
        kernels = Path(scratch) / made.spec.name
        write_folder(kernels, render(made))
        compiled = compile_folders([kernels])
        drawn = _draw(made, kernels) if timeline else _Drawn(why="Left out by --no-timeline.")
        verified = _verify(made, kernels, examples, seed) if verifies else None
    page = report_page(
        made,
        [each for manifest, kernel in compiled for each in _resources(manifest, kernel)],
        compiled[0][1].versions,
        made_by=f"mlaforge {__version__}",
        verification=None if verified is None else _as_shown(verified),
        timeline=drawn.picture,
        no_timeline=drawn.why,
        traced=drawn.file,
        edges=drawn.edges,
        results=results,
    )
    replace_text(path, page)
    if as_json:
        print_json(
            {
                "file": str(path),
                "plan": made.to_json(),
                "kernels": [compile_json(manifest, kernel) for manifest, kernel in compiled],
                "timeline": {
                    "kernel": drawn.file or None,
                    "why_none": drawn.why or None,
                    "pipeline": [
                        {"role": edge.role, "action": edge.action, "mbarrier": edge.mbarrier} for edge in drawn.edges
                    ],
                },
                "verification": verified and verified.results,
                "benches": None if results is None else sorted(results),
            }
        )
    else:
        click.echo(f"{path}: {len(page.encode()):,} bytes")
    if verified is not None and verified.failed:
        raise Failure(verified.failed)
    if drawn.fault:
        raise Failure(f"{spec}: {drawn.fault}")


def _resources(manifest: Manifest, kernel: CompiledKernel) -> Iterator[Compiled]:
    from ..report import Compiled

    for each in kernel.kernels.values():
        yield Compiled(
            entry=each.entry,
            registers=each.registers,
            spills=each.spill_stores + each.spill_loads,
            stack=each.stack_frame,
            static_smem=each.static_smem,
            dynamic_smem=manifest.dynamic_smem[kernel.source],
            cubin=len(kernel.cubin),
            sass=each.sass or {},
            serialized=each.serialized,
            seconds=kernel.seconds.get("nvrtc"),
        )


# ---- Timeline --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Drawn:
    """A timeline, or why there is none."""

    why: str = ""
    file: str = ""
    picture: str | None = None
    edges: tuple[Edge, ...] = ()
    fault: str = ""


_MOST_HEADS = 64
"""More take several row tiles, which do the same."""


def _draw(made: Plan, folder: Path) -> _Drawn:
    devices.require_torch()
    from mlaforge.manifest import read_manifest
    from mlaforge.simulator import CompilerMissingError, SimulatorOptions
    from mlaforge.trace import default_problem, to_svg, trace_decode

    heads = min(made.spec.heads_per_rank, _MOST_HEADS)
    try:
        with status("running a block under the simulator"):
            problem = default_problem(read_manifest(folder), heads)
            timeline = trace_decode(folder, problem, SimulatorOptions(sms=1))
    except CompilerMissingError as error:
        return _Drawn(why=f"None: the simulator can't run here. {error}")
    kernel = made.decode_for(heads)
    groups = {
        f"{each.name} {i}" if each.count > 1 else each.name: each.name
        for each in kernel.mbarriers
        for i in range(each.count)
    }
    edges = tuple(sorted(_edges(timeline, groups)))
    return _Drawn(file=kernel.file, picture=to_svg(timeline), edges=edges, fault=timeline.fault or "")


def _edges(timeline: Timeline, groups: Mapping[str, str]) -> set[Edge]:
    """Tell who did what with which group of mbarriers, copies by their issuer. `groups` has the group of a barrier."""
    from ..report import Edge

    copies, others = set(), set()
    for lane in timeline.warps:
        for flight in lane.flights:
            if flight.kind == "copy" and (name := groups.get(str(flight.details["mbarrier"]))):
                copies.add(Edge(lane.group, "copies", name))
        for span in lane.spans:
            if span.kind == "wait" and span.name in groups:
                others.add(Edge(lane.group, "waits", groups[span.name]))
        for mark in lane.marks:
            if mark.name in groups:
                others.add(Edge(lane.group, "arrives", groups[mark.name]))
    # Who copies arrives once, to say how many bytes are to come.
    return copies | {
        edge for edge in others if Edge(edge.role, "copies", edge.mbarrier) not in copies or edge.action == "waits"
    }


# ---- Verification ----------------------------------------------------------------------------------------------------


@dataclass
class _Verified:
    """What a verification came to."""

    where: str
    results: list[dict[str, Any]] = field(default_factory=list)
    failed: str = ""


def _verify(made: Plan, folder: Path, examples: int | None, seed: int) -> _Verified:
    devices.require_torch()
    device, where = "cuda", "on this machine's GPU"
    if reason := devices.why_no_hopper("cuda"):
        device, where = "sim", f"under the simulator, for there was {reason.removesuffix(' found')}"
        compile_for_the_simulator(folder)
    verified = _Verified(where)
    try:
        check_absorption_of(made.spec.model, verified.results)
        verify_folder(made.spec.name, folder, Run(seed, examples, device=device, results=verified.results))
    except Failure as failure:
        # The page shows it. What did not run at all has an exit code of its own and no page.
        if failure.exit_code != Failure.exit_code:
            raise
        verified.failed = failure.message
    return verified


def _as_shown(verified: _Verified) -> Verification:
    from ..report import Checked, Verification

    rows: list[Checked] = []
    failures: list[str] = []
    for result in verified.results:
        kernel = ", ".join(result["kernels"])
        if "cosines" in result:
            figures = ", ".join(f"1 - cosine {1 - value:.1e} in {name}" for name, value in result["cosines"].items())
            rows.append(Checked(kernel, "naive and absorbed scores", 0, figures, result["ok"]))
            continue
        failure = result["failure"]
        of_problem = failure["problem"].split(" ", 1)[0] if failure else ""
        for kind, worst in sorted(result["worst"].items()):
            moves = "used" in worst
            ok = not (failure and of_problem == kind) if moves else not worst["failures"]
            name, words = (kind, "all") if moves else (kernel, kind)
            rows.append(Checked(name, words, result["counts"][kind], _figures(worst), ok))
        if failure:
            failures.append("\n".join([*failure["failures"], f"reproduce: {failure['reproduce']}"]))
    if verified.failed and not failures:
        failures.append(verified.failed)
    return Verification(verified.where, rows, failures)


def _figures(worst: Mapping[str, Any]) -> str:
    if "used" in worst:
        return f"{worst['used']:.1%} of the tolerance" if worst["used"] else "the same bits"
    return f"|out - ref| {worst['out_abs']:.1e}, 1 - cosine {worst['cosine']:.1e}, |lse - ref| {worst['lse_abs']:.1e}"
