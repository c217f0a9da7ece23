"""Plans of the kernels that only move memory: gather, append, merge.

They are bound by the memory alone, so a plan decides little more than how many 16-byte loads a thread has in flight. A
warp works by itself: without shared memory and barriers of the block, a thread waits for nothing but its own loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .cache_layout import CacheLayout, Part
from .kernel_plan import ELEMENT_BYTES, ELEMENTS, KernelPlan, Parameter, divisor
from .spec import Spec
from .target import Target

THREADS = 256
"""Of a block: eight warps, which share nothing but their launch."""


PIECE = 16
"""Bytes of the widest load."""
HALF_WARP = 16
"""Lanes that share a token in append: what they load at once is 256 bytes of it, whole sectors."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan(KernelPlan):
    """What a kernel moves."""

    unit: str
    """What its work is counted in."""
    unit_bytes: int
    """Bytes that are read and written for each, tables and indices left out."""
    units_per_warp: int

    def floor_us(self, units: int, target: Target) -> float:
        """Give the least time, microseconds: a copy of as many bytes takes it."""
        return 1e6 * units * self.unit_bytes / target.copy_bandwidth


@dataclass(frozen=True, kw_only=True)
class GatherPlan(MemoryPlan):
    """Copies ranges of cached tokens out of their pages."""

    page_size: int
    pieces: int
    """16-byte pieces of a token's row in `out`."""


@dataclass(frozen=True, kw_only=True)
class QuantisedGatherPlan(GatherPlan):
    """The same, dequantised on the way."""

    element: str
    """Of `out`."""
    format: str
    """As cache.dtype."""
    code: str
    """The device's name of an element of the latent."""
    coded: int
    """Elements of that type with which a row begins: the latent, and the rotary part where it is of the same type."""
    code_pieces: int
    """16-byte pieces that they are in."""
    rope_offset: int
    """16-byte pieces before the bf16 rotary part of a row."""
    rope_pieces: int
    """Those of a bf16 rotary part; 0 if it has none."""
    scales_offset: int
    """Bytes before the scales of a row."""
    group: int
    """Elements of the latent under one of them; 0 if a row has none."""
    tensor_scale: bool


@dataclass(frozen=True, kw_only=True)
class AppendPlan(MemoryPlan):
    """Writes tokens into their slots of the paged cache, normalised and rotated on the way if asked for."""

    element: str
    page_size: int
    kv_lora_rank: int
    latent_loads: int
    """16-byte pieces of a token's latent for each of the lanes that share it."""
    rope_pieces: int
    """16-byte pieces of the rotary part of a token, an even number."""
    tokens_per_half: int
    """Tokens of a half warp."""


@dataclass(frozen=True, kw_only=True)
class QuantisedAppendPlan(AppendPlan):
    """The same, quantised on the way."""

    format: str
    """As cache.dtype."""
    code: str
    """The device's name of an element of the latent."""
    rope_coded: bool
    """The rotary part is of that type, too; else bf16."""
    rope_offset: int
    """Bytes before the rotary part of a row."""
    scales_offset: int
    """Bytes before the scales of a row."""
    scales_pieces: int
    """16-byte pieces that they are in, padding included; 0 if a row has none."""
    group: int
    """Elements of the latent under one of them; 0 if a row has none."""
    tensor_scale: bool


@dataclass(frozen=True, kw_only=True)
class MergePlan(MemoryPlan):
    """Merges two partial results of attention and their lse."""

    element: str
    loads: int
    """16-byte pieces of each partial result that a lane has in flight."""


def _strides(tensor: str, dims: str) -> tuple[Parameter, ...]:
    """Give the strides of a tensor: of elements in pieces, of float32 in numbers. Products of two ints are cheap."""
    return tuple(Parameter(f"{tensor}_stride_{dim}", "int") for dim in dims)


def _strided_cache(ctype: str) -> tuple[Parameter, ...]:
    return (Parameter("kv_cache", ctype), *_strides("cache", "bt"))


CODES = {"e4m3": "E4m3", "e2m1": "E2m1"}
"""The device's name of an element of a quantised row."""


def tensor_scale(layout: CacheLayout | None) -> tuple[Parameter, ...]:
    """Give what a kernel takes beside the cache: on the device, so that nobody waits for it."""
    return (Parameter("tensor_scale", "const float*"),) if layout is not None and layout.tensor_scale else ()


def row_parts(spec: Spec, layout: CacheLayout) -> Mapping[str, Part]:
    """Give the parts of a row by name."""
    return {part.name: part for part in layout.parts(spec.model.kv_lora_rank, spec.model.qk_rope_head_dim)}


def scale_group(spec: Spec, layout: CacheLayout) -> int:
    """Give the elements of the latent under a scale of the row; 0 if there is none."""
    return 0 if layout.scales is None else layout.group or spec.model.kv_lora_rank


def _tokens_at_once(pieces: int) -> int:
    """Give the tokens of a warp: at most nine loads of a lane, which of 576 elements of bf16 leave none idle."""
    return next(n for n in (32, 16, 8, 4, 2, 1) if n == 1 or n * pieces <= 9 * 32)


def plan_gather(spec: Spec, target: Target) -> GatherPlan:
    """Plan the copy out of the cache; any spec can have it."""
    if spec.layout is not None:
        return _plan_quantised_gather(spec, spec.layout)
    pieces = spec.d_qk * ELEMENT_BYTES // PIECE
    tokens = _tokens_at_once(pieces)
    return GatherPlan(
        name="gather",
        what="copies ranges of cached tokens out of their pages",
        template="kernels/gather.cu.j2",
        entry="mla_gather",
        threads=THREADS,
        grid=(f"ceil(tokens / (8 warps x {tokens}))",),
        parameters=_GATHER_PARAMETERS,
        constants={"tokens_per_block": THREADS // 32 * tokens},
        page_size=spec.cache.page_size,
        pieces=pieces,
        unit="token",
        unit_bytes=spec.row_bytes + spec.d_qk * ELEMENT_BYTES,
        units_per_warp=tokens,
    )


_GATHER_PARAMETERS = (
    *_strided_cache("const void*"),
    Parameter("num_blocks", "int"),
    Parameter("block_table", "const int*"),
    Parameter("table_stride", "long long"),
    Parameter("table_width", "int"),
    Parameter("cu_seqlens", "const int*"),
    Parameter("seq_starts", "const int*"),
    Parameter("batch", "int"),
    Parameter("out", "void*"),
    Parameter("out_stride", "int"),
    Parameter("tokens", "int"),
)


def _plan_quantised_gather(spec: Spec, layout: CacheLayout) -> QuantisedGatherPlan:
    parts = row_parts(spec, layout)
    coded = [part for part in parts.values() if part.dtype == layout.latent]
    rope = next((part for part in parts.values() if part.dtype == "bf16"), None)
    code_pieces = sum(part.bytes for part in coded) // PIECE
    rope_pieces = rope.bytes // PIECE if rope is not None else 0
    tokens = _tokens_at_once(code_pieces + rope_pieces)
    return QuantisedGatherPlan(
        name="gather",
        what=f"dequantises ranges of cached tokens, out of their pages, to {spec.element}",
        template="kernels/gather_quantised.cu.j2",
        entry="mla_gather",
        threads=THREADS,
        grid=(f"ceil(tokens / (8 warps x {tokens}))",),
        parameters=(*_GATHER_PARAMETERS, *tensor_scale(layout)),
        constants={"tokens_per_block": THREADS // 32 * tokens},
        page_size=spec.cache.page_size,
        pieces=spec.d_qk * ELEMENT_BYTES // PIECE,
        element=ELEMENTS[spec.element],
        format=layout.name,
        code=CODES[layout.latent],
        coded=sum(part.elements for part in coded),
        code_pieces=code_pieces,
        rope_offset=rope.offset // PIECE if rope is not None else 0,
        rope_pieces=rope_pieces,
        scales_offset=parts["scales"].offset if "scales" in parts else 0,
        group=scale_group(spec, layout),
        tensor_scale=layout.tensor_scale,
        unit="token",
        unit_bytes=spec.row_bytes + spec.d_qk * ELEMENT_BYTES,
        units_per_warp=tokens,
    )


def plan_append(spec: Spec, target: Target) -> AppendPlan:
    """Plan the writing of new tokens; any spec that decode can read has it."""
    loads = spec.model.kv_lora_rank * ELEMENT_BYTES // (PIECE * HALF_WARP)
    # Few tokens for a warp: the batches of decode are small, and then latency is all.
    tokens = max(4 // loads, 1)
    if spec.layout is not None:
        return _plan_quantised_append(spec, spec.layout, loads, tokens)
    return AppendPlan(
        name="append",
        what="writes new tokens into their slots",
        template="kernels/append.cu.j2",
        entry="mla_append",
        threads=THREADS,
        grid=(f"ceil(tokens / (16 half warps x {tokens}))",),
        parameters=_APPEND_PARAMETERS,
        constants={"tokens_per_block": THREADS // HALF_WARP * tokens},
        element=ELEMENTS[spec.element],
        page_size=spec.cache.page_size,
        kv_lora_rank=spec.model.kv_lora_rank,
        latent_loads=loads,
        rope_pieces=spec.model.qk_rope_head_dim * ELEMENT_BYTES // PIECE,
        tokens_per_half=tokens,
        unit="token",
        unit_bytes=spec.row_bytes + spec.d_qk * ELEMENT_BYTES,
        units_per_warp=2 * tokens,
    )


_APPEND_PARAMETERS = (
    Parameter("c_kv", "const void*"),
    Parameter("c_kv_stride", "int"),
    Parameter("k_rope", "const void*"),
    Parameter("k_rope_stride", "int"),
    *_strided_cache("void*"),
    Parameter("slots", "long long"),
    Parameter("slot_mapping", "const void*"),
    Parameter("long_slots", "int"),
    Parameter("norm_weight", "const void*"),
    Parameter("eps", "float"),
    Parameter("positions", "const void*"),
    Parameter("long_positions", "int"),
    Parameter("cos_sin", "const float*"),
    Parameter("cos_sin_stride", "int"),
    Parameter("max_position", "int"),
    Parameter("interleaved", "int"),
    Parameter("tokens", "int"),
)


def _plan_quantised_append(spec: Spec, layout: CacheLayout, loads: int, tokens: int) -> QuantisedAppendPlan:
    parts = row_parts(spec, layout)
    scales = parts.get("scales")
    return QuantisedAppendPlan(
        name="append",
        what="quantises new tokens into their slots",
        template="kernels/append_quantised.cu.j2",
        entry="mla_append",
        threads=THREADS,
        grid=(f"ceil(tokens / (16 half warps x {tokens}))",),
        parameters=(*_APPEND_PARAMETERS, *tensor_scale(layout)),
        constants={"tokens_per_block": THREADS // HALF_WARP * tokens},
        element=ELEMENTS[spec.element],
        page_size=spec.cache.page_size,
        kv_lora_rank=spec.model.kv_lora_rank,
        latent_loads=loads,
        rope_pieces=spec.model.qk_rope_head_dim * ELEMENT_BYTES // PIECE,
        tokens_per_half=tokens,
        format=layout.name,
        code=CODES[layout.latent],
        rope_coded=layout.rope == layout.latent,
        rope_offset=parts["rope"].offset if "rope" in parts else 0,
        scales_offset=scales.offset if scales is not None else 0,
        scales_pieces=scales.padded_bytes // PIECE if scales is not None else 0,
        group=scale_group(spec, layout),
        tensor_scale=layout.tensor_scale,
        unit="token",
        unit_bytes=spec.row_bytes + spec.d_qk * ELEMENT_BYTES,
        units_per_warp=2 * tokens,
    )


def plan_merge(spec: Spec, target: Target) -> MergePlan:
    """Plan the merge of partial results; any spec can have it."""
    # 2 x 4 pieces are 32 registers, and one row of 1,024 elements, the longest there is, for each warp.
    loads = 4
    partials = (
        parameter
        for i in "12"
        for parameter in (
            Parameter(f"out{i}", "const void*"),
            *_strides(f"out{i}", "bsh"),
            Parameter(f"lse{i}", "const float*"),
            *_strides(f"lse{i}", "bhs"),
        )
    )
    return MergePlan(
        name="merge",
        what="merges two partial results and their lse",
        template="kernels/merge.cu.j2",
        entry="mla_merge",
        threads=THREADS,
        grid=("ceil(rows / (8 warps x rows of a warp))",),
        parameters=(
            *partials,
            Parameter("out", "void*"),
            *_strides("out", "bsh"),
            Parameter("lse", "float*"),
            *_strides("lse", "bhs"),
            Parameter("rows", "int"),
            Parameter("rows_per_warp", "int"),
            *divisor("s_q"),
            *divisor("heads"),
            *divisor("pieces"),
        ),
        constants={"pieces_per_warp": 32 * loads},
        element=ELEMENTS[spec.element],
        loads=loads,
        # The kernel takes rows of any width; those of absorbed attention are counted here, with an lse each.
        unit=f"row of {spec.d_v}",
        unit_bytes=3 * (spec.d_v * ELEMENT_BYTES + 4),
        units_per_warp=32 * loads * PIECE // (spec.d_v * ELEMENT_BYTES),
    )
