"""How quantised rows are judged that a kernel wrote: against the tokens in float64, before anything was rounded.

A kernel's numbers may differ from those by what float32 loses on the way, if they are normalised or rotated there. Its
scales must then be what such numbers give, its codes those of such numbers by the scales that it wrote. Where nothing
is lost, that leaves one scale and one code.
"""

from __future__ import annotations

import torch

from mlaforge.formats import E2M1_MAX, E4M3_MAX, Format, decode_e2m1, decode_e4m3, encode_e2m1, encode_e4m3
from mlaforge_generator.cache_layout import Part

_ROUNDED = 2.0**-22
"""More than float32's roundings of a scale and of a quotient, as a share."""


def quantised_failures(
    form: Format, rows: torch.Tensor, tokens: torch.Tensor, lost: torch.Tensor, rank: int, scale: float | None
) -> list[str]:
    """Say what is wrong with rows; the rotary part of 16 bits is left out.

    Args:
        form: their format.
        rows: (n, row_bytes) uint8.
        tokens: (n, d_qk) float64: what they stand for.
        lost: (n, d_qk): how far an element may be off before it is quantised; 0 where it is not computed.
        rank: elements of the latent.
        scale: the tensor scale; None for formats that have none.

    Returns:
        A line for each part that is wrong.
    """
    parts = {part.name: part for part in form.layout.parts(rank, tokens.shape[1] - rank)}
    factor = torch.tensor(1.0 if scale is None else scale, dtype=torch.float32, device=rows.device).double()
    failures = _padding(rows, list(parts.values()))
    latent, loose = tokens[:, :rank], lost[:, :rank]
    divisors = torch.ones_like(latent) * factor
    if "scales" in parts:
        group = form.layout.group or rank
        groups = (*latent.shape[:-1], rank // group, group)
        amax, slack = latent.abs().reshape(groups).amax(-1), loose.reshape(groups).amax(-1)
        section = _section(rows, parts["scales"])
        if parts["scales"].dtype == "f32":
            scales = section.view(torch.float32).double()
            borders = [_row_scale(amax - slack), _row_scale(amax + slack)]
        else:
            scales = decode_e4m3(section).double()
            borders = [_block_scale(amax - slack, factor), _block_scale(amax + slack, factor)]
        failures += _outside("scales", scales, *borders)
        divisors = (scales * factor).float().double().repeat_interleave(group, -1)
    failures += _codes("latent", rows, parts["latent"], latent, loose, divisors)
    if "rope" in parts and parts["rope"].dtype != "bf16":
        rope, loose = tokens[:, rank:], lost[:, rank:]
        failures += _codes("the rotary part", rows, parts["rope"], rope, loose, torch.ones_like(rope) * factor)
    return failures


def _section(rows: torch.Tensor, part: Part) -> torch.Tensor:
    return rows[:, part.offset : part.offset + part.bytes].clone(memory_format=torch.contiguous_format)


def _padding(rows: torch.Tensor, parts: list[Part]) -> list[str]:
    rest = rows.clone()
    for part in parts:
        rest[:, part.offset : part.offset + part.bytes] = 0
    return [f"padding: {int((rest != 0).sum()):,} bytes are not 0"] if rest.any() else []


def _row_scale(amax: torch.Tensor) -> torch.Tensor:
    # As the format says, step by step in float32; clamp lets NaN through.
    amax = amax.clamp(min=0).float()
    return (amax / torch.tensor(E4M3_MAX, device=amax.device)).clamp(min=2.0**-126).double()


def _block_scale(amax: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    amax = amax.clamp(min=0).float()
    codes = encode_e4m3((amax / (E2M1_MAX * factor.float())).clamp(min=2.0**-9))
    return decode_e4m3(codes).double()


def _codes(
    name: str, rows: torch.Tensor, part: Part, tokens: torch.Tensor, lost: torch.Tensor, divisors: torch.Tensor
) -> list[str]:
    section = _section(rows, part)
    if part.dtype == "e4m3":
        got, encode, decode = decode_e4m3(section), encode_e4m3, decode_e4m3
    else:
        got = decode_e2m1(torch.stack([section & 15, section >> 4], -1).flatten(-2))
        encode, decode = encode_e2m1, decode_e2m1
    borders = []
    for side in (-1, 1):
        # Exact numbers are divided as the format says, in float32.
        quotient = tokens.float() / divisors.float()
        off = ((tokens + side * lost) / divisors * (1 + side * tokens.sign() * _ROUNDED)).float()
        borders.append(decode(encode(quotient.where(lost == 0, off))).double())
    low, high = borders
    failures = _outside(name, got.double(), low, high)
    # The sign of a zero, which no order shows.
    signs = (got.signbit() != tokens.signbit()) & (got == 0) & (lost == 0) & divisors.isfinite()
    if signs.any():
        failures.append(f"{name}: {int(signs.sum()):,} zeros have the other sign")
    return failures


def _outside(name: str, got: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> list[str]:
    """Compare with the least and the largest that may be; NaN must be NaN."""
    nan = got.isnan() & low.isnan() & high.isnan()
    wrong = ~nan & ~((low <= got) & (got <= high))
    if not wrong.any():
        return []
    at = tuple(int(i) for i in wrong.nonzero()[0])
    return [
        f"{name}: {int(wrong.sum()):,} of {wrong.numel():,} are wrong, first at {list(at)} "
        f"({got[at].item():.6g}, not {low[at].item():.6g} to {high[at].item():.6g})"
    ]
