"""One attention layer of an MLA model in float64, written for clarity: what `MLAAttention` must give."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mlaforge.attention_config import AttentionConfig, query_scales


class ReferenceAttention:
    """A layer that keeps its weights and works in float64, one sequence at a time, keys and values decompressed.

    On any device, with weights and inputs of any floating dtype: what it gives differs from the exact result of these
    inputs by float64's rounding only.
    """

    def __init__(
        self, config: AttentionConfig, state_dict: Mapping[str, torch.Tensor], *, max_position: int | None = None
    ) -> None:
        """Take the weights by the checkpoint's names, all heads.

        Args:
            config: of the model.
            state_dict: q_a_proj.weight and so on, as transformers' attention modules name them.
            max_position: longest context, which chooses longrope's frequencies; max_position_embeddings if None.
        """
        self.config = config
        self._weights = {name: tensor.detach().double() for name, tensor in state_dict.items()}
        self._context = config.max_position_embeddings if max_position is None else max_position

    def __call__(
        self, hidden_states: torch.Tensor, latents: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with the new tokens of one sequence to those before them and to each other.

        Args:
            hidden_states: (n, hidden_size).
            latents: (cached, kv_lora_rank + qk_rope_head_dim): the tokens before them, as a call gave them; None if
                there are none.

        Returns:
            The output (n, hidden_size), and the latents of all tokens (cached + n, kv_lora_rank + qk_rope_head_dim):
            normalised, rotated, each element where it was. Both float64.
        """
        c = self.config
        hidden = hidden_states.double()
        cached = 0 if latents is None else latents.shape[0]
        positions = torch.arange(cached, cached + hidden.shape[0], device=hidden.device)

        q = self._queries(hidden)
        if c.query_scaling is not None:
            q = q * query_scales(positions.double(), c.query_scaling)[:, None, None]
        q_nope, q_rope = q.tensor_split([c.qk_nope_head_dim], -1)
        q_rope = self._rotated(q_rope, positions)

        compressed = self._projected("kv_a_proj_with_mqa", hidden)
        c_kv, k_rope = compressed.tensor_split([c.kv_lora_rank], -1)
        c_kv = self._normalised("kv_a_layernorm", c_kv) * c.kv_lora_scale
        new = torch.cat([c_kv, self._rotated(k_rope.unsqueeze(1), positions).squeeze(1)], -1)
        latents = new if latents is None else torch.cat([latents.double(), new])

        c_kv, k_rope = latents.tensor_split([c.kv_lora_rank], -1)
        decompressed = self._heads(self._projected("kv_b_proj", c_kv))
        k_nope, v = decompressed.tensor_split([c.qk_nope_head_dim], -1)
        scores = torch.einsum("qhd,khd->hqk", q_nope, k_nope) + torch.einsum("qhd,kd->hqk", q_rope, k_rope)
        tokens = torch.arange(latents.shape[0], device=hidden.device)
        hidden_from = tokens > positions[:, None]
        weights = (scores * c.softmax_scale).masked_fill(hidden_from, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v)

        if c.output_gate is not None:
            out = out * torch.sigmoid(self._heads(self._projected("g_proj", hidden)))
        return self._projected("o_proj", out.flatten(1)), latents

    def _queries(self, hidden: torch.Tensor) -> torch.Tensor:
        """Give (n, heads, qk_nope_head_dim + qk_rope_head_dim), not rotated."""
        if self.config.q_lora_rank is None:
            q = self._projected("q_proj", hidden)
        else:
            compressed = self._normalised("q_a_layernorm", self._projected("q_a_proj", hidden))
            q = self._projected("q_b_proj", compressed) * self.config.q_lora_scale
        return self._heads(q)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """Give (n, heads, elements of a head) of (n, elements of all heads)."""
        return x.view(x.shape[0], self.config.num_attention_heads, -1)

    def _projected(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = x @ self._weights[f"{name}.weight"].T
        bias = self._weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _normalised(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config.norm_eps).sqrt() * self._weights[f"{name}.weight"]

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Turn the pairs of x (n, heads, qk_rope_head_dim)."""
        rotation = self.config.rotation
        if rotation is None:
            return x
        frequencies = torch.tensor(rotation.of_context(self._context), dtype=torch.float64, device=x.device)
        angles = torch.outer(positions.double(), frequencies).unsqueeze(1)
        turns = torch.polar(torch.full_like(angles, rotation.attention_factor), angles)
        if rotation.interleaved:
            pairs = torch.complex(x[..., 0::2].contiguous(), x[..., 1::2].contiguous()) * turns
            return torch.stack([pairs.real, pairs.imag], -1).flatten(-2)
        pairs = torch.complex(*x.chunk(2, -1)) * turns
        return torch.cat([pairs.real, pairs.imag], -1)
