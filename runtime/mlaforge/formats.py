"""Quantised caches: what each format's bytes mean, as a torch reference that kernels are to be tested against.

Where the parts of a row lie is in mlaforge_generator.cache_layout. append writes these bytes, gather reads them.
Nothing here is fast. It runs on any device, and gives the same bytes on all of them.

    format          an element of the latent is       scales                             RoPE
    fp8_e4m3        e4m3 x tensor                     tensor: given                      e4m3 x tensor
    fp8_e4m3_token  e4m3 x token                      token: float32, amax / 448         bf16
    fp8_ds_mla      e4m3 x tile                       tile: float32, amax / 448 of 128   bf16
    nvfp4           e2m1 x (block x tensor)           block: e4m3, amax / (6 tensor)     bf16
                                                      of 16; tensor: given

Quantising, step by step in float32, each step rounded to nearest even, so that a kernel can give the same bytes:

- Input of another type becomes float32 first. bf16 and float16 do so exactly. What a kernel has normalised or rotated
  on the way is float32 already, and is not rounded to bf16 in between.
- A scale in a row is the largest magnitude under it (amax) divided by 448 (of nvfp4 by the product 6 x tensor), and
  at least 2^-126 (of nvfp4 2^-9): the least normal float32 and the least e4m3. So no scale is 0, all zeros give
  zeros, and nothing divides by zero.
- An element is divided by its scale (of nvfp4 by the product block x tensor), and the quotient is rounded to nearest
  even. Division, not multiplication by a reciprocal: that would round twice.
- Beyond the largest value, 448 or 6, it saturates. No finite input gives a NaN, whatever the scale.
- Signs are kept, of zeros too.

What is not finite:

- Under a scale of the row, a NaN or an infinity makes all elements under that scale NaN when read: the float32 scale
  becomes NaN or infinite, the e4m3 scale NaN. e2m1 has no NaN of its own. Nothing is lost by it: a score is a sum
  over all elements of a token, so that one NaN in it already makes every row that sees the token NaN. A kernel needs
  maxima that keep a NaN (max.NaN); the usual ones drop it.
- Under a given scale, of fp8_e4m3, a NaN is a NaN (0x7f) by itself, and an infinity saturates as any number beyond
  448 x scale does: what cvt.rn.satfinite does.
- bf16 RoPE keeps NaN and infinities.

Reading: an element times its scales is exact in float64 and rounded once to float32; another dtype is rounded from
there. e2m1 x block is exact in float32, so a kernel that multiplies by tensor last gets the same float32. Any float32
scale in a row is read as it stands, whoever wrote it.

Bounds of the error |y - x| of an element y = dequantise(quantise(x)), but for the float32 roundings (2^-22 of |x|):

- e4m3 has 3 bits behind the point: half a step is at most 1/17 of |x|, and 2^-10 of the scale below the normal
  numbers. fp8_e4m3: max(|x| / 17, 2^-10 scale, |x| - 448 scale). By token or tile: max(|x| / 17, 2^-10 scale), and
  amax / 28 where amax is at least 448 x 2^-126: half a step of the upper half of the range is 16 scale.
- e2m1 has 1 bit: half a step is at most 1/5 of |x|, and 1/4 of the scale below 1. With scale = block x tensor the
  bound is max(|x| / 5, scale / 4, |x| - 6 scale). The block's scale is rounded, too, by 1/17 at most where it is a
  normal number: rounded down the largest element saturates, which costs 1/17 of it; rounded up a step is longer, and
  all errors stay below 3/17 of the block's amax, as long as amax <= 2688 tensor.
- bf16: |x| / 257.

Quantising what was read as float32 gives the same bytes, of rows that were quantised from finite numbers, with one
exception. Of float32 scales this holds although amax is rounded twice on the way: 448 is 7 x 64, and a number divided
by 7 is found again. The exception is a block of nvfp4 with the scale 0x02, twice the least: its largest element may
be a 4, which asks for 0x01 the next time. Read as bf16 instead, codes and e4m3 scales still come back, float32 scales
move by up to 1/128. Numbers that are not finite come back as NaN, and NaN stay NaN.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from mlaforge.arguments import shape_of
from mlaforge_generator.cache_layout import LAYOUTS, CacheLayout

E4M3_MAX = 448.0
E2M1_MAX = 6.0
_E4M3_NAN = 0x7F
_E4M3_LEAST = 2.0**-9
_FLOAT32_LEAST_NORMAL = 2.0**-126
_TENSOR_SCALES = (2.0**-100, 2.0**100)
"""With these, no product of scale and element leaves the normal numbers of float32."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by code; the code's fourth bit is the sign."""


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round float32 to the nearest e4m3, ties to even, saturating; give the codes as uint8. NaN is 0x7f."""
    # torch's own conversion of what is beyond 448 was NaN in some versions; clamp lets NaN through.
    codes = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(x.isnan(), _E4M3_NAN)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Give what e4m3 codes (uint8) stand for, float32."""
    return codes.view(torch.float8_e4m3fn).float()


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round float32 to the nearest e2m1, ties to even, saturating; give the codes, 0 to 15, as uint8. NaN is +6."""
    size = x.abs()
    # The borders between neighbours: a tie goes up where the upper code is even.
    codes = torch.zeros_like(x, dtype=torch.uint8)
    for code in range(1, len(_E2M1)):
        border = (_E2M1[code - 1] + _E2M1[code]) / 2
        codes += size > border if code % 2 else size >= border
    codes += 8 * x.signbit().to(torch.uint8)
    return codes.masked_fill(x.isnan(), len(_E2M1) - 1)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Give what e2m1 codes (uint8, 0 to 15) stand for, float32."""
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float32, device=codes.device)
    return values[codes.long()]


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Give the bytes (..., n x element size) of x (..., n)."""
    return x.contiguous().view(torch.uint8)


def _in_groups(x: torch.Tensor, size: int) -> torch.Tensor:
    """Give x (..., n) as (..., n / size, size)."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _float32(value: float, device: torch.device) -> torch.Tensor:
    """Give a number as a tensor: CUDA divides by a plain number by multiplying with its reciprocal."""
    return torch.tensor(value, dtype=torch.float32, device=device)


@dataclass(frozen=True)
class Format(ABC):
    """How one format's rows are written and read."""

    layout: CacheLayout

    @property
    def name(self) -> str:
        """Give its name."""
        return self.layout.name

    def row_bytes(self, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
        """Give the bytes of a token; see CacheLayout.parts for the errors."""
        return self.layout.row_bytes(kv_lora_rank, qk_rope_head_dim)

    def tensor_scale(self, amax: float) -> float:
        """Choose the tensor scale of which nothing saturates up to a magnitude.

        Args:
            amax: the largest magnitude of what is to be cached: of latent and rotary part for fp8_e4m3, of the latent
                for nvfp4. Of 0 nothing follows, and the scale is 1.

        Returns:
            A float32, within 2^-100 to 2^100.

        Raises:
            ValueError: the format has no tensor scale, or amax is no magnitude.
        """
        self._require_tensor_scale(True)
        if not 0 <= amax < math.inf:
            raise ValueError(f"amax is {amax}; it must be finite and at least 0")
        low, high = _TENSOR_SCALES
        scale = min(max(amax / self._tensor_range, low), high) if amax else 1.0
        return float(torch.tensor(scale, dtype=torch.float32))

    def quantise(
        self, latent: torch.Tensor, rope: torch.Tensor | None = None, scale: float | None = None
    ) -> torch.Tensor:
        """Quantise tokens.

        Args:
            latent: (..., kv_lora_rank), floating.
            rope: (..., qk_rope_head_dim), floating; None: the model has no rotary part.
            scale: the tensor scale, rounded to float32, from 2^-100 to 2^100; None for formats that have none.

        Returns:
            (..., row_bytes) uint8.

        Raises:
            ValueError: dimensions that the format has no row for, shapes that disagree, a type that is not floating, or
                a tensor scale that is missing, out of range or of no use.
        """
        if rope is None:
            rope = latent.new_empty((*latent.shape[:-1], 0))
        for name, tensor in (("latent", latent), ("rope", rope)):
            if not tensor.is_floating_point():
                raise ValueError(f"{name} has dtype {tensor.dtype}; it must be a floating type")
        if latent.dim() == 0 or rope.shape[:-1] != latent.shape[:-1]:
            raise ValueError(
                f"rope has shape {shape_of(rope)}, latent {shape_of(latent)}; all dimensions but the last must agree"
            )
        factor = _float32(self._checked(scale), latent.device)
        parts = self.layout.parts(latent.shape[-1], rope.shape[-1])
        contents = self._encode_latent(latent.float(), factor)
        contents["rope"] = self._encode_rope(rope.float(), factor)
        width = self.row_bytes(latent.shape[-1], rope.shape[-1])
        rows = latent.new_zeros((*latent.shape[:-1], width), dtype=torch.uint8)
        for part in parts:
            rows[..., part.offset : part.offset + part.bytes] = contents[part.name]
        return rows

    def dequantise(
        self,
        rows: torch.Tensor,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        scale: float | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give what rows stand for.

        Args:
            rows: (..., row_bytes) uint8, such as a paged cache (num_blocks, page_size, row_bytes).
            kv_lora_rank: elements of the latent.
            qk_rope_head_dim: elements of the rotary part.
            scale: as in `quantise`.
            dtype: of the results. float64 is exact; any other is rounded from float32.

        Returns:
            Latent (..., kv_lora_rank) and rotary part (..., qk_rope_head_dim).

        Raises:
            ValueError: as in `quantise`, or rows of another type or width.
        """
        parts = self.layout.parts(kv_lora_rank, qk_rope_head_dim)
        width = self.row_bytes(kv_lora_rank, qk_rope_head_dim)
        if rows.dtype != torch.uint8:
            raise ValueError(f"rows has dtype {rows.dtype}; it must be torch.uint8")
        if rows.dim() == 0 or rows.shape[-1] != width:
            raise ValueError(f"rows has shape {shape_of(rows)}; its last dimension must be {width} for {self.name}")
        factor = _float32(self._checked(scale), rows.device).double()
        contents = {"rope": rows[..., :0], "scales": rows[..., :0]}
        for part in parts:
            # Cloned: a part may lie at an address that a wider type's view may not have.
            section = rows[..., part.offset : part.offset + part.bytes]
            contents[part.name] = section.clone(memory_format=torch.contiguous_format)
        latent = self._decode_latent(contents["latent"], contents["scales"], factor)
        rope = self._decode_rope(contents["rope"], factor)
        if dtype == torch.float64:
            return latent, rope
        return latent.float().to(dtype), rope.float().to(dtype)

    def round_trip(
        self, latent: torch.Tensor, rope: torch.Tensor | None = None, scale: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give what is read of tokens that were quantised, in float64; arguments and errors as in `quantise`."""
        rows = self.quantise(latent, rope, scale)
        return self.dequantise(rows, latent.shape[-1], 0 if rope is None else rope.shape[-1], scale, torch.float64)

    def _require_tensor_scale(self, wanted: bool) -> None:
        if self.layout.tensor_scale != wanted:
            raise ValueError(f"{self.name} has {'no' if wanted else 'a'} tensor scale")

    def _checked(self, scale: float | None) -> float:
        """Give the tensor scale, 1 for formats without one."""
        if scale is None:
            self._require_tensor_scale(False)
            return 1.0
        self._require_tensor_scale(True)
        low, high = _TENSOR_SCALES
        if not low <= scale <= high:
            raise ValueError(f"scale is {scale}; it must be from 2^-100 to 2^100")
        return scale

    @property
    def _tensor_range(self) -> float:
        """The largest magnitude under a tensor scale of 1."""
        return E4M3_MAX

    def _encode_rope(self, rope: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return _bytes_of(rope.bfloat16())

    def _decode_rope(self, section: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return section.view(torch.bfloat16).double()

    @abstractmethod
    def _encode_latent(self, latent: torch.Tensor, factor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Give the bytes of latent and scales of a float32 latent; `factor` is the tensor scale, float32."""

    @abstractmethod
    def _decode_latent(self, section: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Give the latent, float64, of the bytes of both; `factor` is the tensor scale, float64."""


class _TensorE4m3(Format):
    """e4m3 throughout, under a given scale."""

    def _encode_latent(self, latent: torch.Tensor, factor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"latent": encode_e4m3(latent / factor)}

    def _decode_latent(self, section: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return decode_e4m3(section).double() * factor

    def _encode_rope(self, rope: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return encode_e4m3(rope / factor)

    def _decode_rope(self, section: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return decode_e4m3(section).double() * factor


class _ScaledE4m3(Format):
    """An e4m3 latent under float32 scales of its own, of a group of elements or of the token."""

    def _grouped(self, latent: torch.Tensor) -> torch.Tensor:
        return _in_groups(latent, self.layout.group or latent.shape[-1])

    def _encode_latent(self, latent: torch.Tensor, factor: torch.Tensor) -> dict[str, torch.Tensor]:
        groups = self._grouped(latent)
        amax = groups.abs().amax(-1)
        # Like amax, clamp lets NaN through.
        scales = (amax / _float32(E4M3_MAX, latent.device)).clamp(min=_FLOAT32_LEAST_NORMAL)
        codes = encode_e4m3(groups / scales.unsqueeze(-1))
        return {"latent": codes.flatten(-2), "scales": _bytes_of(scales)}

    def _decode_latent(self, section: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        values = scales.view(torch.float32).double().unsqueeze(-1)
        return (self._grouped(decode_e4m3(section).double()) * values).flatten(-2)


class _Nvfp4(Format):
    """An e2m1 latent under e4m3 scales of 16 elements, under a given scale."""

    @property
    def _tensor_range(self) -> float:
        return E4M3_MAX * E2M1_MAX

    def _encode_latent(self, latent: torch.Tensor, factor: torch.Tensor) -> dict[str, torch.Tensor]:
        blocks = _in_groups(latent, 16)
        amax = blocks.abs().amax(-1)
        scales = encode_e4m3((amax / (E2M1_MAX * factor)).clamp(min=_E4M3_LEAST))
        # Saturation would make a finite scale of an infinity.
        scales = scales.masked_fill(~amax.isfinite(), _E4M3_NAN)
        codes = encode_e2m1(blocks / (decode_e4m3(scales) * factor).unsqueeze(-1)).flatten(-2)
        return {"latent": codes[..., 0::2] | codes[..., 1::2] << 4, "scales": scales}

    def _decode_latent(self, section: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        codes = torch.stack([section & 15, section >> 4], -1).flatten(-2)
        values = (decode_e4m3(scales).double() * factor).unsqueeze(-1)
        return (_in_groups(decode_e2m1(codes).double(), 16) * values).flatten(-2)


FP8_E4M3 = _TensorE4m3(LAYOUTS["fp8_e4m3"])
FP8_E4M3_TOKEN = _ScaledE4m3(LAYOUTS["fp8_e4m3_token"])
FP8_DS_MLA = _ScaledE4m3(LAYOUTS["fp8_ds_mla"])
NVFP4 = _Nvfp4(LAYOUTS["nvfp4"])

FORMATS: dict[str, Format] = {each.name: each for each in (FP8_E4M3, FP8_E4M3_TOKEN, FP8_DS_MLA, NVFP4)}
"""By name."""
