"""The plan of the prefill kernel: decompressed attention over sequences that lie one behind the other.

How a tile is cut follows from two budgets. Registers: a warpgroup holds 64 rows of O and S in float32 and of P in 16
bits, S and P of different blocks at the same time, for the scores of a block are computed beside the product of the
block before with V. Shared memory: at least two blocks of K and two of V, beside Q. What registers are left a warpgroup
spends on its waits: exponentials begin while P V is not done yet, and the results of a tile are stored under the first
product of the next one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

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
from .errors import Problem, SpecError
from .kernel_plan import ELEMENT_BYTES, ELEMENTS, Choice, KernelPlan, Parameter
from .spec import Spec
from .target import Target

D_V_CHOICES = (64, 128, 192, 256)
"""Widths of V that are a WGMMA of whole subtiles."""
MAX_D_QK = 256
"""Wider rows of Q and K leave too little shared memory for blocks, and no model has them."""
TILE_KV_CHOICES = (128, 96, 80, 64)
"""Tokens of a block, the best first: the wider the scores, the less often Q is read from shared memory."""
ROWS = 64
"""Rows of a WGMMA, and of a tile that a warpgroup has."""
MIN_STAGES = 2
"""With one block the loads would wait for the products and the products for the loads."""
MAX_STAGES = 4
"""More would only hold what is loaded long before its time."""
L2_BYTES = 32 << 20
"""Of L2's 50 MiB: what the keys and values of a section of heads may take, so that all its tiles find them there."""

# Registers of a thread by the number of warpgroups that multiply: theirs, and those of the warpgroup that feeds them.
# Together they take no more than the launch hands out in equal parts, three times 168 or four times 128: a warpgroup
# that asks for more would wait for ever.
_REGISTERS = {2: (232, 40), 3: (160, 32)}
_BASE_REGISTERS = 24  # Accumulators begin at R24: below are addresses and loops.
_ROW_REGISTERS = 20  # Row maxima and sums, borders, what the item is.
_BEGUN = 16  # Exponentials that a thread makes in about the time that P V takes on behind the scores.


@dataclass(frozen=True)
class PrefillTile:
    """What a block works on at a time."""

    rows: int
    """Rows of Q."""
    tokens: int
    """Tokens in a block of K or V."""
    stages: int
    """Blocks of K, and of V, in shared memory at once."""
    queries: int
    """Tiles of Q in shared memory at once."""
    groups: int
    """Warpgroups that multiply, 64 rows each."""
    narrow: int
    """Tokens of a last block for which a product half as wide does; 0 where there is no such product."""
    subtiles_qk: int
    """Subtiles of 64 columns in a row of Q or K; the last may be part zeros."""
    items: int
    """Tiles of work that are known at once."""
    begun: int
    """Exponentials of a thread that are made while P V is not done: a multiple of 4, for two columns of two rows."""
    held: bool
    """Results wait in registers, rounded, for the first product of the next tile; else they are stored at once."""


@dataclass(frozen=True, kw_only=True)
class PrefillPlan(KernelPlan):
    """Decompressed attention: d_qk = qk_nope_head_dim + qk_rope_head_dim, d_v = v_head_dim, a K and V for each head."""

    spec_name: str
    element: str
    d_qk: int
    d_v: int
    tile: PrefillTile
    section_tokens: int
    """Tokens of all heads together whose K and V a section of heads may have."""
    smem: SmemMap
    mbarriers: tuple[Mbarrier, ...]
    named_barriers: tuple[NamedBarrier, ...]
    tensor_maps: tuple[TensorMap, ...]
    roles: tuple[WarpRole, ...]
    registers: tuple[RegisterUse, ...]
    register_limits: tuple[RegisterLimit, ...]


def plan_prefill(spec: Spec, target: Target) -> PrefillPlan | Choice:
    """Plan the prefill kernel of a spec.

    There is none, and no error, for head dimensions that it has no shape for, unless the spec chooses something for it.

    Raises:
        SpecError: kernels.prefill asks for what can't be.
    """
    options = spec.kernels.prefill
    asked = [name for name in type(options).model_fields if getattr(options, name) != "auto"]
    problem = _shape_problem(spec)
    if problem is not None:
        if asked:
            raise SpecError([problem])
        return Choice("kernels.prefill", "none", f"{problem.field}: {problem.message}")
    tile = _tile(spec, target)
    if isinstance(tile, Problem):
        raise SpecError([tile])
    return _plan(spec, tile, target)


def d_qk(spec: Spec) -> int:
    """Elements of a row of Q and K."""
    return spec.model.qk_nope_head_dim + spec.model.qk_rope_head_dim


def _shape_problem(spec: Spec) -> Problem | None:
    d_v, width = spec.model.v_head_dim, d_qk(spec)
    if d_v not in D_V_CHOICES:
        choices = ", ".join(map(str, D_V_CHOICES))
        return spec.problem("model.v_head_dim", f"the prefill kernel needs one of {choices}; got {d_v}")
    if width % 16 or width > MAX_D_QK:
        return spec.problem(
            "model.qk_nope_head_dim",
            "the prefill kernel needs qk_nope_head_dim + qk_rope_head_dim to be a multiple of 16 (K of one WGMMA), at "
            f"most {MAX_D_QK}; got {width}",
        )
    return None


def _tiles(spec: Spec, stages: int = MIN_STAGES) -> Iterator[PrefillTile]:
    """Give the tiles that registers allow, the best first."""
    # Three warpgroups hide a softmax behind the products of two others, if their blocks are not too narrow for it.
    order = [*itertools.product((3,), TILE_KV_CHOICES[:2]), *itertools.product((2,), TILE_KV_CHOICES)]
    order += itertools.product((3,), TILE_KV_CHOICES[2:])
    for groups, tokens in order:
        left = _REGISTERS[groups][0] - sum(use.registers for use in _register_uses(spec, tokens))
        if left >= 0:
            subtiles = -(-d_qk(spec) // SUBTILE_COLUMNS)
            narrow = tokens // 2 if tokens // 2 in (32, 64) else 0
            begun = min(_BEGUN, left // 8 * 8)
            # A tile's first block has no P beside its scores, nor exponentials that have begun.
            held = _held_registers(spec) <= left + _p_registers(tokens)
            yield PrefillTile(ROWS * groups, tokens, stages, 1, groups, narrow, subtiles, 2, begun, held)


def _tile(spec: Spec, target: Target) -> PrefillTile | Problem:
    """Choose a tile that fits what the spec asks for, or say what is in the way."""
    options, limit = spec.kernels.prefill, target.smem_per_block
    if options.stages != "auto" and options.stages < MIN_STAGES:
        return spec.problem(
            "kernels.prefill.stages", f"the prefill kernel needs {MIN_STAGES} stages; got {options.stages}"
        )
    stages = MIN_STAGES if options.stages == "auto" else options.stages
    allowed = [
        tile
        for tile in _tiles(spec, stages)
        if options.tile_q in ("auto", tile.rows) and options.tile_kv in ("auto", tile.tokens)
    ]
    if not allowed:
        return _no_registers(spec)
    best = next((tile for tile in allowed if _total(spec, tile) <= limit), None)
    if best is None:
        least = min(allowed, key=lambda tile: _total(spec, tile))
        return spec.problem(
            "kernels.prefill.stages" if stages > MIN_STAGES else "kernels.prefill.tile_kv",
            f"{stages} stages of {least.tokens} tokens need {_total(spec, least):,} B of shared memory, a block has "
            f"{limit:,} B; lower stages or tile_kv",
        )
    # A second tile of Q first: its loads need no longer wait for the products of the tile before.
    for more in (replace(best, queries=2), best):
        if _total(spec, more) <= limit:
            best = more
            break
    while options.stages == "auto" and best.stages < MAX_STAGES:
        more = replace(best, stages=best.stages + 1)
        if _total(spec, more) > limit:
            break
        best = more
    return best


def _no_registers(spec: Spec) -> Problem:
    options = spec.kernels.prefill
    field = "tile_kv" if options.tile_kv != "auto" else "tile_q"
    possible = ", ".join(f"{tile.rows} x {tile.tokens}" for tile in _tiles(spec))
    return spec.problem(
        f"kernels.prefill.{field}",
        f"registers allow tiles (tile_q x tile_kv) of {possible or 'no size'} with model.v_head_dim = "
        f"{spec.model.v_head_dim}; got {options.tile_q} x {options.tile_kv}",
    )


def _choices(spec: Spec, tile: PrefillTile, target: Target) -> Iterator[Choice]:
    options = spec.kernels.prefill
    registers = _REGISTERS[tile.groups][0]
    used = sum(use.registers for use in _register_uses(spec, tile.tokens))
    spent = [f"{tile.begun} exponentials beside P V"] * (tile.begun > 0) + ["results late"] * tile.held
    why = f"O, S and P: {used} of {registers} registers; {', '.join(spent) or 'no more is left'}"
    total = _total(spec, tile)
    if options.tile_q == "auto":
        yield Choice("kernels.prefill.tile_q", str(tile.rows), f"{tile.groups} warpgroups of {registers} registers")
    if options.tile_kv == "auto":
        yield Choice("kernels.prefill.tile_kv", str(tile.tokens), why)
    if options.stages == "auto":
        q = f"{tile.queries} tile{'s' * (tile.queries > 1)} of Q"
        yield Choice("kernels.prefill.stages", str(tile.stages), f"with {q} {total:,} of {target.smem_per_block:,} B")


def _p_registers(tokens: int) -> int:
    return ROWS * tokens // 256


def _held_registers(spec: Spec) -> int:
    return ROWS * spec.model.v_head_dim // 256


def _register_uses(spec: Spec, tokens: int) -> tuple[RegisterUse, ...]:
    d_v = spec.model.v_head_dim
    return (
        RegisterUse("attention", "addresses and loops; accumulators begin at R24", _BASE_REGISTERS),
        RegisterUse("attention", f"O, {ROWS} x {d_v} float32", ROWS * d_v // 128),
        RegisterUse("attention", f"S of a block, {ROWS} x {tokens} float32", ROWS * tokens // 128),
        RegisterUse("attention", f"P of the block before, {ROWS} x {tokens} 16-bit", _p_registers(tokens)),
        RegisterUse("attention", "row maxima and sums, borders, the item", _ROW_REGISTERS),
    )


def _regions(spec: Spec, tile: PrefillTile) -> tuple[SmemRegion, ...]:
    """Lay the buffers one behind the other, those of TMA first: all of them are multiples of a swizzle atom."""
    q = tile.subtiles_qk * ROWS * LINE
    k = tile.subtiles_qk * tile.tokens * LINE
    v = spec.model.v_head_dim * tile.tokens * ELEMENT_BYTES
    mbarriers = sum(each.count for each in _mbarriers(spec, tile))
    tiles = f"{tile.queries} x {tile.groups} x {ROWS} rows"
    blocks = f"{tile.stages} blocks of {tile.tokens} tokens"
    regions: list[SmemRegion] = []
    for name, constant, size, what, count in (
        ("Q", "kOffsetQ", q, f"{tiles}, {tile.subtiles_qk} subtiles", tile.queries * tile.groups),
        ("K", "kOffsetK", k, blocks, tile.stages),
        ("V", "kOffsetV", v, blocks, tile.stages),
        ("items", "kOffsetItems", 32, "tiles of work", tile.items),
        ("barriers", "kOffsetBarriers", 8 * mbarriers, "mbarriers, in the order of the plan", 1),
    ):
        offset = regions[-1].offset + regions[-1].size if regions else 0
        regions.append(SmemRegion(name, constant, offset, size * count, what, count))
    return tuple(regions)


def _total(spec: Spec, tile: PrefillTile) -> int:
    last = _regions(spec, tile)[-1]
    return last.offset + last.size


def _mbarriers(spec: Spec, tile: PrefillTile) -> tuple[Mbarrier, ...]:
    q = tile.subtiles_qk * ROWS * LINE
    k = tile.subtiles_qk * tile.tokens * LINE
    v = spec.model.v_head_dim * tile.tokens * ELEMENT_BYTES
    queries, warps = tile.queries * tile.groups, 4 * tile.groups
    return (
        Mbarrier("q_full", queries, 1, q, "a warpgroup's rows of Q have landed"),
        Mbarrier("q_empty", queries, 4, 0, "its 4 warps are done with their scores"),
        Mbarrier("k_full", tile.stages, 1, k, "a block of K has landed"),
        Mbarrier("k_empty", tile.stages, warps, 0, f"the {warps} warps that multiply have read it"),
        Mbarrier("v_full", tile.stages, 32, v, "a block of V has landed, and is clean behind the sequence's end"),
        Mbarrier("v_empty", tile.stages, warps, 0, f"the {warps} warps that multiply have read it"),
        Mbarrier("v_landed", tile.stages, 32, v, "a sequence's last block of V has landed"),
        Mbarrier("item_full", tile.items, 1, 0, "the walker has written an item"),
        Mbarrier("item_empty", tile.items, 32 * (warps + 2), 0, "the other roles have read it"),
        Mbarrier("item_asked", 1, 1, 0, "the loader has nearly done its item"),
    )


def _plan(spec: Spec, tile: PrefillTile, target: Target) -> PrefillPlan:
    regions = _regions(spec, tile)
    offset = regions[-1].offset
    mbarriers = []
    for group in _mbarriers(spec, tile):
        mbarriers.append(replace(group, offset=offset))
        offset += 8 * group.count
    attention, loaders = _REGISTERS[tile.groups]
    names = [f"warpgroup {i}" for i in range(tile.groups)]
    roles = (
        *(
            WarpRole(name, 4, attention, f"S = Q K^T, softmax, O += P V of rows {ROWS * i} to {ROWS * i + ROWS - 1}")
            for i, name in enumerate(names)
        ),
        WarpRole("loader", 1, loaders, "TMA of Q, K and V"),
        WarpRole("cleaner", 1, loaders, "clears what V has behind the end of a sequence"),
        WarpRole("walker", 1, loaders, "takes tiles from the counter and finds out what they are"),
        WarpRole("idle", 1, loaders, "leaves at once; registers are given back by whole warpgroups"),
    )
    uses = _register_uses(spec, tile.tokens)
    if tile.begun:
        uses += (RegisterUse("attention", "exponentials that begin beside P V", tile.begun),)
    dims = ("total", "heads", "1")
    width, d_v = d_qk(spec), spec.model.v_head_dim
    tensor_maps = (
        TensorMap("q_map", "q", ("d_qk", *dims), (SUBTILE_COLUMNS, ROWS, 1, 1), 128),
        TensorMap("k_map", "k", ("d_qk", *dims), (SUBTILE_COLUMNS, tile.tokens, 1, 1), 128),
        TensorMap("v_map", "v", ("d_v", *dims), (SUBTILE_COLUMNS, tile.tokens, 1, 1), 128),
    )
    total = _total(spec, tile)
    return PrefillPlan(
        name="prefill",
        what="decompressed attention over sequences that lie one behind the other",
        template="kernels/prefill.cu.j2",
        entry="mla_prefill",
        threads=32 * sum(role.warps for role in roles),
        grid=("min(SMs, tiles)",),
        smem_bytes=total,
        boxes={each.tensor: each.box for each in tensor_maps},
        constants={"d_qk": width, "d_v": d_v, "tile_q": tile.rows, "tile_kv": tile.tokens},
        choices=tuple(_choices(spec, tile, target)),
        spec_name=spec.name,
        element=ELEMENTS[spec.element],
        d_qk=width,
        d_v=d_v,
        tile=tile,
        section_tokens=L2_BYTES // ((width + d_v) * ELEMENT_BYTES),
        smem=SmemMap(regions, total, target.smem_per_block),
        mbarriers=tuple(mbarriers),
        named_barriers=(
            NamedBarrier("kTurnBarrier", 1, tile.groups, 256, "the warpgroup before has issued its products"),
        ),
        tensor_maps=tensor_maps,
        roles=roles,
        registers=tuple(replace(use, role=name) for name in names for use in uses),
        register_limits=(
            RegisterLimit("kLoaderRegisters", loaders),
            RegisterLimit("kAttentionRegisters", attention),
        ),
        parameters=(
            Parameter("cu_seqlens_q", "const int*"),
            Parameter("cu_seqlens_k", "const int*"),
            Parameter("counter", "int*"),
            Parameter("out", "void*"),
            Parameter("out_stride_t", "long long"),
            Parameter("out_stride_h", "long long"),
            Parameter("lse", "float*"),
            Parameter("batch", "int"),
            Parameter("total_q", "int"),
            Parameter("total_k", "int"),
            Parameter("heads", "int"),
            Parameter("causal", "int"),
            Parameter("scale_log2", "float"),
        ),
    )
