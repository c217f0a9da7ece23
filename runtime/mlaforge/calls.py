"""What the calls of all kernels share: kernels that compile when first asked for, calls that are worked out once for
tensors of the same layout, and the runners that the torch operators find by their key.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Generic, Protocol, TypeVar

import torch

from mlaforge.compiler import source_closure
from mlaforge.launch import Cuda, CudaKernel, TensorMapShape
from mlaforge.manifest import DecodeKernel, Kernel, Manifest
from mlaforge.simulator import SimulatedKernel, Simulator

LOG2_E = math.log2(math.e)
_MAX_CALLS = 512

_Call = TypeVar("_Call")


class LazyKernels:
    """The kernels of one manifest on a backend, each compiled, or taken from the cache, when first asked for."""

    def __init__(self, manifest: Manifest, backend: Cuda | Simulator) -> None:
        """Compile nothing yet."""
        self._target = manifest.target
        self._backend = backend
        self._compiled: dict[str, CudaKernel | SimulatedKernel] = {}

    def get(self, facts: DecodeKernel | Kernel) -> CudaKernel | SimulatedKernel:
        """Give a kernel.

        Raises:
            CompileError: it does not compile.
            ToolchainError: the compiler or its headers are missing.
        """
        kernel = self._compiled.get(facts.entry)
        if kernel is None:
            kernel = self._compiled[facts.entry] = self._backend.kernel(
                facts.source, self._target, facts.entry, len(facts.boxes), facts.parameters, facts.smem_bytes
            )
        return kernel


class CallCache(Generic[_Call]):
    """What follows from the shapes, strides, dtypes and devices of a call's tensors, worked out once for each."""

    def __init__(self) -> None:
        """Know no call yet."""
        self._calls: dict[tuple[object, ...], _Call] = {}

    def get(self, tensors: Iterable[torch.Tensor | None], prepare: Callable[[], _Call]) -> _Call:
        """Give what `prepare` makes of tensors like these, and call it if there were none so far."""
        signature = (
            type(tensors),
            *((t.shape, t.stride(), t.dtype, t.device) if t is not None else None for t in tensors),
        )
        call = self._calls.get(signature)
        if call is None:
            call = prepare()
            if len(self._calls) >= _MAX_CALLS:
                self._calls.clear()
            self._calls[signature] = call
        return call


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one for a launch, where that is not so already."""
    if device.type == "cpu" or torch.cuda.current_device() == device.index:
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def divisor(d: int) -> tuple[int, int, int]:
    """Give a number and what division by it becomes on the device: see `divided` in division.cuh."""
    shift = (d - 1).bit_length()
    return d, -(-(1 << 31 + shift) // d), shift


def tensor_map_shape(
    dtype: str,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    sector_bytes: int = 128,
    swizzle_bytes: int = 128,
) -> TensorMapShape:
    """Describe a tensor map. The stride of a dimension of one index, which is never walked, becomes one that TMA takes.

    Args:
        dtype: of the elements, bf16 or fp16, or of any pairs of bytes.
        dims: innermost first.
        strides: of all dimensions but the innermost, in elements.
        box: of one copy.
        sector_bytes: as in `TensorMapShape`.
        swizzle_bytes: as in `TensorMapShape`.
    """
    unwalked = dims[0] + -dims[0] % 8  # TMA wants a multiple of 16 B
    walked = tuple(stride if size > 1 else unwalked for size, stride in zip(dims[1:], strides, strict=True))
    return TensorMapShape(dtype, dims, walked, box, sector_bytes, swizzle_bytes)


_simulators = itertools.count()


def kernel_key(manifest: Manifest, backend: Cuda | Simulator) -> str:
    """Give the key by which the operators know the kernels of a manifest on a backend: their name and their content."""
    digest = hashlib.sha256((manifest.folder / "manifest.json").read_bytes())
    for source in manifest.sources:
        for name, text in sorted(source_closure(source).items()):
            digest.update(f"{name}\0{len(text)}\0".encode() + text)
    key = f"{manifest.name}:{digest.hexdigest()[:16]}"
    if isinstance(backend, Simulator):
        # Each has a seed of its own; kernels for a GPU are the same whoever loads them, also in another process.
        key += f":sim{next(_simulators)}"
    return key


class Keyed(Protocol):
    """What the operators know by a key."""

    key: str


_Runner = TypeVar("_Runner", bound=Keyed)


class Loaded(Generic[_Runner]):
    """The runners of this process, by key."""

    def __init__(self) -> None:
        """Know none yet."""
        self._runners: dict[str, _Runner] = {}

    def add(self, runner: _Runner) -> None:
        """Make a runner known to the operators under its key."""
        self._runners[runner.key] = runner

    def get(self, key: str) -> _Runner:
        """Give a runner; ValueError if there is none of this key."""
        runner = self._runners.get(key)
        if runner is None:
            raise ValueError(f"no kernel {key!r} is loaded in this process; call mlaforge.load on its spec first")
        return runner
