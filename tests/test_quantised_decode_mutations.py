"""The decode kernels for quantised caches, broken one way at a time as test_mutations.py does the 64-row one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import mlaforge
from mlaforge.simulator import SimulatorOptions
from mlaforge.verify import run_problem
from mutants import Mutants, Mutation, require_caught
from test_quantised_decode import MODES, PROBLEMS, small_folder

RACE = "race"
WRONG = "out: "
STORED = "store_transposed<kRows>(p_at(base, buffer)"
CONVERT = "load_shared_f32(base + kOffsetUnit) * scale_log2);"
MUTATIONS = (
    Mutation("codes of a line that has not landed", "mbarrier_wait(full(base, wraps ? at - kRing : at), stage.lines.phase() ^ (wraps ? 1 : 0));", "", f"{RACE}|uninitialised"),
    Mutation("a tile is given back before the other lanes have read it", "__syncwarp();\n  if (lane_id() < kLines) mbarrier_arrive(empty(base, stage.line(lane_id())));", "if (lane_id() < kLines) mbarrier_arrive(empty(base, stage.line(lane_id())));", RACE),
    Mutation("a tile is given back before it is multiplied with P", "mbarrier_wait(filled(base, buffer), stage.exchange.phase());", "release_tile(base, stage); mbarrier_wait(filled(base, buffer), stage.exchange.phase());", f"{RACE}|arriv"),
    Mutation("operands of V are replaced while products read them", "wgmma_wait<kOperands / kBatch - 1>();", "", "registers of lane", behind="const int k = step / kPairs;"),
    Mutation("P is read without a fence", "fence_proxy_async();", "", "fence.proxy.async", behind=STORED),
    Mutation("P is read before it is there", "mbarrier_wait(filled(base, buffer), stage.exchange.phase());", "", f"{RACE}|uninitialised"),
    Mutation("a warp arrives before its lanes have stored P", "__syncwarp();\n  release(filled(base, buffer));", "release(filled(base, buffer));", RACE),
    Mutation("Q is converted before it has landed", "mbarrier_wait(q_full(base, 0), turns.of(Turns::kQuery));", "", f"{RACE}|uninitialised"),
    Mutation("Q is read before the others have converted it", "named_barrier_sync(kPairBarrier, 256);", "", f"{RACE}|fence", behind=f"{CONVERT}\n      fence_proxy_async();"),
    Mutation("Q is read without a fence", "fence_proxy_async();", "", "fence.proxy.async", behind=CONVERT),
    Mutation("the scale of the token before", "token / Config::kBoxTokens * kScaleBoxBytes + token % Config::kBoxTokens * kScaleBytes", "(token > 0 ? token - 1 : 0) / Config::kBoxTokens * kScaleBoxBytes + (token > 0 ? token - 1 : 0) % Config::kBoxTokens * kScaleBytes", WRONG),
    Mutation("scales that have not landed", "mbarrier_wait(scales_full(base, stage.scales.stage()), stage.scales.phase());", "", f"{RACE}|uninitialised"),
    Mutation("scales are given back before they were read", "mbarrier_init(scales_empty(base, i), 8)", "mbarrier_init(scales_empty(base, i), 1)", ""),
    Mutation("scores by the first group's scale", "of.groups[e / 2 % 2][g]", "of.groups[e / 2 % 2][0]", f"{WRONG}|lse: "),
    Mutation("a group's sum goes on from what is there", "k % (2 * kGroupSteps) > 0", "k > 0", f"{WRONG}|lse: |uninitialised|accumulator"),
    Mutation("V of a token by the share of the one before", "pack2<Fp16>(share, next)", "pack2<Fp16>(share, share)", WRONG),
    Mutation("V without its group's scale", "now[4 * i + e] = multiply2(now[4 * i + e], factors[e / 2]);", "", WRONG),
    Mutation("probabilities without their token's scale", "pack2<Fp16>(p[0] * of.token[k / 2 % 2], p[1] * of.token[k / 2 % 2])", "pack2<Fp16>(p[0], p[1])", WRONG),
    Mutation("scores without Q's unit", "unit * bits_float((exponent - 14) << 23)", "unit", f"{WRONG}|lse: ", file="operands.cuh"),
    Mutation("the rotary part is left out", "fmaf(rope[4 * h + e], scale_log2, -term[2 + e % 2])", "-term[2 + e % 2]", f"{WRONG}|lse: "),
    Mutation("O does not follow its rows' references", "Own ? raised : warp_any(others != 0)", "false", WRONG),
    Mutation("sums do not follow what the other warpgroup raised", "if (!warp_any(raised != 0)) return;", "return;", f"{WRONG}|lse: "),
    Mutation("the first tile takes the reference that it finds", "i == 0 || passes", "passes", f"{WRONG}|lse: "),
    Mutation("the first tile's factor is taken for a later one's", "i == 0 ? 1.f : exp2_approx(-more)", "exp2_approx(-more)", f"{WRONG}|lse: "),
    Mutation("scores stay relative to a reference that has risen", "s[4 * h + e] -= more[e];", "", f"{WRONG}|lse: "),
    Mutation("references are read before they are there", "named_barrier_sync(barrier, 128);", "", f"{RACE}|uninitialised", behind="store_shared_f32(maxima_at(base, group) + 4 * thread, more);\n    }"),
    Mutation("both warpgroups' sums as if relative to the same", "if (i == tiles) follow(base, buffer, load_shared_s32(raised_at(base, buffer)), sum);", "", f"{WRONG}|lse: "),
    Mutation("columns in another order", "permute_bytes(word, word, 0x3120)", "permute_bytes(word, word, 0x2130)", WRONG, file="operands.cuh"),
    Mutation("columns of results in the order of the operand", "16 * unit + 2 * (lane_id() >> 2)", "16 * unit + (lane_id() >> 2)", f"{WRONG}|misaligned", file="operands.cuh"),
    Mutation("the columns of a pair of partial results", "acc[c][i + 2]", "acc[c][i]", WRONG),
    Mutation("the tail of V is not cleared", "if (left < kTokens) clear_behind(base, stage, left);", "", ""),
    Mutation("scales of tokens that the request does not have", "token < left ? load_shared_f32(token_scales(scales, token) + 4 * group) : 0.f", "load_shared_f32(token_scales(scales, token) + 4 * group)", "uninitialised"),
)  # fmt: skip

# Of tiles of 64 rows, whose operands are few, and without scales, which are waited for.
WIDE_MUTATIONS = (
    Mutation("operands of the scores are replaced while products read them", "wgmma_wait<kOperands / kBatch - 1>();", "", "registers of lane", behind="// The products that read these registers are done."),
    Mutation("scores are read before all products are done", "wgmma_wait<0>();\n  wgmma_fence_operand(s);", "wgmma_wait<2>(); wgmma_fence_operand(s);", "accumulator of lane"),
    Mutation("codes of the other warpgroup's tile are read before its tail is cleared", "if (kWaitsFirst) wait_for_p();", "values[0].load_codes(base, stage, 0); if (kWaitsFirst) wait_for_p();", RACE),
)  # fmt: skip

# Of wide tiles of several scales a token, whose scores are summed up in units of one after the other.
GRADED_MUTATIONS = (
    Mutation("scores on the way to another scale", "ratio(unit, next)", "ratio(next, unit)", f"{WRONG}|lse: "),
    Mutation("scores by the first scale", "store_shared_f32(grade_at(base, group, kLastUnit) + 4 * token, unit);", "store_shared_f32(grade_at(base, group, kLastUnit) + 4 * token, load_scale(scales, left, token, 0));", f"{WRONG}|lse: "),
)  # fmt: skip

# Of the schedule that stores V.
STORED_MUTATIONS = (
    Mutation("codes of a line that has not landed", "mbarrier_wait(full(base, wraps ? at - kRing : at), stage.lines.phase() ^ (wraps ? 1 : 0));", "", f"{RACE}|uninitialised"),
    Mutation("scales that have not landed", "mbarrier_wait(scales_full(base, stage.scales.stage()), stage.scales.phase());", "", f"{RACE}|uninitialised"),
    Mutation("a line is given back before the other lanes have read it", "__syncwarp();", "", RACE, behind="void release_lines(smem_t base, const Stage& stage) {"),
    Mutation("the rotary part is given back before its product is done", "release_lines<kCodeLines, kLines>(base, stage);", "", f"{RACE}|arriv|deadlock"),
    Mutation("scales are given back by one warp", "mbarrier_init(scales_empty(base, i), 4)", "mbarrier_init(scales_empty(base, i), 1)", ""),
    Mutation("operands are replaced while products read them", "wgmma_wait<kOperands / kBatch - 1>();", "", "registers of lane"),
    Mutation("scores are read before all products are done", "wgmma_wait<0>();\n  wgmma_fence_operand(s);", "wgmma_wait<1>(); wgmma_fence_operand(s);", f"accumulator of lane|{RACE}"),
    Mutation("a tile of the other warpgroup is not waited for", "mbarrier_wait(seen(base, group ^ 1), turn.phase());", "", f"{RACE}|uninitialised|deadlock"),
    Mutation("V is stored while others read that of the tile before", "if (step == 0) named_barrier_sync(kGroupBarrier + group, 128);", "", RACE),
    Mutation("V and P are read without a fence", "fence_proxy_async();", "", "fence.proxy.async", behind="store_column_probabilities<Fp16, kRows>(p_at(base, group), s, state, 1.f);"),
    Mutation("V and P are read before the others have stored them", "named_barrier_sync(barrier, 128);", "", f"{RACE}|uninitialised", behind="store_column_probabilities<Fp16, kRows>(p_at(base, group), s, state, 1.f);\n  fence_proxy_async();"),
    Mutation("columns of V in the order of the operand", "2 * (lane_id() >> 4) + k", "2 * k + (lane_id() >> 4)", WRONG),
    Mutation("scales of tokens that the request does not have", "if (token >= left) return;", "", f"uninitialised|{WRONG}"),
    Mutation("the second step of a load has the first one's scales", "multiply2_by<1>(now[e], scales_of[e % 2])", "multiply2_by<0>(now[e], scales_of[e % 2])", WRONG),
    Mutation("the other warpgroup's tile is said to be there before it is", "wait_tile(base, stage);\n  release(seen(base, group));", "release(seen(base, group));\n  wait_tile(base, stage);", f"{RACE}|uninitialised|deadlock"),
    Mutation("the rotary part is left out", "rope[i] * scale_log2 - kHeadroom", "-kHeadroom", f"{WRONG}|lse: "),
    Mutation("probabilities without their headroom", "s[i] += kHeadroom;", "", f"{WRONG}|lse: "),
    Mutation("O does not follow its rows' references", "scale_columns<kRows>(acc[c], rescale);", "", WRONG),
    Mutation("O without the tensor's scale", "factor[j] *= unit;", "", WRONG),
    Mutation("half of O is the other warpgroup's", "join_values(base, group, acc);", "", WRONG),
    Mutation("Q is converted before it has landed", "mbarrier_wait(q_full(base, 0), query.phase());", "", f"{RACE}|uninitialised"),
    Mutation("Q is read before the others have converted it", "named_barrier_sync(kPairBarrier, 256);", "", f"{RACE}|fence", behind=f"{CONVERT}\n      fence_proxy_async();"),
    Mutation("the room of Q is given back before O has passed through it", "mbarrier_arrive(q_empty(base, 0));", "", "deadlock"),
)  # fmt: skip


@pytest.fixture(scope="session")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> Mutants:
    folder = small_folder(tmp_path_factory.mktemp("mutants") / "small", "fp8_ds_mla", d_v=256, rows=16)
    return Mutants.made(folder, MUTATIONS, tmp_path_factory)


def reports_of(folder: Path) -> Iterator[str]:
    """Run the problems under one schedule after the other, and tell what is wrong."""
    mla = mlaforge.load(folder, device="sim")
    for seed in range(9):
        for i, problem in enumerate(PROBLEMS[:5]):
            # As many multiprocessors each time: how a call of a shape is divided is worked out once.
            mla.backend.options = SimulatorOptions(seed=seed, mode=MODES[seed % 3], sms=4 - i % 2 * 3)
            yield from run_problem(mla, replace(problem, seed=seed), "cpu").failures


@pytest.mark.parametrize("number", range(len(MUTATIONS)), ids=lambda i: MUTATIONS[i].name.replace(" ", "-"))
def test_every_mutation_is_caught(number: int, mutants: Mutants, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(MUTATIONS[number], reports_of(mutants.switch(number, monkeypatch)))


@pytest.fixture(scope="session")
def wide_mutants(tmp_path_factory: pytest.TempPathFactory) -> Mutants:
    folder = small_folder(tmp_path_factory.mktemp("mutants") / "wide", "fp8_e4m3", rows=64)
    return Mutants.made(folder, WIDE_MUTATIONS, tmp_path_factory)


@pytest.mark.parametrize("number", range(len(WIDE_MUTATIONS)), ids=lambda i: WIDE_MUTATIONS[i].name.replace(" ", "-"))
def test_every_mutation_of_wide_tiles_is_caught(
    number: int, wide_mutants: Mutants, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_caught(WIDE_MUTATIONS[number], reports_of(wide_mutants.switch(number, monkeypatch)))


@pytest.fixture(scope="session")
def graded_mutants(tmp_path_factory: pytest.TempPathFactory) -> Mutants:
    folder = small_folder(tmp_path_factory.mktemp("mutants") / "graded", "fp8_ds_mla", d_v=256, rows=64)
    return Mutants.made(folder, GRADED_MUTATIONS, tmp_path_factory)


@pytest.mark.parametrize(
    "number", range(len(GRADED_MUTATIONS)), ids=lambda i: GRADED_MUTATIONS[i].name.replace(" ", "-")
)
def test_every_mutation_of_grades_is_caught(
    number: int, graded_mutants: Mutants, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_caught(GRADED_MUTATIONS[number], reports_of(graded_mutants.switch(number, monkeypatch)))


@pytest.fixture(scope="session")
def stored_mutants(tmp_path_factory: pytest.TempPathFactory) -> Mutants:
    folder = small_folder(
        tmp_path_factory.mktemp("mutants") / "stored", "nvfp4", d_v=256, rows=16, stages=1, schedule="stored"
    )
    return Mutants.made(folder, STORED_MUTATIONS, tmp_path_factory)


@pytest.mark.parametrize(
    "number", range(len(STORED_MUTATIONS)), ids=lambda i: STORED_MUTATIONS[i].name.replace(" ", "-")
)
def test_every_mutation_of_the_stored_schedule_is_caught(
    number: int, stored_mutants: Mutants, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_caught(STORED_MUTATIONS[number], reports_of(stored_mutants.switch(number, monkeypatch)))


def test_nothing_is_found_where_no_mutation_is_on(
    mutants: Mutants, stored_mutants: Mutants, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not list(reports_of(mutants.switch(-1, monkeypatch)))
    assert not list(reports_of(stored_mutants.switch(-1, monkeypatch)))
