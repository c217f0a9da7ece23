"""The backend for vLLM: absorbed decode and the cache's writes by these kernels, prefill by them or by vLLM's own.

vLLM imports this module when it is asked for the backend CUSTOM; `register_vllm` tells it where. It keeps what its MLA
layers have in common: the projections around attention, the division of a batch into requests that decode and requests
that prefill, the rounds of a long context. The classes here put kernels in their places.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from mlaforge.api import MLA

from .kernels import COMPUTE_CAPABILITY, PAGE_SIZES, SHIPPED, Dimensions, kernels, shape, why_no_prefill, why_not

_PAGE_SIZE = 64
"""That vLLM takes where its user names none."""
_CACHE_DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Elements of the cache by vLLM's name; auto are the model's."""


class MLAForgeBackend(MLACommonBackend):
    """What vLLM asks before it takes the backend, and the classes that do the work."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """Name it as vLLM selects it: some of its parts look backends up by what this gives."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[MLAForgeImpl]:
        """Give the class of a layer's kernels."""
        return MLAForgeImpl

    @staticmethod
    def get_builder_cls() -> type[MLAForgeMetadataBuilder]:
        """Give the class that describes batches."""
        return MLAForgeMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int]:
        """Give the sizes of pages. vLLM cuts larger blocks into the largest of these that divides them."""
        return list(PAGE_SIZES)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Give the size of blocks where the user names none."""
        return default_block_size if default_block_size % _PAGE_SIZE == 0 else _PAGE_SIZE

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Give what a cached token may have of elements: kv_lora_rank + qk_rope_head_dim."""
        return sorted({each.kv_lora_rank + each.qk_rope_head_dim for each in SHIPPED})

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Say whether it is Hopper's."""
        return (capability.major, capability.minor) == COMPUTE_CAPABILITY

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Refuse batches whose drafts are trimmed on the device: decode takes equally many tokens of each request."""
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Say in a sentence what is not served; vLLM's own words beside it name only the argument."""
        wrong = []
        if not cls.supports_head_size(head_size):
            sizes = ", ".join(map(str, cls.get_supported_head_sizes()))
            wrong.append(f"head_size, kv_lora_rank + qk_rope_head_dim, is {head_size}; it must be one of {sizes}")
        if dtype not in cls.supported_dtypes:
            wrong.append(f"dtype is {dtype}; it must be {' or '.join(map(str, cls.supported_dtypes))}")
        elif kv_cache_dtype is not None and _CACHE_DTYPES.get(kv_cache_dtype, dtype) not in (None, dtype):
            wrong.append(f"kv_cache_dtype is {kv_cache_dtype}, dtype is {dtype}; they must agree")
        if kv_cache_dtype is not None and kv_cache_dtype not in _CACHE_DTYPES:
            wrong.append(f"kv_cache_dtype is {kv_cache_dtype}; quantised caches are not served")
        if use_sparse:
            wrong.append("the model attends to a selection of tokens; sparse attention is not served")
        if has_sink:
            wrong.append("the model has attention sinks, which are not served")
        if not cls.supports_compute_capability(device_capability):
            found = f"{device_capability.major}.{device_capability.minor}"
            wrong.append(f"the GPU's compute capability is {found}; the kernels need 9.0 (Hopper)")
        return f"mlaforge: {'; '.join(wrong)}" if wrong else None


@dataclass
class MLAForgeMetadata(MLACommonMetadata[MLACommonDecodeMetadata]):
    """A batch, as all of vLLM's MLA backends describe it. Nothing is added: the kernels divide their work themselves.

    So nothing of it depends on lengths, and a CUDA graph may be replayed with others.
    """

    def __post_init__(self) -> None:
        """Refuse a width that the backend does not serve, in place of those of vLLM's own."""
        if self.head_dim is not None and not MLAForgeBackend.supports_head_size(self.head_dim):
            raise ValueError(
                f"mlaforge: head_dim is {self.head_dim}; it must be one of {MLAForgeBackend.get_supported_head_sizes()}"
            )


class MLAForgeMetadataBuilder(MLACommonMetadataBuilder[MLAForgeMetadata]):
    """Describes batches, and has the kernels made before there are any."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM
    # Drafted tokens raise it to as many as are verified at once. Requests of more new tokens are prefilled.
    reorder_batch_threshold: int = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, MLAForgeMetadata)
        if device.type == "cuda":
            # Here, for nothing can be compiled while a graph is captured. The simulator makes kernels as it meets them.
            dims = self.mla_dims
            of_layers = Dimensions(dims.kv_lora_rank, dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.v_head_dim)
            kernels(shape(of_layers, kv_cache_spec.dtype, kv_cache_spec.block_size), device.type).compile()


class MLAForgeImpl(MLACommonImpl[MLAForgeMetadata]):
    """A layer's attention in the latent space, and the writes to its cache."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    # Prefill context parallelism was never tried.
    supports_pcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        for name, value in (
            ("alibi_slopes", alibi_slopes),
            ("sliding_window", sliding_window),
            ("logits_soft_cap", logits_soft_cap),
        ):
            if value:
                raise NotImplementedError(f"mlaforge: {name} is {value}, which is not served")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"mlaforge: attn_type is {attn_type}; only a decoder's own attention is served")
        if kv_cache_dtype not in _CACHE_DTYPES:
            raise NotImplementedError(f"mlaforge: kv_cache_dtype is {kv_cache_dtype}; quantised caches are not served")
        self._dimensions = Dimensions(self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim)
        if reason := _why_not(self._dimensions):
            raise NotImplementedError(f"mlaforge: no kernel has {self._dimensions}: {reason}")
        self.supports_quant_query_input = False

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLAForgeMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from absorbed queries of the requests that decode to the cache.

        Args:
            q: (tokens, heads, kv_lora_rank + qk_rope_head_dim), or its two parts: equally many rows of each request.
            kv_c_and_k_pe_cache: (num_blocks, block_size, kv_lora_rank + qk_rope_head_dim).
            attn_metadata: of the batch.
            layer: not needed: there are no scales.

        Returns:
            (tokens, heads, kv_lora_rank), and where vLLM merges the parts of several ranks (tokens, heads) float32:
            natural logarithms of the sums of exponentials, +inf where a rank has no token of a request.
        """
        decode = attn_metadata.decode
        assert decode is not None
        if isinstance(q, tuple):
            latent, rope = q
            q = torch.cat(q, dim=-1) if rope.shape[-1] else latent
        tokens, heads, _ = q.shape
        requests = attn_metadata.num_decodes
        if tokens % requests:
            raise ValueError(f"mlaforge: q has {tokens} tokens of {requests} requests; each must have equally many")
        out, lse = self._kernels(kv_c_and_k_pe_cache).decode(
            q.view(requests, tokens // requests, heads, -1),
            kv_c_and_k_pe_cache,
            decode.block_table,
            decode.seq_lens,
            causal=True,
            softmax_scale=self.scale,
        )
        out = out.view(tokens, heads, self.kv_lora_rank)
        if not self.need_to_return_lse_for_decode:
            return out, None
        return out, lse.transpose(1, 2).reshape(tokens, heads)

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write new tokens into their slots. Those with slot -1, and those behind slot_mapping's end, are padding.

        Args:
            kv_c_normed: (n, kv_lora_rank).
            k_pe: (n, 1, qk_rope_head_dim), rotated.
            kv_cache: (num_blocks, block_size, kv_lora_rank + qk_rope_head_dim); without elements in a trial run.
            slot_mapping: int64, n entries or fewer.
            kv_cache_dtype: the layer's.
            k_scale: not needed: there are no scales.
            skip_scale: likewise.
        """
        if kv_cache.numel() == 0:
            return
        slots = slot_mapping.flatten()
        tokens = slots.shape[0]
        rope = k_pe.squeeze(1)[:tokens] if self.qk_rope_head_dim else None
        self._kernels(kv_cache).append(kv_c_normed[:tokens], rope, kv_cache, slots)

    def _kernels(self, kv_cache: torch.Tensor) -> MLA:
        return kernels(shape(self._dimensions, kv_cache.dtype, kv_cache.shape[1]), kv_cache.device.type)


class MLAForgePrefillBackend(MLAPrefillBackend):
    """Attention with keys and values decompressed, of new tokens to each other and to rounds of a cached context."""

    @staticmethod
    def get_name() -> str:
        """Name it as vLLM selects it."""
        return "CUSTOM"

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        """Say whether it is Hopper's."""
        return (
            device_capability is not None and (device_capability.major, device_capability.minor) == COMPUTE_CAPABILITY
        )

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: Any) -> bool:
        """Say whether there is a prefill kernel for such heads."""
        return _why_no_prefill(mla_dimensions) is None

    @classmethod
    def validate_configuration(cls, device_capability: Any, selector_config: Any) -> list[str]:
        """List what is not served; beside vLLM's words on the dimensions, what a kernel would need."""
        reasons: list[str] = super().validate_configuration(device_capability, selector_config)
        reason = _why_no_prefill(selector_config.mla_dimensions)
        return reasons if reason is None else [*reasons, f"mlaforge: {reason}"]

    def supports_out(self) -> bool:
        """Say that results can be written where the caller wants them."""
        return True

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend from the new tokens of each request to themselves, under the causal mask.

        Args:
            q: (tokens, heads, qk_nope_head_dim + qk_rope_head_dim).
            k: the same shape.
            v: (tokens, heads, v_head_dim).
            return_softmax_lse: give (heads, tokens) float32, too, natural logarithms of the sums of exponentials.
            out: of v's shape, to write to.
            output_scale: of an output in fp8, which is not served.
        """
        if output_scale is not None:
            raise NotImplementedError("mlaforge: output_scale is given; an output in fp8 is not served")
        borders = self._prefill_metadata.query_start_loc
        results = self._attend(q, k, v, borders, borders, True, out)
        return results if return_softmax_lse else results[0]

    def run_prefill_context_chunk(
        self,
        chunk: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend from new tokens to some of the cached ones before them, all of which they see.

        Args:
            chunk: vLLM's description: where each request begins in q, and where in k and v.
            q: (tokens, heads, qk_nope_head_dim + qk_rope_head_dim): those of the chunk's requests.
            k: (cached tokens, heads, qk_nope_head_dim + qk_rope_head_dim).
            v: (cached tokens, heads, v_head_dim).
            out: (tokens, heads, v_head_dim) to write to.
        """
        return self._attend(q, k, v, chunk.query_start_loc, chunk.cu_seq_lens, False, out)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        causal: bool,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dimensions = Dimensions(self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim)
        # Pages are nothing to prefill: with those of decode, both are of one folder.
        page_size = self.vllm_config.cache_config.block_size
        page_size = page_size if page_size in PAGE_SIZES else _PAGE_SIZE
        made = kernels(shape(dimensions, q.dtype, page_size), q.device.type)
        return made.prefill(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal, softmax_scale=self.scale, out=out)


# Asked for every layer and every selection; the answer takes a plan.
_why_not = functools.cache(why_not)


@functools.cache
def _why_no_prefill(dimensions: Any) -> str | None:
    return why_no_prefill(dimensions.qk_nope_head_dim, dimensions.qk_rope_head_dim, dimensions.v_head_dim)
