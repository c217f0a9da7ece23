"""What of a machine works: the driver and its GPUs, the compiler and its headers, the cache, the simulator's compiler.

Every check stands alone, so that one thing that is broken hides no other. What can be tried is tried: NVRTC compiles a
kernel that includes what the generated ones do, and the host's compiler builds a library.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mlaforge.cache import KernelCache, default_directory, why_distrusted
from mlaforge.toolchain import ToolchainError, find_nvdisasm, find_parts, requirement_of

State = Literal["ok", "warning", "missing"]

_HOPPER = (9, 0)
_MIB = 1 << 20

_KERNEL = """\
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cutlass/numeric_types.h>
extern "C" __global__ void mla_doctor(float* x) { x[threadIdx.x] = float(cutlass::bfloat16_t(x[threadIdx.x])); }
"""

_LIBRARY = """\
#include <atomic>
#include <bit>
#include <cstdint>
#if defined(__clang__)
static_assert(__clang_major__ >= 15, "clang++ 15 or newer");
#else
static_assert(__GNUC__ >= 11, "g++ 11 or newer");
#endif
extern "C" std::uint32_t mla_doctor(float x) { return std::bit_cast<std::uint32_t>(x); }
"""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: State
    """`warning`: works, or is not needed, but is not as it should be."""
    found: str
    fix: str = ""
    """What to do, empty if nothing."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The same for programs."""


@dataclass(frozen=True)
class Diagnosis:
    """All checks, and what follows from them."""

    checks: tuple[Check, ...]
    compiles: bool
    """Kernels can be compiled."""
    runs: bool
    """Kernels can be compiled, and there is a Hopper GPU that torch can use."""
    simulates: bool
    """Kernels can run under the simulator."""


def diagnose() -> Diagnosis:
    """Look at everything; takes seconds, for it compiles and imports torch."""
    driver, gpus = _check_driver(), list(_check_gpus())
    torch = _check_torch()
    parts = list(_check_parts())
    compiler = _check_compile(parts)
    host = _check_host_compiler()
    compiles = compiler.state == "ok"
    hopper = any(gpu.state == "ok" for gpu in gpus)
    return Diagnosis(
        checks=(driver, *gpus, torch, *parts, compiler, _check_nvdisasm(), _check_cache(), host),
        compiles=compiles,
        runs=compiles and hopper and driver.state == torch.state == "ok",
        simulates=host.state == "ok" and torch.state != "missing",
    )


# ---- The GPU ---------------------------------------------------------------------------------------------------------

_NO_DRIVER = "install NVIDIA's driver, 580 or newer for CUDA 13; kernels are compiled and simulated without it"


def _driver() -> tuple[Any, str]:
    """Initialise the driver; give its bindings, or None and the reason."""
    try:
        from cuda.bindings import driver

        (status,) = driver.cuInit(0)
    except ImportError as error:
        return None, _line(error)
    except (RuntimeError, OSError):
        return None, "libcuda.so.1 can't be loaded"
    if status != driver.CUresult.CUDA_SUCCESS:
        return None, f"cuInit: {status.name}"
    return driver, ""


def _check_driver() -> Check:
    driver, reason = _driver()
    if driver is None:
        return Check("driver", "missing", reason, _NO_DRIVER)
    _, version = driver.cuDriverGetVersion()
    text = f"{version // 1000}.{version % 1000 // 10}"
    if version < 13000:
        return Check("driver", "missing", f"up to CUDA {text}", _NO_DRIVER, {"cuda": text})
    return Check("driver", "ok", f"up to CUDA {text}", facts={"cuda": text})


def _check_gpus() -> Iterator[Check]:
    driver, _ = _driver()
    if driver is None:
        yield Check("GPU", "missing", "none is seen without a driver", "kernels run under the simulator: --device sim")
        return
    _, count = driver.cuDeviceGetCount()
    if not count:
        yield Check("GPU", "missing", "none", "look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    attributes = driver.CUdevice_attribute
    for index in range(count):
        _, device = driver.cuDeviceGet(index)
        _, name = driver.cuDeviceGetName(96, device)
        numbers = []
        for attribute in (
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            attributes.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        ):
            numbers.append(driver.cuDeviceGetAttribute(attribute, device)[1])
        major, minor, sms = numbers
        text = name.split(b"\0", 1)[0].decode(errors="replace")
        found = f"{text}, compute capability {major}.{minor}, {sms} SMs"
        facts = {"name": text, "compute_capability": [major, minor], "sms": sms}
        if (major, minor) == _HOPPER:
            yield Check(f"GPU {index}", "ok", found, facts=facts)
        else:
            yield Check(f"GPU {index}", "warning", found, "the kernels need 9.0, Hopper", facts)


def _check_torch() -> Check:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("torch", "missing", _line(error), f"pip install {requirement_of('torch')}")
    except Exception as error:
        # A torch that does not fit what is beside it fails in any way.
        fix = f"pip install --force-reinstall {requirement_of('torch')}"
        return Check("torch", "missing", f"{type(error).__name__} while it is imported: {_line(error)}", fix)
    cuda = torch.version.cuda
    found = f"{torch.__version__}, {f'CUDA {cuda}' if cuda else 'for CPUs'}"
    facts = {"version": str(torch.__version__), "cuda": cuda, "cuda_available": torch.cuda.is_available()}
    if facts["cuda_available"]:
        return Check("torch", "ok", found, facts=facts)
    if cuda is None:
        return Check("torch", "warning", found, "install a torch for CUDA to run on a GPU", facts)
    return Check("torch", "warning", f"{found}, which sees no GPU", "see the driver and the GPU above", facts)


# ---- The compiler ----------------------------------------------------------------------------------------------------


def _check_parts() -> Iterator[Check]:
    for name, part in find_parts().items():
        facts = {"version": part.version, "directory": str(part.directory) if part.directory else None}
        if part.version is None:
            yield Check(part.label, "missing", "not found", f"pip install {part.requirement}", facts)
            continue
        found = f"{part.version}{f', {part.directory}' if part.directory else ''}"
        if name == "nvrtc" and (reason := _why_no_nvrtc()):
            yield Check(part.label, "missing", f"{found}: {reason}", f"pip install -U {part.requirement}", facts)
        else:
            yield Check(part.label, "ok", found, facts=facts)


def _why_no_nvrtc() -> str:
    """Say why the library does not load, nothing if it does."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        return _line(error)
    return ""


def _check_compile(parts: list[Check]) -> Check:
    """Compile a kernel with the headers that the generated ones include: whether they fit each other."""
    name = "compiling"
    if any(part.state == "missing" for part in parts):
        return Check(name, "missing", "not tried: a part above is missing", "install that")
    from mlaforge.compiler import CompileError, compile_kernel

    with tempfile.TemporaryDirectory(prefix="mlaforge-") as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = Path(scratch) / "doctor.cu"
        source.write_text(_KERNEL, encoding="utf-8")
        try:
            kernel = compile_kernel(source, cache=KernelCache(None))
        except CompileError as error:
            first = next((line for line in error.log.splitlines() if "error" in line), error.log)
            fix = "install versions that mlaforge's own requirements allow; `pip check` names those that they do not"
            return Check(name, "missing", f"NVRTC and the headers do not fit: {first.strip()}", fix)
        except (ToolchainError, OSError) as error:
            return Check(name, "missing", _line(error), "pip install -U cuda-core cuda-bindings")
    seconds = kernel.seconds["nvrtc"]
    return Check(name, "ok", f"a kernel for sm_90a in {seconds:.1f} s", facts={"seconds": seconds})


def _check_nvdisasm() -> Check:
    try:
        path = find_nvdisasm()
    except ToolchainError as error:
        fix = f"pip install {requirement_of('nvidia-cuda-nvdisasm')}, for the reports of `mlaforge compile`"
        return Check("nvdisasm", "warning", _line(error).partition(";")[0], fix)
    try:
        version = importlib.metadata.version("nvidia-cuda-nvdisasm")
    except importlib.metadata.PackageNotFoundError:
        version = "toolkit"
    return Check("nvdisasm", "ok", f"{version}, {path}", facts={"path": str(path), "version": version})


# ---- The cache and the simulator -------------------------------------------------------------------------------------


def _check_cache() -> Check:
    name, fix = "cache", "set MLAFORGE_CACHE_DIR to a directory of yours"
    directory = default_directory()
    if directory is None:
        return Check(name, "warning", "none of MLAFORGE_CACHE_DIR, XDG_CACHE_HOME and HOME names a directory", fix)
    facts: dict[str, Any] = {"directory": str(directory)}
    try:
        return _look_at_cache(name, fix, directory, facts)
    except OSError as error:
        # Below a folder that may not be searched, or with a name that is too long.
        found = f"{directory} can't be looked at: {error.strerror or error}"
        return Check(name, "warning", found, fix, facts)


def _look_at_cache(name: str, fix: str, directory: Path, facts: dict[str, Any]) -> Check:
    if not directory.exists():
        parent = next(each for each in directory.parents if each.exists())
        if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
            return Check(name, "warning", f"{directory} can't be made: {parent} is not writable", fix, facts)
        return Check(name, "ok", f"{directory}, not made yet", facts=facts)
    if not directory.is_dir():
        return Check(name, "warning", f"{directory} is no directory", fix, facts)
    status = directory.stat()
    mode = stat.S_IMODE(status.st_mode)
    facts |= {"mode": f"{mode:04o}", "owner": status.st_uid}
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        return Check(name, "warning", f"{directory}, mode {mode:04o}, is not writable", fix, facts)
    stored = KernelCache(directory).stored()
    size = sum(each.bytes for each in stored)
    free = shutil.disk_usage(directory).free
    facts |= {"entries": len(stored), "bytes": size, "free_bytes": free}
    found = f"{directory}, mode {mode:04o}, {len(stored)} entries, {size / _MIB:.1f} MiB"
    if distrust := why_distrusted(directory, status):
        reason, mend = distrust
        return Check(name, "warning", f"{found}: not used, for {reason}", mend, facts)
    if free < 100 * _MIB:
        return Check(name, "warning", f"{found}; {free / _MIB:.0f} MiB are free there", "mlaforge cache clear", facts)
    return Check(name, "ok", found, facts=facts)


def _check_host_compiler() -> Check:
    name = "host compiler"
    try:
        from mlaforge.simulator import CompilerMissingError, find_compiler
    except Exception as error:
        return Check(name, "warning", f"the simulator can't be imported: {_line(error)}", "see torch above")
    try:
        compiler = find_compiler()
    except CompilerMissingError as error:
        return Check(name, "warning", "none", _line(error))
    with tempfile.TemporaryDirectory(prefix="mlaforge-") as scratch:
        source = Path(scratch) / "doctor.cpp"
        source.write_text(_LIBRARY, encoding="utf-8")
        command = [compiler, "-std=c++20", "-shared", "-fPIC", "-o", str(source.with_suffix(".so")), str(source)]
        try:
            asked = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=True)
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            return Check(name, "warning", f"{compiler}: {_line(error)}", "install g++ 11 or newer", {"path": compiler})
    version = (asked.stdout.splitlines() or [""])[0]
    facts = {"path": compiler, "version": version}
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), "it fails")
        fix = "install g++ 11 or clang++ 15 or newer, or name one in CXX"
        return Check(name, "warning", f"{version}, {compiler}: {first.strip()}", fix, facts)
    return Check(name, "ok", f"{version}, {compiler}", facts=facts)


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
