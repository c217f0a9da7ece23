"""What calls of decode and prefill cost at least, and what the caches of other kinds of attention would take.

Counted are the bytes that must cross the memory bus once and the products that must be computed. A floor is the longer
of the two times at the target's measured rates, launch and merge latency left out: no kernel is faster, a good one is
near.

In service the power cap decides, not a floor: the energy of a call is worked out from what its operations take one by
one, and with it the rate that a chip keeps up for seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .kernel_plan import ELEMENT_BYTES
from .plan import Plan, SchedulePolicy
from .prefill_plan import ROWS, PrefillPlan, PrefillTile
from .spec import Spec
from .target import Target

GQA_HEADS = 8
"""Key and value heads of the grouped-query attention that MLA is compared with."""


class _Floor:
    """Of a call that has two times, the longer one."""

    memory_us: float
    compute_us: float

    @property
    def floor_us(self) -> float:
        """The least time, microseconds."""
        return max(self.memory_us, self.compute_us)

    @property
    def bound(self) -> Literal["memory", "compute"]:
        """What decides the floor."""
        return "memory" if self.memory_us >= self.compute_us else "compute"


@dataclass(frozen=True)
class DecodeCost(_Floor):
    """One decode call over a batch of requests of equal length."""

    batch: int
    context: int
    """Cached tokens of each request."""
    s_q: int
    heads: int
    flops: int
    """Multiplications and additions of Q K^T and P V that the result needs. A causal mask is left out of account."""
    padded_flops: int
    """The same with rows filled up to whole tiles: what the tensor cores do."""
    cache_bytes: int
    """The cache, read once; row tiles of a request find it in L2."""
    io_bytes: int
    """q, out and lse."""
    partial_bytes: int
    """Partial results of split requests, float32, written and read; no part of the floor, for L2 can hold them."""
    splits: int
    """Partial results for each row; 0 if no request is split."""
    memory_us: float
    compute_us: float

    @property
    def bytes(self) -> int:
        """What must cross the memory bus."""
        return self.cache_bytes + self.io_bytes

    @property
    def intensity(self) -> float:
        """Useful FLOP per byte."""
        return self.flops / self.bytes

    @property
    def padded_intensity(self) -> float:
        """FLOP per byte with padding."""
        return self.padded_flops / self.bytes


def decode_cost(plan: Plan, *, batch: int, context: int, s_q: int = 1, heads: int | None = None) -> DecodeCost:
    """Count a decode call's work on the plan's target; `heads` are those of one rank if None."""
    heads = plan.spec.heads_per_rank if heads is None else heads
    rows = s_q * heads
    decode, target = plan.decode_for(rows), plan.target
    row_tiles = -(-rows // decode.tile.rows)
    columns = decode.d_qk + decode.d_v
    flops = 2 * batch * rows * context * columns
    padded_flops = 2 * batch * row_tiles * decode.tile.rows * context * columns
    parts = max(target.sms // row_tiles, 1)
    splits = sum(n for n in split_counts([context] * batch, decode.tile.tokens, decode.schedule, parts) if n > 1)
    cache_bytes = batch * context * plan.spec.row_bytes
    io_bytes = batch * rows * (columns * ELEMENT_BYTES + 4)
    partial_bytes = splits * rows * (decode.d_v + 1) * 4 * 2
    return DecodeCost(
        batch=batch,
        context=context,
        s_q=s_q,
        heads=heads,
        flops=flops,
        padded_flops=padded_flops,
        cache_bytes=cache_bytes,
        io_bytes=io_bytes,
        partial_bytes=partial_bytes,
        splits=splits,
        memory_us=(cache_bytes + io_bytes) / target.read_bandwidth * 1e6,
        compute_us=padded_flops / decode.tile.rows * _timed_rows(decode.tile.rows) / target.matrix_rate * 1e6,
    )


def _timed_rows(tile_rows: int) -> float:
    """Give the rows that take as long as a tile's at the full rate of the matrix units.

    With fewer than 64 they are N of m64nNk16, whose time is max(N / 2, 16 + N / 4) cycles from shared memory: measured,
    and the same for both layouts of A.
    """
    return max(tile_rows, 32 + tile_rows / 2)


@dataclass(frozen=True)
class PrefillCost(_Floor):
    """One causal prefill call over sequences of equal length, whose keys are all new."""

    batch: int
    tokens: int
    """Of each sequence."""
    heads: int
    flops: int
    """Multiplications and additions of Q K^T and P V for the pairs of a query and a key that the mask leaves."""
    padded_flops: int
    """The same with rows and keys filled up to what a product has: what the tensor cores do."""
    io_bytes: int
    """q, k, v, out and lse, once; tiles behind the first find K and V in L2."""
    memory_us: float
    compute_us: float

    @property
    def intensity(self) -> float:
        """Useful FLOP per byte."""
        return self.flops / self.io_bytes


def prefill_cost(prefill: PrefillPlan, target: Target, *, batch: int, tokens: int, heads: int) -> PrefillCost:
    """Count a prefill call's work on a target; `heads` are those of one rank."""
    columns = prefill.d_qk + prefill.d_v
    padded = _padded_pairs(prefill.tile, tokens)
    flops, padded_flops = (2 * batch * heads * pairs * columns for pairs in (tokens * (tokens + 1) // 2, padded))
    io_bytes = batch * heads * tokens * (2 * columns * ELEMENT_BYTES + 4)
    return PrefillCost(
        batch=batch,
        tokens=tokens,
        heads=heads,
        flops=flops,
        padded_flops=padded_flops,
        io_bytes=io_bytes,
        memory_us=io_bytes / target.read_bandwidth * 1e6,
        compute_us=padded_flops / target.matrix_rate * 1e6,
    )


def _padded_pairs(tile: PrefillTile, tokens: int) -> int:
    """Give the pairs of a row and a token whose products are computed for one head of a sequence.

    A warpgroup multiplies 64 rows with all that the last of them sees, in blocks, of which a last one that is not the
    only one may be narrow.
    """

    def of_rows(first: int, end: int) -> int:
        seen = (min(at + ROWS, end) for at in range(first, end, ROWS))
        return sum(ROWS * _padded_tokens(tile, each) for each in seen)

    # From the second period on rows see what those a period before do, and a period more.
    period = math.lcm(ROWS, tile.tokens)
    pairs = of_rows(0, min(period, tokens))
    if more := max(tokens // period - 1, 0):
        pairs += more * of_rows(period, 2 * period) + more * (more - 1) // 2 * period**2
    if tokens > period:
        pairs += of_rows(tokens // period * period, tokens)
    return pairs


def _padded_tokens(tile: PrefillTile, seen: int) -> int:
    """Give the tokens of the products of rows that see so many."""
    whole, rest = divmod(seen, tile.tokens)
    if not rest:
        return seen
    return whole * tile.tokens + (tile.narrow if whole and rest <= tile.narrow else tile.tokens)


@dataclass(frozen=True)
class DecodeEnergy:
    """What the energy model says of decode calls back to back for seconds. Softmax and spinning are not in it."""

    memory_nj: float
    """Per cached token: the cache from HBM, q and out."""
    reread_nj: float
    """Per cached token: the same bytes of the cache from L2, for the row tiles behind the first."""
    matrix_nj: float
    """Per cached token: the products, rows filled up to whole tiles."""
    static_nj: float
    """Per cached token: the static power for as long as a token takes."""
    tokens_per_second: float
    """Cached tokens."""
    watts: float
    us: float
    """Of a call."""
    tflops: float
    """Useful."""
    gbps: float
    """The cache once, q and out."""
    floor_us: float
    """Of a call, were there no power cap: as in DecodeCost."""
    bound: Literal["memory", "compute", "power"]
    """What decides the rate."""

    @property
    def nj_per_token(self) -> float:
        """Energy of the chip per cached token."""
        return self.memory_nj + self.reread_nj + self.matrix_nj + self.static_nj


def decode_energy(
    target: Target,
    *,
    d_qk: int,
    d_v: int,
    row_bytes: int,
    tile_rows: int,
    tile_tokens: int,
    batch: int,
    context: int,
    rows: int,
) -> DecodeEnergy:
    """Predict decode calls back to back on a target.

    Args:
        target: the GPU.
        d_qk: width of K.
        d_v: width of V.
        row_bytes: of a cached token.
        tile_rows: rows of a block, 64 (M of WGMMA), or fewer (N of it, tokens being M).
        tile_tokens: tokens of a block's step: N of Q K^T.
        batch: requests.
        context: cached tokens of each.
        rows: query tokens x heads of a request.
    """
    model = target.energy
    tokens = batch * context
    row_tiles = -(-rows // tile_rows)
    padded = row_tiles * tile_rows
    cache_bytes, io_bytes = tokens * row_bytes, batch * rows * ((d_qk + d_v) * ELEMENT_BYTES + 4)
    per_byte = model.hbm_to_smem_nj / _TOKEN_BYTES
    memory = (cache_bytes + io_bytes) * per_byte / tokens
    reread = (row_tiles - 1) * row_bytes * model.l2_to_smem_nj / _TOKEN_BYTES
    if tile_rows < 64:
        # Of a tile's rows and 64 tokens: products of depth 16 along d_qk; then along the tokens, 64 columns of V each.
        matrix = row_tiles * (-(-d_qk // 16) / 64 + d_v / 64 / 16) * model.matrix_nj(tile_rows)
    else:
        # Of 64 rows and a step's tokens: products of depth 16 along d_qk; then along the tokens, each half of V by a
        # warpgroup of its own.
        scores = -(-d_qk // 16) * model.matrix_nj(tile_tokens) / tile_tokens
        values = 2 * model.matrix_nj(d_v / 2) / 16
        matrix = padded / 64 * (scores + values)
    dynamic = memory + reread + matrix
    rates = {
        "memory": tokens / ((cache_bytes + io_bytes) / target.read_bandwidth),
        "compute": target.matrix_rate / (2 * row_tiles * _timed_rows(tile_rows) * (d_qk + d_v)),
        "power": (model.power_cap_watts - model.static_watts) / (dynamic * 1e-9),
    }
    bounds: tuple[Literal["memory", "compute", "power"], ...] = ("memory", "compute", "power")
    bound = min(bounds, key=lambda each: rates[each])
    rate = rates[bound]
    return DecodeEnergy(
        memory_nj=memory,
        reread_nj=reread,
        matrix_nj=matrix,
        static_nj=1e9 * model.static_watts / rate,
        tokens_per_second=rate,
        watts=model.static_watts + dynamic * 1e-9 * rate,
        us=1e6 * tokens / rate,
        tflops=2 * rows * (d_qk + d_v) * rate * 1e-12,
        gbps=(cache_bytes + io_bytes) / tokens * rate * 1e-9,
        floor_us=1e6 * tokens / min(rates["memory"], rates["compute"]),
        bound=bound,
    )


_TOKEN_BYTES = 1152  # of the energy model's tokens


def split_counts(lengths: Sequence[int], tile_tokens: int, policy: SchedulePolicy, max_parts: int) -> list[int]:
    """Into how many pieces the kernel cuts each request; the rule of templates/device/schedule.cuh.

    All requests lie on a line, each as long as its blocks and a fixed overhead. The line is cut into equal parts; a cut
    within a request's blocks splits it, unless it is so close to an end that it moves there. Requests of one length get
    whole parts, or parts whole requests, if that leaves few parts idle.
    """
    blocks = [max(-(-length // tile_tokens), 1) for length in lengths]
    total = sum(blocks) + policy.fixed_overhead_blocks * len(blocks)
    parts = min(max(sum(blocks) // policy.min_part_blocks, 1), max_parts)
    counts = [1] * len(blocks)
    if len(set(blocks)) == 1:
        batch = len(blocks)
        whole, pieces = -(-batch // parts), min(parts // batch, blocks[0])
        if batch > parts and batch % whole == 0 and batch // whole * 16 >= parts * 15:
            return counts
        if batch <= parts and pieces * batch * 16 >= parts * 15:
            snap = _snap(blocks[0], pieces, policy)
            cuts = [_boundary(blocks[0], pieces, i) for i in range(1, pieces)]
            return [1 + sum(snap < cut < blocks[0] - snap for cut in cuts)] * batch
    snap = _snap(total, parts, policy)
    start = request = 0
    for part in range(1, parts):
        cut = _boundary(total, parts, part)
        while start + blocks[request] + policy.fixed_overhead_blocks <= cut:
            start += blocks[request] + policy.fixed_overhead_blocks
            request += 1
        if snap < cut - start < blocks[request] - snap:
            counts[request] += 1
    return counts


def _snap(total: int, parts: int, policy: SchedulePolicy) -> int:
    """How close to an end of a request a cut moves there: not at all if the pieces are hardly longer."""
    return policy.snap_blocks if total // parts > 2 * policy.snap_blocks + 1 else 0


def _boundary(total: int, parts: int, part: int) -> int:
    """Where a part begins: pieces of equal length, the first ones a block longer."""
    quotient, more = divmod(total, parts)
    return part * quotient + min(part, more)


@dataclass(frozen=True)
class CacheSize:
    """The key-value cache of one kind of attention, bytes."""

    kind: str
    what: str
    token_layer: int
    """Bytes of one token in one layer."""
    total: int
    """Bytes of the whole batch in all layers."""


def cache_sizes(spec: Spec, *, batch: int, context: int, layers: int) -> tuple[CacheSize, ...]:
    """Compare caches for a batch of requests: multi-head and grouped-query attention, of 16-bit elements, and latent.

    Multi-head attention keeps a key of qk_nope_head_dim and a value of v_head_dim for every head of the whole model,
    grouped-query attention for 8 of them; the latent cache keeps one latent and one rotary key for all. It is counted
    in the spec's own format, and in bf16, too, if that is a quantised one.
    """
    model = spec.model
    head = model.qk_nope_head_dim + model.v_head_dim
    groups = min(GQA_HEADS, model.num_attention_heads)
    latent = model.kv_lora_rank + model.qk_rope_head_dim
    shared = f"{latent}, shared by all heads"
    kinds = [
        ("MHA", f"{model.num_attention_heads} heads x {head}", model.num_attention_heads * head * ELEMENT_BYTES),
        ("GQA-8", f"{groups} heads x {head}", groups * head * ELEMENT_BYTES),
        ("MLA", shared, latent * ELEMENT_BYTES),
    ]
    if spec.layout is not None:
        kinds.append((f"MLA, {spec.cache.dtype}", shared, spec.row_bytes))
    return tuple(CacheSize(kind, what, size, size * batch * context * layers) for kind, what, size in kinds)


def context_that_fits(spec: Spec, target: Target, layers: int) -> int:
    """Give the cached tokens, of all requests together, that the target's memory holds if nothing else is in it."""
    return target.memory // (spec.row_bytes * layers)


def decimal_bytes(size: int) -> str:
    """Write bytes in powers of 1000, as in 4.12 TB."""
    return _with_unit(size, 1000, ("B", "kB", "MB", "GB", "TB", "PB", "EB"))


def binary_bytes(size: int) -> str:
    """Write bytes in powers of 1024, as in 3.75 TiB."""
    return _with_unit(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))


def _with_unit(size: int, base: int, units: Sequence[str]) -> str:
    power = 0
    while power + 1 < len(units) and size >= base ** (power + 1):
        power += 1
    # 999.9996 of a unit would be written as 1000: that is 1 of the next.
    if power + 1 < len(units) and float(f"{size / base**power:.4g}") >= base:
        power += 1
    return f"{size / base**power:.4g} {units[power]}" if power else f"{size} B"
