"""Break the prefill kernel one way at a time: the simulator, or the comparison with float64, finds each fault.

As test_mutations.py does for decode.
"""

from __future__ import annotations

import itertools
import re

import pytest

from mlaforge.api import MLA
from mlaforge.prefill_verify import PrefillProblem, run_problem
from mlaforge.simulator import Simulator, SimulatorOptions
from mutants import Mutants, Mutation, require_caught
from prefilling import Prefill, folder_of, spec_of

SHAPE = (192, 128)
PROBLEMS = (
    # Blocks enough for every stage to be used again, narrow last blocks, a warpgroup with fewer blocks than the other,
    # scores so far apart that rows are rescaled on the way.
    PrefillProblem(q=(200,), k=(522,), heads=2, softmax_scale=40.0),
    # Two sections of heads; a tail, with NaN behind it.
    PrefillProblem(q=(140, 5), k=(140, 300), heads=3, causal=False, nan_sequence=1),
    # Last blocks that just are not narrow, tiles of one block, rows without a token, a margin that must be left alone.
    PrefillProblem(q=(70, 30, 60), k=(200, 20, 64), heads=3, margin=2),
    # Scores that stand out in a middle and a last block, which is narrow for one sequence, by more than float32 has; the
    # last token's only for the last row, a thread's second one.
    PrefillProblem(q=(140, 16), k=(500, 310), heads=2, spike=100),
    # The same by less than that, and in the first block most of all.
    PrefillProblem(q=(70,), k=(390,), heads=2, spike=8),
    PrefillProblem(q=(70, 0, 3), k=(300, 9, 0), heads=2, spike=-300),
)
SCHEDULES = tuple((mode, seed, sms) for seed in (0, 1, 2) for mode in ("random", "lazy", "eager") for sms in (1, 2))


RACE = "race"
DEADLOCK = "deadlock"
WRONG = "out: "
K_FULL = "mbarrier_wait(k_full(base, keys.stage()), keys.phase());"
V_FULL = "mbarrier_wait(v_full(base, values.stage()), values.phase());"

MUTATIONS = (
    # Loads and their buffers
    Mutation("K is replaced while it is in use", "mbarrier_wait(k_empty(base, ring.stage()), ring.phase() ^ 1);", "", "", file="prefill.cu"),
    Mutation("V is replaced while it is in use", "mbarrier_wait(v_empty(base, ring.stage()), ring.phase() ^ 1);", "", "", file="prefill.cu"),
    Mutation("Q is replaced while it is in use", "mbarrier_wait(q_empty(base, buffer), phase ^ 1);", "", "", file="prefill.cu"),
    Mutation("an item is replaced before it was read", "mbarrier_wait(item_empty(base, ring.stage()), ring.phase() ^ 1);", "", "", behind="while (ticket < before + all) {", file="prefill.cu"),
    Mutation("first scores of a K that has not landed", K_FULL, "", f"{RACE}|uninitialised", behind="void first_block(", file="prefill.cu"),
    Mutation("scores of a K that has not landed", K_FULL, "", f"{RACE}|uninitialised", behind="void next_block(", file="prefill.cu"),
    Mutation("P times a V that has not landed", V_FULL, "", f"{RACE}|uninitialised", behind="void next_block(", file="prefill.cu"),
    Mutation("the last P times a V that has not landed", V_FULL, "", f"{RACE}|uninitialised", behind="void last_values(", file="prefill.cu"),
    Mutation("scores of a Q that has not landed", "mbarrier_wait(q_full(base, query), queries.phase());", "", f"{RACE}|uninitialised", behind="void run(", file="prefill.cu"),
    Mutation("K is free one warp early", "8", "7", "", behind="mbarrier_init(k_empty(base, i), ", file="prefill.cu"),
    Mutation("V is free one warp early", "8", "7", "", behind="mbarrier_init(v_empty(base, i), ", file="prefill.cu"),
    Mutation("V is full one lane early", "32", "31", "", behind="mbarrier_init(v_full(base, i), ", file="prefill.cu"),
    Mutation("an item is free one thread early", "320", "319", "", behind="mbarrier_init(item_empty(base, i), ", file="prefill.cu"),
    Mutation("Q is never given back", "if (last) release(q_empty(base, query));", "", DEADLOCK, file="prefill.cu"),
    Mutation("blocks that only others see are not given back", "release(v_empty(base, values.stage()));", "", DEADLOCK, behind="void skip_block(", file="prefill.cu"),
    Mutation("keys of another sequence", "item.k_row + block * kTokens", "block * kTokens", "", behind="void load_keys(", file="prefill.cu"),
    Mutation("rows of Q that are the other warpgroup's", "item.q_row + 64 * group", "item.q_row", WRONG, behind="void load_queries(", file="prefill.cu"),
    # Products
    Mutation("no wgmma fence", "wgmma_fence();", "", "without a wgmma fence", behind="void next_block(", file="prefill.cu"),
    Mutation("a product is never committed", "wgmma_commit();", "", "no commit has closed", behind="void last_values(", file="prefill.cu"),
    Mutation("scores are read before they are done", "wgmma_wait<1>();", "wgmma_wait<2>();", "", file="prefill.cu"),
    Mutation("O and V are used before their product is done", "wgmma_wait<0>();", "", "", behind="begun.make(", file="prefill.cu"),
    Mutation("first scores are read before they are done", "wgmma_wait<0>();", "", "", behind="void first_block(", file="prefill.cu"),
    Mutation("K is given back before its scores are done", "wgmma_wait<1>();\n    wgmma_fence_operand(s);\n    release(k_empty(base, keys.stage()));", "release(k_empty(base, keys.stage()));\n    wgmma_wait<1>();\n    wgmma_fence_operand(s);", "", file="prefill.cu"),
    Mutation("V is given back before its product is done", "wgmma_wait<0>();\n    wgmma_fence_operand(acc);\n    wgmma_fence_operand(p);\n    release(v_empty(base, values.stage()));", "release(v_empty(base, values.stage()));\n    wgmma_wait<0>();\n    wgmma_fence_operand(acc);\n    wgmma_fence_operand(p);", "", file="prefill.cu", behind="begun.make("),
    Mutation("Q is given back before its last scores are done", "issue_scores(q, k, s);", "if (last) release(q_empty(base, query));\n    issue_scores(q, k, s);\n    last = false;", "", file="prefill.cu", behind="void next_block("),
    Mutation("K of the block before", "next_k = late(k_at(base, keys.stage()));", "next_k = late(k_at(base, keys.stage() ^ 1));", "", file="prefill.cu"),
    Mutation("V of the block before", "next_v = late(v_at(base, values.stage()));", "next_v = late(v_at(base, values.stage() ^ 1));", "", file="prefill.cu"),
    Mutation("the last product is not waited for", "wgmma_wait<0>();", "", "", behind="void last_values(", file="prefill.cu"),
    Mutation("V's atoms are stepped by half", "wgmma_descriptor(values, kSubtileBytesKV, 1024)", "wgmma_descriptor(values, kSubtileBytesKV, 512)", WRONG, file="prefill.cu"),
    Mutation("a narrow last block that is too narrow", "seen - (blocks - 1) * kTokens <= kNarrow", "seen - (blocks - 1) * kTokens <= kNarrow + 4", "lse: ", file="prefill.cu"),
    # Turns
    Mutation("nobody has the first turn", "if (group == kGroups - 1) pass_turn(group);", "", DEADLOCK, file="prefill.cu"),
    Mutation("a turn is kept", "pass_turn(group);", "", DEADLOCK, behind="void skip_block(", file="prefill.cu"),
    # The ends of sequences
    Mutation("the tail of V is not cleared", "store_shared_zero16(to + at);", "", WRONG, file="prefill.cu"),
    Mutation("the tail of V is cleared one row late", "tokens * 128", "tokens * 128 + 128", WRONG, file="prefill.cu"),
    Mutation("no proxy fence behind the zeros", "fence_proxy_async();", "", "no fence.proxy.async", file="prefill.cu"),
    Mutation("the mask is off by one", "column + 8 * g + (e & 1) >= border[e >> 1]", "column + 8 * g + (e & 1) > border[e >> 1]", WRONG, file="tile.cuh"),
    Mutation("the causal border is off by one", "k.count - q.count + 1 + row", "k.count - q.count + row", WRONG, file="prefill.cuh"),
    Mutation("a row beyond the sequence is stored", "r < item.rows", "true", "", file="prefill.cuh", behind="MLAFORGE_DEVICE void store(const Output& to"),
    Mutation("lse of a row beyond the sequence is stored", "r < item.rows", "true", "", file="prefill.cuh", behind="const int r = first + accumulator_row(i);\n      if ("),
    # Work
    Mutation("a tile that nobody takes", "static_cast<int>(gridDim.x) + warp_uniform(taken)", "static_cast<int>(gridDim.x) + 1 + warp_uniform(taken)", WRONG, file="prefill.cu"),
    Mutation("heads of the wrong section", "at / (tiles * section) * section", "at / (tiles * section)", WRONG, file="prefill.cuh"),
    Mutation("the walker asks for no tile", "release(item_asked(base, 0));", "", DEADLOCK, behind="block + 1 == item.blocks", file="prefill.cu"),
    # Arithmetic
    Mutation("O keeps the tile before", "for (int i = 0; i < kHeadDimV / 2; ++i) acc[i] = 0.f;", "", WRONG, behind="void run(", file="prefill.cu"),
    Mutation("the sum is not rescaled", "fmaf(state.sum[i], rescale[i], sum[i])", "state.sum[i] + sum[i]", f"{WRONG}|lse: ", file="prefill.cu"),
    Mutation("O is not rescaled", "if (__builtin_expect(passed, 0)) scale_rows(acc, rescale);", "", WRONG, file="prefill.cu"),
    Mutation("O is rescaled where nothing has passed", "if (__builtin_expect(passed, 0)) scale_rows(acc, rescale);", "if (!passed) rescale[0] = 0.5f;\n    scale_rows(acc, rescale);", WRONG, file="prefill.cu"),
    Mutation("what rows refer to never follows", "if (__builtin_expect(passed, 0)) follow(s, rescale, sum, p);", "", f"{WRONG}|lse: ", file="prefill.cu"),
    Mutation("probabilities are not made anew", "probabilities<Element, 2 * Half>(s, Begun<0>{}, reference, scale_log2, sum, p);", "if (token == 0) probabilities<Element, 2 * Half>(s, Begun<0>{}, reference, scale_log2, sum, p);", f"{WRONG}|lse: ", file="prefill.cu"),
    Mutation("what was accumulated is scaled up, not down", "exp2_approx(state.max[i] - seen)", "exp2_approx(seen - state.max[i])", "", file="tile.cuh", behind="MLAFORGE_DEVICE void softmax_reference("),
    Mutation("what rows refer to follows small sums", "warp_any(fmaxf(sum[0], sum[1]) > kMost)", "!warp_any(fmaxf(sum[0], sum[1]) > kMost)", f"{WRONG}|lse: ", file="prefill.cu"),
    Mutation("only the first of two rows is looked at", "fmaxf(sum[0], sum[1]) > kMost", "sum[0] > kMost", f"{WRONG}|lse: ", file="prefill.cu"),
    Mutation("exponentials that have begun count twice", "begun.p[2 * i + j]", "part[row][j] += begun.p[2 * i + j]", f"{WRONG}|lse: ", file="prefill.cuh"),
    Mutation("exponentials that have begun are of the other row", "(i >> 1) & 1", "i & 1", f"{WRONG}|lse: ", file="prefill.cuh", behind="MLAFORGE_DEVICE void make("),
    Mutation("masked tokens of a row without any count", "state.max[i] == -infinity() ? 0.f : state.max[i]", "state.max[i]", "NaN", file="prefill.cuh"),
    Mutation("lse in base 2", "(state.max[i] + log2_approx(sum)) * kLn2", "state.max[i] + log2_approx(sum)", "lse: ", file="prefill.cuh"),
    Mutation("lse without what the row refers to", "(state.max[i] + log2_approx(sum)) * kLn2", "log2_approx(sum) * kLn2", "lse: ", file="prefill.cuh"),
    Mutation("an empty row has lse -inf", "sum == 0.f ? infinity() : lse", "sum == 0.f ? -infinity() : lse", "lse: ", file="prefill.cuh"),
    # Results that wait for the next tile
    Mutation("results go to the rows of the next tile", "results.store(output, 64 * group);", "results.item.load_place(reader.place(base));\n    results.store(output, 64 * group);", "", file="prefill.cu", behind="void first_block("),
    Mutation("results are forgotten before a tile with products", "results.store(output, 64 * group);", "", WRONG, file="prefill.cu", behind="void first_block("),
    Mutation("results are forgotten before a tile without", "if (seen <= 0) results.store(output, 64 * group);", "", WRONG, file="prefill.cu"),
    Mutation("the last results are forgotten", "results.store(output, 64 * group);", "", WRONG, file="prefill.cu", behind="reader.done(base);\n    }\n    "),
    Mutation("an item is given back before its place was read", "results.take(output, reader.place(base), 64 * group, state, acc);\n      reader.done(base);", "const smem_t place = reader.place(base);\n      reader.done(base);\n      results.take(output, place, 64 * group, state, acc);", "", file="prefill.cu"),
    Mutation("results are not normalised", "acc[2 * i] * factor[i & 1]", "acc[2 * i]", WRONG, file="prefill.cuh"),
    Mutation("results of the other row", "w[k] = o[2 * (g + k) + i];", "w[k] = o[2 * (g + k) + 1 - i];", WRONG, file="prefill.cuh"),
)  # fmt: skip


@pytest.fixture(scope="session")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> Mutants:
    """Give the kernel with all mutations in it, and sections of a few hundred tokens."""
    folder = folder_of(spec_of(SHAPE))
    path = folder / "prefill.cu"
    text, changed = re.subn(r"kSectionTokens = \d+", "kSectionTokens = 300", path.read_text())
    assert changed == 1
    path.write_text(text)
    return Mutants.made(folder, MUTATIONS, tmp_path_factory)


def reports_of(mla: MLA, problem: PrefillProblem, options: SimulatorOptions) -> tuple[str, ...]:
    mla.backend.options = options  # type: ignore[union-attr]
    return run_problem(mla, problem, "cpu").failures


@pytest.mark.parametrize("number", range(len(MUTATIONS)), ids=lambda i: MUTATIONS[i].name.replace(" ", "-"))
def test_every_mutation_is_caught(number: int, mutants: Mutants, monkeypatch: pytest.MonkeyPatch) -> None:
    mla = Prefill(mutants.switch(number, monkeypatch), Simulator())
    tries = itertools.product(SCHEDULES, PROBLEMS)
    require_caught(
        MUTATIONS[number],
        (
            report
            for (mode, seed, sms), problem in tries
            for report in reports_of(mla, problem, SimulatorOptions(seed=seed, mode=mode, sms=sms))
        ),
    )


def test_the_unbroken_kernel_passes_random_schedules(mutants: Mutants, monkeypatch: pytest.MonkeyPatch) -> None:
    mla = Prefill(mutants.switch(-1, monkeypatch), Simulator())
    for seed, (mode, problem) in enumerate(itertools.product(("random", "lazy", "eager"), PROBLEMS)):
        options = SimulatorOptions(seed=seed, mode=mode, sms=1 + seed % 3)
        assert not reports_of(mla, problem, options), (problem, options)
