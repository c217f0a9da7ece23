"""The prefill kernel: its plan, its machine code, its checks, and its results under the simulator."""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from mlaforge.api import MLA
from mlaforge.compiler import compile_kernel
from mlaforge.manifest import Manifest, read_manifest
from mlaforge.prefill_verify import (
    PrefillProblem,
    kernel_of,
    make_inputs,
    random_problem,
    run_problem,
    verify_problems,
)
from mlaforge.reference import prefill_reference
from mlaforge.simulator import Simulator, SimulatorOptions
from mlaforge.trace import read_events
from mlaforge_generator.block import SMEM_ALIGNMENT
from mlaforge_generator.cost import prefill_cost
from mlaforge_generator.errors import SpecError
from mlaforge_generator.plan import make_plan
from mlaforge_generator.prefill_plan import PrefillPlan
from mlaforge_generator.spec import Spec
from mlaforge_generator.target import H200
from prefilling import HEADS, SIMULATED_DTYPE, Prefill, folder_of, simulated, spec_of
from strategies import specs
from test_verify import one_thread as one_thread

GENERATED = Path(__file__).parents[1] / "generated"
# One of the shipped folders for each shape: the kernels of the others differ in the name of the spec alone.
FOLDERS = [GENERATED / name for name in ("deepseek_v3", "glm_5", "minicpm3", "mistral_small_4")]
MODES = ("random", "lazy", "eager")
SHAPES = list(HEADS)


# ---- Plan ------------------------------------------------------------------------------------------------------------


def plan_of(spec: Spec) -> PrefillPlan:
    prefill = make_plan(spec).kernels[-1]
    assert isinstance(prefill, PrefillPlan)
    return prefill


@pytest.mark.parametrize(
    ("shape", "tile", "stages", "queries", "begun", "held"),
    [
        ((192, 128), (128, 128), 2, 1, 16, True),
        ((256, 256), (128, 80), 2, 1, 0, False),
        ((96, 64), (192, 96), 3, 2, 8, True),
        ((128, 128), (128, 128), 2, 2, 16, True),
    ],
)
def test_tiles_of_the_models(
    shape: tuple[int, int], tile: tuple[int, int], stages: int, queries: int, begun: int, held: bool
) -> None:
    plan = plan_of(spec_of(shape))
    assert (plan.d_qk, plan.d_v) == shape
    assert (plan.tile.rows, plan.tile.tokens) == tile
    assert (plan.tile.stages, plan.tile.queries) == (stages, queries)
    assert (plan.tile.begun, plan.tile.held) == (begun, held)


@given(specs())
def test_invariants_of_any_plan(spec: Spec) -> None:
    plan = make_plan(spec)
    prefill, target = plan.kernels[-1], plan.target
    (*_, last) = plan.choices
    if not isinstance(prefill, PrefillPlan):
        assert last.field == "kernels.prefill" and last.value == "none" and "needs" in last.why
        return
    assert [c.field for c in plan.choices[-3:]] == [f"kernels.prefill.{n}" for n in ("tile_q", "tile_kv", "stages")]
    why = plan.choices[-2].why
    assert ("beside P V" in why) == (prefill.tile.begun > 0)
    assert ("results late" in why) == prefill.tile.held
    regions = {region.name: region for region in prefill.smem.regions}
    for before, after in itertools.pairwise(prefill.smem.regions):
        assert before.offset + before.size == after.offset
    assert after.offset + after.size == prefill.smem.total <= target.smem_per_block
    assert all(regions[n].offset % SMEM_ALIGNMENT == 0 for n in "QKV")
    assert all(regions[n].size // regions[n].count % SMEM_ALIGNMENT == 0 for n in "QKV")
    barriers = {barrier.name: barrier for barrier in prefill.mbarriers}
    for name, barrier in (("Q", "q_full"), ("K", "k_full"), ("V", "v_full"), ("V", "v_landed")):
        assert regions[name].size == barriers[barrier].count * barriers[barrier].bytes < 1 << 20
    for before_b, after_b in itertools.pairwise(prefill.mbarriers):
        assert before_b.offset + 8 * before_b.count == after_b.offset
    assert regions["barriers"].offset == prefill.mbarriers[0].offset
    assert regions["barriers"].size == 8 * sum(barrier.count for barrier in prefill.mbarriers)
    tile = prefill.tile
    assert tile.rows == 64 * tile.groups and tile.stages >= 2
    assert barriers["item_empty"].arrivals == 32 * (4 * tile.groups + 2)
    boxes = {each.tensor: each.box for each in prefill.tensor_maps}
    for tensor, barrier, subtiles in (
        ("q", "q_full", tile.subtiles_qk),
        ("k", "k_full", tile.subtiles_qk),
        ("v", "v_full", prefill.d_v // 64),
    ):
        assert 2 * math.prod(boxes[tensor]) * subtiles == barriers[barrier].bytes
    available = {role.name: role.registers for role in prefill.roles}
    for name in {use.role for use in prefill.registers}:
        assert sum(use.registers for use in prefill.registers if use.role == name) <= available[name]
    assert sum(role.warps for role in prefill.roles) * 32 == prefill.threads
    # What is given back must be enough for what is taken: the launch hands out equal parts, in pieces of 8.
    launched = target.registers_per_sm // prefill.threads // 8 * 8
    taken = sum(role.warps * 32 * role.registers for role in prefill.roles)
    assert taken <= launched * prefill.threads <= target.registers_per_sm


@pytest.mark.parametrize(
    ("choices", "field", "words"),
    [
        ({"stages": 1}, "kernels.prefill.stages", ("needs 2 stages; got 1",)),
        ({"stages": 4}, "kernels.prefill.stages", ("4 stages of 64 tokens need", "232,448 B", "lower stages")),
        ({"tile_q": 192, "tile_kv": 128}, "kernels.prefill.tile_kv", ("192 x 64", "got 192 x 128")),
        ({"tile_kv": 128, "stages": 3}, "kernels.prefill.stages", ("3 stages of 128 tokens need",)),
    ],
)
def test_what_can_t_be_names_the_field(choices: dict[str, int], field: str, words: tuple[str, ...]) -> None:
    shape = (256, 256) if choices == {"stages": 4} else (192, 128)
    with pytest.raises(SpecError) as caught:
        make_plan(spec_of(shape, **choices))
    (problem,) = caught.value.problems
    assert problem.field == field and problem.line == 4
    assert all(word in problem.message for word in words), problem.message


def test_heads_without_a_kernel_are_an_error_only_where_one_is_asked_for() -> None:
    tree = spec_of((192, 128)).model_dump(exclude_none=True)
    for model in ({"v_head_dim": 96}, {"qk_nope_head_dim": 130}, {"qk_nope_head_dim": 960}):
        broken = {**tree, "model": {**tree["model"], **model}}
        plan = make_plan(Spec.model_validate(broken))
        assert plan.kernels[-1].name == "merge" and "the prefill kernel needs" in plan.choices[-1].why
        broken["kernels"] = {"prefill": {"stages": 2}}
        with pytest.raises(SpecError) as caught:
            make_plan(Spec.model_validate(broken))
        assert caught.value.problems[0].field == f"model.{next(iter(model))}"


def test_choices_are_obeyed() -> None:
    plan = plan_of(spec_of((192, 128), tile_q=128, tile_kv=96, stages=2))
    assert (plan.tile.rows, plan.tile.tokens, plan.tile.stages, plan.tile.queries) == (128, 96, 2, 2)
    assert not [c for c in make_plan(spec_of((96, 64), tile_q=128)).choices if c.field == "kernels.prefill.tile_q"]


# ---- Machine code ----------------------------------------------------------------------------------------------------


@functools.cache
def compiled(source: Path) -> Any:
    return compile_kernel(source).with_sass()


def test_one_kernel_for_each_shape() -> None:
    def text(folder: Path) -> str:
        return re.sub("//.*", "", (folder / "prefill.cu").read_text())

    assert {text(path.parent) for path in GENERATED.glob("*/manifest.json")} == {text(folder) for folder in FOLDERS}
    assert len({text(folder) for folder in FOLDERS}) == len(FOLDERS) == len(SHAPES)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_shipped_kernel(folder: Path) -> None:
    manifest = read_manifest(folder)
    kernel = kernel_of(manifest)
    report = compiled(kernel.source).kernels["mla_prefill"]
    assert not report.serialized and not compiled(kernel.source).warnings
    assert report.spill_stores == report.spill_loads == report.stack_frame == report.static_smem == 0
    assert report.registers == {384: 168, 512: 128}[kernel.threads]
    # Scores of a first block, of the others, and of a last one half as wide; P V beside each of the latter, and last.
    scores, values = kernel.constants["d_qk"] // 16, kernel.constants["tile_kv"] // 16
    narrow = kernel.constants["tile_kv"] == 128
    assert report.sass["HGMMA"] == (3 if narrow else 2) * scores + (3 if narrow else 2) * values + narrow * values // 2
    assert report.sass["USETMAXREG"] == 2 and report.sass["UTMALDG"] >= 3
    assert report.sass.get("LDL", 0) == report.sass.get("STL", 0) == 0


def test_other_choices_compile_without_spills() -> None:
    for spec in (spec_of((192, 128), tile_kv=96), spec_of((256, 256), "fp16", tile_kv=64)):
        report = compiled(folder_of(spec) / "prefill.cu").kernels["mla_prefill"]
        assert report.spill_stores == report.spill_loads == 0 and not report.serialized


# ---- Results under the simulator -------------------------------------------------------------------------------------


def accept(mla: MLA, problem: PrefillProblem, options: SimulatorOptions) -> None:
    mla.backend.options = options  # type: ignore[union-attr]
    errors = run_problem(mla, problem, "cpu")
    assert errors.ok, f"{problem} with {options}: {errors.failures}"


EDGES = (
    # Rows, blocks and heads of every kind: empty sequences, single rows, tiles with rows of one warpgroup only.
    PrefillProblem(q=(0, 1, 64, 129, 0, 300), k=(0, 1, 64, 129, 70, 300), heads=3),
    PrefillProblem(q=(5, 200, 70), k=(2, 20, 0), heads=2),
    PrefillProblem(q=(64, 130), k=(500, 1), causal=False, heads=2, nan_sequence=1),
    PrefillProblem(q=(1, 70), k=(513, 70), heads=2, margin=3, interleaved=True, q_gain=32, softmax_scale=0.3),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_edges(shape: tuple[int, int]) -> None:
    mla = simulated(shape)
    for seed, problem in enumerate(EDGES):
        # With a single multiprocessor one block has all the tiles.
        accept(mla, problem, SimulatorOptions(seed=seed, mode=MODES[seed % 3], sms=1 + seed % 3))


# Scores that stand out: at all, to just below and just above what a row may refer to, by more than float32 has powers,
# and most of all in the first block. Of rows that see nothing and of sequences without tokens, too.
SPIKES = (
    PrefillProblem(q=(130, 5, 70, 0, 2), k=(400, 2, 230, 7, 0), heads=2, spike=40),
    PrefillProblem(q=(70,), k=(500,), causal=False, spike=3),
    PrefillProblem(q=(70,), k=(390,), spike=8),
    PrefillProblem(q=(200,), k=(200,), spike=12, q_gain=8),
    PrefillProblem(q=(70, 70), k=(321, 50), spike=300),
    PrefillProblem(q=(70,), k=(390,), causal=False, spike=-300, q_gain=32),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores_that_stand_out(shape: tuple[int, int]) -> None:
    mla = simulated(shape)
    for seed, problem in enumerate(SPIKES):
        accept(mla, problem, SimulatorOptions(seed=seed, mode=MODES[seed % 3], sms=1 + seed % 2))


@pytest.mark.parametrize("nats", [8, 9, 10, 11, 11.5, 12])
def test_a_reference_that_is_just_not_followed(nats: float) -> None:
    """In fp16, which ends at 65504, to the most that a probability may be, beyond it, and beyond fp16."""
    mla = simulated((128, 128))
    inputs = make_inputs(PrefillProblem(q=(64,), k=(200,), causal=False), mla.manifest, "cpu")
    inputs.q.fill_(1)
    inputs.k.fill_(0)
    inputs.k[150] = nats / (mla.manifest.softmax_scale * inputs.k.shape[-1])
    out, lse = mla.prefill(*inputs.arguments, causal=False)
    want, want_lse = prefill_reference(*inputs.arguments, softmax_scale=mla.manifest.softmax_scale, causal=False)
    torch.testing.assert_close(out.double(), want, atol=2e-4, rtol=2**-9)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=0)


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32 - 1),
    schedule=st.integers(0, 2**32 - 1),
    mode=st.sampled_from(MODES),
    shape=st.sampled_from(SHAPES),
)
def test_random_problems_under_random_schedules(seed: int, schedule: int, mode: str, shape: tuple[int, int]) -> None:
    mla = simulated(shape)
    problem = random_problem(random.Random(seed), kernel_of(mla.manifest), 300)
    accept(mla, problem, SimulatorOptions(seed=schedule, mode=mode))


def test_many_sequences_and_sections_of_heads() -> None:
    """More sequences than lanes of the warp that finds tiles, and tiles of all sections exactly once."""
    q = tuple(n % 4 * 50 for n in range(70))
    accept(simulated((96, 64)), PrefillProblem(q=q, k=q, heads=2), SimulatorOptions(sms=3))


@pytest.mark.parametrize("shape", [(192, 128), (256, 256)], ids=str)
def test_the_plan_counts_the_products_that_the_kernel_issues(shape: tuple[int, int], tmp_path: Path) -> None:
    trace, tokens = tmp_path / "events", 200
    # Kernels of their own: how many blocks a call has is worked out once for tensors of its layout.
    folder = folder_of(spec_of(shape, SIMULATED_DTYPE[shape]))
    mla = Prefill(folder, Simulator(SimulatorOptions(trace=trace, sms=1)))
    inputs = make_inputs(PrefillProblem(q=(tokens,), k=(tokens,)), mla.manifest, "cpu")
    mla.prefill(*inputs.arguments)
    lines = kernel_of(mla.manifest).source.read_text().splitlines()
    places = [event.place.split(":") for event in read_events(trace) if event.what == "wgmma"]
    # Products of 16 tokens with V, which take P from registers; each is an event of the four warps of its warpgroup.
    values = [line for file, line in places if file == "prefill.cu" and "wgmma_rs_mn" in lines[int(line) - 1]]
    assert len(values) < len(places)
    cost = prefill_cost(plan_of(spec_of(shape)), H200, batch=1, tokens=tokens, heads=1)
    assert len(values) // 4 * 64 * 16 * 2 * sum(shape) == cost.padded_flops


def test_any_schedule_gives_the_same_bits() -> None:
    mla = simulated((192, 128))
    inputs = make_inputs(PrefillProblem(q=(200, 140), k=(330, 140), heads=2), mla.manifest, "cpu")
    results = []
    for seed, mode in enumerate(MODES):
        mla.backend.options = SimulatorOptions(seed=seed, mode=mode, sms=1 + 2 * seed)  # type: ignore[union-attr]
        results.append(mla.prefill(inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


# ---- The call --------------------------------------------------------------------------------------------------------


def arguments(manifest: Manifest, total_q: int = 20, total_k: int = 30, heads: int = 2) -> dict[str, torch.Tensor]:
    kernel = kernel_of(manifest)
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, width: int) -> torch.Tensor:
        return torch.randn(rows, heads, width, generator=generator).bfloat16()

    return {
        "q": random(total_q, kernel.constants["d_qk"]),
        "k": random(total_k, kernel.constants["d_qk"]),
        "v": random(total_k, kernel.constants["d_v"]),
        "cu_seqlens_q": torch.tensor([0, 5, total_q], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 9, total_k], dtype=torch.int32),
    }


WRONG: dict[str, tuple[str, Callable[[], torch.Tensor], str]] = {
    "q of another width": ("q", lambda: torch.zeros(20, 2, 64).bfloat16(), r"q has shape .*\(total_q, heads, 96\)"),
    "k of another width": ("k", lambda: torch.zeros(30, 2, 64).bfloat16(), r"k has shape .*\(total_k, heads, 96\)"),
    "v of another width": ("v", lambda: torch.zeros(30, 2, 96).bfloat16(), r"v has shape .*\(total_k, heads, 64\)"),
    "q without heads": ("q", lambda: torch.zeros(20, 0, 96).bfloat16(), r"q has shape"),
    "q in four dimensions": ("q", lambda: torch.zeros(1, 20, 2, 96).bfloat16(), r"q has shape \(1, 20, 2, 96\)"),
    "k of another dtype": ("k", lambda: torch.zeros(30, 2, 96).half(), r"k has dtype .*bfloat16"),
    "heads of k": ("k", lambda: torch.zeros(30, 1, 96).bfloat16(), r"k has 1 heads, q has 2; they must agree"),
    "rows of v": ("v", lambda: torch.zeros(29, 2, 64).bfloat16(), r"v has 29 rows, k has 30; they must agree"),
    "lengths of q": ("cu_seqlens_q", lambda: torch.zeros(3), r"cu_seqlens_q has dtype torch.float32; .*int32"),
    "lengths of another batch": (
        "cu_seqlens_k",
        lambda: torch.zeros(5, dtype=torch.int32),
        r"cu_seqlens_k has 5 entries, cu_seqlens_q has 3; they must agree",
    ),
    "no lengths": ("cu_seqlens_q", lambda: torch.zeros(0, dtype=torch.int32), r"cu_seqlens_q has shape \(0\)"),
    "strided lengths": (
        "cu_seqlens_q",
        lambda: torch.zeros(6, dtype=torch.int32)[::2],
        r"cu_seqlens_q has strides \(2,\)",
    ),
    "k that TMA can't step": (
        "k",
        lambda: torch.zeros(30, 2, 97).bfloat16()[..., :96],
        r"k has a stride of 388 B in dimension 0",
    ),
    "v with a strided last dimension": (
        "v",
        lambda: torch.zeros(30, 2, 128).bfloat16()[..., ::2],
        r"v has stride 2 in its last dimension",
    ),
    "q 2 bytes off": (
        "q",
        lambda: torch.zeros(20 * 2 * 96 + 1).bfloat16()[1:].view(20, 2, 96),
        r"q begins at address 0x[0-9a-f]+, 2 B behind",
    ),
    "out of another shape": ("out", lambda: torch.zeros(20, 2, 96).bfloat16(), r"out has shape \(20, 2, 96\)"),
    "out whose rows overlap": ("out", lambda: torch.zeros(1, 2, 64).bfloat16().expand(20, 2, 64), r"out .* overlap"),
    "lse of another shape": ("lse", lambda: torch.zeros(20, 2), r"lse has shape \(20, 2\).*\(2, 20\)"),
    "lse of another dtype": ("lse", lambda: torch.zeros(2, 20).half(), r"lse has .*float16.*torch.float32"),
}


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_wrong_arguments_are_refused(case: str) -> None:
    name, make, message = WRONG[case]
    mla = simulated((96, 64))
    out = torch.full((20, 2, 64), math.nan, dtype=torch.bfloat16)
    given_ = {**arguments(mla.manifest), "out": out, "lse": torch.full((2, 20), math.nan)}
    given_[name] = make()
    with pytest.raises(ValueError, match=message):
        mla.prefill(**given_)  # type: ignore[arg-type]
    assert bool(out.isnan().all())


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_wrong_scales_are_refused(scale: float) -> None:
    mla = simulated((96, 64))
    with pytest.raises(ValueError, match="softmax_scale"):
        mla.prefill(**arguments(mla.manifest), softmax_scale=scale)


def test_a_spec_without_the_kernel_says_so() -> None:
    tree = spec_of((96, 64)).model_dump(exclude_none=True)
    tree["model"]["v_head_dim"] = 96
    mla = object.__new__(MLA)
    mla.manifest, mla._prefill = read_manifest(folder_of(Spec.model_validate(tree))), None
    with pytest.raises(ValueError, match="has no prefill kernel"):
        mla.prefill(**arguments(simulated((96, 64)).manifest))


def test_nothing_to_do() -> None:
    mla = simulated((96, 64))
    given_ = arguments(mla.manifest)
    out, lse = mla.prefill(**{**given_, "q": given_["q"][:0]})
    assert out.shape == (0, 2, 64) and lse.shape == (2, 0)
    # No tokens at all: K and V have no address.
    empty = {"k": given_["k"][:0].clone(), "v": given_["v"][:0].clone(), "cu_seqlens_k": torch.zeros(3).int()}
    out, lse = mla.prefill(**{**given_, **empty})
    assert bool((out == 0).all()) and bool((lse == math.inf).all())
    # No sequences.
    none = torch.zeros(1, dtype=torch.int32)
    assert mla.prefill(**{**given_, "cu_seqlens_q": none, "cu_seqlens_k": none})[0].shape == (20, 2, 64)


def test_lengths_beyond_the_tensors_are_cut() -> None:
    mla = simulated((96, 64))
    given_ = arguments(mla.manifest)
    want = mla.prefill(**given_)
    given_["cu_seqlens_q"][2] = 1_000_000
    given_["cu_seqlens_k"][2] = 2_000_000_000
    got = mla.prefill(**given_)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_results_into_a_wider_tensor() -> None:
    mla = simulated((96, 64))
    given_ = arguments(mla.manifest)
    want, want_lse = mla.prefill(**given_)
    wide = torch.full((20, 2, 80), math.nan, dtype=torch.bfloat16)
    lse = torch.empty(2, 20)
    mla.prefill(**given_, out=wide[..., 8:72], lse=lse)
    assert torch.equal(wide[..., 8:72], want) and torch.equal(lse, want_lse)
    assert bool(wide[..., :8].isnan().all()) and bool(wide[..., 72:].isnan().all())


def test_operators_know_their_results_without_running() -> None:
    mla = simulated((96, 64))
    key = mla.runner.key
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(tensor) for tensor in arguments(mla.manifest).values()]
        out, lse = torch.ops.mlaforge.prefill(*fake, key, True, 1.0)
        assert out.shape == (20, 2, 64) and out.dtype == torch.bfloat16
        assert lse.shape == (2, 20) and lse.dtype == torch.float32
        with pytest.raises(ValueError, match="k has 3 heads"):
            torch.ops.mlaforge.prefill(fake[0], torch.empty(30, 3, 96).bfloat16(), *fake[2:], key, True, 1.0)


# ---- The reference, and verification itself --------------------------------------------------------------------------


@settings(max_examples=25)
@given(n=st.integers(1, 9), length=st.integers(1, 12), heads=st.integers(1, 3), seed=st.integers(0, 99))
def test_reference_is_torchs_attention(n: int, length: int, heads: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(rows, heads, 5, generator=generator).double() for rows in (n, length, length))
    for causal in (False, True):
        seen = torch.ones(n, length, dtype=torch.bool)
        if causal:
            seen = seen.tril(length - n)
        some = seen.any(1)
        want = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=seen, scale=0.7
        ).transpose(0, 1)
        ends = torch.tensor([0, 0, n]), torch.tensor([0, 0, length])
        out, lse = prefill_reference(q, k, v, *ends, softmax_scale=0.7, causal=causal)
        torch.testing.assert_close(out[some], want[some])
        scores = (torch.einsum("qhd,khd->hqk", q, k) * 0.7).masked_fill(~seen, -math.inf)
        torch.testing.assert_close(lse[:, some], scores.logsumexp(-1)[:, some])
        assert bool((out[~some] == 0).all()) and bool((lse[:, ~some] == math.inf).all())


def test_reference_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(PrefillProblem(q=(7, 5), k=(9, 3), heads=2), simulated((96, 64)).manifest, "cpu")
    given_ = (inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    want = prefill_reference(*given_, softmax_scale=1.0, causal=True)
    monkeypatch.setattr("mlaforge.reference._SCORES_AT_ONCE", 20)
    torch.testing.assert_close(prefill_reference(*given_, softmax_scale=1.0, causal=True), want)


@given(st.integers(0, 2**32 - 1))
def test_a_problem_is_its_text(seed: int) -> None:
    problem = random_problem(random.Random(seed), kernel_of(simulated((96, 64)).manifest), 3000)
    assert PrefillProblem.parse(str(problem)) == problem
    assert str(problem) in problem.to_repro("x")


@pytest.mark.parametrize(
    "text",
    ["q=1 k=1 workspace=1 spike=3", "q=1", "q=1 k=x", "q=1,2 k=3", "q=1 k=1 heads=0", "q=1 k=1 what=1", "q=1 k=1 q=2"],
)
def test_texts_that_are_no_problem(text: str) -> None:
    with pytest.raises(ValueError):
        PrefillProblem.parse(f"prefill {text}")
    with pytest.raises(ValueError, match="begins with prefill"):
        PrefillProblem.parse(text)


@dataclass
class Wrong:
    """The reference with a fault in the rows of one sequence."""

    manifest: Manifest
    fault: str

    def prefill(
        self, *tensors: torch.Tensor, causal: bool, softmax_scale: float | None, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        scale = softmax_scale or self.manifest.softmax_scale
        if self.fault == "top-left mask" and causal:
            lengths = tensors[4] - tensors[4][0]
            tensors = (*tensors[:4], tensors[4][0] + torch.minimum(lengths, tensors[3] - tensors[3][0]))
        want, want_lse = prefill_reference(*tensors, softmax_scale=scale, causal=causal)  # type: ignore[misc]
        rows = slice(int(tensors[3][0]), int(tensors[3][-1]))
        out[rows], lse[:, rows] = want[rows].to(out.dtype), want_lse[:, rows].float()
        if self.fault == "base-2 lse":
            lse /= math.log(2)
        if self.fault == "one row more" and rows.stop < out.shape[0]:
            out[rows.stop] = 0


@pytest.mark.parametrize("fault", ["", "top-left mask", "base-2 lse", "one row more"])
@pytest.mark.usefixtures("one_thread")
def test_verification_finds_faults_and_makes_them_small(fault: str) -> None:
    wrong: Any = Wrong(simulated((96, 64)).manifest, fault)
    kernel = kernel_of(wrong.manifest)
    seen: list[PrefillProblem] = []
    problems = [random_problem(random.Random(seed), kernel, 60) for seed in range(30)]
    report = verify_problems(wrong, problems, seen.append, device="cpu")
    assert seen == problems[: report.problems]
    failure = report.failure
    if not fault:
        assert failure is None and seen == problems and sum(report.counts.values()) == 30
        return
    assert failure is not None and failure.found == seen[-1] and not failure.errors.ok
    assert len(failure.problem.q) == 1 and failure.problem.q[0] <= 2 and failure.problem.heads == 1
