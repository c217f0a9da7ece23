"""Every number that a kernel needs, worked out from a spec: templates print them and the runtime obeys them.

The planner is where hardware limits live. A spec that no kernel can serve gives a SpecError at the field to change.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .errors import Problem, SpecError
from .spec import Spec
from .target import TARGETS, Target

ELEMENT_BYTES = 2
"""Bytes of a bf16 or fp16 element."""
SUBTILE_COLUMNS = 64
"""Columns of a subtile: 128 bytes, the longest line that TMA and WGMMA swizzle."""
SMEM_ALIGNMENT = 1024
"""An atom of the 128-byte swizzle."""
MAX_STAGES = 6
"""More stages than this were never needed to keep the memory busy."""
D_V_CHOICES = (128, 256, 384, 512)
"""Widths of V whose halves are multiples of a subtile and a WGMMA shape."""


@dataclass(frozen=True)
class Choice:
    """A field that was left to the planner."""

    field: str
    value: str
    why: str


@dataclass(frozen=True)
class Tile:
    """What a block works on at a time."""

    rows: int
    """Rows of Q, query tokens x heads."""
    tokens: int
    """Cached tokens in a stage."""
    stages: int
    subtiles: int
    """Subtiles of 64 columns in a row of K; the last may be part zeros."""
    box_tokens: int
    """Tokens that one TMA copy brings."""


@dataclass(frozen=True)
class SmemRegion:
    """A piece of a block's shared memory; `alias_of` names the region whose bytes it uses at another time."""

    name: str
    constant: str
    offset: int
    size: int
    what: str
    alias_of: str | None = None


@dataclass(frozen=True)
class SmemMap:
    """The shared memory of a block, bytes."""

    regions: tuple[SmemRegion, ...]
    total: int
    limit: int


@dataclass(frozen=True)
class Mbarrier:
    """A group of equal mbarriers. `bytes` is the most that one phase expects from TMA, 0 if none."""

    name: str
    count: int
    arrivals: int
    bytes: int
    what: str


@dataclass(frozen=True)
class NamedBarrier:
    """A hardware barrier, or several with successive ids."""

    constant: str
    id: int
    count: int
    threads: int
    what: str


@dataclass(frozen=True)
class TensorMap:
    """A TMA tensor map that the runtime encodes. Dimensions are innermost first; names are filled at the call."""

    parameter: str
    tensor: str
    dims: tuple[str, ...]
    box: tuple[int, ...]
    swizzle_bytes: int


@dataclass(frozen=True)
class WarpRole:
    """What a group of warps does, and how many registers each of its threads has while it does."""

    name: str
    warps: int
    registers: int
    what: str


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter after the tensor maps, in order."""

    name: str
    ctype: str


@dataclass(frozen=True)
class Launch:
    """Shape of a launch."""

    threads: int
    grid: tuple[str, ...]
    producer_registers: int
    consumer_registers: int


@dataclass(frozen=True)
class SchedulePolicy:
    """How requests are cut over the parts of the grid; see schedule.cuh."""

    fixed_overhead_blocks: int
    """What a request costs beside its blocks."""
    snap_blocks: int
    """A cut this close to an end of a request moves there."""
    min_part_cost: int
    """No part gets less: a small batch uses fewer parts than the GPU has room for."""


@dataclass(frozen=True)
class RegisterUse:
    """One line of the register estimate of the busiest role."""

    what: str
    registers: int


@dataclass(frozen=True)
class DecodePlan:
    """Absorbed attention over the paged latent cache, schedule `plain`."""

    spec_name: str
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
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class CombinePlan:
    """Merges the partial results of split requests."""

    template: str
    file: str
    entry: str
    element: str
    d_v: int
    tile_rows: int
    rows_per_block: int
    threads: int
    grid: tuple[str, ...]
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class Plan:
    """The whole of a spec's kernels."""

    spec: Spec
    target: Target
    softmax_scale: float
    decode: DecodePlan
    combine: CombinePlan
    choices: tuple[Choice, ...]

    def to_json(self) -> dict[str, Any]:
        """Give the plan as plain data."""
        return {
            "spec": self.spec.model_dump(),
            "target": asdict(self.target),
            "softmax_scale": self.softmax_scale,
            "decode": asdict(self.decode),
            "combine": asdict(self.combine),
            "choices": [asdict(choice) for choice in self.choices],
        }


def make_plan(spec: Spec) -> Plan:
    """Plan the kernels of a spec; SpecError, with every reason, if it can't be served."""
    target = TARGETS[spec.target]
    problems = list(_shape_problems(spec))
    if problems:
        raise SpecError(problems)
    subtiles = _subtiles(spec)
    choices: list[Choice] = []
    decode_options = spec.kernels.decode

    schedule = "plain"
    if decode_options.schedule == "auto":
        choices.append(Choice("kernels.decode.schedule", schedule, "the only schedule there is"))
    rows = 64
    if decode_options.tile_rows == "auto":
        choices.append(Choice("kernels.decode.tile_rows", str(rows), "M of WGMMA; fewer rows are padded"))

    tokens = decode_options.tile_tokens
    if decode_options.stages == "auto":
        stages = max(n for n in range(1, MAX_STAGES + 1) if n == 1 or _smem(spec, rows, tokens, n, target).fits)
        choices.append(
            Choice(
                "kernels.decode.stages",
                str(stages),
                f"as many tiles as fit beside Q in {target.smem_per_block:,} B, at most {MAX_STAGES}",
            )
        )
    else:
        stages = decode_options.stages
    layout = _smem(spec, rows, tokens, stages, target)
    if not layout.fits:
        raise SpecError([_too_large(spec, rows, tokens, stages, target, layout.total)])

    tile = Tile(rows, tokens, stages, subtiles, min(spec.cache.page_size, tokens))
    element = {"bf16": "Bf16", "fp16": "Fp16"}[spec.cache.dtype]
    decode = DecodePlan(
        spec_name=spec.name,
        template=f"kernels/decode_{schedule}.cu.j2",
        file="decode.cu",
        entry="mla_decode",
        element=element,
        d_qk=spec.d_qk,
        d_v=spec.d_v,
        page_size=spec.cache.page_size,
        tile=tile,
        smem=SmemMap(layout.regions, layout.total, target.smem_per_block),
        mbarriers=_mbarriers(tile),
        named_barriers=(NamedBarrier("kTailBarrier", 1, 2, 128, "a warpgroup has cleared its half of a last tile"),),
        tensor_maps=(
            TensorMap("q_map", "q", ("d_qk", "s_q x heads_per_kv", "kv_heads", "b"), (64, rows, 1, 1), 128),
            TensorMap(
                "kv_map", "kv_cache", ("d_qk", "page_size", "kv_heads", "num_blocks"), (64, tile.box_tokens, 1, 1), 128
            ),
        ),
        roles=(
            WarpRole("warpgroup 0", 4, _CONSUMER_REGISTERS, "S = Q K^T, softmax, left half of O += P V"),
            WarpRole("warpgroup 1", 4, _CONSUMER_REGISTERS, "right half of O += P V"),
            WarpRole("producer", 1, _PRODUCER_REGISTERS, "TMA of Q and K"),
            WarpRole("idle", 3, _PRODUCER_REGISTERS, "leave at once; registers are given back by whole warpgroups"),
        ),
        registers=(
            RegisterUse(f"O, {rows} x {spec.d_v // 2} float32 over 128 threads", rows * spec.d_v // 2 // 128),
            RegisterUse(f"S, {rows} x {tokens} float32", rows * tokens // 128),
            RegisterUse(f"P, {rows} x {tokens} 16-bit", rows * tokens // 256),
            RegisterUse("row maxima, sums, borders, addresses", 36),
        ),
        launch=Launch(
            threads=384,
            grid=("ceil(s_q * heads_per_kv / tile_rows) * kv_heads", "max(SMs / grid.x, 1)"),
            producer_registers=_PRODUCER_REGISTERS,
            consumer_registers=_CONSUMER_REGISTERS,
        ),
        schedule=SchedulePolicy(fixed_overhead_blocks=5, snap_blocks=1, min_part_cost=3),
        parameters=_DECODE_PARAMETERS,
    )
    combine_threads = 256
    combine = CombinePlan(
        template="kernels/combine.cu.j2",
        file="combine.cu",
        entry="mla_combine",
        element=element,
        d_v=spec.d_v,
        tile_rows=rows,
        rows_per_block=combine_threads // 32,
        threads=combine_threads,
        grid=("tile_rows / rows_per_block", "decode grid.x", "decode grid.y - 1"),
        parameters=_COMBINE_PARAMETERS,
    )
    return Plan(spec, target, spec.softmax_scale, decode, combine, tuple(choices))


# Warpgroups trade registers in multiples of 8; three of them share an SM's file, which the launch splits evenly. With
# 40 and 232 NVRTC 13.5 spills in the producer, with these neither it nor 13.0 anywhere.
_PRODUCER_REGISTERS = 56
_CONSUMER_REGISTERS = 224

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
    Parameter("split_info", "int*"),
    Parameter("batch", "int"),
    Parameter("s_q", "int"),
    Parameter("heads_per_kv", "int"),
    Parameter("row_tiles", "int"),
    Parameter("table_width", "int"),
    Parameter("causal", "int"),
    Parameter("scale_log2", "float"),
)
_COMBINE_PARAMETERS = (
    Parameter("partial_out", "const float*"),
    Parameter("partial_lse", "const float*"),
    Parameter("split_info", "const int*"),
    Parameter("out", "void*"),
    *_OUT_STRIDES,
    Parameter("lse", "float*"),
    Parameter("s_q", "int"),
    Parameter("heads_per_kv", "int"),
    Parameter("row_tiles", "int"),
)


def _subtiles(spec: Spec) -> int:
    return -(-spec.d_qk // SUBTILE_COLUMNS)


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
class _Layout:
    regions: tuple[SmemRegion, ...]
    total: int
    fits: bool


def _smem(spec: Spec, rows: int, tokens: int, stages: int, target: Target) -> _Layout:
    subtiles = _subtiles(spec)
    line = SUBTILE_COLUMNS * ELEMENT_BYTES
    regions: list[SmemRegion] = []

    def place(name: str, constant: str, size: int, what: str) -> None:
        offset = regions[-1].offset + regions[-1].size if regions else 0
        regions.append(SmemRegion(name, constant, offset, size, what))

    place("Q", "kOffsetQ", subtiles * rows * line, f"{rows} rows x {subtiles} subtiles")
    place("K", "kOffsetK", stages * subtiles * tokens * line, f"{stages} stages of {tokens} tokens; V is in them")
    place("P", "kOffsetP", rows * tokens * ELEMENT_BYTES, f"probabilities of a tile, {rows} x {tokens}")
    place("factors", "kOffsetFactors", rows * 4, "float32 by which a row of O is scaled")
    place("barriers", "kOffsetBarriers", 8 * (2 * stages + 4), "mbarriers, in the order of the plan")
    # The schedule is worked out before the first P exists.
    scratch = SmemRegion("schedule", "kOffsetSchedule", regions[2].offset, 4 * (384 // 32 + 2), "prefix sums", "P")
    total = regions[-1].offset + regions[-1].size
    return _Layout((*regions, scratch), total, total <= target.smem_per_block)


def _too_large(spec: Spec, rows: int, tokens: int, stages: int, target: Target, total: int) -> Problem:
    needs = f"{stages} stages need {total:,} B of shared memory, a block has {target.smem_per_block:,} B"
    for fewer in range(stages - 1, 0, -1):
        if _smem(spec, rows, tokens, fewer, target).fits:
            return spec.problem("kernels.decode.stages", f"{needs}; lower stages to {fewer}")
    return spec.problem(
        "model.kv_lora_rank",
        f"even one stage needs {total:,} B of shared memory, a block has {target.smem_per_block:,} B; lower "
        f"model.kv_lora_rank + model.qk_rope_head_dim = {spec.d_qk}",
    )


def _mbarriers(tile: Tile) -> tuple[Mbarrier, ...]:
    line = SUBTILE_COLUMNS * ELEMENT_BYTES
    return (
        Mbarrier("full", tile.stages, 1, tile.subtiles * tile.tokens * line, "a tile of K has landed"),
        Mbarrier("empty", tile.stages, 8, 0, "the 8 consumer warps have read it"),
        Mbarrier("q_full", 1, 1, tile.subtiles * tile.rows * line, "Q has landed"),
        Mbarrier("q_empty", 1, 4, 0, "the 4 warps that read Q have finished with it"),
        Mbarrier("filled", 1, 128, 0, "warpgroup 0 has written P and the row factors of a tile"),
        Mbarrier("drained", 1, 128, 0, "warpgroup 1 has read them"),
    )
