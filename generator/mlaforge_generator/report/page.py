"""The page itself: what the template is given."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jinja2
from markupsafe import Markup

from ..block import Mbarrier, NamedBarrier, RegisterUse, SmemMap, TensorMap, WarpRole
from ..memory_plan import MemoryPlan
from ..plan import DecodePlan, Plan
from ..prefill_plan import PrefillPlan
from ..resources import template_dir
from ..spec import dump_spec
from .pictures import smem_picture, warps_picture
from .pipeline import Edge, pipeline_picture
from .plots import Plot, plots
from .results import Result
from .svg import embed


@dataclass(frozen=True)
class Compiled:
    """What the assembler made of one kernel. Memory in bytes."""

    entry: str
    registers: int
    spills: int
    stack: int
    static_smem: int
    dynamic_smem: int
    cubin: int
    sass: Mapping[str, int]
    serialized: bool
    seconds: float | None
    """NVRTC's, when the cubin was made."""


@dataclass(frozen=True)
class Checked:
    """One kind of problems of a verification."""

    kernel: str
    kind: str
    problems: int
    figures: str
    ok: bool


@dataclass(frozen=True)
class Verification:
    """What came of `mlaforge verify`."""

    where: str
    """The GPU, or the simulator."""
    rows: Sequence[Checked]
    failures: Sequence[str]
    """What was not accepted, each with the line that replays it; none if all is well."""


@dataclass(frozen=True)
class _Kernel:
    """A kernel that multiplies, drawn."""

    file: str
    entry: str
    words: str
    smem: SmemMap
    smem_picture: Markup
    warps_picture: Markup
    pipeline: Markup | None
    roles: Sequence[WarpRole]
    mbarriers: Sequence[Mbarrier]
    named_barriers: Sequence[NamedBarrier]
    tensor_maps: Sequence[TensorMap]
    registers: Sequence[RegisterUse]
    threads: int
    grid: Sequence[str]


@dataclass(frozen=True)
class _Benched:
    file: str
    result: Result
    plots: Sequence[Plot]


def report_page(
    plan: Plan,
    compiled: Sequence[Compiled],
    versions: Mapping[str, str],
    *,
    made_by: str,
    verification: Verification | None = None,
    timeline: str | None = None,
    no_timeline: str = "",
    traced: str = "",
    edges: Sequence[Edge] = (),
    results: Mapping[str, Result] | None = None,
) -> str:
    """Give the text of the page.

    Args:
        plan: of the spec.
        compiled: the kernels' resources, in the plan's order.
        versions: of the toolchain.
        made_by: the program and its version.
        verification: None if none was asked for.
        timeline: an SVG as the runtime draws it, None if there is none.
        no_timeline: why there is none.
        traced: file of the kernel in the timeline.
        edges: of that kernel's pipeline.
        results: benches by file; None if none were asked for.
    """
    kernels = [_decode(plan, each, edges if each.file == traced else ()) for each in reversed(plan.decodes)]
    kernels += [_prefill(plan, each) for each in plan.kernels if isinstance(each, PrefillPlan)]
    return (
        _environment()
        .get_template("report/page.html.j2")
        .render(
            plan=plan,
            spec=plan.spec,
            spec_text=dump_spec(plan.spec),
            kernels=kernels,
            memory_kernels=[each for each in plan.kernels if isinstance(each, MemoryPlan)],
            compiled=compiled,
            versions=versions,
            made_by=made_by,
            verification=verification,
            timeline=embed(timeline, "timeline") if timeline is not None else None,
            no_timeline=no_timeline,
            benched=None
            if results is None
            else [_Benched(file, result, plots(result)) for file, result in results.items()],
            style=Markup((template_dir() / "report" / "style.css").read_text(encoding="utf-8")),
        )
    )


def _decode(plan: Plan, kernel: DecodePlan, edges: Sequence[Edge]) -> _Kernel:
    tile = kernel.tile
    return _Kernel(
        file=kernel.file,
        entry=kernel.entry,
        words=f"absorbed decode, schedule {kernel.schedule_name}, tiles of {tile.rows} x {tile.tokens}, "
        f"{tile.stages} stages",
        smem=kernel.smem,
        smem_picture=smem_picture(kernel.smem, f"{kernel.file}: shared memory of a block"),
        warps_picture=warps_picture(kernel.roles, plan.target.registers_per_sm, f"{kernel.file}: warps of a block"),
        pipeline=pipeline_picture(kernel.roles, kernel.mbarriers, edges, f"{kernel.file}: pipeline") if edges else None,
        roles=kernel.roles,
        mbarriers=kernel.mbarriers,
        named_barriers=kernel.named_barriers,
        tensor_maps=kernel.tensor_maps,
        registers=kernel.registers,
        threads=kernel.launch.threads,
        grid=kernel.launch.grid,
    )


def _prefill(plan: Plan, kernel: PrefillPlan) -> _Kernel:
    tile = kernel.tile
    return _Kernel(
        file=kernel.file,
        entry=kernel.entry,
        words=f"decompressed prefill, d_qk {kernel.d_qk}, d_v {kernel.d_v}, tiles of {tile.rows} x {tile.tokens}, "
        f"{tile.stages} stages",
        smem=kernel.smem,
        smem_picture=smem_picture(kernel.smem, f"{kernel.file}: shared memory of a block"),
        warps_picture=warps_picture(kernel.roles, plan.target.registers_per_sm, f"{kernel.file}: warps of a block"),
        pipeline=None,
        roles=kernel.roles,
        mbarriers=kernel.mbarriers,
        named_barriers=kernel.named_barriers,
        tensor_maps=kernel.tensor_maps,
        registers=kernel.registers,
        threads=kernel.threads,
        grid=kernel.grid,
    )


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_dir()),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["count"] = lambda number: f"{number:,}"
    return environment
