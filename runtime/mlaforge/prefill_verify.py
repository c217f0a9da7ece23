"""Random prefill problems against the float64 reference, by the same criteria as decode's (verify.py).

What belongs to no sequence is NaN in q, k and v, and so is what the kernel must write, beforehand. Some problems are
chunked prefills: the last q of the k tokens are new, those before them lie in a paged cache.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch

from mlaforge.arguments import DTYPES, cache_columns
from mlaforge.chunked import ContextLimits
from mlaforge.formats import FORMATS
from mlaforge.manifest import Kernel, Manifest
from mlaforge.reference import chunked_prefill_reference, prefill_reference
from mlaforge.verify import (
    IMPOSSIBLE_PAGE,
    Errors,
    Report,
    check_output,
    elements_of,
    fewer,
    lower,
    parse_fields,
    poisoned,
    shown_fields,
    verify_by,
)


class Prefiller(Protocol):
    """What `mlaforge.load` returns, as far as verification uses it."""

    @property
    def manifest(self) -> Manifest:
        """What the kernel was made for."""

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

    def chunked_prefill(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        kv_b: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        context_lens: torch.Tensor,
        *,
        max_context: int,
        workspace_tokens: int,
        total_context: int | None = None,
        tensor_scale: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of new tokens to cached ones and to themselves."""


@dataclass(frozen=True)
class PrefillProblem:
    """One prefill call. Its data follow from its fields, on the same kind of device."""

    kernel: ClassVar[str] = "prefill"

    q: tuple[int, ...]
    """Query rows of each sequence."""
    k: tuple[int, ...]
    """Tokens of each sequence."""
    heads: int = 1
    causal: bool = True
    seed: int = 0
    softmax_scale: float = 0.0
    """0 leaves it to the kernel's own."""
    q_gain: int = 1
    """Factor of q, a power of two: 1 gives almost uniform weights, 32 peaked ones."""
    margin: int = 0
    """Rows of q, k and v before the first sequence, and behind the last."""
    interleaved: bool = False
    """k and v are columns of one tensor, or latent is columns of a wider one; and heads come before rows in q."""
    nan_sequence: int = -1
    """A sequence one of whose own tokens is NaN, which must stay in it; -1 if none."""
    spike: int = 0
    """By how many nats the score of one token of each sequence stands out, of one at a third of it; by twice and three
    times as many those of another at two thirds and of the last. If negative, the first stands out most. 0: none."""
    workspace: int = 0
    """Tokens of a chunked prefill's workspace; 0: it is one call of the kernel."""
    total_known: bool = False
    """The chunked prefill is told how long all contexts are together."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning with a ValueError."""
        if not self.q or len(self.q) != len(self.k) or min(*self.q, *self.k) < 0:
            raise ValueError(f"q and k must be as many lengths, each at least 0; got {self.q} and {self.k}")
        for name in ("heads", "q_gain"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.margin < 0:
            raise ValueError(f"margin must be at least 0; got {self.margin}")
        if not -1 <= self.nan_sequence < len(self.q):
            raise ValueError(f"nan_sequence must be -1 or a sequence of {len(self.q)}; got {self.nan_sequence}")
        if self.workspace < 0:
            raise ValueError(f"workspace must be at least 0; got {self.workspace}")
        if self.workspace:
            if not self.causal or self.nan_sequence >= 0 or self.spike:
                raise ValueError("with a workspace, causal must be 1, nan_sequence -1 and spike 0")
            if any(n > length for n, length in zip(self.q, self.k, strict=True)):
                raise ValueError(f"with a workspace, no length of q may pass that of k; got {self.q} and {self.k}")
        elif self.total_known:
            raise ValueError("total_known must be 0 without a workspace")

    @property
    def kind(self) -> str:
        """The row of a report's table that the problem counts for."""
        if self.nan_sequence >= 0:
            return "NaN in a sequence"
        if self.workspace:
            return "chunked"
        if any(n and length < (n if self.causal else 1) for n, length in zip(self.q, self.k, strict=True)):
            return "rows without a token"
        if self.spike:
            return "scores that stand out"
        return "causal" if self.causal else "full"

    def __str__(self) -> str:
        """Give the text that `parse` reads: the kernel, then the fields that differ from their default."""
        return f"{self.kernel} {shown_fields(self, ('q', 'k'))}"

    @classmethod
    def parse(cls, text: str) -> PrefillProblem:
        """Read what `str` gave. ValueError says which word is wrong."""
        kernel, *words = text.split()
        if kernel != cls.kernel:
            raise ValueError(f"a problem of prefill begins with {cls.kernel}; got {kernel!r}")
        values = parse_fields(cls, words, ("q", "k"))
        if not {"q", "k"} <= values.keys():
            raise ValueError("a problem of prefill needs q= and k=, as in q=1,64x3,0 k=70x5")
        return cls(**values)  # type: ignore[arg-type]

    def to_repro(self, spec: str) -> str:
        """Give the command line that replays exactly this problem; `spec` is a spec's name or path."""
        return f"mlaforge verify {shlex.quote(spec)} --problem {shlex.quote(str(self))}"

    def simpler(self) -> Iterator[PrefillProblem]:
        """Give problems that are simpler by one step, the large steps first."""

        def change(**fields: object) -> Iterator[PrefillProblem]:
            # What a step makes impossible, such as no sequence at all, is no step.
            try:
                candidate = dataclasses.replace(self, **fields)  # type: ignore[arg-type]
            except ValueError:
                return
            if candidate != self:
                yield candidate

        pairs = tuple(zip(self.q, self.k, strict=True))
        for kept in fewer(range(len(pairs))):
            q, k = tuple(self.q[i] for i in kept), tuple(self.k[i] for i in kept)
            sequence = kept.index(self.nan_sequence) if self.nan_sequence in kept else -1
            yield from change(q=q, k=k, nan_sequence=sequence)
        for each in dataclasses.fields(self):
            if each.name not in {"q", "k", "heads", "seed"}:
                yield from change(**{each.name: each.default})
        for smaller in lower(self.heads, 1):
            yield from change(heads=smaller)
        for name in ("q", "k"):
            lengths: tuple[int, ...] = getattr(self, name)
            for i, length in enumerate(lengths):
                for smaller in lower(length, 0):
                    yield from change(**{name: (*lengths[:i], smaller, *lengths[i + 1 :])})


@dataclass(frozen=True)
class PrefillInputs:
    """The tensors of one call, and the poisoned ones that it must fill."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    guards: tuple[torch.Tensor, ...] = field(repr=False)
    """The memory before and behind `out` and `lse`, all NaN."""

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the call takes, in its order."""
        return self.q, self.k, self.v, self.cu_seqlens_q, self.cu_seqlens_k


@dataclass(frozen=True)
class ChunkedInputs:
    """The tensors of one chunked call, and the poisoned ones that it must fill."""

    arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    """q, latent, kv_b, kv_cache, block_table, cu_seqlens_q, context_lens."""
    contexts: tuple[int, ...]
    """The same as context_lens."""
    out: torch.Tensor
    lse: torch.Tensor
    guards: tuple[torch.Tensor, ...] = field(repr=False)
    """The memory before and behind `out` and `lse`, all NaN."""
    tensor_scale: torch.Tensor | None = None
    """Of a quantised cache that has one."""

    def read(self, manifest: Manifest) -> tuple[torch.Tensor, ...]:
        """Give the arguments with a cache of elements: of a quantised one what gather reads, which rounds to bf16."""
        q, latent, kv_b, cache, *others = self.arguments
        return q, latent, kv_b, elements_of(cache, manifest, self.tensor_scale, latent.dtype), *others


def kernel_of(manifest: Manifest) -> Kernel:
    """Give the prefill kernel of a manifest; ValueError if it has none."""
    kernel = manifest.kernels.get(PrefillProblem.kernel)
    if kernel is None:
        raise ValueError(f"{manifest.name} has no prefill kernel")
    return kernel


def make_inputs(problem: PrefillProblem, manifest: Manifest, device: str | torch.device) -> PrefillInputs:
    """Make the tensors of a problem: normal values / 10, NaN where no sequence is and in what the call must write."""
    generator = torch.Generator(device).manual_seed(problem.seed)
    constants = kernel_of(manifest).constants
    dtype = DTYPES[manifest.element]
    heads, margin = problem.heads, problem.margin

    def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(list(itertools.accumulate(lengths, initial=margin)), dtype=torch.int32, device=device)

    def values(rows: int, width: int, gain: int = 1) -> torch.Tensor:
        x = torch.randn((rows, heads, width), generator=generator, device=device).div_(10).clamp_(-1, 1).mul_(gain)
        edge = torch.full((margin, heads, width), math.nan, device=device)
        return torch.cat([edge, x, edge]).to(dtype)

    d_qk, d_v = constants["d_qk"], constants["d_v"]
    q, k, v = values(sum(problem.q), d_qk, problem.q_gain), values(sum(problem.k), d_qk), values(sum(problem.k), d_v)
    cu_seqlens_q, cu_seqlens_k = offsets(problem.q), offsets(problem.k)
    if problem.spike:
        # All rows of q have a direction in common, which these tokens point to.
        direction = torch.randn((heads, d_qk), generator=generator, device=device).sign()
        q = (q.float() + direction).to(dtype)
        steps = (1, 2, 3) if problem.spike > 0 else (3, 2, 1)
        unit = abs(problem.spike) / ((problem.softmax_scale or manifest.softmax_scale) * d_qk)
        for first, length in zip(cu_seqlens_k.tolist(), problem.k, strict=False):
            for at, step in zip((length // 3, 2 * length // 3, length - 1), steps, strict=True):
                k[first + at : first + at + min(length, 1)] = (direction * unit * step).to(dtype)
    if problem.nan_sequence >= 0:
        length = problem.k[problem.nan_sequence]
        token = int(cu_seqlens_k[problem.nan_sequence]) + length // 2
        k[token : token + min(length, 1)] = math.nan
        v[token : token + min(length, 1)] = math.nan
    if problem.interleaved:
        q = q.transpose(0, 1).contiguous().transpose(0, 1)
        both = torch.cat([k, v], dim=2)
        k, v = both[..., :d_qk], both[..., d_qk:]
    out, out_guards = poisoned((q.shape[0], heads, d_v), dtype, device)
    lse, lse_guards = poisoned((heads, q.shape[0]), torch.float32, device)
    return PrefillInputs(q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, (*out_guards, *lse_guards))


def make_chunked_inputs(problem: PrefillProblem, manifest: Manifest, device: str | torch.device) -> ChunkedInputs:
    """Make the tensors of a chunked problem, whose keys and values are about as large as those of another.

    Cache slots without a token and rows of q and latent that no sequence has are NaN, table entries of no page are
    impossible, and what the call must write is NaN. Of a tensor scale nothing saturates.
    """
    generator = torch.Generator(device).manual_seed(problem.seed)
    constants, dtype = kernel_of(manifest).constants, DTYPES[manifest.element]
    heads, margin, page = problem.heads, problem.margin, manifest.cache.page_size
    rank, rope = int(manifest.model["kv_lora_rank"]), int(manifest.model["qk_rope_head_dim"])
    contexts = tuple(length - n for n, length in zip(problem.q, problem.k, strict=True))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def rows(*width: int, gain: int = 1) -> torch.Tensor:
        x = normal(sum(problem.q), *width).div_(10).clamp_(-1, 1).mul_(gain)
        edge = torch.full((margin, *width), math.nan, device=device)
        return torch.cat([edge, x, edge]).to(dtype)

    q, latent = rows(heads, constants["d_qk"], gain=problem.q_gain), rows(rank + rope)
    kv_b = normal(heads, constants["d_qk"] - rope + constants["d_v"], rank).div_(math.sqrt(rank)).to(dtype)
    if problem.interleaved:
        q = q.transpose(0, 1).contiguous().transpose(0, 1)
        latent = torch.cat([latent, latent], dim=1)[:, : rank + rope]
    pages = [-(-context // page) for context in contexts]
    order = torch.randperm(sum(pages) + 1, generator=generator, device=device).int()
    table = torch.full((len(pages), max(1, *pages)), IMPOSSIBLE_PAGE, dtype=torch.int32, device=device)
    form = FORMATS[manifest.cache.dtype] if manifest.cache.quantised else None
    # All bits set are NaN in every format.
    cache = torch.full(
        (sum(pages) + 1, page, cache_columns(manifest.cache, rank + rope)),
        0xFF if form else math.nan,
        dtype=torch.uint8 if form else dtype,
        device=device,
    )
    scale = tensor_scale = None
    if form and manifest.cache.tensor_scale:
        scale = form.tensor_scale(1.0)
        tensor_scale = torch.tensor([scale], dtype=torch.float32, device=device)
    first = 0
    for i, (context, count) in enumerate(zip(contexts, pages, strict=True)):
        table[i, :count] = order[first : first + count]
        first += count
        tokens = torch.arange(context, device=device)
        values = normal(context, rank + rope).div_(10)
        written = form.quantise(values[:, :rank], values[:, rank:], scale) if form else values.to(dtype)
        cache[table[i, tokens // page].long(), tokens % page] = written
    borders, context_lens = (
        torch.tensor(numbers, dtype=torch.int32, device=device)
        for numbers in (list(itertools.accumulate(problem.q, initial=margin)), contexts)
    )
    out, out_guards = poisoned((q.shape[0], heads, constants["d_v"]), dtype, device)
    lse, lse_guards = poisoned((heads, q.shape[0]), torch.float32, device)
    arguments = (q, latent, kv_b, cache, table, borders, context_lens)
    return ChunkedInputs(arguments, contexts, out, lse, (*out_guards, *lse_guards), tensor_scale)


def random_problem(rng: random.Random, kernel: Kernel, max_tokens: int) -> PrefillProblem:
    """Draw a problem, mostly one at an edge, with at most about `max_tokens` rows of q and as many of k in all."""
    sizes = (64, kernel.constants["tile_q"], kernel.constants["tile_kv"])
    borders = [n * size + d for size in sizes for n in (1, 2) for d in (-1, 0, 1)]
    edges = [length for length in (0, 1, 2, 5, *borders) if length <= max_tokens]
    q: list[int] = []
    k: list[int] = []
    for _ in range(rng.choice((1, 1, 2, 3, 5, 40))):
        n = rng.choice(edges) if rng.random() < 0.6 else rng.randint(0, max_tokens // 2)
        match rng.choice(("self", "self", "longer", "other")):
            case "self":
                length = n
            case "longer":
                length = n + rng.choice(edges)
            case _:
                length = rng.choice(edges)
        if sum(q) + n > max_tokens or sum(k) + length > max_tokens:
            n, length = 0, rng.choice((0, 1))
        q.append(n)
        k.append(length)
    causal = rng.random() < 0.7
    return PrefillProblem(
        q=tuple(q),
        k=tuple(k),
        heads=rng.choice((1, 1, 2, 3, 5)),
        causal=causal,
        seed=rng.randrange(1 << 31),
        softmax_scale=rng.choice((0.0, 0.0, 0.0, 0.05, 0.3)),
        q_gain=rng.choice((1, 1, 8, 32)),
        margin=rng.choice((0, 0, 1, 70)),
        interleaved=rng.random() < 0.25,
        # To no more than what a row may refer to, beyond it, and beyond all that float32 has of powers.
        spike=rng.choice((0, 0, 0, 0, 0, 3, 5, 8, 12, 40, 300, -12, -300)),
        # Under a mask it is a matter of blocks which rows a masked token's NaN reaches.
        nan_sequence=rng.randrange(len(q)) if rng.random() < 0.15 and not causal else -1,
    )


def random_chunked_problem(rng: random.Random, kernel: Kernel, max_tokens: int) -> PrefillProblem:
    """Draw a chunked problem with at most about `max_tokens` new and as many cached tokens in all."""
    tile = kernel.constants["tile_kv"]
    new = [0, 1, 2, 5, kernel.constants["tile_q"] + 1, rng.randint(1, max_tokens // 2)]
    cached = [0, 0, 1, 63, 64, 65, tile, 2 * tile + 1, rng.randint(0, max_tokens // 2), rng.randint(0, max_tokens)]
    q: list[int] = []
    k: list[int] = []
    for _ in range(rng.choice((1, 1, 2, 3, 5, 12))):
        n, context = rng.choice(new), rng.choice(cached)
        n = n if sum(q) + n <= max_tokens else 0
        context = context if sum(k) - sum(q) + context <= max_tokens else 0
        q.append(n)
        k.append(n + context)
    longest = max(length - n for n, length in zip(q, k, strict=True))
    # Rounds that find nothing take time, too.
    least = -(-longest * len(q) // 16)
    return PrefillProblem(
        q=tuple(q),
        k=tuple(k),
        heads=rng.choice((1, 1, 2, 3, 5)),
        seed=rng.randrange(1 << 31),
        softmax_scale=rng.choice((0.0, 0.0, 0.0, 0.05, 0.3)),
        q_gain=rng.choice((1, 1, 8, 32)),
        margin=rng.choice((0, 0, 1, 70)),
        interleaved=rng.random() < 0.25,
        workspace=max(least, rng.choice((1, tile - 1, tile, 3 * tile, max_tokens))),
        total_known=rng.random() < 0.5,
    )


def random_problems(manifest: Manifest, count: int, seed: int, max_tokens: int) -> list[PrefillProblem]:
    """Draw `count` problems, every third of them a chunked one; the same for the same arguments."""
    rng, kernel = random.Random(f"prefill {seed}"), kernel_of(manifest)
    draws = itertools.cycle((random_problem, random_problem, random_chunked_problem))
    return [draw(rng, kernel, max_tokens) for draw in itertools.islice(draws, count)]


def run_problem(mla: Prefiller, problem: PrefillProblem, device: str | torch.device = "cuda") -> Errors:
    """Make a problem's tensors, run it and judge the result; an exception of the call is a failure of the problem."""
    if problem.workspace:
        return _run_chunked(mla, problem, device)
    manifest = mla.manifest
    inputs = make_inputs(problem, manifest, device)
    try:
        mla.prefill(
            *inputs.arguments,
            causal=problem.causal,
            softmax_scale=problem.softmax_scale or None,
            out=inputs.out,
            lse=inputs.lse,
        )
        inputs.lse.sum().item()  # Waits, so that a fault of the kernel shows here.
    except Exception as error:
        return _failed(f"{type(error).__name__}: {error}")
    scale = problem.softmax_scale or manifest.softmax_scale
    want_out, want_lse = prefill_reference(*inputs.arguments, softmax_scale=scale, causal=problem.causal)
    rows = slice(problem.margin, inputs.q.shape[0] - problem.margin)
    errors = check_output(
        inputs.out[rows], inputs.lse[:, rows], want_out[rows], want_lse[:, rows], q_gain=problem.q_gain
    )
    kept = [*inputs.guards, inputs.out[: rows.start], inputs.out[rows.stop :]]
    kept += [inputs.lse[:, : rows.start], inputs.lse[:, rows.stop :]]
    return _beside(errors, kept, "memory beside out or lse, or a row that no sequence has, was written to")


def _run_chunked(mla: Prefiller, problem: PrefillProblem, device: str | torch.device) -> Errors:
    inputs = make_chunked_inputs(problem, mla.manifest, device)
    total = sum(inputs.contexts) if problem.total_known else None
    limits = ContextLimits(max(inputs.contexts), problem.workspace, total)
    try:
        mla.chunked_prefill(
            *inputs.arguments,
            max_context=limits.max_context,
            workspace_tokens=limits.workspace_tokens,
            total_context=limits.total_context,
            tensor_scale=inputs.tensor_scale,
            softmax_scale=problem.softmax_scale or None,
            out=inputs.out,
            lse=inputs.lse,
        )
        inputs.lse.sum().item()  # Waits, so that a fault of the kernel shows here.
    except Exception as error:
        return _failed(f"{type(error).__name__}: {error}")
    scale = problem.softmax_scale or mla.manifest.softmax_scale
    want_out, want_lse = chunked_prefill_reference(*inputs.read(mla.manifest), softmax_scale=scale)
    rows = slice(problem.margin, inputs.out.shape[0] - problem.margin)
    # What is merged was rounded before, by up to half an epsilon, as often as there are levels of merges: the cosine
    # shows that as it shows weights that are off by as much.
    parts = 1 + len(limits.rounds(len(inputs.contexts), kernel_of(mla.manifest).constants["tile_kv"]))
    rounding = torch.finfo(inputs.out.dtype).eps / 2 * math.sqrt((parts - 1).bit_length())
    errors = check_output(
        inputs.out[rows],
        inputs.lse[:, rows],
        want_out[rows],
        want_lse[:, rows],
        # Sums in another order round an element of a key here and there to its other neighbour, and one is enough to
        # move a score that is all that a row has.
        q_gain=64 * problem.q_gain,
        score_error=rounding,
    )
    return _beside(errors, inputs.guards, "memory beside out or lse was written to")


def _failed(failure: str) -> Errors:
    return Errors(math.inf, math.inf, math.inf, math.inf, math.inf, (failure,))


def _beside(errors: Errors, kept: Iterable[torch.Tensor], failure: str) -> Errors:
    """Add a failure where what had to stay NaN did not."""
    if all(guard.isnan().all() for guard in kept):
        return errors
    return dataclasses.replace(errors, failures=(*errors.failures, failure))


def verify_problems(
    mla: Prefiller,
    problems: Iterable[PrefillProblem],
    progress: Callable[[PrefillProblem], None] | None = None,
    *,
    device: str | torch.device = "cuda",
) -> Report[PrefillProblem]:
    """Run prefill problems until one fails; see `verify_by`."""
    return verify_by(lambda problem: run_problem(mla, problem, device), problems, progress, device)
