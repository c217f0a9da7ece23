"""The backend for SGLang: decode, and the verification of a chain of drafted tokens, over the pool's own pages.

SGLang imports this module when it is asked for `mlaforge`; `register_sglang` tells it where. It takes one backend for
prefill and another for decode: this one is for decode, and what it is not for it refuses by name.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.layout.paged_view import paged_view
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_parallel, get_spec

from . import NAME
from .kernels import COMPUTE_CAPABILITY, Dimensions, kernels, shape


class MLAForgeAttnBackend(AttentionBackend):
    """Attention in the latent space of all layers of a model.

    The kernels divide their work themselves, from lengths on the device. So all that a batch needs beside them is a
    table of its pages, which a CUDA graph finds in a buffer of its own, written anew before each replay.
    """

    # Without the host's lengths the table is as wide as a context can be; the kernels do not read what is behind one.
    needs_cpu_seq_lens: bool = False

    def __init__(self, model_runner: Any) -> None:
        """Take a model runner's pool and its model's dimensions, and have the kernels made.

        Raises:
            ValueError: something about the model or its options is not served; it says what.
            CompileError: a kernel does not compile.
            ToolchainError: the compiler or its headers are missing.
        """
        super().__init__()
        model = model_runner.model_config
        self.device = torch.device(model_runner.device)
        self.data_type = self.kv_cache_dtype = model_runner.kv_cache_dtype
        self._refuse(model_runner)
        self.kv_index_translator = model_runner.kv_index_translator
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.num_draft_tokens = int(get_spec().speculative_num_draft_tokens or 0)
        self._req_to_token: torch.Tensor = model_runner.req_to_token_pool.req_to_token
        self._page_size = int(model_runner.page_size)
        self._context = int(model.context_len)
        self._rank = int(model.kv_lora_rank)
        dimensions = Dimensions(
            self._rank, int(model.qk_nope_head_dim), int(model.qk_rope_head_dim), int(model.v_head_dim)
        )
        self._mla = kernels(shape(dimensions, self.kv_cache_dtype, self._page_size), self.device.type)
        if self.device.type == "cuda":
            # Here, for nothing can be compiled while a graph is captured. The simulator makes kernels as it meets them.
            self._mla.compile()
        self._graph_table: torch.Tensor | None = None
        self.forward_metadata: torch.Tensor | None = None

    @staticmethod
    def _refuse(runner: Any) -> None:
        wrong = []
        if not runner.use_mla_backend:
            wrong.append("the model is no MLA model")
        if runner.dtype != runner.kv_cache_dtype:
            wrong.append(f"kv_cache_dtype is {runner.kv_cache_dtype}, dtype is {runner.dtype}; they must agree")
        if get_parallel().dcp_enabled:
            # Whether an lse is natural SGLang looks up by the backend's name, and this one's is not in its list.
            wrong.append("decode context parallelism is not served")
        if (get_spec().speculative_eagle_topk or 1) > 1:
            wrong.append("speculative_eagle_topk is more than 1; of drafted tokens, chains are served and not trees")
        if runner.kv_index_translator is not None and runner.kv_index_translator.reads_are_translated:
            wrong.append("pools with virtual pages are not served")
        if torch.device(runner.device).type == "cuda":
            found = torch.cuda.get_device_capability(runner.device)
            if found != COMPUTE_CAPABILITY:
                wrong.append(f"the GPU's compute capability is {found[0]}.{found[1]}; the kernels need 9.0 (Hopper)")
        if wrong:
            raise ValueError(f"mlaforge: {'; '.join(wrong)}")

    # -- before a batch

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the table of a batch that no graph runs."""
        if forward_batch.forward_mode.is_decode_or_idle() or forward_batch.forward_mode.is_target_verify():
            longest = self._context
            if forward_batch.seq_lens_cpu is not None and len(forward_batch.seq_lens_cpu):
                longest = min(longest, int(forward_batch.seq_lens_cpu.max()) + self._drafted(forward_batch))
            self.forward_metadata = self._table(forward_batch, self._pages(longest))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make the table of all graphs. Before its first use it names page 0, which every pool has."""
        size = (max_bs, self._pages(self._context))
        self._graph_table = torch.zeros(size, dtype=torch.int32, device=self.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Write the table of a batch where its graph finds it: before the capture, and before each replay."""
        if self._graph_table is None:
            self.init_forward_metadata(forward_batch)
            return
        table = self._graph_table[: forward_batch.batch_size]
        table.copy_(self._table(forward_batch, table.shape[1]))
        self.forward_metadata = table

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Give the tokens of requests that fill a graph's batch up."""
        return 1

    def _table(self, forward_batch: Any, pages: int) -> torch.Tensor:
        """Give (batch, pages) int32: the page of each request's first token, of that one page further on, ..."""
        firsts = self._req_to_token[:, :: self._page_size][:, :pages]
        rows = firsts.index_select(0, forward_batch.req_pool_indices[: forward_batch.batch_size].long())
        return (rows // self._page_size).int()

    def _pages(self, tokens: int) -> int:
        return min(-(-tokens // self._page_size), -(-self._req_to_token.shape[1] // self._page_size))

    def _drafted(self, forward_batch: Any) -> int:
        return self.num_draft_tokens if forward_batch.forward_mode.is_target_verify() else 0

    # -- layers

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **_: Any,
    ) -> torch.Tensor:
        """Attend from one absorbed query of each request.

        Args:
            q: (batch, heads x (kv_lora_rank + qk_rope_head_dim)), or with a dimension for the heads.
            k: the new tokens' latents and rotated parts, for the pool; None if it has them.
            v: part of k.
            layer: SGLang's, of the absorbed attention.
            forward_batch: of the step.
            save_kv_cache: whether k goes into the pool.

        Returns:
            (batch, heads x kv_lora_rank).
        """
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, forward_batch.seq_lens)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **_: Any,
    ) -> torch.Tensor:
        """Attend from a chain of drafted tokens of each request; arguments as in `forward_decode`, with more rows.

        Raises:
            NotImplementedError: it is no verification.
        """
        if not forward_batch.forward_mode.is_target_verify():
            raise NotImplementedError(
                f"mlaforge: the batch's mode is {forward_batch.forward_mode.name}; the backend is for decode. Start "
                f"with --decode-attention-backend {NAME} and another --prefill-attention-backend, such as fa3"
            )
        lengths = forward_batch.seq_lens + self.num_draft_tokens
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, lengths)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        if layer.logit_cap or layer.sliding_window_size != -1:
            raise NotImplementedError(
                f"mlaforge: the layer's logit_cap is {layer.logit_cap} and its sliding_window_size "
                f"{layer.sliding_window_size}; neither is served"
            )
        if k is not None and save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
        assert self.forward_metadata is not None
        batch = forward_batch.batch_size
        out, _ = self._mla.decode(
            q.reshape(batch, -1, layer.tp_q_head_num, layer.head_dim),
            paged_view(self.token_to_kv_pool.get_key_buffer(layer.layer_id), self._page_size),
            self.forward_metadata,
            lengths.int(),
            causal=True,
            softmax_scale=layer.scaling,
        )
        return out.view(-1, layer.tp_q_head_num * self._rank)
