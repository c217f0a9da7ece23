"""The memory-bound kernels: gather, append, merge. Checks, launches, and the torch operators around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mlaforge.arguments import (
    DTYPES,
    number_strides,
    piece_strides,
    require_aligned,
    require_cache,
    require_contiguous,
    require_count,
    require_devices,
    require_distinct_rows,
    require_dtype,
    require_one_device,
    require_positive,
    require_shape,
    require_tensor,
    require_tensor_scale,
    shape_of,
)
from mlaforge.calls import CallCache, LazyKernels, Loaded, current, divisor
from mlaforge.launch import Cuda, DefinedTensor, LaunchTensor
from mlaforge.manifest import Manifest
from mlaforge.simulator import Simulator

_MAX_ITEMS = (1 << 31) - (1 << 16)
"""Rows or pieces of one launch: numbers of a few blocks behind the last must still be ints."""
_MAX_WIDTH = 1024
"""Elements of a row that a warp merges at once."""


class GatherTensors(NamedTuple):
    """The tensors of one call; shapes as in `MLA.gather`."""

    kv_cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_starts: torch.Tensor | None
    out: torch.Tensor
    tensor_scale: torch.Tensor | None = None


class AppendTensors(NamedTuple):
    """The tensors of one call; shapes as in `MLA.append`."""

    c_kv: torch.Tensor
    k_rope: torch.Tensor | None
    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor
    norm_weight: torch.Tensor | None
    positions: torch.Tensor | None
    cos_sin_cache: torch.Tensor | None
    tensor_scale: torch.Tensor | None = None


class MergeTensors(NamedTuple):
    """The tensors of one call; shapes as in `MLA.merge`."""

    out1: torch.Tensor
    lse1: torch.Tensor
    out2: torch.Tensor
    lse2: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


_Tensors = GatherTensors | AppendTensors | MergeTensors


@dataclass(frozen=True)
class _Call:
    """What follows from the shapes and strides of a call."""

    device: torch.device
    blocks: int
    """Of the grid; 0 if there is nothing to do."""
    values: tuple[int, ...]
    """Sizes and strides, in the order in which the launch puts the addresses between them."""


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _address_if_given(tensor: torch.Tensor | None) -> tuple[int, ...]:
    """Give the argument of a parameter that only some formats' kernels have."""
    return () if tensor is None else (tensor.data_ptr(),)


def _is_long(tensor: torch.Tensor | None) -> int:
    return int(tensor is not None and tensor.dtype == torch.int64)


def _given(tensors: _Tensors) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in zip(tensors._fields, tensors, strict=True) if tensor is not None]


def _touched(tensors: _Tensors, written: Sequence[str]) -> list[LaunchTensor]:
    """Give what a launch touches. A result that lies where an input does is read, too."""
    given = dict(_given(tensors))
    storages = {given[name].untyped_storage().data_ptr() for name in written}
    read = {name: tensor.untyped_storage().data_ptr() for name, tensor in given.items() if name not in written}
    touched = [LaunchTensor(name, given[name], False) for name, storage in read.items() if storage not in storages]
    for name in written:
        kind = DefinedTensor if given[name].untyped_storage().data_ptr() in read.values() else LaunchTensor
        touched.append(kind(name, given[name], True))
    return touched


class MemoryKernels:
    """The kernels of one manifest and the calls that run them. Each is compiled when it is first called."""

    def __init__(self, manifest: Manifest, backend: Cuda | Simulator, key: str) -> None:
        """Describe them; the operators know them by `key`."""
        self.manifest = manifest
        self.key = key
        self._backend = backend
        self._calls: CallCache[_Call] = CallCache()
        self._kernels = LazyKernels(manifest, backend)
        self.dtype = DTYPES[manifest.element]
        """Of all tensors of elements but a quantised cache."""
        self._rank = int(manifest.model["kv_lora_rank"])
        self._rope = int(manifest.model["qk_rope_head_dim"])

    def compile(self) -> None:
        """Compile the kernels now; CompileError if one does not."""
        for name in ("gather", "append", "merge"):
            self._kernels.get(self.manifest.kernels[name])

    # -- gather

    def check_gather(
        self,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens: torch.Tensor,
        seq_starts: torch.Tensor | None,
        tensor_scale: torch.Tensor | None = None,
    ) -> None:
        """Check shapes and dtypes alone, which also holds for tensors without storage."""
        self._check_cache(kv_cache)
        require_tensor_scale(tensor_scale, self.manifest.cache)
        require_shape("block_table", block_table, ("b", "max_blocks"))
        batch = block_table.shape[0]
        require_count("cu_seqlens", cu_seqlens, "block_table", batch, more=1)
        if seq_starts is not None:
            require_count("seq_starts", seq_starts, "block_table", batch)
        for name, tensor in (("block_table", block_table), ("cu_seqlens", cu_seqlens), ("seq_starts", seq_starts)):
            if tensor is not None:
                require_dtype(name, tensor, torch.int32)

    def check_pages(self, kv_cache: torch.Tensor, block_table: torch.Tensor) -> tuple[int, int]:
        """Check how the pages and their table lie in memory; give the cache's strides, of blocks and of tokens."""
        if kv_cache.shape[0] < 1:
            raise ValueError(f"kv_cache has shape {shape_of(kv_cache)}; it must hold at least one block")
        if block_table.shape[1] > 1 and block_table.stride(1) != 1:
            raise ValueError(
                f"block_table has stride {block_table.stride(1)} in its last dimension; it must be contiguous there"
            )
        cache_b, cache_t, *_ = piece_strides("kv_cache", kv_cache)
        return cache_b, cache_t

    def gather(self, tensors: GatherTensors) -> None:
        """Check everything, then launch on the current stream of the cache's device."""
        call = self._calls.get(tensors, lambda: self._prepare_gather(tensors))
        if call.blocks == 0:
            return
        cache, table, cu_seqlens, starts, out, scale = tensors
        for name, tensor in (("kv_cache", cache), ("out", out)):
            require_aligned(name, tensor)
        cache_b, cache_t, num_blocks, table_stride, table_width, batch, out_stride, rows = call.values
        values = (
            *(cache.data_ptr(), cache_b, cache_t, num_blocks),
            *(table.data_ptr(), table_stride, table_width),
            *(cu_seqlens.data_ptr(), _address(starts), batch),
            *(out.data_ptr(), out_stride, rows),
            *_address_if_given(scale),
        )
        self._launch("gather", call, values, tensors, ("out",))

    def _prepare_gather(self, tensors: GatherTensors) -> _Call:
        cache, table, cu_seqlens, starts, out, scale = tensors
        self.check_gather(cache, table, cu_seqlens, starts, scale)
        require_shape("out", out, ("total_tokens", self.manifest.d_qk))
        require_dtype("out", out, self.dtype)
        device = self._check_devices(tensors)
        cache_b, cache_t = self.check_pages(cache, table)
        require_contiguous("cu_seqlens", cu_seqlens)
        if starts is not None:
            require_contiguous("seq_starts", starts)
        require_distinct_rows("out", out)
        rows, batch = out.shape[0], table.shape[0]
        if rows >= _MAX_ITEMS:
            raise ValueError(f"out has {rows:,} rows; it must have fewer than {_MAX_ITEMS:,}")
        (out_stride,) = piece_strides("out", out)
        sizes = (cache_b, cache_t, cache.shape[0], table.stride(0), table.shape[1], batch, out_stride, rows)
        tokens_per_block = self.manifest.kernels["gather"].constants["tokens_per_block"]
        return _Call(device, -(-rows // tokens_per_block) if batch else 0, sizes)

    # -- append

    def check_append(
        self,
        c_kv: torch.Tensor,
        k_rope: torch.Tensor | None,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        norm_weight: torch.Tensor | None,
        positions: torch.Tensor | None,
        cos_sin_cache: torch.Tensor | None,
        tensor_scale: torch.Tensor | None = None,
    ) -> None:
        """Check shapes and dtypes alone, which also holds for tensors without storage."""
        self._check_cache(kv_cache)
        require_tensor_scale(tensor_scale, self.manifest.cache)
        require_shape("c_kv", c_kv, ("n", self._rank))
        require_dtype("c_kv", c_kv, self.dtype)
        tokens = c_kv.shape[0]
        if self._rope == 0:
            for name, tensor in (("k_rope", k_rope), ("positions", positions), ("cos_sin_cache", cos_sin_cache)):
                if tensor is not None:
                    raise ValueError(
                        f"{name} has shape {shape_of(tensor)}; it must be None, for qk_rope_head_dim of "
                        f"{self.manifest.name} is 0"
                    )
        elif k_rope is None:
            raise ValueError(f"k_rope is None; it must be (n, {self._rope})")
        else:
            require_shape("k_rope", k_rope, ("n", self._rope))
            require_dtype("k_rope", k_rope, self.dtype)
            if k_rope.shape[0] != tokens:
                raise ValueError(f"k_rope has {k_rope.shape[0]} rows, c_kv has {tokens}; they must agree")
        require_count("slot_mapping", slot_mapping, "c_kv", tokens)
        require_dtype("slot_mapping", slot_mapping, torch.int32, torch.int64)
        if norm_weight is not None:
            require_shape("norm_weight", norm_weight, (self._rank,))
            require_dtype("norm_weight", norm_weight, self.dtype)
        if (positions is None) != (cos_sin_cache is None):
            missing = "positions" if positions is None else "cos_sin_cache"
            raise ValueError(f"{missing} is None; positions and cos_sin_cache go together")
        if positions is not None and cos_sin_cache is not None:
            require_count("positions", positions, "c_kv", tokens)
            require_dtype("positions", positions, torch.int32, torch.int64)
            require_shape("cos_sin_cache", cos_sin_cache, ("max_position", self._rope))
            require_dtype("cos_sin_cache", cos_sin_cache, torch.float32)

    def append(self, tensors: AppendTensors, eps: float, interleaved: bool) -> None:
        """Check everything, then launch on the current stream of the cache's device."""
        require_positive("eps", eps)
        call = self._calls.get(tensors, lambda: self._prepare_append(tensors))
        if call.blocks == 0:
            return
        c_kv, k_rope, cache, slots, weight, positions, angles, scale = tensors
        for name, tensor in (
            ("c_kv", c_kv),
            ("k_rope", k_rope),
            ("kv_cache", cache),
            ("norm_weight", weight),
            ("cos_sin_cache", angles),
        ):
            if tensor is not None:
                require_aligned(name, tensor)
        latent_stride, rope_stride, cache_b, cache_t, cache_slots, angles_stride, max_position, rows = call.values
        values = (
            *(c_kv.data_ptr(), latent_stride, _address(k_rope), rope_stride),
            *(cache.data_ptr(), cache_b, cache_t, cache_slots),
            *(slots.data_ptr(), _is_long(slots)),
            *(_address(weight), eps),
            *(_address(positions), _is_long(positions)),
            *(_address(angles), angles_stride, max_position),
            *(int(interleaved), rows),
            *_address_if_given(scale),
        )
        self._launch("append", call, values, tensors, ("kv_cache",))

    def _prepare_append(self, tensors: AppendTensors) -> _Call:
        c_kv, k_rope, cache, slots, weight, positions, angles, _ = tensors
        self.check_append(*tensors)
        device = self._check_devices(tensors)
        for name, tensor in (("slot_mapping", slots), ("norm_weight", weight), ("positions", positions)):
            if tensor is not None:
                require_contiguous(name, tensor)
        require_distinct_rows("kv_cache", cache)
        rows = c_kv.shape[0]
        if rows >= _MAX_ITEMS:
            raise ValueError(f"c_kv has {rows:,} rows; it must have fewer than {_MAX_ITEMS:,}")
        (latent_stride,) = piece_strides("c_kv", c_kv)
        (rope_stride,) = piece_strides("k_rope", k_rope) if k_rope is not None else (0,)
        cache_b, cache_t, *_ = piece_strides("kv_cache", cache)
        angles_stride = max_position = 0
        if angles is not None:
            angles_stride, max_position = 4 * piece_strides("cos_sin_cache", angles)[0], angles.shape[0]
        cache_slots = cache.shape[0] * cache.shape[1]
        sizes = (latent_stride, rope_stride, cache_b, cache_t, cache_slots, angles_stride, max_position, rows)
        tokens_per_block = self.manifest.kernels["append"].constants["tokens_per_block"]
        return _Call(device, -(-rows // tokens_per_block), sizes)

    # -- merge

    def check_merge(self, out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor) -> None:
        """Check shapes and dtypes alone, which also holds for tensors without storage."""
        require_tensor("out1", out1)
        if out1.dim() not in (3, 4):
            raise ValueError(f"out1 has shape {shape_of(out1)}; it must be (tokens, heads, d) or (b, s, heads, d)")
        width = out1.shape[-1]
        if width % 8 or not 8 <= width <= _MAX_WIDTH:
            raise ValueError(
                f"out1 has shape {shape_of(out1)}; its last dimension must be a multiple of 8 from 8 to {_MAX_WIDTH}"
            )
        require_dtype("out1", out1, self.dtype)
        self._check_like("out2", out2, out1)
        for name, lse in (("lse1", lse1), ("lse2", lse2)):
            self._check_lse(name, lse, out1)

    def merge(self, tensors: MergeTensors) -> None:
        """Check everything, then launch on the current stream of the results' device."""
        call = self._calls.get(tensors, lambda: self._prepare_merge(tensors))
        if call.blocks == 0:
            return
        for name in ("out1", "out2", "out"):
            require_aligned(name, getattr(tensors, name))
        values: list[int] = []
        for i, tensor in enumerate(tensors):
            values += (tensor.data_ptr(), *call.values[3 * i : 3 * i + 3])
        self._launch("merge", call, (*values, *call.values[18:]), tensors, ("out", "lse"))

    def _prepare_merge(self, tensors: MergeTensors) -> _Call:
        out1, lse1, out2, lse2, out, lse = tensors
        self.check_merge(out1, lse1, out2, lse2)
        self._check_like("out", out, out1)
        self._check_lse("lse", lse, out1)
        device = self._check_devices(tensors)
        require_distinct_rows("out", out)
        require_distinct_rows("lse", lse)
        strides: list[int] = []
        for name, tensor in zip(tensors._fields, tensors, strict=True):
            find = number_strides if name.startswith("lse") else piece_strides
            found = find(name, tensor)
            strides += found if tensor.dim() == (3 if find is number_strides else 4) else (0, *found)
        batch, s_q, heads, width = out1.shape if out1.dim() == 4 else (1, *out1.shape)
        rows, pieces = batch * s_q * heads, width // 8
        if rows * pieces >= _MAX_ITEMS:
            raise ValueError(
                f"out1 has shape {shape_of(out1)}: its {rows * pieces:,} pieces of 16 B reach {_MAX_ITEMS:,}; "
                "split the call"
            )
        kernel = self.manifest.kernels["merge"]
        rows_per_warp = kernel.constants["pieces_per_warp"] // pieces
        numbers = [number for d in (s_q, heads, pieces) for number in divisor(max(d, 1))]
        blocks = -(-rows // (kernel.threads // 32 * rows_per_warp))
        return _Call(device, blocks, (*strides, rows, rows_per_warp, *numbers))

    def _check_like(self, name: str, out: torch.Tensor, out1: torch.Tensor) -> None:
        require_tensor(name, out)
        if out.shape != out1.shape or out.dtype != self.dtype:
            raise ValueError(
                f"{name} has shape {shape_of(out)} and dtype {out.dtype}; it must be {shape_of(out1)} and "
                f"{self.dtype}, as out1"
            )

    def _check_lse(self, name: str, lse: torch.Tensor, out1: torch.Tensor) -> None:
        require_tensor(name, lse)
        *batch, tokens, heads, _ = out1.shape
        want = (*batch, heads, tokens)
        if tuple(lse.shape) != want or lse.dtype != torch.float32:
            raise ValueError(
                f"{name} has shape {shape_of(lse)} and dtype {lse.dtype}; it must be {want} and torch.float32 where "
                f"out1 is {shape_of(out1)}"
            )

    # -- all of them

    def _check_cache(self, kv_cache: torch.Tensor) -> None:
        require_cache("kv_cache", kv_cache, self.manifest.cache, self.manifest.d_qk, 1)

    def _check_devices(self, tensors: _Tensors) -> torch.device:
        device = require_devices(_given(tensors), self._backend.device_type)
        self._backend.sm_count(device)  # refuses a GPU that the kernels can't run on
        return device

    def _launch(
        self, name: str, call: _Call, values: Sequence[int | float], tensors: _Tensors, written: Sequence[str]
    ) -> None:
        facts = self.manifest.kernels[name]
        touched = _touched(tensors, written) if call.device.type == "cpu" else ()
        with current(call.device):
            self._kernels.get(facts).launch(call.device, (call.blocks, 1, 1), facts.threads, (), values, touched)


# ---- Operators -------------------------------------------------------------------------------------------------------

loaded: Loaded[MemoryKernels] = Loaded()

_RANGES = "Tensor kv_cache, Tensor block_table, Tensor cu_seqlens, Tensor? seq_starts, Tensor? tensor_scale"
_PARTIALS = "Tensor out1, Tensor lse1, Tensor out2, Tensor lse2"
torch.library.define("mlaforge::gather", f"({_RANGES}, SymInt total_tokens, str kernel) -> Tensor")
torch.library.define("mlaforge::gather_out", f"({_RANGES}, Tensor(a!) out, str kernel) -> ()")
torch.library.define(
    "mlaforge::append",
    "(Tensor c_kv, Tensor? k_rope, Tensor(a!) kv_cache, Tensor slot_mapping, Tensor? norm_weight, Tensor? positions, "
    "Tensor? cos_sin_cache, Tensor? tensor_scale, float eps, bool interleaved, str kernel) -> ()",
)
torch.library.define("mlaforge::merge", f"({_PARTIALS}, str kernel) -> (Tensor, Tensor)")
torch.library.define("mlaforge::merge_out", f"({_PARTIALS}, Tensor(a!) out, Tensor(b!) lse, str kernel) -> ()")


def _empty_rows(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    tensor_scale: torch.Tensor | None,
    total_tokens: int,
    kernel: str,
) -> torch.Tensor:
    kernels = loaded.get(kernel)
    kernels.check_gather(kv_cache, block_table, cu_seqlens, seq_starts, tensor_scale)
    return kv_cache.new_empty((total_tokens, kernels.manifest.d_qk), dtype=kernels.dtype)


@torch.library.impl("mlaforge::gather", "default")
def _gather(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    tensor_scale: torch.Tensor | None,
    total_tokens: int,
    kernel: str,
) -> torch.Tensor:
    if total_tokens < 0:
        raise ValueError(f"total_tokens is {total_tokens}; it must be 0 or more")
    out = _empty_rows(kv_cache, block_table, cu_seqlens, seq_starts, tensor_scale, total_tokens, kernel)
    loaded.get(kernel).gather(GatherTensors(kv_cache, block_table, cu_seqlens, seq_starts, out, tensor_scale))
    return out


def _gather_fake(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    tensor_scale: torch.Tensor | None,
    total_tokens: int,
    kernel: str,
) -> torch.Tensor:
    out = _empty_rows(kv_cache, block_table, cu_seqlens, seq_starts, tensor_scale, total_tokens, kernel)
    require_one_device(**GatherTensors(kv_cache, block_table, cu_seqlens, seq_starts, out, tensor_scale)._asdict())
    return out


@torch.library.impl("mlaforge::gather_out", "default")
def _gather_out(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    tensor_scale: torch.Tensor | None,
    out: torch.Tensor,
    kernel: str,
) -> None:
    loaded.get(kernel).gather(GatherTensors(kv_cache, block_table, cu_seqlens, seq_starts, out, tensor_scale))


def _gather_out_fake(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    tensor_scale: torch.Tensor | None,
    out: torch.Tensor,
    kernel: str,
) -> None:
    loaded.get(kernel).check_gather(kv_cache, block_table, cu_seqlens, seq_starts, tensor_scale)
    require_one_device(**GatherTensors(kv_cache, block_table, cu_seqlens, seq_starts, out, tensor_scale)._asdict())


@torch.library.impl("mlaforge::append", "default")
def _append(
    c_kv: torch.Tensor,
    k_rope: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    norm_weight: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
    tensor_scale: torch.Tensor | None,
    eps: float,
    interleaved: bool,
    kernel: str,
) -> None:
    tensors = AppendTensors(c_kv, k_rope, kv_cache, slot_mapping, norm_weight, positions, cos_sin_cache, tensor_scale)
    loaded.get(kernel).append(tensors, eps, interleaved)


def _append_fake(
    c_kv: torch.Tensor,
    k_rope: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    norm_weight: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
    tensor_scale: torch.Tensor | None,
    eps: float,
    interleaved: bool,
    kernel: str,
) -> None:
    tensors = AppendTensors(c_kv, k_rope, kv_cache, slot_mapping, norm_weight, positions, cos_sin_cache, tensor_scale)
    loaded.get(kernel).check_append(*tensors)
    require_one_device(**tensors._asdict())


def _empty_merged(
    out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor, kernel: str
) -> tuple[torch.Tensor, torch.Tensor]:
    loaded.get(kernel).check_merge(out1, lse1, out2, lse2)
    return out1.new_empty(out1.shape), lse1.new_empty(lse1.shape)


@torch.library.impl("mlaforge::merge", "default")
def _merge(
    out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor, kernel: str
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _empty_merged(out1, lse1, out2, lse2, kernel)
    loaded.get(kernel).merge(MergeTensors(out1, lse1, out2, lse2, out, lse))
    return out, lse


def _merge_fake(
    out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor, kernel: str
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _empty_merged(out1, lse1, out2, lse2, kernel)
    require_one_device(**MergeTensors(out1, lse1, out2, lse2, out, lse)._asdict())
    return out, lse


@torch.library.impl("mlaforge::merge_out", "default")
def _merge_out(
    out1: torch.Tensor,
    lse1: torch.Tensor,
    out2: torch.Tensor,
    lse2: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    kernel: str,
) -> None:
    loaded.get(kernel).merge(MergeTensors(out1, lse1, out2, lse2, out, lse))


def _merge_out_fake(
    out1: torch.Tensor,
    lse1: torch.Tensor,
    out2: torch.Tensor,
    lse2: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    kernel: str,
) -> None:
    loaded.get(kernel).check_merge(out1, lse1, out2, lse2)
    require_one_device(**MergeTensors(out1, lse1, out2, lse2, out, lse)._asdict())


torch.library.register_fake("mlaforge::gather", _gather_fake)
torch.library.register_fake("mlaforge::gather_out", _gather_out_fake)
torch.library.register_fake("mlaforge::append", _append_fake)
torch.library.register_fake("mlaforge::merge", _merge_fake)
torch.library.register_fake("mlaforge::merge_out", _merge_out_fake)
