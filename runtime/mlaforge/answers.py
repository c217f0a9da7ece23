"""Two answers to one prompt, and where they part."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Side = Literal["both", "first", "second"]

PROMPTS = (
    "What is 17 * 23? Answer with the number alone.",
    "List the first ten prime numbers, separated by commas, and nothing else.",
    "Write the word `latent` backwards. Answer with the word alone.",
    "Explain in two sentences why the sky is blue.",
)
"""What is asked if nothing else is."""


@dataclass(frozen=True)
class Difference:
    """How two texts differ."""

    at: int | None
    """The first character in which they do, from 0; None if they are the same."""
    alike: float
    """Share of their words that is common to both, in order; 1.0 if they are the same."""
    pieces: tuple[tuple[Side, str], ...]
    """Both texts in pieces, and whose each of them is; those of `first` and `both` together are the first text."""


def compare(first: str, second: str) -> Difference:
    """Compare two texts, word by word and to the character."""
    if first == second:
        return Difference(None, 1.0, (("both", first),) if first else ())
    at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    # Blanks are pieces of their own: a difference in them is one.
    words = [re.findall(r"\s+|[^\s]+", text) for text in (first, second)]
    matcher = difflib.SequenceMatcher(None, words[0], words[1], autojunk=False)
    return Difference(at, matcher.ratio(), tuple(_pieces(matcher, words[0], words[1])))


def _pieces(matcher: difflib.SequenceMatcher[str], first: list[str], second: list[str]) -> Iterator[tuple[Side, str]]:
    for tag, a, a_end, b, b_end in matcher.get_opcodes():
        if tag == "equal":
            yield "both", "".join(first[a:a_end])
            continue
        if a < a_end:
            yield "first", "".join(first[a:a_end])
        if b < b_end:
            yield "second", "".join(second[b:b_end])
