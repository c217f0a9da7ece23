"""The decode kernels on a Hopper GPU: FlashMLA's own matrix, every pair, page size and dtype, faults met in the field.

Run with `pytest -m gpu`. MLAFORGE_GPU_MATRIX=reduced cuts the problems down to what compute-sanitizer can bear.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import random
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mlaforge
from mlaforge.api import MLA
from mlaforge.reference import decode_reference
from mlaforge.verify import (
    IMPOSSIBLE_PAGE,
    Problem,
    check_output,
    flashmla_matrix,
    make_inputs,
    random_problem,
    run_problem,
    verify_problems,
)

pytestmark = pytest.mark.gpu

REDUCED = os.environ.get("MLAFORGE_GPU_MATRIX") == "reduced"
PAIRS = {(576, 512): (512, 64), (512, 512): (512, 0), (320, 256): (256, 64), (288, 256): (256, 32)}


@functools.cache
def variant(d_qk: int, d_v: int, page_size: int = 64, dtype: str = "bf16", tile_rows: int | str = "auto") -> MLA:
    """Load the kernels of a shape, of a model that exists or not; `tile_rows` leaves one decode kernel."""
    rank, rope = PAIRS[d_qk, d_v]
    path = Path(tempfile.mkdtemp()) / "spec.yaml"
    path.write_text(
        f"name: d{d_qk}_p{page_size}_{dtype}\n"
        f"model: {{num_attention_heads: 128, kv_lora_rank: {rank}, qk_nope_head_dim: 128, qk_rope_head_dim: {rope},"
        " v_head_dim: 128}\n"
        f"cache: {{dtype: {dtype}, page_size: {page_size}}}\n"
        f"kernels: {{decode: {{tile_rows: {tile_rows}}}}}\n"
    )
    return mlaforge.load(path)


def accept(mla: MLA, problems: list[Problem]) -> None:
    report = verify_problems(mla, problems)
    if report.failure is not None:
        pytest.fail(f"{report.failure.problem.to_repro(mla.manifest.name)}: {report.failure.errors.failures}")
    assert report.problems == len(problems) > 0


@pytest.mark.parametrize("s_q", [1, 2, 4])
@pytest.mark.parametrize("b", [1, 2, 6, 64, 128])
def test_flashmla_matrix(b: int, s_q: int) -> None:
    problems = [p for p in flashmla_matrix() if p.batch == b and p.s_q == s_q]
    if b == 128 and s_q != 2:
        pytest.skip("the matrix has a batch of 128 at s_q = 2 only")
    if REDUCED:
        problems = [p for p in problems if p.tokens <= 1000][::17]
        if not problems:
            pytest.skip("nothing small enough")
    accept(variant(576, 512), problems)


EDGES = (
    Problem(lengths=(0, 1, 64, 0, 65)),
    Problem(lengths=(0, 0, 0)),
    Problem(lengths=(0,)),
    Problem(lengths=(0,), table_filler=-1),
    Problem(lengths=(1, 2, 3), s_q=4, causal=True),
    Problem(lengths=(1,), s_q=17, causal=True, h_q=20),
    Problem(lengths=(1, 2, 62, 63, 64, 65, 127, 128, 129, 191, 192, 193)),
    Problem(lengths=(1, 2, 62, 63, 64, 65, 127, 128, 129, 191, 192, 193), s_q=2, causal=True),
    Problem(lengths=(70, 200, 30), nan_request=1, h_q=16),
    Problem(lengths=(130, 64), table_extra_columns=292, h_q=16),
    Problem(lengths=(130, 64), cache_layers=5, h_q=16),
    Problem(lengths=(130, 64), table_padding=7, table_filler=-1, h_q=5),
    Problem(lengths=(5000, 300), logit_shift=-65_536, h_q=16),
    Problem(lengths=(5000, 300), logit_shift=131_072, h_q=16),
    Problem(lengths=(4096,) * 3, q_gain=32, h_q=40),
    Problem(lengths=(100_000,), h_q=16),
    Problem(lengths=(30_000, 0, 1, 9_000), s_q=3, causal=True, h_q=96),
    Problem(lengths=(700, 64), s_q=2, h_q=6, h_kv=3, causal=True),
)


@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_every_shape(pair: tuple[int, int], dtype: str, page_size: int) -> None:
    mla = variant(*pair, page_size, dtype)
    problems = [dataclasses.replace(p, h_q=p.h_q if p.h_q > 1 else 20) for p in EDGES]
    rng = random.Random(f"{pair} {dtype} {page_size}")
    problems += [random_problem(rng, mla.manifest, 20_000) for _ in range(12)]
    if REDUCED:
        problems = [p for p in problems if p.tokens * p.s_q * p.h_q <= 100_000][:6]
    accept(mla, problems)


@pytest.mark.parametrize("heads", [4, 5, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128])
def test_every_head_count_of_a_rank(heads: int) -> None:
    accept(variant(576, 512), [Problem(lengths=(300, 1, 0, 77), h_q=heads, s_q=s, causal=True) for s in (1, 2, 5, 17)])


@pytest.mark.parametrize("page_size", [1, 64, 128])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("tile_rows", [16, 32, 64])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_one_decode_kernel_for_any_rows(pair: tuple[int, int], tile_rows: int, dtype: str, page_size: int) -> None:
    """Each tile with fewer rows than it has, as many, and several of it: a call chooses by its rows otherwise."""
    mla = variant(*pair, page_size, dtype, tile_rows)
    problems = [
        Problem(lengths=(5_000, 0, 1, 64, 700), h_q=h, s_q=s, causal=s > 1, q_gain=gain)
        for h, s in ((1, 1), (5, 3), (16, 1), (17, 1), (32, 1), (20, 2), (128, 1))
        for gain in (1, 32)
    ]
    accept(mla, problems[::4] if REDUCED else [*problems, Problem(lengths=(100_000,), h_q=16)])


ON_DEMAND = [(pair, rows) for pair in PAIRS for rows in (8, 24, 40, 48, 56) if pair[1] == 256 or rows <= 32]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("pair", "tile_rows"), ON_DEMAND, ids=str)
def test_tile_rows_on_demand(pair: tuple[int, int], tile_rows: int, dtype: str, page_size: int) -> None:
    """Tiles that a spec must ask for, as above; and the edges."""
    mla = variant(*pair, page_size, dtype, tile_rows)
    assert [each.tile_rows for each in mla.manifest.decodes] == [tile_rows]
    heads = (tile_rows - 1, tile_rows, tile_rows + 1, 2 * tile_rows - 7, 40, 128)
    problems = [
        Problem(lengths=(5_000, 0, 1, 64, 700), h_q=h, s_q=s, causal=s > 1, q_gain=gain)
        for h, s in (*((h, 1) for h in heads), (tile_rows - 3, 2), (5, 3), (40, 2))
        for gain in (1, 32)
    ]
    problems += [dataclasses.replace(p, h_q=p.h_q if p.h_q > 1 else 40) for p in EDGES if p.tokens <= 10_000]
    accept(mla, problems[::6] if REDUCED else [*problems, Problem(lengths=(100_000,), h_q=40)])


@pytest.mark.parametrize(("pair", "tile_rows"), ON_DEMAND, ids=str)
def test_runs_of_tile_rows_on_demand_are_bit_identical(pair: tuple[int, int], tile_rows: int) -> None:
    mla = variant(*pair, tile_rows=tile_rows)
    inputs = make_inputs(Problem(lengths=(9_000, 100, 0, 700), h_q=40, seed=5), mla.manifest, "cuda")
    arguments = (inputs.q, inputs.kv_cache, inputs.block_table, inputs.cache_seqlens)
    first_out, first_lse = mla.decode(*arguments)
    for _ in range(5 if REDUCED else 50):
        out, lse = mla.decode(*arguments)
        assert torch.equal(out, first_out) and torch.equal(lse, first_lse)


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=20 if REDUCED else 150)
@given(seed=st.integers(0, 2**32 - 1), shape=st.sampled_from(sorted(itertools.product(PAIRS, (1, 64), ("bf16",)))))
def test_random_problems(seed: int, shape: tuple[tuple[int, int], int, str]) -> None:
    pair, page_size, dtype = shape
    mla = variant(*pair, page_size, dtype)
    problem = random_problem(random.Random(seed), mla.manifest, 2_000 if REDUCED else 60_000)
    errors = run_problem(mla, problem)
    assert errors.ok, f"{problem.to_repro(mla.manifest.name)}: {errors.failures}"


@pytest.mark.skipif(REDUCED, reason="large")
@pytest.mark.parametrize(
    "problem",
    [
        Problem(lengths=(1_048_576,), h_q=16),
        Problem(lengths=(1_048_576,), h_q=128),
        Problem(lengths=(131_072, *[300] * 127), h_q=16),
    ],
    ids=["b=1, L=1M, 16 heads", "b=1, L=1M, 128 heads", "ragged"],
)
def test_large(problem: Problem) -> None:
    accept(variant(576, 512), [problem])


@pytest.mark.skipif(REDUCED, reason="large")
def test_large_query() -> None:
    # 4,096 tokens x 128 heads: 8,192 row tiles, more than there are SMs.
    accept(variant(576, 512), [Problem(lengths=(4_500,), s_q=4_096, h_q=128, causal=True)])


@pytest.mark.parametrize("b", [65_536, 70_000])
def test_large_batch(b: int) -> None:
    mla = variant(576, 512)
    generator = torch.Generator("cuda").manual_seed(b)
    lengths = torch.randint(0, 3, (b,), generator=generator, device="cuda", dtype=torch.int32)
    cache = torch.randn(1000, 64, 576, generator=generator, device="cuda").bfloat16() / 10
    table = torch.randint(0, 1000, (b, 1), generator=generator, device="cuda", dtype=torch.int32)
    q = torch.randn(b, 1, 2, 576, generator=generator, device="cuda").bfloat16() / 10
    out, lse = mla.decode(q, cache, table, lengths)
    some = torch.cat([torch.arange(200), torch.arange(b - 200, b), torch.arange(0, b, b // 300)]).cuda()
    want = decode_reference(
        q[some], cache, table[some], lengths[some], d_v=512, softmax_scale=mla.manifest.softmax_scale
    )
    errors = check_output(out[some], lse[some], *want)
    assert errors.ok, errors.failures
    assert bool((out[lengths == 0] == 0).all()) and bool((lse[lengths == 0] == math.inf).all())


@pytest.mark.skipif(REDUCED, reason="large")
def test_block_ids_beyond_2_to_31_elements() -> None:
    # 2^31 elements are 58,254 blocks of 64 x 576: use the last blocks of a larger cache.
    mla = variant(576, 512)
    blocks = 80_000
    cache = torch.full((blocks, 64, 576), math.nan, dtype=torch.bfloat16, device="cuda")
    table = torch.tensor([[blocks - 1, 3, blocks - 2], [60_000, 59_999, 58_254]], dtype=torch.int32, device="cuda")
    used = table.flatten().long()
    cache[used] = (torch.randn(len(used), 64, 576, device="cuda") / 10).bfloat16()
    lengths = torch.tensor([192, 150], dtype=torch.int32, device="cuda")
    q = (torch.randn(2, 1, 128, 576, device="cuda") / 10).bfloat16()
    out, lse = mla.decode(q, cache, table, lengths)
    want = decode_reference(q, cache, table, lengths, d_v=512, softmax_scale=mla.manifest.softmax_scale)
    errors = check_output(out, lse, *want)
    assert errors.ok, errors.failures


@pytest.mark.parametrize("heads", [16, 128])
def test_50_runs_are_bit_identical(heads: int) -> None:
    mla = variant(576, 512)
    inputs = make_inputs(Problem(lengths=(9_000, 100, 0, 700), h_q=heads, seed=5), mla.manifest, "cuda")
    arguments = (inputs.q, inputs.kv_cache, inputs.block_table, inputs.cache_seqlens)
    first_out, first_lse = mla.decode(*arguments)
    for _ in range(5 if REDUCED else 50):
        out, lse = mla.decode(*arguments)
        assert torch.equal(out, first_out) and torch.equal(lse, first_lse)


def test_graph_replays_with_other_lengths_and_tables() -> None:
    mla = variant(576, 512)
    small = make_inputs(Problem(lengths=(1, 1, 1), h_q=64, table_extra_columns=130), mla.manifest, "cuda")
    q, table, lengths = small.q.clone(), small.block_table.clone(), small.cache_seqlens.clone()
    cache = torch.full((400, 64, 1, 576), math.nan, dtype=torch.bfloat16, device="cuda")
    mla.decode(q, cache, table, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = mla.decode(q, cache, table, lengths)
    for seed, shape in enumerate(((8_000, 0, 70), (0, 0, 0), (64, 8_300, 5_000), (1, 2, 3))):
        wide = 131 - max(-(-n // 64) for n in shape) if any(shape) else 130
        problem = Problem(lengths=shape, h_q=64, seed=seed, table_extra_columns=wide)
        inputs = make_inputs(problem, mla.manifest, "cuda")
        q.copy_(inputs.q)
        table.copy_(inputs.block_table)
        lengths.copy_(inputs.cache_seqlens)
        cache.fill_(math.nan)
        cache[: inputs.kv_cache.shape[0]] = inputs.kv_cache
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        want = decode_reference(q, cache, table, lengths, d_v=512, softmax_scale=mla.manifest.softmax_scale)
        errors = check_output(out, lse, *want)
        assert errors.ok, (shape, errors.failures)


def _arguments(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    b = 2
    arguments = {
        "q": torch.randn(b, 1, 16, 576, device="cuda").bfloat16(),
        "kv_cache": torch.randn(8, 64, 576, device="cuda").bfloat16(),
        "block_table": torch.arange(8, device="cuda", dtype=torch.int32).view(b, 4),
        "cache_seqlens": torch.tensor([100, 256], device="cuda", dtype=torch.int32),
    }
    return {**arguments, **changes}


def _misaligned() -> torch.Tensor:
    return torch.randn(8 * 64 * 576 + 1, device="cuda").bfloat16()[1:].view(8, 64, 576)


WRONG = {
    "q of another width": ({"q": lambda: torch.zeros(2, 1, 16, 512).bfloat16().cuda()}, r"q has shape .*576"),
    "q of another dtype": ({"q": lambda: torch.zeros(2, 1, 16, 576).half().cuda()}, r"q has dtype .*bfloat16"),
    "table of another batch": (
        {"block_table": lambda: torch.zeros(3, 4, dtype=torch.int32).cuda()},
        r"block_table has 3 rows, q has a batch of 2",
    ),
    "lengths of another batch": (
        {"cache_seqlens": lambda: torch.zeros(5, dtype=torch.int32).cuda()},
        r"cache_seqlens has 5 entries, q has a batch of 2",
    ),
    "lengths of another dtype": (
        {"cache_seqlens": lambda: torch.zeros(2, dtype=torch.int64).cuda()},
        r"cache_seqlens has dtype .*int32",
    ),
    "lengths on the CPU": ({"cache_seqlens": lambda: torch.zeros(2, dtype=torch.int32)}, r"cache_seqlens is on cpu"),
    "cache of another page size": (
        {"kv_cache": lambda: torch.zeros(8, 32, 576).bfloat16().cuda()},
        r"kv_cache has shape .*64",
    ),
    "cache 2 bytes off": ({"kv_cache": _misaligned}, r"kv_cache begins at address 0x[0-9a-f]+, 2 B behind"),
    "cache with rows that TMA can't step": (
        {"kv_cache": lambda: torch.zeros(8, 64, 577).bfloat16().cuda()[..., :576]},
        r"kv_cache has a stride of 1154 B in dimension 1",
    ),
    "cache with its last dimension strided": (
        {"kv_cache": lambda: torch.zeros(8, 64, 1152).bfloat16().cuda()[..., ::2]},
        r"kv_cache has stride 2 in its last dimension",
    ),
    "out of another shape": ({"out": lambda: torch.zeros(2, 1, 16, 576).bfloat16().cuda()}, r"out has shape"),
    "lse of another dtype": ({"lse": lambda: torch.zeros(2, 16, 1).half().cuda()}, r"lse has shape .*float32"),
}


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_wrong_arguments_are_refused_before_anything_is_launched(case: str) -> None:
    changes, message = WRONG[case]
    out = torch.full((2, 1, 16, 512), math.nan, dtype=torch.bfloat16, device="cuda")
    lse = torch.full((2, 16, 1), math.nan, device="cuda")
    arguments = {**_arguments(), "out": out, "lse": lse, **{name: make() for name, make in changes.items()}}
    with pytest.raises(ValueError, match=message):
        variant(576, 512).decode(**arguments)
    torch.cuda.synchronize()
    assert bool(out.isnan().all()) and bool(lse.isnan().all())


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_wrong_scales_are_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="softmax_scale"):
        variant(576, 512).decode(**_arguments(), softmax_scale=scale)


def test_strided_results_and_queries() -> None:
    mla = variant(576, 512)
    inputs = make_inputs(Problem(lengths=(700, 64), s_q=2, h_q=20), mla.manifest, "cuda")
    arguments = (inputs.kv_cache, inputs.block_table, inputs.cache_seqlens)
    want, want_lse = mla.decode(inputs.q, *arguments, causal=True)
    wide = torch.full((2, 2, 20, 640), math.nan, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(2, 20, 2, device="cuda")
    mla.decode(inputs.q, *arguments, causal=True, out=wide[..., 64:576], lse=lse)
    assert torch.equal(wide[..., 64:576], want) and torch.equal(lse, want_lse)
    assert bool(wide[..., :64].isnan().all()) and bool(wide[..., 576:].isnan().all())
    # Heads before tokens: rows that no single stride can walk.
    turned = inputs.q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(mla.decode(turned, *arguments, causal=True)[0], want)
    padded = torch.zeros(2, 2, 20, 584, dtype=torch.bfloat16, device="cuda")[..., :576]
    padded.copy_(inputs.q)
    assert torch.equal(mla.decode(padded, *arguments, causal=True)[0], want)
    one = inputs.q[:1].expand(2, -1, -1, -1)
    assert torch.equal(mla.decode(one, *arguments, causal=True)[0][0], want[0])


def test_empty_batch() -> None:
    mla = variant(576, 512)
    out, lse = mla.decode(
        torch.zeros(0, 1, 16, 576, device="cuda").bfloat16(),
        torch.zeros(1, 64, 576, device="cuda").bfloat16(),
        torch.zeros(0, 1, device="cuda", dtype=torch.int32),
        torch.zeros(0, device="cuda", dtype=torch.int32),
    )
    assert out.shape == (0, 1, 16, 512) and lse.shape == (0, 16, 1)


def test_lengths_beyond_the_table_are_cut() -> None:
    mla = variant(576, 512)
    arguments = _arguments()
    want = mla.decode(**arguments)
    arguments["cache_seqlens"] = torch.tensor([100, 1_000_000], device="cuda", dtype=torch.int32)
    got = mla.decode(**arguments)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_current_stream() -> None:
    mla = variant(576, 512)
    arguments = _arguments()
    want = mla.decode(**arguments)[0]
    q = torch.zeros_like(arguments["q"])
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        q.copy_(arguments["q"])
        got = mla.decode(**{**arguments, "q": q})[0]
    side.synchronize()
    assert torch.equal(got, want)


def test_operator() -> None:
    mla = variant(576, 512)
    arguments = _arguments()
    torch.library.opcheck(torch.ops.mlaforge.decode, (*arguments.values(), None, mla._runner.key, False, 0.1))
    out = torch.empty(2, 1, 16, 512, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(2, 16, 1, device="cuda")
    torch.library.opcheck(
        torch.ops.mlaforge.decode_out,
        (*arguments.values(), None, out, lse, mla._runner.key, False, 0.1),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_torch_compile() -> None:
    mla = variant(576, 512)

    def layer(
        q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = mla.decode(q * 2, cache, table, lengths)
        return out + 1, lse

    arguments = tuple(_arguments().values())
    want = layer(*arguments)
    got = torch.compile(layer, fullgraph=True)(*arguments)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_poisoned_table_is_never_dereferenced() -> None:
    # Every entry behind the tokens is impossible: reading one page through them would be an illegal access.
    mla = variant(576, 512)
    inputs = make_inputs(Problem(lengths=(1, 65, 0), table_extra_columns=40), mla.manifest, "cuda")
    assert int((inputs.block_table == IMPOSSIBLE_PAGE).sum()) > 100
    accept(mla, [Problem(lengths=(1, 65, 0), table_extra_columns=40, h_q=h) for h in (1, 64, 128)])
