"""Break the shipped decode kernels one way at a time: the simulator, or the comparison with float64, finds each fault.

A mutation is a change of the generated text. It is caught if any of a few small problems, under any of a few schedules,
ends in a fault of the machine or in a wrong result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import mlaforge
from folders import generate
from mlaforge.manifest import read_manifest
from mlaforge.simulator import Simulator, SimulatorOptions
from mlaforge.verify import Problem, run_problem
from mutants import Mutants, Mutation, require_caught

GENERATED = Path(__file__).parents[1] / "generated"
SPEC = "deepseek_v3"

PROBLEMS = (
    # Enough blocks for every stage to be used again, and a tail.
    Problem(lengths=(460, 70), h_q=16),
    # One request in several parts, which merge their results.
    Problem(lengths=(1200,), h_q=16, table_extra_columns=3),
    # Rows with borders of their own, some without a token.
    Problem(lengths=(2, 130, 0), s_q=4, h_q=20, causal=True),
    # Scores so far apart that rows are rescaled on the way; two row tiles.
    Problem(lengths=(400, 130), h_q=70, softmax_scale=40.0),
)
# And on how many multiprocessors.
RUNS = (
    *((problem, 4) for problem in PROBLEMS),
    # The part in the middle shares a request with either neighbour.
    (Problem(lengths=(760, 500), h_q=16), 3),
    # Shares of one, and of two or three units, which several warps add up.
    (Problem(lengths=(300,), h_q=1), 4),
    (Problem(lengths=(300,), h_q=3), 4),
    # One part has more items than are known ahead.
    (Problem(lengths=(70, 5, 1, 64, 0, 90, 3), h_q=5), 1),
)
MODES = ("random", "lazy", "eager")
SCHEDULES = tuple((mode, seed) for seed in (0, 1) for mode in MODES)


RACE = "race"
DEADLOCK = "deadlock"
UNINITIALISED = "uninitialised"
UNOWNED = "this store to .* writes what is undefined .* copies uninitialised bytes of kv_cache"
WRONG = "out: "
LEFT = "counters are left at"
# Behind it the scores' warpgroup issues the products of the tile after the one that it has in hand.
NEXT = "if (!last) {"
ANY = "named_barrier_any(kScoresBarrier, 128, next)"
STRIP = "(strip, p_at(base, exchange.stage()), tile_at(base, stage))"
STORE = """const Target target = reader.target(base);
    store_columns<Config, kRest>(o, tile, target.request, target.slot, 0, acc, factor);"""

MUTATIONS = (
    # Fences
    Mutation("no proxy fence behind P", "fence_proxy_async();", "", "no fence.proxy.async"),
    Mutation("no fence of the mbarriers' initialisation", "fence_mbarrier_init();", "", "not visible to TMA"),
    Mutation("no wgmma fence before the scores", "wgmma_fence();", "", "without a wgmma fence", behind=NEXT),
    Mutation("no wgmma fence before the values", "wgmma_fence();", "", "without a wgmma fence", behind="scale_rows(acc, factor);"),
    # Barriers and their counts
    Mutation("P is not announced", "if (landed) mbarrier_arrive(filled(base, exchange.stage()));", "", DEADLOCK),
    Mutation("the values do not wait for P", "mbarrier_wait(filled(base, exchange.stage()), exchange.phase());", "", f"{RACE}|{UNINITIALISED}", behind="void accumulate("),
    Mutation("P is announced before it is fenced", "fence_proxy_async();", "mbarrier_arrive(filled(base, exchange.stage())); fence_proxy_async();", ""),
    Mutation("P is overwritten before it was read", "if (warp_any(!room)) mbarrier_wait(drained(base, exchange.stage()), exchange.phase() ^ 1);", "", RACE),
    Mutation("P is given back before its product is done", "wgmma_wait<0>();\n      wgmma_fence_operand(acc);\n      mbarrier_arrive(drained(base, exchange.stage()));", "mbarrier_arrive(drained(base, exchange.stage())); wgmma_wait<0>(); wgmma_fence_operand(acc);", RACE),
    Mutation("one warp does not agree that the next tile has landed", ANY, f"{ANY} && warp_id() != 3", "different wgmma"),
    Mutation("the strip does not wait for the other warps' P", ANY, "warp_any(next)", f"{RACE}|different wgmma|{UNINITIALISED}"),
    Mutation("a named barrier of half its threads", ANY, "named_barrier_any(kScoresBarrier, 64 + 32 * (warp_id() & 1), next)", "threads expected"),
    Mutation("P counts as written when one thread has not written it", "mbarrier_init(filled(base, i), 128)", "mbarrier_init(filled(base, i), 127)", ""),
    Mutation("P counts as read when one thread has not read it", "mbarrier_init(drained(base, i), 128)", "mbarrier_init(drained(base, i), 127)", ""),
    Mutation("a stage is free one warp early", "mbarrier_init(empty(base, i), 8)", "mbarrier_init(empty(base, i), 7)", ""),
    Mutation("a stage waits for one warp too many", "mbarrier_init(empty(base, i), 8)", "mbarrier_init(empty(base, i), 9)", DEADLOCK),
    Mutation("the columns behind V are free one warp early", "mbarrier_init(rope_empty(base, i), 4)", "mbarrier_init(rope_empty(base, i), 3)", ""),
    Mutation("those of Q are free when one warp has read them", "mbarrier_init(q_rope_empty(base, i), 4)", "mbarrier_init(q_rope_empty(base, i), 1)", ""),
    Mutation("an item is replaced one thread early", "mbarrier_init(item_empty(base, i), 320)", "mbarrier_init(item_empty(base, i), 319)", ""),
    Mutation("an item is given back before it was read", f"{STORE}\n    reader.done(base);", f"mbarrier_arrive(item_empty(base, reader.ring.stage())); {STORE} reader.ring.advance();", RACE),
    Mutation("no barrier before the tail is cleared", "named_barrier_sync(kScoresBarrier, 128);", "", RACE),
    Mutation("no barrier behind the schedule", "__syncthreads();", "", f"{RACE}|{UNINITIALISED}"),
    # Phases and waits
    Mutation("the tile loader waits for the wrong phase", "mbarrier_wait(empty(base, ring.stage()), ring.phase() ^ 1)", "mbarrier_wait(empty(base, ring.stage()), ring.phase())", DEADLOCK, behind="void load_tiles("),
    Mutation("a ring forgets to flip its phase", "at + 1 < 2 * count ? at + 1 : 0", "at + 1 < count ? at + 1 : 0", "", file="ring.cuh"),
    Mutation("a stage is refilled one step early", "mbarrier_wait(empty(base, ring.stage()), ring.phase() ^ 1);", "", RACE, behind="copy_query<Config, 0, kSubtilesV>("),
    Mutation("the columns behind V are replaced while they are in use", "mbarrier_wait(rope_empty(base, ring.stage()), ring.phase() ^ 1);", "", ""),
    Mutation("those of Q are replaced while they are in use", "mbarrier_wait(q_rope_empty(base, 0), query.phase() ^ 1);", "", RACE),
    Mutation("scores of a tile that has not landed", "mbarrier_wait(full(base, ring.stage()), ring.phase());", "", RACE, behind=NEXT),
    Mutation("scores of columns behind V that have not landed", "mbarrier_wait(rope_full(base, rope.stage()), rope.phase());", "", RACE),
    Mutation("scores of a Q that has not landed", "mbarrier_wait(full(base, ring.stage()), ring.phase());", "", f"{RACE}|{UNINITIALISED}", behind="state.reset();"),
    Mutation("scores of a Q whose columns behind V have not landed", "mbarrier_wait(q_rope_full(base, 0), query.phase());", "", RACE),
    Mutation("the values release a stage before their product is done", "wgmma_wait<0>();\n      wgmma_fence_operand(acc);", "release(empty(base, ring.stage())); wgmma_wait<0>(); wgmma_fence_operand(acc);", "", behind="void accumulate("),
    Mutation("the strip's stage is released before its product is done", "wgmma_wait<0>();", "", "", behind="softmax_reference<kTokens>("),
    Mutation("scores are read before their product is done", "wgmma_wait<1>();", "", ""),
    Mutation("the values do not wait for their product", "wgmma_wait<0>();", "", "", behind="void accumulate("),
    Mutation("a product is never committed", "wgmma_commit();", "", "no commit has closed", behind="void accumulate("),
    Mutation("partial results are merged before all are there", "while (load_global_acquire(arrived) < split.splits) {\n      }", "", "by another block of this kernel", file="splits.cuh"),
    Mutation("a part does not say that it has stored", "if (split.request >= 0) atomic_add_acq_rel(counter(split.first_part), 1);", "", DEADLOCK, file="splits.cuh"),
    Mutation("a part says so before its other warpgroup has stored", "named_barrier_sync(Barrier, kMergeThreads);", "", "by another block of this kernel", file="splits.cuh", behind="const auto counter = "),
    Mutation("only one thread has waited for the others' results", "named_barrier_sync(Barrier, kMergeThreads);", "", f"{RACE}|by another block of this kernel", file="splits.cuh", behind="store_global(arrived, 0);"),
    Mutation("the counter does not go back to zero", "store_global(arrived, 0)", "store_global(arrived, 1)", LEFT, file="splits.cuh"),
    Mutation("weights are used before they are there", "named_barrier_sync(Barrier, kMergeThreads);", "", RACE, file="splits.cuh", behind="(max + log2_approx(sum)) * kLn2);"),
    Mutation("a share begins a unit late", "quotient(units * k, split.splits)", "quotient(units * k, split.splits) + 1", WRONG, file="splits.cuh"),
    Mutation("a weight of the split before", "load_shared_f32(weight + 4 * k)", "load_shared_f32(weight + 4 * (k > 0 ? k - 1 : 0))", WRONG, file="splits.cuh"),
    Mutation("what other warps have added up is taken before it is there", "named_barrier_sync(Barrier, kMergeThreads);", "", RACE, file="splits.cuh", behind="// the next copies may land there"),
    Mutation("every warp adds up the splits of the first", "warp_id() & (slices - 1)", "0", WRONG, file="splits.cuh"),
    Mutation("the sum of one warp is left out", "k < slices && k < split.splits", "k < slices - 1 && k < split.splits", WRONG, file="splits.cuh"),
    Mutation("partial results are added up before they have landed", "mbarrier_wait(landed, phase);", "", f"{RACE}|{UNINITIALISED}", file="splits.cuh"),
    Mutation("those of a second request are waited for in the phase of the first's", "phase ^= 1;", "", f"{RACE}|{UNINITIALISED}", file="splits.cuh"),
    Mutation("too few bytes of partial results are waited for", "split.splits * count * kUnitBytes", "(split.splits - 1) * count * kUnitBytes", "", file="splits.cuh", behind="mbarrier_arrive_expect_tx(landed, "),
    # Bytes
    Mutation("fewer bytes are expected than copied", "boxes * C::kBoxTokens * Count * 128", "boxes * C::kBoxTokens * (Count - 1) * 128", "", file="decode.cuh"),
    Mutation("more bytes are expected than copied", "boxes * C::kBoxTokens * Count * 128", "boxes * C::kBoxTokens * (Count + 1) * 128", DEADLOCK, file="decode.cuh"),
    # Addresses and layouts
    Mutation("P is stored without its swizzle", "((chunk ^ (row & 7)) << 4)", "(chunk << 4)", WRONG, file="tile.cuh"),
    Mutation("Q is loaded without its swizzle", "((chunk ^ (row & 7)) << 4)", "(chunk << 4)", WRONG),
    Mutation("V's atoms are stepped by half", "wgmma_descriptor(tile, kSubtileBytes, 1024)", "wgmma_descriptor(tile, kSubtileBytes, 512)", WRONG),
    Mutation("the strip takes the first columns of V", f"issue_values<kRest, Config::kHeadDimV>{STRIP}", f"issue_values<0, kStrip>{STRIP}", WRONG, behind="if (!landed) {"),
    Mutation("the strip begins a subtile early", "First / 64 * kSubtileBytes + kInSubtile * 2", "First / 64 * kSubtileBytes", WRONG),
    Mutation("a block behind the last is fetched", "block < end", "block < end + 1", "", behind="copy_query<Config, 0, kSubtilesV>("),
    Mutation("both uses of the shared buffer at once", "3 - exchanges", "2", f"{RACE}|{WRONG}"),
    Mutation("a partial result of the wrong slot", "continued_slot(part)", "opened_slot(part)", f"{WRONG}|{UNINITIALISED}", file="splits.cuh"),
    Mutation("a partial result that no part has left", "opened_slot(part)", "continued_slot(part)", f"{WRONG}|{UNINITIALISED}", file="splits.cuh"),
    Mutation("a row beyond the request is stored", "tile.holds(r)", "true", "", file="decode.cuh", behind="store_row<typename C::Element, Columns>("),
    # Arithmetic
    Mutation("the tail of V is not cleared", "store_shared_zero16(tile + sub * (Rows * 128) + first_row * 128 + i * 16);", "", UNOWNED, file="tile.cuh"),
    Mutation("the tail of V is cleared one row late", "(Rows - first_row) * 8", "(Rows - ++first_row) * 8", UNOWNED, file="tile.cuh"),
    Mutation("the values forget the row factors", "if (warp_any(factor[0] != 1.f || factor[1] != 1.f)) scale_rows(acc, factor);", "", WRONG),
    Mutation("the strip forgets the row factors", "if (warp_any(rescale[0] != 1.f || rescale[1] != 1.f)) scale_rows(strip, rescale);", "", WRONG),
    Mutation("the sum is not rescaled", "state.sum[i] * rescale[i]", "state.sum[i]", f"{WRONG}|lse: ", file="tile.cuh"),
    Mutation("the lanes of a row do not agree on its maximum", "quad_max(top[i])", "top[i]", WRONG, file="tile.cuh"),
    Mutation("the mask is off by one", "column + 8 * g + (e & 1) >= border[e >> 1]", "column + 8 * g + (e & 1) > border[e >> 1]", UNOWNED, file="tile.cuh"),
    Mutation("the causal border is off by one", "s_q - 1", "s_q", WRONG, file="decode.cuh"),
    Mutation("the values keep the request before", "for (int i = 0; i < kRest / 2; ++i) acc[i] = 0.f;", "", ""),
    Mutation("the strip keeps the request before", "for (int i = 0; i < kStrip / 2; ++i) strip[i] = 0.f;", "", ""),
    Mutation("lse in base 2", "lse * kLn2", "lse", "lse: ", file="decode.cuh"),
    Mutation("an empty row has lse -inf", "sum == 0.f ? infinity() : lse * kLn2", "sum == 0.f ? -infinity() : lse * kLn2", "lse: ", file="decode.cuh"),
)  # fmt: skip


@pytest.fixture(scope="session")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> Mutants:
    folder = generate(tmp_path_factory.mktemp("mutants") / SPEC, SPEC, tile_rows=64)  # the problems have few rows, too
    return Mutants.made(folder, MUTATIONS, tmp_path_factory)


def keep(counters: list[torch.Tensor], simulator: Simulator, device: torch.device, count: int) -> torch.Tensor:
    """Give zeros to count with, and keep them to see what is left in them."""
    counters.append(torch.zeros(count, dtype=torch.int32))
    return counters[-1]


def reports_of(folder: Path, patch: pytest.MonkeyPatch, runs: Sequence[tuple[Problem, int]] = RUNS) -> Iterator[str]:
    """Run the problems under one schedule after the other, and tell what is wrong."""
    counters: list[torch.Tensor] = []
    patch.setattr(Simulator, "counters", lambda *args: keep(counters, *args))
    mla = mlaforge.load(folder, device="sim")
    for mode, seed in SCHEDULES:
        for problem, sms in runs:
            mla.backend.options = SimulatorOptions(seed=seed, mode=mode, sms=sms)
            counters.clear()
            yield from run_problem(mla, problem, "cpu").failures
            yield from (f"counters are left at {each.tolist()}" for each in counters if each.any())


@pytest.mark.parametrize("number", range(len(MUTATIONS)), ids=lambda i: MUTATIONS[i].name.replace(" ", "-"))
def test_every_mutation_is_caught(number: int, mutants: Mutants, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(MUTATIONS[number], reports_of(mutants.switch(number, monkeypatch), monkeypatch))


def test_nothing_is_found_where_no_mutation_is_on(mutants: Mutants, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(reports_of(mutants.switch(-1, monkeypatch), monkeypatch))


# More than one round is a matter of the room, which the shipped kernels have plenty of.
ROUNDS = (
    Mutation("the next units land on those that are being added up", "if (first > begin) named_barrier_sync(Barrier, kMergeThreads);", "", RACE, file="splits.cuh"),
    Mutation("the next request's units land on a sum that a warp has left", "fence_proxy_async();", "", RACE, file="splits.cuh", behind="if (some && slice > 0)"),
)  # fmt: skip


def test_parts_merge_in_little_room(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = generate(tmp_path_factory.mktemp("room") / SPEC, SPEC, tile_rows=64)
    kernel = folder / "decode.cu"
    room = "kMergeBarrier, kOffsetFactors>"
    assert kernel.read_text().count(room) == 1
    kernel.write_text(kernel.read_text().replace(room, "kMergeBarrier, kMergeScratch<Config>>"))
    rounds = Mutants.made(folder, ROUNDS, tmp_path_factory)
    # Of 38 rows the last round of the first request is of two or three units.
    runs = [(Problem(lengths=(760, 500), h_q=h_q), 3) for h_q in (64, 38)]
    assert not list(reports_of(rounds.switch(-1, monkeypatch), monkeypatch, runs))
    for number, mutation in enumerate(ROUNDS):
        require_caught(mutation, reports_of(rounds.switch(number, monkeypatch), monkeypatch, runs))


def kernels_of(folder: Path) -> tuple[str, ...]:
    """Give the text of a folder's kernels without comments, which name the spec."""
    return tuple(re.sub("//.*", "", path.read_text()) for path in sorted(folder.glob("*.cu*")))


def distinct_kernels() -> list[Path]:
    """Choose one of the shipped folders for every pair of head dimensions, dtype, page size and schedule that there is.

    But of quantised caches, whose kernels have tests of their own.
    """
    folders = [path.parent for path in sorted(GENERATED.glob("*/manifest.json"), reverse=True)]
    return sorted({kernels_of(each): each for each in folders if not read_manifest(each).cache.quantised}.values())


SCHEDULES_EACH = 50
# Smaller, for there are many schedules: stages are used again, tails are cleared, parts are merged, rows see no token.
SMALL_PROBLEMS = (
    Problem(lengths=(330,), h_q=16),
    Problem(lengths=(200, 0, 70), h_q=16),
    Problem(lengths=(1, 130), s_q=3, h_q=5, causal=True),
)


@pytest.mark.parametrize(
    ("name", "schedule"), [*((each.name, "auto") for each in distinct_kernels()), (SPEC, "plain")], ids=str
)
def test_the_unbroken_kernels_pass_random_schedules(name: str, schedule: str, tmp_path: Path) -> None:
    """More than 200 in all; parts merge their results in a third of them. No shipped spec chooses plain."""
    folder = generate(tmp_path / name, name, schedule=schedule, tile_rows=64)
    mla = mlaforge.load(folder, device="sim")
    for seed in range(SCHEDULES_EACH):
        mode, problem = MODES[seed % 3], SMALL_PROBLEMS[seed // 3 % len(SMALL_PROBLEMS)]
        mla.backend.options = SimulatorOptions(seed=seed, mode=mode)
        errors = run_problem(mla, problem, "cpu")
        repro = f"{problem.to_repro(folder.name)} --device sim --mode {mode} --schedule-seed {seed}"
        assert errors.ok, f"{repro}: {errors.failures}"
