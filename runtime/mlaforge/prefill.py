"""The prefill call: checks, the launch, and the torch operators around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from mlaforge.arguments import (
    DTYPES,
    piece_strides,
    require_aligned,
    require_contiguous,
    require_devices,
    require_distinct_rows,
    require_dtype,
    require_one_device,
    require_positive,
    require_shape,
    shape_of,
)
from mlaforge.calls import LOG2_E, CallCache, LazyKernels, Loaded, current, tensor_map_shape
from mlaforge.launch import Cuda, DefinedTensor, LaunchTensor, TensorMapShape
from mlaforge.manifest import Kernel, Manifest
from mlaforge.simulator import Simulator

_ADDRESSED = ("q", "k", "v", "out")
"""The tensors that TMA or 16-byte stores address."""


class PrefillTensors(NamedTuple):
    """The tensors of one call; shapes as in `MLA.prefill`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class _Shape:
    """The sizes of one checked call."""

    total_q: int
    total_k: int
    heads: int
    batch: int


@dataclass(frozen=True)
class _Call:
    """What follows from the shapes and strides of a call."""

    shape: _Shape
    blocks: int
    """Of the grid."""
    maps: tuple[tuple[str, TensorMapShape], ...]
    """By the name of the tensor, in the order of the parameters."""


class PrefillRunner:
    """The prefill kernel of one manifest and the call that runs it. It is compiled when it is first called."""

    def __init__(self, manifest: Manifest, kernel: Kernel, backend: Cuda | Simulator, key: str) -> None:
        """Describe it; the operators know it by `key`."""
        self.manifest = manifest
        self.kernel = kernel
        self.key = key
        self.d_v = kernel.constants["d_v"]
        self._d_qk = kernel.constants["d_qk"]
        self._tile_q = kernel.constants["tile_q"]
        self._dtype = DTYPES[manifest.element]
        self._backend = backend
        self._calls: CallCache[_Call] = CallCache()
        self._kernels = LazyKernels(manifest, backend)

    def compile(self) -> None:
        """Compile the kernel now; CompileError if it does not."""
        self._kernels.get(self.kernel)

    def check(self, tensors: PrefillTensors) -> _Shape:
        """Check all but the addresses; ValueError names the tensor, what it is and what it must be."""
        q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse = tensors
        shape = self.check_shapes(q, k, v, cu_seqlens_q, cu_seqlens_k)
        require_devices(zip(tensors._fields, tensors, strict=True), self._backend.device_type)
        require_shape("out", out, (shape.total_q, shape.heads, self.d_v))
        require_dtype("out", out, self._dtype)
        require_shape("lse", lse, (shape.heads, shape.total_q))
        require_dtype("lse", lse, torch.float32)
        for name in ("cu_seqlens_q", "cu_seqlens_k", "lse"):
            require_contiguous(name, getattr(tensors, name))
        for name in _ADDRESSED:
            piece_strides(name, getattr(tensors, name))
        require_distinct_rows("out", out)
        for name, rows in (("q", shape.total_q), ("k", shape.total_k)):
            if not rows < 1 << 31:
                raise ValueError(f"{name} has {rows:,} rows; there must be fewer than 2^31")
        if not self._most_tiles(shape) < 1 << 30:
            raise ValueError(
                f"q has shape {shape_of(q)} in {shape.batch:,} sequences: its {self._most_tiles(shape):,} tiles of "
                f"{self._tile_q} rows pass 2^30; split the batch"
            )
        return shape

    def check_shapes(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
    ) -> _Shape:
        """Check shapes and dtypes alone, which also holds for tensors without storage."""
        for name, tensor, total, width in (
            ("q", q, "total_q", self._d_qk),
            ("k", k, "total_k", self._d_qk),
            ("v", v, "total_k", self.d_v),
        ):
            require_shape(name, tensor, (total, "heads", width))
            require_dtype(name, tensor, self._dtype)
        if q.shape[1] < 1:
            raise ValueError(f"q has shape {shape_of(q)}; it must have a head or more")
        for name, tensor in (("k", k), ("v", v)):
            if tensor.shape[1] != q.shape[1]:
                raise ValueError(f"{name} has {tensor.shape[1]} heads, q has {q.shape[1]}; they must agree")
        if v.shape[0] != k.shape[0]:
            raise ValueError(f"v has {v.shape[0]} rows, k has {k.shape[0]}; they must agree")
        for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            require_shape(name, tensor, ("sequences + 1",))
            require_dtype(name, tensor, torch.int32)
        if cu_seqlens_q.shape[0] < 1:
            raise ValueError("cu_seqlens_q has shape (0); it must have an entry more than there are sequences")
        if cu_seqlens_k.shape != cu_seqlens_q.shape:
            raise ValueError(
                f"cu_seqlens_k has {cu_seqlens_k.shape[0]} entries, cu_seqlens_q has {cu_seqlens_q.shape[0]}; they "
                "must agree"
            )
        return _Shape(q.shape[0], k.shape[0], q.shape[1], cu_seqlens_q.shape[0] - 1)

    def run(self, tensors: PrefillTensors, causal: bool, softmax_scale: float) -> None:
        """Check everything, then launch on the current stream of q's device."""
        require_positive("softmax_scale", softmax_scale)
        call = self._calls.get(tensors, lambda: self._prepare(self.check(tensors), tensors))
        if call.blocks == 0:
            return
        for name in _ADDRESSED:
            require_aligned(name, getattr(tensors, name))
        with current(tensors.q.device):
            self._launch(call, tensors, causal, softmax_scale)

    def _most_tiles(self, shape: _Shape) -> int:
        """How many tiles there can be, whatever the lengths: of each sequence one may be part full."""
        return (shape.total_q // self._tile_q + min(shape.batch, shape.total_q)) * shape.heads

    def _prepare(self, shape: _Shape, tensors: PrefillTensors) -> _Call:
        tiles = self._most_tiles(shape)
        return _Call(
            shape=shape,
            blocks=min(self._backend.sm_count(tensors.q.device), tiles) if tiles else 0,
            maps=tuple((name, self._map_shape(name, getattr(tensors, name))) for name in ("q", "k", "v")),
        )

    def _map_shape(self, name: str, tensor: torch.Tensor) -> TensorMapShape:
        rows, heads, width = tensor.shape
        # TMA wants no dimension of 0: a tensor without rows is never read.
        dims = (width, max(rows, 1), heads, 1)
        strides = (tensor.stride(0), tensor.stride(1), 0)
        return tensor_map_shape(self.manifest.element, dims, strides, self.kernel.boxes[name])

    def _launch(self, call: _Call, tensors: PrefillTensors, causal: bool, softmax_scale: float) -> None:
        q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse = tensors
        shape = call.shape
        counter = torch.zeros(1, dtype=torch.int32, device=q.device)
        maps = tuple(
            self._backend.encode_tensor_map(map_shape, getattr(tensors, name).data_ptr() or q.data_ptr())
            for name, map_shape in call.maps
        )
        self._kernels.get(self.kernel).launch(
            q.device,
            (call.blocks, 1, 1),
            self.kernel.threads,
            maps,
            (
                cu_seqlens_q.data_ptr(),
                cu_seqlens_k.data_ptr(),
                counter.data_ptr(),
                out.data_ptr(),
                2 * out.stride(0),
                2 * out.stride(1),
                lse.data_ptr(),
                shape.batch,
                shape.total_q,
                shape.total_k,
                shape.heads,
                int(causal),
                softmax_scale * LOG2_E,
            ),
            (
                LaunchTensor("q", q, False),
                LaunchTensor("k", k, False),
                LaunchTensor("v", v, False),
                LaunchTensor("cu_seqlens_q", cu_seqlens_q, False),
                LaunchTensor("cu_seqlens_k", cu_seqlens_k, False),
                DefinedTensor("counter", counter, True),
                LaunchTensor("out", out, True),
                LaunchTensor("lse", lse, True),
            ),
        )


loaded: Loaded[PrefillRunner] = Loaded()

_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k"
torch.library.define(
    "mlaforge::prefill", f"({_ARGUMENTS}, str kernel, bool causal, float softmax_scale) -> (Tensor, Tensor)"
)
torch.library.define(
    "mlaforge::prefill_out",
    f"({_ARGUMENTS}, Tensor(a!) out, Tensor(b!) lse, str kernel, bool causal, float softmax_scale) -> ()",
)


def _empty_results(
    runner: PrefillRunner,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = runner.check_shapes(q, k, v, cu_seqlens_q, cu_seqlens_k)
    out = q.new_empty((shape.total_q, shape.heads, runner.d_v))
    return out, q.new_empty((shape.heads, shape.total_q), dtype=torch.float32)


@torch.library.impl("mlaforge::prefill", "default")
def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    kernel: str,
    causal: bool,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    runner = loaded.get(kernel)
    out, lse = _empty_results(runner, q, k, v, cu_seqlens_q, cu_seqlens_k)
    runner.run(PrefillTensors(q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse), causal, softmax_scale)
    return out, lse


def _prefill_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    kernel: str,
    causal: bool,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    results = _empty_results(loaded.get(kernel), q, k, v, cu_seqlens_q, cu_seqlens_k)
    require_one_device(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return results


@torch.library.impl("mlaforge::prefill_out", "default")
def _prefill_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    kernel: str,
    causal: bool,
    softmax_scale: float,
) -> None:
    loaded.get(kernel).run(PrefillTensors(q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse), causal, softmax_scale)


def _prefill_out_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    kernel: str,
    causal: bool,
    softmax_scale: float,
) -> None:
    loaded.get(kernel).check_shapes(q, k, v, cu_seqlens_q, cu_seqlens_k)
    require_one_device(**PrefillTensors(q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse)._asdict())


torch.library.register_fake("mlaforge::prefill", _prefill_fake)
torch.library.register_fake("mlaforge::prefill_out", _prefill_out_fake)
