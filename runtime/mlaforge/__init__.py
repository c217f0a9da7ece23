"""MLA attention kernels for Hopper GPUs, compiled at run time from the text that mlaforge_generator wrote.

Names are imported when they are first used: importing the package needs neither torch nor CUDA, so that kernels can be
compiled, and their cubins loaded from the cache, where torch is not installed.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlaforge.api import MLA as MLA
    from mlaforge.api import load as load
    from mlaforge.attention import MLAAttention as MLAAttention
    from mlaforge.attention_batch import AttentionBatch as AttentionBatch
    from mlaforge.attention_config import AttentionConfig as AttentionConfig
    from mlaforge.attention_reference import ReferenceAttention as ReferenceAttention
    from mlaforge.cache import CacheWarning as CacheWarning
    from mlaforge.cache import KernelCache as KernelCache
    from mlaforge.compiler import CompiledKernel as CompiledKernel
    from mlaforge.compiler import CompileError as CompileError
    from mlaforge.compiler import CompileOptions as CompileOptions
    from mlaforge.compiler import KernelReport as KernelReport
    from mlaforge.compiler import KernelWarning as KernelWarning
    from mlaforge.compiler import compile_kernel as compile_kernel
    from mlaforge.compiler import compile_many as compile_many
    from mlaforge.launch import CudaError as CudaError
    from mlaforge.manifest import Manifest as Manifest
    from mlaforge.manifest import ManifestError as ManifestError
    from mlaforge.manifest import read_manifest as read_manifest
    from mlaforge.toolchain import Toolchain as Toolchain
    from mlaforge.toolchain import ToolchainError as ToolchainError
    from mlaforge.toolchain import find_toolchain as find_toolchain

__version__ = "0.1.0"

_HOMES = {
    "MLA": "api",
    "load": "api",
    "MLAAttention": "attention",
    "AttentionBatch": "attention_batch",
    "AttentionConfig": "attention_config",
    "ReferenceAttention": "attention_reference",
    "CudaError": "launch",
    "Manifest": "manifest",
    "ManifestError": "manifest",
    "read_manifest": "manifest",
    "CacheWarning": "cache",
    "KernelCache": "cache",
    "CompileError": "compiler",
    "CompileOptions": "compiler",
    "CompiledKernel": "compiler",
    "KernelReport": "compiler",
    "KernelWarning": "compiler",
    "compile_kernel": "compiler",
    "compile_many": "compiler",
    "Toolchain": "toolchain",
    "ToolchainError": "toolchain",
    "find_toolchain": "toolchain",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mlaforge' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"mlaforge.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
