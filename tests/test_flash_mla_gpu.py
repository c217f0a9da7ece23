"""FlashMLA's names on a Hopper GPU: its own dense matrix in both forms, CUDA graphs, streams, torch.compile.

Run with `pytest -m gpu`. MLAFORGE_GPU_MATRIX=reduced cuts the matrix down to what compute-sanitizer can bear.
"""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import pytest
import torch

from dropin import FORMS, DropIn, Form
from mlaforge.flash_mla import Family, flash_mla_with_kvcache, get_mla_metadata
from mlaforge.reference import decode_reference
from mlaforge.verify import Problem, check_output, flashmla_matrix, make_inputs, verify_problems

pytestmark = pytest.mark.gpu

REDUCED = os.environ.get("MLAFORGE_GPU_MATRIX") == "reduced"
V3 = Family(576, 512, "bf16", 64)


@functools.cache
def drop_in(family: Family, form: Form) -> DropIn:
    return DropIn(family, form)


def accept(mla: DropIn, problems: list[Problem]) -> None:
    report = verify_problems(mla, problems)
    if report.failure is not None:
        pytest.fail(f"{report.failure.problem}: {report.failure.errors.failures}")
    assert report.problems == len(problems) > 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("b", [1, 2, 6, 64, 128])
def test_flashmla_matrix(b: int, form: Form) -> None:
    """Each form has every other problem: what they differ in is done with before the launch."""
    problems = [p for p in flashmla_matrix() if p.batch == b][FORMS.index(form) :: 2]
    if REDUCED:
        problems = [p for p in problems if p.tokens <= 1000][::17]
        if not problems:
            pytest.skip("nothing small enough")
    accept(drop_in(V3, form), problems)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("pair", [(576, 512), (512, 512), (320, 256), (288, 256), (192, 128)], ids=str)
def test_other_families(pair: tuple[int, int], dtype: str, page_size: int) -> None:
    lengths = (300, 0, 1, 64, 65) if REDUCED else (9_000, 0, 1, 64, 4_097)
    problems = [Problem(lengths=lengths, h_q=h, s_q=s, causal=True) for h, s in ((16, 1), (20, 1), (128, 2))]
    accept(drop_in(Family(*pair, dtype, page_size), "new"), problems)


def inputs_of(*lengths: int, **fields: Any) -> tuple[torch.Tensor, ...]:
    inputs = make_inputs(Problem(lengths=lengths, **fields), drop_in(V3, "new").manifest, "cuda")
    return inputs.q, inputs.kv_cache, inputs.block_table, inputs.cache_seqlens


def judge(results: tuple[torch.Tensor, torch.Tensor], tensors: tuple[torch.Tensor, ...], causal: bool = False) -> None:
    errors = check_output(*results, *decode_reference(*tensors, d_v=512, softmax_scale=576**-0.5, causal=causal))
    assert errors.ok, errors.failures


def test_as_flashmla_s_test_runs_it() -> None:
    """Under inference_mode and with the defaults that it sets; those of torch decide nothing here."""
    tensors = inputs_of(500, 4_096, 1, h_q=128, s_q=2)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda:0")
    try:
        with torch.inference_mode():
            results = flash_mla_with_kvcache(*tensors, 512, *get_mla_metadata(), causal=True)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    judge(results, tensors, causal=True)


def test_old_metadata_are_flashmla_s_shapes() -> None:
    lengths = torch.ones(5, dtype=torch.int32, device="cuda")
    metadata, num_splits = get_mla_metadata(lengths, 2 * 128, 1)
    assert isinstance(metadata, torch.Tensor) and num_splits is not None
    parts = torch.cuda.get_device_properties(0).multi_processor_count // 4
    assert metadata.shape == (parts, 8) and num_splits.shape == (6,)
    assert metadata.device == num_splits.device == lengths.device


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", [16, 128])
def test_graph_replays_with_other_lengths_and_tables(form: Form, heads: int) -> None:
    q, _, table, lengths = inputs_of(1, 1, 1, h_q=heads, table_extra_columns=130)
    q, table = q.clone(), table.clone()
    cache = torch.full((400, 64, 1, 576), math.nan, dtype=torch.bfloat16, device="cuda")
    metadata, num_splits = get_mla_metadata(lengths, heads, 1) if form == "old" else get_mla_metadata()
    flash_mla_with_kvcache(q, cache, table, lengths, 512, metadata, num_splits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_mla_with_kvcache(q, cache, table, lengths, 512, metadata, num_splits)
    for seed, shape in enumerate(((8_000, 0, 70), (0, 0, 0), (64, 8_300, 5_000), (1, 2, 3))):
        wide = 131 - max(1, *(-(-n // 64) for n in shape))
        tensors = inputs_of(*shape, h_q=heads, seed=seed, table_extra_columns=wide)
        q.copy_(tensors[0])
        table.copy_(tensors[2])
        lengths.copy_(tensors[3])
        cache.fill_(math.nan)
        cache[: tensors[1].shape[0]] = tensors[1]
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        judge((out, lse), (q, cache, table, lengths))


def test_metadata_can_be_made_within_a_capture() -> None:
    q, cache, table, lengths = inputs_of(70, 300, h_q=64)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        return flash_mla_with_kvcache(q, cache, table, lengths, 512, *get_mla_metadata(lengths, 64, 1))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    results[0].fill_(math.nan)
    graph.replay()
    judge(results, (q, cache, table, lengths))


def test_nothing_waits_for_the_device() -> None:
    tensors = inputs_of(70, 300, h_q=64)
    flash_mla_with_kvcache(*tensors, 512, *get_mla_metadata(tensors[3], 64, 1))
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = flash_mla_with_kvcache(*tensors, 512, *get_mla_metadata(tensors[3], 64, 1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    judge(results, tensors)


def test_current_stream() -> None:
    q, *rest = inputs_of(70, 300, h_q=64)
    want = flash_mla_with_kvcache(q, *rest, 512, *get_mla_metadata())[0]
    late = torch.zeros_like(q)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        got = flash_mla_with_kvcache(late, *rest, 512, *get_mla_metadata())[0]
    side.synchronize()
    assert torch.equal(got, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_another_device_than_the_current_one() -> None:
    tensors = inputs_of(70, 300, h_q=64)
    want = flash_mla_with_kvcache(*tensors, 512, *get_mla_metadata())
    there = tuple(tensor.to("cuda:1") for tensor in tensors)
    got = flash_mla_with_kvcache(*there, 512, *get_mla_metadata(there[3], 64, 1))
    assert got[0].device.index == 1 and torch.cuda.current_device() == 0
    assert torch.equal(got[0].cpu(), want[0].cpu()) and torch.equal(got[1].cpu(), want[1].cpu())


def test_lengths_elsewhere_are_refused() -> None:
    q, cache, table, lengths = inputs_of(70, 300, h_q=64)
    with pytest.raises(ValueError, match="cache_seqlens is on cpu"):
        flash_mla_with_kvcache(q, cache, table, lengths.cpu(), 512, *get_mla_metadata())
    with pytest.raises(ValueError, match="k_cache is on cpu"):
        flash_mla_with_kvcache(q, cache.cpu(), table, lengths, 512, *get_mla_metadata())


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile(mode: str) -> None:
    def layer(
        q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        metadata, num_splits = get_mla_metadata(lengths, q.shape[1] * q.shape[2], 1)
        out, lse = flash_mla_with_kvcache(q * 2, cache, table, lengths, 512, metadata, num_splits)
        return out + 1, lse

    tensors = inputs_of(700, 64, h_q=20)
    want = layer(*tensors)
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for _ in range(3):
        got = compiled(*tensors)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
