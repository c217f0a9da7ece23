"""What gather, append and merge must give, written for clarity: in float64, on any device, with any strides."""

from __future__ import annotations

import math

import torch


def gather_reference(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Copy ranges of cached tokens into a copy of `out`, of the cache's own dtype: there is nothing to round.

    Args:
        kv_cache: (num_blocks, page_size, d_qk) or (num_blocks, page_size, 1, d_qk).
        block_table: (b, max_blocks), integers.
        cu_seqlens: (b + 1), integers: where the rows of each sequence begin, and the last one's end.
        seq_starts: (b), integers: the first token of each sequence; 0 if None.
        out: (rows, d_qk): what the rows hold before.

    Returns:
        The rows. One whose token the table or the cache does not have is 0, one that no sequence has stays as it is.
    """
    out = out.clone()
    num_blocks, page_size = kv_cache.shape[:2]
    if kv_cache.dim() == 4:
        kv_cache = kv_cache.squeeze(2)
    borders = cu_seqlens.tolist()
    starts = [0] * (len(borders) - 1) if seq_starts is None else seq_starts.tolist()
    for i, start in enumerate(starts):
        rows = torch.arange(max(borders[i], 0), min(borders[i + 1], out.shape[0]), device=out.device)
        tokens = start + rows - borders[i]
        known = (tokens >= 0) & (tokens < block_table.shape[1] * page_size)
        out[rows] = 0
        rows, tokens = rows[known], tokens[known]
        blocks = block_table[i, tokens // page_size].long()
        known = (blocks >= 0) & (blocks < num_blocks)
        out[rows[known]] = kv_cache[blocks[known], tokens[known] % page_size]
    return out


def append_reference(
    c_kv: torch.Tensor,
    k_rope: torch.Tensor | None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    interleaved: bool = False,
) -> torch.Tensor:
    """Give the tokens that belong in the cache, (n, d_qk) float64.

    Args:
        c_kv: (n, kv_lora_rank).
        k_rope: (n, qk_rope_head_dim), or None.
        norm_weight: (kv_lora_rank), or None: c_kv is not normalised.
        eps: of the normalisation.
        positions: (n), integers: rows of cos_sin_cache; None: k_rope is not rotated. NaN comes of those that it lacks.
        cos_sin_cache: (max_position, qk_rope_head_dim): cosines, then sines.
        interleaved: pairs are neighbours, not half of the elements apart.
    """
    latent = c_kv.double()
    if norm_weight is not None:
        latent = latent / (latent.square().mean(-1, keepdim=True) + eps).sqrt() * norm_weight.double()
    if k_rope is None:
        return latent
    rope = k_rope.double()
    if positions is not None and cos_sin_cache is not None:
        known = (positions >= 0) & (positions < cos_sin_cache.shape[0])
        angles = cos_sin_cache.double()[positions.long().where(known, 0)]
        cos, sin = angles.masked_fill(~known[:, None], math.nan).chunk(2, -1)
        x, y = (rope[:, 0::2], rope[:, 1::2]) if interleaved else rope.chunk(2, -1)
        turned = (x * cos - y * sin, x * sin + y * cos)
        rope = torch.stack(turned, -1).flatten(1) if interleaved else torch.cat(turned, -1)
    return torch.cat([latent, rope], -1)


def merge_reference(
    out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two partial results, in float64.

    Args:
        out1: (..., tokens, heads, d).
        lse1: (..., heads, tokens), natural logarithm; infinite, of either sign, where there is nothing.
        out2: as out1.
        lse2: as lse1.

    Returns:
        out and lse. Where neither side has anything, out is 0 and lse -inf.
    """
    sides = torch.stack([lse1.double(), lse2.double()])
    sides = sides.masked_fill(sides == math.inf, -math.inf)
    lse = torch.logsumexp(sides, 0)
    empty = sides == -math.inf
    # What an empty side holds counts for nothing, even NaN; the weight of two empty sides would be -inf - -inf.
    weights = (sides - lse).exp().masked_fill(empty, 0.0).transpose(-1, -2).unsqueeze(-1)
    outs = torch.stack([out1.double(), out2.double()]).masked_fill(empty.transpose(-1, -2).unsqueeze(-1), 0.0)
    return (weights * outs).sum(0), lse
