"""Decode on quantised caches on a Hopper GPU: every format, shape, page size and head count, faults, graphs.

Run with `pytest -m gpu`. MLAFORGE_GPU_MATRIX=reduced cuts the problems down to what compute-sanitizer can bear.
"""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path

import pytest
import torch

import mlaforge
from mlaforge.api import MLA
from mlaforge.formats import FORMATS
from mlaforge.reference import decode_reference
from mlaforge.simulator import SimulatorOptions
from mlaforge.verify import Problem, check_output, make_inputs, random_problem, verify_problems
from test_decode_gpu import EDGES, REDUCED

pytestmark = pytest.mark.gpu

PAIRS = ((512, 64), (512, 0), (256, 64), (256, 32), (384, 48), (128, 16))
OTHERS = {"stored": ("nvfp4", "stored", "auto"), "swapped": ("nvfp4", "swapped", 16)}
"""Schedules and rows of a tile that a format has by itself for other calls, or not at all."""
KERNELS = (*FORMATS, *OTHERS)


@functools.cache
def variant(name: str, rank: int = 512, rope: int = 64, page_size: int = 64, device: str = "cuda") -> MLA:
    dtype, schedule, rows = OTHERS.get(name, (name, "auto", "auto"))
    path = Path(tempfile.mkdtemp()) / "spec.yaml"
    path.write_text(
        f"name: {name}\n"
        f"model: {{num_attention_heads: 128, kv_lora_rank: {rank}, qk_nope_head_dim: 128, qk_rope_head_dim: {rope},"
        " v_head_dim: 128}\n"
        f"cache: {{dtype: {dtype}, page_size: {page_size}}}\n"
        f"kernels: {{decode: {{schedule: {schedule}, tile_rows: {rows}}}}}\n"
    )
    return mlaforge.load(path, device=device)


def accept(mla: MLA, problems: list[Problem]) -> None:
    report = verify_problems(mla, problems)
    if report.failure is not None:
        pytest.fail(f"{report.failure.problem.to_repro(mla.manifest.name)}: {report.failure.errors.failures}")
    assert report.problems == len(problems) > 0


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
def test_every_shape(kernel: str, pair: tuple[int, int], page_size: int) -> None:
    mla = variant(kernel, *pair, page_size)
    problems = [problem for problem in EDGES if problem.logit_shift == 0]
    rng = random.Random(f"{kernel} {pair} {page_size}")
    problems += [random_problem(rng, mla.manifest, 20_000) for _ in range(12)]
    if REDUCED:
        problems = [p for p in problems if p.tokens * p.s_q * p.h_q <= 100_000][:6]
    accept(mla, problems)


@pytest.mark.parametrize("heads", [1, 5, 8, 16, 17, 20, 32, 33, 64, 96, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_head_count(kernel: str, heads: int) -> None:
    lengths = (3_000, 1, 0, 77, 640)
    accept(
        variant(kernel),
        [Problem(lengths=lengths, h_q=heads, s_q=s, causal=True, q_gain=g) for s in (1, 3) for g in (1, 32)],
    )


@pytest.mark.skipif(REDUCED, reason="large")
@pytest.mark.parametrize("kernel", KERNELS)
def test_long(kernel: str) -> None:
    accept(variant(kernel), [Problem(lengths=(300_000,), h_q=16), Problem(lengths=(131_072, *[300] * 40), h_q=32)])


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_50_runs_are_bit_identical(kernel: str, heads: int) -> None:
    mla = variant(kernel)
    inputs = make_inputs(Problem(lengths=(9_000, 100, 0, 700), h_q=heads, seed=5), mla.manifest, "cuda")
    call = (inputs.q, inputs.kv_cache, inputs.block_table, inputs.cache_seqlens)
    out, lse = mla.decode(*call, tensor_scale=inputs.tensor_scale)
    for _ in range(49):
        again = mla.decode(*call, tensor_scale=inputs.tensor_scale)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_graph_follows_lengths_tables_and_scale(kernel: str) -> None:
    mla = variant(kernel)
    first = make_inputs(Problem(lengths=(900, 130, 64), h_q=16, seed=1), mla.manifest, "cuda")
    call = (first.q, first.kv_cache, first.block_table, first.cache_seqlens)
    scale = first.tensor_scale
    out, lse = (torch.empty_like(each) for each in (first.out, first.lse))
    mla.decode(*call, tensor_scale=scale, out=out, lse=lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla.decode(*call, tensor_scale=scale, out=out, lse=lse)
    first.cache_seqlens.copy_(torch.tensor([17, 129, 0], dtype=torch.int32))
    first.block_table[0, 0] = first.block_table[1, 0]
    if scale is not None:
        scale.mul_(1.7)
    out.fill_(float("nan"))
    graph.replay()
    want = decode_reference(
        call[0], first.elements(mla.manifest), *call[2:], d_v=512, softmax_scale=mla.manifest.softmax_scale
    )
    errors = check_output(out, lse, *want)
    assert errors.ok, errors.failures


@pytest.mark.parametrize("kernel", KERNELS)
def test_same_results_as_the_simulator(kernel: str) -> None:
    here, there = variant(kernel, device="sim"), variant(kernel)
    here.backend.options = SimulatorOptions(sms=1)
    for problem in (Problem(lengths=(130, 0, 1), h_q=16, seed=1), Problem(lengths=(2, 70), s_q=3, h_q=10, causal=True)):
        inputs = make_inputs(problem, here.manifest, "cpu")
        arguments = (inputs.q, inputs.kv_cache, inputs.block_table, inputs.cache_seqlens)
        out, lse = here.decode(*arguments, tensor_scale=inputs.tensor_scale, causal=problem.causal)
        scale = None if inputs.tensor_scale is None else inputs.tensor_scale.cuda()
        got = there.decode(*(each.cuda() for each in arguments), tensor_scale=scale, causal=problem.causal)
        torch.testing.assert_close(lse, got[1].cpu(), rtol=2e-6, atol=4e-6)
        torch.testing.assert_close(out, got[0].cpu(), rtol=2**-7, atol=float(out.float().abs().max()) * 2**-9)
