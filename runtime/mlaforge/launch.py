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
from typing import Any

from cuda.bindings import driver

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


@functools.lru_cache(maxsize=4096)
def encode_tensor_map(shape: TensorMapShape, address: int) -> bytes:
    """Encode a tensor map with the 128-byte swizzle and zeros outside of the tensor: 128 bytes.

    Raises:
        CudaError: the driver refuses it.
    """
    rank = len(shape.dims)
    kinds = driver.CUtensorMapDataType
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
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"encoding {shape} at {address:#x}",
    )
    return ctypes.string_at(tensor_map.getPtr(), 128)


_TensorMapBytes = ctypes.c_ubyte * 128
_CTYPES: dict[str, Any] = {"int": ctypes.c_int, "long long": ctypes.c_longlong, "float": ctypes.c_float}


class Kernel:
    """One entry point of a cubin, launchable on every device of its kind."""

    def __init__(
        self, cubin: bytes, entry: str, *, tensor_maps: int, parameters: Sequence[Parameter], dynamic_smem: int
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
        fields: list[tuple[str, Any]] = [(f"map{i}", _TensorMapBytes) for i in range(tensor_maps)]
        fields += [(p.name, ctypes.c_void_p if p.ctype.endswith("*") else _CTYPES[p.ctype]) for p in parameters]
        self._block = type(f"{entry}_parameters", (ctypes.Structure,), {"_fields_": fields})
        self._offsets = [getattr(self._block, name).offset for name, _ in fields]
        self._pointers = ctypes.c_void_p * len(fields)

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
        device: int,
        stream: int,
        grid: tuple[int, int, int],
        threads: int,
        maps: Sequence[bytes],
        values: Sequence[int | float],
        *,
        overlap_previous: bool = False,
    ) -> None:
        """Enqueue the kernel on a stream of the current context, which is `device`'s.

        Args:
            device: index of the device.
            stream: handle.
            grid: blocks.
            threads: of a block.
            maps: tensor maps, 128 bytes each.
            values: the other parameters, in order; pointers as integers.
            overlap_previous: start while the kernel before is finishing; the kernel itself waits for it.

        Raises:
            CudaError: the driver refuses to load or to launch.
        """
        kernel = self._kernel if device in self._devices else self._load(device)
        block = self._block(*[_TensorMapBytes.from_buffer_copy(m) for m in maps], *values)
        base = ctypes.addressof(block)
        pointers = self._pointers(*[base + offset for offset in self._offsets])
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self._dynamic_smem
        config.hStream = stream
        if overlap_previous:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        _check(
            driver.cuLaunchKernelEx(config, kernel, ctypes.addressof(pointers), 0), f"launching {self._entry} {grid}"
        )
