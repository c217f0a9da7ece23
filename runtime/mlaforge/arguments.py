"""Checks of a call's tensors before a launch: a ValueError names the tensor, what it is and what it must be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from mlaforge.manifest import CacheFormat

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Of an element, by the manifest's `element`."""
CACHE_DTYPES = {
    **{name: (dtype,) for name, dtype in DTYPES.items()},
    "fp8_e4m3": (torch.uint8, torch.float8_e4m3fn),
    "fp8_e4m3_token": (torch.uint8,),
    "fp8_ds_mla": (torch.uint8,),
    "nvfp4": (torch.uint8,),
}
"""Those that a cache may have, by cache.dtype: of quantised formats bytes, or the one type that a whole row is of."""
PIECE = 16
"""Bytes of the widest load: addresses and strides of elements are multiples of it."""


def shape_of(tensor: torch.Tensor) -> str:
    """Write a shape as in (2, 64, 576)."""
    return "(" + ", ".join(map(str, tensor.shape)) + ")"


def require_tensor(name: str, tensor: object) -> None:
    """Refuse None, which torch hands on where an operator's schema says Tensor, and what is no tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is {'None' if tensor is None else f'a {type(tensor).__name__}'}; it must be a tensor")


def require_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Refuse another dtype than these."""
    require_tensor(name, tensor)
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}")


def require_shape(name: str, tensor: torch.Tensor, want: Sequence[int | str]) -> None:
    """Refuse another shape; a word in `want`, such as n, stands for any size."""
    require_tensor(name, tensor)
    fits = tensor.dim() == len(want) and all(
        isinstance(wanted, str) or size == wanted for size, wanted in zip(tensor.shape, want, strict=True)
    )
    if not fits:
        expected = ", ".join(map(str, want)) + ("," if len(want) == 1 else "")
        raise ValueError(f"{name} has shape {shape_of(tensor)}; it must be ({expected})")


def require_count(name: str, tensor: torch.Tensor, other: str, count: int, more: int = 0) -> None:
    """Refuse a vector that is not as long as another tensor, or `more` entries longer."""
    require_tensor(name, tensor)
    if tensor.dim() != 1 or tensor.shape[0] != count + more:
        behind = f" and {more} more" if more else ""
        raise ValueError(
            f"{name} has shape {shape_of(tensor)}, {other} has {count} rows; it must have an entry for each{behind}"
        )


def require_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Refuse what is not laid out element after element."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")


def require_one_device(**tensors: torch.Tensor | None) -> None:
    """Refuse tensors on different devices, whatever they are: also those of a trace, and those without storage."""
    given = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    first, leader = given[0]
    for name, tensor in given[1:]:
        if tensor.device != leader.device:
            raise ValueError(f"{name} is on {tensor.device}, {first} is on {leader.device}; all must be on one device")


def require_devices(tensors: Iterable[tuple[str, torch.Tensor]], device_type: str) -> torch.device:
    """Refuse tensors that are not all on one device of a type; give the device."""
    named = dict(tensors)
    first, leader = next(iter(named.items()))
    if leader.device.type != device_type:
        raise ValueError(f"{first} is on {leader.device}; these kernels run on {device_type}")
    require_one_device(**named)
    return leader.device


def piece_strides(name: str, tensor: torch.Tensor) -> tuple[int, ...]:
    """Give the strides of all dimensions but the last in pieces of 16 bytes; 0 for dimensions of one index.

    Refuses what `byte_strides` does, and strides that pass 2^31 pieces.
    """
    return tuple(stride // PIECE for stride in byte_strides(name, tensor, 35))


TMA_STRIDE_BITS = 40
"""TMA takes strides below 2^40 bytes."""


def byte_strides(name: str, tensor: torch.Tensor, bits: int = TMA_STRIDE_BITS) -> tuple[int, ...]:
    """Give the strides of all dimensions but the last in bytes; 0 for dimensions of one index.

    Refuses a last dimension that is not contiguous, and strides that are no multiples of 16 bytes or no number of
    `bits` bits.
    """
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension; it must be contiguous there")
    strides = []
    for dim in range(tensor.dim() - 1):
        stride = tensor.stride(dim) * tensor.element_size() if tensor.shape[dim] > 1 else 0
        if stride % PIECE or not 0 <= stride < 1 << bits:
            raise ValueError(
                f"{name} has a stride of {stride} B in dimension {dim}; it must be a multiple of {PIECE} B below "
                f"2^{bits} B"
            )
        strides.append(stride)
    return tuple(strides)


def number_strides(name: str, tensor: torch.Tensor) -> tuple[int, ...]:
    """Give all strides in elements, 0 for dimensions of one index; refuses those that pass 2^31."""
    strides = tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if not all(0 <= stride < 1 << 31 for stride in strides):
        raise ValueError(f"{name} has strides {tensor.stride()}; they must be below 2^31")
    return strides


def require_distinct_rows(name: str, tensor: torch.Tensor) -> None:
    """Refuse a result some of whose rows share memory: they would be written at the same time."""
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            raise ValueError(f"{name} has shape {shape_of(tensor)} and strides {tensor.stride()}: its rows overlap")
        reach += stride * (size - 1)


def require_aligned(name: str, tensor: torch.Tensor) -> None:
    """Refuse an address that no 16-byte access can have."""
    address = tensor.data_ptr()
    if address % PIECE:
        raise ValueError(
            f"{name} begins at address {address:#x}, {address % PIECE} B behind a multiple of {PIECE}; move it"
        )


def cache_columns(cache: CacheFormat, d_qk: int) -> int:
    """Give the last dimension of a cache tensor: elements of a token, or bytes of its quantised row."""
    return cache.row_bytes if cache.quantised else d_qk


def require_cache(name: str, tensor: torch.Tensor, cache: CacheFormat, d_qk: int, *heads: int | str) -> None:
    """Refuse another shape or dtype than those of a paged cache.

    Args:
        name: of the tensor.
        tensor: (num_blocks, page_size, d_qk), or row_bytes for d_qk if the cache is quantised; or with heads behind
            page_size.
        cache: its format.
        d_qk: elements of a token.
        heads: how many there may be, as a number or as a word for any.
    """
    require_tensor(name, tensor)
    columns, page = cache_columns(cache, d_qk), cache.page_size
    shape = tuple(tensor.shape)
    fits = len(shape) in (3, 4) and shape[1] == page and shape[-1] == columns
    if not fits or (len(shape) == 4 and isinstance(heads[0], int) and shape[2] != heads[0]):
        of_format = f", rows of {cache.dtype}" if cache.quantised else ""
        raise ValueError(
            f"{name} has shape {shape_of(tensor)}; it must be (num_blocks, {page}, {columns}) or "
            f"(num_blocks, {page}, {heads[0]}, {columns}){of_format}"
        )
    require_dtype(name, tensor, *CACHE_DTYPES[cache.dtype])


def require_tensor_scale(scale: torch.Tensor | None, cache: CacheFormat) -> None:
    """Refuse a tensor scale that is missing, of no use, or no single float32. Its value is on the device: not seen."""
    if scale is None:
        if cache.tensor_scale:
            raise ValueError(f"tensor_scale is None; it must be one float32, for the cache is {cache.dtype}")
        return
    if not cache.tensor_scale:
        raise ValueError(
            f"tensor_scale has shape {shape_of(scale)}; it must be None, for a cache of {cache.dtype} has none"
        )
    if scale.numel() != 1:
        raise ValueError(f"tensor_scale has shape {shape_of(scale)}; it must be one number, (1,) or ()")
    require_dtype("tensor_scale", scale, torch.float32)


def require_positive(name: str, value: float) -> None:
    """Refuse what is not a positive, finite number."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value}; it must be positive and finite")
