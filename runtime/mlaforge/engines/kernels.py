"""The kernels that a model's layers need in an engine, made when they are first asked for."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mlaforge.api import MLA, generate_tree, generate_yaml
from mlaforge.arguments import DTYPES
from mlaforge.launch import Cuda
from mlaforge.manifest import read_manifest
from mlaforge.simulator import Simulator

PAGE_SIZES = (128, 64, 32, 16, 1)
"""Tokens in a page of the cache, of which an engine may choose one."""
COMPUTE_CAPABILITY = (9, 0)
_BACKENDS: dict[str, Cuda | Simulator] = {"cuda": Cuda(), "cpu": Simulator()}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Dimensions(NamedTuple):
    """Dimensions of a model's heads, in the words of its config.json. Any number of heads has the same kernels."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class Shape(NamedTuple):
    """What layers that share kernels have in common."""

    dimensions: Dimensions
    dtype: str
    """As cache.dtype of a spec."""
    page_size: int

    def tree(self) -> dict[str, Any]:
        """Give a spec as plain data."""
        numbers = "_".join(map(str, self.dimensions))
        return {
            "name": f"engine_{numbers}_{self.dtype}_{self.page_size}",
            "model": {"num_attention_heads": 1, **self.dimensions._asdict()},
            "cache": {"dtype": self.dtype, "page_size": self.page_size},
        }


SHIPPED = {
    Dimensions(512, 128, 64, 128): "deepseek_v3",
    Dimensions(512, 192, 64, 256): "glm_5",
    Dimensions(512, 256, 0, 256): "glm_5_3_flash",
    Dimensions(256, 64, 64, 128): "mistral_small_4",
    Dimensions(256, 64, 32, 64): "minicpm3",
}
"""Models whose kernels, in bf16 with pages of 64, are those of a shipped spec: `mlaforge compile` makes them ahead."""


def shape(dimensions: Dimensions, dtype: torch.dtype, page_size: int) -> Shape:
    """Describe what a layer needs; ValueError if no kernel has such elements."""
    if dtype not in _DTYPE_NAMES:
        raise ValueError(f"mlaforge: dtype is {dtype}; it must be {' or '.join(map(str, _DTYPE_NAMES))}")
    return Shape(dimensions, _DTYPE_NAMES[dtype], page_size)


def why_not(dimensions: Dimensions, dtype: str = "bf16", page_size: int = 64) -> str | None:
    """Say why no decode kernel has such a shape; None if one has."""
    from mlaforge_generator.errors import SpecError
    from mlaforge_generator.plan import make_plan
    from mlaforge_generator.spec import check_spec

    try:
        make_plan(check_spec(Shape(dimensions, dtype, page_size).tree()))
    except SpecError as error:
        return "; ".join(f"{each.field}: {each.message}" for each in error.problems)
    return None


def why_no_prefill(qk_nope_head_dim: int, qk_rope_head_dim: int, v_head_dim: int) -> str | None:
    """Say why there is no prefill kernel for such heads; None if there is one. It knows nothing of the latent."""
    from mlaforge_generator.kernel_plan import Choice
    from mlaforge_generator.prefill_plan import plan_prefill
    from mlaforge_generator.spec import check_spec
    from mlaforge_generator.target import TARGETS

    dimensions = Dimensions(512, qk_nope_head_dim, qk_rope_head_dim, v_head_dim)
    spec = check_spec(Shape(dimensions, "bf16", 64).tree())
    plan = plan_prefill(spec, TARGETS[spec.target])
    return plan.why if isinstance(plan, Choice) else None


_loaded: dict[tuple[Shape, str], MLA] = {}
_lock = threading.Lock()


def kernels(needed: Shape, device_type: str) -> MLA:
    """Give the kernels of a shape on a kind of device, once in a process.

    Decode is compiled then, or comes from the compile cache, each of the others when it is first called.

    Args:
        needed: of the layer.
        device_type: "cuda", or "cpu" for the simulator.

    Raises:
        ValueError: no kernel has such a shape, or there is no such kind of device.
        CompileError: a kernel does not compile.
        ToolchainError: the compiler or its headers are missing.
    """
    made = _loaded.get((needed, device_type))
    if made is not None:
        return made
    if device_type not in _BACKENDS:
        raise ValueError(f"mlaforge: tensors are on {device_type!r}; it must be {' or '.join(map(repr, _BACKENDS))}")
    with _lock:
        if (needed, device_type) not in _loaded:
            _loaded[needed, device_type] = MLA(read_manifest(_folder(needed)), _BACKENDS[device_type])
        return _loaded[needed, device_type]


def prepare(
    kv_lora_rank: int = 512,
    qk_nope_head_dim: int = 128,
    qk_rope_head_dim: int = 64,
    v_head_dim: int = 128,
    *,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 64,
    device_type: str = "cuda",
) -> None:
    """Compile all kernels that a model's layers can call, for this process and into the compile cache.

    Needs no GPU. An engine does so itself before its first batch; done before, it starts the sooner.

    Args:
        kv_lora_rank: of the model's config.json.
        qk_nope_head_dim: likewise.
        qk_rope_head_dim: likewise.
        v_head_dim: likewise.
        dtype: of the model and its cache, bf16 or fp16.
        page_size: tokens in one page of the cache: vLLM's `--block-size`, SGLang's `--page-size`.
        device_type: "cuda", or "cpu" for the simulator.

    Raises:
        ValueError: no kernel has such a shape.
        CompileError: a kernel does not compile.
        ToolchainError: the compiler or its headers are missing.
    """
    dimensions = Dimensions(kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim)
    kernels(shape(dimensions, dtype, page_size), device_type).compile()


def _folder(needed: Shape) -> Path:
    from mlaforge_generator.errors import SpecError

    shipped = SHIPPED.get(needed.dimensions) if (needed.dtype, needed.page_size) == ("bf16", 64) else None
    try:
        return generate_yaml(shipped) if shipped is not None else generate_tree(needed.tree())
    except SpecError as error:
        reasons = "; ".join(f"{each.field}: {each.message}" for each in error.problems)
        raise ValueError(f"mlaforge: no kernel has {needed}: {reasons}") from None
