"""The swapped kernels under random schedules, and broken one way at a time as test_mutations.py does the 64-row one.

The mutants are of a small spec: little of V and of shared memory, so that a kernel is quick to compile and every buffer
is used again soon.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlaforge
from mlaforge.manifest import read_manifest
from mlaforge.simulator import SimulatorOptions
from mlaforge.trace import default_problem, trace_decode
from mlaforge.verify import Problem, run_problem
from mlaforge_generator.emit import write_folder
from mlaforge_generator.plan import Plan, make_plan
from mlaforge_generator.render import render
from mlaforge_generator.spec import parse_spec
from mutants import Mutants, Mutation, require_caught

GENERATED = Path(__file__).parents[1] / "generated"
MODES = ("random", "lazy", "eager")

SMALL = """
name: small
model: {{num_attention_heads: 8, kv_lora_rank: {d_v}, qk_nope_head_dim: 64, qk_rope_head_dim: {rope}, v_head_dim: 64}}
cache: {{dtype: {dtype}, page_size: {page_size}}}
kernels: {{decode: {{schedule: swapped, tile_rows: {rows}, stages: {stages}}}}}
"""


def small_plan(
    *, rows: int, d_v: int = 128, rope: int = 64, dtype: str = "bf16", page_size: int = 16, stages: int | str = 3
) -> Plan:
    text = SMALL.format(rows=rows, d_v=d_v, rope=rope, dtype=dtype, page_size=page_size, stages=stages)
    return make_plan(parse_spec(text))


def small_folder(into: Path, plan: Plan) -> Path:
    write_folder(into, render(plan))
    return into


# ---- Unbroken --------------------------------------------------------------------------------------------------------

# Rows up to a full tile and beyond it, borders of their own, rows and requests without a token, split requests,
# rescaling.
PROBLEMS = (
    Problem(lengths=(460, 70), h_q=16),
    Problem(lengths=(1300,), h_q=3, table_extra_columns=3),
    Problem(lengths=(2, 130, 0), s_q=4, h_q=4, causal=True),
    Problem(lengths=(400, 130), h_q=5, softmax_scale=150.0),
    Problem(lengths=(0, 64, 0, 200, 1), h_q=15),
    Problem(lengths=(500, 90), h_q=10, s_q=3, q_gain=8, softmax_scale=0.3),
    Problem(lengths=(300, 65), h_q=33, h_kv=3, s_q=2, causal=True),
    Problem(lengths=(350, 129), h_q=17, nan_request=1),
    Problem(lengths=(330,), h_q=40),
    Problem(lengths=(200, 65), h_q=57, s_q=2, causal=True),
)
KERNELS = {
    "16 rows, half a subtile behind V, pages of a token": small_plan(rows=16, rope=32, page_size=1, stages=1),
    "32 rows, fp16, nothing behind V, pages of 128": small_plan(
        rows=32, d_v=256, rope=0, dtype="fp16", page_size=128, stages="auto"
    ),
    "8 rows": small_plan(rows=8),
    "24 rows, fp16, pages of a token": small_plan(rows=24, dtype="fp16", page_size=1),
    "40 rows of 256 columns, half a subtile behind V": small_plan(rows=40, d_v=256, rope=32, stages=1),
    "48 rows of 256 columns, pages of 64": small_plan(rows=48, d_v=256, rope=32, page_size=64, stages="auto"),
    "56 rows, nothing behind V": small_plan(rows=56, rope=0, stages="auto"),
}


def check(folder: Path, problems: tuple[Problem, ...]) -> None:
    mla = mlaforge.load(folder, device="sim")
    for seed, problem in enumerate(problems):
        mode = MODES[seed % 3]
        mla.backend.options = SimulatorOptions(seed=seed, mode=mode, sms=1 + 3 * (seed % 2))
        errors = run_problem(mla, problem, "cpu")
        assert errors.ok, f"{problem} {mode} {seed}: {errors.failures}"


@pytest.mark.parametrize("kernel", KERNELS)
def test_small_kernels_pass_random_schedules(kernel: str, tmp_path: Path) -> None:
    check(small_folder(tmp_path / "small", KERNELS[kernel]), (*PROBLEMS, *PROBLEMS[1:]))


def test_every_decode_kernel_of_a_spec_serves_its_rows() -> None:
    folder = GENERATED / "deepseek_v3"
    of_rows = {rows: read_manifest(folder).decode_for(rows).source.name for rows in (5, 16, 17, 32, 33)}
    assert of_rows == {5: "decode_16.cu", 16: "decode_16.cu", 17: "decode_32.cu", 32: "decode_32.cu", 33: "decode.cu"}
    check(folder, tuple(Problem(lengths=(250, 7, 0, 131), h_q=rows) for rows in of_rows))
    # A trace is of the kernel that runs.
    problem = default_problem(read_manifest(folder))
    timeline = trace_decode(folder)
    assert f"decode_16.cu, block (0, 0, 0): {problem};" in timeline.title and timeline.fault is None
    assert [lane.group for lane in timeline.warps][::4] == ["warpgroup 0", "warpgroup 1", "tile loader"]
    fills = {
        lane.name: sum(span.kind == "tma" for span in lane.spans)
        for lane in timeline.buffers
        if re.fullmatch(r"K \d+", lane.name)
    }
    tiles = sum(-(-length // 64) for length in problem.lengths)
    assert len(fills) == 25 and sum(fills.values()) == 9 * tiles and min(fills.values()) >= 2


# ---- Broken ----------------------------------------------------------------------------------------------------------


RACE = "race"
DEADLOCK = "deadlock"
WRONG = "out: "
MUTATIONS = (
    Mutation("P is read before the other warps have stored it", "named_barrier_sync(barrier, 128);", "", f"{RACE}|uninitialised", behind="store_column_probabilities<Element, kRows>("),
    Mutation("P is replaced while other warps' products read it", "named_barrier_any(barrier, 128, passes_reference<kRows>(s, state, scale_log2, kSlack))", "false", RACE),
    Mutation("a warpgroup runs ahead of the tiles of the other", "mbarrier_wait(scored(base, group ^ 1), turn.phase());", "", RACE),
    Mutation("scores of a subtile that has not landed", "mbarrier_wait(full(base, ring.stage()), ring.phase());", "", f"{RACE}|uninitialised"),
    Mutation("subtiles are given back before their product is done", "wgmma_wait<Left - 1>();\n    release(empty(base, ring.stage()));", "release(empty(base, ring.stage())); wgmma_wait<Left - 1>();", RACE),
    Mutation("the columns behind V are free one warp early", "mbarrier_init(empty(base, i), 4)", "mbarrier_init(empty(base, i), 3)", ""),
    Mutation("Q is replaced before the sums were joined", "mbarrier_init(q_empty(base, i), 256)", "mbarrier_init(q_empty(base, i), 128)", ""),
    Mutation("Q is replaced without a fence", "fence_proxy_async();\n      mbarrier_arrive(q_empty(base, 0));", "mbarrier_arrive(q_empty(base, 0));", "no fence.proxy.async"),
    Mutation("no barrier between what one warpgroup sends and the other adds", "named_barrier_sync(kPairBarrier, 256);", "", f"{RACE}|{DEADLOCK}", behind="if (group == 1) send_half<0>(words, acc);"),
    Mutation("the statistics take no turns", "buffer ^= 1;", "", RACE),
    Mutation("the other warps' maxima are read too early", "named_barrier_sync(barrier, 128);", "", f"{RACE}|uninitialised", file="transposed.cuh", behind="void raise_reference("),
    Mutation("O is not rescaled", "scale_columns<kRows>(acc[c], rescale);", "", WRONG),
    Mutation("the sums are not rescaled", "state.sum[j] *= rescale[j];", "", f"{WRONG}|lse: ", file="transposed.cuh"),
    Mutation("P is stored without its swizzle", "line * 128 + ((chunk ^ (line & 7)) << 4)", "line * 128 + (chunk << 4)", RACE, file="transposed.cuh"),
    Mutation("the mask is off by one", "first + accumulator_row(i / 2 % 2) >= border[column_of(i)]", "first + accumulator_row(i / 2 % 2) > border[column_of(i)]", "", file="transposed.cuh"),
    Mutation("the tail of V is not cleared", "kv_end - token < kTokens", "kv_end < 0", ""),
)  # fmt: skip


# More rows than a warp has lanes, and the last 8 of them without a second 8 beside them.
WIDE_PROBLEMS = (
    Problem(lengths=(330, 70), h_q=40),
    Problem(lengths=(200, 65), h_q=33, s_q=2, causal=True),
    Problem(lengths=(500,), h_q=44, softmax_scale=150.0),
)
WIDE_MUTATIONS = (
    Mutation("the last 8 rows are not stored", "stmatrix_x2_transposed(tile + line * 128 + ((chunk ^ (lane & 7)) << 4), pack(Rows / 2 - 4), pack(Rows / 2 - 2));", "(void)line;", f"{RACE}|uninitialised|{WRONG}", file="transposed.cuh"),
    Mutation("the last 8 rows are stored without their swizzle", "line * 128 + ((chunk ^ (lane & 7)) << 4)", "line * 128 + (chunk << 4)", RACE, file="transposed.cuh"),
    Mutation("rows behind the tile's are stored", "C::kRows % 16 != 0 && r >= C::kRows", "false", "", file="transposed.cuh"),
    Mutation("rows behind a warp's lanes have the factors of others", "of_rows[j / 8]", "of_rows[0]", WRONG),
    Mutation("only the rows of a warp's lanes have a log-sum-exp", "(kTurns > 1 ? thread == r : thread < kRows)", "i == 0 && (kTurns > 1 ? thread == r : thread < kRows)", "lse: "),
    Mutation("the end of the piece is not handed over", "store_shared_s32(base + kOffsetPiece + 4, schedule.to);", "", "uninitialised"),
)  # fmt: skip


@pytest.fixture(scope="session")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> Mutants:
    folder = small_folder(tmp_path_factory.mktemp("mutants") / "small", small_plan(rows=16))
    return Mutants.made(folder, MUTATIONS, tmp_path_factory)


@pytest.fixture(scope="session")
def wide_mutants(tmp_path_factory: pytest.TempPathFactory) -> Mutants:
    folder = small_folder(tmp_path_factory.mktemp("mutants") / "small", small_plan(rows=40))
    return Mutants.made(folder, WIDE_MUTATIONS, tmp_path_factory)


def reports_of(folder: Path, problems: tuple[Problem, ...] = PROBLEMS[:5]) -> Iterator[str]:
    """Run the problems under one schedule after the other, and tell what is wrong."""
    mla = mlaforge.load(folder, device="sim")
    for seed in range(9):
        for problem in problems:
            mla.backend.options = SimulatorOptions(seed=seed, mode=MODES[seed % 3], sms=1 + seed % 2 * 3)
            yield from run_problem(mla, problem, "cpu").failures


@pytest.mark.parametrize("number", range(len(MUTATIONS)), ids=lambda i: MUTATIONS[i].name.replace(" ", "-"))
def test_every_mutation_is_caught(number: int, mutants: Mutants, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(MUTATIONS[number], reports_of(mutants.switch(number, monkeypatch)))


def test_nothing_is_found_where_no_mutation_is_on(mutants: Mutants, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(reports_of(mutants.switch(-1, monkeypatch)))


@pytest.mark.parametrize("number", range(len(WIDE_MUTATIONS)), ids=lambda i: WIDE_MUTATIONS[i].name.replace(" ", "-"))
def test_every_mutation_of_40_rows_is_caught(
    number: int, wide_mutants: Mutants, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_caught(WIDE_MUTATIONS[number], reports_of(wide_mutants.switch(number, monkeypatch), WIDE_PROBLEMS))


def test_nothing_is_found_in_40_rows_where_no_mutation_is_on(
    wide_mutants: Mutants, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not list(reports_of(wide_mutants.switch(-1, monkeypatch), WIDE_PROBLEMS))
