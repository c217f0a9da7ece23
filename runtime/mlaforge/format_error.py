"""What the rounding of a quantised cache does to attention, all else in float64: the format's error, not a kernel's.

`python -m mlaforge.format_error` prints the README's table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlaforge.formats import FORMATS
from mlaforge.reference import cosine_difference, decode_reference

_SCORE_SPREAD = 2.0
"""Standard deviation of the scores: the softmax of some thousand tokens is then neither flat nor a single one."""


@dataclass(frozen=True)
class AttentionError:
    """Attention over a rounded cache compared with that over the cache itself."""

    out_rms: float
    """Root of the mean square of the errors of `out`, over that of `out`."""
    out_columns: float
    """The same with each column of `out` over its own size, so that large ones hide nothing of the others."""
    out_cosine: float
    """1 - 2 sum(xy) / sum(x^2 + y^2) over `out`."""
    lse_max: float
    """Largest error of an lse."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    row_bytes: int
    """Bytes of a token."""
    error: AttentionError


def attention_error(
    q: torch.Tensor, cache: torch.Tensor, rounded: torch.Tensor, *, d_v: int, softmax_scale: float
) -> AttentionError:
    """Compare absorbed attention over a cache with that over the same cache, rounded; both in float64.

    Args:
        q: (b, s_q, h_q, d_qk).
        cache: (b, tokens, d_qk): latent, then rotary part.
        rounded: as cache.
        d_v: columns of V; none of them is all zeros.
        softmax_scale: factor of the scores.
    """
    b, tokens, _ = cache.shape
    # Each request is one page.
    table = torch.arange(b, device=q.device).unsqueeze(1)
    lengths = torch.full((b,), tokens, device=q.device)

    def attend(each: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return decode_reference(q, each, table, lengths, d_v=d_v, softmax_scale=softmax_scale)

    (out, lse), (near_out, near_lse) = attend(cache), attend(rounded)
    errors, sizes = ((near_out - out).square().mean((0, 1, 2)), out.square().mean((0, 1, 2)))
    return AttentionError(
        out_rms=float((errors.mean() / sizes.mean()).sqrt()),
        out_columns=float((errors / sizes).mean().sqrt()),
        out_cosine=cosine_difference(out, near_out),
        lse_max=float((near_lse - lse).abs().max()),
    )


def measure(
    kv_lora_rank: int, qk_rope_head_dim: int, *, outliers: bool, batch: int, heads: int, tokens: int, seed: int
) -> list[Row]:
    """Give the error of bf16 and of every format, of random tokens.

    q, latent and rotary part are normal, and the scores are scaled to a standard deviation of 2. With `outliers`, one
    channel of the latent in 64 is 20 times as large in all tokens, and one element in 1,000 of the others 10 times.
    Tensor scales are those of the largest magnitude; "fp8_e4m3, scale 1" is what comes of no calibration.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    latent = normal(batch, tokens, kv_lora_rank)
    rope = normal(batch, tokens, qk_rope_head_dim)
    q = normal(batch, 1, heads, kv_lora_rank + qk_rope_head_dim)
    if outliers:
        latent *= torch.where(torch.rand(latent.shape, generator=generator) < 1e-3, 10.0, 1.0)
        channels = torch.randperm(kv_lora_rank, generator=generator)[: kv_lora_rank // 64]
        latent[..., channels] = 20 * normal(batch, tokens, len(channels))
    cache = torch.cat([latent, rope], -1).double()
    softmax_scale = _SCORE_SPREAD / float((q.squeeze(1).double() @ cache.mT).std())

    def row(name: str, row_bytes: int, rounded: torch.Tensor) -> Row:
        error = attention_error(q, cache, rounded, d_v=kv_lora_rank, softmax_scale=softmax_scale)
        return Row(name, row_bytes, error)

    rows = [row("bf16", 2 * cache.shape[-1], cache.bfloat16())]
    for each in FORMATS.values():
        scales: dict[str, float | None] = {each.name: None}
        if each.layout.tensor_scale:
            seen = latent if each.layout.rope == "bf16" else cache
            scales[each.name] = each.tensor_scale(float(seen.abs().max()))
        if each.name == "fp8_e4m3":
            scales["fp8_e4m3, scale 1"] = 1.0
        row_bytes = each.row_bytes(kv_lora_rank, qk_rope_head_dim)
        for name, scale in scales.items():
            rows.append(row(name, row_bytes, torch.cat(each.round_trip(latent, rope, scale), -1)))
    return rows


def main() -> None:
    """Print the errors at 512 and 64 dimensions as a table in Markdown."""
    print("| data | format | bytes per token | out | out, by columns | out, cosine | lse, largest |")
    print("|---|---|---|---|---|---|---|")
    for outliers in (False, True):
        for row in measure(512, 64, outliers=outliers, batch=2, heads=16, tokens=4096, seed=0):
            error = row.error
            print(
                f"| {'outliers' if outliers else 'normal'} | {row.name} | {row.row_bytes} | {100 * error.out_rms:.2g}% "
                f"| {100 * error.out_columns:.2g}% | {error.out_cosine:.1e} | {error.lse_max:.2g} |"
            )


if __name__ == "__main__":
    main()
