"""The decode call: checks, workspace, the launch, and the torch operators around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from mlaforge.arguments import (
    DTYPES,
    byte_strides,
    require_aligned,
    require_cache,
    require_distinct_rows,
    require_dtype,
    require_one_device,
    require_positive,
    require_tensor,
    require_tensor_scale,
    shape_of,
)
from mlaforge.calls import LOG2_E, CallCache, LazyKernels, Loaded, current, divisor, kernel_key, tensor_map_shape
from mlaforge.launch import Cuda, DefinedTensor, LaunchTensor, TensorMapShape
from mlaforge.manifest import DecodeKernel, Manifest
from mlaforge.simulator import Simulator


class DecodeTensors(NamedTuple):
    """The tensors of one call; shapes as in `MLA.decode`."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    tensor_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class _Shape:
    """The sizes of one checked call."""

    b: int
    s_q: int
    h_q: int
    h_kv: int

    @property
    def heads_per_kv(self) -> int:
        return self.h_q // self.h_kv


@dataclass(frozen=True)
class _Call:
    """What follows from the shapes and strides of a call."""

    shape: _Shape
    decode: DecodeKernel
    """The kernel that serves its rows."""
    row_tiles: int
    tiles: int
    """Row tiles of all kv heads: grid.x."""
    parts: int
    """Parts that share the requests: grid.y."""
    copy_q: bool
    """q's rows do not follow each other by one stride."""
    heads_per_kv: tuple[int, int, int]
    """As a divisor."""
    q_map: TensorMapShape
    kv_maps: tuple[TensorMapShape, ...]
    """Of the cache: of the rows, and of the scales in them, if the kernel reads such; none where threads copy."""
    kv_strides: tuple[int, int]
    """From page to page and head to head, for those threads; bytes."""


_MAX_ROWS = (1 << 31) - 65
"""Of a request: numbers of a tile's rows must be ints, also of those behind the last."""
_ADDRESSED = ("q", "kv_cache", "out")
"""The tensors that TMA or 16-byte stores address."""


def _walked_strides(kv_cache: torch.Tensor) -> tuple[int, int]:
    """Give the strides of pages and heads in bytes; 0 for a dimension of one index, which is never walked."""
    page, head = (
        kv_cache.stride(dim) * kv_cache.element_size() if dim < kv_cache.dim() - 1 and kv_cache.shape[dim] > 1 else 0
        for dim in (0, 2)
    )
    return page, head


class DecodeRunner:
    """The compiled kernels of one manifest and the call that runs them."""

    def __init__(self, manifest: Manifest, backend: Cuda | Simulator, key: str | None = None) -> None:
        """Compile the decode kernel for a backend, or take it from the cache; narrower ones follow at their first call.

        The operators know it by `key`; it is that of `kernel_key` if None.

        Raises:
            CompileError: a kernel does not compile.
            ToolchainError: the compiler or its headers are missing.
        """
        self.manifest = manifest
        self.key = kernel_key(manifest, backend) if key is None else key
        self._backend = backend
        self._calls: CallCache[_Call] = CallCache()
        self._kernels = LazyKernels(manifest, backend)
        self._kernels.get(manifest.decode)

    def compile(self) -> None:
        """Compile the narrower kernels now.

        Raises:
            CompileError: a kernel does not compile.
        """
        for kernel in self.manifest.narrow_decodes:
            self._kernels.get(kernel)

    def check(self, tensors: DecodeTensors) -> _Shape:
        """Check all but the addresses; ValueError names the tensor, what it is and what it must be."""
        m = self.manifest
        dtype = DTYPES[m.element]
        q, kv_cache, block_table, cache_seqlens, out, lse, tensor_scale = tensors
        shape = self.check_shapes(q, kv_cache, block_table, cache_seqlens, tensor_scale)
        for name, tensor in zip(tensors._fields, tensors, strict=True):
            if tensor is None:
                continue
            if tensor.device.type != self._backend.device_type:
                raise ValueError(f"{name} is on {tensor.device}; these kernels run on {self._backend.device_type}")
            if tensor.device != q.device:
                raise ValueError(f"{name} is on {tensor.device}, q is on {q.device}; all must be on one device")
        if not (kv_cache.shape[0] >= 1):
            raise ValueError(f"kv_cache has shape {shape_of(kv_cache)}; it must hold at least one block")
        if not (block_table.shape[1] <= 1 or block_table.stride(1) == 1):
            raise ValueError(
                f"block_table has stride {block_table.stride(1)} in its last dimension; it must be contiguous there"
            )
        if not (cache_seqlens.is_contiguous()):
            raise ValueError(f"cache_seqlens has stride {cache_seqlens.stride(0)}; it must be contiguous")
        for name, result in (("out", out), ("lse", lse)):
            require_tensor(name, result)
        want_out = (shape.b, shape.s_q, shape.h_q, m.d_v)
        if not (tuple(out.shape) == want_out and out.dtype == dtype):
            raise ValueError(f"out has shape {shape_of(out)} and dtype {out.dtype}; it must be {want_out} and {dtype}")
        want_lse = (shape.b, shape.h_q, shape.s_q)
        if not (tuple(lse.shape) == want_lse and lse.dtype == torch.float32 and lse.is_contiguous()):
            raise ValueError(
                f"lse has shape {shape_of(lse)}, dtype {lse.dtype} and strides {lse.stride()}; it must be {want_lse}, "
                "torch.float32 and contiguous"
            )
        if out.numel() > 0:
            for name in _ADDRESSED:
                byte_strides(name, getattr(tensors, name))
        require_distinct_rows("out", out)
        if "kv_cache" not in m.decode.boxes:
            stride, _ = _walked_strides(kv_cache)
            if not (stride < 1 << 31):
                raise ValueError(
                    f"kv_cache has a stride of {stride} B in dimension 0; with pages of {m.cache.page_size} it must be "
                    "below 2^31 B"
                )
        blocks = -(-block_table.shape[1] * m.cache.page_size // m.decode.tile_tokens)
        line = shape.b * (max(blocks, 1) + m.decode.fixed_overhead_blocks)
        if not (shape.s_q * shape.heads_per_kv <= _MAX_ROWS):
            raise ValueError(
                f"q has shape {shape_of(q)}: {shape.s_q} x {shape.heads_per_kv} rows, query tokens x heads of a kv "
                f"head; there must be no more than {_MAX_ROWS:,}"
            )
        if not (line < 1 << 31):
            raise ValueError(
                f"block_table has shape {shape_of(block_table)}: its {line:,} blocks of {m.decode.tile_tokens} tokens, "
                "overhead included, pass 2^31; split the batch"
            )
        return shape

    def check_shapes(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        tensor_scale: torch.Tensor | None = None,
    ) -> _Shape:
        """Check shapes and dtypes alone, which also holds for tensors without storage."""
        m = self.manifest
        dtype = DTYPES[m.element]
        require_tensor("q", q)
        if not (q.dim() == 4 and q.shape[3] == m.d_qk and q.shape[1] >= 1 and q.shape[2] >= 1):
            raise ValueError(f"q has shape {shape_of(q)}; it must be (b, s_q, h_q, {m.d_qk})")
        require_cache("kv_cache", kv_cache, m.cache, m.d_qk, "h_kv")
        require_tensor_scale(tensor_scale, m.cache)
        for name, tensor, want in (
            ("q", q, dtype),
            ("block_table", block_table, torch.int32),
            ("cache_seqlens", cache_seqlens, torch.int32),
        ):
            require_dtype(name, tensor, want)
        if block_table.dim() != 2:
            raise ValueError(f"block_table has shape {shape_of(block_table)}; it must be (b, max_blocks)")
        if cache_seqlens.dim() != 1:
            raise ValueError(f"cache_seqlens has shape {shape_of(cache_seqlens)}; it must be (b,)")
        b, s_q, h_q, _ = q.shape
        if block_table.shape[0] != b:
            raise ValueError(f"block_table has {block_table.shape[0]} rows, q has a batch of {b}; they must agree")
        if cache_seqlens.shape[0] != b:
            raise ValueError(
                f"cache_seqlens has {cache_seqlens.shape[0]} entries, q has a batch of {b}; they must agree"
            )
        h_kv = kv_cache.shape[2] if kv_cache.dim() == 4 else 1
        if not (h_kv >= 1 and h_q % h_kv == 0):
            raise ValueError(f"q has {h_q} heads, kv_cache {h_kv}; the heads of q must be a multiple of the cache's")
        return _Shape(b, s_q, h_q, h_kv)

    def run(self, tensors: DecodeTensors, causal: bool, softmax_scale: float) -> None:
        """Check everything, then launch on the current stream of q's device."""
        require_positive("softmax_scale", softmax_scale)
        call = self._calls.get(tensors, lambda: self._prepare(self.check(tensors), tensors.q, tensors.kv_cache))
        if call.shape.b == 0:
            return
        for name in _ADDRESSED:
            require_aligned(name, getattr(tensors, name))
        with current(tensors.q.device):
            self._launch(call, tensors, causal, softmax_scale)

    def _prepare(self, shape: _Shape, q: torch.Tensor, kv_cache: torch.Tensor) -> _Call:
        m = self.manifest
        decode = m.decode_for(shape.s_q * shape.heads_per_kv)
        row_tiles = -(-shape.s_q * shape.heads_per_kv // decode.tile_rows)
        tiles = row_tiles * shape.h_kv
        # Row r of a kv head is query token r / heads_per_kv, head r % heads_per_kv: one stride must serve both.
        one_stride = shape.s_q == 1 or shape.heads_per_kv == 1 or q.stride(1) == shape.heads_per_kv * q.stride(2)
        row_stride = q.stride(1) if shape.heads_per_kv == 1 else q.stride(2)
        rows = shape.s_q * shape.heads_per_kv
        q_strides = (row_stride, shape.heads_per_kv * q.stride(2), q.stride(0))
        if not one_stride:
            q_strides = (m.d_qk, rows * m.d_qk, shape.h_kv * rows * m.d_qk)
        # Quantised rows are read as pairs of bytes: an element of a tensor map is 2 bytes.
        columns, pair = (m.cache.row_bytes // 2, 2) if m.cache.quantised else (m.d_qk, 1)
        head_stride = kv_cache.stride(2) if kv_cache.dim() == 4 else 0
        strides = tuple(stride // pair for stride in (kv_cache.stride(1), head_stride, kv_cache.stride(0)))
        # As kv_policy() in decode.cuh.
        sectors = 256 if row_tiles > 1 else 128
        # The parts wait for each other: no more blocks than run at the same time, one on a multiprocessor.
        blocks = self._backend.sm_count(q.device) if shape.b else 1
        return _Call(
            shape=shape,
            decode=decode,
            row_tiles=row_tiles,
            tiles=tiles,
            parts=max(min(blocks // tiles, decode.max_parts), 1),
            copy_q=not one_stride,
            heads_per_kv=divisor(shape.heads_per_kv),
            q_map=tensor_map_shape(m.element, (m.d_qk, rows, shape.h_kv, shape.b), q_strides, decode.boxes["q"]),
            kv_maps=tuple(
                tensor_map_shape(
                    m.element,
                    (columns, m.cache.page_size, shape.h_kv, kv_cache.shape[0]),
                    strides,
                    decode.boxes[part],
                    sectors,
                    swizzle,
                )
                for part, swizzle in (("kv_cache", 128), ("scales", 0))
                if part in decode.boxes
            ),
            kv_strides=_walked_strides(kv_cache),
        )

    def _launch(self, call: _Call, tensors: DecodeTensors, causal: bool, softmax_scale: float) -> None:
        m = self.manifest
        q, kv_cache, block_table, cache_seqlens, out, lse, tensor_scale = tensors
        shape, parts, tiles = call.shape, call.parts, call.tiles
        if call.copy_q:
            heads = (shape.b, shape.s_q, shape.h_kv, shape.heads_per_kv, m.d_qk)
            q = q.reshape(heads).transpose(1, 2).contiguous()
        # Every part can leave behind two partial results: of a request begun before it, and of one that goes on.
        partial_rows = 2 * parts * tiles * call.decode.tile_rows if parts > 1 else 0
        workspace = torch.empty(partial_rows * (m.d_v + 1), dtype=torch.float32, device=q.device)
        partial_out = workspace.data_ptr()
        partial_lse = partial_out + 4 * partial_rows * m.d_v
        arrivals = self._backend.counters(q.device, parts * tiles if parts > 1 else 0)
        out_strides = [2 * stride for stride in out.stride()[:3]]
        encode = self._backend.encode_tensor_map
        cache = () if call.kv_maps else (kv_cache.data_ptr(), *call.kv_strides)
        self._kernels.get(call.decode).launch(
            q.device,
            (tiles, parts, 1),
            call.decode.threads,
            (encode(call.q_map, q.data_ptr()), *(encode(each, kv_cache.data_ptr()) for each in call.kv_maps)),
            (
                *cache,
                block_table.data_ptr(),
                block_table.stride(0),
                cache_seqlens.data_ptr(),
                out.data_ptr(),
                *out_strides,
                lse.data_ptr(),
                partial_out,
                partial_lse,
                arrivals.data_ptr(),
                shape.b,
                shape.s_q,
                *call.heads_per_kv,
                call.row_tiles,
                block_table.shape[1],
                # A mask that hides nothing is not worth its instructions.
                int(causal and shape.s_q > 1),
                softmax_scale * LOG2_E,
                *(() if tensor_scale is None else (tensor_scale.data_ptr(),)),
            ),
            (
                LaunchTensor("q", q, False),
                LaunchTensor("kv_cache", kv_cache, False),
                LaunchTensor("block_table", block_table, False),
                LaunchTensor("cache_seqlens", cache_seqlens, False),
                LaunchTensor("out", out, True),
                LaunchTensor("lse", lse, True),
                LaunchTensor("workspace", workspace, True),
                DefinedTensor("arrivals", arrivals, True),
                *(() if tensor_scale is None else (LaunchTensor("tensor_scale", tensor_scale, False),)),
            ),
            cooperative=parts > 1,
        )


loaded: Loaded[DecodeRunner] = Loaded()

_ARGUMENTS = "Tensor q, Tensor kv_cache, Tensor block_table, Tensor cache_seqlens, Tensor? tensor_scale"
torch.library.define(
    "mlaforge::decode", f"({_ARGUMENTS}, str kernel, bool causal, float softmax_scale) -> (Tensor, Tensor)"
)
torch.library.define(
    "mlaforge::decode_out",
    f"({_ARGUMENTS}, Tensor(a!) out, Tensor(b!) lse, str kernel, bool causal, float softmax_scale) -> ()",
)


def _empty_results(
    runner: DecodeRunner,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    tensor_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    runner.check_shapes(q, kv_cache, block_table, cache_seqlens, tensor_scale)
    b, s_q, h_q, _ = q.shape
    out = q.new_empty((b, s_q, h_q, runner.manifest.d_v))
    return out, q.new_empty((b, h_q, s_q), dtype=torch.float32)


@torch.library.impl("mlaforge::decode", "default")
def _decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    tensor_scale: torch.Tensor | None,
    kernel: str,
    causal: bool,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    runner = loaded.get(kernel)
    out, lse = _empty_results(runner, q, kv_cache, block_table, cache_seqlens, tensor_scale)
    tensors = DecodeTensors(q, kv_cache, block_table, cache_seqlens, out, lse, tensor_scale)
    runner.run(tensors, causal, softmax_scale)
    return out, lse


def _decode_fake(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    tensor_scale: torch.Tensor | None,
    kernel: str,
    causal: bool,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    results = _empty_results(loaded.get(kernel), q, kv_cache, block_table, cache_seqlens, tensor_scale)
    require_one_device(
        q=q, kv_cache=kv_cache, block_table=block_table, cache_seqlens=cache_seqlens, tensor_scale=tensor_scale
    )
    return results


@torch.library.impl("mlaforge::decode_out", "default")
def _decode_out(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    tensor_scale: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    kernel: str,
    causal: bool,
    softmax_scale: float,
) -> None:
    tensors = DecodeTensors(q, kv_cache, block_table, cache_seqlens, out, lse, tensor_scale)
    loaded.get(kernel).run(tensors, causal, softmax_scale)


def _decode_out_fake(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    tensor_scale: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    kernel: str,
    causal: bool,
    softmax_scale: float,
) -> None:
    loaded.get(kernel).check_shapes(q, kv_cache, block_table, cache_seqlens, tensor_scale)
    tensors = DecodeTensors(q, kv_cache, block_table, cache_seqlens, out, lse, tensor_scale)
    require_one_device(**tensors._asdict())


torch.library.register_fake("mlaforge::decode", _decode_fake)
torch.library.register_fake("mlaforge::decode_out", _decode_out_fake)
