"""Break gather, append and merge one way at a time: the simulator, or the comparison with float64, finds each fault.

As test_mutations.py does for decode. That the problems find faults of arithmetic is shown in test_memory_verify.py, without
a compiler; here stand those that a kernel's text can have and torch can't.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlaforge.memory_verify import AppendProblem, GatherProblem, MemoryProblem, MergeProblem
from mlaforge.simulator import SimulatorOptions
from mutants import Mutants, Mutation, require_caught
from test_memory import GENERATED, Memory

SPEC = "deepseek_v3"


WRONG = "elements differ"
BEYOND = "beyond the tolerance"
MUTATIONS: tuple[tuple[Mutation, MemoryProblem], ...] = (
    (Mutation("a row behind the last is looked up", "row >= load_global(ranges.cu_seqlens + ranges.batch)", "false", WRONG, file="memory.cuh"), GatherProblem(counts=(5,), extra_rows=9)),
    (Mutation("the sequence of a row is the one that ends there", "load_global(cu_seqlens + middle) <= row", "load_global(cu_seqlens + middle) < row", WRONG, file="memory.cuh"), GatherProblem(counts=(3, 0, 5, 64))),
    (Mutation("a lane sums without half of the others", "8", "4", BEYOND, file="append.cu", behind="int mask = "), AppendProblem(tokens=3, norm=True)),
    (Mutation("a slot of -1 is one", "slot >= 0 && slot < slots", "slot < slots", "out of bounds|differ", file="append.cu"), AppendProblem(tokens=4, left_out=2)),
    (Mutation("lanes write before others have read", "__syncwarp();", "", BEYOND, file="merge.cu"), MergeProblem(tokens=9, heads=3, width=128, in_place=1)),
    (Mutation("+inf is a number", "lse1 == infinity() ? -infinity() : lse1", "lse1", "NaN in one", file="merge.cu"), MergeProblem(tokens=9)),
)  # fmt: skip


@pytest.fixture(scope="session")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> Mutants:
    folder = shutil.copytree(GENERATED / SPEC, tmp_path_factory.mktemp("mutants") / SPEC)
    return Mutants.made(folder, [mutation for mutation, _ in MUTATIONS], tmp_path_factory)


def reports_of(folder: Path, problem: MemoryProblem) -> Iterator[str]:
    memory = Memory(folder)
    for seed in range(4):
        memory.backend.options = SimulatorOptions(seed=seed)
        yield from problem.run(memory, "cpu").failures


@pytest.mark.parametrize("number", range(len(MUTATIONS)), ids=lambda i: MUTATIONS[i][0].name.replace(" ", "-"))
def test_every_mutation_is_caught(number: int, mutants: Mutants, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation, problem = MUTATIONS[number]
    require_caught(mutation, reports_of(mutants.switch(number, monkeypatch), problem))


def test_nothing_is_found_where_no_mutation_is_on(mutants: Mutants, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = mutants.switch(-1, monkeypatch)
    assert not [report for _, problem in MUTATIONS for report in reports_of(folder, problem)]
