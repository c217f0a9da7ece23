"""Prefill as the bench measures it: the tensors of a call, our own call on them, and the public kernels beside it.

The peers are found, checked and reported as those of decode are. Sequences are of equal length, so those that know no
other take them, too, as a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mlaforge.arguments import DTYPES
from mlaforge.bench.cases import PrefillCase
from mlaforge.bench.peers import Peer, Prepared, Run
from mlaforge.manifest import Manifest


class Prefiller(Protocol):
    """What `mlaforge.load` returns, as far as this suite uses it."""

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        *,
        causal: bool = True,
        softmax_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of sequences that lie one behind the other."""


@dataclass(frozen=True)
class PrefillProblem:
    """The tensors of one call."""

    case: PrefillCase
    q: torch.Tensor
    """(b * s, h, d_qk)."""
    k: torch.Tensor
    """(b * s, h, d_qk)."""
    v: torch.Tensor
    """(b * s, h, d_v)."""
    cu_seqlens: torch.Tensor
    """(b + 1,) int32: where each sequence begins, in q as in k."""
    softmax_scale: float

    @property
    def d_qk(self) -> int:
        """Width of q and k."""
        return self.q.shape[2]

    @property
    def d_v(self) -> int:
        """Width of v and of the result."""
        return self.v.shape[2]

    def batched(self, x: torch.Tensor) -> torch.Tensor:
        """Give (b * s, h, width) as (b, s, h, width), a view: results are compared in that shape."""
        return x.view(self.case.b, self.case.s, *x.shape[1:])


def make_prefill(manifest: Manifest, case: PrefillCase, device: torch.device, seed: int) -> PrefillProblem:
    """Draw q, k and v, normal."""
    model, dtype = manifest.model, DTYPES[manifest.element]
    d_qk = int(model["qk_nope_head_dim"]) + int(model["qk_rope_head_dim"])
    torch.manual_seed(seed)
    q, k, v = (
        torch.empty(case.b * case.s, case.h, width, dtype=dtype, device=device).normal_()
        for width in (d_qk, d_qk, int(model["v_head_dim"]))
    )
    borders = torch.arange(case.b + 1, dtype=torch.int32, device=device) * case.s
    return PrefillProblem(case, q, k, v, borders, manifest.softmax_scale)


def prefill_call(mla: Prefiller, problem: PrefillProblem) -> Run:
    """Prepare our call; its results are allocated here, once."""
    case, q = problem.case, problem.q
    out = q.new_empty((case.b * case.s, case.h, problem.d_v))
    lse = q.new_empty((case.h, case.b * case.s), dtype=torch.float32)
    borders = problem.cu_seqlens

    def run() -> torch.Tensor:
        made, _ = mla.prefill(
            q,
            problem.k,
            problem.v,
            borders,
            borders,
            causal=True,
            softmax_scale=problem.softmax_scale,
            out=out,
            lse=lse,
        )
        return problem.batched(made)

    return run


# ---- Peers -----------------------------------------------------------------------------------------------------------


class _FlashAttention3(Peer[PrefillProblem]):
    """FlashAttention-3, over sequences that lie one behind the other."""

    options: Mapping[str, Any] = {}
    """More that the call is told."""

    def refuses(self, problem: PrefillProblem) -> str | None:
        """What it has a kernel for: equal widths, or keys up to 192 wide with values up to 128."""
        d_qk, d_v = problem.d_qk, problem.d_v
        if (d_qk == d_v and d_qk <= 256) or (128 < d_qk <= 192 and 96 < d_v <= 128):
            return None
        return f"takes equal widths and (192, 128), not ({d_qk}, {d_v})"

    def prepare(self, problem: PrefillProblem) -> Prepared:
        """It works out by itself which tiles there are."""

        def call() -> torch.Tensor:
            out = self.module.flash_attn_varlen_func(
                q=problem.q,
                k=problem.k,
                v=problem.v,
                cu_seqlens_q=problem.cu_seqlens,
                cu_seqlens_k=problem.cu_seqlens,
                max_seqlen_q=problem.case.s,
                max_seqlen_k=problem.case.s,
                softmax_scale=problem.softmax_scale,
                causal=True,
                num_splits=1,
                **self.options,
            )
            return problem.batched(out[0] if isinstance(out, tuple) else out)

        return Prepared(call, call, "none")


class FlashAttention3(_FlashAttention3):
    """Its own package."""

    name = "fa3"
    title = "FlashAttention-3 (flash_attn_interface)"
    modules = ("flash_attn_interface",)
    distributions = ("flash_attn_3", "flash-attn-3")


class FlashAttention3Vllm(_FlashAttention3):
    """The one that vLLM ships."""

    name = "fa3_vllm"
    title = "FlashAttention-3 (vLLM)"
    modules = ("fa3_vllm", "vllm.vllm_flash_attn")
    distributions = ("vllm",)
    options: Mapping[str, Any] = {"fa_version": 3}


class FlashAttention3Forward(_FlashAttention3):
    """A build of its forward half, for sequences of equal length."""

    name = "fa3_fwd"
    title = "FlashAttention-3 (fa3-fwd)"
    modules = ("fa3_fwd_interface",)
    distributions = ("fa3-fwd",)

    def refuses(self, problem: PrefillProblem) -> str | None:
        """It is built for bf16."""
        if problem.q.dtype != torch.bfloat16:
            return "takes bfloat16 only"
        return super().refuses(problem)

    def prepare(self, problem: PrefillProblem) -> Prepared:
        """As a batch."""
        q, k, v = (problem.batched(x) for x in (problem.q, problem.k, problem.v))

        def call() -> torch.Tensor:
            out = self.module.flash_attn_func(q, k, v, softmax_scale=problem.softmax_scale, causal=True)
            made: torch.Tensor = out[0] if isinstance(out, tuple) else out
            return made

        return Prepared(call, call, "none", "as a batch of equal lengths")


class FlashInferRagged(Peer[PrefillProblem]):
    """FlashInfer's ragged prefill with the backend fa3."""

    name = "flashinfer"
    title = "FlashInfer ragged, fa3"
    modules = ("flashinfer.prefill",)
    distributions = ("flashinfer-python", "flashinfer")

    def prepare(self, problem: PrefillProblem) -> Prepared:
        """It plans on the host, before."""
        case, borders = problem.case, problem.cu_seqlens
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=problem.q.device)
        wrapper = self.module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")

        def plan() -> None:
            wrapper.plan(
                borders,
                borders,
                case.h,
                case.h,
                problem.d_qk,
                head_dim_vo=problem.d_v,
                causal=True,
                sm_scale=problem.softmax_scale,
                q_data_type=problem.q.dtype,
            )

        def ready() -> torch.Tensor:
            return problem.batched(wrapper.run(problem.q, problem.k, problem.v))

        def anew() -> torch.Tensor:
            plan()
            return ready()

        plan()
        return Prepared(ready, anew, "host")


class Sdpa(Peer[PrefillProblem]):
    """Torch's scaled_dot_product_attention: cuDNN's kernel where it takes the widths, else what does."""

    name = "torch"
    title = "torch SDPA"

    def version(self) -> str | None:
        """Torch's."""
        return torch.__version__

    def prepare(self, problem: PrefillProblem) -> Prepared:
        """As a batch, its dimensions exchanged by strides alone."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        order = [
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        ]
        q, k, v = (problem.batched(x).transpose(1, 2) for x in (problem.q, problem.k, problem.v))

        def call() -> torch.Tensor:
            with sdpa_kernel(order, set_priority=True):
                out = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=problem.softmax_scale
                )
            return out.transpose(1, 2)

        return Prepared(call, call, "none", "as a batch of equal lengths")


PREFILL_PEERS: Mapping[str, type[Peer[PrefillProblem]]] = {
    peer.name: peer for peer in (FlashAttention3, FlashAttention3Vllm, FlashAttention3Forward, FlashInferRagged, Sdpa)
}
FA3_NAMES = (FlashAttention3.name, FlashAttention3Vllm.name, FlashAttention3Forward.name)
"""The builds of one kernel: the fastest of them is FlashAttention-3's time."""
