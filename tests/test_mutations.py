"""Break the shipped decode kernels one way at a time: the simulator, or the comparison with float64, finds each fault.

A mutation is a change of the generated text. It is caught if any of a few small problems, under any of a few schedules,
ends in a fault of the machine or in a wrong result.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

import mlaforge
from mlaforge.simulator import SimulatorOptions
from mlaforge.verify import Problem, run_problem

GENERATED = Path(__file__).parents[1] / "generated"
SPEC = "deepseek_v3"

PROBLEMS = (
    # Enough blocks for every stage to be used again, and a tail.
    Problem(lengths=(460, 70), h_q=16),
    # One request in several parts, which the combine kernel merges.
    Problem(lengths=(1200,), h_q=16, table_extra_columns=3),
    # Rows with borders of their own, some without a token.
    Problem(lengths=(2, 130, 0), s_q=4, h_q=20, causal=True),
)
SCHEDULES = tuple((mode, seed) for seed in (0, 1) for mode in ("random", "lazy", "eager"))


@dataclass(frozen=True)
class Mutation:
    """One way to break a kernel: the first `old` behind `behind` in `file` becomes `new`."""

    name: str
    old: str
    new: str
    finds: str
    """Part of the report: the kind of fault that the machine or the comparison names."""
    file: str = "decode.cu"
    behind: str = ""


RACE = "race"
DEADLOCK = "deadlock"
WRONG = "out: "

MUTATIONS = (
    # Fences
    Mutation("no proxy fence behind P", "    fence_proxy_async();\n    mbarrier_arrive(filled", "    mbarrier_arrive(filled", "no fence.proxy.async"),
    Mutation("no proxy fence behind the cleared tail", "    fence_proxy_async();\n", "", "no fence.proxy.async", behind="void clear_tail("),
    Mutation("no fence of the mbarriers' initialisation", "    fence_mbarrier_init();\n", "", "not visible to TMA"),
    Mutation("no wgmma fence", "  wgmma_fence();\n  const uint64_t v = values_descriptor(base, stage, 0)", "  const uint64_t v = values_descriptor(base, stage, 0)", "without a wgmma fence"),
    # Barriers and their counts
    Mutation("P is not announced", "    mbarrier_arrive(filled_bar(base));\n", "", DEADLOCK),
    Mutation("warpgroup 1 does not wait for P", "    mbarrier_wait(filled_bar(base), phase);\n", "", RACE),
    Mutation("P is announced before it is fenced", "    fence_proxy_async();\n    mbarrier_arrive(filled_bar(base));\n", "    mbarrier_arrive(filled_bar(base));\n    fence_proxy_async();\n", RACE),
    Mutation("P is overwritten before it was read", "{ mbarrier_wait(drained_bar(base), phase ^ 1); }", "{}", RACE),
    Mutation("P is given back before its product is done", "      wgmma_wait<0>();\n      wgmma_fence_operand(acc);\n      exchange.give_back(base);\n", "      exchange.give_back(base);\n      wgmma_wait<0>();\n      wgmma_fence_operand(acc);\n", RACE),
    Mutation("a named barrier of half its threads", "    named_barrier_sync(kTailBarrier + half, 128);\n", "    named_barrier_sync(kTailBarrier + half, 64 + 32 * (warp_id() & 1));\n", "threads expected"),
    Mutation("P counts as written when one thread has not written it", "mbarrier_init(filled_bar(base), 128)", "mbarrier_init(filled_bar(base), 127)", ""),
    Mutation("a stage is free one warp early", "mbarrier_init(empty_bar(base, stage), 8)", "mbarrier_init(empty_bar(base, stage), 7)", RACE),
    Mutation("a stage waits for one warp too many", "mbarrier_init(empty_bar(base, stage), 8)", "mbarrier_init(empty_bar(base, stage), 9)", DEADLOCK),
    Mutation("Q is free when one warp has read it", "mbarrier_init(q_empty_bar(base), 4)", "mbarrier_init(q_empty_bar(base), 1)", ""),
    Mutation("no barrier before the tail is cleared", "    if (half == 0) named_barrier_sync(kTailBarrier, 128);\n", "", RACE),
    Mutation("no barrier behind the cleared tail", "    named_barrier_sync(kTailBarrier + half, 128);\n", "", RACE),
    Mutation("no barrier behind the schedule's scratch", "base + kOffsetSchedule);\n  __syncthreads();", "base + kOffsetSchedule);", RACE),
    # Phases and waits
    Mutation("the producer waits for the wrong phase", "mbarrier_wait(empty_bar(base, ring.stage), ring.phase ^ 1)", "mbarrier_wait(empty_bar(base, ring.stage), ring.phase)", DEADLOCK),
    Mutation("the ring forgets to flip its phase", "      phase ^= 1;\n    }\n  }\n};", "    }\n  }\n};", "", behind="struct Ring"),
    Mutation("a stage is refilled one step early", "      mbarrier_wait(empty_bar(base, ring.stage), ring.phase ^ 1);\n", "", RACE),
    Mutation("Q is replaced while it is in use", "    mbarrier_wait(q_empty_bar(base), q_phase ^ 1);\n", "", RACE),
    Mutation("scores of a tile that has not landed", "    mbarrier_wait(full_bar(base, ring.stage), ring.phase);\n    wgmma_fence_operand(s);", "    wgmma_fence_operand(s);", RACE),
    Mutation("scores of a Q that has not landed", "      mbarrier_wait(q_full_bar(base), q_phase);\n", "", RACE),
    Mutation("a stage is released before its product is done", "    wgmma_wait<1>();\n    release(empty_bar(base, stage));", "    release(empty_bar(base, stage));", RACE),
    Mutation("scores are read before their product is done", "    wgmma_wait<0>();\n    wgmma_fence_operand(s);\n  } else", "    wgmma_fence_operand(s);\n  } else", ""),
    Mutation("warpgroup 1 does not wait for its product", "      wgmma_wait<0>();\n", "", "", behind="void consume_right("),
    Mutation("a product is never committed", "      wgmma_commit();\n", "", "no commit has closed", behind="void consume_right("),
    Mutation("the combine kernel does not wait for the partial results", "  grid_wait();\n", "", "has not waited for its end", file="combine.cu"),
    # Bytes
    Mutation("fewer bytes are expected than copied", "boxes * kBoxTokens * kSubtiles * 128);", "boxes * kBoxTokens * (kSubtiles - 1) * 128);", ""),
    Mutation("more bytes are expected than copied", "boxes * kBoxTokens * kSubtiles * 128);", "boxes * kBoxTokens * (kSubtiles + 1) * 128);", DEADLOCK),
    # Addresses and layouts
    Mutation("P is stored without its swizzle", "((chunk ^ (row & 7)) << 4)", "(chunk << 4)", WRONG, file="tile.cuh"),
    Mutation("V's atoms are stepped by half", "half * (kSubtilesV / 2) * kSubtileBytes, kSubtileBytes, 1024)", "half * (kSubtilesV / 2) * kSubtileBytes, kSubtileBytes, 512)", WRONG),
    Mutation("both warpgroups take the left half of V", "values_descriptor(base, ring.stage, 1)", "values_descriptor(base, ring.stage, 0)", RACE),
    Mutation("a block behind the last is fetched", "for (int block = item.block_begin; block < end; ++block) {\n      mbarrier_wait(empty", "for (int block = item.block_begin; block < end + 1; ++block) {\n      mbarrier_wait(empty", ""),
    Mutation("a partial result of the wrong slot", "k == 0 ? opened_slot(part)", "k == 0 ? continued_slot(part)", WRONG, file="combine.cu"),
    Mutation("a row beyond the request is stored", "p, row < tile.rows);", "p, true);", ""),
    # Arithmetic
    Mutation("the tail of V is not cleared", "    zero_rows<kTokens>(", "    if (kv_end < 0) zero_rows<kTokens>(", WRONG),
    Mutation("warpgroup 1 forgets the row factors", "      scale_rows(acc, factor);\n", "", WRONG, behind="void consume_right("),
    Mutation("the sum is not rescaled", "state.sum[i] * rescale[i] + sum", "state.sum[i] + sum", WRONG, file="tile.cuh"),
    Mutation("the mask is off by one", "(e & 1) >= border[e >> 1]", "(e & 1) > border[e >> 1]", "", file="tile.cuh"),
    Mutation("the causal border is off by one", "len - (s_q - 1) + row", "len - s_q + row", WRONG),
    Mutation("accumulators keep the request before", "    for (int i = 0; i < kHalfV / 2; ++i) acc[i] = 0.f;\n", "", "", behind="void consume_right("),
    Mutation("lse in base 2", "lse * kLn2", "lse", "lse: "),
    Mutation("an empty row has lse -inf", "sum == 0.f ? infinity() : lse * kLn2", "sum == 0.f ? -infinity() : lse * kLn2", "lse: "),
)  # fmt: skip


def mutated(mutation: Mutation, folder: Path) -> Path:
    shutil.copytree(GENERATED / SPEC, folder)
    path = folder / mutation.file
    text = path.read_text()
    start = text.index(mutation.behind) if mutation.behind else 0
    assert mutation.old in text[start:], f"{mutation.name}: its place is gone; adapt the mutation to the kernel"
    path.write_text(text[:start] + text[start:].replace(mutation.old, mutation.new, 1))
    return folder


@pytest.fixture(scope="session")
def mutant_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of their own: mutants have no place in the user's. Shared, for most mutants leave one kernel alone."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name.replace(" ", "-"))
def test_every_mutation_is_caught(
    mutation: Mutation, tmp_path: Path, mutant_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLAFORGE_CACHE_DIR", str(mutant_cache))
    folder = mutated(mutation, tmp_path / SPEC)
    mla = mlaforge.load(folder, device="sim")
    reports = []
    for mode, seed in SCHEDULES:
        mla.backend.options = SimulatorOptions(seed=seed, mode=mode)
        for problem in PROBLEMS:
            reports += run_problem(mla, problem, "cpu").failures
            if any(mutation.finds in report for report in reports):
                return
    pytest.fail(f"not caught as {mutation.finds!r}: {reports or 'every result was right'}")


def test_the_unbroken_kernels_pass_200_schedules() -> None:
    mla = mlaforge.load(GENERATED / SPEC, device="sim")
    for seed in range(200):
        mla.backend.options = SimulatorOptions(seed=seed, mode=("random", "lazy", "eager")[seed % 3])
        errors = run_problem(mla, PROBLEMS[seed // 3 % len(PROBLEMS)], "cpu")
        assert errors.ok, f"seed {seed}: {errors.failures}"
