"""Quantised caches on a Hopper GPU, but for decode: every shape, the reference's bytes, prompts, graphs, bandwidth.

Run with `pytest -m gpu`; `-s` shows the bandwidths.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mlaforge
from mlaforge.api import MLA
from mlaforge.bench.cases import MemoryCase, MemoryKernel
from mlaforge.bench.memory import copy_call, memory_call
from mlaforge.formats import FORMATS
from mlaforge.memory_verify import random_problems
from mlaforge.prefill_verify import PrefillProblem, kernel_of, random_chunked_problem
from mlaforge.prefill_verify import verify_problems as verify_prefill
from test_memory import spec_text
from test_memory_gpu import REDUCED, accept, captured, seconds
from test_quantised import SCALES, hard_tokens, scale_of, widths

pytestmark = pytest.mark.gpu

SHAPES = {"576": (512, 64), "512": (512, 0), "320": (256, 64), "288": (256, 32), "432": (384, 48), "144": (128, 16)}


@functools.cache
def variant(name: str, shape: str = "576", page_size: int = 64) -> MLA:
    """Load the kernels of a format and a shape, of a model that exists or not."""
    path = Path(tempfile.mkdtemp()) / "spec.yaml"
    path.write_text(spec_text(*SHAPES[shape], page_size, name))
    return mlaforge.load(path)


# Each page size with some shape, and each shape with some page size: they do not meet in a kernel.
PAGES = dict(zip(SHAPES, itertools.cycle((64, 1, 16, 128, 32)), strict=False))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_shape(name: str, shape: str) -> None:
    mla = variant(name, shape, PAGES[shape])
    problems = random_problems(mla.manifest, 3 if REDUCED else 60, 7, 300 if REDUCED else 20_000)
    accept(mla, [problem for problem in problems if problem.kernel != "merge"])


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in FORMATS for value in (SCALES if FORMATS[name].layout.tensor_scale else SCALES[:1])],
)
def test_the_bytes_are_those_of_the_reference(name: str, value: float) -> None:
    mla, form = variant(name), FORMATS[name]
    rank, rope = widths(mla)
    scale, tensor = scale_of(mla, value)
    c_kv, k_rope = hard_tokens(form, rank, rope)
    cache = torch.zeros(1, 64, mla.manifest.cache.row_bytes, dtype=torch.uint8, device="cuda")
    slots = torch.arange(len(c_kv), device="cuda")
    mla.append(c_kv.cuda(), k_rope.cuda(), cache, slots, tensor_scale=None if tensor is None else tensor.cuda())
    got, want = cache[0, : len(c_kv)].cpu(), form.quantise(c_kv, k_rope, scale)
    for part in form.layout.parts(rank, rope):
        if part.dtype == "f32":
            section = slice(part.offset, part.offset + part.bytes)
            rows, wanted = (x[:, section].contiguous().view(torch.float32) for x in (got, want))
            nan = rows.isnan() & wanted.isnan()
            assert torch.equal(rows[~nan].view(torch.int32), wanted[~nan].view(torch.int32))
            got[:, section], want[:, section] = 0, 0
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", FORMATS)
def test_chunked_prefill(name: str) -> None:
    mla, rng = variant(name), random.Random(name)
    tokens, count = (300, 3) if REDUCED else (4_000, 12)
    problems = [random_chunked_problem(rng, kernel_of(mla.manifest), tokens) for _ in range(count)]
    problems.append(PrefillProblem(q=(40, 3), k=(tokens, tokens // 2), heads=2, q_gain=32, workspace=tokens // 3))
    failure = verify_prefill(mla, problems).failure
    assert failure is None, f"{failure.problem}: {failure.errors.failures}"


@pytest.mark.parametrize("name", FORMATS)
def test_same_results_as_under_the_simulator(name: str) -> None:
    """Any bytes, read to the bit; rows written of plain tokens, too."""
    mla = variant(name)
    here = mlaforge.load(mla.manifest.folder, device="sim")
    scale = scale_of(mla)[1]
    generator = torch.Generator().manual_seed(0)
    row_bytes = mla.manifest.cache.row_bytes
    cache = torch.randint(0, 256, (4, 64, row_bytes), generator=generator).to(torch.uint8)
    tokens = torch.randn(40, 576, generator=generator).bfloat16()
    table, borders = torch.tensor([[2, 0, 3]], dtype=torch.int32), torch.tensor([0, 180], dtype=torch.int32)
    results = []
    for each, device in ((here, "cpu"), (mla, "cuda")):
        given = None if scale is None else scale.to(device)
        there = cache.to(device)
        read = each.gather(there, table.to(device), borders.to(device), tensor_scale=given, total_tokens=180)
        moved = tokens.to(device)
        each.append(moved[:, :512], moved[:, 512:], there, torch.arange(40, device=device) + 64, tensor_scale=given)
        results.append((read.cpu(), there.cpu()))
    (read, rows), (read_there, rows_there) = results
    same = (read.view(torch.int16) == read_there.view(torch.int16)) | (read.isnan() & read_there.isnan())
    assert bool(same.all()) and torch.equal(rows, rows_there)


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4"])
def test_graphs_replay_with_another_tensor_scale(name: str) -> None:
    """It is on the device: nobody captures its value."""
    mla, form = variant(name), FORMATS[name]
    tokens = torch.randn(64, 576, device="cuda").bfloat16()
    cache = torch.zeros(1, 64, mla.manifest.cache.row_bytes, dtype=torch.uint8, device="cuda")
    scale, slots = torch.ones(1, device="cuda"), torch.arange(64, device="cuda")
    table, borders = torch.zeros(1, 1, dtype=torch.int32, device="cuda"), torch.tensor([0, 64], device="cuda").int()

    def call() -> torch.Tensor:
        mla.append(tokens[:, :512], tokens[:, 512:], cache, slots, tensor_scale=scale)
        return mla.gather(cache, table, borders, tensor_scale=scale, total_tokens=64)

    graph, out = captured(call)
    for value in (0.5, 0.013, 2.0**-7):
        scale.fill_(value)
        out.fill_(math.nan)
        graph.replay()
        rows = form.quantise(tokens[:, :512], tokens[:, 512:], float(scale))
        assert torch.equal(cache[0], rows)
        want = torch.cat(form.dequantise(rows, 512, 64, float(scale), torch.bfloat16), -1)
        assert torch.equal(out, want)


def test_a_misaligned_cache_is_an_error_and_no_fault() -> None:
    mla = variant("fp8_ds_mla")
    memory = torch.zeros(2 * 64 * 656 + 16, dtype=torch.uint8, device="cuda")
    cache = memory[8 : 8 + 2 * 64 * 656].view(2, 64, 656)
    table, borders = torch.zeros(1, 1, dtype=torch.int32, device="cuda"), torch.tensor([0, 5], device="cuda").int()
    with pytest.raises(ValueError, match=r"kv_cache begins at address .* 8 B behind a multiple of 16"):
        mla.gather(cache, table, borders, total_tokens=5)
    torch.cuda.synchronize()
    assert not bool(mla.gather(memory[:-16].view(2, 64, 656), table, borders, total_tokens=5).any())


# ---- Bandwidth -------------------------------------------------------------------------------------------------------

# Of a copy of as many bytes. append divides and looks for maxima as well.
LEAST: dict[MemoryKernel, float] = {"gather": 0.85, "append": 0.7, "append_rotated": 0.6}
# Blocks of 16 take more arithmetic than their bytes give time for.
LEAST_OF_BLOCKS: dict[MemoryKernel, float] = {"gather": 0.85, "append": 0.45, "append_rotated": 0.38}


@pytest.mark.skipif(REDUCED, reason="a sanitizer's times mean nothing")
@pytest.mark.parametrize("kernel", LEAST)
@pytest.mark.parametrize("name", FORMATS)
def test_bandwidth_is_near_that_of_a_copy(name: str, kernel: MemoryKernel) -> None:
    """Counted are the bytes that really move."""
    device = torch.device("cuda", torch.cuda.current_device())
    call = memory_call(variant(name), MemoryCase(kernel, 1 << 19), device, 0)
    assert call.check(call.run()) is None
    run: Callable[[], object] = call.run
    copy, size = copy_call(call.bytes, device)
    ours, other = seconds(run), seconds(copy) * call.bytes / size
    share = other / ours
    print(f"\n{kernel}, {name}: {call.bytes / ours / 1e9:,.0f} GB/s, {share:.1%} of a copy's")
    assert share >= (LEAST_OF_BLOCKS if name == "nvfp4" else LEAST)[kernel]
