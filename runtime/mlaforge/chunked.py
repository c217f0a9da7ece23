"""Chunked prefill: new tokens against a long cached context and themselves, through a workspace of bounded size.

The context is read in rounds. Each gathers some tokens of the requests that still have any, up-projects them to keys
and values, attends to them without a mask, and merges what comes out into the result so far. The new tokens' own part,
under the causal mask, comes first.

How much of whose context a round reads is worked out on the device, so that nobody waits for it; only the number of
rounds follows from what the host knows. All requests take turns, each a tile of the prefill kernel long: in the line of
all turns, ordered by their number and then by request, each round takes as many as fit. So there is no room left, but
for what the last turn of a request falls short of, until there are no tokens left, whatever the lengths are. Short
contexts leave their share to long ones, and as many requests as can be are at work at the same time, which is what
fills a GPU where each of them has few queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from mlaforge.arguments import (
    DTYPES,
    piece_strides,
    require_aligned,
    require_contiguous,
    require_count,
    require_devices,
    require_dtype,
    require_one_device,
    require_positive,
    require_shape,
    shape_of,
)
from mlaforge.calls import CallCache, Loaded
from mlaforge.launch import Cuda
from mlaforge.memory import GatherTensors, MemoryKernels, MergeTensors
from mlaforge.prefill import PrefillRunner, PrefillTensors
from mlaforge.simulator import Simulator

_MAX_TOKENS = 1 << 31


class ContextRounds(NamedTuple):
    """Which cached tokens each round of a chunked prefill reads."""

    seq_starts: torch.Tensor
    """(rounds, b) int32: the first token of each request."""
    cu_seqlens: torch.Tensor
    """(rounds, b + 1) int32: where the tokens of each request begin in the workspace, and where the last one's end."""


class ChunkedTensors(NamedTuple):
    """The tensors of one call; shapes as in `MLA.chunked_prefill`."""

    q: torch.Tensor
    latent: torch.Tensor
    kv_b: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    context_lens: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    seq_starts: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    tensor_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class ContextLimits:
    """What the host knows of the contexts of a batch, and how much of them it wants to see at once; tokens."""

    max_context: int
    workspace_tokens: int
    total_context: int | None = None
    """Of all requests; None: not known."""

    def check(self) -> None:
        """Refuse what has no meaning; ValueError says which number, what it is and what it must be."""
        for name, value, least in (
            ("max_context", self.max_context, 0),
            ("workspace_tokens", self.workspace_tokens, 1),
            ("total_context", self.total_context, 0),
        ):
            if value is not None and not least <= value < _MAX_TOKENS:
                raise ValueError(f"{name} is {value}; it must be at least {least} and below 2^31")

    def rounds(self, batch: int, tile: int) -> tuple[int, ...]:
        """Give the most tokens of each round, for a batch of requests and turns of a tile of tokens."""
        turn = self.turn(tile)
        turns = batch * -(-self.max_context // turn)
        if self.total_context is not None:
            # The last turn of each request may be short.
            turns = min(turns, (self.total_context + min(batch, self.total_context) * (turn - 1)) // turn)
        at_once = self.workspace_tokens // turn
        return tuple(min(at_once, turns - first) * turn for first in range(0, turns, at_once))

    def turn(self, tile: int) -> int:
        """Give the tokens that a request reads before it is the next one's turn."""
        return max(min(tile, self.workspace_tokens, self.max_context), 1)


def context_rounds(context_lens: torch.Tensor, limits: ContextLimits, tile: int) -> ContextRounds:
    """Divide contexts among rounds, on their device and without waiting for it.

    Args:
        context_lens: (b,) int32. Tokens beyond `limits` are left out.
        limits: what the host knows.
        tile: tokens that the prefill kernel works on at once.
    """
    limits.check()
    require_shape("context_lens", context_lens, ("b",))
    require_dtype("context_lens", context_lens, torch.int32)
    batch, device = context_lens.shape[0], context_lens.device
    rounds = len(limits.rounds(batch, tile))
    turn = limits.turn(tile)
    if rounds == 0:
        return ContextRounds(context_lens.new_empty((0, batch)), context_lens.new_empty((0, batch + 1)))
    lengths = context_lens.clamp(0, limits.max_context).long()
    turns = (lengths + (turn - 1)) // turn
    # How many turns are over when the n-th shortest request ends, which is after its last, of all that still go on. The
    # line between two of these points is straight: there the same requests take turns.
    ends = turns.sort().values
    ends = torch.nn.functional.pad(ends, (1, 0))
    left = torch.arange(batch, -1, -1, device=device)
    over = ends.cumsum(0) + ends * left
    # Where each round begins: so many turns of everybody who has them, and one more of the first few who do.
    begins = torch.arange(rounds + 1, device=device) * (limits.workspace_tokens // turn)
    ended = torch.searchsorted(over, begins, right=True) - 1
    since, taking = begins - over[ended], left[ended].clamp(min=1)
    whole, more = ends[ended] + since // taking, since % taking
    goes_on = turns > whole.unsqueeze(1)
    one_more = goes_on & (goes_on.cumsum(1) <= more.unsqueeze(1))
    done = torch.minimum(turns, whole.unsqueeze(1)) + one_more
    starts = torch.minimum(done * turn, lengths)
    cu_seqlens = torch.nn.functional.pad(starts.diff(dim=0).cumsum(1), (1, 0))
    return ContextRounds(starts[:-1].int().contiguous(), cu_seqlens.int().contiguous())


class ChunkedPrefill:
    """Chunked prefill on the kernels of one manifest."""

    def __init__(self, prefill: PrefillRunner, memory: MemoryKernels, backend: Cuda | Simulator) -> None:
        """Describe it; the operators know it by the key of the prefill kernel."""
        self.key = prefill.key
        self.tile = prefill.kernel.constants["tile_kv"]
        self.d_v = prefill.d_v
        model = prefill.manifest.model
        self._rank, self._nope = int(model["kv_lora_rank"]), int(model["qk_nope_head_dim"])
        self._d_latent = prefill.manifest.d_qk
        self._d_qk = prefill.kernel.constants["d_qk"]
        self._dtype = DTYPES[prefill.manifest.element]
        self._prefill = prefill
        self._memory = memory
        self._backend = backend
        self._calls: CallCache[None] = CallCache()

    def check_shapes(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        kv_b: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        context_lens: torch.Tensor,
        *,
        tensor_scale: torch.Tensor | None = None,
    ) -> None:
        """Check shapes and dtypes alone, which also holds for tensors without storage."""
        require_shape("q", q, ("total_q", "heads", self._d_qk))
        if q.shape[1] < 1:
            raise ValueError(f"q has shape {shape_of(q)}; it must have a head or more")
        require_shape("latent", latent, ("total_q", self._d_latent))
        if latent.shape[0] != q.shape[0]:
            raise ValueError(f"latent has {latent.shape[0]} rows, q has {q.shape[0]}; they must agree")
        require_shape("kv_b", kv_b, ("heads", self._nope + self.d_v, self._rank))
        if kv_b.shape[0] != q.shape[1]:
            raise ValueError(f"kv_b has {kv_b.shape[0]} heads, q has {q.shape[1]}; they must agree")
        for name, tensor in (("q", q), ("latent", latent), ("kv_b", kv_b)):
            require_dtype(name, tensor, self._dtype)
        require_shape("block_table", block_table, ("b", "max_blocks"))
        require_count("cu_seqlens_q", cu_seqlens_q, "block_table", block_table.shape[0], more=1)
        require_count("context_lens", context_lens, "block_table", block_table.shape[0])
        for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("context_lens", context_lens)):
            require_dtype(name, tensor, torch.int32)
        self._memory.check_gather(kv_cache, block_table, cu_seqlens_q, context_lens, tensor_scale)

    def empty_results(
        self, q: torch.Tensor, *others: torch.Tensor, tensor_scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give `out` and `lse` for what `check_shapes` takes, when it has taken it."""
        self.check_shapes(q, *others, tensor_scale=tensor_scale)
        out = q.new_empty((*q.shape[:2], self.d_v))
        return out, q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)

    def check(self, tensors: ChunkedTensors, limits: ContextLimits) -> None:
        """Check everything; ValueError names the tensor, what it is and what it must be."""
        limits.check()
        self._calls.get(tensors, lambda: self._check_layout(tensors))
        batch, width = tensors.block_table.shape
        held = width * tensors.kv_cache.shape[1]
        if batch and limits.max_context > held:
            raise ValueError(
                f"max_context is {limits.max_context:,}, a row of block_table holds {held:,} tokens; it must be no more"
            )
        if tensors.seq_starts is not None and tensors.cu_seqlens is not None:
            rounds = len(limits.rounds(batch, self.tile))
            require_shape("rounds.seq_starts", tensors.seq_starts, (rounds, batch))
            require_shape("rounds.cu_seqlens", tensors.cu_seqlens, (rounds, batch + 1))
        for name in ("q", "kv_cache", "out"):
            require_aligned(name, getattr(tensors, name))

    def _check_layout(self, tensors: ChunkedTensors) -> None:
        q, _, _, kv_cache, block_table, cu_seqlens_q, _, out, lse, *rounds, tensor_scale = tensors
        self.check_shapes(*tensors[:7], tensor_scale=tensor_scale)
        given = [(name, tensor) for name, tensor in zip(tensors._fields, tensors, strict=True) if tensor is not None]
        require_devices(given, self._backend.device_type)
        require_shape("out", out, (*q.shape[:2], self.d_v))
        require_dtype("out", out, self._dtype)
        piece_strides("out", out)
        # Keys of the new tokens have the shape of q, and values that of out.
        self._prefill.check(PrefillTensors(q, q, out, cu_seqlens_q, cu_seqlens_q, out, lse))
        self._memory.check_pages(kv_cache, block_table)
        for name, tensor in zip(ContextRounds._fields, rounds, strict=True):
            if tensor is not None:
                require_dtype(f"rounds.{name}", tensor, torch.int32)
                require_contiguous(f"rounds.{name}", tensor)

    @torch.no_grad()  # results of matrix products go to places of their own, which autograd does not follow
    def run(self, tensors: ChunkedTensors, limits: ContextLimits, softmax_scale: float) -> None:
        """Check everything, then launch on the current stream of q's device."""
        require_positive("softmax_scale", softmax_scale)
        self.check(tensors, limits)
        q, latent, _, kv_cache, block_table, cu_seqlens_q, context_lens, out, lse, *known = tensors
        seq_starts, cu_seqlens, tensor_scale = known
        total_q, heads, _ = q.shape
        if total_q == 0:
            return
        rounds = limits.rounds(context_lens.shape[0], self.tile)
        rows = max(total_q, *rounds, 1)
        k, v = q.new_empty((rows, heads, self._d_qk)), q.new_empty((rows, heads, self.d_v))
        self._attend(tensors, latent, cu_seqlens_q, k, v, out, lse, True, softmax_scale)
        if not rounds:
            return
        if seq_starts is None or cu_seqlens is None:
            seq_starts, cu_seqlens = context_rounds(context_lens, limits, self.tile)
        workspace = latent.new_empty((rounds[0], self._d_latent))
        # Partial results wait for others of as many parts, as in a binary counter: what a round gives is then rounded
        # as often as the logarithm of their number says, not once for every round behind it.
        parts = [(out, lse)]
        for i, tokens in enumerate(rounds):
            gathered, borders = workspace[:tokens], cu_seqlens[i]
            ranges = GatherTensors(kv_cache, block_table, borders, seq_starts[i], gathered, tensor_scale)
            self._memory.gather(ranges)
            parts.append((torch.empty_like(out), torch.empty_like(lse)))
            self._attend(tensors, gathered, borders, k, v, *parts[-1], False, softmax_scale)
            last = i + 1 == len(rounds)
            for _ in range(len(parts) - 1 if last else _trailing_zeros(i + 2)):
                part = parts.pop()
                self._memory.merge(MergeTensors(*parts[-1], *part, *parts[-1]))

    def _attend(
        self,
        tensors: ChunkedTensors,
        latent: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        softmax_scale: float,
    ) -> None:
        """Attend to tokens by their latents; k and v are memory for as many tokens or more."""
        q, cu_seqlens_q = tensors.q, tensors.cu_seqlens_q
        k, v = k[: latent.shape[0]], v[: latent.shape[0]]
        self._up_project(latent, tensors.kv_b, k, v)
        self._prefill.run(PrefillTensors(q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse), causal, softmax_scale)

    def _up_project(self, latent: torch.Tensor, kv_b: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write keys and values of latents where the kernel reads them.

        A batch of products, one for each head, can leave room for the rotary part behind each head's rows; one large
        product could not, and a copy would take a good part of the time of the product.
        """
        c_kv = latent[:, : self._rank].expand(kv_b.shape[0], -1, -1)
        w_uk, w_uv = kv_b[:, : self._nope].transpose(1, 2), kv_b[:, self._nope :].transpose(1, 2)
        torch.bmm(c_kv, w_uk, out=k[..., : self._nope].transpose(0, 1))
        torch.bmm(c_kv, w_uv, out=v.transpose(0, 1))
        if self._d_qk > self._nope:
            k[..., self._nope :] = latent[:, self._rank :].unsqueeze(1)


def _trailing_zeros(n: int) -> int:
    return (n & -n).bit_length() - 1


# ---- Operators -------------------------------------------------------------------------------------------------------

loaded: Loaded[ChunkedPrefill] = Loaded()

_ARGUMENTS = (
    "Tensor q, Tensor latent, Tensor kv_b, Tensor kv_cache, Tensor block_table, Tensor cu_seqlens_q, "
    "Tensor context_lens, Tensor? seq_starts, Tensor? cu_seqlens, Tensor? tensor_scale"
)
_NUMBERS = "str kernel, SymInt max_context, SymInt workspace_tokens, SymInt? total_context, float softmax_scale"
torch.library.define("mlaforge::chunked_prefill", f"({_ARGUMENTS}, {_NUMBERS}) -> (Tensor, Tensor)")
torch.library.define(
    "mlaforge::chunked_prefill_out", f"({_ARGUMENTS}, Tensor(a!) out, Tensor(b!) lse, {_NUMBERS}) -> ()"
)


def _chunked_prefill_fake(
    q: torch.Tensor,
    latent: torch.Tensor,
    kv_b: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    tensor_scale: torch.Tensor | None,
    kernel: str,
    max_context: int,
    workspace_tokens: int,
    total_context: int | None,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = (q, latent, kv_b, kv_cache, block_table, cu_seqlens_q, context_lens)
    results = loaded.get(kernel).empty_results(*arguments, tensor_scale=tensor_scale)
    tensors = ChunkedTensors(*arguments, *results, seq_starts, cu_seqlens, tensor_scale)
    require_one_device(**tensors._asdict())
    return results


@torch.library.impl("mlaforge::chunked_prefill", "default")
def _chunked_prefill(
    q: torch.Tensor,
    latent: torch.Tensor,
    kv_b: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    tensor_scale: torch.Tensor | None,
    kernel: str,
    max_context: int,
    workspace_tokens: int,
    total_context: int | None,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = (q, latent, kv_b, kv_cache, block_table, cu_seqlens_q, context_lens)
    limits = ContextLimits(max_context, workspace_tokens, total_context)
    runner = loaded.get(kernel)
    out, lse = runner.empty_results(*arguments, tensor_scale=tensor_scale)
    runner.run(ChunkedTensors(*arguments, out, lse, seq_starts, cu_seqlens, tensor_scale), limits, softmax_scale)
    return out, lse


@torch.library.impl("mlaforge::chunked_prefill_out", "default")
def _chunked_prefill_out(
    q: torch.Tensor,
    latent: torch.Tensor,
    kv_b: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    tensor_scale: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    kernel: str,
    max_context: int,
    workspace_tokens: int,
    total_context: int | None,
    softmax_scale: float,
) -> None:
    tensors = ChunkedTensors(
        *(q, latent, kv_b, kv_cache, block_table, cu_seqlens_q, context_lens),
        *(out, lse, seq_starts, cu_seqlens, tensor_scale),
    )
    limits = ContextLimits(max_context, workspace_tokens, total_context)
    loaded.get(kernel).run(tensors, limits, softmax_scale)


def _chunked_prefill_out_fake(
    q: torch.Tensor,
    latent: torch.Tensor,
    kv_b: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    tensor_scale: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    kernel: str,
    max_context: int,
    workspace_tokens: int,
    total_context: int | None,
    softmax_scale: float,
) -> None:
    arguments = (q, latent, kv_b, kv_cache, block_table, cu_seqlens_q, context_lens)
    loaded.get(kernel).check_shapes(*arguments, tensor_scale=tensor_scale)
    tensors = ChunkedTensors(*arguments, out, lse, seq_starts, cu_seqlens, tensor_scale)
    require_one_device(**tensors._asdict())


torch.library.register_fake("mlaforge::chunked_prefill", _chunked_prefill_fake)
torch.library.register_fake("mlaforge::chunked_prefill_out", _chunked_prefill_out_fake)
