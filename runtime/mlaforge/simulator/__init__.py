"""The kernels' text on a CPU: compiled by the host's C++ compiler and run on a small, deterministic machine.

`machine.hpp` and `machine.cpp` are the machine, `primitives.hpp` the second implementation of the device primitives. A
run follows from its seed: which block and which warp goes next, and when copies and matrix products land.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mlaforge.cache import Entry, KernelCache
from mlaforge.compiler import source_closure
from mlaforge.launch import DefinedTensor, LaunchTensor, ParameterBlock, TensorMapShape
from mlaforge.manifest import Parameter

_HEADERS = Path(__file__).parent
_FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-w", "-Wno-psabi", "-U_FORTIFY_SOURCE", "-DMLAFORGE_SIMULATOR")
# A run spends its time in the machine, which is compiled once.
_MACHINE_FLAGS = (*_FLAGS, "-O3", "-c")
_KERNEL_FLAGS = (*_FLAGS, "-O2", "-shared")
MODES = ("eager", "lazy", "random")
"""When copies and matrix products land: at once, as late as the waits allow, or at any time between."""


class SimulationError(RuntimeError):
    """The machine found a fault: a race, a deadlock, an access out of bounds. The message names the kernel's line."""


class CompilerMissingError(RuntimeError):
    """The machine has no C++20 compiler."""


@dataclass(frozen=True)
class SimulatorOptions:
    """How the machine runs."""

    seed: int = 0
    mode: str = "random"
    sms: int = 4
    """Multiprocessors that the launch shape is made for."""
    trace: Path | None = None
    """Where to write the events of one block of the decode kernel; `mlaforge.trace` reads them."""
    trace_block: tuple[int, int, int] = (0, 0, 0)

    def __post_init__(self) -> None:
        """Refuse an unknown mode."""
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}; it must be one of {', '.join(MODES)}")


class _Settings(ctypes.Structure):
    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("mode", ctypes.c_int32),
        ("overlap", ctypes.c_int32),
        ("cooperative", ctypes.c_int32),
        ("kernel", ctypes.c_int32),
        ("writers", ctypes.c_void_p),
        ("trace", ctypes.c_int32),
        ("trace_file", ctypes.c_char_p),
        ("trace_block", ctypes.c_uint32 * 3),
    )


class _Region(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("unwritten", ctypes.c_void_p),
        ("writable", ctypes.c_int32),
        ("defined", ctypes.c_int32),
        ("name", ctypes.c_char * 28),
    )


class _TensorMap(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("dims", ctypes.c_uint64 * 4),
        ("strides", ctypes.c_uint64 * 3),
        ("box", ctypes.c_uint32 * 4),
        ("element_bytes", ctypes.c_uint32),
        ("swizzle_bytes", ctypes.c_uint32),
        ("padding", ctypes.c_ubyte * 40),
    )


# Where the machine keeps who wrote global memory: all kernels of the process, for one may read what another wrote.
_writers = ctypes.c_void_p()


def unowned_slots(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Say which 16 bytes of a paged cache's storage are of a slot that no request has: they hold nothing.

    Copying them is no fault, letting them reach a result is. None if the tensors are not those of such a cache.
    """
    if not {"kv_cache", "block_table", "cache_seqlens"} <= tensors.keys():
        return None
    cache, table = tensors["kv_cache"], tensors["block_table"]
    pages, page_size = cache.shape[:2]
    begin = cache.data_ptr() - cache.untyped_storage().data_ptr()
    row = cache.element_size() * cache.shape[-1]
    strides = [cache.element_size() * s if n > 1 else 0 for n, s in zip(cache.shape[:-1], cache.stride(), strict=False)]
    if any(size % 16 for size in (begin, row, *strides)):
        return None
    # Of a page, the tokens before `owned` belong to a request.
    first_tokens = torch.arange(table.shape[1]) * page_size
    tokens = (tensors["cache_seqlens"].long()[:, None] - first_tokens).clamp(0, page_size)
    used = (tokens > 0) & (table >= 0) & (table < pages)
    owned = torch.zeros(pages, dtype=torch.long).scatter_reduce_(0, table[used].long(), tokens[used], "amax")
    unowned = torch.arange(page_size) >= owned[:, None]
    result = torch.zeros(-(-cache.untyped_storage().nbytes() // 16), dtype=torch.uint8)
    shape = (*cache.shape[:-1], row // 16)
    slots = result.as_strided(shape, [*(stride // 16 for stride in strides), 1], begin // 16)
    slots[unowned] = 1
    slots[~unowned] = 0  # Should pages overlap, one owner is enough.
    return result


def find_compiler() -> str:
    """Path of the C++ compiler: $CXX, g++ or clang++.

    Raises:
        CompilerMissingError: there is none.
    """
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise CompilerMissingError(
        "the simulator needs a C++20 compiler: install g++ 11 or newer or clang++ 15 or newer (Debian, Ubuntu: "
        "apt-get install g++), or name one in CXX"
    )


@functools.cache
def _compiler_version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


def _key(what: str, flags: Sequence[str], files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256(f"simulator 2\0{what}\0{_compiler_version(find_compiler())}\0{flags}\0".encode())
    for name, text in sorted(files.items()):
        digest.update(f"{name}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()


def _run_compiler(what: str, unit: str, flags: Sequence[str], linked: bytes = b"") -> Entry:
    """Compile a unit's text, and link it with an object."""
    with tempfile.TemporaryDirectory() as folder:
        source, linked_file, result = (Path(folder) / name for name in ("unit.cpp", "linked.o", "result"))
        source.write_text(unit, encoding="utf-8")
        linked_file.write_bytes(linked)
        command = [find_compiler(), *flags, f"-I{_HEADERS}", "-o", str(result), str(source)]
        done = subprocess.run(command + [str(linked_file)] * bool(linked), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{what} does not compile for the simulator:\n{done.stderr}")
        return Entry({"source": what}, result.read_bytes())


def compile_library(source: Path, entry: str, cache: KernelCache | None = None) -> bytes:
    """Compile a kernel's text for the CPU, or take it from the cache: a shared library.

    Raises:
        CompilerMissingError: there is no C++ compiler.
        RuntimeError: the text does not compile; with the compiler's log.
    """
    cache = cache or KernelCache.default()
    machine = {path.name + ":sim": path.read_bytes() for path in sorted(_HEADERS.glob("*.[ch]pp"))}

    def build() -> Entry:
        key = _key("machine", _MACHINE_FLAGS, machine)
        linked, _ = cache.get(key, lambda: _run_compiler("machine.cpp", '#include "machine.cpp"\n', _MACHINE_FLAGS))
        unit = (
            f'#include "primitives.hpp"\n#include "{source.name}"\n#include "entry.hpp"\n'
            f"MLAFORGE_SIMULATED_KERNEL({entry})\n"
        )
        return _run_compiler(str(source), unit, (*_KERNEL_FLAGS, f"-I{source.parent}"), linked.cubin)

    return cache.get(_key(entry, _KERNEL_FLAGS, {**source_closure(source), **machine}), build)[0].cubin


@dataclass
class Simulator:
    """A machine that stands in for a GPU: the backend of `mlaforge.load(spec, device="sim")`."""

    options: SimulatorOptions = field(default_factory=SimulatorOptions)
    launches: int = 0

    device_type = "cpu"

    def kernel(
        self, source: Path, arch: str, entry: str, tensor_maps: int, parameters: Sequence[Parameter], dynamic_smem: int
    ) -> SimulatedKernel:
        """Compile a kernel for the machine."""
        return SimulatedKernel(self, compile_library(source, entry), entry, tensor_maps, parameters, dynamic_smem)

    def sm_count(self, device: torch.device) -> int:
        """Multiprocessors of the machine."""
        return self.options.sms

    def counters(self, device: torch.device, count: int) -> torch.Tensor:
        """Give `count` words of zeros, to be left as such by the launch."""
        return torch.zeros(count, dtype=torch.int32)

    def encode_tensor_map(self, shape: TensorMapShape, address: int) -> bytes:
        """Encode a tensor map by the rules of the real one.

        Raises:
            ValueError: what the CUDA driver would refuse.
        """
        strides = [2 * stride for stride in shape.strides]
        if address % 16:
            raise ValueError(f"tensor map: address {address:#x} is no multiple of 16")
        if any(stride % 16 or not 0 <= stride < 1 << 40 for stride in strides):
            raise ValueError(f"tensor map: strides {strides} B must be multiples of 16 below 2^40")
        if any(not 1 <= n <= 1 << 32 for n in shape.dims):
            raise ValueError(f"tensor map: dimensions {shape.dims} must be 1 to 2^32")
        if any(not 1 <= n <= 256 for n in shape.box) or 2 * shape.box[0] % 16 or 2 * shape.box[0] > 128:
            raise ValueError(f"tensor map: box {shape.box} must be 1 to 256, its rows multiples of 16 B up to 128 B")
        tensor_map = _TensorMap(
            address,
            tuple(shape.dims),
            tuple(strides),
            tuple(shape.box),
            element_bytes=2,
            swizzle_bytes=shape.swizzle_bytes,
        )
        return bytes(tensor_map)


class SimulatedKernel:
    """One kernel of the machine."""

    def __init__(
        self,
        simulator: Simulator,
        library: bytes,
        entry: str,
        tensor_maps: int,
        parameters: Sequence[Parameter],
        dynamic_smem: int,
    ) -> None:
        """Load the library."""
        self._simulator = simulator
        self._dynamic_smem = dynamic_smem
        self._block = ParameterBlock(entry, tensor_maps, parameters)
        # dlopen wants a file, but no longer than it takes to open it.
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(library)
            file.flush()
            self._launch = ctypes.CDLL(file.name).mlaforge_launch

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
        """Run the kernel to its end.

        Raises:
            SimulationError: the machine found a fault.
            ValueError: the block to trace is not in the grid, or the grid is not made of whole clusters.
        """
        if any(blocks % size for blocks, size in zip(grid, cluster, strict=True)):
            raise ValueError(f"grid {grid} is not made of whole clusters {cluster}")
        options = self._simulator.options
        # Every call begins anew: the same seed gives the same run, whatever ran before.
        self._simulator.launches = self._simulator.launches + 1 if overlap_previous else 1
        trace = options.trace if options.trace is not None and not overlap_previous else None
        if trace is not None and any(not 0 <= at < size for at, size in zip(options.trace_block, grid, strict=True)):
            raise ValueError(f"there is no block {options.trace_block} to trace: the grid is {grid}")
        settings = _Settings(
            seed=options.seed & (1 << 64) - 1,
            mode=MODES.index(options.mode),
            overlap=int(overlap_previous),
            cooperative=int(cooperative),
            kernel=self._simulator.launches,
            writers=ctypes.addressof(_writers),
            trace=int(trace is not None),
            trace_file=os.fspath(trace).encode() if trace is not None else None,
            trace_block=options.trace_block,
        )
        regions = (_Region * len(tensors))()
        unowned = unowned_slots({each.name: each.tensor for each in tensors})
        for region, each in zip(regions, tensors, strict=True):
            storage = each.tensor.untyped_storage()
            region.address, region.bytes = storage.data_ptr(), storage.nbytes()
            region.writable, region.name = int(each.writable), each.name.encode()
            region.defined = int(isinstance(each, DefinedTensor))
            if unowned is not None and each.name == "kv_cache":
                region.unwritten = unowned.data_ptr()
        keep, pointers = self._block.pack(maps, values)
        fault = ctypes.create_string_buffer(8192)
        failed = self._launch(
            ctypes.byref(settings),
            ctypes.byref((ctypes.c_uint * 3)(*grid)),
            ctypes.byref((ctypes.c_uint * 3)(*cluster)),
            threads,
            self._dynamic_smem,
            regions,
            len(tensors),
            pointers,
            fault,
            len(fault),
        )
        del keep, unowned
        if failed:
            raise SimulationError(f"{fault.value.decode(errors='replace')} [seed {options.seed}, {options.mode}]")
