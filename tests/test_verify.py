"""Verification itself: it accepts a right decoder, catches wrong ones, and leaves a short problem that replays."""

from __future__ import annotations

import dataclasses
import math
import random
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlaforge.verify import (
    Inputs,
    Problem,
    check_output,
    flashmla_matrix,
    make_inputs,
    random_problem,
    run_problem,
    shrink,
    verify,
    verify_problems,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep torch's many small operations from waiting for each other's threads on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Cache:
    dtype: str = "bf16"
    page_size: int = 16
    row_bytes: int = 192
    quantised: bool = False
    tensor_scale: bool = False


@dataclass(frozen=True)
class Manifest:
    d_qk: int = 96
    d_v: int = 64
    softmax_scale: float = 0.135234
    cache: Cache = field(default_factory=Cache)
    kernels: dict[str, object] = field(default_factory=dict)
    """Beside decode: none."""

    @property
    def element(self) -> str:
        return self.cache.dtype


@dataclass(frozen=True)
class TorchDecoder:
    """A plain float32 decoder. Each of its faults is one that a kernel could have."""

    fault: str = ""
    manifest: Manifest = field(default_factory=Manifest)

    def decode(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        *,
        tensor_scale: torch.Tensor | None = None,
        causal: bool = False,
        softmax_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = self.manifest.softmax_scale if softmax_scale is None else softmax_scale
        if self.fault == "ignores softmax_scale":
            scale = self.manifest.softmax_scale
        if self.fault == "forgets mscale":
            scale /= 1.8738
        if self.fault == "raises":
            raise ValueError("no such shape")
        assert out is not None and lse is not None
        for i, length in enumerate(cache_seqlens.tolist()):
            out[i], lse[i] = self.one(q[i].float(), kv_cache, block_table[i], length, scale, causal)
        if self.fault == "swaps heads" and q.shape[2] > 1:
            out[:, :, [0, 1]] = out[:, :, [1, 0]]
        if self.fault == "writes too far":
            torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).zero_()
        return out, lse

    def one(
        self, q: torch.Tensor, cache: torch.Tensor, pages: torch.Tensor, length: int, scale: float, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        s_q, h_q, _ = q.shape
        d_v, page_size = self.manifest.d_v, self.manifest.cache.page_size
        if cache.dim() == 3:
            cache = cache.unsqueeze(2)
        count = -(-length // page_size)
        tokens = torch.cat([cache[page] for page in pages[:count].tolist()] or [cache[:0, 0]]).float()
        if self.fault != "reads the tail":
            tokens = tokens[:length]
        h_kv = cache.shape[2]
        grouped = q.reshape(s_q, h_kv, h_q // h_kv, -1)
        scores = torch.einsum("qkgd,tkd->kgqt", grouped, tokens).flatten(0, 1) * scale
        border = torch.full((s_q, 1), length)
        if causal:
            border = border + torch.arange(1 - s_q, 1)[:, None]
            if self.fault == "masks one too few":
                border = border + 1
            if self.fault == "masks one too many":
                border = border - 1
        hidden = torch.arange(len(tokens)) >= border
        scores = scores.masked_fill(hidden, -math.inf)
        lse = scores.logsumexp(-1)
        weights = torch.where(hidden, 0.0, (scores - lse[..., None]).exp())
        if self.fault == "never rescales" and len(tokens):
            # As after a lost rescaling: what came later weighs one part in a hundred too much.
            weights = weights * (1 + 0.01 * (torch.arange(len(tokens)) >= 64))
        by_group = weights.reshape(h_kv, h_q // h_kv, s_q, -1)
        out = torch.einsum("kgqt,tkd->qkgd", by_group, tokens[..., :d_v]).flatten(1, 2)
        empty = (border <= 0).squeeze(1)
        if self.fault == "base-2 lse":
            lse = lse * math.log2(math.e)
        if self.fault == "lse of -inf for an empty row":
            return out.masked_fill(empty[:, None, None], 0.0), lse.masked_fill(empty, -math.inf)
        if self.fault == "empty row not zero":
            return out.masked_fill(empty[:, None, None], 1.0), lse.masked_fill(empty, math.inf)
        return out.masked_fill(empty[:, None, None], 0.0), lse.masked_fill(empty, math.inf)


MANIFESTS = [
    Manifest(),
    Manifest(cache=Cache("fp16", 1)),
    Manifest(d_qk=64, cache=Cache("bf16", 64)),
    Manifest(cache=Cache("bf16", 128)),
]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=str)
def test_a_right_decoder_passes(manifest: Manifest) -> None:
    seen: list[Problem] = []
    report = verify(TorchDecoder(manifest=manifest), 25, 1, seen.append, device="cpu", max_tokens=1000)
    assert report.ok, report.failure
    assert len(seen) == report.problems == sum(report.counts.values()) == 25
    assert set(report.worst) == set(report.counts)
    assert all(0 < errors.out_used < 1 for errors in report.worst.values() if errors.out_abs)


FAULTS = [
    "masks one too few",
    "masks one too many",
    "forgets mscale",
    "ignores softmax_scale",
    "reads the tail",
    "swaps heads",
    "never rescales",
    "base-2 lse",
    "lse of -inf for an empty row",
    "empty row not zero",
    "writes too far",
    "raises",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_shrunk_and_replayed(fault: str) -> None:
    decoder = TorchDecoder(fault)
    report = verify(decoder, 200, 3, device="cpu", max_tokens=2048)
    assert report.failure is not None
    small = report.failure.problem
    assert small.tokens <= report.failure.found.tokens
    assert small.batch <= 2 and small.s_q <= 2 and small.h_q <= 3
    replayed = Problem.parse(shlex.split(small.to_repro("a_spec"))[-1])
    assert replayed == small
    again = run_problem(decoder, replayed, "cpu")
    assert again == report.failure.errors and not again.ok
    assert run_problem(TorchDecoder(), replayed, "cpu").ok


def test_a_problem_of_one_kind_is_enough_for_its_fault() -> None:
    causal = Problem(lengths=(5,), s_q=2, h_q=3, causal=True)
    assert run_problem(TorchDecoder(), causal, "cpu").ok
    assert not run_problem(TorchDecoder("masks one too few"), causal, "cpu").ok
    assert run_problem(TorchDecoder("empty row not zero"), causal, "cpu").ok
    assert not run_problem(TorchDecoder("empty row not zero"), dataclasses.replace(causal, lengths=(1,)), "cpu").ok


def test_verification_stops_at_the_first_failure() -> None:
    problems = [Problem(lengths=(16,)), Problem(lengths=(17,)), Problem(lengths=(18,))]
    report = verify_problems(TorchDecoder("reads the tail"), problems, device="cpu")
    assert report.problems == 2 and not report.ok
    assert report.failure is not None and report.failure.problem.lengths == (1,)


# ---- Criteria --------------------------------------------------------------------------------------------------------


def results() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    out = torch.randn((2, 2, 3, 64), generator=generator, dtype=torch.float64)
    return out, torch.randn((2, 3, 2), generator=generator, dtype=torch.float64) + 5


def test_criteria_accept_rounding_and_nothing_more() -> None:
    out, lse = results()
    rounded = out.bfloat16()
    assert check_output(rounded, lse.float(), out, lse).ok
    assert check_output(rounded, lse.float(), out, lse).out_abs == 0  # The reference is rounded alike.
    assert check_output(rounded, (lse * (1 + 1e-4)).float(), out, lse).ok
    assert not check_output(rounded, (lse * (1 + 2e-4)).float(), out, lse).ok


@pytest.mark.parametrize(("delta", "accepted"), [(7e-4, True), (1e-3, False)])
def test_one_element_must_be_within_absolute_or_relative_tolerance(delta: float, accepted: bool) -> None:
    out, lse = results()
    wrong = out.clone()
    out[0, 0, 0, 0] = 0
    wrong[0, 0, 0, 0] = delta
    assert check_output(wrong, lse, out, lse).ok == accepted
    wrong[0, 0, 0, 0] = 1 + 0.015
    out[0, 0, 0, 0] = 1
    assert check_output(wrong, lse, out, lse).ok


def test_the_cosine_finds_small_errors_that_all_elements_share() -> None:
    out, lse = results()
    out *= 1e-3  # All within the absolute tolerance.
    errors = check_output(out * (1 + 0.005 * torch.randn(out.shape, generator=torch.Generator())), lse, out, lse)
    assert not errors.ok and errors.out_used < 1 and "cosine" in errors.failures[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["result", "reference"])
def test_specials_must_be_where_the_reference_has_them(value: float, where: str) -> None:
    out, lse = results()
    odd = lse.clone()
    odd[1, 2, 0] = value
    got, want = (odd, lse) if where == "result" else (lse, odd)
    errors = check_output(out, got, out, want)
    assert not errors.ok and "[1, 2, 0]" in errors.failures[0]
    assert check_output(out, odd, out, odd).ok


def test_all_zero_and_wrong_shapes() -> None:
    out, lse = results()
    nothing, infinite = torch.zeros_like(out), torch.full_like(lse, math.inf)
    assert check_output(nothing, infinite, nothing, infinite).ok
    assert check_output(out[:1], lse, out, lse).failures == ("out is (1, 2, 3, 64), not (2, 2, 3, 64)",)


# ---- Inputs ----------------------------------------------------------------------------------------------------------


def inputs_of(problem: Problem, manifest: Manifest | None = None) -> Inputs:
    return make_inputs(problem, manifest or Manifest(), "cpu")


def test_everything_that_must_not_be_read_is_poison() -> None:
    problem = Problem(
        lengths=(0, 17, 16, 1), h_q=4, h_kv=2, table_extra_columns=2, table_padding=3, spare_pages=2, cache_layers=3
    )
    x = inputs_of(problem)
    assert x.q.shape == (4, 1, 4, 96) and x.q.dtype == torch.bfloat16 and x.q.abs().max() <= 1
    assert x.kv_cache.shape == (6, 16, 2, 96) and x.kv_cache.stride(0) == 3 * 16 * 2 * 96
    assert x.block_table.shape == (4, 4) and x.block_table.stride(0) == 7
    assert int((~x.kv_cache.isnan()).any(-1).sum()) == problem.tokens * 2
    used = x.block_table[x.block_table != 2_147_480_000].tolist()
    assert len(used) == len(set(used)) == 4 and set(used) <= set(range(6))
    assert (x.block_table[0] == 2_147_480_000).all()
    assert x.out.shape == (4, 1, 4, 64) and x.out.isnan().all()
    assert x.lse.shape == (4, 4, 1) and x.lse.isnan().all()
    assert x.cache_seqlens.tolist() == [0, 17, 16, 1]


def test_variations_of_the_inputs() -> None:
    assert inputs_of(Problem(lengths=(3,), cache_3d=True)).kv_cache.dim() == 3
    assert inputs_of(Problem(lengths=(0,), spare_pages=0)).kv_cache.shape[0] == 1
    assert inputs_of(Problem(lengths=(3,)), Manifest(cache=Cache("fp16", 64))).q.dtype == torch.float16
    assert -1 in inputs_of(Problem(lengths=(3, 40), table_filler=-1)).block_table
    gained, plain = inputs_of(Problem(lengths=(3,), q_gain=8)), inputs_of(Problem(lengths=(3,)))
    assert torch.equal(gained.q, plain.q * 8)
    shifted = inputs_of(Problem(lengths=(3,), logit_shift=-65_536))
    tokens = shifted.kv_cache[shifted.block_table[0, 0], :3, 0]
    assert shifted.q[0, 0, 0, -1] * tokens[0, -1] == -65_536
    poisoned = inputs_of(Problem(lengths=(3, 5), nan_request=1))
    assert int(poisoned.kv_cache[poisoned.block_table[1, 0], :5].isnan().any(-1).sum()) == 1


# ---- Problems and their text -----------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 1 << 64), manifest=st.sampled_from(MANIFESTS), max_tokens=st.sampled_from([64, 2048, 1 << 20])
)
def test_random_problems_are_sound_and_survive_their_text(seed: int, manifest: Manifest, max_tokens: int) -> None:
    problem = random_problem(random.Random(seed), manifest, max_tokens)
    assert problem.tokens <= max_tokens
    assert problem == random_problem(random.Random(seed), manifest, max_tokens)
    assert Problem.parse(str(problem)) == problem
    assert "\n" not in problem.to_repro("a spec.yaml")
    assert shlex.split(problem.to_repro("a spec.yaml")) == [
        "mlaforge",
        "verify",
        "a spec.yaml",
        "--problem",
        str(problem),
    ]


def test_random_problems_reach_every_edge() -> None:
    rng = random.Random(0)
    problems = [random_problem(rng, Manifest(), 1 << 18) for _ in range(2000)]
    lengths = {length for problem in problems for length in problem.lengths}
    assert {0, 1, 15, 16, 17, 62, 63, 64, 65, 127, 128, 129} <= lengths and max(lengths) > 200_000
    assert {problem.s_q for problem in problems} == {1, 2, 3, 4, 17}
    assert {problem.h_q for problem in problems} == {1, 3, 9, 16, 20, 63, 64, 96, 126, 128}
    assert any(problem.causal and problem.s_q > max(problem.lengths) for problem in problems)
    assert any(0 in problem.lengths and max(problem.lengths) > 4096 for problem in problems)
    assert any(problem.batch == 1 and problem.tokens > 100_000 for problem in problems)
    assert len({problem.kind for problem in problems}) == 5
    for each in dataclasses.fields(Problem):
        assert len({getattr(problem, each.name) for problem in problems}) > 1, each.name


def test_flashmla_matrix_is_complete_and_fixed() -> None:
    problems = list(flashmla_matrix())
    assert problems == list(flashmla_matrix())
    # 16 pairs of heads, 4 batches, 3 query lengths, 3 contexts, varlen and causal; two with holes.
    assert len(problems) == 16 * 4 * 3 * 3 * 4 + 2
    *matrix, hole, causal_hole = problems
    assert {(p.h_q, p.h_kv) for p in matrix} >= {(1, 1), (9, 3), (64, 8), (126, 2), (128, 8)}
    assert all(min(p.lengths) >= p.s_q for p in matrix)
    assert hole.batch == causal_hole.batch == 128 and 40 < hole.lengths.count(0) < 90


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "lengths="),
        ("s_q=2", "lengths="),
        ("lengths=", "lengths"),
        ("lengths=1,a", "1,a"),
        ("lengths=-1", "at least 0"),
        ("lengths=1 s_q=0", "s_q"),
        ("lengths=1 s_q=two", "two"),
        ("lengths=1 s_q=1.5", "1.5"),
        ("lengths=1 heads=3", "heads"),
        ("lengths=1 s_q", "s_q"),
        ("lengths=1 lengths=2", "twice"),
        ("lengths=1 h_q=3 h_kv=2", "divide"),
        ("lengths=1 h_q=2 h_kv=2 cache_3d=1", "cache_3d"),
        ("lengths=1 logit_shift=1", "256"),
        ("lengths=1 nan_request=1", "nan_request"),
        ("lengths=1 spare_pages=-1", "spare_pages"),
    ],
)
def test_bad_problem_texts_say_which_word(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Problem.parse(text)


def test_shrinking_finds_the_least_problem() -> None:
    start = Problem(
        lengths=(1000, 3, 0, 777, 64), s_q=17, h_q=126, h_kv=3, causal=True, seed=9, cache_layers=3, q_gain=32
    )

    def longer_than(n: int, s_q: int) -> Callable[[Problem], bool]:
        return lambda p: max(p.lengths) > n and p.s_q >= s_q

    assert shrink(start, longer_than(70, 2), 1000) == Problem(lengths=(71,), s_q=2, seed=9)
    assert shrink(start, longer_than(0, 1), 1000) == Problem(lengths=(1,), seed=9)
    assert shrink(start, lambda p: p.batch > 2, 1000) == Problem(lengths=(0, 0, 0), seed=9)
    calls: list[Problem] = []

    def fails(problem: Problem) -> bool:
        calls.append(problem)
        return True

    shrink(start, fails, 7)
    assert len(calls) == 7
