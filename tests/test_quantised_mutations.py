"""Break gather and append of quantised caches one way at a time: the comparison with the formats' reference finds each."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlaforge.memory_verify import AppendProblem, GatherProblem, MemoryProblem
from mlaforge.simulator import SimulatorOptions
from mutants import Mutants, Mutation, require_caught
from test_memory import GENERATED, Memory

SPEC = "deepseek_v3_nvfp4"

DIFFER = "elements differ"
GATHERED = GatherProblem(counts=(5, 0, 70), starts=(3, 0, 60))
APPENDED = AppendProblem(tokens=5)
MUTATIONS: tuple[tuple[Mutation, MemoryProblem], ...] = (
    (Mutation("neighbours do not trade", "trade(x[i]);", "", DIFFER, file="gather.cu"), GATHERED),
    (Mutation("lanes trade by halves alone", "mask *= 2", "mask *= 4", DIFFER, file="gather.cu", behind="mask < kUnits; "), GATHERED),
    (Mutation("the first scale is that of all", "unit % kOutCodes / kGroupUnits", "0", DIFFER, file="gather.cu"), GATHERED),
    (Mutation("the tensor's scale is left out", "values[e] * factor * of_all", "values[e] * factor", DIFFER, file="gather.cu"), GATHERED),
    (Mutation("rows that are not there are read", "source.block >= 0", "true", "out of bounds|differ", file="gather.cu", behind="piece < kTokens * kCodePieces && "), GatherProblem(counts=(5,), extra_rows=3)),
    (Mutation("a half of a byte is the other", "k / 2 + k % 2 * 2", "(k / 2 ^ 1) + k % 2 * 2", DIFFER, file="quantised.cuh"), GATHERED),
    (Mutation("a block's lanes do not share its maximum", "amax[j] = max_nan(amax[j], shuffle_xor(amax[j], mask));", "", "latent: .* wrong|scales: .* wrong", file="append.cu"), APPENDED),
    (Mutation("scales of a word the other way around", "lane / 2 % 4", "3 - lane / 2 % 4", "scales: .* wrong", file="append.cu"), APPENDED),
    (Mutation("scales of another load", "lane % 8 == j", "lane % 8 == kLoads - 1 - j", "scales: .* wrong", file="append.cu"), APPENDED),
    (Mutation("divided by the block's scale alone", "block_scale_of(code) * of_all", "block_scale_of(code)", "latent: .* wrong", file="append.cu"), APPENDED),
    (Mutation("steps of halves up to 2", "size < 1.f", "size < 2.f", "latent: .* wrong", file="quantised.cuh"), APPENDED),
    (Mutation("a slot of -1 is one", "slot >= 0 && slot < slots", "slot < slots", "out of bounds|differ", file="append.cu"), AppendProblem(tokens=4, left_out=2)),
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
