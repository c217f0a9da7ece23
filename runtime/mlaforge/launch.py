"""Cubins on the GPU: loading, tensor maps, launches. The only module that calls the CUDA driver.

cuda.core covers compiling; it has no way to pass tensor maps of strided, four-dimensional views or to raise a kernel's
shared memory, so launches go through cuda.bindings.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

from mlaforge.compiler import compile_kernel
from mlaforge.manifest import Parameter


class CudaError(RuntimeError):
    """The CUDA driver refused a call."""


def _check(result: tuple[Any, ...], what: str) -> Any:
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(status)
        _, text = driver.cuGetErrorString(status)
        raise CudaError(f"{what}: {name.decode()} ({text.decode()})")
    return values[0] if len(values) == 1 else values


@dataclass(frozen=True)
class TensorMapShape:
    """What a tensor map says beside the address, in elements of 2 bytes, innermost dimension first."""

    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    """Elements from one index to the next, of all dimensions but the innermost."""
    box: tuple[int, ...]
    sector_bytes: int = 128
    """What L2 fetches at once: 128, or 256 where a neighbour will want the other half."""
    swizzle_bytes: int = 128
    """0: rows of a box follow each other in shared memory as they are."""


@functools.lru_cache(maxsize=4096)
def _encode_tensor_map(shape: TensorMapShape, address: int) -> bytes:
    rank = len(shape.dims)
    kinds, promotions = driver.CUtensorMapDataType, driver.CUtensorMapL2promotion
    tensor_map = _check(
        driver.cuTensorMapEncodeTiled(
            kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if shape.dtype == "bf16" else kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            rank,
            address,
            [driver.cuuint64_t(n) for n in shape.dims],
            [driver.cuuint64_t(2 * n) for n in shape.strides],
            [driver.cuuint32_t(n) for n in shape.box],
            [driver.cuuint32_t(1)] * rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
            if shape.swizzle_bytes
            else driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
            promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_256B
            if shape.sector_bytes == 256
            else promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"encoding {shape} at {address:#x}",
    )
    return ctypes.string_at(tensor_map.getPtr(), 128)


@dataclass(frozen=True)
class LaunchTensor:
    """A tensor whose memory a kernel may touch: what a simulated launch checks accesses against."""

    name: str
    tensor: torch.Tensor
    writable: bool


@dataclass(frozen=True)
class DefinedTensor(LaunchTensor):
    """A tensor that a kernel may read and write, such as a counter: the host gave it values.

    Any other writable tensor is uninitialised until a kernel of the call has written to it.
    """


_TensorMapBytes = ctypes.c_ubyte * 128
_CTYPES: dict[str, Any] = {
    "int": ctypes.c_int,
    "unsigned": ctypes.c_uint,
    "long long": ctypes.c_longlong,
    "float": ctypes.c_float,
}


class ParameterBlock:
    """The parameters of a kernel as the driver wants them: an array of pointers to values."""

    def __init__(self, entry: str, tensor_maps: int, parameters: Sequence[Parameter]) -> None:
        """Lay them out: the tensor maps, then the others in order."""
        fields: list[tuple[str, Any]] = [(f"map{i}", _TensorMapBytes) for i in range(tensor_maps)]
        fields += [(p.name, ctypes.c_void_p if p.ctype.endswith("*") else _CTYPES[p.ctype]) for p in parameters]
        self._block = type(f"{entry}_parameters", (ctypes.Structure,), {"_fields_": fields})
        self._offsets = [getattr(self._block, name).offset for name, _ in fields]
        self._pointers = ctypes.c_void_p * len(fields)

    def pack(self, maps: Sequence[bytes], values: Sequence[int | float]) -> tuple[Any, Any]:
        """Give the memory that holds the values, to be kept alive, and the array of pointers into it."""
        block = self._block(*[_TensorMapBytes.from_buffer_copy(m) for m in maps], *values)
        base = ctypes.addressof(block)
        return block, self._pointers(*[base + offset for offset in self._offsets])


class CudaKernel:
    """One entry point of a cubin, launchable on every device of its kind."""

    def __init__(
        self, cubin: bytes, entry: str, tensor_maps: int, parameters: Sequence[Parameter], dynamic_smem: int
    ) -> None:
        """Describe the kernel; nothing is loaded before the first launch.

        Args:
            cubin: machine code.
            entry: the `extern "C"` name.
            tensor_maps: how many tensor maps lead the parameters.
            parameters: the others, in order.
            dynamic_smem: bytes of a block.
        """
        self._cubin = cubin
        self._entry = entry
        self._dynamic_smem = dynamic_smem
        self._lock = threading.Lock()
        self._kernel: Any = None
        self._devices: set[int] = set()
        self._block = ParameterBlock(entry, tensor_maps, parameters)

    def _load(self, device: int) -> Any:
        with self._lock:
            if self._kernel is None:
                library = _check(
                    driver.cuLibraryLoadData(self._cubin, [], [], 0, [], [], 0), f"loading the cubin of {self._entry}"
                )
                self._kernel = _check(
                    driver.cuLibraryGetKernel(library, self._entry.encode()), f"finding {self._entry}"
                )
            if device not in self._devices:
                # Once for each device, not at each launch, where two threads would race.
                if self._dynamic_smem:
                    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                    handle = _check(driver.cuDeviceGet(device), f"device {device}")
                    _check(
                        driver.cuKernelSetAttribute(attribute, self._dynamic_smem, self._kernel, handle),
                        f"{self._dynamic_smem} B of shared memory for {self._entry}",
                    )
                self._devices.add(device)
        return self._kernel

    def launch(
        self,
        device: torch.device,
        grid: tuple[int, int, int],
        threads: int,
        maps: Sequence[bytes],
        values: Sequence[int | float],
        tensors: Sequence[LaunchTensor],
        *,
        overlap_previous: bool = False,
        cluster: tuple[int, int, int] = (1, 1, 1),
        cooperative: bool = False,
    ) -> None:
        """Enqueue the kernel on the current stream of the device, whose context is current.

        Args:
            device: where.
            grid: blocks.
            threads: of a block.
            maps: tensor maps, 128 bytes each.
            values: the other parameters, in order; pointers as integers.
            tensors: what the pointers point into; the hardware does not ask.
            overlap_previous: start while the kernel before is finishing; the kernel itself waits for it.
            cluster: blocks of a cluster, which divide those of the grid.
            cooperative: all blocks run at the same time, and may wait for each other; the driver refuses more than fit.

        Raises:
            CudaError: the driver refuses to load or to launch.
        """
        kernel = self._kernel if device.index in self._devices else self._load(device.index)
        _keep, pointers = self._block.pack(maps, values)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self._dynamic_smem
        config.hStream = torch.cuda.current_stream(device).cuda_stream
        attributes = []
        if overlap_previous:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if cooperative:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            attributes.append(attribute)
        if cluster != (1, 1, 1):
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dimensions = attribute.value.clusterDim
            dimensions.x, dimensions.y, dimensions.z = cluster
            attributes.append(attribute)
        if attributes:
            config.attrs = attributes
            config.numAttrs = len(attributes)
        _check(
            driver.cuLaunchKernelEx(config, kernel, ctypes.addressof(pointers), 0), f"launching {self._entry} {grid}"
        )


class Cuda:
    """The backend of Hopper GPUs."""

    device_type = "cuda"

    def kernel(
        self, source: Path, arch: str, entry: str, tensor_maps: int, parameters: Sequence[Parameter], dynamic_smem: int
    ) -> CudaKernel:
        """Compile a kernel with NVRTC, or take its cubin from the cache.

        Raises:
            CompileError: the kernel does not compile.
            ToolchainError: the compiler or its headers are missing.
        """
        return CudaKernel(compile_kernel(source, arch=arch).cubin, entry, tensor_maps, parameters, dynamic_smem)

    def sm_count(self, device: torch.device) -> int:
        """Multiprocessors of a device; ValueError if the kernels can't run on it."""
        return _sm_count(device.index)

    def counters(self, device: torch.device, count: int) -> torch.Tensor:
        """Give at least `count` words of zeros for a launch on the current stream, which leaves zeros behind."""
        return _counters.take(device, count)

    def encode_tensor_map(self, shape: TensorMapShape, address: int) -> bytes:
        """Encode a tensor map with zeros outside of the tensor: 128 bytes."""
        return _encode_tensor_map(shape, address)


class _Counters:
    """Words of zeros that a launch counts with and leaves at zero.

    Each stream has a piece of its own, for its launches follow each other; each captured launch has one, too, for a
    graph may be replayed on any stream.
    """

    _WORDS = 144
    _PIECES = 2048

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[tuple[int, int], torch.Tensor] = {}
        self._free: dict[int, list[torch.Tensor]] = {}
        self._slabs: list[torch.Tensor] = []  # which graphs may use as long as the process lives

    def take(self, device: torch.device, count: int) -> torch.Tensor:
        capturing = torch.cuda.is_current_stream_capturing()
        stream = (device.index, torch.cuda.current_stream(device).cuda_stream)
        with self._lock:
            if not capturing and stream in self._streams:
                return self._streams[stream]
            free = self._free.setdefault(device.index, [])
            if count > self._WORDS or (capturing and not free):
                # Within a capture nothing else can be had: the zeros are written at each replay.
                return torch.zeros(count, dtype=torch.int32, device=device)
            if not free:
                pieces = torch.zeros((self._PIECES, self._WORDS), dtype=torch.int32, device=device)
                # Other streams will take pieces of it.
                torch.cuda.current_stream(device).synchronize()
                self._slabs.append(pieces)
                free.extend(pieces)
            piece = free.pop()
            if not capturing:
                self._streams[stream] = piece
            return piece


_counters = _Counters()


@functools.cache
def _sm_count(device: int) -> int:
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) != (9, 0):
        raise ValueError(
            f"cuda:{device} is a {properties.name} of compute capability {properties.major}.{properties.minor}; "
            "the kernels need 9.0 (Hopper)"
        )
    return int(properties.multi_processor_count)
