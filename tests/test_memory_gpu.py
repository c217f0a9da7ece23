"""gather, append and merge on a Hopper GPU: every shape, graphs, streams, sizes beyond 2^31, and their bandwidth.

Run with `pytest -m gpu`; `-s` shows the bandwidths. MLAFORGE_GPU_MATRIX=reduced cuts the problems down to what
compute-sanitizer can bear.
"""

from __future__ import annotations

import functools
import math
import os
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mlaforge
from mlaforge.api import MLA
from mlaforge.memory_reference import append_reference, gather_reference, merge_reference
from mlaforge.memory_verify import KINDS, MemoryProblem, random_problems, verify_problems

pytestmark = pytest.mark.gpu

REDUCED = os.environ.get("MLAFORGE_GPU_MATRIX") == "reduced"
SHAPES = {"576": (512, 64), "512": (512, 0), "320": (256, 64), "288": (256, 32), "432": (384, 48), "144": (128, 16)}


@functools.cache
def variant(shape: str = "576", page_size: int = 64, dtype: str = "bf16") -> MLA:
    """Load the kernels of a shape, of a model that exists or not."""
    rank, rope = SHAPES[shape]
    path = Path(tempfile.mkdtemp()) / "spec.yaml"
    path.write_text(
        f"name: d{shape}_p{page_size}_{dtype}\n"
        f"model: {{num_attention_heads: 128, kv_lora_rank: {rank}, qk_nope_head_dim: 128, qk_rope_head_dim: {rope},"
        " v_head_dim: 128}\n"
        f"cache: {{dtype: {dtype}, page_size: {page_size}}}\n"
    )
    return mlaforge.load(path)


def accept(mla: MLA, problems: list[MemoryProblem]) -> None:
    report = verify_problems(mla, problems)
    if report.failure is not None:
        pytest.fail(f"{report.failure.problem.to_repro(mla.manifest.name)}: {report.failure.outcome.failures}")
    assert report.problems == len(problems) > 0


@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape: str, dtype: str, page_size: int) -> None:
    mla = variant(shape, page_size, dtype)
    accept(mla, random_problems(mla.manifest, 3 if REDUCED else 25, page_size, 300 if REDUCED else 20_000))


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=20 if REDUCED else 200)
@given(
    seed=st.integers(0, 2**32 - 1), kernel=st.sampled_from(sorted(KINDS)), shape=st.sampled_from(["576", "512", "288"])
)
def test_random_problems(seed: int, kernel: str, shape: str) -> None:
    mla = variant(shape)
    problem = KINDS[kernel].random(random.Random(seed), mla.manifest, 500 if REDUCED else 1 << 17)
    outcome = problem.run(mla, "cuda")
    assert outcome.ok, f"{problem.to_repro(mla.manifest.name)}: {outcome.failures}"


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Compare to the bit, NaN included."""
    return torch.equal(x.contiguous().view(torch.int16), y.contiguous().view(torch.int16))


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def angles(positions: int) -> torch.Tensor:
    turns = torch.arange(positions, device="cuda")[:, None] * 10_000.0 ** -(torch.arange(32, device="cuda") / 32)
    return torch.cat([turns.cos(), turns.sin()], -1)


# ---- Graphs and streams ----------------------------------------------------------------------------------------------


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def test_graph_of_gather_replays_with_other_ranges_and_tables() -> None:
    mla = variant()
    cache = normal(400, 64, 576)
    table, borders, starts = torch.zeros(3, 130, dtype=torch.int32, device="cuda"), int32(0, 1, 2, 3), int32(0, 0, 0)
    graph, out = captured(lambda: mla.gather(cache, table, borders, seq_starts=starts, total_tokens=9_000))
    for counts, firsts in (((8_000, 0, 1_000), (5, 0, 63)), ((0, 0, 0), (0, 0, 0)), ((1, 2, 3), (8_000, 64, 127))):
        table.copy_(torch.randperm(400, device="cuda")[:390].view(3, 130))
        borders.copy_(torch.tensor([0, *counts]).cumsum(0))
        starts.copy_(torch.tensor(firsts))
        out.fill_(math.nan)
        want = gather_reference(cache, table, borders, starts, out)
        graph.replay()
        assert same(out, want), counts


def test_graph_of_append_replays_with_other_slots_and_positions() -> None:
    mla = variant()
    n = 300
    c_kv, k_rope, weight, table = normal(n, 512), normal(n, 64), normal(512), angles(4_096)
    cache = torch.full((40, 64, 576), math.nan, dtype=torch.bfloat16, device="cuda")
    slots = torch.full((n,), -1, device="cuda")
    positions = torch.zeros(n, dtype=torch.int64, device="cuda")

    def call() -> None:
        mla.append(
            c_kv,
            k_rope,
            cache,
            slots,
            norm_weight=weight,
            positions=positions,
            cos_sin_cache=table,
            interleaved=True,
        )

    graph, _ = captured(call)
    assert bool(cache.isnan().all())
    for _ in range(3):
        c_kv.normal_()
        k_rope.normal_()
        slots.copy_(torch.randperm(40 * 64, device="cuda")[:n])
        slots[::7] = -1
        positions.random_(0, 4_096)
        cache.fill_(math.nan)
        graph.replay()
        kept = slots[slots >= 0]
        rows = cache.view(-1, 576)
        want = append_reference(
            c_kv, k_rope, norm_weight=weight, positions=positions, cos_sin_cache=table, interleaved=True
        )
        torch.testing.assert_close(rows[kept].double(), want[slots >= 0], rtol=2**-8, atol=1e-5)
        assert int((~rows.isnan()).any(-1).sum()) == len(kept)


def test_graph_of_merge_replays_with_other_numbers() -> None:
    mla = variant()
    out1, out2 = normal(70, 16, 512), normal(70, 16, 512)
    lse1, lse2 = torch.randn(2, 16, 70, device="cuda")
    graph, (out, lse) = captured(lambda: mla.merge(out1, lse1, out2, lse2))
    for _ in range(3):
        for tensor in (out1, out2, lse1, lse2):
            tensor.normal_()
        lse1[torch.rand_like(lse1) < 0.3] = math.inf
        lse2[torch.rand_like(lse2) < 0.3] = -math.inf
        graph.replay()
        want, want_lse = merge_reference(out1, lse1, out2, lse2)
        torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=1e-5)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)


def test_current_stream() -> None:
    mla = variant()
    tokens, cache = normal(64, 576), torch.zeros(1, 64, 576, dtype=torch.bfloat16, device="cuda")
    late = torch.zeros_like(tokens)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(tokens)
        mla.append(late[:, :512], late[:, 512:], cache, torch.arange(64, device="cuda"))
        got = mla.gather(cache, int32(0)[None], int32(0, 64), total_tokens=64)
    side.synchronize()
    assert torch.equal(got, tokens)


# ---- Sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(REDUCED, reason="large")
def test_block_ids_and_slots_beyond_2_to_31_elements() -> None:
    # 2^31 elements are 58,254 blocks of 64 x 576, 2^31 bytes half of them.
    mla = variant()
    blocks = 80_000
    cache = torch.full((blocks, 64, 576), math.nan, dtype=torch.bfloat16, device="cuda")
    tokens = normal(300, 576)
    table = int32(blocks - 1, 3, 60_000, 29_127, 58_254)[None]
    at = torch.arange(300, device="cuda")
    mla.append(tokens[:, :512], tokens[:, 512:], cache, table[0, at // 64].long() * 64 + at % 64)
    assert torch.equal(mla.gather(cache, table, int32(0, 300), total_tokens=300), tokens)
    assert int((~cache[:, :, 0].isnan()).sum()) == 300


@pytest.mark.skipif(REDUCED, reason="large")
def test_results_beyond_2_to_31_elements() -> None:
    mla = variant()
    rows = 4_000_000
    cache = normal(1_000, 64, 576)
    table = torch.randint(0, 1_000, (1, rows // 64), dtype=torch.int32, device="cuda")
    out = mla.gather(cache, table, int32(0, rows), total_tokens=rows)
    for first in (0, rows // 2, rows - 100):
        at = torch.arange(first, first + 100, device="cuda")
        assert torch.equal(out[at], cache[table[0, at // 64].long(), at % 64])
    # 2,048 million elements a side; the row behind the middle lies beyond 2^31 bytes.
    tokens, heads = 31_250, 128
    out1, out2 = out.flatten()[: tokens * heads * 512].view(tokens, heads, 512), normal(1, heads, 512)
    out2 = out2.expand(tokens, -1, -1)
    lse1, lse2 = torch.randn(2, heads, tokens, device="cuda")
    merged, lse = mla.merge(out1, lse1, out2, lse2)
    for first in (0, tokens // 2, tokens - 9):
        part = slice(first, first + 9)
        want, want_lse = merge_reference(out1[part], lse1[:, part], out2[part], lse2[:, part])
        torch.testing.assert_close(merged[part].double(), want, rtol=2**-8, atol=1e-5)
        torch.testing.assert_close(lse[:, part].double(), want_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("batch", [1, 2, 65_536, 70_000])
def test_gather_of_large_batches(batch: int) -> None:
    mla = variant()
    cache = normal(100, 64, 576)
    counts = torch.randint(0, 4, (batch,), device="cuda")
    borders = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    starts = torch.randint(0, 300, (batch,), device="cuda").int()
    table = torch.randint(0, 100, (batch, 5), device="cuda").int()
    rows = int(borders[-1])
    out = mla.gather(cache, table, borders, seq_starts=starts, total_tokens=rows)
    sequence = torch.repeat_interleave(torch.arange(batch, device="cuda"), counts)
    token = starts[sequence].long() + torch.arange(rows, device="cuda") - borders[sequence]
    assert torch.equal(out, cache[table[sequence, token // 64].long(), token % 64])


# ---- Operators and arguments -----------------------------------------------------------------------------------------


def test_operators() -> None:
    mla = variant()
    key = mla._memory.key
    ranges = (normal(4, 64, 576), torch.zeros(1, 3, dtype=torch.int32, device="cuda"), int32(0, 9), int32(60), None)
    partials = (normal(5, 3, 64), normal(3, 5).float(), normal(5, 3, 64), normal(3, 5).float())
    slots = torch.arange(5, device="cuda")
    check = torch.library.opcheck
    check(torch.ops.mlaforge.gather, (*ranges, 9, key))
    check(torch.ops.mlaforge.gather_out, (*ranges, normal(9, 576), key))
    check(
        torch.ops.mlaforge.append,
        (normal(5, 512), normal(5, 64), ranges[0], slots, normal(512), slots, angles(9), None, 1e-6, True, key),
    )
    check(torch.ops.mlaforge.merge, (*partials, key))
    check(torch.ops.mlaforge.merge_out, (*partials, normal(5, 3, 64), normal(3, 5).float(), key))


def test_torch_compile() -> None:
    mla = variant()

    def layer(c_kv: torch.Tensor, k_rope: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        mla.append(c_kv * 2, k_rope, cache, slots)
        return mla.gather(cache, int32(1)[None], int32(0, 5), total_tokens=5) + 1

    c_kv, k_rope, slots = normal(5, 512), normal(5, 64), torch.arange(64, 69, device="cuda")
    caches = [torch.zeros(3, 64, 576, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    want = layer(c_kv, k_rope, caches[0], slots)
    got = torch.compile(layer, fullgraph=True)(c_kv, k_rope, caches[1], slots)
    assert torch.equal(got, want) and torch.equal(*caches) and bool(caches[0][1, :5].any())


def test_tensors_that_are_not_on_the_gpu_are_refused() -> None:
    mla = variant()
    with pytest.raises(ValueError, match="block_table is on cpu, kv_cache is on cuda"):
        mla.gather(normal(1, 64, 576), torch.zeros(1, 1, dtype=torch.int32), int32(0, 1), total_tokens=1)
    with pytest.raises(ValueError, match="c_kv is on cpu; these kernels run on cuda"):
        mla.append(normal(1, 512).cpu(), normal(1, 64), normal(1, 64, 576), torch.zeros(1).long())


def test_same_results_as_under_the_simulator() -> None:
    """Copies to the bit; of what is computed only the last bit of float32 may differ, which rounding mostly hides."""
    there, here = variant(), mlaforge.load("deepseek_v3", device="sim")
    torch.manual_seed(0)
    c_kv, k_rope, weight = (torch.randn(40, n).bfloat16() for n in (512, 64, 512))
    table = angles(512).cpu()
    positions, slots = torch.randint(0, 512, (40,)), torch.randperm(128)[:40]
    out1, out2 = torch.randn(2, 9, 5, 128).bfloat16()
    lse1, lse2 = torch.randn(2, 5, 9)
    results: list[list[torch.Tensor]] = []
    for mla, device in ((here, "cpu"), (there, "cuda")):
        cache = torch.zeros(2, 64, 576, dtype=torch.bfloat16, device=device)
        options = {"positions": positions.to(device), "cos_sin_cache": table.to(device), "interleaved": True}
        mla.append(
            *(x.to(device) for x in (c_kv, k_rope)),
            cache,
            slots.to(device),
            norm_weight=weight[0].to(device),
            **options,
        )
        out, lse = mla.merge(*(x.to(device) for x in (out1, lse1, out2, lse2)))
        results.append([x.cpu() for x in (cache, out, lse)])
    for on_cpu, on_gpu in zip(*results, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=2**-7 if on_cpu.dtype != torch.float32 else 1e-6, atol=1e-6)
        assert float((on_gpu != on_cpu).double().mean()) < (0.01 if on_cpu.dtype != torch.float32 else 1)


# ---- Bandwidth -------------------------------------------------------------------------------------------------------


def seconds(call: Callable[[], object]) -> float:
    """Time a call, the median of many, one at a time; its tensors are larger than L2."""
    for _ in range(3):
        call()
    times = []
    for _ in range(20):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # So that the host is ahead: its own time is not the kernel's.
        torch.cuda._sleep(1_000_000)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def gather_call(mla: MLA) -> tuple[Callable[[], object], int]:
    batch, count = 64, 8_192
    rows = batch * count
    cache = normal(rows // 64 + 64, 64, 576)
    table = torch.randperm(rows // 64 + 64, device="cuda")[: batch * (count // 64 + 1)].view(batch, -1).int()
    borders = torch.arange(0, rows + 1, count, device="cuda").int()
    starts = torch.randint(0, 64, (batch,), device="cuda").int()
    out = torch.empty(rows, 576, dtype=torch.bfloat16, device="cuda")
    return lambda: mla.gather(cache, table, borders, seq_starts=starts, out=out), rows * 2 * 1_152


def append_call(mla: MLA, fused: bool) -> tuple[Callable[[], object], int]:
    n = 1 << 19
    rows, cache = normal(n, 576), torch.empty(n // 64, 64, 576, dtype=torch.bfloat16, device="cuda")
    slots = (torch.randperm(n // 64, device="cuda")[:, None] * 64 + torch.arange(64, device="cuda")).flatten()
    options: dict[str, Any] = {}
    if fused:
        options = {"norm_weight": normal(512), "positions": torch.arange(n, device="cuda") % 8_192}
        options |= {"cos_sin_cache": angles(8_192), "interleaved": True}
    return lambda: mla.append(rows[:, :512], rows[:, 512:], cache, slots, **options), n * 2 * 1_152


def merge_call(mla: MLA, tokens: int, width: int) -> tuple[Callable[[], object], int]:
    heads = 16
    out1, out2, out = (normal(tokens, heads, width) for _ in range(3))
    lse1, lse2, lse = torch.randn(3, heads, tokens, device="cuda")
    return lambda: mla.merge(out1, lse1, out2, lse2, out=out, lse=lse), 3 * tokens * heads * (2 * width + 4)


CALLS = {
    "gather": gather_call,
    "append": lambda mla: append_call(mla, fused=False),
    "append, normalised and rotated": lambda mla: append_call(mla, fused=True),
    "merge of 512": lambda mla: merge_call(mla, 16_384, 512),
    "merge of 128": lambda mla: merge_call(mla, 65_536, 128),
}


@pytest.mark.skipif(REDUCED, reason="a sanitizer's times mean nothing")
@pytest.mark.parametrize("name", CALLS)
def test_bandwidth_is_near_that_of_a_copy(name: str) -> None:
    call, size = CALLS[name](variant())
    source = torch.empty(size // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    ours, copy = seconds(call), seconds(lambda: target.copy_(source))
    share = copy / ours
    print(f"\n{name}: {size / ours / 1e9:,.0f} GB/s, {share:.1%} of a copy's {size / copy / 1e9:,.0f} GB/s")
    assert share >= 0.85
