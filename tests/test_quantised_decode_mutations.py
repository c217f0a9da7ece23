"""The decode kernels for quantised caches, broken one way at a time as test_mutations.py does the 64-row one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import mlaforge
from mlaforge.simulator import SimulatorOptions
from mlaforge.verify import run_problem
from mutants import Mutants, Mutation, require_caught
from test_quantised_decode import MODES, PROBLEMS, small_folder

RACE = "race"
WRONG = "out: "
MUTATIONS = (
    Mutation("codes of a line that has not landed", "mbarrier_wait(full(base, lines.stage()), lines.phase());", "", f"{RACE}|uninitialised", behind="for (int line = 0; line < kCodeLines; ++line) {"),
    Mutation("a line is given back before the other lanes have read it", "__syncwarp();\n    release(empty(base, lines.stage()));", "release(empty(base, lines.stage()));", RACE),
    Mutation("a line is given back at its beginning", "mbarrier_wait(full(base, lines.stage()), lines.phase());", "mbarrier_wait(full(base, lines.stage()), lines.phase()); release(empty(base, lines.stage()));", f"{RACE}|arriv", behind="for (int line = 0; line < kCodeLines; ++line) {"),
    Mutation("V is replaced while other warps' products read it", "if (subtile == 0) named_barrier_sync(kGroupBarrier + group, 128);", "", RACE),
    Mutation("operands are replaced while the products read them", "wgmma_wait<kOperands - 1>();", "", "registers of lane"),
    Mutation("V and P are read without a fence", "fence_proxy_async();", "", "fence.proxy.async", behind="store_scaled_probabilities<kRows>(p_at(base, group), s, of.token, state);"),
    Mutation("V and P are read before the other warps have stored them", "named_barrier_sync(barrier, 128);", "", f"{RACE}|uninitialised", behind="store_scaled_probabilities<kRows>(p_at(base, group), s, of.token, state);\n  fence_proxy_async();"),
    Mutation("Q is converted before it has landed", "mbarrier_wait(q_full(base, 0), query.phase());", "", f"{RACE}|uninitialised"),
    Mutation("Q is read before the others have converted it", "named_barrier_sync(kPairBarrier, 256);", "", f"{RACE}|fence", behind="convert_query<Code, kRows, kCodeColumns>(base + kOffsetQ, base + kOffsetUnits);\n      fence_proxy_async();"),
    Mutation("Q is read without a fence", "fence_proxy_async();", "", "fence.proxy.async", behind="convert_query<Code, kRows, kCodeColumns>(base + kOffsetQ, base + kOffsetUnits);"),
    Mutation("the scale of the token before", "token / Config::kBoxTokens * kScaleBoxBytes + token % Config::kBoxTokens * kScaleBytes", "(token > 0 ? token - 1 : 0) / Config::kBoxTokens * kScaleBoxBytes + (token > 0 ? token - 1 : 0) % Config::kBoxTokens * kScaleBytes", WRONG),
    Mutation("scales that have not landed", "mbarrier_wait(scales_full(base, scales.stage()), scales.phase());", "", f"{RACE}|uninitialised"),
    Mutation("scales are given back before they were read", "mbarrier_init(scales_empty(base, i), 4)", "mbarrier_init(scales_empty(base, i), 1)", ""),
    Mutation("the scale of another group of columns", "add_scores(scales_of, left, g, sums[g], s);", "add_scores(scales_of, left, kGroups - 1 - g, sums[g], s);", f"{WRONG}|lse: "),
    Mutation("V without its group's scale", "scale_values(scales_of, left, subtile / kGroupSubtiles, of, values);", "", WRONG),
    Mutation("probabilities without their token's scale", "pack2<Fp16>(p[0] * scale[i / 2 % 2], p[1] * scale[i / 2 % 2])", "pack2<Fp16>(p[0], p[1])", WRONG, file="operands.cuh"),
    Mutation("scores without Q's unit", "load_shared_f32(base + kOffsetUnits + 4 * accumulator_column(j)) * unit", "unit", f"{WRONG}|lse: "),
    Mutation("the rotary part is left out", "s[i] += rope[i];", "", f"{WRONG}|lse: "),
    Mutation("columns come out in the order of the codes", "(chunk & ~1) + k % 2", "(chunk & ~1) + k / 2", WRONG, file="operands.cuh"),
    Mutation("columns of partial results, too", "Operand<Code>::column(8) * (i / 2 % 2)", "8 * (i / 2 % 2)", f"{WRONG}|workspace", file="operands.cuh"),
    Mutation("the tail of V is not cleared", "zero_rows<kTokens>(v_at(base, group), 0, kSubtilesV, kv_end - token);", "", ""),
    Mutation("scales of tokens that the request does not have", "token < left ? load_shared_f32(token_scales(scales, token) + 4 * group) : 0.f", "load_shared_f32(token_scales(scales, token) + 4 * group)", "uninitialised"),
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
            yield from run_problem(mla, problem, "cpu").failures


@pytest.mark.parametrize("number", range(len(MUTATIONS)), ids=lambda i: MUTATIONS[i].name.replace(" ", "-"))
def test_every_mutation_is_caught(number: int, mutants: Mutants, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(MUTATIONS[number], reports_of(mutants.switch(number, monkeypatch)))


def test_nothing_is_found_where_no_mutation_is_on(mutants: Mutants, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(reports_of(mutants.switch(-1, monkeypatch)))
