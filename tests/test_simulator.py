"""The simulator: the shipped kernels' text gives the right results under it, and the same seed gives the same run."""

from __future__ import annotations

import dataclasses
import functools
import random
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mlaforge
from folders import generate
from mlaforge.api import MLA
from mlaforge.launch import Cuda
from mlaforge.simulator import (
    CompilerMissingError,
    SimulationError,
    SimulatorOptions,
    find_compiler,
    unowned_slots,
)
from mlaforge.verify import Problem, make_inputs, random_problem, run_problem
from mutants import mutant_cache

GENERATED = Path(__file__).parents[1] / "generated"
FOLDERS = sorted(path.parent for path in GENERATED.glob("*/manifest.json"))
MODES = ("eager", "lazy", "random")


@functools.cache
def simulated(folder: Path) -> MLA:
    return mlaforge.load(folder, device="sim")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_shipped_kernels(folder: Path) -> None:
    mla = simulated(folder)
    heads = int(mla.manifest.model["num_attention_heads"])
    problems = (
        Problem(lengths=(130, 0, 1), h_q=min(heads, 40)),
        Problem(lengths=(2, 70), s_q=3, h_q=min(heads, 20), causal=True, cache_layers=2),
        Problem(lengths=(700,), h_q=16, table_extra_columns=2),
    )
    for seed, problem in enumerate(problems):
        mla.backend.options = SimulatorOptions(seed=seed, mode=MODES[seed])
        errors = run_problem(mla, problem, "cpu")
        assert errors.ok, f"{problem.to_repro(mla.manifest.name)} --device sim: {errors.failures}"


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), schedule=st.integers(0, 2**32 - 1), mode=st.sampled_from(MODES))
def test_random_problems_under_random_schedules(seed: int, schedule: int, mode: str) -> None:
    rng = random.Random(seed)
    mla = simulated(rng.choice(FOLDERS))
    problem = random_problem(rng, mla.manifest, 500)
    # Requests enough for more than two warps of the schedule. With 300, each an item that hundreds of threads walk
    # through, a run takes half a minute and shows no more.
    lengths = problem.lengths[:72]
    nan_request = problem.nan_request if problem.nan_request < len(lengths) else -1
    problem = dataclasses.replace(problem, lengths=lengths, nan_request=nan_request)
    mla.backend.options = SimulatorOptions(seed=schedule, mode=mode)
    errors = run_problem(mla, problem, "cpu")
    repro = f"{problem.to_repro(mla.manifest.name)} --device sim --mode {mode} --schedule-seed {schedule}"
    assert errors.ok, f"{repro}: {errors.failures}"


PAGES = (1, 16, 128)


@pytest.mark.parametrize("page_size", PAGES)
def test_other_pages_and_fp16(page_size: int, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        "name: pages\n"
        "model: {num_attention_heads: 16, kv_lora_rank: 256, qk_nope_head_dim: 64, qk_rope_head_dim: 32,"
        " v_head_dim: 64}\n"
        f"cache: {{dtype: fp16, page_size: {page_size}}}\n"
    )
    mla = mlaforge.load(spec, device="sim")
    errors = run_problem(mla, Problem(lengths=(page_size + 70, 3, 0), h_q=16, table_filler=-1), "cpu")
    assert errors.ok, errors.failures


def outcome(mla: MLA, seed: int, mode: str, trace: Path) -> tuple[bytes, str]:
    inputs = make_inputs(Problem(lengths=(300, 70), h_q=16), mla.manifest, "cpu")
    mla.backend.options = SimulatorOptions(seed=seed, mode=mode, trace=trace)
    out, lse = mla.decode(inputs.q, inputs.kv_cache, inputs.block_table, inputs.cache_seqlens)
    return out.view(torch.int16).numpy().tobytes() + lse.numpy().tobytes(), trace.read_text()


@pytest.mark.parametrize("mode", MODES)
def test_same_seed_same_run(mode: str, tmp_path: Path) -> None:
    mla = simulated(GENERATED / "deepseek_v3")
    first = outcome(mla, 7, mode, tmp_path / "trace")
    outcome(mla, 8, mode, tmp_path / "other")
    assert outcome(mla, 7, mode, tmp_path / "again") == first
    assert len(first[1].splitlines()) > 100
    # Another seed is another order of events, and the same result to the bit.
    other = outcome(mla, 9, mode, tmp_path / "other")
    assert other[1] != first[1] and other[0] == first[0]


@pytest.mark.gpu
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_same_results_as_on_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both multiply exactly and add in float32; only the order of the sums and the last bit of exp2 may differ."""
    here, there = simulated(folder), mlaforge.load(folder)
    # As many multiprocessors: the same split, the same merge. Fewer than there are, for all blocks run together here.
    sms = 8
    monkeypatch.setattr(Cuda, "sm_count", lambda self, device: sms)
    for seed, problem in enumerate(
        (
            Problem(lengths=(130, 0, 1), h_q=16, seed=1),
            Problem(lengths=(2, 70), s_q=3, h_q=20, causal=True, q_gain=32, seed=2),
            Problem(lengths=(1500,), h_q=64, seed=3),
        )
    ):
        inputs = make_inputs(problem, here.manifest, "cpu")
        arguments = (inputs.q, inputs.kv_cache, inputs.block_table, inputs.cache_seqlens)
        scale = inputs.tensor_scale
        here.backend.options = SimulatorOptions(seed=seed, sms=sms)
        out, lse = here.decode(*arguments, causal=problem.causal, tensor_scale=scale)
        on_gpu = there.decode(
            *(tensor.cuda() for tensor in arguments),
            causal=problem.causal,
            tensor_scale=None if scale is None else scale.cuda(),
        )
        gpu_out, gpu_lse = on_gpu[0].cpu(), on_gpu[1].cpu()
        assert torch.equal(lse.isinf(), gpu_lse.isinf())
        finite = lse.isfinite()
        torch.testing.assert_close(lse[finite], gpu_lse[finite], atol=4e-6 * problem.q_gain, rtol=2e-6)
        # P is rounded to 16 bits after an exp2 that may differ in its last bit: 2^-9 of values of about 0.1.
        torch.testing.assert_close(out, gpu_out, atol=3e-4, rtol=2**-7)
        different = float((out != gpu_out).double().mean())
        assert different < 0.05, f"{different:.1%} of the elements differ in their last bit"


def test_more_parts_share_a_request_than_a_warp_has_lanes() -> None:
    """The lanes of a warp bring the partial results, and weigh them, one each at a time."""
    mla = simulated(GENERATED / "deepseek_v3")
    mla.backend.options = SimulatorOptions(sms=35)
    errors = run_problem(mla, Problem(lengths=(35 * 64 - 7,), h_q=3), "cpu")
    assert errors.ok, errors.failures


def test_input_out_of_bounds_is_reported() -> None:
    mla = simulated(GENERATED / "deepseek_v3")
    inputs = make_inputs(Problem(lengths=(200,), h_q=16), mla.manifest, "cpu")
    inputs.block_table[0, 1] = 1_000_000
    out, _ = mla.decode(inputs.q, inputs.kv_cache, inputs.block_table, inputs.cache_seqlens)
    # TMA fills with zeros what lies outside of the tensor: wrong, but no fault.
    assert bool(out.isfinite().all())
    short = inputs.cache_seqlens.new_empty(0)
    with pytest.raises(ValueError, match="cache_seqlens has 0 entries"):
        mla.decode(inputs.q, inputs.kv_cache, inputs.block_table, short)


def test_fault_names_kernel_line_block_and_warp(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLAFORGE_CACHE_DIR", str(mutant_cache(tmp_path_factory)))
    folder = tmp_path / "broken"
    shutil.copytree(GENERATED / "deepseek_v3", folder)
    text = (folder / "decode.cu").read_text()
    line = "    fence_proxy_async();\n"
    assert line in text
    (folder / "decode.cu").write_text(text.replace(line, "\n"))
    mla = mlaforge.load(folder, device="sim")
    inputs = make_inputs(Problem(lengths=(200,), h_q=64), mla.manifest, "cpu")
    with pytest.raises(
        SimulationError, match=r"decode\.cu:\d+: block \(\d+, \d+, \d+\), warp \d+, .*race.*\.cuh?:\d+.*seed 0"
    ):
        mla.decode(inputs.q, inputs.kv_cache, inputs.block_table, inputs.cache_seqlens)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(lengths=(130, 0, 1), h_q=16, table_extra_columns=2, table_padding=3),
        Problem(lengths=(64, 70), h_q=16, h_kv=2, cache_layers=3, spare_pages=4, table_filler=-1),
        Problem(lengths=(0,), h_q=16, cache_3d=True),
    ],
    ids=str,
)
def test_slots_that_no_request_has(problem: Problem) -> None:
    inputs = make_inputs(problem, simulated(GENERATED / "deepseek_v3").manifest, "cpu")
    cache = inputs.kv_cache
    tensors = {"kv_cache": cache, "block_table": inputs.block_table, "cache_seqlens": inputs.cache_seqlens}
    unowned = unowned_slots(tensors)
    assert unowned is not None
    marked = unowned.bool().repeat_interleave(8).as_strided(cache.size(), cache.stride(), cache.storage_offset())
    # What no token has is NaN in these problems; of the other layers nothing is said.
    assert torch.equal(marked, cache.isnan())
    assert int(unowned.sum()) * 8 == int(cache.isnan().sum())
    # One request after another may share pages: the longest counts.
    shared = {**tensors, "block_table": inputs.block_table.expand(2, -1, -1).flatten(0, 1)}
    shared["cache_seqlens"] = torch.cat([inputs.cache_seqlens // 2, inputs.cache_seqlens])
    assert torch.equal(unowned, unowned_slots(shared))
    assert unowned_slots({"kv_cache": cache}) is None


@pytest.fixture(scope="module")
def broken_tail(tmp_path_factory: pytest.TempPathFactory) -> MLA:
    """Kernels for pages of 16 tokens that leave the rows of V behind a request's last token as they are."""
    from mlaforge_generator.plan import make_plan
    from mlaforge_generator.render import render
    from mlaforge_generator.spec import load_spec

    folder = tmp_path_factory.mktemp("broken")
    spec = folder / "spec.yaml"
    spec.write_text(
        "name: broken\n"
        "model: {num_attention_heads: 16, kv_lora_rank: 256, qk_nope_head_dim: 64, qk_rope_head_dim: 32,"
        " v_head_dim: 64}\n"
        "cache: {page_size: 16}\n"
    )
    for name, text in render(make_plan(load_spec(spec))).items():
        (folder / name).write_text(text)
    text = (folder / "tile.cuh").read_text()
    line = "      store_shared_zero16(tile + sub * (Rows * 128) + first_row * 128 + i * 16);\n"
    assert line in text
    (folder / "tile.cuh").write_text(text.replace(line, ""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLAFORGE_CACHE_DIR", str(mutant_cache(tmp_path_factory)))
        return mlaforge.load(folder, device="sim")


@pytest.mark.parametrize("mode", MODES)
def test_uninitialised_memory_that_reaches_a_result_is_reported(broken_tail: MLA, mode: str) -> None:
    """By its origin, whatever bytes lie there: a page that nobody has copied, and slots of a page that nobody has."""
    store = r"^tile\.cuh:\d+: block \([\d, ]+\), warp \d+, thread \d+: this store to out writes what is undefined "
    who, where = r"warp \d+ of block \(\d+, \d+, \d+\)", r"at decode\.cuh?:\d+"
    read = rf"{who} reads byte \d+ of shared memory"
    broken_tail.backend.options = SimulatorOptions(mode=mode)
    for length, report in (
        (48, rf"{store}\({read}, which is uninitialised so far, {where}\)"),
        (56, rf"{store}\({who} copies uninitialised bytes of kv_cache at small_pages\.cuh:\d+; {read} {where}\)"),
    ):
        inputs = make_inputs(Problem(lengths=(length,), h_q=48), broken_tail.manifest, "cpu")
        inputs.kv_cache.nan_to_num_()
        with pytest.raises(SimulationError, match=report):
            broken_tail.decode(inputs.q, inputs.kv_cache, inputs.block_table, inputs.cache_seqlens)
    # Whole tiles have no tail.
    inputs = make_inputs(Problem(lengths=(64,), h_q=48), broken_tail.manifest, "cpu")
    broken_tail.decode(inputs.q, inputs.kv_cache, inputs.block_table, inputs.cache_seqlens)


@pytest.mark.parametrize("mode", MODES)
def test_nan_of_the_user_is_no_fault(mode: str) -> None:
    """In a query, or in a slot that a request has; beside slots that none has, which are copied and reach no result."""
    mla = simulated(GENERATED / "deepseek_v3")
    mla.backend.options = SimulatorOptions(mode=mode)
    problem = Problem(lengths=(70, 200), h_q=16, nan_request=1)
    errors = run_problem(mla, problem, "cpu")
    assert errors.ok, errors.failures
    inputs = make_inputs(problem, mla.manifest, "cpu")
    inputs.q[0, 0, 3] = torch.nan
    out, lse = mla.decode(inputs.q, inputs.kv_cache, inputs.block_table, inputs.cache_seqlens)
    assert bool(out[0, 0, 3].isnan().all()) and bool(lse[0, 3].isnan().all())
    assert int(out[0].isnan().any(-1).sum()) == 1 and bool(out[1].isnan().all())


def test_cpu_tensors_are_refused_by_the_kernels_for_a_gpu() -> None:
    mla = mlaforge.load(GENERATED / "deepseek_v3")
    inputs = make_inputs(Problem(lengths=(20,), h_q=16), mla.manifest, "cpu")
    with pytest.raises(ValueError, match="q is on cpu; these kernels run on cuda"):
        mla.decode(inputs.q, inputs.kv_cache, inputs.block_table, inputs.cache_seqlens)


def test_unknown_mode_and_device() -> None:
    with pytest.raises(ValueError, match="eager, lazy, random"):
        SimulatorOptions(mode="fast")
    with pytest.raises(ValueError, match="'cuda' or 'sim'"):
        mlaforge.load("deepseek_v3", device="tpu")
    with pytest.raises(ValueError, match="deepseek: neither a file nor a shipped spec; shipped are deepseek_v2, "):
        mlaforge.load("deepseek", device="sim")


def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CompilerMissingError, match="apt-get install g"):
        find_compiler()


@pytest.mark.parametrize(
    ("schedule", "rows", "stages"), [("plain", 64, 2), ("skewed", 64, 2), ("swapped", 16, 1), ("swapped", 40, 1)]
)
def test_the_fewest_stages_that_are_planned_do(schedule: str, rows: int, stages: int, tmp_path: Path) -> None:
    """A sweep takes every number of stages that the planner allows, and a deadlock there would hang a GPU."""
    folder = generate(tmp_path / "few", "mistral_small_4", schedule=schedule, tile_rows=rows, stages=stages)
    mla = mlaforge.load(folder, device="sim", simulator=SimulatorOptions(sms=3))
    for problem in (Problem(lengths=(500, 0, 130), h_q=16), Problem(lengths=(64,) * 5, h_q=5, s_q=2, causal=True)):
        errors = run_problem(mla, problem, "cpu")
        assert not errors.failures, errors.failures
