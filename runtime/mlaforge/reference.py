"""What the kernels must give, in float64, and what must hold of a model before absorbed attention may be used at all.

Written for clarity and for little memory, on any device and with any strides. Nothing here is fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

# Tokens worked on at a time: scores of 2,176 rows then take 280 MB.
_TOKENS_AT_ONCE = 16_384

COSINE_FLOAT32 = 1 - 1e-9
"""Naive and absorbed scores in float32 agree at least this well."""
COSINE_BF16 = 0.99999
"""The same where up-projected keys and absorbed queries are kept in bf16: their rounding leaves about 0.999998."""


def decode_reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    d_v: int,
    softmax_scale: float,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed attention over a paged cache, in float64. V is the first `d_v` columns of K.

    Cache slots and table entries beyond a request's length are never read.

    Args:
        q: (b, s_q, h_q, d_qk).
        kv_cache: (num_blocks, page_size, d_qk) or (num_blocks, page_size, h_kv, d_qk); h_kv divides h_q.
        block_table: (b, max_blocks), integers: the block that holds each page of a request.
        cache_seqlens: (b), integers: tokens of each request.
        d_v: columns of V.
        softmax_scale: factor of the scores.
        causal: query i of s_q sees the tokens before length - (s_q - 1) + i instead of all of them.

    Returns:
        out (b, s_q, h_q, d_v) and lse (b, h_q, s_q), natural logarithm, both float64. A row that sees no token has
        out 0 and lse +inf.
    """
    if kv_cache.dim() == 3:
        kv_cache = kv_cache.unsqueeze(2)
    b, s_q, h_q, _ = q.shape
    out = q.new_zeros((b, s_q, h_q, d_v), dtype=torch.float64)
    lse = q.new_full((b, h_q, s_q), math.inf, dtype=torch.float64)
    for i, length in enumerate(cache_seqlens.tolist()):
        if length > 0:
            out[i], lse[i] = _one_request(q[i], kv_cache, block_table[i], length, d_v, softmax_scale, causal)
    return out, lse


def _one_request(
    q: torch.Tensor, cache: torch.Tensor, pages: torch.Tensor, length: int, d_v: int, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give out (s_q, h_q, d_v) and lse (h_q, s_q) of q (s_q, h_q, d_qk) over the `length` tokens of one request."""
    s_q, h_q, d_qk = q.shape
    page_size, h_kv = cache.shape[1:3]
    group = h_q // h_kv
    rows = q.double().reshape(s_q, h_kv, group, d_qk).transpose(0, 1).reshape(h_kv, s_q * group, d_qk)
    border = torch.full((s_q,), length, device=q.device)
    if causal:
        border += torch.arange(1 - s_q, 1, device=q.device)
    border = border.repeat_interleave(group).unsqueeze(1)

    highest = rows.new_full((h_kv, s_q * group, 1), -math.inf)
    total = torch.zeros_like(highest)
    weighted = rows.new_zeros((h_kv, s_q * group, d_v))
    for begin in range(0, length, _TOKENS_AT_ONCE):
        tokens = torch.arange(begin, min(begin + _TOKENS_AT_ONCE, length), device=q.device)
        keys = cache[pages[tokens // page_size].long(), tokens % page_size].double().transpose(0, 1)
        scores = (rows @ keys.transpose(1, 2) * scale).masked_fill(tokens >= border, -math.inf)
        new_highest = torch.maximum(highest, scores.amax(dim=-1, keepdim=True))
        # A row that has seen nothing yet has -inf as its maximum; 0 in its place keeps -inf - -inf away.
        shift = new_highest.masked_fill(new_highest == -math.inf, 0.0)
        weights = (scores - shift).exp()
        keep = (highest - shift).exp()
        total = total * keep + weights.sum(dim=-1, keepdim=True)
        weighted = weighted * keep + weights @ keys[..., :d_v]
        highest = new_highest

    empty = (border <= 0).expand_as(total)
    out = (weighted / total).masked_fill(empty, 0.0)
    lse = (total.log() + highest).masked_fill(empty, math.inf)
    return (
        out.reshape(h_kv, s_q, group, d_v).transpose(0, 1).reshape(s_q, h_q, d_v),
        lse.reshape(h_kv, s_q, group).transpose(1, 2).reshape(h_q, s_q),
    )


# Scores held at once: 2^25 of them take 268 MB.
_SCORES_AT_ONCE = 1 << 25


def prefill_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    softmax_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of sequences that lie one behind the other, in float64.

    Args:
        q: (total_q, heads, d_qk).
        k: (total_k, heads, d_qk).
        v: (total_k, heads, d_v).
        cu_seqlens_q: (sequences + 1), integers: where each sequence begins in q, and the end of the last.
        cu_seqlens_k: the same of k and v.
        softmax_scale: factor of the scores.
        causal: query i of n sees the keys before len_k - (n - 1) + i instead of all of them.

    Returns:
        out (total_q, heads, d_v) and lse (heads, total_q), natural logarithm, both float64. A row that sees no key has
        out 0 and lse +inf, and so has a row that belongs to no sequence.
    """
    total_q, heads, _ = q.shape
    out = q.new_zeros((total_q, heads, v.shape[2]), dtype=torch.float64)
    lse = q.new_full((heads, total_q), math.inf, dtype=torch.float64)
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for begin, end, begin_k, end_k in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        n, length = end - begin, end_k - begin_k
        if n <= 0 or length <= 0:
            continue
        keys, values = k[begin_k:end_k].double(), v[begin_k:end_k].double()
        rows = max(_SCORES_AT_ONCE // length, 1)
        for head in range(heads):
            for first in range(begin, end, rows):
                last = min(first + rows, end)
                scores = q[first:last, head].double() @ keys[:, head].T * softmax_scale
                if causal:
                    border = torch.arange(first - begin, last - begin, device=q.device) + (length - n + 1)
                    hidden = torch.arange(length, device=q.device) >= border.unsqueeze(1)
                    scores.masked_fill_(hidden, -math.inf)
                    empty = border <= 0
                else:
                    empty = torch.zeros(last - first, dtype=torch.bool, device=q.device)
                sums = scores.logsumexp(dim=1)
                weights = (scores - sums.masked_fill(empty, 0.0).unsqueeze(1)).exp()
                out[first:last, head] = weights @ values[:, head]
                lse[head, first:last] = sums.masked_fill(empty, math.inf)
    return out, lse


def up_project(latent: torch.Tensor, kv_b: torch.Tensor, nope: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give keys (tokens, heads, nope + rope) and values (tokens, heads, d_v) of cached tokens.

    Worked out in float64 and rounded once, to the dtype of `latent`, in which everybody keeps them.

    Args:
        latent: (tokens, kv_lora_rank + rope).
        kv_b: (heads, nope + d_v, kv_lora_rank).
        nope: qk_nope_head_dim.
    """
    rank = kv_b.shape[2]
    both = torch.einsum("tr,hdr->thd", latent[:, :rank].double(), kv_b.double()).to(latent.dtype)
    rope = latent[:, None, rank:].expand(-1, kv_b.shape[0], -1)
    return torch.cat([both[..., :nope], rope], dim=2), both[..., nope:]


def chunked_prefill_reference(
    q: torch.Tensor,
    latent: torch.Tensor,
    kv_b: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of new tokens to the cached ones before them and to themselves at once, in float64.

    Args:
        q: (total_q, heads, nope + rope).
        latent: (total_q, kv_lora_rank + rope): the new tokens.
        kv_b: (heads, nope + d_v, kv_lora_rank).
        kv_cache: (num_blocks, page_size, kv_lora_rank + rope), or with a dimension of 1 before the last.
        block_table: (b, max_blocks), integers: the block that holds each page of a request.
        cu_seqlens_q: (b + 1), integers: where each request begins in q and latent, and the end of the last.
        context_lens: (b), integers: tokens of each request in the cache; slots behind them are never read.
        softmax_scale: factor of the scores.

    Returns:
        out (total_q, heads, d_v) and lse (heads, total_q), natural logarithm, both float64. A row that belongs to no
        request has out 0 and lse +inf.
    """
    if kv_cache.dim() == 4:
        kv_cache = kv_cache.squeeze(2)
    page_size, nope = kv_cache.shape[1], q.shape[2] - latent.shape[1] + kv_b.shape[2]
    out = q.new_zeros((*q.shape[:2], kv_b.shape[1] - nope), dtype=torch.float64)
    lse = q.new_full((q.shape[1], q.shape[0]), math.inf, dtype=torch.float64)
    ends = cu_seqlens_q.tolist()
    for i, length in enumerate(context_lens.tolist()):
        rows = slice(ends[i], ends[i + 1])
        cached = torch.arange(length, device=q.device)
        context = kv_cache[block_table[i, cached // page_size].long(), cached % page_size]
        k, v = up_project(torch.cat([context, latent[rows]]), kv_b, nope)
        borders_q, borders_k = (torch.tensor([0, n]) for n in (rows.stop - rows.start, k.shape[0]))
        out[rows], lse[:, rows] = prefill_reference(
            q[rows], k, v, borders_q, borders_k, softmax_scale=softmax_scale, causal=True
        )
    return out, lse


class AttentionDims(Protocol):
    """The dimensions of a model's attention, by their names in config.json."""

    @property
    def num_attention_heads(self) -> int:
        """Query heads."""

    @property
    def kv_lora_rank(self) -> int:
        """Elements of the latent of a token."""

    @property
    def qk_nope_head_dim(self) -> int:
        """Elements of a head that are not rotated."""

    @property
    def qk_rope_head_dim(self) -> int:
        """Elements of a head that are rotated; may be 0."""


@dataclass(frozen=True)
class AbsorptionCheck:
    """How well naive and absorbed scores agree, as cosines."""

    float32: float
    bf16: float

    @property
    def ok(self) -> bool:
        """Whether both are as good as arithmetic allows."""
        return self.float32 > COSINE_FLOAT32 and self.bf16 > COSINE_BF16


@dataclass(frozen=True)
class Projection:
    """Random inputs of one attention layer, before absorption; all of the same dtype."""

    q_nope: torch.Tensor
    """(queries, heads, qk_nope_head_dim)."""
    q_pe: torch.Tensor
    """(queries, heads, qk_rope_head_dim)."""
    latent: torch.Tensor
    """(tokens, kv_lora_rank)."""
    k_pe: torch.Tensor
    """(tokens, qk_rope_head_dim); the heads share it."""
    w_uk: torch.Tensor
    """(heads, qk_nope_head_dim, kv_lora_rank): from the latent to a head's key."""

    @classmethod
    def random(cls, dims: AttentionDims, *, queries: int, tokens: int, seed: int, device: str = "cpu") -> Projection:
        """Draw normal float32 values; W_UK has the size that keeps the variance of what passes through it."""
        generator = torch.Generator(device).manual_seed(seed)
        heads, rank = dims.num_attention_heads, dims.kv_lora_rank
        nope, rope = dims.qk_nope_head_dim, dims.qk_rope_head_dim

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device)

        return cls(
            q_nope=normal(queries, heads, nope),
            q_pe=normal(queries, heads, rope),
            latent=normal(tokens, rank),
            k_pe=normal(tokens, rope),
            w_uk=normal(heads, nope, rank) / math.sqrt(rank),
        )

    def rounded(self, dtype: torch.dtype) -> Projection:
        """Give the same values rounded to `dtype`, as float32."""
        return Projection(*(x.to(dtype).float() for x in (self.q_nope, self.q_pe, self.latent, self.k_pe, self.w_uk)))


def naive_scores(x: Projection, keep: torch.dtype = torch.float32) -> torch.Tensor:
    """Give q_nope . (W_UK c) + q_pe . k_pe, (heads, queries, tokens); up-projected keys are kept in `keep`."""
    keys = torch.einsum("hdr,tr->htd", x.w_uk, x.latent).to(keep).to(x.q_nope.dtype)
    return torch.einsum("qhd,htd->hqt", x.q_nope, keys) + torch.einsum("qhd,td->hqt", x.q_pe, x.k_pe)


def absorbed_scores(x: Projection, keep: torch.dtype = torch.float32) -> torch.Tensor:
    """Give (W_UK^T q_nope) . c + q_pe . k_pe, (heads, queries, tokens); absorbed queries are kept in `keep`."""
    queries = torch.einsum("qhd,hdr->hqr", x.q_nope, x.w_uk).to(keep).to(x.q_nope.dtype)
    return torch.einsum("hqr,tr->hqt", queries, x.latent) + torch.einsum("qhd,td->hqt", x.q_pe, x.k_pe)


def check_absorption(
    dims: AttentionDims, *, queries: int = 2, tokens: int = 96, seed: int = 0, device: str = "cpu"
) -> AbsorptionCheck:
    """Compare naive and absorbed scores on random inputs at a model's own dimensions.

    They are the same sum in another order, so that what is left is rounding: of float32 accumulation, and of the one
    intermediate that each form keeps in bf16.
    """
    exact = Projection.random(dims, queries=queries, tokens=tokens, seed=seed, device=device)
    rounded = exact.rounded(torch.bfloat16)
    return AbsorptionCheck(
        float32=cosine(naive_scores(exact), absorbed_scores(exact)),
        bf16=cosine(naive_scores(rounded, torch.bfloat16), absorbed_scores(rounded, torch.bfloat16)),
    )


def cosine(x: torch.Tensor, y: torch.Tensor) -> float:
    """Give the cosine of the angle between two tensors taken as vectors, worked out in float64."""
    x, y = x.double().flatten(), y.double().flatten()
    return float(x @ y / (x.norm() * y.norm()))


def cosine_difference(x: torch.Tensor, y: torch.Tensor) -> float:
    """Give 1 - 2 sum(xy) / sum(x^2 + y^2), worked out in float64; 0 of zeros."""
    x, y = x.double().flatten(), y.double().flatten()
    squares = float((x * x + y * y).sum())
    return 1 - 2 * float((x * y).sum()) / squares if squares else 0.0
