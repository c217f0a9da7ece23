"""Every number that a kernel needs, worked out from a spec: templates print them and the runtime obeys them.

The planner is where hardware limits live. A spec that no kernel can serve gives a SpecError at the field to change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from .block import (
    LINE,
    SUBTILE_COLUMNS,
    Mbarrier,
    NamedBarrier,
    RegisterLimit,
    RegisterUse,
    SmemMap,
    SmemRegion,
    TensorMap,
    WarpRole,
)
from .cache_layout import CacheLayout
from .errors import Problem, SpecError
from .kernel_plan import ELEMENT_BYTES, ELEMENTS, Choice, KernelPlan, Parameter, divisor
from .kernels import plan_kernels
from .memory_plan import CODES, row_parts, scale_group, tensor_scale
from .spec import Spec
from .target import TARGETS, Target

MAX_PARTS = 144
"""Parts of the grid, kMaxSplits of splits.cuh; no Hopper GPU has more SMs."""
MAX_STAGES = 6
"""More stages than this were never needed to keep the memory busy."""
SHARING_LOADERS = 2
"""Warps that share a tile's copies where there are more than one for each of its subtiles."""
GATHERED_PAGE_SIZES = (1,)
"""Pages for which TMA is too slow however many warps issue it; the code for threads has one token in a page."""
D_V_CHOICES = (128, 256, 384, 512)
"""Widths of V whose halves are multiples of a subtile and a WGMMA shape."""


@dataclass(frozen=True)
class Tile:
    """What a block works on at a time."""

    rows: int
    """Rows of Q, query tokens x heads."""
    tokens: int
    """Cached tokens in a stage."""
    stages: int
    """Tiles in shared memory at once."""
    subtiles: int
    """Subtiles of 64 columns in a row of K; the last may be part zeros."""
    rope_subtiles: int
    """Those of them behind V."""
    box_tokens: int
    """Tokens that one TMA copy brings."""
    rope_stages: int
    """The same as stages of the columns behind V alone, which are done with as soon as the scores are."""
    readers: int = 2
    """Warpgroups that multiply P with a tile."""
    items: int = 1
    """Items of work that are known ahead; 1 where every role finds its own."""
    exchanges: int = 1
    """Tiles of P in shared memory."""
    shared: bool = False
    """One buffer is the second of either, P or the columns behind V, as the kernel chooses."""
    strip: int = 0
    """Columns of O that the warpgroup of the scores accumulates, the last ones, where the rest has one of its own."""
    loaders: int = 1
    """Warps that bring a tile of K, or, in the skewed schedule, its columns of V."""
    gathered: bool = False
    """Their threads copy the tokens, each from a page of its own, instead of TMA."""
    ring_subtiles: int = 0
    """Subtiles of K in shared memory, where each is loaded and given back by itself; `stages` whole tiles of them."""
    operands: int = 0
    """Pairs of A operands, widened from codes, in a warpgroup's registers."""
    batch: int = 0
    """Of these, whose products are issued together."""
    loads_ahead: int = 1
    """Matrix loads of codes that are under way while those before are widened, for the scores."""
    sums: int = 1
    """Of scores in a warpgroup's registers: of products with codes, or of each group under a scale; of the others."""


@dataclass(frozen=True)
class CodedRow:
    """A token's row of a quantised cache, as decode reads it: in lines of 128 bytes, and its scales."""

    format: str
    """As cache.dtype."""
    bytes: int
    code: str
    """The device's name of an element of the latent."""
    code_columns: int
    """Columns of that type with which the row begins: the latent, and the rotary part where it is of the same type."""
    code_lines: int
    rope_lines: int
    """Those of a bf16 rotary part."""
    rope_offset: int
    """Bytes before it."""
    scale_offset: int
    """Bytes before the scales."""
    scale_bytes: int
    """With padding; 0 if a row has none."""
    group: int
    """Elements of the latent under one of them."""
    groups: int
    """Float32 scales of a token, if its columns have several; else 1."""
    blocks: bool
    """They are e4m3, and elements of 16 bits hold their products with codes; else float32."""
    scale_stages: int
    """Tiles whose scales are in shared memory at once."""
    scale_box_bytes: int
    """Bytes in shared memory for the scales that one TMA copy brings."""
    tensor_scale: bool

    @property
    def lines(self) -> int:
        """Of a row."""
        return self.code_lines + self.rope_lines


@dataclass(frozen=True)
class Launch:
    """Shape of a launch."""

    threads: int
    grid: tuple[str, ...]
    """Blocks, all of which run at the same time."""
    register_limits: tuple[RegisterLimit, ...]


@dataclass(frozen=True)
class SchedulePolicy:
    """How requests are cut over the parts of the grid; see schedule.cuh."""

    fixed_overhead_blocks: int
    """What a request costs beside its blocks."""
    snap_blocks: int
    """A cut this close to an end of a request moves there."""
    min_part_blocks: int
    """What a part gets at least, on average: a small batch uses fewer parts than the GPU has room for."""


@dataclass(frozen=True)
class DecodePlan:
    """Absorbed attention over the paged latent cache."""

    spec_name: str
    schedule_name: str
    """As in kernels.decode.schedule."""
    template: str
    file: str
    entry: str
    element: str
    d_qk: int
    d_v: int
    page_size: int
    tile: Tile
    smem: SmemMap
    mbarriers: tuple[Mbarrier, ...]
    named_barriers: tuple[NamedBarrier, ...]
    tensor_maps: tuple[TensorMap, ...]
    roles: tuple[WarpRole, ...]
    registers: tuple[RegisterUse, ...]
    launch: Launch
    schedule: SchedulePolicy
    max_parts: int
    """Parts that can share a request: splits.cuh has room for no more."""
    parameters: tuple[Parameter, ...]
    row: CodedRow | None = None
    """What the kernel reads of a quantised cache; None if it reads elements."""


@dataclass(frozen=True)
class Plan:
    """The whole of a spec's kernels."""

    spec: Spec
    target: Target
    softmax_scale: float
    decodes: tuple[DecodePlan, ...]
    """The decode kernels, fewest rows first."""
    kernels: tuple[KernelPlan, ...]
    """The other kernels; see kernels.py."""
    choices: tuple[Choice, ...]

    @property
    def decode(self) -> DecodePlan:
        """The decode kernel that serves any number of rows."""
        return self.decodes[-1]

    @property
    def narrow_decodes(self) -> tuple[DecodePlan, ...]:
        """Those for calls whose rows fit into one narrower tile, fewest rows first."""
        return self.decodes[:-1]

    def decode_for(self, rows: int) -> DecodePlan:
        """Give the decode kernel of a call with so many rows, s_q x heads of a kv head: the runtime's choice."""
        return next((each for each in self.narrow_decodes if rows <= each.tile.rows), self.decode)

    def to_json(self) -> dict[str, Any]:
        """Give the plan as plain data."""
        return {
            "spec": self.spec.model_dump(),
            "target": asdict(self.target),
            "softmax_scale": self.softmax_scale,
            "decode": asdict(self.decode),
            "narrow_decodes": [asdict(each) for each in self.narrow_decodes],
            "kernels": {kernel.name: asdict(kernel) for kernel in self.kernels},
            "choices": [asdict(choice) for choice in self.choices],
        }


def make_plan(spec: Spec) -> Plan:
    """Plan the kernels of a spec; SpecError, with every reason, if it can't be served."""
    target = TARGETS[spec.target]
    problems = list(_shape_problems(spec))
    if problems:
        raise SpecError(problems)
    decodes, choices = _plan_decodes(spec, target)
    kernels, of_kernels = plan_kernels(spec, target)
    return Plan(spec, target, spec.softmax_scale, decodes, kernels, (*choices, *of_kernels))


def _plan_decodes(spec: Spec, target: Target) -> tuple[tuple[DecodePlan, ...], list[Choice]]:
    choices: list[Choice] = []
    options = spec.kernels.decode
    tokens = options.tile_tokens

    schedule: str = options.schedule
    if schedule not in (schedules := _schedules(spec)):
        names = " or ".join(schedules)
        problem = f"no {schedule} kernel reads a cache of {spec.cache.dtype}; got {schedule}; use {names}"
        raise SpecError([spec.problem("kernels.decode.schedule", problem)])
    if schedule == "auto":
        schedule, why = _schedule(spec, target)
        choices.append(Choice("kernels.decode.schedule", schedule, why))
    rows = _tile_rows(spec, schedule) if options.tile_rows == "auto" else options.tile_rows
    if rows not in tile_rows(spec, schedule):
        raise SpecError([_not_these_rows(spec, schedule, rows)])
    stages = _stages(spec, schedule, rows, tokens, target)
    if stages is None:
        raise SpecError([_no_stages(spec, schedule, rows, tokens, target)])
    decode = _decode(spec, target, "decode", schedule, rows, tokens, stages)

    narrow: list[DecodePlan] = []
    if options.schedule == options.tile_rows == "auto":
        for few in (each for each in _auto_tile_rows(spec, "swapped") if each < rows):
            of_few = _narrow_schedule(spec, few, target, at_most=True)
            fewer = _stages(spec, of_few, few, tokens, target, at_most=True)
            if fewer is not None:
                narrow.append(_decode(spec, target, f"decode_{few}", of_few, few, tokens, fewer))
    if options.tile_rows == "auto":
        why = "M of WGMMA; fewer rows are padded"
        if schedule in ("swapped", "stored"):
            why = f"N of WGMMA, for {spec.heads_per_rank} heads"
            if options.schedule == "auto":
                why = "N of WGMMA; of many rows several tiles"
        elif narrow:
            why = "M of WGMMA; for calls of few rows N of it: less padding"
        rows_of_all = ", ".join(str(each.tile.rows) for each in (decode, *reversed(narrow)))
        choices.append(Choice("kernels.decode.tile_rows", rows_of_all, why))
    if options.stages == "auto":
        why = f"as many tiles as fit in {target.smem_per_block:,} B, at most {MAX_STAGES}"
        stages_of_all = ", ".join(str(each.tile.stages) for each in (decode, *reversed(narrow)))
        choices.append(Choice("kernels.decode.stages", stages_of_all, why))
    choices.append(_loader_choice(spec, tokens))
    return (*narrow, decode), choices


def _schedules(spec: Spec) -> tuple[str, ...]:
    """Name the schedules that read the cache."""
    if spec.layout is None:
        return ("auto", *TILE_ROWS)
    # What is stored is an fp16 whatever the scale is, and no code is a NaN.
    return ("auto", *CODED_TILE_ROWS) if spec.layout.scales == "e4m3" else ("auto", "swapped")


def _tile_rows(spec: Spec, schedule: str) -> int:
    """Choose the rows of a tile: the fewest that hold a token's heads, or the most where others take calls of fewer."""
    allowed = _auto_tile_rows(spec, schedule)
    if spec.kernels.decode.schedule == "auto":
        return allowed[-1]
    return next((rows for rows in allowed if spec.heads_per_rank <= rows), allowed[-1])


def _decode(spec: Spec, target: Target, name: str, schedule: str, rows: int, tokens: int, stages: int) -> DecodePlan:
    chosen = _arrange(spec, schedule, rows, tokens, stages)
    row = coded_row(spec, tokens)
    # Quantised rows come as they lie there, as pairs of bytes.
    columns = "d_qk" if row is None else "row_bytes / 2"
    dims = (columns, "page_size", "kv_heads", "num_blocks")
    maps = [
        TensorMap("q_map", "q", ("d_qk", "s_q x heads_per_kv", "kv_heads", "b"), (64, rows, 1, 1), 128),
    ]
    if not chosen.tile.gathered:
        maps.append(TensorMap("kv_map", "kv_cache", dims, (64, chosen.tile.box_tokens, 1, 1), 128))
    if row is not None and row.scale_bytes:
        box = (row.scale_bytes // ELEMENT_BYTES, chosen.tile.box_tokens, 1, 1)
        maps.append(TensorMap("scales_map", "scales", dims, box, 0))
    return DecodePlan(
        spec_name=spec.name,
        schedule_name=schedule,
        template=f"kernels/decode_{schedule}{'' if row is None else '_quantised'}.cu.j2",
        file=f"{name}.cu",
        entry=f"mla_{name}",
        element=ELEMENTS[spec.element],
        d_qk=spec.d_qk,
        d_v=spec.d_v,
        page_size=spec.cache.page_size,
        tile=chosen.tile,
        smem=SmemMap(chosen.regions, chosen.total, target.smem_per_block),
        mbarriers=chosen.mbarriers,
        named_barriers=chosen.named_barriers,
        tensor_maps=tuple(maps),
        roles=chosen.roles,
        registers=chosen.registers,
        launch=Launch(
            threads=sum(role.warps for role in chosen.roles) * 32,
            grid=("ceil(s_q * heads_per_kv / tile_rows) * kv_heads", f"max(min(SMs / grid.x, {MAX_PARTS}), 1)"),
            register_limits=chosen.register_limits,
        ),
        schedule=SchedulePolicy(fixed_overhead_blocks=5, snap_blocks=1, min_part_blocks=1),
        max_parts=MAX_PARTS,
        parameters=(
            *(_CACHE_PARAMETERS if chosen.tile.gathered else ()),
            *_DECODE_PARAMETERS,
            *tensor_scale(spec.layout),
        ),
        row=row,
    )


_ITEMS = 4
"""Items of work that a walker keeps known ahead."""
_EXCHANGES = 2
"""Tiles of P of the kernel on quantised rows: that of either warpgroup's tile."""
_SCALE_STAGES = 4
"""Tiles' scales: few bytes, so that their loads run ahead of the lines'."""


def coded_row(spec: Spec, tokens: int) -> CodedRow | None:
    """Lay out what decode reads of a row, in tiles of so many tokens; None of a cache of elements."""
    layout: CacheLayout | None = spec.layout
    if layout is None:
        return None
    parts = row_parts(spec, layout)
    coded = [part for part in parts.values() if part.dtype == layout.latent]
    rope = next((part for part in parts.values() if part.dtype == "bf16"), None)
    scales = parts.get("scales")
    scale_bytes = scales.padded_bytes if scales is not None else 0
    group = scale_group(spec, layout)
    return CodedRow(
        format=layout.name,
        bytes=spec.row_bytes,
        code=CODES[layout.latent],
        code_columns=sum(part.elements for part in coded),
        code_lines=-(-sum(part.bytes for part in coded) // LINE),
        rope_lines=-(-rope.bytes // LINE) if rope is not None else 0,
        rope_offset=rope.offset if rope is not None else 0,
        scale_offset=scales.offset if scales is not None else 0,
        scale_bytes=scale_bytes,
        group=group,
        groups=spec.d_v // group if layout.scales == "f32" else 1,
        blocks=layout.scales == "e4m3",
        scale_stages=_SCALE_STAGES if scale_bytes else 1,
        # A copy to shared memory begins at a multiple of 128 bytes.
        scale_box_bytes=max(_box_tokens(spec, tokens) * scale_bytes, 128) if scale_bytes else 0,
        tensor_scale=layout.tensor_scale,
    )


_CACHE_PARAMETERS = (
    Parameter("kv_cache", "const void*"),
    Parameter("kv_stride_page", "int"),
    Parameter("kv_stride_head", "long long"),
)
"""Where threads copy tokens, in place of a tensor map; strides in bytes."""
_OUT_STRIDES = tuple(Parameter(f"out_stride_{dim}", "long long") for dim in "bsh")
_DECODE_PARAMETERS = (
    Parameter("block_table", "const int*"),
    Parameter("table_stride", "long long"),
    Parameter("cache_seqlens", "const int*"),
    Parameter("out", "void*"),
    *_OUT_STRIDES,
    Parameter("lse", "float*"),
    Parameter("partial_out", "float*"),
    Parameter("partial_lse", "float*"),
    Parameter("arrivals", "int*"),
    Parameter("batch", "int"),
    Parameter("s_q", "int"),
    *divisor("heads_per_kv"),
    Parameter("row_tiles", "int"),
    Parameter("table_width", "int"),
    Parameter("causal", "int"),
    Parameter("scale_log2", "float"),
)


def _subtiles(spec: Spec) -> int:
    return -(-spec.d_qk // SUBTILE_COLUMNS)


def _rope_subtiles(spec: Spec) -> int:
    return _subtiles(spec) - spec.d_v // SUBTILE_COLUMNS


def _box_tokens(spec: Spec, tokens: int) -> int:
    return min(spec.cache.page_size, tokens)


def _gathered(spec: Spec) -> bool:
    return spec.layout is None and spec.cache.page_size in GATHERED_PAGE_SIZES


def _loaders(spec: Spec, tokens: int) -> int:
    """Give the warps that bring a tile."""
    return SHARING_LOADERS if spec.layout is None and _box_tokens(spec, tokens) < tokens else 1


def _tile_role(name: str, spec: Spec, tokens: int, registers: int, brings: str, shared: str) -> WarpRole:
    """Give the role of those warps.

    Args:
        name: of one of them; more are in the plural.
        spec: the spec.
        tokens: of a tile.
        registers: of a thread.
        brings: what they bring by TMA.
        shared: what they bring where threads copy it.
    """
    loaders = _loaders(spec, tokens)
    what = f"copies of 16 bytes: {shared}" if _gathered(spec) else f"TMA of {brings}"
    return WarpRole(name + "s" * (loaders > 1), loaders, registers, what)


def _landed_by(spec: Spec, name: str, count: int, warps: int, size: int, what: str) -> Mbarrier:
    """Give the barriers that end when what `warps` warps copy of K has landed, `size` bytes."""
    if _gathered(spec):
        return Mbarrier(name, count, 32 * warps, 0, f"{what}, copied by {32 * warps} threads")
    return Mbarrier(name, count, warps, size, what)


def _loader_choice(spec: Spec, tokens: int) -> Choice:
    """Say how tiles of K are brought, and why."""
    boxes, loaders = tokens // _box_tokens(spec, tokens), _loaders(spec, tokens)
    if _gathered(spec):
        why = f"a TMA box holds no more than a page: {boxes} boxes for each 128-byte column of a tile take too long"
        return Choice("decode loader", f"{loaders} warps, copies of 16 bytes by threads", why)
    if loaders > 1:
        return Choice("decode loader", f"{loaders} warps, TMA", f"they share the {boxes} boxes of a column of a tile")
    if boxes > 1:
        why = f"the loader of quantised rows; it issues {boxes} boxes for each 128-byte column of a tile"
        return Choice("decode loader", "1 warp, TMA", why)
    return Choice("decode loader", "1 warp, TMA", "a page holds a tile, so one box brings each of its columns")


def _shape_problems(spec: Spec) -> list[Problem]:
    problems = []
    if spec.d_v not in D_V_CHOICES:
        choices = ", ".join(map(str, D_V_CHOICES))
        problems.append(
            spec.problem(
                "model.kv_lora_rank",
                f"the decode kernel needs one of {choices} (two warpgroups share its columns, in pieces of "
                f"{SUBTILE_COLUMNS}); got {spec.d_v}",
            )
        )
    rope = spec.model.qk_rope_head_dim
    if rope % 16:
        problems.append(
            spec.problem(
                "model.qk_rope_head_dim",
                f"the decode kernel needs a multiple of 16 (K of one WGMMA); got {rope}; use {rope // 16 * 16} or "
                f"{rope // 16 * 16 + 16}",
            )
        )
    return problems


@dataclass(frozen=True)
class _Arrangement:
    """What a schedule makes of a spec and a tile: shared memory, barriers and warps."""

    tile: Tile
    regions: tuple[SmemRegion, ...]
    mbarriers: tuple[Mbarrier, ...]
    named_barriers: tuple[NamedBarrier, ...]
    roles: tuple[WarpRole, ...]
    registers: tuple[RegisterUse, ...]
    register_limits: tuple[RegisterLimit, ...]

    @property
    def total(self) -> int:
        """Bytes of shared memory."""
        return _end(self.regions)

    def fits(self, limit: int) -> bool:
        return self.total <= limit


_Arrange = Callable[[Spec, int, int, int], _Arrangement]


def _end(regions: tuple[SmemRegion, ...]) -> int:
    return max(region.offset + region.size for region in regions)


class _Regions:
    """Lays regions one behind the other; the schedule's scratch is used before the first P exists and lies there."""

    def __init__(self) -> None:
        self.placed: list[SmemRegion] = []

    def place(self, name: str, constant: str, size: int, what: str, count: int = 1) -> None:
        offset = self.placed[-1].offset + self.placed[-1].size if self.placed else 0
        self.placed.append(SmemRegion(name, constant, offset, size * count, what, count))

    def make_room(self, size: int) -> None:
        """Leave what is placed so far at least `size` bytes: parts merge their results in it."""
        if (missing := size - self.placed[-1].offset - self.placed[-1].size) > 0:
            self.place("room", "kOffsetRoom", missing, "so that a unit of every split has room")

    def finish(
        self, mbarriers: tuple[Mbarrier, ...], roles: tuple[WarpRole, ...]
    ) -> tuple[tuple[SmemRegion, ...], tuple[Mbarrier, ...]]:
        """Place the mbarriers and the scratch; give all regions, and the mbarriers with their places."""
        self.place(
            "barriers",
            "kOffsetBarriers",
            8 * sum(each.count for each in mbarriers),
            "mbarriers, in the order of the plan",
        )
        offset = self.placed[-1].offset
        placed = []
        for group in mbarriers:
            placed.append(replace(group, offset=offset))
            offset += 8 * group.count
        (p,) = (region for region in self.placed if region.name == "P")
        warps = sum(role.warps for role in roles)
        scratch = SmemRegion(
            "scratch", "kOffsetScratch", p.offset, 4 * (3 * warps + 2), "prefix sums, extremes", alias_of="P"
        )
        return (*self.placed, scratch), tuple(placed)


def _merge_bytes(rows: int) -> int:
    """Give kMergeScratch of splits.cuh: a weight of each partial row, and a unit of 512 bytes of each split."""
    return 4 * (rows + 2 * MAX_PARTS) + 512 * MAX_PARTS


_LANDED = Mbarrier("landed", 1, 1, 0, "partial results that the part merges have landed")


def _plain(spec: Spec, rows: int, tokens: int, stages: int) -> _Arrangement:
    """Two warpgroups, one with the scores and the left half of O, the other with the right half; Q in shared memory."""
    # Warpgroups trade registers in multiples of 8; three of them share an SM's file, which the launch splits evenly.
    # With 40 and 232 NVRTC 13.5 spills in the producer, with these neither it nor 13.0 anywhere.
    producer, consumer = 56, 224
    subtiles, loaders = _subtiles(spec), _loaders(spec, tokens)
    mbarriers: tuple[Mbarrier, ...] = (
        _landed_by(spec, "full", stages, loaders, subtiles * tokens * LINE, "a tile of K has landed"),
        Mbarrier("empty", stages, 8, 0, "the 8 consumer warps have read it"),
        Mbarrier("q_full", 1, 1, subtiles * rows * LINE, "Q has landed"),
        Mbarrier("q_empty", 1, 4, 0, "the 4 warps that read Q have finished with it"),
        Mbarrier("filled", 1, 128, 0, "warpgroup 0 has written P and the row factors of a tile"),
        Mbarrier("drained", 1, 128, 0, "warpgroup 1 has read them"),
        _LANDED,
    )
    roles = (
        WarpRole("warpgroup 0", 4, consumer, "S = Q K^T, softmax, left half of O += P V"),
        WarpRole("warpgroup 1", 4, consumer, "right half of O += P V"),
        _tile_role("producer", spec, tokens, producer, "Q and K", "K; the first of them TMA of Q"),
        WarpRole("idle", 4 - loaders, producer, "leave at once; registers are given back by whole warpgroups"),
    )
    regions = _Regions()
    regions.place("Q", "kOffsetQ", subtiles * rows * LINE, f"{rows} rows x {subtiles} subtiles")
    regions.place(
        "K", "kOffsetK", subtiles * tokens * LINE, f"{stages} stages of {tokens} tokens; V is in them", stages
    )
    regions.place("P", "kOffsetP", rows * tokens * ELEMENT_BYTES, f"probabilities of a tile, {rows} x {tokens}")
    regions.make_room(_merge_bytes(rows))
    regions.place("factors", "kOffsetFactors", rows * 4, "float32 by which a row of O is scaled")
    regions.place("schedule", "kOffsetSchedule", 32, "how the requests are cut")
    regions.place("splits", "kOffsetSplits", 32, "requests that the part shares with others")
    placed, mbarriers = regions.finish(mbarriers, roles)
    return _Arrangement(
        tile=Tile(
            rows,
            tokens,
            stages,
            subtiles,
            _rope_subtiles(spec),
            _box_tokens(spec, tokens),
            rope_stages=stages,
            loaders=loaders,
            gathered=_gathered(spec),
        ),
        regions=placed,
        mbarriers=mbarriers,
        named_barriers=(
            NamedBarrier("kTailBarrier", 1, 2, 128, "a warpgroup has cleared its half of a last tile"),
            NamedBarrier("kMergeBarrier", 3, 1, 256, "the warpgroups, merging"),
            NamedBarrier("kSplitsBarrier", 4, 1, 288, "the producer has written what the part shares"),
        ),
        roles=roles,
        registers=(
            RegisterUse("warpgroup 0", f"O, {rows} x {spec.d_v // 2} float32", rows * spec.d_v // 2 // 128),
            RegisterUse("warpgroup 0", f"S, {rows} x {tokens} float32", rows * tokens // 128),
            RegisterUse("warpgroup 0", f"P, {rows} x {tokens} 16-bit", rows * tokens // 256),
            RegisterUse("warpgroup 0", "row maxima, sums, borders, addresses", 36),
        ),
        register_limits=(
            RegisterLimit("kProducerRegisters", producer),
            RegisterLimit("kConsumerRegisters", consumer),
        ),
    )


def _skewed(spec: Spec, rows: int, tokens: int, stages: int) -> _Arrangement:
    """Two unequal warpgroups: scores with Q in registers and a strip of O, the rest of O; a third that feeds them."""
    whole = _skewed_with(spec, rows, tokens, stages, stages, shared=False)
    # Three tiles are what it takes; where they leave no room for as many of the columns behind V, two must do.
    if stages > 3 or whole.fits(TARGETS[spec.target].smem_per_block):
        return whole
    return _skewed_with(spec, rows, tokens, stages, 2, shared=True)


def _skewed_with(spec: Spec, rows: int, tokens: int, stages: int, rope_stages: int, *, shared: bool) -> _Arrangement:
    items, exchanges = _ITEMS, 2
    # The assembler never puts an accumulator below R24, and 8 registers more must do for what a warpgroup loops over:
    # what doesn't fit in the values' registers is the strip. Narrower O leaves registers for the loaders.
    strip = max(0, spec.d_v - (240 - 24 - 8) * 128 // rows // 32 * 32)
    loaders, scores, values = (24, 240, 240) if strip else (56, 216, 232)
    readers = 2 if strip else 1
    subtiles_v, subtiles_rope = spec.d_v // SUBTILE_COLUMNS, _rope_subtiles(spec)
    tile_loaders = _loaders(spec, tokens)
    readers_of_items = tile_loaders + (1 if subtiles_rope else 0)
    ropes = (
        _landed_by(
            spec, "rope_full", rope_stages, 1, subtiles_rope * tokens * LINE, "a tile's columns behind V have landed"
        ),
        Mbarrier("rope_empty", rope_stages, 4, 0, "the 4 warps of the scores have read them"),
        Mbarrier("q_rope_full", 1, 1, subtiles_rope * rows * LINE, "those of Q have landed"),
        Mbarrier("q_rope_empty", 1, 4, 0, "the item's last scores are done"),
    )
    mbarriers: tuple[Mbarrier, ...] = (
        _landed_by(spec, "full", stages, tile_loaders, subtiles_v * tokens * LINE, "a tile, of K or of Q, has landed"),
        Mbarrier("empty", stages, 4 * readers, 0, f"the {4 * readers} warps that multiply with it have read it"),
        *(ropes if subtiles_rope else ()),
        Mbarrier("filled", exchanges, 128, 0, "the scores' warpgroup has handed over P and the row factors of a tile"),
        Mbarrier("drained", exchanges, 128, 0, "the values' has read them"),
        Mbarrier("item_full", items, 1, 0, "the walker has written an item"),
        Mbarrier("item_empty", items, 2 * 128 + 32 * readers_of_items, 0, "the other roles are done with it"),
        _LANDED,
    )
    idle = (WarpRole("idle", 1, loaders, "leaves at once; registers are given back by whole warpgroups"),)
    roles = (
        WarpRole("scores", 4, scores, "S = Q K^T, softmax" + (", the last columns of O += P V" if strip else "")),
        WarpRole("values", 4, values, "the other columns of O += P V" if strip else "O += P V"),
        _tile_role(
            "tile loader",
            spec,
            tokens,
            loaders,
            "Q and K, the columns of V",
            "K, the columns of V; the first of them TMA of Q",
        ),
        WarpRole(
            "rope loader" if subtiles_rope else "idle",
            1,
            loaders,
            "the same of the columns behind V" if _gathered(spec) else "TMA of Q and K, the columns behind V",
        ),
        WarpRole("walker", 1, loaders, "finds the part's work"),
        *(idle if tile_loaders == 1 else ()),
    )
    regions = _Regions()
    regions.place(
        "tile",
        "kOffsetTiles",
        subtiles_v * tokens * LINE,
        f"{stages} stages of {tokens} tokens, the columns of V; or of Q",
        stages,
    )
    rope, p = subtiles_rope * tokens * LINE, rows * tokens * ELEMENT_BYTES
    p_what = f"probabilities of a tile, {rows} x {tokens}"
    if rope:
        regions.place("Q rope", "kOffsetQRope", subtiles_rope * rows * LINE, "the columns of Q behind V")
    if shared:
        regions.place("rope", "kOffsetRope", rope, "the columns of a tile behind V")
        regions.place("rope or P", "kOffsetShared", max(rope, p), "a second one of either: the kernel chooses")
        regions.place("P", "kOffsetP", p, p_what)
    else:
        if rope:
            regions.place("rope", "kOffsetRope", rope, f"{rope_stages} stages of the columns behind V", rope_stages)
        regions.place("P", "kOffsetP", p, p_what, exchanges)
    regions.make_room(_merge_bytes(rows))
    regions.place("factors", "kOffsetFactors", rows * 4, "float32 by which a row of O is scaled", exchanges)
    regions.place("schedule", "kOffsetSchedule", 32, "how the requests are cut, and what the mask hides")
    regions.place("items", "kOffsetItems", 32, f"{items} items of work", items)
    regions.place("splits", "kOffsetSplits", 32, "requests that the part shares with others")
    uses = [
        RegisterUse("scores", "addresses and loops; accumulators begin at R24", 24),
        RegisterUse("scores", f"Q, {rows} x {spec.d_v} 16-bit", rows * spec.d_v // 256),
        RegisterUse("scores", f"S, {rows} x {tokens} float32; P in their place", rows * tokens // 128),
        RegisterUse("scores", "row maxima and sums, borders", 8),
        RegisterUse("values", "addresses and loops; accumulators begin at R24", 24),
        RegisterUse("values", f"O, {rows} x {spec.d_v - strip} float32", rows * (spec.d_v - strip) // 128),
        RegisterUse("values", "row factors, loops", 8),
    ]
    if strip:
        uses.insert(3, RegisterUse("scores", f"O, {rows} x {strip} float32", rows * strip // 128))
    placed, mbarriers = regions.finish(mbarriers, roles)
    return _Arrangement(
        tile=Tile(
            rows,
            tokens,
            stages,
            _subtiles(spec),
            subtiles_rope,
            _box_tokens(spec, tokens),
            rope_stages,
            readers=readers,
            items=items,
            exchanges=exchanges,
            shared=shared,
            strip=strip,
            loaders=tile_loaders,
            gathered=_gathered(spec),
        ),
        regions=placed,
        mbarriers=mbarriers,
        named_barriers=(
            NamedBarrier("kScoresBarrier", 1, 1, 128, "the scores' warpgroup among itself"),
            NamedBarrier("kMergeBarrier", 2, 1, 256, "the scores' and the values' warpgroups, merging"),
        ),
        roles=roles,
        registers=tuple(uses),
        register_limits=(
            RegisterLimit("kLoaderRegisters", loaders),
            RegisterLimit("kScoresRegisters", scores),
            RegisterLimit("kValuesRegisters", values),
        ),
    )


_SWAPPED_CONSUMER = 224
"""Registers of a thread that multiplies; beside 56 of one that loads NVRTC spills in neither."""


def _swapped_uses(spec: Spec, rows: int) -> tuple[RegisterUse, ...]:
    tokens = spec.kernels.decode.tile_tokens
    return (
        RegisterUse("warpgroup 0", f"O, {spec.d_v} x {rows} float32", rows * spec.d_v // 128),
        RegisterUse("warpgroup 0", f"S, {tokens} x {rows} float32", rows * tokens // 128),
        RegisterUse("warpgroup 0", "maxima and sums of rows; sums of a tile, or borders", rows * 3 // 4),
        RegisterUse("warpgroup 0", "addresses, loops, work", 36),
    )


def _swapped_registers(spec: Spec, rows: int) -> int:
    return sum(use.registers for use in _swapped_uses(spec, rows))


def _swapped_memory(
    spec: Spec, rows: int, tokens: int, ring: int, roles: tuple[WarpRole, ...]
) -> tuple[tuple[SmemRegion, ...], tuple[Mbarrier, ...]]:
    """Place the regions and mbarriers for a ring of so many subtiles."""
    subtiles = _subtiles(spec)
    regions = _Regions()
    regions.place(
        "Q", "kOffsetQ", subtiles * rows * LINE, f"{rows} rows x {subtiles} subtiles; half of O when an item ends"
    )
    # A subtile begins on an atom of the swizzle, and so does P.
    regions.place("K", "kOffsetK", tokens * LINE, f"{ring} subtiles of {tokens} tokens; V is in them", ring)
    regions.place("P", "kOffsetP", rows * tokens * ELEMENT_BYTES, f"probabilities, {rows} x {tokens} a warpgroup", 2)
    regions.make_room(_merge_bytes(rows))
    regions.place("maxima", "kOffsetMaxima", 4 * rows * 4, "float32, of each warp, a warpgroup", 2)
    regions.place(
        "statistics", "kOffsetStatistics", 2 * 5 * rows * 4, "sums of each warp, reference; a warpgroup, by turns", 2
    )
    regions.place("schedule", "kOffsetSchedule", 32, "how the requests are cut")
    if rows > 32:
        regions.place("piece", "kOffsetPiece", 16, "where the part's piece of the cut line begins and ends")
    regions.place("splits", "kOffsetSplits", 32, "requests that the part shares with others")
    return regions.finish(
        (
            _landed_by(spec, "full", ring, _loaders(spec, tokens), tokens * LINE, "a subtile of K has landed"),
            Mbarrier("empty", ring, 4, 0, "the 4 warps of its tile's warpgroup have finished with it"),
            Mbarrier("scored", 2, 4, 0, "the scores of a warpgroup's tile are done"),
            Mbarrier("q_full", 1, 1, subtiles * rows * LINE, "Q has landed"),
            Mbarrier("q_empty", 1, 256, 0, "the item is finished with it, and with what took its place"),
            _LANDED,
        ),
        roles,
    )


def _swapped(spec: Spec, rows: int, tokens: int, stages: int) -> _Arrangement:
    """Tokens on M, rows on N: two warpgroups that take every other tile each, a third that feeds them by subtiles."""
    loader, consumer = 56, _SWAPPED_CONSUMER
    subtiles, loaders = _subtiles(spec), _loaders(spec, tokens)
    roles = (
        WarpRole("warpgroup 0", 4, consumer, "every other tile: S^T = K Q^T, softmax, O^T += V^T P^T"),
        WarpRole("warpgroup 1", 4, consumer, "the tiles between them"),
        _tile_role("tile loader", spec, tokens, loader, "K", "K"),
        WarpRole("query loader", 1, loader, "TMA of Q"),
        WarpRole("idle", 3 - loaders, loader, "leave at once; registers are given back by whole warpgroups"),
    )
    ring = subtiles * stages
    placed, mbarriers = _swapped_memory(spec, rows, tokens, ring, roles)
    # What room is left, though too little for a tile, holds subtiles of the next; a spec that names stages gets those.
    if spec.kernels.decode.stages == "auto":
        for more in range(ring + 1, min(subtiles * MAX_STAGES, ring + subtiles - 1) + 1):
            larger = _swapped_memory(spec, rows, tokens, more, roles)
            if _end(larger[0]) > TARGETS[spec.target].smem_per_block:
                break
            ring, (placed, mbarriers) = more, larger
    return _Arrangement(
        tile=Tile(
            rows,
            tokens,
            stages,
            subtiles,
            _rope_subtiles(spec),
            _box_tokens(spec, tokens),
            rope_stages=stages,
            readers=1,
            loaders=loaders,
            gathered=_gathered(spec),
            ring_subtiles=ring,
        ),
        regions=placed,
        mbarriers=mbarriers,
        named_barriers=(
            NamedBarrier("kGroupBarrier", 1, 2, 128, "a warpgroup among itself"),
            NamedBarrier("kPairBarrier", 3, 1, 256, "both warpgroups, joining and merging"),
            NamedBarrier("kSplitsBarrier", 4, 1, 288, "the tile loader has written what the part shares"),
        ),
        roles=roles,
        registers=_swapped_uses(spec, rows),
        register_limits=(
            RegisterLimit("kLoaderRegisters", loader),
            RegisterLimit("kConsumerRegisters", consumer),
        ),
    )


def _parted(row: CodedRow, rows: int) -> bool:
    """Say whether scores of each group under a scale have a sum of their own: there are registers for them."""
    return row.groups > 1 and rows <= 32


def _coded_memory(
    spec: Spec, row: CodedRow, rows: int, tokens: int, ring: int, roles: tuple[WarpRole, ...], stored: bool
) -> tuple[tuple[SmemRegion, ...], tuple[Mbarrier, ...]]:
    """Place the regions and mbarriers for a ring of so many lines, of the schedule that stores V or the other."""
    subtiles = _subtiles(spec)
    regions = _Regions()
    regions.place("Q", "kOffsetQ", subtiles * rows * LINE, f"{rows} rows x {subtiles} subtiles")
    if stored:
        values = f"fp16, {tokens} x {spec.d_v}, a warpgroup"
        regions.place("V", "kOffsetV", spec.d_v * tokens * ELEMENT_BYTES, values, 2)
    regions.place("K", "kOffsetK", tokens * LINE, f"{ring} lines of {tokens} tokens as they are in the cache", ring)
    probabilities = f"probabilities of a tile, {rows} x {tokens}"
    regions.place("P", "kOffsetP", rows * tokens * ELEMENT_BYTES, probabilities, _EXCHANGES)
    if row.scale_bytes:
        size = tokens // _box_tokens(spec, tokens) * row.scale_box_bytes
        regions.place("scales", "kOffsetScales", size, f"of {row.scale_stages} tiles", row.scale_stages)
    regions.make_room(_merge_bytes(rows))
    if row.groups > 1:
        if not _parted(row, rows):
            size = (row.groups + 1) * tokens * 4
            regions.place("grades", "kOffsetGrades", size, "float32 that lead from one scale of a token to the next", 2)
        shares = "fp16, what a scale is of the token's largest, beside a P"
        regions.place("shares", "kOffsetShares", row.groups * tokens * ELEMENT_BYTES, shares, _EXCHANGES)
    regions.place("terms", "kOffsetTerms", rows * 8, "float32 of a row: its scores' unit and its reference")
    if not stored:
        regions.place("factors", "kOffsetFactors", rows * 4, "float32 that scale a row of O, beside a P", _EXCHANGES)
    regions.place("maxima", "kOffsetMaxima", 4 * rows * 4, "float32, of each warp, a warpgroup", 2)
    if stored:
        statistics = "float32: sums of each warp, maxima; a warpgroup, by turns"
        regions.place("statistics", "kOffsetStatistics", 5 * rows * 4, statistics, 4)
    else:
        regions.place("sums", "kOffsetSums", 8 * rows * 4, "float32, of each warp, by turns", 2)
        regions.place("totals", "kOffsetTotals", rows * 4, "float32 that normalise O, a warpgroup", 2)
    regions.place("items", "kOffsetItems", 32, f"{_ITEMS} items of work", _ITEMS)
    if stored:
        regions.place("unit", "kOffsetUnit", 16, "what all codes are multiplied with")
    else:
        flags = "whether a P raised references; what all codes are multiplied with"
        regions.place("raised", "kOffsetRaised", 16, flags)
    regions.place("schedule", "kOffsetSchedule", 32, "how the requests are cut, and what the mask hides")
    regions.place("splits", "kOffsetSplits", 32, "requests that the part shares with others")
    stages = row.scale_stages
    readers = 4 if stored else 8
    scales = (
        Mbarrier("scales_full", stages, 1, tokens * row.scale_bytes, "the scales of a tile have landed"),
        Mbarrier("scales_empty", stages, readers, 0, f"the {readers} warps have read them"),
    )
    return regions.finish(
        (
            Mbarrier("full", ring, 1, tokens * LINE, "a line of the tokens' rows has landed"),
            Mbarrier("empty", ring, readers, 0, f"the {readers} warps have finished with it"),
            *(scales if row.scale_bytes else ()),
            Mbarrier("seen", 2, 4, 0, "a warpgroup's tile has landed")
            if stored
            else Mbarrier("filled", _EXCHANGES, 4, 0, "the 4 warps of a warpgroup have stored P"),
            Mbarrier("q_full", 1, 1, subtiles * rows * LINE, "Q has landed"),
            Mbarrier("q_empty", 1, 256, 0, "the item is finished with it"),
            Mbarrier("item_full", _ITEMS, 1, 0, "the walker has written an item"),
            Mbarrier("item_empty", _ITEMS, 256 + 64, 0, "the other roles are done with it"),
            _LANDED,
        ),
        roles,
    )


def _coded(
    spec: Spec,
    rows: int,
    tokens: int,
    stages: int,
    *,
    stored: bool,
    registers: tuple[int, int],
    does: tuple[str, str],
    operands: int,
    batch: int,
    loads_ahead: int,
    sums: int,
    uses: tuple[RegisterUse, ...],
) -> _Arrangement:
    """Arrange a schedule on quantised rows.

    Args:
        spec: the spec.
        rows: of a tile.
        tokens: of a tile.
        stages: tiles in the ring; more lines where the spec leaves that open and they fit.
        stored: it is the one that stores V.
        registers: of a loader's and of a consumer's thread.
        does: what either warpgroup does.
        operands: see Tile.
        batch: see Tile.
        loads_ahead: see Tile.
        sums: see Tile.
        uses: what a consumer's registers hold, beside the sums of scores and what all have.
    """
    row = coded_row(spec, tokens)
    assert row is not None
    loader, consumer = registers
    roles = (
        WarpRole("warpgroup 0", 4, consumer, does[0]),
        WarpRole("warpgroup 1", 4, consumer, does[1]),
        WarpRole("tile loader", 1, loader, "TMA of K and its scales"),
        WarpRole("query loader", 1, loader, "TMA of Q"),
        WarpRole("walker", 1, loader, "finds the part's work"),
        WarpRole("idle", 1, loader, "leaves at once; registers are given back by whole warpgroups"),
    )
    ring = row.lines * stages
    placed, mbarriers = _coded_memory(spec, row, rows, tokens, ring, roles, stored)
    if spec.kernels.decode.stages == "auto":
        for more in range(ring + 1, min(row.lines * MAX_STAGES, ring + row.lines - 1) + 1):
            larger = _coded_memory(spec, row, rows, tokens, more, roles, stored)
            if _end(larger[0]) > TARGETS[spec.target].smem_per_block:
                break
            ring, (placed, mbarriers) = more, larger
    return _Arrangement(
        tile=Tile(
            rows,
            tokens,
            stages,
            _subtiles(spec),
            _rope_subtiles(spec),
            _box_tokens(spec, tokens),
            rope_stages=stages,
            readers=1,
            items=_ITEMS,
            exchanges=_EXCHANGES,
            ring_subtiles=ring,
            operands=operands,
            batch=batch,
            loads_ahead=loads_ahead,
            sums=sums,
        ),
        regions=placed,
        mbarriers=mbarriers,
        named_barriers=(
            NamedBarrier("kGroupBarrier", 1, 2, 128, "a warpgroup among itself"),
            NamedBarrier("kPairBarrier", 3, 1, 256, "both warpgroups, at an item's ends and merging"),
        ),
        roles=roles,
        registers=(
            uses[0],
            RegisterUse("warpgroup 0", f"S, {tokens} x {rows} float32: {sums} sums", sums * rows * tokens // 128),
            *uses[1:],
            RegisterUse("warpgroup 0", "addresses, loops, work", 24),
        ),
        register_limits=(
            RegisterLimit("kLoaderRegisters", loader),
            RegisterLimit("kConsumerRegisters", consumer),
        ),
    )


def _swapped_quantised(spec: Spec, rows: int, tokens: int, stages: int) -> _Arrangement:
    """The same on quantised rows: the ring holds lines of them, and the warpgroups share O by columns of V."""
    row = coded_row(spec, tokens)
    assert row is not None
    half = spec.d_v // 2
    # O of 64 rows leaves registers for two operands and a sum of products.
    operands, batch = (4, 2) if rows <= 32 else (2, 1)
    return _coded(
        spec,
        rows,
        tokens,
        stages,
        stored=False,
        registers=(40, 232) if rows <= 32 else (24, 240),
        does=(
            "every other tile: S^T = K Q^T, softmax; all: half of O^T += V^T P^T",
            "the tiles between them, and the other half",
        ),
        operands=operands,
        batch=batch,
        # Products wait for the scores' units of a group, and then for what was loaded too early.
        loads_ahead=1 if row.groups > 1 and rows > 16 else 2,
        sums=(row.groups if _parted(row, rows) else 1) + (1 if rows <= 32 and row.rope_lines else 0),
        uses=(
            RegisterUse("warpgroup 0", f"O, {half} x {rows} float32", rows * half // 128),
            RegisterUse("warpgroup 0", f"K or V, {operands} x {tokens} x 32 fp16", operands * tokens // 8),
            RegisterUse("warpgroup 0", "sums of rows", rows // 4),
        ),
    )


def _stored_quantised(spec: Spec, rows: int, tokens: int, stages: int) -> _Arrangement:
    """Each warpgroup has tiles of its own, whose codes it widens once, and stores as V."""
    row = coded_row(spec, tokens)
    assert row is not None
    operands = 2
    return _coded(
        spec,
        rows,
        tokens,
        stages,
        stored=True,
        registers=(40, 232),
        does=("every other tile: S^T = K Q^T, softmax, O^T += V^T P^T", "the tiles between them"),
        operands=operands,
        batch=1,
        loads_ahead=2,
        sums=2 if row.rope_lines else 1,
        uses=(
            RegisterUse("warpgroup 0", f"O, {spec.d_v} x {rows} float32", rows * spec.d_v // 128),
            RegisterUse("warpgroup 0", f"K, {operands} x {tokens} x 32 fp16", operands * tokens // 8),
            RegisterUse("warpgroup 0", "maxima, sums of rows", rows // 2),
        ),
    )


_ARRANGEMENTS: dict[str, _Arrange] = {"plain": _plain, "skewed": _skewed, "swapped": _swapped}
_CODED_ARRANGEMENTS: dict[str, _Arrange] = {"swapped": _swapped_quantised, "stored": _stored_quantised}


def _arrange(spec: Spec, schedule: str, rows: int, tokens: int, stages: int) -> _Arrangement:
    arrange = (_ARRANGEMENTS if spec.layout is None else _CODED_ARRANGEMENTS)[schedule]
    return arrange(spec, rows, tokens, stages)


TILE_ROWS: dict[str, tuple[int, ...]] = {"plain": (64,), "skewed": (64,), "swapped": (8, 16, 24, 32, 40, 48, 56)}
"""Rows of a tile that a schedule can have, by its name, on a cache of elements."""
CODED_TILE_ROWS: dict[str, tuple[int, ...]] = {"swapped": (16, 32, 64), "stored": (16,)}
"""The same on quantised rows."""
AUTO_TILE_ROWS = (16, 32, 40)
"""Of the swapped schedule's on elements, those of a spec that leaves them open, where they are possible. With 40 heads
of (288, 256) and (320, 256) 40 rows are 2.0 and 0.8% faster than 64; 8, 24 and 48 are within 1% of the next, 56 is
slower."""
WIDE_TILE_COLUMNS = 256
"""Of V, with which tiles of more than 32 rows are among them: of (448, 384) 40 rows are 1.4% slower than 64."""


def tile_rows(spec: Spec, schedule: str) -> tuple[int, ...]:
    """Give the rows of a tile that a schedule can have for a spec."""
    if spec.layout is not None:
        return CODED_TILE_ROWS[schedule]
    if schedule != "swapped":
        return TILE_ROWS[schedule]
    return tuple(rows for rows in TILE_ROWS[schedule] if _swapped_registers(spec, rows) <= _SWAPPED_CONSUMER)


def _auto_tile_rows(spec: Spec, schedule: str) -> tuple[int, ...]:
    """Give those that a spec gets which leaves them open."""
    allowed = tile_rows(spec, schedule)
    if schedule != "swapped" or spec.layout is not None:
        return allowed
    return tuple(rows for rows in allowed if rows in AUTO_TILE_ROWS and (rows <= 32 or spec.d_v <= WIDE_TILE_COLUMNS))


_MIN_STAGES = {"plain": 2, "skewed": 2, "swapped": 1}
"""With one stage the scores of a tile would wait for room that only the products with the tile before give back."""


_CODED_MIN_STAGES = {"swapped": 2, "stored": 1}


def _min_stages(spec: Spec, schedule: str) -> int:
    return _MIN_STAGES[schedule] if spec.layout is None else _CODED_MIN_STAGES[schedule]


def _stages(spec: Spec, schedule: str, rows: int, tokens: int, target: Target, *, at_most: bool = False) -> int | None:
    """How many stages a schedule gets: those that the spec asks for, or as many as fit; None if it can't have them.

    With `at_most` those that the spec asks for are a limit.
    """
    asked = spec.kernels.decode.stages
    most = MAX_STAGES if asked == "auto" else asked
    numbers = range(most, 0, -1) if asked == "auto" or at_most else (asked,)
    for stages in numbers:
        enough = stages >= _min_stages(spec, schedule)
        if enough and _arrange(spec, schedule, rows, tokens, stages).fits(target.smem_per_block):
            return stages
    return None


def _narrow_schedule(spec: Spec, rows: int, target: Target, *, at_most: bool = False) -> str:
    """Name the schedule of a kernel with tiles of few rows: that which stores V where there is one and it fits.

    With `at_most` the stages that the spec asks for are a limit.
    """
    if "stored" not in _schedules(spec) or rows not in CODED_TILE_ROWS["stored"]:
        return "swapped"
    fits = _stages(spec, "stored", rows, spec.kernels.decode.tile_tokens, target, at_most=at_most) is not None
    return "stored" if fits else "swapped"


def _schedule(spec: Spec, target: Target) -> tuple[str, str]:
    """Choose a schedule and say why."""
    if spec.layout is not None:
        rows = spec.kernels.decode.tile_rows
        if rows != "auto" and _narrow_schedule(spec, rows, target) == "stored":
            return "stored", "of e2m1 it is the widening that takes time: once a code"
        why = "products with codes take them from registers"
        if rows == "auto" and "stored" in _schedules(spec):
            why += f"; for {CODED_TILE_ROWS['stored'][-1]} rows stored"
        return "swapped", why
    if spec.kernels.decode.tile_rows in TILE_ROWS["swapped"]:
        return "swapped", "the one with tiles of so few rows"
    return "skewed", "the fastest there is"


def _not_these_rows(spec: Spec, schedule: str, rows: int) -> Problem:
    allowed = [str(each) for each in tile_rows(spec, schedule)]
    offered = " or ".join(part for part in (", ".join(allowed[:-1]), allowed[-1]) if part)
    why = ""
    if spec.layout is None and rows in TILE_ROWS[schedule]:
        needed = _swapped_registers(spec, rows)
        why = f" for model.kv_lora_rank {spec.d_v} ({rows} need {needed} of a thread's {_SWAPPED_CONSUMER} registers)"
    problem = f"the {schedule} schedule has tiles of {offered} rows{why}; got {rows}; use {offered} or another schedule"
    return spec.problem("kernels.decode.tile_rows", problem)


def _no_stages(spec: Spec, schedule: str, rows: int, tokens: int, target: Target) -> Problem:
    limit, least = target.smem_per_block, _min_stages(spec, schedule)
    asked = spec.kernels.decode.stages
    if asked != "auto" and asked < least:
        return spec.problem(
            "kernels.decode.stages", f"the {schedule} schedule needs {least} stages; got {asked}; use {least}"
        )
    stages = least if asked == "auto" else asked
    total = _arrange(spec, schedule, rows, tokens, stages).total
    needs = f"{stages} stages need {total:,} B of shared memory, a block has {limit:,} B"
    for fewer in range(stages - 1, least - 1, -1):
        if _arrange(spec, schedule, rows, tokens, fewer).fits(limit):
            return spec.problem("kernels.decode.stages", f"{needs}; lower stages to {fewer}")
    total = _arrange(spec, schedule, rows, tokens, least).total
    narrower = [
        each
        for each in tile_rows(spec, schedule)
        if each < rows and _arrange(spec, schedule, each, tokens, least).fits(limit)
    ]
    if spec.kernels.decode.tile_rows != "auto" and narrower:
        return spec.problem(
            "kernels.decode.tile_rows",
            f"tiles of {rows} rows need {total:,} B of shared memory, a block has {limit:,} B; lower tile_rows to "
            f"{' or '.join(map(str, narrower))}",
        )
    return spec.problem(
        "model.kv_lora_rank",
        f"even {least} stage{'s' * (least > 1)} need{'s' * (least == 1)} {total:,} B of shared memory, a block has "
        f"{limit:,} B; lower model.kv_lora_rank + model.qk_rope_head_dim = {spec.d_qk}",
    )
