"""A plan as tables for a person."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .block import SmemMap
from .cost import CacheSize, DecodeCost, PrefillCost, binary_bytes, decimal_bytes
from .memory_plan import MemoryPlan
from .plan import DecodePlan, Plan
from .prefill_plan import PrefillPlan
from .target import Target


def table(title: str, columns: Iterable[str], rows: Iterable[Sequence[object]], caption: str | None = None) -> Table:
    """Make a table. A column whose name ends in `>` is aligned to the right; cells are printed as they are."""
    made = Table(
        title=Text(f"\n{title}"),
        caption=caption and Text(caption),
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        pad_edge=False,
    )
    for column in columns:
        made.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return made


def summary(plan: Plan) -> str:
    """Say a plan in a line."""
    spec = plan.spec
    decode = plan.decode
    return (
        f"{spec.name}: d_qk {spec.d_qk}, d_v {spec.d_v}, {spec.heads_per_rank} heads, {spec.cache.dtype} cache of "
        f"{spec.row_bytes} B a token in pages of {spec.cache.page_size}; tiles of {decode.tile.rows} x "
        f"{decode.tile.tokens}, {decode.tile.stages} stages, {decode.smem.total:,} of {decode.smem.limit:,} B of "
        "shared memory"
    )


_COST_COLUMNS = (
    "batch>",
    "context>",
    "s_q>",
    "heads>",
    "traffic>",
    "partial>",
    "GFLOP>",
    "padded>",
    "FLOP/B>",
    "padded>",
    "floor, us>",
    "bound by",
)


def plan_tables(
    plan: Plan,
    costs: Sequence[DecodeCost],
    prefill_costs: Sequence[PrefillCost],
    sizes: Sequence[CacheSize],
    workload: str,
    fits: int,
) -> Iterator[RenderableType]:
    """Give a plan section by section.

    Args:
        plan: the plan.
        costs: of decode calls.
        prefill_costs: of prefill calls; none without such a kernel.
        sizes: of caches.
        workload: in words what `sizes` were worked out for.
        fits: cached tokens that the target's memory holds.
    """
    spec, target = plan.spec, plan.target
    yield Text(summary(plan), style="bold")
    yield Text(f"softmax_scale {plan.softmax_scale:.6f}; target {target.arch}, {target.name}, {target.sms} SMs\n")
    if plan.choices:
        yield table(
            "Left to the planner", ("field", "chosen", "why"), ((c.field, c.value, c.why) for c in plan.choices)
        )
    for each in reversed(plan.decodes):
        if plan.narrow_decodes:
            what = f"{each.file}: schedule {each.schedule_name}, tiles of {each.tile.rows} x {each.tile.tokens}"
            yield Text(f"\n{what}", style="bold")
        yield from _kernel_tables(each, target)
    yield table(
        "Launch",
        ("kernel", "threads>", "grid"),
        (
            *((each.entry, each.launch.threads, ", ".join(each.launch.grid)) for each in reversed(plan.decodes)),
            *((kernel.entry, kernel.threads, ", ".join(kernel.grid)) for kernel in plan.kernels),
        ),
    )
    many = 100_000
    yield table(
        f"Memory-bound kernels on copies of {target.copy_bandwidth / 1e12:.2f} TB/s",
        ("kernel", "does", "a warp has", "bytes of one>", f"floor of {many:,}, us>"),
        (
            (
                kernel.name,
                kernel.what,
                f"{kernel.units_per_warp} x {kernel.unit}",
                f"{kernel.unit_bytes:,}",
                f"{kernel.floor_us(many, target):.1f}",
            )
            for kernel in plan.kernels
            if isinstance(kernel, MemoryPlan)
        ),
    )
    yield from _split_scheme(plan.decode)
    for kernel in plan.kernels:
        if isinstance(kernel, PrefillPlan):
            yield from _prefill_tables(kernel, target)
    yield _decode_table(costs, target)
    if prefill_costs:
        yield _prefill_table(prefill_costs, target)
    yield table(
        f"Key-value cache, {workload}, 16-bit elements" + ("" if spec.layout is None else " or the format named"),
        ("attention", "elements of a token and layer", "bytes>", "total, B>", "decimal>", "binary>"),
        (
            (s.kind, s.what, f"{s.token_layer:,}", f"{s.total:,}", decimal_bytes(s.total), binary_bytes(s.total))
            for s in sizes
        ),
        caption=None if spec.tensor_parallel == 1 else "of all ranks together; each rank holds all of MLA's",
    )
    yield Text(
        f"\n{decimal_bytes(target.memory)} hold a context of {fits:,} tokens of {spec.row_bytes} B in each of these "
        "layers, of all requests together, if nothing else is there."
    )


def _split_scheme(decode: DecodePlan) -> Iterator[RenderableType]:
    policy = decode.schedule
    yield Text("\nSplit scheme", style="bold")
    yield Text(
        f"Requests lie on a line, each its {decode.tile.tokens}-token blocks + {policy.fixed_overhead_blocks} long. "
        f"The line is cut evenly over grid.y parts of {policy.min_part_blocks} block or more. A cut within "
        f"{policy.snap_blocks} of a request's end moves there, any other splits the request: the parts that share it "
        "merge their results. Each block works this out from cache_seqlens.\n"
    )


def _rates(target: Target) -> str:
    return f"{target.read_bandwidth / 1e12:.2f} TB/s and {target.matrix_rate / 1e12:.0f} TFLOP/s"


def _prefill_table(costs: Sequence[PrefillCost], target: Target) -> Table:
    return table(
        f"Prefill calls on {_rates(target)}, causal, all keys new",
        ("batch>", "tokens>", "heads>", "traffic>", "GFLOP>", "padded>", "FLOP/B>", "floor, us>", "bound by"),
        (
            (
                f"{cost.batch:,}",
                f"{cost.tokens:,}",
                cost.heads,
                decimal_bytes(cost.io_bytes),
                f"{cost.flops / 1e9:.4g}",
                f"{cost.padded_flops / 1e9:.4g}",
                f"{cost.intensity:.1f}",
                f"{cost.floor_us:.1f}",
                cost.bound,
            )
            for cost in costs
        ),
        caption="traffic: q, k, v, out and lse, once; padded: rows filled up to 64, tokens up to blocks",
    )


def _decode_table(costs: Sequence[DecodeCost], target: Target) -> Table:
    return table(
        f"Decode calls on {_rates(target)}",
        _COST_COLUMNS,
        (
            (
                f"{cost.batch:,}",
                f"{cost.context:,}",
                cost.s_q,
                cost.heads,
                decimal_bytes(cost.bytes),
                decimal_bytes(cost.partial_bytes),
                f"{cost.flops / 1e9:.4g}",
                f"{cost.padded_flops / 1e9:.4g}",
                f"{cost.intensity:.1f}",
                f"{cost.padded_intensity:.1f}",
                f"{cost.floor_us:.1f}",
                cost.bound,
            )
            for cost in costs
        ),
        caption="partial: results of split requests, written and read, mostly in L2; padded: rows filled up to tiles",
    )


def _kernel_tables(kernel: DecodePlan | PrefillPlan, target: Target) -> Iterator[RenderableType]:
    yield _smem_table(kernel.smem)
    yield table(
        "mbarriers",
        ("name", "count>", "arrivals>", "TMA bytes>", "completes when"),
        ((m.name, m.count, m.arrivals, f"{m.bytes:,}" if m.bytes else "-", m.what) for m in kernel.mbarriers),
    )
    yield table(
        "Named barriers",
        ("constant", "ids>", "threads>", "passed when"),
        (
            (n.constant, n.id if n.count == 1 else f"{n.id}..{n.id + n.count - 1}", n.threads, n.what)
            for n in kernel.named_barriers
        ),
    )
    yield table(
        "Tensor maps",
        ("parameter", "tensor", "dimensions, innermost first", "box>", "swizzle"),
        (
            (t.parameter, t.tensor, ", ".join(t.dims), " x ".join(map(str, t.box)), f"{t.swizzle_bytes} B")
            for t in kernel.tensor_maps
        ),
    )
    used = sum(role.warps * 32 * role.registers for role in kernel.roles)
    yield table(
        "Warps",
        ("role", "warps>", "registers>", "does"),
        ((role.name, role.warps, role.registers, role.what) for role in kernel.roles),
        caption=f"{used:,} of the SM's {target.registers_per_sm:,} registers",
    )
    available = {role.name: role.registers for role in kernel.roles}
    for name in dict.fromkeys(use.role for use in kernel.registers):
        uses = [use for use in kernel.registers if use.role == name]
        yield table(
            f"Registers of a thread of {name}, estimated",
            ("for", "registers>"),
            [*((use.what, use.registers) for use in uses), ("all", sum(use.registers for use in uses))],
            caption=f"{available[name]} are there",
        )


def _prefill_tables(prefill: PrefillPlan, target: Target) -> Iterator[RenderableType]:
    tile = prefill.tile
    yield Text("\nPrefill", style="bold")
    yield Text(
        f"d_qk {prefill.d_qk}, d_v {prefill.d_v}; tiles of {tile.rows} x {tile.tokens}, {tile.stages} stages, "
        f"{tile.queries} of Q. Blocks take tiles from a counter: of each sequence in sections of heads whose K and V "
        f"are {prefill.section_tokens:,} tokens together, those with the most work first."
    )
    yield from _kernel_tables(prefill, target)


def _smem_table(smem: SmemMap) -> Table:
    rows: list[tuple[object, ...]] = []
    for region in sorted(smem.regions, key=lambda r: (r.offset, r.alias_of is not None)):
        what = region.what if region.alias_of is None else f"{region.what}; in the bytes of {region.alias_of}"
        name = region.name if region.alias_of is None else f"  {region.name}"
        rows.append((f"{region.offset:,}", f"{region.size:,}", name, what))
    return table(
        "Shared memory, bytes",
        ("offset>", "size>", "region", "holds"),
        rows,
        caption=f"{smem.total:,} of {smem.limit:,} B, {smem.limit - smem.total:,} B to spare",
    )
