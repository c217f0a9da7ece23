"""Random prefill problems against the float64 reference, by the same criteria as decode's (verify.py).

What belongs to no sequence is NaN in q, k and v, and so is what the kernel must write, beforehand.
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

from mlaforge.arguments import DTYPES
from mlaforge.manifest import Kernel, Manifest
from mlaforge.reference import prefill_reference
from mlaforge.verify import (
    Errors,
    Report,
    check_output,
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
    """k and v are columns of one tensor, and heads come before rows in q."""
    nan_sequence: int = -1
    """A sequence one of whose own tokens is NaN, which must stay in it; -1 if none."""

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

    @property
    def kind(self) -> str:
        """The row of a report's table that the problem counts for."""
        if self.nan_sequence >= 0:
            return "NaN in a sequence"
        if any(n and length < (n if self.causal else 1) for n, length in zip(self.q, self.k, strict=True)):
            return "rows without a token"
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
    dtype = DTYPES[manifest.cache.dtype]
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
        # Under a mask it is a matter of blocks which rows a masked token's NaN reaches.
        nan_sequence=rng.randrange(len(q)) if rng.random() < 0.15 and not causal else -1,
    )


def random_problems(manifest: Manifest, count: int, seed: int, max_tokens: int) -> list[PrefillProblem]:
    """Draw `count` problems; the same for the same arguments."""
    rng = random.Random(f"prefill {seed}")
    return [random_problem(rng, kernel_of(manifest), max_tokens) for _ in range(count)]


def run_problem(mla: Prefiller, problem: PrefillProblem, device: str | torch.device = "cuda") -> Errors:
    """Make a problem's tensors, run it and judge the result; an exception of the call is a failure of the problem."""
    manifest = mla.manifest
    inputs = make_inputs(problem, manifest, device)
    arguments = (inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    try:
        mla.prefill(
            *arguments,
            causal=problem.causal,
            softmax_scale=problem.softmax_scale or None,
            out=inputs.out,
            lse=inputs.lse,
        )
        inputs.lse.sum().item()  # Waits, so that a fault of the kernel shows here.
    except Exception as error:
        return Errors(math.inf, math.inf, math.inf, math.inf, math.inf, (f"{type(error).__name__}: {error}",))
    scale = problem.softmax_scale or manifest.softmax_scale
    want_out, want_lse = prefill_reference(*arguments, softmax_scale=scale, causal=problem.causal)
    rows = slice(problem.margin, inputs.q.shape[0] - problem.margin)
    errors = check_output(
        inputs.out[rows], inputs.lse[:, rows], want_out[rows], want_lse[:, rows], q_gain=problem.q_gain
    )
    kept = [*inputs.guards, inputs.out[: rows.start], inputs.out[rows.stop :]]
    kept += [inputs.lse[:, : rows.start], inputs.lse[:, rows.stop :]]
    if not all(guard.isnan().all() for guard in kept):
        failure = "memory beside out or lse, or a row that no sequence has, was written to"
        errors = dataclasses.replace(errors, failures=(*errors.failures, failure))
    return errors


def verify_problems(
    mla: Prefiller,
    problems: Iterable[PrefillProblem],
    progress: Callable[[PrefillProblem], None] | None = None,
    *,
    device: str | torch.device = "cuda",
) -> Report[PrefillProblem]:
    """Run prefill problems until one fails; see `verify_by`."""
    return verify_by(lambda problem: run_problem(mla, problem, device), problems, progress, device)
