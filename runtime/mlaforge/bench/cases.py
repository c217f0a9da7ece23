"""What is measured: shapes of calls, suites of them, and statistics of repeated calls. Imports no torch."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

ELEMENT_BYTES = 2

Mode = Literal["burst", "sustained"]
"""Calls with pauses on a cool chip, or seconds of calls without a gap."""


@dataclass(frozen=True)
class Case:
    """One decode call over requests of equal length."""

    b: int
    """Requests."""
    s_k: int
    """Cached tokens of each."""
    h: int
    """Query heads; the cache has one."""
    s_q: int
    """Query tokens of each request; from 2 on under a causal mask."""

    @property
    def tokens(self) -> int:
        """Cached tokens of all requests."""
        return self.b * self.s_k

    @property
    def rows(self) -> int:
        """Rows of a request: query tokens x heads."""
        return self.h * self.s_q

    @property
    def causal(self) -> bool:
        """Whether there is a mask; with one query token it would hide nothing."""
        return self.s_q > 1

    def flops(self, d_qk: int, d_v: int) -> int:
        """Multiplications and additions; what a mask hides is counted too, as is usual."""
        return 2 * self.tokens * self.rows * (d_qk + d_v)

    def bytes(self, d_qk: int, d_v: int, row_bytes: int) -> int:
        """Bytes that must cross the memory bus: the cache once, `row_bytes` a token; q and out, of 16-bit elements."""
        return self.tokens * row_bytes + ELEMENT_BYTES * self.b * self.rows * (d_qk + d_v)

    def __str__(self) -> str:
        """Give the shape in words."""
        return f"{self.b} x {self.s_k:,} tokens, {self.h} heads, s_q {self.s_q}"


@dataclass(frozen=True)
class Suite:
    """Shapes (b, s_k), each with every kind of rows (h, s_q)."""

    name: str
    mode: Mode
    shapes: tuple[tuple[int, int], ...]
    rows: tuple[tuple[int, int], ...]

    @property
    def cases(self) -> tuple[Case, ...]:
        """All of them; those of one shape follow each other, for they share a cache."""
        return tuple(Case(b, s_k, h, s_q) for b, s_k in self.shapes for h, s_q in self.rows)


_ROWS = ((64, 1), (128, 1), (64, 2), (128, 2))

SUITES: Mapping[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite("burst", "burst", ((128, 4096), (64, 8192), (16, 32_768), (4, 131_072)), _ROWS),
        Suite("small", "burst", ((1, 4096), (8, 4096), (1, 16_384), (1, 65_536)), ((16, 1), (64, 1), (128, 1))),
        Suite("sustained", "sustained", ((64, 8192),), _ROWS),
    )
}


PREFILL, MEMORY = "prefill", "memory"
"""The suites of the other kernels: calls with pauses, all of them."""
SUITE_NAMES = (*SUITES, PREFILL, MEMORY)


@dataclass(frozen=True)
class PrefillCase:
    """One causal prefill call over sequences of equal length: all their keys are new."""

    b: int
    """Sequences."""
    s: int
    """Tokens of each."""
    h: int
    """Heads of queries, keys and values alike."""

    def flops(self, d_qk: int, d_v: int) -> int:
        """Multiplications and additions of the half of the square that the mask leaves."""
        return self.b * self.h * self.s**2 * (d_qk + d_v)

    def __str__(self) -> str:
        """Give the shape in words."""
        return f"{self.b} x {self.s:,} tokens, {self.h} heads, causal"


_PREFILL_SHAPES: tuple[tuple[int, int, int | None], ...] = ((4, 4096, None), (1, 8192, None), (1, 32_768, 16))
"""(b, s, heads), the model's where there are none."""

MemoryKernel = Literal["gather", "append", "append_rotated", "merge_latent", "merge_value"]
"""Append plain, or normalised and rotated on the way; merge of results as decode makes them, or as prefill does."""


@dataclass(frozen=True)
class MemoryCase:
    """One call of a kernel that moves data."""

    kernel: MemoryKernel
    tokens: int

    def __str__(self) -> str:
        """Give the call in words."""
        return f"{self.kernel}, {self.tokens:,} tokens"


_MEMORY_TOKENS: Mapping[MemoryKernel, int] = {
    "gather": 1 << 19,
    "append": 1 << 19,
    "append_rotated": 1 << 19,
    "merge_latent": 1 << 14,
    "merge_value": 1 << 16,
}
"""So many that some hundred megabytes move: several times an L2 cache."""


def choose_suites(
    names: Sequence[str],
    shapes: Sequence[tuple[int, int]] = (),
    heads: Sequence[int] = (),
    s_q: Sequence[int] = (),
) -> tuple[Suite, ...]:
    """Give the decode suites among these names, shapes, heads and query tokens replaced where others are given.

    Raises:
        ValueError: there is no such suite, and says which there are; or none of them takes what is given.
    """
    takes = {"shapes": {*SUITES, PREFILL}, "heads": {*SUITES, PREFILL}, "query tokens": set(SUITES)}
    for what, given in (("shapes", shapes), ("heads", heads), ("query tokens", s_q)):
        if given and names and not takes[what] & set(names) and set(names) <= set(SUITE_NAMES):
            raise ValueError(f"{what} can't be chosen for {', '.join(names)}")
    chosen = []
    for name in dict.fromkeys(names):
        if name not in SUITE_NAMES:
            raise ValueError(f"{name!r} is no suite; there are {', '.join(SUITE_NAMES)}")
        suite = SUITES.get(name)
        if suite is None:
            continue
        rows = suite.rows
        if heads or s_q:
            own_heads = tuple(dict.fromkeys(h for h, _ in rows))
            rows = tuple((h, n) for n in (s_q or (1,)) for h in (heads or own_heads))
        chosen.append(Suite(name, suite.mode, tuple(shapes) or suite.shapes, rows))
    return tuple(chosen)


def prefill_cases(
    model_heads: int, shapes: Sequence[tuple[int, int]] = (), heads: Sequence[int] = ()
) -> tuple[PrefillCase, ...]:
    """Give the cases of the prefill suite, their shapes and heads replaced where others are given.

    Args:
        model_heads: heads of the model on one GPU.
        shapes: (b, s); each at the model's heads if no heads are given.
        heads: for each shape all of these.
    """
    chosen = [(b, s, None) for b, s in shapes] or _PREFILL_SHAPES
    cases = (PrefillCase(b, s, h) for b, s, own in chosen for h in heads or (own or model_heads,))
    return tuple(dict.fromkeys(cases))


def memory_cases(tokens: int | None = None) -> tuple[MemoryCase, ...]:
    """Give the cases of the memory suite, of as many tokens as are given instead of their own."""
    return tuple(MemoryCase(kernel, tokens or _MEMORY_TOKENS[kernel]) for kernel in get_args(MemoryKernel))


def parse_shapes(texts: Iterable[str]) -> tuple[tuple[int, int], ...]:
    """Read shapes as in 128x4096, several with commas or spaces between.

    Raises:
        ValueError: a word is no shape; says which.
    """
    words = [word for text in texts for word in re.split(r"[,\s]+", text) if word]
    return tuple(dict.fromkeys(_parse_shape(word) for word in words))


def _parse_shape(word: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", word)
    if match is None or 0 in (shape := (int(match[1]), int(match[2]))):
        raise ValueError(f"{word!r} is not BATCHxTOKENS, as in 128x4096")
    return shape


def parse_counts(texts: Iterable[str]) -> tuple[int, ...]:
    """Read positive numbers, several with commas or spaces between.

    Raises:
        ValueError: a word is no positive number; says which.
    """
    words = [word for text in texts for word in re.split(r"[,\s]+", text) if word]
    for word in words:
        if not (word.isascii() and word.isdigit() and int(word)):
            raise ValueError(f"{word!r} is not a positive number")
    return tuple(dict.fromkeys(map(int, words)))


@dataclass(frozen=True)
class Stats:
    """What repeated calls took, microseconds."""

    median: float
    q1: float
    """First quartile."""
    q3: float
    """Third quartile."""
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Stats:
        """Sum up samples; ValueError if there are none."""
        if not samples:
            raise ValueError("statistics of no samples")
        if len(samples) == 1:
            q1 = q3 = samples[0]
        else:
            q1, _, q3 = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(statistics.median(samples), q1, q3, min(samples), max(samples), len(samples))


def geometric_mean(ratios: Sequence[float]) -> float | None:
    """Give the geometric mean, None of nothing."""
    return statistics.geometric_mean(ratios) if ratios else None


LEAST_REPEATS = 5
"""Timed calls that a median takes, whatever the budget."""


def affordable_repeats(
    wanted: int, seconds_left: float, cases_left: int, *, round_seconds: float, overhead: float, rest: float
) -> int:
    """Say how often the calls of a case may be timed so that a budget lasts for the cases behind it, too.

    Args:
        wanted: repeats without a budget, never exceeded.
        seconds_left: of the budget, now.
        cases_left: this one among them.
        round_seconds: one round of all calls of the case.
        overhead: seconds that a case takes before its calls are timed; this one has spent them.
        rest: seconds of the case without work.
    """
    each = seconds_left / cases_left - overhead * (cases_left - 1) / cases_left
    affordable = int((each - rest) / max(round_seconds, 1e-6))
    return min(max(affordable, LEAST_REPEATS), wanted)
