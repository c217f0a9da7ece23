"""What the attention layers of one step share: which tokens of a call go which way, and where they are cached.

Made once a step from the lengths that the host knows, so that a layer launches kernels and does nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from mlaforge.api import MLA
from mlaforge.arguments import require_contiguous, require_dtype, require_shape, shape_of
from mlaforge.chunked import ContextRounds

Rows = slice | torch.Tensor
"""Rows of a call's tokens: a slice where they follow each other, which needs no copy, int64 indices elsewhere."""


def take(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Give rows of the first dimension: a view of a slice, a copy of indices."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


@dataclass(frozen=True)
class DecodeGroup:
    """Requests that one absorbed call serves. Those with fewer new tokens than others have queries of padding."""

    requests: int
    s_q: int
    """Queries of each request."""
    tokens: Rows
    """(requests x s_q): the token of each query. Padding comes first and repeats the request's first token: by the
    bottom-right alignment of the mask it sees fewer tokens than that one does, and nobody reads what it gives."""
    kept: torch.Tensor | None
    """int64: the queries that are no padding; None if all are."""
    written: Rows
    """The tokens of the queries that are kept."""
    block_table: torch.Tensor
    """(requests, max_blocks) int32."""
    cache_seqlens: torch.Tensor
    """(requests,) int32: tokens of each request, the new ones included."""


@dataclass(frozen=True)
class PrefillGroup:
    """Requests whose new tokens are attended to with keys and values decompressed."""

    tokens: Rows
    total_tokens: int
    block_table: torch.Tensor
    """(requests, max_blocks) int32."""
    cu_seqlens_q: torch.Tensor
    """(requests + 1,) int32: where the new tokens of each begin among those of all."""
    context_lens: torch.Tensor
    """(requests,) int32: tokens that were cached before."""
    max_context: int
    total_context: int
    workspace_tokens: int
    """Cached tokens whose keys and values are there at the same time."""
    rounds: ContextRounds


@dataclass(frozen=True)
class AttentionBatch:
    """The tokens of one step, for every layer of a model: made by `make`."""

    total_tokens: int
    max_seqlen: int
    """Most tokens of a request, the new ones included."""
    positions: torch.Tensor
    """(total_tokens,) int64: place of each new token in its sequence."""
    slot_mapping: torch.Tensor
    """(total_tokens,) int64: where it is cached, block x page_size + place in the page; -1: nowhere."""
    decode: tuple[DecodeGroup, ...]
    """By s_q."""
    prefill: PrefillGroup | None

    @classmethod
    def make(
        cls,
        mla: MLA,
        query_lens: Iterable[int] | torch.Tensor,
        context_lens: Iterable[int] | torch.Tensor,
        block_table: torch.Tensor,
        *,
        slot_mapping: torch.Tensor | None = None,
        prefill_absorption_threshold: int | None = None,
        workspace_tokens: int = 16_384,
        pad_to: int | None = None,
    ) -> AttentionBatch:
        """Sort the requests of a step by the way they go.

        A request with at most `prefill_absorption_threshold` new tokens is attended to in the latent space, by the
        decode kernel, the others with keys and values decompressed, by the prefill kernel. Requests of the first kind
        form groups: 1 new token, 2, 3 or 4, 5 to 8, and so on, each padded to the most that it has. A group is one
        launch, at most half of its queries are padding, and groups whose requests have equally many have none.

        Where tokens of a group follow each other in the call the layers take them as a view. So it is best to order
        requests by their new tokens: those that decode before the prompts.

        Works on the current stream of block_table's device and never waits for it: one copy to the device, from pinned
        memory, and a few small kernels.

        Args:
            mla: the kernels.
            query_lens: new tokens of each request, 1 or more; the tokens of a call lie in the requests' order. Integers
                that the host has: of a list, say, or a tensor on the CPU.
            context_lens: tokens of each request that are cached already, likewise.
            block_table: (b, max_blocks) int32: the block of each page. Entries behind a request's last page are not
                read.
            slot_mapping: (total_tokens,) int64, padding included: where the new tokens go, if not to the places that
                the block table has for them.
            prefill_absorption_threshold: the spec's own if None. Without a prefill kernel all requests are attended to
                in the latent space.
            workspace_tokens: cached tokens, of all prompts together, whose keys and values are decompressed at the same
                time: see `MLA.chunked_prefill`.
            pad_to: as many requests as a captured graph serves: behind those given come requests of length 0, with as
                many tokens each, whose rows of the block table may hold anything. All given must have equally many new
                tokens, at most the threshold.

        Raises:
            ValueError: an argument does not fit; it says which, what it is and what it must be.
        """
        lens, contexts = _integers("query_lens", query_lens), _integers("context_lens", context_lens)
        given = len(lens)
        if prefill_absorption_threshold is None:
            prefill_absorption_threshold = mla.manifest.prefill_absorption_threshold
        page_size = mla.manifest.cache.page_size
        _check(lens, contexts, block_table, page_size, prefill_absorption_threshold)
        most = max((n + c for n, c in zip(lens, contexts, strict=True)), default=0)
        if pad_to is not None:
            _check_padding(lens, block_table, pad_to, prefill_absorption_threshold)
            # A request of length 0: as many tokens are missing before it as it has.
            lens += [lens[0]] * (pad_to - given)
            contexts += [-lens[0]] * (pad_to - given)
        absorbed = (
            list(range(len(lens)))
            if "prefill" not in mla.manifest.kernels
            else [i for i, n in enumerate(lens) if n <= prefill_absorption_threshold]
        )
        buckets: dict[int, list[int]] = {}
        for i in absorbed:
            buckets.setdefault((lens[i] - 1).bit_length(), []).append(i)
        prompts = sorted(set(range(len(lens))).difference(absorbed))

        # Everything is worked out here and travels as one tensor.
        queries, context = (torch.tensor(numbers, dtype=torch.int64) for numbers in (lens, contexts))
        begins = queries.cumsum(0) - queries
        total = sum(lens)
        owners = torch.arange(len(lens)).repeat_interleave(queries)
        positions = torch.arange(total) - (begins - context)[owners]
        pack = _Pack()
        plan_decode = [_plan_decode(pack, buckets[n], queries, begins, context) for n in sorted(buckets)]
        plan_prefill = (
            _plan_prefill(mla, pack, prompts, queries, begins, context, workspace_tokens) if prompts else None
        )
        at_positions, at_owners = pack.add(positions.clamp(min=0)), pack.add(owners)
        padding = total - sum(lens[:given])
        device = block_table.device
        pack.send(device)

        where = pack.long(at_positions)
        if slot_mapping is None:
            pages = block_table[pack.long(at_owners), where // page_size].long()
            slot_mapping = pages * page_size + where % page_size
            if padding:
                slot_mapping[total - padding :] = -1
        else:
            require_shape("slot_mapping", slot_mapping, (total,))
            require_dtype("slot_mapping", slot_mapping, torch.int64)
            require_contiguous("slot_mapping", slot_mapping)
            if slot_mapping.device != device:
                raise ValueError(f"slot_mapping is on {slot_mapping.device}, block_table is on {device}")
        return cls(
            total_tokens=total,
            max_seqlen=most,
            positions=where,
            slot_mapping=slot_mapping,
            decode=tuple(finish(block_table) for finish in plan_decode),
            prefill=None if plan_prefill is None else plan_prefill(block_table),
        )

    def copy_(self, other: AttentionBatch) -> None:
        """Take over another batch's lengths, places and tables, in the tensors that a captured graph reads.

        On the current stream. The block table and the slots that this batch was made of are written to.

        Raises:
            ValueError: the batches differ in what a graph can't change: tokens, groups, widths. Or one has prompts,
                whose launches depend on their lengths.
        """
        if self.prefill is not None or other.prefill is not None:
            raise ValueError("the batch has prompts, whose launches depend on their lengths; a graph can't replay it")
        mine, theirs = _shape(self), _shape(other)
        if mine != theirs:
            raise ValueError(f"the other batch is {theirs}, this one is {mine}; they must agree")
        for old, new in zip(_tensors(self), _tensors(other), strict=True):
            old.copy_(new)


class _Pack:
    """Integers that travel to a device together."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self._size = 0
        self._long = self._int = torch.empty(0)

    def add(self, numbers: torch.Tensor) -> slice:
        """Take numbers along; give what finds them."""
        begin = self._size
        self._parts.append(numbers)
        self._size += numbers.numel()
        return slice(begin, self._size)

    def send(self, device: torch.device) -> None:
        """Copy all to a device without waiting for it."""
        packed = torch.cat(self._parts)
        if device.type == "cuda":
            packed = packed.pin_memory()
        self._long = packed.to(device, non_blocking=True)
        self._int = self._long.int()

    def long(self, place: slice) -> torch.Tensor:
        """Give numbers that have arrived, int64."""
        return self._long[place]

    def int(self, place: slice) -> torch.Tensor:
        """Give numbers that have arrived, int32."""
        return self._int[place]


def _plan_rows(pack: _Pack, rows: torch.Tensor) -> Callable[[], Rows]:
    """Describe rows of the tokens: of those that follow each other nothing has to travel."""
    first = int(rows[0])
    if bool((rows == torch.arange(first, first + rows.numel())).all()):
        return lambda: slice(first, first + rows.numel())
    place = pack.add(rows)
    return lambda: pack.long(place)


def _plan_decode(
    pack: _Pack, requests: list[int], queries: torch.Tensor, begins: torch.Tensor, context: torch.Tensor
) -> Callable[[torch.Tensor], DecodeGroup]:
    of_group = torch.tensor(requests)
    lens, starts = queries[of_group], begins[of_group]
    s_q = int(lens.max())
    # Bottom-right: the last query is the last token; what is missing at the front repeats the first.
    places = torch.arange(s_q) - (s_q - lens)[:, None]
    tokens = (starts[:, None] + places.clamp(min=0)).flatten()
    kept = (places >= 0).flatten().nonzero().flatten()
    rows, at_lens = _plan_rows(pack, tokens), pack.add(context[of_group] + lens)
    table = _plan_rows(pack, of_group)
    padded = kept.numel() < tokens.numel()
    at_kept, written = (pack.add(kept), _plan_rows(pack, tokens[kept])) if padded else (None, rows)

    def finish(block_table: torch.Tensor) -> DecodeGroup:
        return DecodeGroup(
            requests=len(requests),
            s_q=s_q,
            tokens=rows(),
            kept=None if at_kept is None else pack.long(at_kept),
            written=written(),
            block_table=take(block_table, table()),
            cache_seqlens=pack.int(at_lens),
        )

    return finish


def _plan_prefill(
    mla: MLA,
    pack: _Pack,
    requests: list[int],
    queries: torch.Tensor,
    begins: torch.Tensor,
    context: torch.Tensor,
    workspace_tokens: int,
) -> Callable[[torch.Tensor], PrefillGroup]:
    of_group = torch.tensor(requests)
    lens, contexts = queries[of_group], context[of_group]
    total = int(lens.sum())
    ends = lens.cumsum(0)
    owners = torch.arange(len(requests)).repeat_interleave(lens)
    rows = _plan_rows(pack, torch.arange(total) + (begins[of_group] - (ends - lens))[owners])
    at_ends = pack.add(torch.nn.functional.pad(ends, (1, 0)))
    at_contexts, table = pack.add(contexts), _plan_rows(pack, of_group)

    max_context, total_context = int(contexts.max()), int(contexts.sum())

    def finish(block_table: torch.Tensor) -> PrefillGroup:
        context_lens = pack.int(at_contexts)
        return PrefillGroup(
            tokens=rows(),
            total_tokens=total,
            block_table=take(block_table, table()),
            cu_seqlens_q=pack.int(at_ends),
            context_lens=context_lens,
            max_context=max_context,
            total_context=total_context,
            workspace_tokens=workspace_tokens,
            rounds=mla.context_rounds(
                context_lens,
                max_context=max_context,
                workspace_tokens=workspace_tokens,
                total_context=total_context,
            ),
        )

    return finish


def _integers(name: str, numbers: Iterable[int] | torch.Tensor) -> list[int]:
    """Give Python's integers of anybody's, without waiting for a device."""
    if isinstance(numbers, torch.Tensor):
        if numbers.device.type != "cpu":
            raise ValueError(f"{name} is on {numbers.device}; it must be on the CPU: the host plans the step")
        if numbers.dim() != 1:
            raise ValueError(f"{name} has shape {shape_of(numbers)}; it must be (b,)")
        numbers = numbers.tolist()
    integers = []
    for i, number in enumerate(numbers):
        try:
            integers.append(operator.index(number))
        except TypeError:
            raise ValueError(f"{name}[{i}] is {number!r}; it must be an integer") from None
    return integers


def _check(lens: list[int], contexts: list[int], block_table: torch.Tensor, page_size: int, threshold: int) -> None:
    if len(contexts) != len(lens):
        raise ValueError(f"context_lens has {len(contexts)} entries, query_lens has {len(lens)}; they must agree")
    if not lens:
        raise ValueError("query_lens is empty; there must be a request")
    for name, numbers, least in (("query_lens", lens, 1), ("context_lens", contexts, 0)):
        for i, number in enumerate(numbers):
            if number < least:
                raise ValueError(f"{name}[{i}] is {number}; it must be {least} or more")
    require_shape("block_table", block_table, ("b", "max_blocks"))
    require_dtype("block_table", block_table, torch.int32)
    if block_table.shape[0] < len(lens):
        raise ValueError(f"block_table has shape {shape_of(block_table)}; it must have {len(lens)} rows, as query_lens")
    room = block_table.shape[1] * page_size
    for i, (n, c) in enumerate(zip(lens, contexts, strict=True)):
        if n + c > room:
            raise ValueError(
                f"block_table has shape {shape_of(block_table)}, pages for {room} tokens a request; request {i} has "
                f"{c} cached and {n} new ones"
            )
    if threshold < 0:
        raise ValueError(f"prefill_absorption_threshold is {threshold}; it must be 0 or more")


def _shape(batch: AttentionBatch) -> str:
    """Describe what a captured graph can't change of a batch without prompts."""

    def count(rows: Rows | None) -> str:
        if rows is None or isinstance(rows, slice):
            return "tokens in a row"
        return f"{rows.numel()} tokens by index"

    groups = (
        f"{group.requests} x {group.s_q} queries of {count(group.tokens)}, {count(group.kept)} kept, of tables of "
        f"{group.block_table.shape[1]} blocks"
        for group in batch.decode
    )
    return f"{batch.total_tokens} tokens in {len(batch.decode)} groups: {'; '.join(groups)}"


def _tensors(batch: AttentionBatch) -> Iterator[torch.Tensor]:
    """Give the tensors that layers read of a batch without prompts."""
    yield batch.positions
    yield batch.slot_mapping
    for group in batch.decode:
        for each in (group.tokens, group.kept, group.written, group.block_table, group.cache_seqlens):
            if isinstance(each, torch.Tensor):
                yield each


def _check_padding(lens: list[int], block_table: torch.Tensor, pad_to: int, threshold: int) -> None:
    if pad_to < len(lens):
        raise ValueError(f"pad_to is {pad_to}, query_lens has {len(lens)} entries; it must be as many or more")
    if block_table.shape[0] < pad_to:
        raise ValueError(f"block_table has shape {shape_of(block_table)}; it must have {pad_to} rows, as pad_to says")
    if len(set(lens)) > 1 or lens[0] > threshold:
        raise ValueError(
            f"query_lens has {min(lens)} to {max(lens)} tokens a request; with pad_to all must have equally many, at "
            f"most prefill_absorption_threshold = {threshold}"
        )
