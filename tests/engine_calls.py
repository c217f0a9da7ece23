"""What the backends of engines are asked in a test, with or without the engines' names, on the simulator or a GPU."""

from __future__ import annotations

import math
import types
from typing import Any

import torch

import engine_doubles
from mlaforge.engines.kernels import Dimensions
from mlaforge.reference import decode_reference, prefill_reference
from mlaforge.verify import IMPOSSIBLE_PAGE, check_output

DIMENSIONS = Dimensions(512, 128, 64, 128)
RANK, ROPE, SCALE = 512, 64, 0.1


class Paged:
    """Requests in pages of a cache that is NaN where nobody has a token; their table is impossible behind the pages."""

    def __init__(self, device: str, lengths: tuple[int, ...], page: int = 64, layers: int = 1, width: int = 2) -> None:
        pages = [-(-length // page) for length in lengths]
        order = torch.randperm(sum(pages) + 3).tolist()
        table = torch.full((len(lengths), max(pages) + width), IMPOSSIBLE_PAGE, dtype=torch.int32)
        # One of several layers in one allocation.
        cache = torch.full((len(order), layers, page, RANK + ROPE), math.nan, dtype=torch.bfloat16)[:, layers // 2]
        for row, (length, count) in enumerate(zip(lengths, pages, strict=True)):
            for column in range(count):
                table[row, column] = order.pop()
                filled = min(length - column * page, page)
                cache[table[row, column], :filled] = torch.randn(filled, RANK + ROPE).bfloat16() / 10
        self.cache, self.table = cache.to(device), table.to(device)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.page = page

    def metadata(self) -> Any:
        decode = types.SimpleNamespace(block_table=self.table, seq_lens=self.lengths)
        return types.SimpleNamespace(decode=decode, num_decodes=len(self.lengths))


def vllm_impl(heads: int, **changes: Any) -> Any:
    """Make a layer of the backend for vLLM on the doubles."""
    given: dict[str, Any] = {"attn_type": "decoder", "kv_cache_dtype": "auto", "sliding_window": None, **changes}
    dims = {**DIMENSIONS._asdict(), **{name: given[name] for name in DIMENSIONS._fields if name in given}}
    return engine_doubles.vllm().MLAForgeImpl(
        heads, RANK + ROPE, SCALE, 1, None, given["sliding_window"], given["kv_cache_dtype"], None, given["attn_type"],
        None, **dims,
    )  # fmt: skip


def decode_as_vllm(device: str, heads: int, new: int, paged: Paged, halves: bool = True) -> None:
    """Call decode as vLLM does, with q in two parts or whole, and compare with float64 by FlashMLA's criteria."""
    impl = vllm_impl(heads)
    b = len(paged.lengths)
    q = (torch.randn(b * new, heads, RANK + ROPE) / 10).bfloat16().to(device)
    given = tuple(q.split([RANK, ROPE], dim=-1)) if halves else q
    impl.need_to_return_lse_for_decode = True
    out, lse = impl.forward_mqa(given, paged.cache, paged.metadata(), None)
    assert out.shape == (b * new, heads, RANK) and lse.shape == (b * new, heads) and lse.dtype == torch.float32
    want = decode_reference(
        q.view(b, new, heads, -1), paged.cache, paged.table, paged.lengths, d_v=RANK, softmax_scale=SCALE, causal=True
    )
    errors = check_output(out.view(b, new, heads, RANK), lse.view(b, new, heads).transpose(1, 2), *want)
    assert errors.ok, errors.failures
    impl.need_to_return_lse_for_decode = False
    again, nothing = impl.forward_mqa(given, paged.cache, paged.metadata(), None)
    assert torch.equal(again, out) and nothing is None


def append_as_vllm(device: str) -> None:
    """Write tokens as vLLM does: with a dimension for the head, padding by slot and padding behind the slots."""
    cache = torch.full((3, 64, RANK + ROPE), math.nan, dtype=torch.bfloat16, device=device)
    c_kv, k_pe = torch.randn(6, RANK).bfloat16().to(device), torch.randn(6, 1, ROPE).bfloat16().to(device)
    slots = torch.tensor([70, -1, 5, 191], device=device)
    vllm_impl(4).do_kv_cache_update(c_kv, k_pe, cache, slots, "auto", None)
    flat = cache.view(-1, RANK + ROPE)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(flat[slot], torch.cat([c_kv[token], k_pe[token, 0]]))
            flat[slot] = math.nan
    assert bool(flat.isnan().all())


def prefill_as_vllm(device: str, heads: int, new: tuple[int, ...], cached: tuple[int, ...]) -> None:
    """Attend as vLLM's prefill does: to new tokens under the mask, and to some of a context without it."""
    config = types.SimpleNamespace(cache_config=types.SimpleNamespace(block_size=64))
    backend = engine_doubles.vllm().MLAForgePrefillBackend(**DIMENSIONS._asdict(), scale=SCALE, vllm_config=config)

    def borders(lengths: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).int().to(device)

    def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        k = (torch.randn(count, heads, 192) / 10).bfloat16().to(device)
        # V is a part of what kv_b_proj gave.
        return k, (torch.randn(count, heads, 256) / 10).bfloat16().to(device)[..., 128:]

    q, (k, v) = (torch.randn(sum(new), heads, 192) / 10).bfloat16().to(device), tokens(sum(new))
    backend._prefill_metadata = types.SimpleNamespace(query_start_loc=borders(new))
    into = torch.full((sum(new), heads, 128), math.nan, dtype=torch.bfloat16, device=device)
    out, lse = backend.run_prefill_new_tokens(q, k, v, True, out=into)
    assert out is into or out.data_ptr() == into.data_ptr()
    want = prefill_reference(q, k, v, borders(new), borders(new), softmax_scale=SCALE, causal=True)
    errors = check_output(out, lse, *want)
    assert errors.ok, errors.failures
    assert torch.equal(backend.run_prefill_new_tokens(q, k, v, False), out)
    k, v = tokens(sum(cached))
    chunk = types.SimpleNamespace(query_start_loc=borders(new), cu_seq_lens=borders(cached))
    out, lse = backend.run_prefill_context_chunk(chunk, q, k, v)
    want = prefill_reference(q, k, v, borders(new), borders(cached), softmax_scale=SCALE, causal=False)
    errors = check_output(out, lse, *want)
    assert errors.ok, errors.failures


class Pool:
    """SGLang's pool of slots, and its table of them."""

    def __init__(self, device: str, slots: int) -> None:
        self.cache = torch.full((slots, 1, RANK + ROPE), math.nan, dtype=torch.bfloat16, device=device)
        self.req_to_token = torch.full((9, 4_096), IMPOSSIBLE_PAGE, dtype=torch.int32, device=device)

    def set_kv_buffer(self, layer: Any, locations: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.cache[locations] = k

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.cache


class Server:
    """Requests in a pool, and the backend for SGLang on the doubles over it."""

    def __init__(self, device: str, page: int, slots: int = 64 * 200, **changes: Any) -> None:
        self.pool, self.page, self.device = Pool(device, slots), page, device
        dims = types.SimpleNamespace(**DIMENSIONS._asdict(), context_len=4_000)
        facts: dict[str, Any] = {
            "model_config": dims,
            "device": device,
            "dtype": torch.bfloat16,
            "kv_cache_dtype": torch.bfloat16,
            "page_size": page,
            "use_mla_backend": True,
            "kv_index_translator": None,
            "req_to_token_pool": self.pool,
            "token_to_kv_pool": self.pool,
        }
        self.backend = engine_doubles.sglang().MLAForgeAttnBackend(types.SimpleNamespace(**{**facts, **changes}))

    def take(self, lengths: tuple[int, ...], new: int = 1) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Fill the pool with requests; give a batch, without the host's lengths, and the new tokens and lengths."""
        self.pool.cache.fill_(math.nan)
        self.pool.req_to_token.fill_(IMPOSSIBLE_PAGE)
        pages = (torch.randperm(len(self.pool.cache) // self.page - 1) + 1).tolist()
        rows = torch.randperm(8)[: len(lengths)].to(self.device) + 1
        taken = []
        for row, length in zip(rows.tolist(), lengths, strict=True):
            held = torch.tensor([pages.pop() for _ in range(-(-length // self.page))]).to(self.device)
            at = torch.arange(length, device=self.device)
            ids = held[at // self.page] * self.page + at % self.page
            self.pool.req_to_token[row, :length] = ids.int()
            context = (torch.randn(length - new, 1, RANK + ROPE) / 10).bfloat16().to(self.device)
            self.pool.cache[ids[: length - new]] = context
            taken.append(ids[length - new :])
        tokens = (torch.randn(len(lengths) * new, 1, RANK + ROPE) / 10).bfloat16().to(self.device)
        seq_lens = torch.tensor(lengths, device=self.device)
        batch = types.SimpleNamespace(
            forward_mode=engine_doubles.Mode.DECODE if new == 1 else engine_doubles.Mode.TARGET_VERIFY,
            batch_size=len(lengths),
            req_pool_indices=rows,
            seq_lens=seq_lens if new == 1 else seq_lens - new,
            seq_lens_cpu=None,
            out_cache_loc=torch.cat(taken),
        )
        return batch, tokens, seq_lens

    def accept(self, out: torch.Tensor, q: torch.Tensor, batch: Any, lengths: torch.Tensor) -> None:
        """Compare with float64 by FlashMLA's criteria."""
        table = self.pool.req_to_token[batch.req_pool_indices][:, :: self.page] // self.page
        b, heads = batch.batch_size, q.shape[-2]
        want, lse = decode_reference(
            q.view(b, -1, heads, RANK + ROPE), self.pool.cache.unflatten(0, (-1, self.page)), table, lengths,
            d_v=RANK, softmax_scale=SCALE, causal=True,
        )  # fmt: skip
        errors = check_output(out.view(want.shape), lse.float(), want, lse)
        assert errors.ok, errors.failures


def sglang_layer(heads: int, **changes: Any) -> Any:
    facts = {"tp_q_head_num": heads, "head_dim": RANK + ROPE, "scaling": SCALE, "layer_id": 0, "logit_cap": 0.0}
    return types.SimpleNamespace(**{**facts, "sliding_window_size": -1, **changes})


def decode_as_sglang(device: str, page: int, heads: int, lengths: tuple[int, ...], new: int = 1) -> None:
    """Call decode as SGLang does, or a verification of several drafted tokens."""
    engine_doubles.SPECULATION.speculative_num_draft_tokens = new if new > 1 else None
    try:
        server = Server(device, page)
    finally:
        engine_doubles.SPECULATION.speculative_num_draft_tokens = None
    batch, tokens, seq_lens = server.take(lengths, new)
    q = (torch.randn(len(tokens), heads, RANK + ROPE) / 10).bfloat16().to(device)
    server.backend.init_forward_metadata(batch)
    forward = server.backend.forward_decode if new == 1 else server.backend.forward_extend
    out = forward(q.flatten(1), tokens, tokens[..., :RANK], sglang_layer(heads), batch)
    assert torch.equal(server.pool.cache[batch.out_cache_loc], tokens)
    server.accept(out, q, batch, seq_lens)
