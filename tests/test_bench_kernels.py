"""The bench of prefill and of the kernels that move data, on a CPU, with times that are made up."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import mlaforge
from mlaforge.bench import session as sessions
from mlaforge.bench.cases import (
    PREFILL,
    SUITE_NAMES,
    MemoryCase,
    PrefillCase,
    choose_suites,
    memory_cases,
    prefill_cases,
)
from mlaforge.bench.machine import GEMM_FLOPS
from mlaforge.bench.memory import HEADS, copy_call, memory_call
from mlaforge.bench.prefill import FA3_NAMES, PREFILL_PEERS, PrefillProblem, make_prefill, prefill_call
from mlaforge.bench.session import COPY, OURS, BenchError, Options, Session, difference
from mlaforge.bench.timing import Timed
from mlaforge.reference import prefill_reference
from mlaforge_generator.bench_tables import bench_tables
from mlaforge_generator.report.plots import plots
from mlaforge_generator.report.results import Result
from test_bench import ROOT, SCALE, FakeDevice, Ours, play_gpu, run
from test_verify import one_thread as one_thread

CPU = torch.device("cpu")
CASE = PrefillCase(2, 40, 3)


# ---- Cases -----------------------------------------------------------------------------------------------------------


def test_cases_of_the_suites() -> None:
    assert prefill_cases(128) == (PrefillCase(4, 4096, 128), PrefillCase(1, 8192, 128), PrefillCase(1, 32_768, 16))
    assert prefill_cases(128, [(2, 64)]) == (PrefillCase(2, 64, 128),)
    assert prefill_cases(128, [(2, 64)], [4, 8]) == (PrefillCase(2, 64, 4), PrefillCase(2, 64, 8))
    assert {case.h for case in prefill_cases(128, heads=[20])} == {20} and len(prefill_cases(128, heads=[20])) == 3
    assert str(prefill_cases(128)[0]) == "4 x 4,096 tokens, 128 heads, causal"
    assert [str(case) for case in memory_cases()][:2] == ["gather, 524,288 tokens", "append, 524,288 tokens"]
    assert {case.tokens for case in memory_cases(7)} == {7} and len(memory_cases(7)) == 5
    assert [suite.name for suite in choose_suites(SUITE_NAMES)] == ["burst", "small", "sustained"]
    assert choose_suites(["prefill", "memory"], [(1, 64)], [16]) == ()
    with pytest.raises(ValueError, match="heads can't be chosen for memory"):
        choose_suites(["memory"], heads=[16])


def test_work_of_prefill_is_that_of_the_half_below_the_diagonal() -> None:
    """Beside the count of pairs that the mask leaves, which has half of the diagonal more."""
    case = PrefillCase(3, 500, 7)
    pairs = sum(i + 1 for i in range(500))
    assert case.flops(192, 128) == pytest.approx(3 * 7 * pairs * 2 * (192 + 128), rel=1 / 400)
    # 8 x 8192 x 16,384 x 320 by hand.
    assert PrefillCase(1, 8192, 128).flops(192, 128) == 2_748_779_069_440


# ---- Peers -----------------------------------------------------------------------------------------------------------


def attend(q: Any, k: Any, v: Any, borders: Any, scale: float) -> torch.Tensor:
    return prefill_reference(q, k, v, borders, borders, softmax_scale=scale, causal=True)[0].to(q.dtype)


def fake_varlen(wrap: Callable[[torch.Tensor], object], **wanted: Any) -> Any:
    def flash_attn_varlen_func(**kw: Any) -> Any:
        assert {name: kw[name] for name in wanted} == wanted and ("fa_version" in kw) == ("fa_version" in wanted)
        assert kw["cu_seqlens_q"] is kw["cu_seqlens_k"] and kw["causal"] and kw["num_splits"] == 1
        lengths = kw["cu_seqlens_q"].diff().tolist()
        assert kw["max_seqlen_q"] == kw["max_seqlen_k"] == max(lengths)
        return wrap(attend(kw["q"], kw["k"], kw["v"], kw["cu_seqlens_q"], kw["softmax_scale"]))

    return SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)


def fake_fwd() -> Any:
    def flash_attn_func(q: Any, k: Any, v: Any, *, softmax_scale: float, causal: bool) -> Any:
        assert causal
        b, s = q.shape[:2]
        out = attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), torch.arange(b + 1) * s, softmax_scale)
        return out.view(*q.shape[:3], -1)

    return SimpleNamespace(flash_attn_func=flash_attn_func)


class FakeRagged:
    def __init__(self, workspace: Any, layout: str, backend: str) -> None:
        assert (layout, backend) == ("NHD", "fa3")

    def plan(self, q_starts: Any, kv_starts: Any, heads: int, kv_heads: int, d_qk: int, **kw: Any) -> None:
        assert (heads, kv_heads, d_qk, kw["head_dim_vo"]) == (CASE.h, CASE.h, 192, 128) and kw["causal"]
        assert kw["q_data_type"] == torch.bfloat16
        self.planned = (q_starts, kw["sm_scale"])

    def run(self, q: Any, k: Any, v: Any) -> torch.Tensor:
        return attend(q, k, v, *self.planned)


FAKES: dict[str, tuple[str, Callable[[], Any]]] = {
    "fa3": ("flash_attn_interface", lambda: fake_varlen(lambda out: (out, None))),
    "fa3_vllm": ("fa3_vllm", lambda: fake_varlen(lambda out: out, fa_version=3)),
    "fa3_fwd": ("fa3_fwd_interface", fake_fwd),
    "flashinfer": ("flashinfer.prefill", lambda: SimpleNamespace(BatchPrefillWithRaggedKVCacheWrapper=FakeRagged)),
}


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins for all peers but torch, importable under their names."""
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    made = {}
    for name, (module, build) in FAKES.items():
        made[name] = build()
        monkeypatch.setitem(sys.modules, module, made[name])
    return made


def problem(case: PrefillCase = CASE) -> PrefillProblem:
    return make_prefill(Ours.manifest, case, CPU, 0)


@pytest.mark.parametrize("name", PREFILL_PEERS)
def test_each_adapter_calls_its_peer_as_the_peer_wants_it(fakes: dict[str, Any], name: str) -> None:
    given = problem()
    want = attend(given.q, given.k, given.v, given.cu_seqlens, SCALE).view(2, 40, 3, 128)
    assert torch.equal(prefill_call(Ours(), given)(), want)
    peer = PREFILL_PEERS[name]()
    peer.load()
    assert peer.refuses(given) is None
    prepared = peer.prepare(given)
    assert prepared.planning == ("host" if name == "flashinfer" else "none")
    for call in (prepared.ready, prepared.anew):
        out = call()
        assert out.shape == want.shape
        cosine, largest = difference(out, want)
        assert cosine < 1e-5 and largest < 0.05


def test_widths_that_flash_attention_3_has_no_kernel_for_are_refused() -> None:
    for d_qk, d_v, taken in ((192, 128, True), (128, 128, True), (256, 256, True), (96, 64, False), (256, 128, False)):
        q, v = torch.zeros(4, 1, d_qk), torch.zeros(4, 1, d_v)
        given = PrefillProblem(PrefillCase(1, 4, 1), q, q, v, torch.tensor([0, 4]), 1.0)
        reason = PREFILL_PEERS["fa3"]().refuses(given)
        assert (reason is None) == taken
    assert reason == "takes equal widths and (192, 128), not (256, 128)"
    assert PREFILL_PEERS["fa3_fwd"]().refuses(given) == "takes bfloat16 only"


# ---- Kernels that move data ------------------------------------------------------------------------------------------


# Whole pages: every row of a cache is written.
@pytest.mark.parametrize("case", memory_cases(192), ids=str)
def test_calls_are_checked_element_by_element(case: MemoryCase) -> None:
    call = memory_call(Ours(), case, CPU, 0)
    made = call.run()
    assert call.check(made) is None
    wrong = made.clone()
    wrong.flatten()[777] += 1
    assert str(call.check(wrong)).startswith(f"1 of {made.numel():,} elements")
    assert str(call.check(torch.full_like(made, float("nan")))).startswith(f"{made.numel():,} of")


def test_bytes_are_what_is_read_and_written() -> None:
    sizes = {case.kernel: memory_call(Ours(), case, CPU, 0).bytes for case in memory_cases(640)}
    row = 576 * 2
    # 64 sequences: a table of two columns, borders, starts.
    assert sizes["gather"] == 640 * 2 * row + 4 * (64 * 2 + 65 + 64)
    assert sizes["append"] == 640 * (2 * row + 8)
    assert sizes["append_rotated"] == 640 * (2 * row + 8 + 8) + 512 * 2 + 8192 * 64 * 4
    assert sizes["merge_latent"] == 3 * 640 * HEADS * (512 * 2 + 4)
    assert sizes["merge_value"] == 3 * 640 * HEADS * (128 * 2 + 4)


def test_the_copy_is_a_kernel_and_copies() -> None:
    """Torch's `copy_` is a memcpy on a GPU, which is no yardstick as a node of a graph."""
    from torch.utils._python_dispatch import TorchDispatchMode

    called: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    run, moved = copy_call(1001, CPU)
    with Watch():
        made = run()
    assert moved == 1000 == 2 * made.numel() * made.element_size()
    assert called == ["aten.add.out"] and made.tolist() == list(range(125))


def test_calls_fit_the_kernels_themselves() -> None:
    """Under the simulator, which checks arguments as a GPU's call does."""
    mla = mlaforge.load("deepseek_v3", device="sim")
    for case in memory_cases(20):
        call = memory_call(mla, case, CPU, 0)
        assert call.check(call.run()) is None, case
    given = make_prefill(mla.manifest, PrefillCase(2, 30, 2), CPU, 0)
    scale = mla.manifest.softmax_scale
    want = attend(given.q, given.k, given.v, given.cu_seqlens, scale).view(2, 30, 2, 128)
    assert difference(prefill_call(mla, given)(), want)[0] < 1e-5


# ---- A whole run -----------------------------------------------------------------------------------------------------


class TimedDevice(FakeDevice):
    """Every call takes as long as its name says; what was in a result is overwritten, as on a GPU."""

    us: Mapping[str, float] = {OURS: 100.0, "fa3": 110.0, "fa3_vllm": 90.0, "torch": 200.0, COPY: 80.0, "gemm": 1e3}

    def result(self, timed: Timed) -> torch.Tensor:
        timed.out.fill_(float("nan"))
        return super().result(timed)

    def time(self, calls: Mapping[str, Timed], repeats: int) -> dict[str, list[float]]:
        self.rounds.append((list(calls), repeats))
        return {name: [self.us[name] + i - (repeats - 1) / 2 for i in range(repeats)] for name in calls}


class Product:
    """A machine of which only the matrix product is asked for."""

    device = CPU

    def gemm(self) -> Callable[[], torch.Tensor]:
        return lambda: torch.zeros(1)


def run_session(device: FakeDevice | None = None, **changes: Any) -> tuple[Session, list[dict[str, Any]], list[str]]:
    saved: list[dict[str, Any]] = []
    lines: list[str] = []
    settings: dict[str, Any] = {"prefill": (CASE,), "memory": memory_cases(200), "repeats": 7, "rest": 0.0}
    machine: Any = Product()
    session = Session(
        Ours(),
        device or TimedDevice(),
        Options(**{**settings, **changes}),
        machine=machine,
        report=lines.append,
        save=lambda result: saved.append(json.loads(json.dumps(result))),
    )
    session.run()
    return session, saved, lines


def text_of(result: Mapping[str, Any]) -> str:
    from rich.console import Console

    console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in bench_tables(result, OURS):
        console.print(part)
    return console.export_text()


def test_a_run_from_peers_to_tables(fakes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", None)

    def raises(*args: Any, **kw: Any) -> None:
        raise RuntimeError("no kernel for\nthis GPU")

    monkeypatch.setattr(FakeRagged, "plan", raises)
    device = TimedDevice()
    session, saved, lines = run_session(device)
    result = saved[-1]
    assert session.steps == 8 and result["format"] == sessions.FORMAT and result["peers"] == {}
    assert [len(each["prefill"]) + len(each["memory"]) for each in saved] == [0, 0, 1, 2, 3, 4, 5, 6, 6]
    assert result["ceilings"]["gemm"]["TFLOPs"] == pytest.approx(GEMM_FLOPS / 1e9)
    # One round brings the clock up, one more follows the rest; then all in turn.
    names = [OURS, "fa3_vllm", "torch", "fa3"]
    assert device.rounds[2:5] == [(names, 1), (names, 1), (names, 7)]
    assert device.rounds[5:8] == [([OURS, COPY], 1), ([OURS, COPY], 1), ([OURS, COPY], 7)]
    (entry,) = result["prefill"]
    assert (entry["suite"], entry["b"], entry["s"], entry["h"], entry["repeats"]) == (PREFILL, 2, 40, 3, 7)
    kernels = entry["kernels"]
    assert kernels[OURS]["us"] == {"median": 100, "q1": 98.5, "q3": 101.5, "least": 97, "most": 103, "count": 7}
    assert kernels["fa3"]["TFLOPs"] == pytest.approx(2 * 3 * 40 * 40 * 320 / 110e-6 / 1e12)
    assert (entry["best_peer"], entry["ratio"], entry["ratio_fa3"]) == ("fa3_vllm", 0.9, 0.9)
    assert entry["of_gemm"] == pytest.approx(kernels[OURS]["TFLOPs"] / result["ceilings"]["gemm"]["TFLOPs"])
    assert kernels["torch"]["check"]["cosine"] < 1e-5 and kernels["torch"]["note"] == "as a batch of equal lengths"
    assert kernels["flashinfer"]["reason"] == "RuntimeError: no kernel for | this GPU"
    assert result["prefill_peers"]["fa3_fwd"]["state"] == "missing" and "fa3_fwd" in kernels["fa3_fwd"]["reason"]
    for case, moved in zip(memory_cases(200), result["memory"], strict=True):
        assert (moved["suite"], moved["kernel"], moved["tokens"]) == ("memory", case.kernel, 200)
        assert moved["kernels"][OURS]["GBps"] == pytest.approx(moved["bytes"] / 100e-6 / 1e9)
        # The copy is of whole elements, which leaves out a few bytes.
        assert moved["of_copy"] == pytest.approx(0.8, rel=1e-4)
    summary = result["summary"]
    assert summary["prefill"]["ratio_fa3"] == pytest.approx(0.9) and summary["prefill"]["losses"] == 1
    assert summary["memory"]["cases"] == 5 and summary["memory"]["of_copy"] == pytest.approx(0.8, rel=1e-4)
    assert any(line.startswith("  fa3_vllm") and "0.900 x ours" in line for line in lines)
    assert "memory: merge_value, 200 tokens" in lines
    text = text_of(result)
    for words in (
        "Prefill, causal, (192, 128)",
        "of copy",
        "merge_latent",
        "0.900",
        "80.0%",
        "no kernel",
        "fa3_fwd",
    ):
        assert words in text, words
    drawn = plots(Result.model_validate_json(json.dumps(result)))
    assert [plot.title for plot in drawn] == ["Prefill, causal", "Kernels that move data"]
    assert all(words in drawn[1].picture for words in ("merge_latent, 200 tokens", "GB/s", "copy"))


def test_the_fastest_build_of_flash_attention_3_is_its_time(fakes: dict[str, Any]) -> None:
    device = TimedDevice()
    device.us = {**TimedDevice.us, "torch": 50.0, "fa3_fwd": 95.0, "flashinfer": 300.0}
    cases = (CASE, PrefillCase(1, 9, CASE.h))
    session, _, _ = run_session(device, prefill=cases, memory=())
    for entry in session.result["prefill"]:
        assert (entry["best_peer"], entry["ratio"], entry["ratio_fa3"]) == ("torch", 0.5, 0.9)
    assert session.result["summary"]["prefill"]["cases"] == 2 and "memory" not in session.result["summary"]


def test_without_peers_there_is_no_ratio() -> None:
    session, _, _ = run_session(peers=(), memory=())
    (entry,) = session.result["prefill"]
    assert entry["best_peer"] is None and entry["ratio"] is None and entry["ratio_fa3"] is None
    assert list(entry["kernels"]) == [OURS] and "Prefill" in text_of(session.result)
    # No product is timed for kernels that only move data.
    session, _, _ = run_session(prefill=(), memory=memory_cases(64)[:1])
    assert session.result["ceilings"] == {} and "Kernels that move data" in text_of(session.result)


def test_a_wrong_result_of_a_peer_is_not_timed(fakes: dict[str, Any]) -> None:
    fakes["fa3"].flash_attn_varlen_func = lambda **kw: kw["v"] * 0.5
    session, _, _ = run_session(peers=("fa3", "torch"), memory=())
    kernels = session.result["prefill"][0]["kernels"]
    assert "its result is not ours" in kernels["fa3"]["reason"] and "us" not in kernels["fa3"]
    assert session.result["prefill"][0]["best_peer"] == "torch"


def test_a_wrong_result_of_ours_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Ours.gather

    def gather(self: Ours, *args: Any, **options: Any) -> Any:
        out = right(self, *args, **options)
        out[0, 0] += 1
        return out

    monkeypatch.setattr(Ours, "gather", gather)
    device = TimedDevice()
    with pytest.raises(BenchError, match=r"memory, gather, 200 tokens: our own call: 1 of 115,200 elements"):
        run_session(device, prefill=())
    assert device.rounds == []


def test_a_budget_counts_all_cases(fakes: dict[str, Any]) -> None:
    session, _, lines = run_session(FakeDevice(), repeats=100_000, budget=1.0, peers=("torch",))
    assert len(session.result["prefill"]) == 1 and len(session.result["memory"]) == 5
    assert all(5 <= each["repeats"] < 100_000 for each in (*session.result["prefill"], *session.result["memory"]))
    assert any("to keep the budget" in line for line in lines) and session.result["seconds"] < 10


def test_names_of_one_kernel_are_peers() -> None:
    assert set(FA3_NAMES) < set(PREFILL_PEERS) < set(Options().peers)


# ---- The command line ------------------------------------------------------------------------------------------------


def test_the_command_line_measures_what_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play_gpu(monkeypatch)
    small = memory_cases(64)
    monkeypatch.setattr("mlaforge.bench.cases.memory_cases", lambda: small)
    folder = str(ROOT / "generated" / "deepseek_v3")
    options = ["--shapes", "1x40", "--heads", "2", "--repeats", "5", "--peers", "torch", "-o", str(tmp_path)]
    result = run(folder, "--suite", "prefill", "--suite", "memory", *options)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.txt"]
    data = json.loads((tmp_path / "bench.json").read_text())
    (entry,) = data["prefill"]
    assert (entry["b"], entry["s"], entry["h"], entry["best_peer"], entry["of_gemm"]) == (1, 40, 2, "torch", None)
    assert [each["kernel"] for each in data["memory"]] == [case.kernel for case in small] and data["burst"] == []
    assert "Kernels that move data" in (tmp_path / "bench.txt").read_text()
    result = run(folder, "--suite", "memory", *options[4:])
    assert result.exit_code == 0 and json.loads((tmp_path / "bench.json").read_text())["prefill"] == []


def test_a_spec_without_prefill_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "none"
    shutil.copytree(ROOT / "generated" / "deepseek_v3", folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["kernels"]["prefill"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    result = run(str(folder), "--suite", "prefill")
    assert result.exit_code == 2 and "deepseek_v3 has no prefill kernel" in result.stderr
