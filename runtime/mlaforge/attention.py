"""One attention layer of an MLA model with the weights of its checkpoint, on the kernels of a spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mlaforge.api import MLA
from mlaforge.arguments import DTYPES, require_dtype, require_shape
from mlaforge.attention_batch import AttentionBatch, DecodeGroup, PrefillGroup, take
from mlaforge.attention_config import AttentionConfig, PositionTables

_ABSORBED = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_OPTIONAL = ("hidden_size", "q_lora_rank")


class MLAAttention(nn.Module):
    """One attention layer of an MLA model, from hidden states to what is added to the residual stream.

    Its parameters have the names and shapes of the checkpoint, so that `load_state_dict` takes the state of a module of
    transformers, and that of a checkpoint's file once the layer's prefix is cut off:

        q_proj, or q_a_proj, q_a_layernorm and q_b_proj
        kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj
        o_proj
        g_proj (Kimi-K3 and Ling 3: the gate of the output)

    Nothing is derived from them beforehand: of kv_b_proj, W_UK and W_UV are views.

    A call writes the new tokens into the paged cache, normalised and rotated, and attends. Requests with few new tokens
    do so in the latent space: their queries are multiplied with W_UK, the decode kernel attends to the cache, and W_UV
    makes values of what comes out. The others have keys and values decompressed, of their context in rounds of bounded
    size. Which request goes which way is settled in the `AttentionBatch`, which all layers of a step share.

    Under tensor parallelism, the spec's tensor_parallel, a module holds the heads of one rank: q_proj or q_b_proj,
    kv_b_proj, g_proj and o_proj's columns are its share, which `shard` cuts from a whole checkpoint. What a call gives
    is then a partial sum: the layer's output is the sum over all ranks, which an all-reduce has to make.

    For inference: no gradient flows through it. A sparse attention's indexer (DeepSeek-V3.2, GLM-5) is not part of it:
    all tokens are attended to.
    """

    q_proj: nn.Linear
    q_a_proj: nn.Linear
    q_a_layernorm: nn.RMSNorm
    q_b_proj: nn.Linear
    g_proj: nn.Linear

    def __init__(
        self,
        config: AttentionConfig,
        mla: MLA,
        tables: PositionTables | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        """Make a layer with random weights of the spec's element type: the cache's, or bf16 if that is quantised.

        Args:
            config: of the model.
            mla: the kernels, of a spec with the same dimensions.
            tables: what follows from a position, of `config.position_tables`; worked out for the model's whole context
                if None. Of a long context they are large, so that layers should share them.
            device: of the weights and of tables that are made; the kernels' own if None.

        Raises:
            ValueError: the spec is of another model: the field is named, with both values.
        """
        super().__init__()
        manifest = mla.manifest
        _check_model(config, mla)
        self.config = config
        self.mla = mla
        self.num_heads = config.num_attention_heads // manifest.tensor_parallel
        self.dtype = DTYPES[manifest.element]
        self.device = torch.device(mla.backend.device_type if device is None else device)
        for name, needed, table in (
            ("cos_sin", config.rotation, None if tables is None else tables.cos_sin),
            ("query_scale", config.query_scaling, None if tables is None else tables.query_scale),
        ):
            if tables is not None and (needed is None) != (table is None):
                raise ValueError(
                    f"tables.{name} is {'None' if table is None else 'given'}, and the model has "
                    f"{'no use for it' if needed is None else 'one'}; take config.position_tables()"
                )
        # Not buffers: `to(dtype)` would round the angles, and layers would no longer share them.
        self.tables = config.position_tables(device=self.device) if tables is None else tables
        # Queries that are scaled have scaled logits.
        self._logit_scale = config.softmax_scale * config.q_lora_scale

        made: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        hidden, heads, bias = config.hidden_size, self.num_heads, config.attention_bias
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, heads * config.qk_head_dim, bias=False, **made)
        else:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=bias, **made)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, config.norm_eps, **made)
            self.q_b_proj = nn.Linear(config.q_lora_rank, heads * config.qk_head_dim, bias=False, **made)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, manifest.d_qk, bias=bias, **made)
        self.kv_a_layernorm = nn.RMSNorm(config.kv_lora_rank, config.norm_eps, **made)
        decompressed = config.qk_nope_head_dim + config.v_head_dim
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, heads * decompressed, bias=False, **made)
        self.o_proj = nn.Linear(heads * config.v_head_dim, hidden, bias=bias, **made)
        if config.output_gate is not None:
            gates = heads * (config.v_head_dim if config.output_gate == "element" else 1)
            self.g_proj = nn.Linear(hidden, gates, bias=False, **made)

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any] | object,
        mla: MLA,
        *,
        max_position: int | None = None,
        tables: PositionTables | None = None,
        device: torch.device | str | None = None,
    ) -> MLAAttention:
        """Make a layer of a model's config.json.

        Args:
            config: the parsed file, or a configuration of transformers; see `AttentionConfig.from_hf`.
            mla: the kernels, of a spec with the same dimensions.
            max_position: positions of the tables that are made; max_position_embeddings if None.
            tables: those of another layer, to share; `max_position` must be None then.
            device: as in the constructor.

        Raises:
            ValueError: the config lacks a field or says what is not known here, or the spec is of another model.
        """
        parsed = AttentionConfig.from_hf(config)
        if tables is None:
            tables = parsed.position_tables(max_position, mla.backend.device_type if device is None else device)
        elif max_position is not None:
            raise ValueError(f"max_position is {max_position} and tables are given; one of them must be None")
        return cls(parsed, mla, tables, device=device)

    @property
    def w_uk(self) -> torch.Tensor:
        """(heads, qk_nope_head_dim, kv_lora_rank): from the latent to the part of a head's key that is not rotated."""
        return self._kv_b[:, : self.config.qk_nope_head_dim]

    @property
    def w_uv(self) -> torch.Tensor:
        """(heads, v_head_dim, kv_lora_rank): from the latent to a head's value."""
        return self._kv_b[:, self.config.qk_nope_head_dim :]

    @property
    def _kv_b(self) -> torch.Tensor:
        return self.kv_b_proj.weight.view(self.num_heads, -1, self.config.kv_lora_rank)

    def shard(self, state_dict: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
        """Cut a rank's share out of the weights of a whole layer, for `load_state_dict`.

        Args:
            state_dict: the layer's weights, all heads.
            rank: from 0 to tensor_parallel - 1. Only rank 0 keeps o_proj's bias, for the ranks' outputs are added up.
        """
        ranks = self.mla.manifest.tensor_parallel
        if not 0 <= rank < ranks:
            raise ValueError(f"rank is {rank}; it must be from 0 to {ranks - 1}, for tensor_parallel is {ranks}")
        shares = dict(state_dict)
        for name, tensor in state_dict.items():
            if name in ("q_proj.weight", "q_b_proj.weight", "kv_b_proj.weight", "g_proj.weight"):
                shares[name] = tensor.tensor_split(ranks)[rank]
            elif name == "o_proj.weight":
                shares[name] = tensor.tensor_split(ranks, dim=1)[rank]
            elif name == "o_proj.bias" and rank > 0:
                shares[name] = torch.zeros_like(tensor)
        return shares

    @torch.no_grad()
    def forward(
        self,
        hidden_states: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: AttentionBatch,
        *,
        tensor_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the new tokens of a step into the cache and attend with them.

        Works on the current stream and never waits for the device. A batch without prompts launches the same kernels
        with the same arguments whatever its lengths, so that it may be captured in a CUDA graph; before a replay,
        `batch.copy_` takes over the lengths and tables of another step.

        Args:
            hidden_states: (total_tokens, hidden_size) of the layer's dtype: the new tokens of all requests, one request
                behind the other, in the batch's order. Normalised, as the layer before it gives them.
            kv_cache: (num_blocks, page_size, d_qk) or (num_blocks, page_size, 1, d_qk): this layer's cache; of a
                quantised one uint8 with the bytes of a token in place of d_qk. The last dimension contiguous, other
                strides multiples of 16 bytes.
            batch: of this step.
            tensor_scale: one float32: the scale of this layer's cache, if its format has one; as in `MLA.append`.

        Returns:
            (total_tokens, hidden_size); under tensor parallelism the part of it that this rank's heads give.

        Raises:
            ValueError: an argument does not fit; it says which, what it is and what it must be.
            CudaError: the driver refused a launch.
        """
        config = self.config
        require_shape("hidden_states", hidden_states, (batch.total_tokens, config.hidden_size))
        require_dtype("hidden_states", hidden_states, self.dtype)
        most = self.tables.max_position
        if most is not None and batch.max_seqlen > most:
            raise ValueError(
                f"a request has {batch.max_seqlen} tokens, the tables have {most} positions; make them with a larger "
                "max_position"
            )
        q = self._queries(hidden_states, batch)
        compressed: torch.Tensor = self.kv_a_proj_with_mqa(hidden_states)
        rotated = config.rotation is not None
        self.mla.append(
            compressed[:, : config.kv_lora_rank],
            compressed[:, config.kv_lora_rank :] if config.qk_rope_head_dim else None,
            kv_cache,
            batch.slot_mapping,
            norm_weight=self._latent_norm(),
            eps=config.norm_eps,
            positions=batch.positions if rotated else None,
            cos_sin_cache=self.tables.cos_sin,
            interleaved=config.rotation.interleaved if config.rotation is not None else None,
            tensor_scale=tensor_scale,
        )
        out = self.attend(q, kv_cache, batch, tensor_scale=tensor_scale)
        if config.output_gate is not None:
            gates: torch.Tensor = self.g_proj(hidden_states)
            out *= gates.sigmoid().view(batch.total_tokens, self.num_heads, -1)
        result: torch.Tensor = self.o_proj(out.flatten(1))
        return result

    @torch.no_grad()
    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: AttentionBatch,
        *,
        tensor_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with queries of tokens that are cached already: the part of a call that depends on which way it goes.

        Args:
            q: (total_tokens, heads, qk_nope_head_dim + qk_rope_head_dim) of the layer's dtype, rotated.
            kv_cache: as in a call, the new tokens in it.
            batch: of this step.
            tensor_scale: as in a call.

        Returns:
            (total_tokens, heads, v_head_dim): what goes into the output's gate and o_proj.
        """
        out = q.new_empty((batch.total_tokens, self.num_heads, self.config.v_head_dim))
        for group in batch.decode:
            self._decode(q, kv_cache, group, out, tensor_scale)
        if batch.prefill is not None:
            self._prefill(q, kv_cache, batch.prefill, out, tensor_scale)
        return out

    def _queries(self, hidden_states: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Give (total_tokens, heads, qk_nope_head_dim + qk_rope_head_dim), rotated."""
        config = self.config
        if config.q_lora_rank is None:
            flat: torch.Tensor = self.q_proj(hidden_states)
        else:
            flat = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q = flat.view(batch.total_tokens, self.num_heads, config.qk_head_dim)
        if (rotation := config.rotation) is not None and self.tables.cos_sin is not None:
            q_rope = q[..., config.qk_nope_head_dim :]
            cos, sin = self.tables.cos_sin.index_select(0, batch.positions).unsqueeze(1).chunk(2, -1)
            x, y = (q_rope[..., 0::2], q_rope[..., 1::2]) if rotation.interleaved else q_rope.chunk(2, -1)
            # In float32, rounded once, as the keys are by append.
            turned = x * cos - y * sin, x * sin + y * cos
            x.copy_(turned[0])
            y.copy_(turned[1])
        if self.tables.query_scale is not None:
            q *= self.tables.query_scale.index_select(0, batch.positions)[:, None, None]
        return q

    def _latent_norm(self) -> torch.Tensor:
        """Give the weight by which the latent is normalised."""
        weight: torch.Tensor = self.kv_a_layernorm.weight
        return weight if self.config.kv_lora_scale == 1 else weight * self.config.kv_lora_scale

    def _decode(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        group: DecodeGroup,
        out: torch.Tensor,
        tensor_scale: torch.Tensor | None,
    ) -> None:
        """Attend with a group's queries in the latent space, and write its tokens' values to out."""
        rank, nope = self.config.kv_lora_rank, self.config.qk_nope_head_dim
        q = take(q, group.tokens)
        absorbed = q.new_empty((q.shape[0], self.num_heads, self.mla.manifest.d_qk))
        _bmm(q[..., :nope].transpose(0, 1), self.w_uk, absorbed[..., :rank].transpose(0, 1))
        absorbed[..., rank:] = q[..., nope:]
        latent, _ = self.mla.decode(
            absorbed.view(group.requests, group.s_q, self.num_heads, -1),
            kv_cache,
            group.block_table,
            group.cache_seqlens,
            tensor_scale=tensor_scale,
            causal=True,
            softmax_scale=self._logit_scale,
        )
        latent = latent.flatten(0, 1)
        if group.kept is not None:
            latent = latent.index_select(0, group.kept)
        if isinstance(group.written, slice):
            _bmm(latent.transpose(0, 1), self.w_uv.mT, out[group.written].transpose(0, 1))
        else:
            values = torch.bmm(latent.transpose(0, 1), self.w_uv.mT)
            out.index_copy_(0, group.written, values.transpose(0, 1))

    def _prefill(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        group: PrefillGroup,
        out: torch.Tensor,
        tensor_scale: torch.Tensor | None,
    ) -> None:
        """Attend with a group's queries to decompressed keys and values, and write its tokens' values to out."""
        # The new tokens come out of the cache, where append has put them: as any later step will see them.
        latent = self.mla.gather(
            kv_cache,
            group.block_table,
            group.cu_seqlens_q,
            seq_starts=group.context_lens,
            tensor_scale=tensor_scale,
            total_tokens=group.total_tokens,
        )
        in_place = isinstance(group.tokens, slice)
        values, _ = self.mla.chunked_prefill(
            take(q, group.tokens),
            latent,
            self._kv_b,
            kv_cache,
            group.block_table,
            group.cu_seqlens_q,
            group.context_lens,
            max_context=group.max_context,
            workspace_tokens=group.workspace_tokens,
            total_context=group.total_context,
            rounds=group.rounds,
            tensor_scale=tensor_scale,
            softmax_scale=self._logit_scale,
            out=take(out, group.tokens) if in_place else None,
        )
        if not isinstance(group.tokens, slice):
            out.index_copy_(0, group.tokens, values)


def _bmm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Write products to a view."""
    if torch.compiler.is_compiling():
        # torch.compile takes no view to write to, and has the copy be part of another kernel.
        out.copy_(torch.bmm(a, b))
    else:
        torch.bmm(a, b, out=out)


def _check_model(config: AttentionConfig, mla: MLA) -> None:
    """Refuse kernels of another model."""
    model = mla.manifest.model
    for name in (*_ABSORBED, *_OPTIONAL):
        wanted = model.get(name)
        # A spec need not say what its kernels do not depend on.
        if wanted != getattr(config, name) and not (wanted is None and name in _OPTIONAL):
            raise ValueError(
                f"{name} of the config is {getattr(config, name)}, of the spec {mla.manifest.name} {wanted}; they must "
                "agree"
            )
    if abs(config.softmax_scale / mla.manifest.softmax_scale - 1) > 1e-6:
        raise ValueError(
            f"the softmax scale of the config is {config.softmax_scale:.6g}, of the spec {mla.manifest.name} "
            f"{mla.manifest.softmax_scale:.6g}; they must agree: compare rope_scaling"
        )
