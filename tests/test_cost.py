"""Traffic, work and floors against numbers worked out by hand, and the split rule against its definition."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlaforge_generator.cost import (
    binary_bytes,
    cache_sizes,
    context_that_fits,
    decimal_bytes,
    decode_cost,
    decode_energy,
    prefill_cost,
    split_counts,
)
from mlaforge_generator.plan import Plan, SchedulePolicy, make_plan
from mlaforge_generator.prefill_plan import PrefillPlan
from mlaforge_generator.resources import find_spec
from mlaforge_generator.spec import Cache, load_spec
from mlaforge_generator.target import H200


def plan_of(name: str = "deepseek_v3") -> Plan:
    return make_plan(load_spec(find_spec(name)))


def at_rates(bandwidth: float, rate: float) -> Plan:
    plan = plan_of()
    target = dataclasses.replace(plan.target, read_bandwidth=bandwidth, matrix_rate=rate)
    return dataclasses.replace(plan, target=target)


def test_cache_sizes_are_exact() -> None:
    mha, gqa, mla = cache_sizes(plan_of().spec, batch=16, context=65_536, layers=60)
    assert [size.kind for size in (mha, gqa, mla)] == ["MHA", "GQA-8", "MLA"]
    assert [size.token_layer for size in (mha, gqa, mla)] == [65_536, 4_096, 1_152]
    assert (mha.total, gqa.total, mla.total) == (4_123_168_604_160, 257_698_037_760, 72_477_573_120)
    assert [decimal_bytes(size.total) for size in (mha, gqa, mla)] == ["4.123 TB", "257.7 GB", "72.48 GB"]
    assert [binary_bytes(size.total) for size in (mha, gqa, mla)] == ["3.75 TiB", "240 GiB", "67.5 GiB"]


def test_gqa_has_no_more_heads_than_there_are() -> None:
    spec = plan_of().spec
    few = spec.model_copy(update={"model": spec.model.model_copy(update={"num_attention_heads": 4})})
    mha, gqa, _ = cache_sizes(few, batch=1, context=1, layers=1)
    assert mha.total == gqa.total == 4 * 256 * 2


@pytest.mark.parametrize(
    ("dtype", "row_bytes", "fits"),
    [
        ("bf16", 1_152, 2_006_489),
        ("fp8_e4m3", 576, 4_012_978),
        ("fp8_e4m3_token", 656, 3_523_590),
        ("fp8_ds_mla", 656, 3_523_590),
        ("nvfp4", 416, 5_556_431),
    ],
)
def test_a_quantised_cache_holds_more_context(dtype: str, row_bytes: int, fits: int) -> None:
    """Of 61 layers in 141 GB; beside the format's own bytes stand those of bf16."""
    spec = plan_of().spec
    spec = spec.model_copy(update={"cache": Cache.model_validate({"dtype": dtype})})
    sizes = cache_sizes(spec, batch=2, context=100, layers=61)
    assert context_that_fits(spec, H200, layers=61) == fits == 141_000_000_000 // (row_bytes * 61)
    assert [size.token_layer for size in sizes[2:]] == ([1_152] if dtype == "bf16" else [1_152, row_bytes])
    assert sizes[-1].total == row_bytes * 2 * 100 * 61


@pytest.mark.parametrize(
    ("size", "decimal", "binary"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (1000, "1 kB", "1000 B"),
        (1024, "1.024 kB", "1 KiB"),
        (999_999, "1 MB", "976.6 KiB"),
        (1024**2 - 1, "1.049 MB", "1 MiB"),
        (232_448, "232.4 kB", "227 KiB"),
        (10**21, "1000 EB", "867.4 EiB"),
    ],
)
def test_units_are_never_mixed(size: int, decimal: str, binary: str) -> None:
    assert (decimal_bytes(size), binary_bytes(size)) == (decimal, binary)


@pytest.mark.parametrize(
    ("heads", "s_q", "useful", "padded", "memory_ns", "compute_ns", "bound"),
    [
        # N of WGMMA: 16 rows take as long as 40 at its full rate, 32 as long as 48.
        (16, 1, 30.2, 30.2, 0.268, 0.110, "memory"),
        (16, 2, 60.5, 60.5, 0.268, 0.132, "memory"),
        (20, 1, 37.8, 60.5, 0.268, 0.132, "memory"),
        (32, 2, 120.9, 120.9, 0.268, 0.176, "memory"),
        (64, 1, 120.9, 120.9, 0.268, 0.176, "memory"),
        (64, 2, 241.8, 241.8, 0.268, 0.353, "compute"),
        (128, 1, 241.8, 241.8, 0.268, 0.353, "compute"),
        (128, 2, 483.6, 483.6, 0.268, 0.705, "compute"),
    ],
)
def test_floors_of_a_cached_token(
    heads: int, s_q: int, useful: float, padded: float, memory_ns: float, compute_ns: float, bound: str
) -> None:
    tokens = 1 << 26  # So many that q, out and partial results no longer count.
    cost = decode_cost(at_rates(4.3e12, 790e12), batch=1, context=tokens, s_q=s_q, heads=heads)
    assert cost.intensity == pytest.approx(useful, rel=2e-3)
    assert cost.padded_intensity == pytest.approx(padded, rel=2e-3)
    assert cost.memory_us * 1e3 / tokens == pytest.approx(memory_ns, abs=6e-4)
    assert cost.compute_us * 1e3 / tokens == pytest.approx(compute_ns, abs=6e-4)
    assert cost.bound == bound and cost.floor_us == max(cost.memory_us, cost.compute_us)


def test_a_call_counted_by_hand() -> None:
    cost = decode_cost(plan_of(), batch=128, context=4096, heads=48)
    assert cost.flops == 2 * 128 * 48 * 4096 * (576 + 512)
    assert 3 * cost.padded_flops == 4 * cost.flops
    assert cost.cache_bytes == 128 * 4096 * 1152
    assert cost.io_bytes == 128 * 48 * (1152 + 1024 + 4)
    # 128 requests of one length on 132 parts: a part for each, and 4 without work.
    assert cost.splits == 0
    assert cost.partial_bytes == 0
    assert cost.bytes == cost.cache_bytes + cost.io_bytes


@functools.cache
def prefill_of(name: str) -> PrefillPlan:
    (prefill,) = (kernel for kernel in plan_of(name).kernels if isinstance(kernel, PrefillPlan))
    return prefill


@pytest.mark.parametrize(
    ("name", "tokens", "seen"),
    [
        # Rows of 64; blocks of 128, of which a last one that is not the only one may have 64.
        ("deepseek_v3", 200, (128, 128, 192, 256)),
        # Blocks of 80, none of them narrow.
        ("glm_5", 200, (80, 160, 240, 240)),
        ("deepseek_v3", 1, (128,)),
    ],
)
def test_a_prefill_call_counted_by_hand(name: str, tokens: int, seen: tuple[int, ...]) -> None:
    prefill = prefill_of(name)
    columns = prefill.d_qk + prefill.d_v
    cost = prefill_cost(prefill, H200, batch=3, tokens=tokens, heads=5)
    assert cost.flops == 2 * 3 * 5 * (tokens * (tokens + 1) // 2) * columns
    assert cost.padded_flops == 2 * 3 * 5 * 64 * sum(seen) * columns
    assert cost.io_bytes == 3 * 5 * tokens * (2 * columns * 2 + 4)
    assert cost.intensity == cost.flops / cost.io_bytes


@given(name=st.sampled_from(["deepseek_v3", "glm_5", "minicpm3"]), tokens=st.integers(1, 3000))
def test_padding_of_prompts_is_that_of_their_rows(name: str, tokens: int) -> None:
    prefill = prefill_of(name)
    block, pairs = prefill.tile.tokens, 0
    for first in range(0, tokens, 64):
        blocks, rest = divmod(min(first + 64, tokens), block)
        half = prefill.tile.narrow and blocks and 0 < rest <= prefill.tile.narrow
        pairs += 64 * (blocks * block + (prefill.tile.narrow if half else block * (rest > 0)))
    cost = prefill_cost(prefill, H200, batch=1, tokens=tokens, heads=1)
    assert cost.padded_flops == 2 * pairs * (prefill.d_qk + prefill.d_v) >= cost.flops


def test_long_prompts_are_bound_by_products() -> None:
    """And hardly padded; a prompt of one token is padded to a whole block."""
    prefill = prefill_of("deepseek_v3")
    cost = prefill_cost(prefill, H200, batch=1, tokens=32_768, heads=16)
    assert cost.bound == "compute" and cost.floor_us == cost.compute_us > cost.memory_us
    assert cost.flops / cost.floor_us * 1e6 == pytest.approx(H200.matrix_rate, rel=5e-3)
    short = prefill_cost(prefill, H200, batch=64, tokens=1, heads=16)
    assert short.padded_flops == 64 * 128 * short.flops


@pytest.mark.parametrize(("rows", "matrix_nj"), [(16, 37.1875), (32, 61.625), (64, 87.5)])
def test_energy_of_the_products_of_few_rows(rows: int, matrix_nj: float) -> None:
    plan = plan_of()
    tile = plan.decode_for(rows).tile
    energy = decode_energy(
        plan.target,
        d_qk=576,
        d_v=512,
        row_bytes=1152,
        tile_rows=tile.rows,
        tile_tokens=tile.tokens,
        batch=64,
        context=8192,
        rows=rows,
    )
    # 36 products of 64 tokens, then 32 with V: 68 m64nNk16; of 64 rows 36 m64n64k16 and 8 m64n256k16.
    assert energy.matrix_nj == pytest.approx(matrix_nj)


def test_heads_default_to_those_of_a_rank() -> None:
    spec = plan_of().spec.model_copy(update={"tensor_parallel": 8})
    assert decode_cost(make_plan(spec), batch=1, context=64).heads == 16


POLICY = SchedulePolicy(fixed_overhead_blocks=5, snap_blocks=1, min_part_blocks=3)


def by_definition(lengths: list[int], policy: SchedulePolicy, max_parts: int) -> list[int]:
    """Walk every part over every request and count those that hold a block of it."""
    blocks = [max(-(-length // 64), 1) for length in lengths]
    costs = [count + policy.fixed_overhead_blocks for count in blocks]
    parts = min(max(sum(blocks) // policy.min_part_blocks, 1), max_parts)
    shortest = sum(costs) // parts

    def pieces(begin: int, length: int, count: int) -> list[int]:
        return [begin + length // count * i + min(i, length % count) for i in range(count)]

    def before(at: int, request: int) -> int:
        t = at - sum(costs[:request])
        snap = policy.snap_blocks if shortest > 2 * policy.snap_blocks + 1 else 0
        return 0 if t <= snap else blocks[request] if t >= blocks[request] - snap else t

    cuts = pieces(0, sum(costs), parts)
    if len(set(blocks)) == 1:
        requests = [sum(costs[:i]) for i in range(len(lengths))]
        whole = next(n for n in range(1, len(lengths) + 1) if n * parts >= len(lengths))
        if len(lengths) > parts:
            even = requests[::whole] if len(lengths) % whole == 0 else []
        else:
            count = min(parts // len(lengths), blocks[0])
            even = [cut for start in requests for cut in pieces(start, blocks[0], count)]
        if 16 * len(even) >= 15 * parts:
            cuts = even
            shortest = blocks[0] // count if len(lengths) <= parts else blocks[0]
    cuts.append(sum(costs))
    return [
        sum(before(end, request) > before(begin, request) for begin, end in itertools.pairwise(cuts))
        for request in range(len(lengths))
    ]


@given(
    lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=20)
    | st.builds(lambda length, batch: [length] * batch, st.integers(0, 3000), st.integers(1, 200)),
    overhead=st.integers(2, 9),
    snap=st.integers(0, 1),
    max_parts=st.sampled_from([1, 2, 33, 66, 132]),
)
def test_split_counts_are_the_kernels(lengths: list[int], overhead: int, snap: int, max_parts: int) -> None:
    policy = SchedulePolicy(fixed_overhead_blocks=overhead, snap_blocks=snap, min_part_blocks=3)
    assert split_counts(lengths, 64, policy, max_parts) == by_definition(lengths, policy, max_parts)


def test_extreme_splits() -> None:
    assert split_counts([0], 64, POLICY, 132) == [1]
    assert split_counts([1 << 20], 64, POLICY, 132) == [132]
    assert split_counts([64] * 132, 64, POLICY, 132) == [1] * 132
    assert split_counts([], 64, POLICY, 132) == []
