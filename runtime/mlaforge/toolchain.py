"""Where the compiler and its headers are, and which versions they have.

Everything comes from pip wheels: NVRTC, the CUDA runtime headers, their `crt/` part, CCCL and CUTLASS. Where a wheel is
missing, a CUDA toolkit on the machine may stand in for it. The search reads package metadata and a handful of paths, so
it is cheap enough for every process that loads a kernel from the
cache: neither NVRTC nor cuda.core is imported here.
"""

import functools
import importlib.metadata
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

WHEEL_INCLUDE = "nvidia/cu13/include"
"""Where NVIDIA's CUDA 13 wheels, whatever their minor version, keep their headers under site-packages."""


class ToolchainError(RuntimeError):
    """A part of the CUDA toolchain is missing; the message says what to install."""


@dataclass(frozen=True)
class _Component:
    """A part of the toolchain: the wheel that brings it, and the file in it that shows it is really there."""

    label: str
    wheel: str
    wheel_directory: str
    toolkit_directory: str | None
    marker: str
    version_macro: str


_HEADERS: Mapping[str, _Component] = MappingProxyType(
    {
        "cutlass": _Component(
            "CUTLASS headers",
            "nvidia-cutlass",
            "cutlass_library/source/include",
            None,
            "cute/arch/mma_sm90_gmma.hpp",
            "",
        ),
        "cccl": _Component(
            "CCCL headers",
            "nvidia-cuda-cccl",
            f"{WHEEL_INCLUDE}/cccl",
            "include/cccl",
            "cuda/std/__cccl/version.h",
            "CCCL_VERSION",
        ),
        "cudart": _Component(
            "CUDA runtime headers",
            "nvidia-cuda-runtime",
            WHEEL_INCLUDE,
            "include",
            "cuda_runtime_api.h",
            "CUDART_VERSION",
        ),
        "crt": _Component(
            "CUDA crt headers",
            "nvidia-cuda-crt",
            WHEEL_INCLUDE,
            "include",
            "crt/host_defines.h",
            "",
        ),
    }
)


@dataclass(frozen=True)
class Part:
    """A part of the toolchain as it was found."""

    label: str
    version: str | None
    """None if it is missing."""
    directory: Path | None
    """Of headers, for NVRTC's include path; None if it is missing, or a library."""
    wheel: str
    """What brings it."""
    requirement: str
    """The same as pip takes it."""


@dataclass(frozen=True)
class Toolchain:
    """The compiler and the headers that one process compiles with."""

    include_dirs: tuple[Path, ...]
    """Directories for NVRTC's include path, in order, each once."""

    versions: Mapping[str, str]
    """Version of `nvrtc`, `cutlass`, `cccl`, `cudart` and `crt`. Says what a cubin was made of; holds no path."""


@functools.cache
def find_toolchain() -> Toolchain:
    """Find NVRTC and the headers of CUTLASS, CCCL and the CUDA runtime.

    Wheels come first, then a CUDA toolkit under CUDA_HOME, CUDA_PATH, CONDA_PREFIX or /usr/local/cuda. The result is
    kept for the life of the process.

    Raises:
        ToolchainError: a part is neither installed as a wheel nor in a toolkit.
    """
    found = find_parts()
    if found["nvrtc"].version is None:
        raise ToolchainError(f"NVRTC not found; run: pip install {found['nvrtc'].requirement}")
    missing = [part for part in found.values() if part.version is None]
    if missing:
        wheels = " ".join(part.requirement for part in missing)
        labels = ", ".join(part.label for part in missing)
        raise ToolchainError(f"{labels} not found; run: pip install {wheels}")
    directories = dict.fromkeys(part.directory for part in found.values() if part.directory is not None)
    versions = {name: part.version for name, part in found.items() if part.version is not None}
    return Toolchain(tuple(directories), MappingProxyType(versions))


def find_parts() -> dict[str, Part]:
    """Look for the parts that `find_toolchain` needs, by the names of `Toolchain.versions`."""
    wheel = "nvidia-cuda-nvrtc"
    parts = {"nvrtc": Part("NVRTC", _nvrtc_version(), None, wheel, requirement_of(wheel))}
    for name, component in _HEADERS.items():
        directory, version = _in_wheel(component) or _in_toolkit(component) or (None, None)
        parts[name] = Part(component.label, version, directory, component.wheel, requirement_of(component.wheel))
    return parts


def find_nvdisasm() -> Path:
    """Find the disassembler: in the nvidia-cuda-nvdisasm wheel, else in a toolkit, else on PATH.

    Raises:
        ToolchainError: there is none.
    """
    candidates = [
        *_wheel_paths("nvidia-cuda-nvdisasm", "nvidia/cu13/bin/nvdisasm"),
        *(root / "bin/nvdisasm" for root in _toolkit_roots()),
        *(Path(entry) / "nvdisasm" for entry in os.environ.get("PATH", "").split(os.pathsep) if entry),
    ]
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate
    raise ToolchainError("nvdisasm not found; run: pip install nvidia-cuda-nvdisasm")


def _in_wheel(component: _Component) -> tuple[Path, str] | None:
    for directory in _wheel_paths(component.wheel, component.wheel_directory):
        if (directory / component.marker).is_file():
            return directory, importlib.metadata.version(component.wheel)
    return None


def _in_toolkit(component: _Component) -> tuple[Path, str] | None:
    if component.toolkit_directory is None:
        return None
    for root in _toolkit_roots():
        directory = root / component.toolkit_directory
        marker = directory / component.marker
        if marker.is_file():
            return directory, f"toolkit-{_macro(marker, component.version_macro) or _toolkit_version(root)}"
    return None


def _wheel_paths(wheel: str, relative: str) -> list[Path]:
    try:
        distribution = importlib.metadata.distribution(wheel)
    except importlib.metadata.PackageNotFoundError:
        return []
    return [Path(str(distribution.locate_file(relative)))]


def _toolkit_roots() -> list[Path]:
    named = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX")]
    roots = [Path(name) for name in named if name] + [Path("/usr/local/cuda")]
    # Conda and cross-compiling toolkits keep the headers one level down.
    return [path for root in roots for path in (root, root / "targets/x86_64-linux")]


def _macro(header: Path, macro: str) -> str | None:
    if not macro:
        return None
    match = re.search(rf"^\s*#\s*define\s+{macro}\s+(\d+)", header.read_text(errors="replace"), re.MULTILINE)
    return match.group(1) if match else None


def _toolkit_version(root: Path) -> str:
    return _macro(root / "include/cuda_runtime_api.h", "CUDART_VERSION") or "unknown"


def _nvrtc_version() -> str | None:
    try:
        return importlib.metadata.version("nvidia-cuda-nvrtc")
    except importlib.metadata.PackageNotFoundError:
        pass
    # Without the wheel, the library of a toolkit or of the system may still be found. Only the library itself knows its
    # version.
    try:
        from cuda.bindings import nvrtc

        _status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):
        return None
    return f"toolkit-{major}.{minor}"


def requirement_of(wheel: str) -> str:
    """Quote the project's own requirement on a wheel, so that the advice cannot drift from pyproject.toml."""
    try:
        requirements = importlib.metadata.requires("mlaforge") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    for requirement in requirements:
        if re.match(rf"{re.escape(wheel)}(?![\w.-])", requirement):
            return f"'{requirement.partition(';')[0].strip()}'"
    return wheel
