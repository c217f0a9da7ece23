"""Kernels for pages of less than a tile: by several warps that share the boxes, and by threads that copy single tokens.

Under random schedules, and broken one way at a time as test_mutations.py does those for pages of 64.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import mlaforge
from mlaforge.compiler import compile_kernel
from mlaforge.simulator import SimulatorOptions
from mlaforge.verify import Problem, run_problem
from mlaforge_generator.emit import write_folder
from mlaforge_generator.plan import make_plan
from mlaforge_generator.render import render
from mlaforge_generator.resources import find_spec
from mlaforge_generator.spec import Spec, load_spec, parse_spec
from mutants import Mutants, Mutation, require_caught

MODES = ("random", "lazy", "eager")
SMALL = """
name: small
model: {{num_attention_heads: 8, kv_lora_rank: {d_v}, qk_nope_head_dim: 64, qk_rope_head_dim: {rope}, v_head_dim: 64}}
cache: {{dtype: {dtype}, page_size: {page_size}}}
kernels: {{decode: {{schedule: {schedule}, stages: {stages}}}}}
"""


def small_folder(
    into: Path,
    schedule: str,
    page_size: int,
    *,
    d_v: int = 128,
    rope: int = 64,
    dtype: str = "bf16",
    stages: int | str = "auto",
) -> Path:
    text = SMALL.format(schedule=schedule, page_size=page_size, d_v=d_v, rope=rope, dtype=dtype, stages=stages)
    write_folder(into, render(make_plan(parse_spec(text))))
    return into


# ---- Unbroken --------------------------------------------------------------------------------------------------------

# Tails of every kind, requests without a token, split requests, borders of their own, kv heads, several row tiles.
PROBLEMS = (
    Problem(lengths=(70, 460), h_q=16),
    Problem(lengths=(1, 64, 0, 195, 130), h_q=15, table_extra_columns=3),
    Problem(lengths=(2, 130, 0), s_q=4, h_q=4, causal=True),
    Problem(lengths=(300, 65), h_q=33, h_kv=3, s_q=2, causal=True),
    Problem(lengths=(350, 129), h_q=70, nan_request=1),
)
KERNELS = {
    "plain, half a subtile behind V, fp16": ("plain", 1, 128, 32, "fp16"),
    "skewed, nothing behind V": ("skewed", 1, 256, 0, "bf16"),
}


def check(folder: Path) -> None:
    mla = mlaforge.load(folder, device="sim")
    for seed, problem in enumerate(PROBLEMS):
        mode = MODES[seed % 3]
        mla.backend.options = SimulatorOptions(seed=seed, mode=mode, sms=1 + 3 * (seed % 2))
        errors = run_problem(mla, problem, "cpu")
        assert errors.ok, f"{problem} {mode} {seed}: {errors.failures}"


@pytest.mark.parametrize("kernel", KERNELS)
def test_small_kernels_pass_random_schedules(kernel: str, tmp_path: Path) -> None:
    schedule, page_size, d_v, rope, dtype = KERNELS[kernel]
    check(small_folder(tmp_path / "small", schedule, page_size, d_v=d_v, rope=rope, dtype=dtype))


# ---- Broken ----------------------------------------------------------------------------------------------------------

RACE = "race"
DEADLOCK = "deadlock"
WRONG = "out: "
UNINITIALISED = "uninitialised"
UNFENCED = "no fence.proxy.async"
UNWAITED = "a thread ends with asynchronous copies"
EMPTY = "mbarrier_wait(empty(base, ring.stage()), ring.phase() ^ 1);"
COPY = "gather_subtile<Config>(kv, gather, page, subtile_of(place), tokens, subtile_at(base, ring.stage()));"
ARRIVE = "copy_async_arrive(full(base, ring.stage()));"
HEADER = "small_pages.cuh"

SWAPPED = (
    Mutation("no fence between the threads' copies and the products", "fence_proxy_async();", "", UNFENCED, behind="MLAFORGE_DEVICE void add_scores("),
    Mutation("a subtile counts as landed one thread early", "mbarrier_init(full(base, i), 64)", "mbarrier_init(full(base, i), 63)", ""),
    Mutation("a subtile waits for one thread too many", "mbarrier_init(full(base, i), 64)", "mbarrier_init(full(base, i), 65)", DEADLOCK),
    Mutation("a thread arrives before it copies", f"{COPY}\n        {ARRIVE}", f"{ARRIVE} {COPY}", ""),
    Mutation("a subtile is replaced while it is in use", EMPTY, "", RACE, behind="gather.load_entries(table, block + 1, kv_end);"),
    Mutation("a loader leaves before its copies have landed", "copy_async_wait();", "", UNWAITED),
    Mutation("both loaders note what the part shares", "loader == 0 && lane_id() == 0", "lane_id() == 0", RACE),
    Mutation("the entries of the block before", "gather.load_entries(table, block + 1, kv_end);", "gather.load_entries(table, block, kv_end);", WRONG),
    Mutation("the page of the neighbour", "4 * step % 32 + (lane_id() >> 3)", "(4 * step + (lane_id() >> 3)) % 32 ^ 1", f"{WRONG}|bounds", file=HEADER),
    Mutation("the token of the neighbour", "at / 4 * (4 * Warps) + at % 4", "at / 4 * (4 * Warps) + (at + 1) % 4", f"{WRONG}|bounds", file=HEADER),
    Mutation("both loaders copy the same tokens", "4 * loader + (lane_id() >> 3)", "lane_id() >> 3", f"{RACE}|{UNINITIALISED}|{WRONG}", file=HEADER),
    Mutation("the last token is left out", "4 * Warps * step < tokens - first", "4 * Warps * step + 1 < tokens - first", f"{UNINITIALISED}|{WRONG}", file=HEADER),
    Mutation("entries behind the last token are read", "token < kv_end", "true", "out of bounds", file=HEADER),
    Mutation("no swizzle", "(lane_id() & 7) ^ (first & 7)", "lane_id() & 7", WRONG, file=HEADER),
    Mutation("the columns of another subtile", "128 * subtile + 16 * (lane_id() & 7)", "128 * (subtile ^ 1) + 16 * (lane_id() & 7)", f"{WRONG}|bounds", file=HEADER),
)  # fmt: skip
SKEWED = (
    Mutation("no fence before the first scores", "fence_proxy_async();", "", UNFENCED, behind="state.reset();"),
    Mutation("no fence before the next scores", "fence_proxy_async();", "", UNFENCED, behind="if (!last) {"),
    Mutation("no fence behind the columns behind V", "fence_proxy_async();", "", UNFENCED, behind="mbarrier_wait(rope_full(base, rope.stage()), rope.phase());"),
    Mutation("only one warp arrives for Q", "if (loader > 0 || lane_id() > 0) mbarrier_arrive(full(base, ring.stage()));", "", DEADLOCK),
    Mutation("an item is replaced before a loader has read it", "mbarrier_init(item_empty(base, i), 352)", "mbarrier_init(item_empty(base, i), 320)", ""),
    Mutation("the columns behind V have landed one thread early", "mbarrier_init(rope_full(base, i), 32)", "mbarrier_init(rope_full(base, i), 31)", ""),
    Mutation("those are replaced while they are in use", "mbarrier_wait(rope_empty(base, ring.stage()), ring.phase() ^ 1);", "", RACE),
    Mutation("a tile is replaced while it is in use", EMPTY, "", RACE, behind="ring.advance();\n    const int end = item.first_block + item.blocks;"),
    Mutation("the swizzle forgets lines that are four apart", "(4 * Warps * step & 4) << 4", "0 * (step << 4)", WRONG, file=HEADER),
    Mutation("the second half of the entries is the first", "entry[step / 8]", "entry[0 * step]", WRONG, file=HEADER),
)  # fmt: skip
BOXES = (
    Mutation("both loaders bring the same boxes", "loader + copy / Count * C::kLoaders", "copy / Count * C::kLoaders", f"{RACE}|{UNINITIALISED}|{WRONG}", file=HEADER),
    Mutation("a loader's bytes are not counted", "mine * C::kBoxTokens * Count * 128", "mine * C::kBoxTokens * Count * 128 * (loader == 0)", "", file=HEADER),
    Mutation("a box too many, whose page means nothing", "needed_boxes<C>(block, kv_end) + C::kLoaders - 1 - loader", "needed_boxes<C>(block, kv_end) + 2 * C::kLoaders - 1 - loader", "", file=HEADER),
    Mutation("a tile counts as landed for one loader", "mbarrier_init(full(base, i), 2)", "mbarrier_init(full(base, i), 1)", ""),
    Mutation("only one loader arrives for Q", "release(full(base, ring.stage()));", "", DEADLOCK),
)  # fmt: skip
ALL = {("swapped", 1): SWAPPED, ("skewed", 1): SKEWED, ("skewed", 16): BOXES}


@pytest.fixture(scope="session")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Mutants]:
    made = {}
    for (schedule, page_size), mutations in ALL.items():
        stages = 2 if schedule == "swapped" else 3
        into = tmp_path_factory.mktemp("mutants") / "small"
        folder = small_folder(into, schedule, page_size, stages=stages)
        made[schedule, page_size] = Mutants.made(folder, mutations, tmp_path_factory)
    return made


def reports_of(folder: Path, seeds: int = 6) -> Iterator[str]:
    """Run the problems under one schedule after the other, and tell what is wrong."""
    mla = mlaforge.load(folder, device="sim")
    for seed in range(seeds):
        for problem in PROBLEMS[:3]:
            mla.backend.options = SimulatorOptions(seed=seed, mode=MODES[seed % 3], sms=1 + seed % 2 * 3)
            yield from run_problem(mla, problem, "cpu").failures


@pytest.mark.parametrize(
    ("kernel", "number"),
    # By turns, so that the workers of a parallel run compile different kernels.
    sorted(
        ((kernel, number) for kernel, mutations in ALL.items() for number in range(len(mutations))),
        key=lambda each: each[1],
    ),
    ids=lambda each: str(each),
)
def test_every_mutation_is_caught(
    kernel: tuple[str, int],
    number: int,
    mutants: dict[tuple[str, int], Mutants],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_caught(ALL[kernel][number], reports_of(mutants[kernel].switch(number, monkeypatch)))


@pytest.mark.parametrize("kernel", ALL, ids=str)
def test_nothing_is_found_where_no_mutation_is_on(
    kernel: tuple[str, int], mutants: dict[tuple[str, int], Mutants], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not list(reports_of(mutants[kernel].switch(-1, monkeypatch), seeds=3))


# ---- For the GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_copies_by_threads_fit_the_loaders_registers(tmp_path: Path) -> None:
    """No warpgroup has fewer registers than the loaders of this one."""
    spec = load_spec(find_spec("deepseek_v3"))
    tree = spec.model_dump(exclude_none=True)
    tree["cache"]["page_size"] = 1
    write_folder(tmp_path / "pages", render(make_plan(Spec.model_validate(tree))))
    (report,) = compile_kernel(tmp_path / "pages" / "decode.cu").with_sass().kernels.values()
    assert report.spill_stores == report.spill_loads == report.stack_frame == 0 and not report.serialized
    assert report.sass is not None and {"LDGSTS", "ARRIVES"} <= set(report.sass)


# ---- Calls -----------------------------------------------------------------------------------------------------------


def test_pages_of_a_token_may_not_lie_2_gib_apart(
    mutants: dict[tuple[str, int], Mutants], monkeypatch: pytest.MonkeyPatch
) -> None:
    mla = mlaforge.load(mutants["swapped", 1].switch(-1, monkeypatch), device="sim")
    q = torch.zeros(1, 1, 8, 192, dtype=torch.bfloat16)
    far = torch.empty((1 << 30) + 192, dtype=torch.bfloat16).as_strided((2, 1, 192), (1 << 30, 192, 1))
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    message = "kv_cache has a stride of 2147483648 B in dimension 0; with pages of 1 it must be below 2^31 B"
    with pytest.raises(ValueError, match=re.escape(message)):
        mla.decode(q, far, table, lengths)
