"""The backends' own part for engines on a Hopper GPU, on doubles of the engines' names: no engine is needed beside it.

Run with `pytest -m gpu`.
"""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

from engine_calls import (
    RANK,
    ROPE,
    Paged,
    Server,
    append_as_vllm,
    decode_as_sglang,
    decode_as_vllm,
    prefill_as_vllm,
    sglang_layer,
    vllm_impl,
)
from mlaforge.reference import decode_reference
from mlaforge.verify import check_output

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        any(importlib.util.find_spec(engine) for engine in ("vllm", "sglang")),
        reason="the doubles would take an engine's names",
    ),
]


@pytest.mark.parametrize("page", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("heads, new", [(16, 1), (128, 1), (16, 4), (40, 2)])
def test_vllm_decode(heads: int, new: int, page: int) -> None:
    torch.manual_seed(heads)
    decode_as_vllm("cuda", heads, new, Paged("cuda", (5_000, 0, 64, 3, 129), page, layers=3), halves=page != 64)


def test_vllm_append() -> None:
    append_as_vllm("cuda")


def test_vllm_prefill() -> None:
    torch.manual_seed(3)
    prefill_as_vllm("cuda", 16, (700, 1, 129), (3_300, 0, 80))


@pytest.mark.parametrize("new", [1, 3])
def test_vllm_graph_replays_with_another_batch(new: int) -> None:
    """As vLLM captures it: a batch filled up with requests of no tokens, tables and lengths in its own buffers."""
    torch.manual_seed(new)
    heads, batch = 16, 4
    first = Paged("cuda", (5, 9, 3, 7), width=90)
    impl, metadata = vllm_impl(heads), first.metadata()
    impl.need_to_return_lse_for_decode = True
    q = torch.zeros(batch * new, heads, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
    cache = torch.full((300, 64, RANK + ROPE), math.nan, dtype=torch.bfloat16, device="cuda")
    new_tokens = torch.zeros(batch, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
    slots = torch.full((batch,), -1, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        impl.do_kv_cache_update(new_tokens[:, :RANK], new_tokens[:, None, RANK:], cache, slots, "auto", None)
        return impl.forward_mqa(q.split([RANK, ROPE], dim=-1), cache, metadata, None)  # type: ignore[no-any-return]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for lengths in ((4_000, 70, 3, 0), (64, 0, 0, 0), (1, 2, 3, 5_000)):
        other = Paged("cuda", lengths, width=91 - max(-(-length // 64) for length in lengths))
        first.table.copy_(other.table)
        first.lengths.copy_(other.lengths)
        cache.fill_(math.nan)
        cache[: len(other.cache)] = other.cache
        q.copy_(torch.randn_like(q) / 10)
        # The last token of the longest request comes with the step.
        row = max(range(batch), key=lengths.__getitem__)
        token = lengths[row] - 1
        slots.fill_(-1)
        slots[row] = int(other.table[row, token // 64]) * 64 + token % 64
        new_tokens[row] = cache.view(-1, RANK + ROPE)[slots[row]]
        cache.view(-1, RANK + ROPE)[slots[row]] = math.nan
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        want = decode_reference(
            q.view(batch, new, heads, -1), cache, first.table, first.lengths, d_v=RANK, softmax_scale=0.1, causal=True
        )
        errors = check_output(
            out.view(batch, new, heads, RANK), lse.view(batch, new, heads).transpose(1, 2).contiguous(), *want
        )
        assert errors.ok, (lengths, errors.failures)


@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("heads, new", [(16, 1), (128, 1), (16, 3)])
def test_sglang_decode(heads: int, new: int, page: int) -> None:
    torch.manual_seed(heads)
    decode_as_sglang("cuda", page, heads, (3_900, 3, 64, 129), new)


def test_sglang_graph_replays_with_another_batch() -> None:
    torch.manual_seed(5)
    heads = 16
    server, layer = Server("cuda", 64), sglang_layer(heads)
    server.backend.init_cuda_graph_state(8, 8)
    static, tokens, _ = server.take((5, 9, 3))
    q = torch.zeros(3, heads, RANK + ROPE, dtype=torch.bfloat16, device="cuda")

    def step() -> torch.Tensor:
        return server.backend.forward_decode(q.flatten(1), tokens, tokens[..., :RANK], layer, static)  # type: ignore[no-any-return]

    server.backend.init_forward_metadata_out_graph(static, in_capture=True)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ((3_900, 64, 1), (3, 70, 2_000)):
        batch, of_batch, seq_lens = server.take(lengths)
        static.req_pool_indices.copy_(batch.req_pool_indices)
        static.seq_lens.copy_(batch.seq_lens)
        static.out_cache_loc.copy_(batch.out_cache_loc)
        tokens.copy_(of_batch)
        q.copy_(torch.randn_like(q) / 10)
        out.fill_(math.nan)
        server.backend.init_forward_metadata_out_graph(static)
        graph.replay()
        server.accept(out, q, static, seq_lens)
