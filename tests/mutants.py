"""Kernels broken one way at a time: many mutants from one compile.

A mutation is a change of a kernel's generated text. All mutations of a folder stand in one text, each behind a switch,
so that the host's compiler, which takes longer than most runs, works once and not once for each. The switch is a
constant of the library, initialised from the environment when the library is loaded; every mutant loads a copy of its
own.

It changes nothing that the simulator sees: what that watches is the memory, the barriers and the order of the machine,
which only primitives touch. All threads find the same switch, so none takes another way than its neighbour. Constants
that the compiler must know can't be switched: the text would not compile.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

VARIABLE = "MLAFORGE_MUTANT"
# Static: an inline variable would be one for all libraries of the process.
SWITCH = f"""
#include <cstdlib>
static const int mutant = std::getenv("{VARIABLE}") ? std::atoi(std::getenv("{VARIABLE}")) : -1;
"""


@dataclass(frozen=True)
class Mutation:
    """One way to break a kernel: `old` in `file` becomes `new`, both statements or both an expression.

    `old` must be there once; or `behind` must, and then it is the first `old` behind that.
    """

    name: str
    old: str
    new: str
    finds: str
    """What the report matches: the kind of fault that the machine or the comparison names."""
    file: str = "decode.cu"
    behind: str = ""

    def span(self, text: str) -> tuple[int, int]:
        """Find its place in the text of its file."""
        gone = "adapt the mutation to the kernel"
        mark = self.behind or self.old
        assert text.count(mark) == 1, f"{self.name}: {mark!r} is there {text.count(mark)} times; {gone}"
        start = text.index(mark) + len(self.behind)
        at = text.find(self.old, start)
        assert at >= 0, f"{self.name}: there is no {self.old!r} behind {self.behind!r}; {gone}"
        return at, at + len(self.old)

    @property
    def statement(self) -> bool:
        return self.old.rstrip().endswith((";", "}"))


@dataclass(frozen=True)
class _Place:
    """Text that some mutations change, by their number: one of them may lie within another."""

    begin: int
    end: int
    statement: bool
    inside: tuple[tuple[int, int, int, str], ...]
    """Of each mutation its number, where it begins and ends, and what stands there then."""

    def switched(self, text: str) -> str:
        """Give the place with a switch: whole for each mutation, so that none sees another's change."""
        plain = text[self.begin : self.end]
        variants = [(n, text[self.begin : b] + new + text[e : self.end]) for n, b, e, new in self.inside]
        if self.statement:
            chain = " else ".join(f"if (mutant == {n}) {{ {variant} }}" for n, variant in variants)
            return f"{chain} else {{ {plain} }}"
        chain = "".join(f"mutant == {n} ? ({variant}) : " for n, variant in variants)
        return f"({chain}({plain}))"


def _places(text: str, mutations: Sequence[tuple[int, Mutation]]) -> Iterator[_Place]:
    spans = sorted(((*each.span(text), n, each) for n, each in mutations), key=lambda span: (span[0], -span[1]))
    while spans:
        begin, end, _, outer = spans[0]
        inside = [span for span in spans if span[0] < end]
        spans = spans[len(inside) :]
        for _, inner_end, _, inner in inside:
            assert inner_end <= end, f"{inner.name!r} and {outer.name!r} overlap: let one of them hold the other"
        statement = any(each.statement for b, e, _, each in inside if (b, e) == (begin, end))
        yield _Place(begin, end, statement, tuple((n, b, e, each.new) for b, e, n, each in inside))


def switch_in(folder: Path, mutations: Sequence[Mutation]) -> None:
    """Put all mutations into a folder's kernels; number n is on where the environment says so at the load."""
    by_file = sorted(enumerate(mutations), key=lambda each: each[1].file)
    for name, group in itertools.groupby(by_file, key=lambda each: each[1].file):
        path = folder / name
        text = path.read_text()
        for place in reversed(list(_places(text, list(group)))):
            text = text[: place.begin] + place.switched(text) + text[place.end :]
        path.write_text(text)
    header = folder / "primitives.cuh"
    text = header.read_text()
    assert text.count("#pragma once\n") == 1
    header.write_text(text.replace("#pragma once\n", f"#pragma once\n{SWITCH}"))


def mutant_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a compile cache for what is of no use to anybody else; the workers of a parallel run share it."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "mutants"


@dataclass(frozen=True)
class Mutants:
    """A folder with mutations in it, and their cache."""

    folder: Path
    cache: Path

    @classmethod
    def made(cls, folder: Path, mutations: Sequence[Mutation], tmp_path_factory: pytest.TempPathFactory) -> Mutants:
        """Put the mutations into a folder that was generated for them."""
        switch_in(folder, mutations)
        return cls(folder, mutant_cache(tmp_path_factory))

    def switch(self, number: int, patch: pytest.MonkeyPatch) -> Path:
        """Have the kernels that are loaded from now on broken the way of a number; -1 is none."""
        patch.setenv("MLAFORGE_CACHE_DIR", str(self.cache))
        patch.setenv(VARIABLE, str(number))
        return self.folder


def require_caught(mutation: Mutation, reports: Iterable[str]) -> None:
    """Take reports until one is of the kind that the mutation must be found as; fail if none is."""
    seen = []
    for report in reports:
        seen.append(report)
        if re.search(mutation.finds, report):
            return
    pytest.fail(f"not caught as {mutation.finds!r}: {seen or 'every result was right'}")
