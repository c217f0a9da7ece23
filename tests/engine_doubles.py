"""The names of vLLM and SGLang that the backends are built on, for machines that have neither.

Only what the backends touch, each thing as simple as can be: with them the backends' own part runs under the simulator
in CI, and on a GPU beside which no engine is installed. What the engines make of the backends the tests of the real
ones show (test_engine_vllm.py, test_engine_sglang.py); they also show that the names are these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch

_T = TypeVar("_T")


@contextlib.contextmanager
def modules(names: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Put modules where imports find them, with the packages above them, as long as the context lasts."""
    made: dict[str, types.ModuleType] = {}
    for name, contents in names.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            package = ".".join(parts[:i])
            made.setdefault(package, types.ModuleType(package)).__path__ = []
        vars(made[name]).update(contents)
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


# ---- vLLM ------------------------------------------------------------------------------------------------------------


class AttentionCGSupport(enum.Enum):
    UNIFORM_BATCH = 2


class QueryLenSupport(enum.Enum):
    UNIFORM = "uniform"


class AttentionType(enum.StrEnum):
    DECODER = "decoder"


class MLACommonBackend:
    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in cls.get_supported_head_sizes()  # type: ignore[attr-defined, no-any-return]


@dataclasses.dataclass
class MLACommonDecodeMetadata:
    block_table: torch.Tensor
    seq_lens: torch.Tensor


@dataclasses.dataclass
class MLACommonMetadata(Generic[_T]):
    num_decodes: int
    head_dim: int | None = None
    decode: Any = None


class MLACommonImpl(Generic[_T]):
    need_to_return_lse_for_decode = False

    def __init__(self, *arguments: Any, **mla_args: Any) -> None:
        self.num_heads, self.head_size, self.scale = arguments[:3]
        for name, value in mla_args.items():
            setattr(self, name, value)


class MLACommonMetadataBuilder(Generic[_T]):
    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any, metadata_cls: Any) -> None:
        self.mla_dims, self.metadata_cls = vllm_config.mla_dims, metadata_cls


class MLAPrefillBackend:
    def __init__(self, **facts: Any) -> None:
        for name, value in facts.items():
            setattr(self, name, value)

    @classmethod
    def validate_configuration(cls, capability: Any, config: Any) -> list[str]:
        return []


@functools.cache
def vllm() -> Any:
    """Give the backend's module, built on these."""
    prefix = "vllm.v1.attention"
    with modules(
        {
            "vllm.model_executor.layers.attention.mla_attention": {
                "MLACommonBackend": MLACommonBackend,
                "MLACommonDecodeMetadata": MLACommonDecodeMetadata,
                "MLACommonImpl": MLACommonImpl,
                "MLACommonMetadata": MLACommonMetadata,
                "MLACommonMetadataBuilder": MLACommonMetadataBuilder,
                "QueryLenSupport": QueryLenSupport,
            },
            f"{prefix}.backend": {"AttentionCGSupport": AttentionCGSupport, "AttentionType": AttentionType},
            f"{prefix}.backends.mla.prefill.base": {"MLAPrefillBackend": MLAPrefillBackend},
        }
    ):
        return _fresh("mlaforge.engines.vllm")


# ---- SGLang ----------------------------------------------------------------------------------------------------------


class Mode(enum.Enum):
    DECODE = 1
    EXTEND = 2
    TARGET_VERIFY = 3

    def is_decode_or_idle(self) -> bool:
        return self is Mode.DECODE

    def is_target_verify(self) -> bool:
        return self is Mode.TARGET_VERIFY


class AttentionBackend:
    pass


class KVWriteLoc:
    @staticmethod
    def for_batch(forward_batch: Any) -> Any:
        return forward_batch.out_cache_loc


PARALLEL = types.SimpleNamespace(dcp_enabled=False)
SPECULATION = types.SimpleNamespace(speculative_num_draft_tokens=None, speculative_eagle_topk=None)


def paged_view(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    return slots.unflatten(0, (-1, page_size))


@functools.cache
def sglang() -> Any:
    """Give the backend's module, built on these."""
    with modules(
        {
            "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
            "sglang.srt.mem_cache.layout.paged_view": {"paged_view": paged_view},
            "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
            "sglang.srt.runtime_context": {"get_parallel": lambda: PARALLEL, "get_spec": lambda: SPECULATION},
        }
    ):
        return _fresh("mlaforge.engines.sglang")


def _fresh(name: str) -> Any:
    """Import a module that nobody else shall find."""
    package, _, own = name.rpartition(".")
    try:
        return importlib.import_module(name)
    finally:
        sys.modules.pop(name, None)
        vars(sys.modules[package]).pop(own, None)
