"""What a decode call costs at least, and what the caches of other kinds of attention would take.

Counted are the bytes that must cross the memory bus once and the products that must be computed. A floor is the longer
of the two times at the target's measured rates, launch and merge latency left out: no kernel is faster, a good one is
near.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .plan import ELEMENT_BYTES, Plan, SchedulePolicy
from .spec import Model

GQA_HEADS = 8
"""Key and value heads of the grouped-query attention that MLA is compared with."""


@dataclass(frozen=True)
class DecodeCost:
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

    @property
    def floor_us(self) -> float:
        """The least time, microseconds."""
        return max(self.memory_us, self.compute_us)

    @property
    def bound(self) -> Literal["memory", "compute"]:
        """What decides the floor."""
        return "memory" if self.memory_us >= self.compute_us else "compute"


def decode_cost(plan: Plan, *, batch: int, context: int, s_q: int = 1, heads: int | None = None) -> DecodeCost:
    """Count a decode call's work on the plan's target; `heads` are those of one rank if None."""
    heads = plan.spec.heads_per_rank if heads is None else heads
    decode, target = plan.decode, plan.target
    rows = s_q * heads
    row_tiles = -(-rows // decode.tile.rows)
    columns = decode.d_qk + decode.d_v
    flops = 2 * batch * rows * context * columns
    padded_flops = 2 * batch * row_tiles * decode.tile.rows * context * columns
    parts = max(target.sms // row_tiles, 1)
    splits = sum(n for n in split_counts([context] * batch, decode.tile.tokens, decode.schedule, parts) if n > 1)
    cache_bytes = batch * context * decode.d_qk * ELEMENT_BYTES
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
        compute_us=padded_flops / target.matrix_rate * 1e6,
    )


def split_counts(lengths: Sequence[int], tile_tokens: int, policy: SchedulePolicy, max_parts: int) -> list[int]:
    """Into how many pieces the kernel cuts each request; the rule of templates/device/schedule.cuh.

    All requests lie on a line, each as long as its blocks and a fixed overhead. The line is cut into equal parts; a cut
    within a request's blocks splits it, unless it is so close to an end that it moves there.
    """
    blocks = [max(-(-length // tile_tokens), 1) for length in lengths]
    total = sum(blocks) + policy.fixed_overhead_blocks * len(blocks)
    parts = min(max(total // policy.min_part_cost, 1), max_parts)
    counts = [1] * len(blocks)
    start = request = 0
    for part in range(1, parts):
        cut = total * part // parts
        while start + blocks[request] + policy.fixed_overhead_blocks <= cut:
            start += blocks[request] + policy.fixed_overhead_blocks
            request += 1
        if policy.snap_blocks < cut - start < blocks[request] - policy.snap_blocks:
            counts[request] += 1
    return counts


@dataclass(frozen=True)
class CacheSize:
    """The key-value cache of one kind of attention, bytes."""

    kind: str
    what: str
    token_layer: int
    """Bytes of one token in one layer."""
    total: int
    """Bytes of the whole batch in all layers."""


def cache_sizes(model: Model, *, batch: int, context: int, layers: int) -> tuple[CacheSize, ...]:
    """Compare caches of 16-bit elements for a batch of requests: multi-head, grouped-query and latent attention.

    Multi-head attention keeps a key of qk_nope_head_dim and a value of v_head_dim for every head of the whole model,
    grouped-query attention for 8 of them; the latent cache keeps one latent and one rotary key for all.
    """
    head = model.qk_nope_head_dim + model.v_head_dim
    groups = min(GQA_HEADS, model.num_attention_heads)
    latent = model.kv_lora_rank + model.qk_rope_head_dim
    kinds = (
        ("MHA", f"{model.num_attention_heads} heads x {head}", model.num_attention_heads * head),
        ("GQA-8", f"{groups} heads x {head}", groups * head),
        ("MLA", f"{latent}, shared by all heads", latent),
    )
    return tuple(
        CacheSize(kind, what, elements * ELEMENT_BYTES, elements * ELEMENT_BYTES * batch * context * layers)
        for kind, what, elements in kinds
    )


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
