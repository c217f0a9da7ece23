"""Chunked prefill on a Hopper GPU: long and ragged against float64, in a graph, without waiting, in bounded memory.

Run with `pytest -m gpu`. MLAFORGE_GPU_MATRIX=reduced cuts the problems down to what compute-sanitizer can bear.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from chunking import Chunked
from mlaforge.chunked import ContextLimits, context_rounds
from mlaforge.launch import Cuda
from mlaforge.prefill_verify import (
    ChunkedInputs,
    PrefillProblem,
    kernel_of,
    make_chunked_inputs,
    random_chunked_problem,
    verify_problems,
)
from mlaforge.reference import chunked_prefill_reference
from mlaforge.verify import check_output
from prefilling import HEADS, folder_of, spec_of

pytestmark = pytest.mark.gpu

REDUCED = os.environ.get("MLAFORGE_GPU_MATRIX") == "reduced"
DSV3 = (192, 128)


@functools.cache
def variant(shape: tuple[int, int] = DSV3, dtype: str = "bf16") -> Chunked:
    return Chunked(folder_of(spec_of(shape, dtype)), Cuda())


def accept(mla: Chunked, problems: list[PrefillProblem]) -> None:
    failure = verify_problems(mla, problems).failure
    if failure is not None:
        pytest.fail(f"{failure.problem.to_repro(mla.manifest.name)}: {failure.errors.failures}")


@contextlib.contextmanager
def nobody_waits() -> Iterator[None]:
    """Whoever waits for the device in between raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("shape", list(HEADS), ids=str)
def test_every_shape(shape: tuple[int, int], dtype: str) -> None:
    mla = variant(shape, dtype)
    rng = random.Random(f"{shape} {dtype}")
    tokens, count = (300, 3) if REDUCED else (4_000, 25)
    accept(mla, [random_chunked_problem(rng, kernel_of(mla.manifest), tokens) for _ in range(count)])


LONG = {
    "one prompt of 130,000 tokens": PrefillProblem(q=(2_048,), k=(131_072,), heads=8, workspace=32_768),
    "one long, many short": PrefillProblem(
        q=(512, *(40,) * 30), k=(65_536, *range(40, 640, 20)), heads=8, workspace=16_384, total_known=True
    ),
    "many": PrefillProblem(q=(16,) * 128, k=tuple(16 + 31 * n for n in range(128)), heads=4, workspace=32_768),
    "more requests than tiles in the workspace": PrefillProblem(q=(3,) * 200, k=(400,) * 200, heads=4, workspace=8_192),
    "128 heads": PrefillProblem(q=(300, 200), k=(9_000, 5_000), heads=128, workspace=4_096, q_gain=32),
}


@pytest.mark.skipif(REDUCED, reason="large")
@pytest.mark.parametrize("name", LONG)
def test_long(name: str) -> None:
    accept(variant(), [LONG[name]])


def call(mla: Chunked, inputs: ChunkedInputs, problem: PrefillProblem, **options: Any) -> None:
    mla.chunked_prefill(
        *inputs.arguments,
        max_context=max(inputs.contexts),
        workspace_tokens=problem.workspace,
        out=inputs.out,
        lse=inputs.lse,
        **options,
    )


SMALL = PrefillProblem(q=(100, 0, 5, 70), k=(1_000, 300, 2_005, 70), heads=4, workspace=1_024)


def test_nothing_waits() -> None:
    mla = variant()
    inputs = make_chunked_inputs(SMALL, mla.manifest, "cuda")
    total = sum(inputs.contexts)
    with nobody_waits():
        call(mla, inputs, SMALL)
        call(mla, inputs, SMALL, total_context=total)
        limits = {"max_context": max(inputs.contexts), "workspace_tokens": SMALL.workspace}
        call(mla, inputs, SMALL, rounds=mla.context_rounds(inputs.arguments[-1], **limits))


def test_rounds_are_those_of_the_cpu() -> None:
    rng = random.Random(0)
    for _ in range(50):
        lengths = [rng.choice((0, 1, rng.randint(0, 5_000))) for _ in range(rng.choice((1, 2, 40, 300, 3_000)))]
        total = rng.choice((None, sum(lengths)))
        limits = ContextLimits(max(lengths), rng.choice((700, 16_384)), total)
        here = context_rounds(torch.tensor(lengths, dtype=torch.int32), limits, 128)
        there = context_rounds(torch.tensor(lengths, dtype=torch.int32, device="cuda"), limits, 128)
        assert all(torch.equal(x, y.cpu()) for x, y in zip(here, there, strict=True))


def test_graph_replays_with_other_lengths() -> None:
    mla = variant()
    inputs = make_chunked_inputs(SMALL, mla.manifest, "cuda")
    borders, lengths = inputs.arguments[-2:]
    call(mla, inputs, SMALL)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(mla, inputs, SMALL)
    # Contexts no longer than those that the pages were filled for.
    for new, context in (
        ((100, 0, 5, 70), (900, 300, 2_000, 0)),
        ((0, 175, 0, 0), (0, 1, 0, 0)),
        ((1, 1, 1, 172), (700, 64, 1_999, 0)),
        ((50, 50, 50, 25), (0, 0, 0, 0)),
    ):
        borders.copy_(torch.tensor([0, *new]).cumsum(0))
        lengths.copy_(torch.tensor(context))
        inputs.out.fill_(math.nan)
        inputs.lse.fill_(math.nan)
        graph.replay()
        want = chunked_prefill_reference(*inputs.arguments, softmax_scale=mla.manifest.softmax_scale)
        errors = check_output(inputs.out, inputs.lse, *want, q_gain=64, score_error=2**-8 * math.sqrt(4))
        assert errors.ok, (new, context, errors.failures)


def test_runs_are_bit_identical() -> None:
    mla = variant()
    inputs = make_chunked_inputs(SMALL, mla.manifest, "cuda")
    call(mla, inputs, SMALL)
    first, first_lse = inputs.out.clone(), inputs.lse.clone()
    for _ in range(3 if REDUCED else 20):
        call(mla, inputs, SMALL)
        assert torch.equal(inputs.out, first) and torch.equal(inputs.lse, first_lse)


def test_current_stream() -> None:
    mla = variant()
    inputs = make_chunked_inputs(SMALL, mla.manifest, "cuda")
    call(mla, inputs, SMALL)
    want, q = inputs.out.clone(), inputs.arguments[0]
    values = q.clone()
    q.zero_()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        q.copy_(values)
        call(mla, inputs, SMALL)
    side.synchronize()
    assert torch.equal(inputs.out, want)


@pytest.mark.skipif(REDUCED, reason="large")
def test_memory_is_bounded() -> None:
    """By the workspace, whatever the context: no copies, and no more results than the documentation allows."""
    mla = variant()
    heads, new, workspace = 16, 512, 8_192
    for context in (16_384, 100_000):
        problem = PrefillProblem(q=(new,), k=(new + context,), heads=heads, workspace=workspace)
        inputs = make_chunked_inputs(problem, mla.manifest, "cuda")
        call(mla, inputs, problem)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(mla, inputs, problem)
        torch.cuda.synchronize()
        rounds = -(-context // workspace)
        results = (1 + rounds.bit_length()) * new * heads * (2 * 128 + 4)
        allowed = workspace * (2 * 576 + 2 * heads * (192 + 128)) + results + (1 << 20)
        assert torch.cuda.max_memory_allocated() - before <= allowed
