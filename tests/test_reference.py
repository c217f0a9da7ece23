"""The reference against torch's own attention, and absorption at the real dimensions of models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlaforge import reference
from mlaforge.reference import (
    COSINE_BF16,
    COSINE_FLOAT32,
    Projection,
    absorbed_scores,
    check_absorption,
    cosine,
    decode_reference,
    naive_scores,
)
from mlaforge_generator.resources import find_spec, spec_dir
from mlaforge_generator.spec import load_spec


def paged(
    lengths: list[int], page_size: int, h_kv: int, d: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give a cache whose unused slots are NaN, and a table whose unused entries are impossible."""
    pages = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(pages) + 1, generator=generator).int()
    cache = torch.full((sum(pages) + 1, page_size, h_kv, d), math.nan, dtype=torch.float64)
    table = torch.full((len(lengths), max(1, *pages)), 2_147_480_000, dtype=torch.int32)
    for i, length in enumerate(lengths):
        begin = sum(pages[:i])
        table[i, : pages[i]] = order[begin : begin + pages[i]]
        for token in range(length):
            cache[int(table[i, token // page_size]), token % page_size] = torch.randn(
                (h_kv, d), generator=generator, dtype=torch.float64
            )
    return cache, table


def torch_attention(
    q: torch.Tensor, tokens: torch.Tensor, d_v: int, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from q (s_q, h_q, d) to tokens (length, h_kv, d) with torch's operator, and logsumexp beside it."""
    s_q, h_q, _ = q.shape
    length, h_kv, _ = tokens.shape
    keys = tokens.repeat_interleave(h_q // h_kv, dim=1).transpose(0, 1)
    seen = torch.ones((s_q, length), dtype=torch.bool)
    if causal:
        seen = seen.tril(length - s_q)
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], keys[None, ..., :d_v], attn_mask=seen, scale=scale
    )[0]
    scores = (q.transpose(0, 1) @ keys.transpose(1, 2) * scale).masked_fill(~seen, -math.inf)
    return out.transpose(0, 1), scores.logsumexp(-1)


@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 5, 15, 16, 17, 33]), min_size=1, max_size=4),
    s_q=st.sampled_from([1, 2, 4, 7]),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (6, 3)]),
    page_size=st.sampled_from([1, 4, 16]),
    causal=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_reference_is_torchs_attention(
    lengths: list[int], s_q: int, heads: tuple[int, int], page_size: int, causal: bool, seed: int
) -> None:
    (h_q, h_kv), d, d_v, scale = heads, 24, 16, 0.3
    generator = torch.Generator().manual_seed(seed)
    cache, table = paged(lengths, page_size, h_kv, d, generator)
    q = torch.randn((len(lengths), s_q, h_q, d), generator=generator, dtype=torch.float64)
    out, lse = decode_reference(q, cache, table, torch.tensor(lengths), d_v=d_v, softmax_scale=scale, causal=causal)
    assert out.dtype == lse.dtype == torch.float64
    assert out.shape == (len(lengths), s_q, h_q, d_v) and lse.shape == (len(lengths), h_q, s_q)
    for i, length in enumerate(lengths):
        empty = max(0, s_q - length) if causal else s_q * (length == 0)
        assert (out[i, :empty] == 0).all() and (lse[i, :, :empty] == math.inf).all()
        if empty == s_q:
            continue
        tokens = torch.stack([cache[int(table[i, t // page_size]), t % page_size] for t in range(length)])
        want_out, want_lse = torch_attention(q[i], tokens, d_v, scale, causal)
        torch.testing.assert_close(out[i, empty:], want_out[empty:], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(lse[i, :, empty:], want_lse[:, empty:], rtol=1e-11, atol=1e-12)


def test_any_strides_and_a_cache_without_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    cache, table = paged([20, 3], 16, 1, 24, generator)
    lengths = torch.tensor([20, 3], dtype=torch.int32)
    q = torch.randn((2, 2, 4, 24), generator=generator, dtype=torch.float64)
    arguments: dict[str, Any] = {"d_v": 16, "softmax_scale": 0.2, "causal": True}
    want = decode_reference(q, cache, table, lengths, **arguments)
    layers = torch.full((cache.shape[0], 3, 16, 1, 24), math.nan, dtype=torch.float64)
    layers[:, 1] = cache
    wide = torch.full((2, 9), -1, dtype=torch.int32)
    wide[:, : table.shape[1]] = table
    other_q = q.transpose(1, 2).contiguous().transpose(1, 2)
    for strided in (layers[:, 1], layers[:, 1].squeeze(2)):
        got = decode_reference(other_q, strided, wide[:, : table.shape[1]], lengths, **arguments)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_tokens_worked_on_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    cache, table = paged([50, 7], 16, 1, 24, generator)
    q = 30 * torch.randn((2, 3, 2, 24), generator=generator, dtype=torch.float64)
    arguments: dict[str, Any] = {"d_v": 16, "softmax_scale": 0.2, "causal": True}
    whole = decode_reference(q, cache, table, torch.tensor([50, 7]), **arguments)
    monkeypatch.setattr(reference, "_TOKENS_AT_ONCE", 7)
    pieces = decode_reference(q, cache, table, torch.tensor([50, 7]), **arguments)
    for x, y in zip(whole, pieces, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_nan_stays_in_its_request() -> None:
    generator = torch.Generator().manual_seed(2)
    cache, table = paged([5, 5], 16, 1, 24, generator)
    cache[int(table[0, 0]), 2] = math.nan
    q = torch.randn((2, 1, 2, 24), generator=generator, dtype=torch.float64)
    out, lse = decode_reference(q, cache, table, torch.tensor([5, 5]), d_v=16, softmax_scale=1.0)
    assert out[0].isnan().all() and lse[0].isnan().all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()


@pytest.mark.parametrize("spec", sorted(path.stem for path in spec_dir().glob("*.yaml")))
def test_absorption_at_the_models_own_dimensions(spec: str) -> None:
    check = check_absorption(load_spec(find_spec(spec)).model, tokens=32)
    assert check.ok
    assert check.float32 > COSINE_FLOAT32 and check.bf16 > COSINE_BF16


def test_absorption_tells_a_wrong_one() -> None:
    model = load_spec(find_spec("deepseek_v2_lite")).model
    x = Projection.random(model, queries=2, tokens=16, seed=0)
    wrong = Projection(x.q_nope, x.q_pe, x.latent, x.k_pe.roll(1, 0), x.w_uk)
    assert cosine(naive_scores(x), absorbed_scores(wrong)) < COSINE_BF16
    swapped = Projection(x.q_nope, x.q_pe, x.latent, x.k_pe, x.w_uk.roll(1, 0))
    assert cosine(naive_scores(x), absorbed_scores(swapped)) < COSINE_BF16
    half = x.rounded(torch.bfloat16)
    assert cosine(naive_scores(x), absorbed_scores(half)) < COSINE_FLOAT32
