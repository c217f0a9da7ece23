"""What the tests of the attention layer share: transformers' own layers, small, with random weights, kernels that are
exact, and requests in a paged cache."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mlaforge.api import MLA
from mlaforge.attention import MLAAttention
from mlaforge.attention_batch import AttentionBatch
from mlaforge.attention_config import AttentionConfig
from mlaforge.attention_reference import ReferenceAttention
from mlaforge.chunked import ContextRounds
from mlaforge.formats import FORMATS
from mlaforge.manifest import Manifest, read_manifest
from mlaforge.memory_reference import append_reference, gather_reference
from mlaforge.reference import chunked_prefill_reference, decode_reference

ROOT = Path(__file__).parents[1]
NOWHERE = 2147480000
"""In entries of a block table that nobody may read."""

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "beta_fast": 32.0, "beta_slow": 1.0}
# Contexts short enough that some pairs are slowed down and some are not, and that late positions matter.
SHORT = {"original_max_position_embeddings": 64}


@dataclass(frozen=True)
class Model:
    """A layer of transformers at small dimensions, with the oddities that its model has."""

    module: str
    prefix: str
    fields: dict[str, Any] = field(default_factory=dict)
    attention: str = ""
    max_position: int = 512

    def config_class(self) -> Any:
        """Give the class of transformers' configuration."""
        home = importlib.import_module(f"transformers.models.{self.module}.configuration_{self.module}")
        return getattr(home, f"{self.prefix}Config")

    def layer_class(self) -> Any:
        """Give the class of transformers' attention module."""
        home = importlib.import_module(f"transformers.models.{self.module}.modeling_{self.module}")
        return getattr(home, self.attention or f"{self.prefix}Attention")

    def config(self, **fields: Any) -> Any:
        """Make transformers' configuration."""
        dims = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 2}
        ranks = {"q_lora_rank": 24, "kv_lora_rank": 32}
        heads = {"qk_nope_head_dim": 20, "qk_rope_head_dim": 16, "v_head_dim": 12}
        config = self.config_class()(
            **{**dims, **ranks, **heads, "max_position_embeddings": self.max_position, **self.fields, **fields}
        )
        config._attn_implementation = "sdpa"
        return config

    def layer(self, config: Any, seed: int = 0) -> torch.nn.Module:
        """Make transformers' attention module with random weights that keep the size of what passes through."""
        layer: torch.nn.Module = self.layer_class()(config, layer_idx=0)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, tensor in layer.named_parameters():
                values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                if name.endswith("norm.weight"):
                    tensor.copy_(1 + 0.2 * values)
                else:
                    # Queries of twice the size: a softmax that chooses shows a wrong score.
                    size = 2.0 if name.startswith(("q_b", "q_proj")) else 1.0
                    tensor.copy_(values * size / tensor.shape[-1] ** 0.5)
        return layer.eval()

    def rotary(self, config: Any) -> Any:
        """Make transformers' rotary embedding; None for a model that does not rotate."""
        home = importlib.import_module(f"transformers.models.{self.module}.modeling_{self.module}")
        make = getattr(home, f"{self.prefix}RotaryEmbedding", None)
        return None if make is None else make(config)


MODELS = {
    "DeepSeek-V2-Lite": Model(
        "deepseek_v2",
        "DeepseekV2",
        {
            "q_lora_rank": None,
            "rope_parameters": {**YARN, **SHORT, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "DeepSeek-V3": Model(
        "deepseek_v3",
        "DeepseekV3",
        {"rope_parameters": {**YARN, **SHORT, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "yarn with another attention factor": Model(
        "deepseek_v3",
        "DeepseekV3",
        {"rope_parameters": {**YARN, **SHORT, "factor": 32, "mscale": 0.5, "mscale_all_dim": 1.0, "truncate": False}},
    ),
    "biases, half-split": Model("deepseek_v3", "DeepseekV3", {"attention_bias": True, "rope_interleave": False}),
    "linear": Model("deepseek_v3", "DeepseekV3", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "MiniCPM3": Model(
        "minicpm3",
        "MiniCPM3",
        {
            "v_head_dim": None,
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0 + i / 8 for i in range(8)],
                "long_factor": [2.0 + i for i in range(8)],
                "original_max_position_embeddings": 128,
            },
        },
        max_position=128,
    ),
    "longrope, long": Model(
        "minicpm3",
        "MiniCPM3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [2.0 + i for i in range(8)],
                "original_max_position_embeddings": 4,
            }
        },
    ),
    "GLM-4.7-Flash": Model("glm4_moe_lite", "Glm4MoeLite", {"v_head_dim": 28, "rope_parameters": {"rope_theta": 1e6}}),
    "LongCat-Flash": Model("longcat_flash", "LongcatFlash", {"head_dim": 16}, attention="LongcatFlashMLA"),
    "Youtu-LLM": Model("youtu", "Youtu", {"rope_parameters": {"rope_theta": 1.6e6}}),
    "Mistral Small 4": Model(
        "mistral4",
        "Mistral4",
        {
            "rope_parameters": {
                **YARN,
                "factor": 128.0,
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        },
    ),
    "Kimi-Linear": Model("kimi_linear", "KimiLinear", {"q_lora_rank": None}),
    "Ling-3": Model("bailing_hybrid", "BailingHybrid"),
}


class _Doubled(TorchDispatchMode):
    """What would be rounded to float32 on the way stays float64."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextlib.contextmanager
def computing(dtype: torch.dtype) -> Iterator[None]:
    """In float64, also what a layer casts to float32 by itself; or as it does it."""
    if dtype != torch.float64:
        yield
        return
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _Doubled():
            yield
    finally:
        torch.set_default_dtype(default)


class Theirs:
    """transformers' layer with its own cache, called with one piece of one sequence after the other."""

    def __init__(self, model: Model, config: Any, layer: torch.nn.Module, dtype: torch.dtype) -> None:
        from transformers import DynamicCache

        self._layer, self._dtype = layer.to(dtype), dtype
        self._device = next(layer.parameters()).device
        with computing(dtype):
            self._rotary = model.rotary(config)
        self._cache = DynamicCache()
        self._context = 0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Give (n, hidden_size) for the next n tokens (n, hidden_size)."""
        n = hidden.shape[0]
        positions = torch.arange(self._context, self._context + n, device=self._device).unsqueeze(0)
        self._context += n
        seen = torch.ones(n, self._context, dtype=torch.bool, device=self._device).tril(self._context - n)[None, None]
        given: dict[str, Any] = {"position_ids": positions, "attention_mask": seen, "cache": self._cache}
        with torch.no_grad(), computing(self._dtype):
            x = hidden.to(self._dtype).unsqueeze(0)
            if self._rotary is not None:
                given["position_embeddings"] = self._rotary(x, positions)
            out: torch.Tensor = self._layer(x, **given)[0]
        return out[0]


class ExactKernels(MLA):
    """The calls of an MLA, worked out by the references in the dtype of what they are given."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.backend: Any = SimpleNamespace(device_type="cpu")

    def decode(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        *arguments: torch.Tensor,
        tensor_scale: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kv_cache = self.read(kv_cache, tensor_scale)
        out, lse = decode_reference(q, kv_cache, *arguments, d_v=self.manifest.d_v, **options)
        return out.to(q.dtype), lse

    def append(
        self,
        c_kv: torch.Tensor,
        k_rope: torch.Tensor | None,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        tensor_scale: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        kept, slots = slot_mapping >= 0, kv_cache.view(-1, kv_cache.shape[-1])
        tokens = append_reference(c_kv, k_rope, **options)[kept]
        cache, rank = self.manifest.cache, self.manifest.d_v
        if cache.quantised:
            scale = None if tensor_scale is None else float(tensor_scale)
            slots[slot_mapping[kept]] = FORMATS[cache.dtype].quantise(tokens[:, :rank], tokens[:, rank:], scale)
        else:
            slots[slot_mapping[kept]] = tokens.to(c_kv)

    def read(self, kv_cache: torch.Tensor, tensor_scale: torch.Tensor | None) -> torch.Tensor:
        """Give what a cache stands for."""
        cache, rank = self.manifest.cache, self.manifest.d_v
        if not cache.quantised:
            return kv_cache
        scale, form = None if tensor_scale is None else float(tensor_scale), FORMATS[cache.dtype]
        return torch.cat(form.dequantise(kv_cache, rank, self.manifest.d_qk - rank, scale, torch.float64), -1)

    def gather(
        self,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens: torch.Tensor,
        *,
        seq_starts: torch.Tensor | None = None,
        tensor_scale: torch.Tensor | None = None,
        total_tokens: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert total_tokens is not None and out is None
        kv_cache = self.read(kv_cache, tensor_scale)
        rows = kv_cache.new_full((total_tokens, kv_cache.shape[-1]), torch.nan)
        return gather_reference(kv_cache, block_table, cu_seqlens, seq_starts, rows)

    def context_rounds(self, context_lens: torch.Tensor, **limits: Any) -> ContextRounds:
        return ContextRounds(context_lens, context_lens)

    def chunked_prefill(self, *tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        context_lens, rounds = tensors[6], options["rounds"]
        assert int(context_lens.max()) == options["max_context"]
        assert int(context_lens.sum()) == options["total_context"]
        assert rounds.seq_starts is context_lens and options["workspace_tokens"] > 0
        tensors = (*tensors[:3], self.read(tensors[3], options["tensor_scale"]), *tensors[4:])
        out, lse = chunked_prefill_reference(*tensors, softmax_scale=options["softmax_scale"])  # type: ignore[misc]
        return (out.to(tensors[0]), lse) if options["out"] is None else (options["out"].copy_(out), lse)


def manifest_for(config: AttentionConfig, folder: str = "deepseek_v2_lite", ranks: int = 1, **fields: Any) -> Manifest:
    """Give the manifest of a shipped spec as if it had been made for another model, whose kernels are the same."""
    names = ("num_attention_heads", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return replace(
        read_manifest(ROOT / "generated" / folder),
        model={"hidden_size": config.hidden_size, **{name: getattr(config, name) for name in names}},
        tensor_parallel=ranks,
        softmax_scale=config.softmax_scale,
        d_qk=config.kv_lora_rank + config.qk_rope_head_dim,
        d_v=config.kv_lora_rank,
        **fields,
    )


def weights_of(layer: MLAAttention, seed: int) -> dict[str, torch.Tensor]:
    """Draw weights of a layer's own names and shapes."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for name, tensor in layer.state_dict().items():
        values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        drawn[name] = 1 + 0.2 * values if name.endswith("norm.weight") else values / tensor.shape[-1] ** 0.5
    return drawn


class Steps:
    """A paged cache and the requests in it: what the layer gives, and what it must."""

    def __init__(
        self, layer: MLAAttention, weights: dict[str, torch.Tensor], requests: int, pages: int = 3, seed: int = 0
    ) -> None:
        config, manifest = layer.config, layer.mla.manifest
        self.device = layer.device
        self.generator = torch.Generator().manual_seed(seed)
        self.layer, self.page = layer, manifest.cache.page_size
        self.reference = ReferenceAttention(config, weights)
        self.latents: list[torch.Tensor | None] = [None] * requests
        self.contexts = [0] * requests
        made: dict[str, Any] = {"dtype": layer.dtype, "device": self.device}
        self.cache = torch.full((1 + requests * pages, self.page, manifest.d_qk), math.nan, **made)
        self.tensor_scale: torch.Tensor | None = None
        if manifest.cache.quantised:
            shape = (1 + requests * pages, self.page, manifest.cache.row_bytes)
            self.cache = torch.full(shape, 0xFF, dtype=torch.uint8, device=self.device)
            if manifest.cache.tensor_scale:
                self.tensor_scale = torch.tensor([0.01], device=self.device)
        blocks = 1 + torch.randperm(requests * pages, generator=self.generator)
        self.table = torch.full((requests, pages + 1), NOWHERE, dtype=torch.int32, device=self.device)
        self.blocks = blocks.view(requests, pages).int().to(self.device)

    def step(
        self, lens: list[int], requests: list[int] | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the layer for new tokens of some requests; give what came and what must."""
        requests = list(range(len(lens))) if requests is None else requests
        contexts = [self.contexts[i] for i in requests]
        for i, n in zip(requests, lens, strict=True):
            # Only the pages that are in use have a place.
            pages = -(-(self.contexts[i] + n) // self.page)
            self.table[i, :pages] = self.blocks[i, :pages]
        table = self.table[requests]
        hidden = torch.randn(sum(lens), self.layer.config.hidden_size, generator=self.generator, dtype=torch.float64)
        hidden = hidden.to(self.device, self.layer.dtype)
        batch = AttentionBatch.make(self.layer.mla, lens, contexts, table, **options)
        got = self.layer(hidden, self.cache, batch, tensor_scale=self.tensor_scale)
        want = []
        for i, piece in zip(requests, hidden.split(lens), strict=True):
            out, self.latents[i] = self.reference(piece, self.latents[i])
            want.append(out)
            self.contexts[i] += piece.shape[0]
        return got, torch.cat(want)

    def cached(self, i: int) -> torch.Tensor:
        """Give what the cache holds of a request."""
        return self.cache[self.blocks[i].long()].flatten(0, 1)[: self.contexts[i]]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Give the root of the mean square of the difference, as a part of that of what is wanted."""
    return float((got.double() - want).norm() / want.norm())
