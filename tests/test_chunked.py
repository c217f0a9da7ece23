"""Chunked prefill under the simulator: its results for any chunks and rounds, its division of contexts, its checks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunking import VARIANTS, simulated
from mlaforge.api import MLA
from mlaforge.chunked import ChunkedTensors, ContextLimits, ContextRounds, context_rounds
from mlaforge.prefill_verify import (
    PrefillProblem,
    kernel_of,
    make_chunked_inputs,
    random_chunked_problem,
    random_problems,
    run_problem,
    verify_problems,
)
from mlaforge.reference import chunked_prefill_reference, prefill_reference, up_project
from mlaforge.simulator import MODES, SimulatorOptions
from mlaforge.verify import check_output
from test_verify import one_thread as one_thread


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """What torch gives without initialising it is NaN, so that nobody finds zeros by chance."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


pytestmark = pytest.mark.usefixtures("one_thread", "poisoned_memory")


# ---- Results ---------------------------------------------------------------------------------------------------------


def accept(mla: MLA, problem: PrefillProblem, options: SimulatorOptions) -> None:
    mla.backend.options = options  # type: ignore[union-attr]
    errors = run_problem(mla, problem, "cpu")
    assert errors.ok, f"{problem} with {options}: {errors.failures}"


EDGES = (
    # Requests without new tokens, without a context, without both; contexts that end inside a page and a round.
    PrefillProblem(q=(5, 0, 70, 0, 1), k=(5, 40, 170, 0, 98), heads=2, workspace=60),
    # One token at a time.
    PrefillProblem(q=(3, 1), k=(8, 3), workspace=1, total_known=True),
    # Everything at once, with room to spare; among rows of nobody.
    PrefillProblem(q=(66, 2), k=(67, 300), heads=3, workspace=5_000, margin=70, interleaved=True, q_gain=32),
    # No context at all.
    PrefillProblem(q=(20, 70), k=(20, 70), workspace=64),
    # A context much longer than the others.
    PrefillProblem(q=(1,) * 9, k=(3, 2, 500, 1, 1, 20, 1, 9, 1), heads=2, workspace=97, total_known=True),
)


@pytest.mark.parametrize("name", VARIANTS)
def test_edges(name: str) -> None:
    for seed, problem in enumerate(EDGES):
        accept(simulated(name), problem, SimulatorOptions(seed=seed, mode=MODES[seed % 3], sms=1 + seed % 3))


@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**32 - 1),
    schedule=st.integers(0, 2**32 - 1),
    mode=st.sampled_from(MODES),
    name=st.sampled_from(list(VARIANTS)),
)
def test_random_problems(seed: int, schedule: int, mode: str, name: str) -> None:
    mla = simulated(name)
    problem = random_chunked_problem(random.Random(seed), kernel_of(mla.manifest), 120)
    accept(mla, problem, SimulatorOptions(seed=schedule, mode=mode))


@settings(max_examples=5)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_prompts_fed_in_chunks(data: st.DataObject, seed: int) -> None:
    """A chunk of some requests at a time, appended before or after: what one attention over the whole prompts gives."""
    mla = simulated()
    prompts = data.draw(st.lists(st.integers(0, 110), min_size=1, max_size=3), label="prompts")
    heads, (rank, page) = 2, (128, 16)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).div_(10).bfloat16()

    q, latents = [normal(n, heads, 96) for n in prompts], [normal(n, rank + 32) for n in prompts]
    kv_b = (torch.randn(heads, 128, rank, generator=generator) / math.sqrt(rank)).bfloat16()
    pages = 1 + max(prompts) // page
    table = torch.randperm(len(prompts) * pages, generator=generator).int().view(len(prompts), pages)
    cache = torch.full((len(prompts) * pages, page, rank + 32), math.nan, dtype=torch.bfloat16)
    outs, lses = [torch.empty(0, heads, 64).bfloat16()] * len(prompts), [torch.empty(heads, 0)] * len(prompts)
    done = [0] * len(prompts)
    while done != prompts:
        chunk = [data.draw(st.integers(0, n - d), label="chunk") for n, d in zip(prompts, done, strict=True)]
        if not any(chunk):
            chunk = [min(n - d, 30) for n, d in zip(prompts, done, strict=True)]
        workspace = data.draw(st.integers(60, 300), label="workspace")
        new = [slice(d, d + n) for d, n in zip(done, chunk, strict=True)]
        rows, tokens = (torch.cat([x[each] for x, each in zip(all_, new, strict=True)]) for all_ in (q, latents))
        at = torch.cat([table[i, torch.arange(each.start, each.stop) // page].long() for i, each in enumerate(new)])
        slots = at * page + torch.cat([torch.arange(each.start, each.stop) % page for each in new])

        def append(tokens: torch.Tensor = tokens, slots: torch.Tensor = slots) -> None:
            mla.append(tokens[:, :rank], tokens[:, rank:], cache, slots)

        first = data.draw(st.booleans(), label="appended first")
        if first:
            append()
        borders = torch.tensor([0, *chunk]).cumsum(0).int()
        context = torch.tensor(done, dtype=torch.int32)
        arguments = (rows, tokens, kv_b, cache, table, borders, context)
        out, lse = mla.chunked_prefill(*arguments, max_context=max(done), workspace_tokens=workspace)
        if not first:
            append()
        for i in range(len(prompts)):
            mine = slice(int(borders[i]), int(borders[i + 1]))
            outs[i], lses[i] = torch.cat([outs[i], out[mine]]), torch.cat([lses[i], lse[:, mine]], 1)
        done = [d + n for d, n in zip(done, chunk, strict=True)]
    for i, n in enumerate(prompts):
        k, v = up_project(latents[i], kv_b, 64)
        ends = torch.tensor([0, n])
        want = prefill_reference(q[i], k, v, ends, ends, softmax_scale=mla.manifest.softmax_scale, causal=True)
        errors = check_output(outs[i], lses[i], *want, q_gain=64, score_error=2**-8 * math.sqrt(5))
        assert errors.ok, errors.failures


def test_graphs_of_layers_share_the_rounds() -> None:
    """Given the rounds, the very same result; and other lengths in the same tensors, as a graph's replay would have."""
    mla = simulated()
    problem = PrefillProblem(q=(5, 30), k=(105, 170), heads=2, workspace=100)
    inputs = make_chunked_inputs(problem, mla.manifest, "cpu")
    limits: dict[str, Any] = {"max_context": 140, "workspace_tokens": 100}
    want = mla.chunked_prefill(*inputs.arguments, **limits)
    rounds = mla.context_rounds(inputs.arguments[-1], **limits)
    got = mla.chunked_prefill(*inputs.arguments, **limits, rounds=rounds)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    inputs.arguments[-1].copy_(torch.tensor([0, 77]))
    got = mla.chunked_prefill(*inputs.arguments, **limits, out=inputs.out, lse=inputs.lse)
    assert got[0] is inputs.out and got[1] is inputs.lse
    reference = chunked_prefill_reference(*inputs.arguments, softmax_scale=mla.manifest.softmax_scale)
    errors = check_output(*got, *reference, q_gain=64, score_error=2**-8 * math.sqrt(3))
    assert errors.ok, errors.failures


def test_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without new tokens nothing is launched, without a context neither gather nor merge."""
    mla = simulated()
    inputs = make_chunked_inputs(PrefillProblem(q=(3, 4), k=(3, 4), workspace=9), mla.manifest, "cpu")
    arguments = inputs.arguments
    monkeypatch.setattr(mla._memory, "_launch", lambda *_: pytest.fail("launched"))
    out, lse = mla.chunked_prefill(*arguments, max_context=0, workspace_tokens=9)
    assert bool(out.isfinite().all()) and bool(lse.isfinite().all())
    mla.chunked_prefill(*arguments, max_context=10, workspace_tokens=9, total_context=0)
    monkeypatch.setattr(mla._prefill, "_launch", lambda *_: pytest.fail("launched"))
    none = (arguments[0][:0], arguments[1][:0], *arguments[2:5], torch.zeros(3, dtype=torch.int32), arguments[6])
    out, lse = mla.chunked_prefill(*none, max_context=10, workspace_tokens=9)
    assert out.shape == (0, 1, 64) and lse.shape == (1, 0)


def test_no_requests() -> None:
    mla = simulated()
    arguments = make_chunked_inputs(PrefillProblem(q=(3,), k=(3,), workspace=9), mla.manifest, "cpu").arguments
    table, ints = arguments[4][:0], torch.zeros(1, dtype=torch.int32)
    out, _ = mla.chunked_prefill(*arguments[:4], table, ints, ints[:0], max_context=9, workspace_tokens=9)
    assert out.shape == (3, 1, 64)


# ---- Division of contexts --------------------------------------------------------------------------------------------


def turns_of(lengths: list[int], turn: int) -> list[tuple[int, int, int]]:
    """Give (request, first token, last token + 1) of all turns, in their order."""
    turns = [(n, i) for i, length in enumerate(lengths) for n in range(-(-length // turn))]
    return [(i, n * turn, min((n + 1) * turn, lengths[i])) for n, i in sorted(turns)]


LENGTHS = st.lists(st.one_of(st.just(0), st.integers(0, 9), st.integers(0, 90)), max_size=9)


@settings(max_examples=300)
@given(
    lengths=LENGTHS,
    tile=st.sampled_from((1, 3, 8, 80)),
    workspace=st.integers(1, 70),
    spare=st.sampled_from((0, 0, 7)),
    total_known=st.booleans(),
)
def test_rounds_take_turns(lengths: list[int], tile: int, workspace: int, spare: int, total_known: bool) -> None:
    limits = ContextLimits(max(lengths, default=0) + spare, workspace, sum(lengths) + spare if total_known else None)
    rounds = context_rounds(torch.tensor(lengths, dtype=torch.int32), limits, tile)
    sizes = limits.rounds(len(lengths), tile)
    turn = max(min(tile, workspace, limits.max_context), 1)
    at_once = workspace // turn
    assert rounds.seq_starts.shape == (len(sizes), len(lengths))
    assert rounds.cu_seqlens.shape == (len(sizes), len(lengths) + 1)
    assert all(0 < size <= workspace for size in sizes)
    turns = turns_of(lengths, turn)
    assert len(turns) <= len(sizes) * at_once
    for i, size in enumerate(sizes):
        mine = turns[i * at_once : (i + 1) * at_once]
        want = [[begin for who, begin, _ in mine if who == each] for each in range(len(lengths))]
        counts = [sum(end - begin for who, begin, end in mine if who == each) for each in range(len(lengths))]
        borders = rounds.cu_seqlens[i].tolist()
        assert borders[0] == 0 and borders[-1] == sum(counts) <= size
        assert rounds.cu_seqlens[i].diff().tolist() == counts
        starts = rounds.seq_starts[i].tolist()
        assert all(not begins or start == begins[0] for start, begins in zip(starts, want, strict=True))
    if total_known and not spare:
        # At most one turn of each request is short.
        assert len(sizes) <= -(-(sum(lengths) + len(lengths) * (turn - 1)) // (turn * at_once))


def test_rounds_are_as_few_as_can_be() -> None:
    """Where lengths are multiples of the tile, a known total leaves no round without work, whoever has the tokens."""
    for lengths in ([8192, 0, 0, 0], [2048] * 4, [128, 7936, 0, 128]):
        limits = ContextLimits(max(lengths), 1024, sum(lengths))
        rounds = context_rounds(torch.tensor(lengths, dtype=torch.int32), limits, 128)
        read = rounds.cu_seqlens[:, -1].tolist()
        # Nobody can say beforehand that the last turns are not short; should they be, there is a small round for them.
        assert read[:8] == [1024] * 8 and read[8:] in ([], [0])
        assert limits.rounds(len(lengths), 128)[8:] in ((), (3 * 128,))


def test_lengths_that_are_no_tensor() -> None:
    for lengths, what in (([3, 4], "a list"), (None, "None")):
        with pytest.raises(ValueError, match=f"context_lens is {what}; it must be a tensor"):
            simulated().context_rounds(lengths, max_context=4, workspace_tokens=4)  # type: ignore[arg-type]


def test_lengths_beyond_the_limits_are_cut() -> None:
    rounds = context_rounds(torch.tensor([-5, 300, 10], dtype=torch.int32), ContextLimits(20, 64), 8)
    assert rounds.cu_seqlens.diff().sum(0).tolist() == [0, 20, 10]


# ---- The call --------------------------------------------------------------------------------------------------------


def arguments(**changes: Any) -> dict[str, Any]:
    names = ("q", "latent", "kv_b", "kv_cache", "block_table", "cu_seqlens_q", "context_lens")
    problem = PrefillProblem(q=(5, 15), k=(25, 35), heads=2, workspace=64)
    inputs = make_chunked_inputs(problem, simulated().manifest, "cpu")
    given_ = dict(zip(names, inputs.arguments, strict=True))
    results = {"out": inputs.out, "lse": inputs.lse}
    return {**given_, **results, "max_context": 20, "workspace_tokens": 64, **changes}


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).bfloat16()


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def two_bytes_off(*shape: int) -> torch.Tensor:
    return zeros(math.prod(shape) + 8)[1 : 1 + math.prod(shape)].view(shape)


WRONG: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (lambda: {"q": zeros(20, 2, 64)}, r"q has shape \(20, 2, 64\); it must be \(total_q, heads, 96\)"),
    (lambda: {"q": zeros(20, 0, 96)}, r"q has shape \(20, 0, 96\); it must have a head"),
    (lambda: {"q": zeros(20, 2, 96).half()}, r"q has dtype torch.float16; .*bfloat16"),
    (lambda: {"q": two_bytes_off(20, 2, 96)}, r"q begins at address 0x[0-9a-f]+, 2 B behind"),
    (lambda: {"q": zeros(20, 2, 192)[..., ::2]}, r"q has stride 2 in its last dimension"),
    (lambda: {"latent": zeros(20, 128)}, r"latent has shape \(20, 128\); it must be \(total_q, 160\)"),
    (lambda: {"latent": zeros(19, 160)}, r"latent has 19 rows, q has 20; they must agree"),
    (lambda: {"latent": zeros(20, 160).float()}, r"latent has dtype torch.float32"),
    (lambda: {"kv_b": zeros(2 * 128, 128)}, r"kv_b has shape \(256, 128\); it must be \(heads, 128, 128\)"),
    (lambda: {"kv_b": zeros(3, 128, 128)}, r"kv_b has 3 heads, q has 2; they must agree"),
    (lambda: {"kv_b": zeros(2, 128, 128).float()}, r"kv_b has dtype torch.float32"),
    (lambda: {"kv_cache": zeros(4, 64, 160)}, r"kv_cache has shape \(4, 64, 160\); .*16, 160"),
    (lambda: {"kv_cache": zeros(0, 16, 160)}, r"kv_cache has shape \(0, 16, 160\); .*at least one block"),
    (lambda: {"kv_cache": two_bytes_off(4, 16, 160)}, r"kv_cache begins at address"),
    (lambda: {"kv_cache": zeros(4, 16, 164)[..., :160]}, r"kv_cache has a stride of 328 B in dimension 1"),
    (lambda: {"block_table": ints(6)}, r"block_table has shape \(6\); it must be \(b, max_blocks\)"),
    (lambda: {"block_table": ints(2, 3).long()}, r"block_table has dtype torch.int64"),
    (lambda: {"block_table": ints(2, 6)[:, ::2]}, r"block_table has stride 2"),
    (lambda: {"cu_seqlens_q": ints(2)}, r"cu_seqlens_q has shape \(2\), block_table has 2 rows; .*1 more"),
    (lambda: {"cu_seqlens_q": ints(6)[::2]}, r"cu_seqlens_q has strides \(2,\)"),
    (lambda: {"cu_seqlens_q": ints(3).long()}, r"cu_seqlens_q has dtype torch.int64; .*int32"),
    (lambda: {"context_lens": ints(3)}, r"context_lens has shape \(3\), block_table has 2 rows"),
    (lambda: {"context_lens": ints(2).long()}, r"context_lens has dtype torch.int64; .*int32"),
    (lambda: {"out": zeros(20, 2, 96)}, r"out has shape \(20, 2, 96\); it must be \(20, 2, 64\)"),
    (lambda: {"out": zeros(20, 2, 64).half()}, r"out has dtype torch.float16"),
    (lambda: {"out": zeros(1, 2, 64).expand(20, 2, 64)}, r"out has shape .* its rows overlap"),
    (lambda: {"out": zeros(20, 2, 66)[..., :64]}, r"out has a stride of 264 B in dimension 0"),
    (lambda: {"lse": torch.zeros(20, 2)}, r"lse has shape \(20, 2\); it must be \(2, 20\)"),
    (lambda: {"lse": torch.zeros(2, 20).half()}, r"lse has dtype torch.float16"),
    (lambda: {"max_context": -1}, r"max_context is -1; it must be at least 0"),
    (lambda: {"max_context": 33}, r"max_context is 33, a row of block_table holds 32 tokens"),
    (lambda: {"workspace_tokens": 0}, r"workspace_tokens is 0; it must be at least 1"),
    (lambda: {"total_context": -1}, r"total_context is -1; it must be at least 0"),
    (lambda: {"softmax_scale": 0.0}, r"softmax_scale is 0.0"),
    (lambda: {"rounds": ContextRounds(ints(2, 2), ints(1, 3))}, r"rounds.seq_starts has shape \(2, 2\); .*\(1, 2\)"),
    (lambda: {"rounds": ContextRounds(ints(1, 2), ints(1, 2))}, r"rounds.cu_seqlens has shape \(1, 2\); .*\(1, 3\)"),
    (lambda: {"rounds": ContextRounds(ints(1, 2).long(), ints(1, 3))}, r"rounds.seq_starts has dtype torch.int64"),
    (lambda: {"rounds": ContextRounds(ints(1, 4)[:, ::2], ints(1, 3))}, r"rounds.seq_starts has strides \(4, 2\)"),
]


@pytest.mark.parametrize("number", range(len(WRONG)), ids=lambda i: WRONG[i][1])
def test_wrong_arguments_are_refused_before_anything_is_launched(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make, message = WRONG[number]
    mla = simulated()
    monkeypatch.setattr(mla._memory, "_launch", lambda *_: pytest.fail("launched"))
    monkeypatch.setattr(mla._prefill, "_launch", lambda *_: pytest.fail("launched"))
    given_ = arguments(**make())
    with pytest.raises(ValueError, match=message):
        mla.chunked_prefill(**given_)
    assert bool(given_["out"].isnan().all()) or "out" in make()


def test_right_arguments_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the messages above would mean nothing."""
    launched: list[str] = []
    mla = simulated()
    monkeypatch.setattr(mla._memory, "_launch", lambda name, *_: launched.append(name))
    monkeypatch.setattr(mla._prefill, "_launch", lambda *_: launched.append("prefill"))
    mla.chunked_prefill(**arguments())
    assert launched == ["prefill", "gather", "prefill", "merge"]
    launched.clear()
    mla.chunked_prefill(**arguments(workspace_tokens=10))
    # In the fashion of a binary counter: results of equally many parts are merged as soon as there are two of them.
    merges = [0, 1, 0, 2, 1]
    context = [each for n in merges[1:] for each in ("gather", "prefill", *["merge"] * n)]
    assert launched == ["prefill", *context]
    with pytest.raises(ValueError, match="workspace_tokens is 0"):
        mla.context_rounds(ints(2), max_context=1, workspace_tokens=0)
    with pytest.raises(ValueError, match=r"context_lens has dtype torch.float32"):
        mla.context_rounds(torch.zeros(2), max_context=1, workspace_tokens=1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("q", "q is on meta; these kernels run on cpu"),
        ("kv_b", "kv_b is on meta, q is on cpu"),
        ("context_lens", "context_lens is on meta, q is on cpu"),
    ],
)
def test_devices(name: str, message: str) -> None:
    """Past the operator, which is another one for tensors without storage."""
    given_ = arguments()
    given_[name] = given_[name].to("meta")
    tensors = ChunkedTensors(**{each: given_.get(each) for each in ChunkedTensors._fields})
    with pytest.raises(ValueError, match=message):
        simulated().chunked.run(tensors, ContextLimits(20, 64), 0.1)


def test_a_spec_without_a_prefill_kernel_says_so() -> None:
    mla = object.__new__(MLA)
    mla.manifest, mla._chunked = simulated().manifest, None
    with pytest.raises(ValueError, match="has no prefill kernel"):
        mla.chunked_prefill(**arguments())
    with pytest.raises(ValueError, match="has no prefill kernel"):
        mla.context_rounds(ints(2), max_context=1, workspace_tokens=1)


@pytest.mark.parametrize("name", ["chunked_prefill", "chunked_prefill_out"])
def test_operator(name: str) -> None:
    given_ = arguments()
    tensors = [given_[each] for each in list(given_)[:7]]
    results = [given_["out"], given_["lse"]] if name.endswith("out") else []
    numbers = (simulated().chunked.key, 20, 64, None, 0.1)
    torch.library.opcheck(getattr(torch.ops.mlaforge, name), (*tensors, None, None, None, *results, *numbers))


def test_torch_compile() -> None:
    mla = simulated()
    given_ = arguments()
    tensors = [given_[each] for each in list(given_)[:7]]

    def layer(q: torch.Tensor, latent: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = mla.chunked_prefill(q * 2, latent, *others, max_context=20, workspace_tokens=64)  # type: ignore[call-arg, arg-type]
        return out + 1, lse

    want = layer(*tensors)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(*tensors)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_weights_that_want_gradients() -> None:
    """A model's parameters do unless they are told otherwise."""
    mla = simulated()
    given_ = arguments()
    want = mla.chunked_prefill(**{**given_, "out": None, "lse": None})
    given_["kv_b"] = torch.nn.Parameter(given_["kv_b"])
    got = mla.chunked_prefill(**given_)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


# ---- The reference, and verification itself --------------------------------------------------------------------------


def test_reference_is_the_definition() -> None:
    """A loop over queries and tokens, with keys made token by token."""
    problem = PrefillProblem(q=(3, 0, 2), k=(20, 4, 2), heads=2, workspace=9, margin=1)
    q, latent, kv_b, cache, table, borders, lengths = (
        x.double() if x.is_floating_point() else x
        for x in make_chunked_inputs(problem, simulated().manifest, "cpu").arguments
    )
    out, lse = chunked_prefill_reference(q, latent, kv_b, cache, table, borders, lengths, softmax_scale=0.3)
    for i in range(3):
        context = [cache[table[i, t // 16], t % 16] for t in range(int(lengths[i]))]
        for row in range(int(borders[i]), int(borders[i + 1])):
            seen = torch.stack([*context, *latent[int(borders[i]) : row + 1]])
            for head in range(2):
                k = torch.cat([seen[:, :128] @ kv_b[head, :64].T, seen[:, 128:]], 1)
                scores = k @ q[row, head] * 0.3
                torch.testing.assert_close(lse[head, row], scores.logsumexp(0))
                torch.testing.assert_close(out[row, head], scores.softmax(0) @ (seen[:, :128] @ kv_b[head, 64:].T))
    assert bool((out[[0, -1]] == 0).all()) and bool((lse[:, [0, -1]] == math.inf).all())


@given(st.integers(0, 2**32 - 1))
def test_a_problem_is_its_text(seed: int) -> None:
    kernel = kernel_of(simulated().manifest)
    problem = random_chunked_problem(random.Random(seed), kernel, 3000)
    assert PrefillProblem.parse(str(problem)) == problem and problem.kind == "chunked"


@pytest.mark.parametrize(
    "text", ["q=2 k=1 workspace=9", "q=1 k=1 workspace=9 causal=0", "q=1 k=1 workspace=-1", "q=1 k=1 total_known=1"]
)
def test_texts_that_are_no_problem(text: str) -> None:
    with pytest.raises(ValueError):
        PrefillProblem.parse(f"prefill {text}")


def test_some_of_the_random_problems_are_chunked() -> None:
    drawn = random_problems(simulated().manifest, 9, 0, 400)
    assert [problem.workspace > 0 for problem in drawn] == [False, False, True] * 3


@dataclass
class Wrong:
    """The references, of which that of chunked prefill has a fault."""

    manifest: Any
    fault: str

    def prefill(
        self, *tensors: torch.Tensor, causal: bool, softmax_scale: float | None, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        scale = softmax_scale or self.manifest.softmax_scale
        want, want_lse = prefill_reference(*tensors, softmax_scale=scale, causal=causal)  # type: ignore[misc]
        out.copy_(want)
        lse.copy_(want_lse)

    def chunked_prefill(
        self, *tensors: torch.Tensor, softmax_scale: float | None, out: torch.Tensor, lse: torch.Tensor, **_: object
    ) -> None:
        *others, borders, lengths = tensors
        if self.fault == "last token of the context":
            lengths = (lengths - 1).clamp(min=0)
        scale = softmax_scale or self.manifest.softmax_scale
        want, want_lse = chunked_prefill_reference(*others, borders, lengths, softmax_scale=scale)  # type: ignore[arg-type]
        out.copy_(want)
        lse.copy_(want_lse)


@pytest.mark.parametrize("fault", ["", "last token of the context"])
def test_verification_finds_faults_and_makes_them_small(fault: str) -> None:
    wrong: Any = Wrong(simulated().manifest, fault)
    kernel = kernel_of(wrong.manifest)
    problems = [random_chunked_problem(random.Random(seed), kernel, 60) for seed in range(20)]
    report = verify_problems(wrong, problems, device="cpu")
    if not fault:
        assert report.ok and report.counts == {"chunked": 20}
        return
    assert report.failure is not None
    small = report.failure.problem
    assert small.workspace and small.heads == 1 and (small.q, small.k) == ((1,), (2,))
