"""Break gather, append and merge one way at a time: the simulator, or the comparison with float64, finds each fault.

As test_mutations.py does for decode. That the problems find faults of arithmetic is shown in test_memory_verify.py, without
a compiler; here stand those that a kernel's text can have and torch can't.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlaforge.memory_verify import AppendProblem, GatherProblem, MemoryProblem, MergeProblem
from mlaforge.simulator import SimulatorOptions
from test_memory import GENERATED, Memory

SPEC = "deepseek_v3"


@dataclass(frozen=True)
class Mutation:
    """One way to break a kernel: `old` becomes `new`, and some seed makes the problem's report match `finds`."""

    name: str
    kernel: str
    old: str
    new: str
    problem: MemoryProblem
    finds: str


WRONG = "elements differ"
BEYOND = "beyond the tolerance"
MUTATIONS = (
    Mutation("a row behind the last is looked up", "gather", "row < load_global(cu_seqlens + batch)", "true", GatherProblem(counts=(5,), extra_rows=9), WRONG),
    Mutation("the sequence of a row is the one that ends there", "gather", "middle) <= row", "middle) < row", GatherProblem(counts=(3, 0, 5, 64)), WRONG),
    Mutation("a lane sums without half of the others", "append", "int mask = 8;", "int mask = 4;", AppendProblem(tokens=3, norm=True), BEYOND),
    Mutation("a slot of -1 is one", "append", "slot >= 0 && slot < slots", "slot < slots", AppendProblem(tokens=4, left_out=2), "out of bounds|differ"),
    Mutation("lanes write before others have read", "merge", "  __syncwarp();", "  ", MergeProblem(tokens=9, heads=3, width=128, in_place=1), BEYOND),
    Mutation("+inf is a number", "merge", "lse1 == infinity() ? -infinity() : lse1", "lse1", MergeProblem(tokens=9), "NaN in one"),
)  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_every_mutation_is_caught(mutation: Mutation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAFORGE_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / SPEC
    shutil.copytree(GENERATED / SPEC, folder)
    path = folder / f"{mutation.kernel}.cu"
    text = path.read_text()
    assert mutation.old in text, f"{mutation.name}: its place is gone; adapt the mutation to the kernel"
    path.write_text(text.replace(mutation.old, mutation.new, 1))
    memory = Memory(folder)
    reports: list[str] = []
    for seed in range(4):
        memory.backend.options = SimulatorOptions(seed=seed)
        reports += mutation.problem.run(memory, "cpu").failures
        if any(re.search(mutation.finds, report) for report in reports):
            return
    pytest.fail(f"not caught as {mutation.finds!r}: {reports or 'every result was right'}")
