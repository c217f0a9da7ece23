"""Rows of quantised caches: where the parts of a token lie, in bytes, as functions of the model's dimensions.

A token is one row of bytes, and a paged cache of them is (num_blocks, page_size, row_bytes) uint8. What a byte means
is in mlaforge.formats, which has the arithmetic.

    R = kv_lora_rank, D = qk_rope_head_dim      bytes of each part, in the order of the row           R, D = 512, 64
    fp8_e4m3        latent R | rope D                                                                 576
    fp8_e4m3_token  latent R | rope 2 D | scale 4, padded to 16                                       656
    fp8_ds_mla      latent R | scales 4 R / 128, padded to a multiple of 16 | rope 2 D                656
    nvfp4           latent R / 2 | rope 2 D | scales R / 16, padded to a multiple of 16               416

What kernels want of a row, and how the rows give it:

- Rows and parts are whole pieces of 16 bytes: a lane loads any part with 16-byte loads, and the row is a legal stride
  of a tensor map. A row need not be a multiple of 32, the sector of the L2 cache: the rows of a page follow each
  other, so that all but the sectors at its ends are read whole.
- The latent comes first, in its own order, in whole boxes of 128 bytes (of nvfp4, R = 128 and 384 leave one of 64). A
  tensor map of uint8, {row_bytes, tokens} with a swizzle of 128 bytes, loads it box after box; in shared memory a box
  of e4m3 is the K-major operand of an FP8 WGMMA as it lies there. RoPE is one more box, of 2 D or D bytes.
- Scales are a section of their own and never lie between elements, so that the boxes hold nothing but operands. A box
  as wide as the section, without swizzle, brings the scales of a tile of tokens as a dense array. They end the row,
  which keeps latent and RoPE one run of boxes; fp8_ds_mla alone has them in the middle, since its rows are other
  engines' too.
- Bytes of padding are 0 when written here and mean nothing when read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ALIGNMENT = 16
"""Bytes: parts and rows are multiples of it, as the widest load and the strides of tensor maps are."""

PartName = Literal["latent", "rope", "scales"]

_BITS = {"e2m1": 4, "e4m3": 8, "bf16": 16, "f32": 32}


@dataclass(frozen=True)
class Part:
    """One part of a row."""

    name: PartName
    dtype: str
    """As PTX says it: e2m1 (two to a byte, the first in the low bits), e4m3, bf16 or f32."""
    elements: int
    offset: int
    """Bytes from the beginning of the row."""

    @property
    def bytes(self) -> int:
        """Give the bytes of its elements, without padding."""
        return self.elements * _BITS[self.dtype] // 8

    @property
    def padded_bytes(self) -> int:
        """Give the bytes from its beginning to the next part's."""
        return -(-self.bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """The rows of one format."""

    name: str
    latent: str
    """Type of an element of the latent."""
    rope: str
    """Type of an element of the rotary part."""
    scales: str | None
    """Type of the scales in a row; None if it has none."""
    group: int | None
    """Elements of the latent under each of them; None: all of the token's."""
    tensor_scale: bool
    """There is a float32 scale beside the rows, one for the whole cache of a layer."""
    order: tuple[PartName, ...] = ("latent", "rope", "scales")

    def parts(self, kv_lora_rank: int, qk_rope_head_dim: int) -> tuple[Part, ...]:
        """Lay out a row; parts without elements are left out.

        Args:
            kv_lora_rank: elements of the latent, a multiple of 128.
            qk_rope_head_dim: elements of the rotary part, a multiple of 16, or 0.

        Raises:
            ValueError: a dimension that has no such row.
        """
        if kv_lora_rank <= 0 or kv_lora_rank % 128:
            raise ValueError(f"kv_lora_rank is {kv_lora_rank}; it must be a positive multiple of 128 for {self.name}")
        if qk_rope_head_dim < 0 or qk_rope_head_dim % 16:
            raise ValueError(f"qk_rope_head_dim is {qk_rope_head_dim}; it must be a multiple of 16 for {self.name}")
        sizes = {"latent": (self.latent, kv_lora_rank), "rope": (self.rope, qk_rope_head_dim)}
        if self.scales is not None:
            sizes["scales"] = (self.scales, kv_lora_rank // (self.group or kv_lora_rank))
        parts = []
        offset = 0
        for name in self.order:
            dtype, elements = sizes.get(name, ("", 0))
            if elements:
                parts.append(Part(name, dtype, elements, offset))
                offset += parts[-1].padded_bytes
        return tuple(parts)

    def row_bytes(self, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
        """Give the bytes of a token, padding included; arguments and errors are those of `parts`."""
        return sum(part.padded_bytes for part in self.parts(kv_lora_rank, qk_rope_head_dim))


LAYOUTS = {
    layout.name: layout
    for layout in (
        CacheLayout(name="fp8_e4m3", latent="e4m3", rope="e4m3", scales=None, group=None, tensor_scale=True),
        CacheLayout(name="fp8_e4m3_token", latent="e4m3", rope="bf16", scales="f32", group=None, tensor_scale=False),
        CacheLayout(
            name="fp8_ds_mla",
            latent="e4m3",
            rope="bf16",
            scales="f32",
            group=128,
            tensor_scale=False,
            order=("latent", "scales", "rope"),
        ),
        CacheLayout(name="nvfp4", latent="e2m1", rope="bf16", scales="e4m3", group=16, tensor_scale=True),
    )
}
"""By name."""
