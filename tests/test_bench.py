"""The bench on a CPU: what is measured, statistics, adapters against stand-ins for the peers, JSON, tables and plots.

A device that runs everything on the CPU takes the GPU's place; its times mean nothing.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from mlaforge.bench import session as sessions
from mlaforge.bench.cases import (
    SUITE_NAMES,
    SUITES,
    Case,
    Stats,
    choose_suites,
    geometric_mean,
    parse_counts,
    parse_shapes,
)
from mlaforge.bench.machine import EnergyTable, Machine, StreamShape, energy_source, measure_energy, operand_bytes
from mlaforge.bench.peers import COSINE_TOLERANCE, PEERS, Problem, Run, one_line
from mlaforge.bench.power import Nvml, NvmlError, Reading, frequent_reasons, mean_watts, sustain
from mlaforge.bench.prefill import PREFILL_PEERS
from mlaforge.bench.roofline import to_svg
from mlaforge.bench.session import OURS, BenchError, Options, Session, difference
from mlaforge.bench.timing import Launch, Timed
from mlaforge.compiler import compile_kernel
from mlaforge.memory_reference import append_reference, gather_reference, merge_reference
from mlaforge.reference import decode_reference, prefill_reference
from mlaforge.simulator import Simulator, SimulatorOptions
from mlaforge_generator import cli
from mlaforge_generator.bench_tables import bench_tables
from mlaforge_generator.cost import decode_energy
from mlaforge_generator.report.plots import plots
from mlaforge_generator.report.results import Result
from mlaforge_generator.target import H200, EnergyModel
from test_verify import one_thread as one_thread

ROOT = Path(__file__).parents[1]
PAGE, SCALE = 64, 0.1352
CAUSAL = Case(2, 130, 4, 2)


# ---- Cases and statistics --------------------------------------------------------------------------------------------


def test_suites_are_those_of_the_targets() -> None:
    assert SUITES["burst"].shapes == ((128, 4096), (64, 8192), (16, 32_768), (4, 131_072))
    assert SUITES["burst"].rows == ((64, 1), (128, 1), (64, 2), (128, 2))
    assert len(SUITES["burst"].cases) == 16 and len({case.tokens for case in SUITES["burst"].cases}) == 1
    assert str(SUITES["sustained"].cases[0]) == "64 x 8,192 tokens, 64 heads, s_q 1"
    assert SUITES["small"].mode == "burst" and SUITES["sustained"].mode == "sustained"


def test_shapes_heads_and_tokens_replace_those_of_a_suite() -> None:
    (suite,) = choose_suites(["sustained"], [(1, 64)], [4, 8], [3])
    assert suite.cases == (Case(1, 64, 4, 3), Case(1, 64, 8, 3)) and suite.mode == "sustained"
    (suite,) = choose_suites(["burst"], heads=[96])
    assert suite.rows == ((96, 1),) and suite.shapes == SUITES["burst"].shapes
    (suite,) = choose_suites(["burst"], s_q=[4])
    assert suite.rows == ((64, 4), (128, 4))
    with pytest.raises(ValueError, match="'bust' is no suite; there are burst, small, sustained"):
        choose_suites(["bust"])


def test_words_are_read_and_wrong_ones_named() -> None:
    assert parse_shapes(["128x4096,64x8192", "1x1 1x1"]) == ((128, 4096), (64, 8192), (1, 1))
    assert parse_counts(["64,128", "16"]) == (64, 128, 16)
    for wrong in ("128", "0x5", "5x0", "axb", "1x2x3", "-1x4"):
        with pytest.raises(ValueError, match="BATCHxTOKENS"):
            parse_shapes([wrong])
    for wrong in ("0", "-3", "x"):
        with pytest.raises(ValueError, match="positive"):
            parse_counts([wrong])


def test_work_of_a_case() -> None:
    case = Case(2, 100, 16, 2)
    assert case.tokens == 200 and case.rows == 32 and case.causal
    assert case.flops(576, 512) == 2 * 200 * 32 * 1088
    assert case.bytes(576, 512, 1152) == 200 * 1152 + 2 * 64 * 1088


def test_statistics() -> None:
    stats = Stats.of([5, 1, 3, 2, 4])
    assert stats == Stats(median=3, q1=2, q3=4, least=1, most=5, count=5)
    assert Stats.of([7.0]) == Stats(7, 7, 7, 7, 7, 1)
    with pytest.raises(ValueError, match="no samples"):
        Stats.of([])
    assert geometric_mean([2, 8]) == pytest.approx(4) and geometric_mean([]) is None


# ---- A device on the CPU ---------------------------------------------------------------------------------------------


class FakeStream:
    def __init__(self, timed: Timed) -> None:
        self.timed, self.ends = timed, [time.perf_counter()]

    def feed(self) -> None:
        self.timed.run()
        self.ends.append(time.perf_counter())

    def mark(self) -> int:
        return len(self.ends) - 1

    def us_per_call(self, first: int, last: int) -> float:
        assert 0 < first < last < len(self.ends)
        return 1e6 * (self.ends[last] - self.ends[first]) / (last - first)


class FakeDevice:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.rounds: list[tuple[list[str], int]] = []

    def prepare(self, run: Run, launch: Launch = "graph") -> Timed:
        return Timed(run, launch, run(), run)

    def result(self, timed: Timed) -> torch.Tensor:
        made = timed.run()
        assert isinstance(made, torch.Tensor)
        return made

    def time(self, calls: Mapping[str, Timed], repeats: int) -> dict[str, list[float]]:
        self.rounds.append((list(calls), repeats))
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(repeats):
            for name, call in calls.items():
                begin = time.perf_counter()
                call.run()
                samples[name].append(1e6 * (time.perf_counter() - begin))
        return samples

    def unfinished(self) -> str | None:
        return None

    def stream(self, timed: Timed) -> FakeStream:
        return FakeStream(timed)

    def wait(self) -> None:
        pass

    def clear(self) -> None:
        pass


class FakeMeter:
    """A constant 500 W, its energy counter in steps of 20 ms that are dated exactly."""

    def read(self) -> Reading:
        step = time.perf_counter() // 0.02 * 0.02
        return Reading(step, 500 * step, 480.0, 1500, 0x4)


class Ours:
    """Our kernels, by the reference."""

    manifest: Any = SimpleNamespace(
        name="tiny",
        d_qk=576,
        d_v=512,
        softmax_scale=SCALE,
        element="bf16",
        cache=SimpleNamespace(dtype="bf16", page_size=PAGE, row_bytes=1152, quantised=False, tensor_scale=False),
        model={"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    )

    def decode(self, q: Any, kv_cache: Any, block_table: Any, cache_seqlens: Any, **options: Any) -> Any:
        out, lse = attend(q, kv_cache, block_table, cache_seqlens, causal=options["causal"])
        options["out"].copy_(out)
        options["lse"].copy_(lse)
        return options["out"], options["lse"]

    def prefill(self, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, **options: Any) -> Any:
        scale, causal = options["softmax_scale"], options["causal"]
        out, lse = prefill_reference(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=scale, causal=causal)
        return options["out"].copy_(out), options["lse"].copy_(lse)

    def gather(self, kv_cache: Any, block_table: Any, cu_seqlens: Any, **options: Any) -> Any:
        out = options["out"]
        return out.copy_(gather_reference(kv_cache, block_table, cu_seqlens, options["seq_starts"], out))

    def append(self, c_kv: Any, k_rope: Any, kv_cache: Any, slot_mapping: Any, **options: Any) -> None:
        rows = append_reference(c_kv, k_rope, **options)
        kv_cache.flatten(0, 1)[slot_mapping] = rows.to(kv_cache.dtype)

    def merge(self, out1: Any, lse1: Any, out2: Any, lse2: Any, **options: Any) -> Any:
        out, lse = merge_reference(out1, lse1, out2, lse2)
        return options["out"].copy_(out), options["lse"].copy_(lse)


def attend(q: Any, cache: Any, table: Any, lengths: Any, *, causal: bool, scale: float = SCALE) -> Any:
    out, lse = decode_reference(q, cache, table, lengths, d_v=512, softmax_scale=scale, causal=causal)
    return out.to(q.dtype), lse


def problem(case: Case = CAUSAL, **changes: Any) -> Problem:
    torch.manual_seed(0)
    columns = -(-case.s_k // PAGE)
    made = Problem(
        case,
        (torch.randn(case.b, case.s_q, case.h, 576) / 10).bfloat16(),
        (torch.randn(case.b * columns, PAGE, 576) / 10).bfloat16(),
        torch.randperm(case.b * columns).to(torch.int32).view(case.b, columns),
        torch.full((case.b,), case.s_k, dtype=torch.int32),
        SCALE,
        512,
    )
    return dataclasses.replace(made, **changes)


# ---- Peers -----------------------------------------------------------------------------------------------------------


def fake_flash_mla(**extra: Any) -> Any:
    calls: list[Any] = []

    def flash_mla_with_kvcache(
        q: Any,
        k_cache: Any,
        block_table: Any,
        cache_seqlens: Any,
        head_dim_v: int,
        tile_scheduler_metadata: Any,
        num_splits: Any = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        is_fp8_kvcache: bool | None = None,
        use_legacy: bool = False,
    ) -> Any:
        assert k_cache.dim() == 4 and k_cache.shape[2] == 1 and head_dim_v == 512 and softmax_scale == SCALE
        assert use_legacy and is_fp8_kvcache is False
        calls.append(tile_scheduler_metadata)
        return attend(q, k_cache.squeeze(2), block_table, cache_seqlens, causal=causal)

    def get_mla_metadata(*args: Any, **kwargs: Any) -> Any:
        assert not args and not kwargs
        return object(), None

    return SimpleNamespace(
        flash_mla_with_kvcache=flash_mla_with_kvcache, get_mla_metadata=get_mla_metadata, calls=calls, **extra
    )


def fake_old_flash_mla() -> Any:
    """The form whose metadata are made from the lengths."""

    def flash_mla_with_kvcache(
        q: Any, k: Any, table: Any, lengths: Any, d_v: int, metadata: Any, splits: Any, scale: float, causal: bool
    ) -> Any:
        assert metadata.tolist() == [*lengths.tolist(), 8, 1] and splits == "splits"
        return attend(q, k.squeeze(2), table, lengths, causal=causal)

    def get_mla_metadata(cache_seqlens: Any, rows: int, heads: int) -> Any:
        return torch.tensor([*cache_seqlens.tolist(), rows, heads]), "splits"

    return SimpleNamespace(flash_mla_with_kvcache=flash_mla_with_kvcache, get_mla_metadata=get_mla_metadata)


def fake_fa3() -> Any:
    def get_scheduler_metadata(**kw: Any) -> Any:
        assert (kw["headdim"], kw["headdim_v"], kw["num_heads_kv"], kw["page_size"]) == (64, 512, 1, PAGE)
        return "metadata"

    def flash_attn_varlen_func(**kw: Any) -> Any:
        assert kw["scheduler_metadata"] == "metadata" and kw["fa_version"] == 3 and kw["causal"]
        tokens, h, _ = kw["q"].shape
        b = tokens // kw["max_seqlen_q"]
        assert kw["cu_seqlens_q"].tolist() == [i * kw["max_seqlen_q"] for i in range(b + 1)]
        q = torch.cat([kw["q_v"], kw["q"]], -1).view(b, -1, h, 576)
        cache = torch.cat([kw["v"], kw["k"]], -1).squeeze(2)
        out, _ = attend(q, cache, kw["block_table"], kw["seqused_k"], causal=q.shape[1] > 1)
        return out.flatten(0, 1)

    return SimpleNamespace(get_scheduler_metadata=get_scheduler_metadata, flash_attn_varlen_func=flash_attn_varlen_func)


class FakeWrapper:
    """FlashInfer's wrapper as the ahead-of-time modules have it."""

    plans = 0

    def __init__(self, workspace: Any) -> None:
        pass

    def plan(self, q_starts: Any, kv_starts: Any, numbers: Any, lengths: Any, *rest: Any) -> None:
        FakeWrapper.plans += 1
        h, page, causal, scale, dtype = rest
        assert page == PAGE and scale == SCALE and dtype == torch.bfloat16
        b = len(lengths)
        assert kv_starts.tolist() == [i * -(-int(lengths[0]) // PAGE) for i in range(b + 1)]
        self.planned = (q_starts, numbers.view(b, -1), lengths, h, causal)

    def run(self, q_nope: Any, q_pe: Any, latent: Any, rope: Any, out: Any) -> None:
        q_starts, table, lengths, h, causal = self.planned
        q = torch.cat([q_nope, q_pe], -1).view(len(q_starts) - 1, -1, h, 576)
        made, _ = attend(q, torch.cat([latent, rope], -1), table, lengths, causal=causal)
        out.copy_(made.flatten(0, 1))


class FakePackageWrapper(FakeWrapper):
    """The same as the package has it."""

    def __init__(self, workspace: Any, use_cuda_graph: bool = False, backend: str = "auto") -> None:
        assert backend == "fa3"

    def plan(self, q_starts: Any, kv_starts: Any, numbers: Any, lengths: Any, *rest: Any) -> None:
        h, d_v, rope, page, causal, scale, q_dtype, kv_dtype = rest
        assert (d_v, rope) == (512, 64) and q_dtype == kv_dtype
        super().plan(q_starts, kv_starts, numbers, lengths, h, page, causal, scale, kv_dtype)


def fake_triton_vllm() -> Any:
    def decode_attention_fwd(
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        lse: Any,
        table: Any,
        lengths: Any,
        partial: Any,
        splits: int,
        *rest: Any,
        **kw: Any,
    ) -> None:
        assert rest == (SCALE, PAGE) and kw["is_mla"] and partial.shape == (*q.shape[:2], splits, 513)
        assert splits & (splits - 1) == 0
        o.copy_(attend(q[:, None], k.squeeze(2), table, lengths, causal=False)[0][:, 0])

    return SimpleNamespace(decode_attention_fwd=decode_attention_fwd)


def fake_triton_sglang() -> Any:
    def decode_attention_fwd(
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        starts: Any,
        places: Any,
        partial: Any,
        lse: Any,
        counts: Any,
        *rest: Any,
        **kw: Any,
    ) -> None:
        assert rest == (32, SCALE, 1.0, 1.0) and kw["has_mla"] and v.shape[-1] == 512
        for i in range(len(q)):
            tokens = k[places[starts[i] : starts[i + 1]], 0].double()
            weights = (q[i].double() @ tokens.T * SCALE).softmax(-1)
            o[i] = (weights @ tokens[:, :512]).to(o.dtype)

    return SimpleNamespace(decode_attention_fwd=decode_attention_fwd)


FAKES: dict[str, tuple[str, Any]] = {
    "flashmla": ("flash_mla", fake_flash_mla),
    "flashmla_vllm": ("flashmla_vllm", fake_old_flash_mla),
    "fa3_vllm": ("fa3_vllm", fake_fa3),
    "flashinfer": ("flashinfer_mla", lambda: SimpleNamespace(BatchMLAPagedAttentionWrapper=FakeWrapper)),
    "triton_vllm": ("triton_mla.vllm_decode", fake_triton_vllm),
    "triton_sglang": ("triton_mla.sglang_decode", fake_triton_sglang),
}


ELEMENT_PEERS = (*FAKES, "torch")
"""Those that read a cache of elements; test_bench_quantised.py has the others."""


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins for all peers, importable under their names."""
    made = {}
    monkeypatch.setitem(sys.modules, "triton_mla", ModuleType("triton_mla"))
    for name, (module, build) in FAKES.items():
        made[name] = build()
        monkeypatch.setitem(sys.modules, module, made[name])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    return made


@pytest.mark.parametrize("name", ELEMENT_PEERS)
@pytest.mark.parametrize("case", [Case(2, 130, 4, 1), Case(2, 130, 4, 2), Case(3, 64, 16, 1)], ids=str)
def test_each_adapter_calls_its_peer_as_the_peer_wants_it(fakes: dict[str, Any], name: str, case: Case) -> None:
    given = problem(case)
    if name == "flashmla_vllm" and case.rows != 8:
        given = problem(case := Case(2, 130, 8, 1))
    want, _ = attend(given.q, given.kv_cache, given.block_table, given.cache_seqlens, causal=case.causal)
    peer = PEERS[name]()
    peer.load()
    assert peer.refuses(given) is None
    prepared = peer.prepare(given)
    for run in (prepared.ready, prepared.anew):
        out = run()
        assert out.shape == (case.b, case.s_q, case.h, 512)
        cosine, largest = difference(out, want)
        assert cosine < 1e-5 and largest < 1e-3


def test_planning_is_where_it_belongs(fakes: dict[str, Any]) -> None:
    planning = {}
    for name in ELEMENT_PEERS:
        peer = PEERS[name]()
        peer.load()
        planning[name] = peer.prepare(problem(Case(2, 130, 8, 1))).planning
    assert planning == {
        "flashmla": "device",
        "flashmla_vllm": "device",
        "fa3_vllm": "device",
        "flashinfer": "host",
        "triton_vllm": "none",
        "triton_sglang": "none",
        "torch": "none",
    }
    peer = PEERS["flashmla"]()
    peer.load()
    prepared = peer.prepare(problem())
    fakes["flashmla"].calls.clear()
    for run in (prepared.ready, prepared.ready, prepared.anew, prepared.anew):
        run()
    first, second, third, fourth = fakes["flashmla"].calls
    assert first is second and len({id(each) for each in (second, third, fourth)}) == 3


def test_flashinfer_as_the_package_has_it(fakes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "flashinfer_mla", SimpleNamespace(BatchMLAPagedAttentionWrapper=FakePackageWrapper)
    )
    given = problem()
    peer = PEERS["flashinfer"]()
    peer.load()
    prepared = peer.prepare(given)
    plans = FakeWrapper.plans
    want, _ = attend(given.q, given.kv_cache, given.block_table, given.cache_seqlens, causal=True)
    assert difference(prepared.ready(), want)[0] < 1e-5 and FakeWrapper.plans == plans
    assert difference(prepared.anew(), want)[0] < 1e-5 and FakeWrapper.plans == plans + 1


def test_what_a_peer_refuses_has_a_reason() -> None:
    half = problem(q=problem().q.half())
    assert PEERS["flashmla"]().refuses(half) is None
    assert PEERS["flashinfer"]().refuses(half) == "takes bfloat16 only"
    narrow = problem(q=problem().q[..., :320], kv_cache=problem().kv_cache[..., :320], d_v=256)
    assert PEERS["fa3_vllm"]().refuses(narrow) == "takes (576, 512) only, not (320, 256)"
    small = problem(kv_cache=problem().kv_cache.view(-1, 32, 576))
    assert PEERS["flashmla"]().refuses(small) == "takes pages of 64 only, not 32"
    odd = problem(Case(2, 130, 12, 2))
    assert "power of two" in str(PEERS["flashinfer"]().refuses(odd))
    assert PEERS["flashinfer"]().refuses(problem(Case(2, 130, 12, 1))) is None
    large = problem(case=Case(1024, 128, 4, 2))
    assert PEERS["torch"]().refuses(dataclasses.replace(problem(), case=large.case)) is not None


def test_an_error_is_one_short_line() -> None:
    assert one_line(ValueError(" a \n\n b \n c")) == "ValueError: a | b"
    assert len(one_line(ValueError("x" * 999))) == 300


# ---- A whole run -----------------------------------------------------------------------------------------------------


def run_session(**changes: Any) -> tuple[Session, list[dict[str, Any]], list[str]]:
    saved: list[dict[str, Any]] = []
    lines: list[str] = []
    settings: dict[str, Any] = {
        "suites": choose_suites(["burst", "sustained"], [(2, 130)], [4], [1, 2]),
        "repeats": 6,
        "seconds": 0.15,
        "heat": 0.02,
        "rest": 0.0,
    }
    options = Options(**{**settings, **changes})
    session = Session(
        Ours(),
        FakeDevice(),
        options,
        meter=FakeMeter(),
        about={"gpu": "a CPU & no GPU"},
        predict=lambda case: {
            "floor_us": 1.0,
            "us": 2.0,
            "TFLOPs": 3.0,
            "GBps": 4.0,
            "watts": 5.0,
            "nJ_per_token": 6.0,
            "bound": "power",
        },
        report=lines.append,
        save=lambda result: saved.append(json.loads(json.dumps(result))),
    )
    session.run()
    return session, saved, lines


def test_a_run_from_peers_to_plots(fakes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*args: Any, **kw: Any) -> None:
        raise ValueError("not built for\nthis GPU")

    fakes["triton_vllm"].decode_attention_fwd = raises
    fakes["triton_sglang"].decode_attention_fwd = lambda q, k, v, o, *rest, **kw: o.fill_(0.5)
    monkeypatch.delitem(sys.modules, "flashinfer_mla")
    session, saved, lines = run_session(peers=("flashmla", "fa3_vllm", "flashinfer", "triton_vllm", "triton_sglang"))
    result = saved[-1]
    # The peers, and then every case, were saved as they came.
    assert [len(each["burst"]) + len(each["sustained"]) for each in saved] == [0, 1, 2, 3, 4, 4]
    assert (
        result["peers"]["flashinfer"]["state"] == "missing" and "flashinfer" in result["peers"]["flashinfer"]["reason"]
    )
    entry = result["burst"][0]
    assert (entry["suite"], entry["b"], entry["s_k"], entry["h"], entry["s_q"]) == ("burst", 2, 130, 4, 1)
    kernels = entry["kernels"]
    assert set(kernels) == {OURS, "flashmla", "fa3_vllm", "flashinfer", "triton_vllm", "triton_sglang"}
    for name in (OURS, "flashmla", "fa3_vllm"):
        assert set(kernels[name]["us"]) == {"median", "q1", "q3", "least", "most", "count"}
        assert kernels[name]["us"]["count"] == kernels[name]["us_anew"]["count"] == 6
        assert kernels[name]["launch"] == "graph" and kernels[name]["TFLOPs"] > 0 and kernels[name]["GBps"] > 0
    assert kernels["triton_vllm"]["reason"] == "ValueError: not built for | this GPU"
    assert "not ours" in kernels["triton_sglang"]["reason"] and "us" not in kernels["triton_sglang"]
    assert kernels["flashmla"]["check"]["cosine"] < 1e-5
    best = entry["best_peer"]
    assert best in ("flashmla", "fa3_vllm")
    assert entry["ratio"] == pytest.approx(kernels[best]["us"]["median"] / kernels[OURS]["us"]["median"])
    held = result["sustained"][0]["kernels"][OURS]
    assert held["watts"] == pytest.approx(500, rel=0.1) and held["throttle_reasons"] == ["power cap"]
    assert held["nJ_per_token"] == pytest.approx(1e9 * held["watts"] * held["us"] * 1e-6 / 260)
    assert held["mhz"] == 1500
    assert result["sustained"][0]["energy_ratio"] is not None
    summary = result["summary"]["burst"]
    assert [(group["h"], group["s_q"], group["cases"]) for group in summary] == [(4, 1, 1), (4, 2, 1)]
    assert summary[0]["wins"] + summary[0]["losses"] == 1
    assert any("not timed: ValueError" in line for line in lines)
    from rich.console import Console

    console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in bench_tables(result, OURS):
        console.print(part)
    text = console.export_text()
    for words in ("best peer", "Not timed", "not built for", "(predicted)", "flashinfer", "nJ/token", "power cap"):
        assert words in text, words
    for mode in ("burst", "sustained"):
        picture = to_svg(result, mode)
        assert picture is not None
        root = ElementTree.fromstring(picture)
        circles = root.findall("{http://www.w3.org/2000/svg}circle")
        # Three kernels at two points, and three in the legend.
        assert len(circles) == 9 and "a CPU &amp; no GPU" in picture
    drawn = plots(Result.model_validate_json(json.dumps(result)))
    assert [plot.title for plot in drawn] == ["Decode, burst", "Decode, sustained"]
    assert session.steps == 6


def test_calls_are_interleaved_with_a_second_round_of_planning(fakes: dict[str, Any]) -> None:
    device = FakeDevice()
    options = Options(choose_suites(["burst"], [(1, 64)], [8]), ("flashmla", "flashinfer"), repeats=4, rest=0)
    Session(Ours(), device, options).run()
    names = [OURS, "flashmla", "flashinfer"]
    assert device.rounds == [(names, 1), (names, 1), (names, 1), (names, 4), (names, 1), (names, 4)]


def test_a_budget_lowers_repeats_and_no_case_is_dropped(fakes: dict[str, Any]) -> None:
    session, _, lines = run_session(peers=("flashmla",), repeats=100_000, budget=0.5, seconds=30.0, heat=5.0)
    assert len(session.result["burst"]) == len(session.result["sustained"]) == 2
    assert all(5 <= entry["repeats"] < 100_000 for entry in session.result["burst"])
    assert any("to keep the budget" in line for line in lines)
    assert session.result["seconds"] < 20


def test_a_broken_device_stops_the_run_and_what_was_measured_stays(fakes: dict[str, Any]) -> None:
    calls = 0
    right = fakes["flashmla"].flash_mla_with_kvcache

    def breaks(*args: Any, **kw: Any) -> Any:
        nonlocal calls
        calls += 1
        if args[0].shape[1] == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        return right(*args, **kw)

    breaks.__signature__ = __import__("inspect").signature(right)  # type: ignore[attr-defined]
    fakes["flashmla"].flash_mla_with_kvcache = breaks
    saved: list[Any] = []
    options = Options(choose_suites(["burst"], [(1, 64)], [8], [1, 2]), ("flashmla",), repeats=2, rest=0)
    session = Session(Ours(), FakeDevice(), options, save=lambda result: saved.append(dict(result)))
    with pytest.raises(BenchError, match="flashmla broke the device"):
        session.run()
    assert len(saved[-1]["burst"]) == 1 and "illegal memory access" in saved[-1]["stopped"]


def test_our_own_fault_is_told(fakes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(self: Any, *args: Any, **kw: Any) -> Any:
        return kw["out"].fill_(float("nan")), kw["lse"]

    monkeypatch.setattr(Ours, "decode", decode)
    with pytest.raises(BenchError, match="NaN"):
        run_session(peers=())


def test_without_peers_there_is_no_ratio() -> None:
    session, _, _ = run_session(peers=())
    entry = session.result["burst"][0]
    assert entry["best_peer"] is None and entry["ratio"] is None
    assert session.result["summary"]["burst"][0]["ratio"] is None
    assert list(bench_tables(session.result, OURS)) and to_svg(session.result) is not None
    assert to_svg({**session.result, "burst": []}) is None


def test_cosine_sees_a_wrong_result() -> None:
    x = torch.randn(100)
    assert difference(x, x)[0] < 1e-12 and difference(x, -x)[0] == pytest.approx(2)
    assert not difference(x * float("nan"), x)[0] < COSINE_TOLERANCE
    assert not difference(x * 0, x * 0)[0] < COSINE_TOLERANCE


# ---- Power -----------------------------------------------------------------------------------------------------------


def test_watts_come_from_the_steps_of_the_counter() -> None:
    steps = [Reading(0.01 * i, 7 * (i // 5), 0, 1000, 0) for i in range(40)]
    assert mean_watts(steps) == pytest.approx(7 / 0.05)
    flat = [Reading(0.01 * i, 3, 250 + i, 1000, 0) for i in range(3)]
    assert mean_watts(flat) == pytest.approx(251) and mean_watts([]) is None


def test_reasons_that_hold_for_a_tenth_of_the_time_count() -> None:
    readings = [Reading(0, 0, 0, 0, 0x5 if i < 3 else 0x21 if i == 3 else 1) for i in range(20)]
    assert frequent_reasons(readings) == ("power cap",) and frequent_reasons([]) == ()


def test_sustained_without_a_meter_has_a_rate_alone() -> None:
    device = FakeDevice()
    held = sustain(device, device.prepare(lambda: torch.zeros(1)), None, seconds=0.02, heat=0.01)
    assert held.us > 0 and held.watts is None and held.joules_per_call is None and held.reasons == ()


class FakeNvml(ModuleType):
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVMLError = RuntimeError

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__("pynvml")
        self.broken = broken

    def nvmlInit(self) -> None:
        if self.broken:
            raise RuntimeError("Driver Not Loaded")

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlDeviceGetHandleByUUID": "handle",
            "nvmlDeviceGetTotalEnergyConsumption": 5000,
            "nvmlDeviceGetPowerUsage": 650_000,
            "nvmlDeviceGetClockInfo": 1980,
            "nvmlDeviceGetCurrentClocksEventReasons": 4,
            "nvmlSystemGetDriverVersion": b"580.159",
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetTemperature": 40,
        }
        if name not in answers:
            raise AttributeError(name)
        return lambda *args: answers[name]


def test_nvml_is_read_in_si_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    meter = Nvml(torch.device("cuda", 0))
    reading = meter.read()
    assert (reading.joules, reading.watts, reading.mhz, reading.reasons) == (5, 650, 1980, 4)
    assert meter.describe()["driver"] == "580.159" and meter.describe()["power_limit_watts"] == 700
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(broken=True))
    with pytest.raises(NvmlError, match="Driver Not Loaded"):
        Nvml(torch.device("cuda", 0))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlError, match=r"mlaforge\[bench\]"):
        Nvml(torch.device("cuda", 0))


# ---- The machine -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("headers")
    for path in (ROOT / "templates" / "device").glob("*.cuh"):
        shutil.copy(path, folder)
    return folder


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["read_stream.cu", "operations.cu", "awake.cu"])
def test_measuring_kernels_compile(headers: Path, tmp_path: Path, name: str) -> None:
    for path in headers.iterdir():
        shutil.copy(path, tmp_path)
    shutil.copy(ROOT / "runtime" / "mlaforge" / "bench" / "kernels" / name, tmp_path)
    kernel = compile_kernel(tmp_path / name).with_sass()
    assert not kernel.warnings
    for report in kernel.kernels.values():
        assert report.spill_stores == report.spill_loads == report.stack_frame == 0
    wanted = {"read_stream.cu": "UBLKCP", "operations.cu": "HGMMA", "awake.cu": "NANOSLEEP"}[name]
    assert all(report.sass is not None and report.sass[wanted] for report in kernel.kernels.values())


@pytest.mark.parametrize(
    ("d_qk", "shape"),
    [(576, (8, 9216, 25)), (512, (7, 0, 0)), (320, (4, 10_240, 22)), (288, (4, 9216, 25))],
)
def test_tiles_are_cut_into_equal_copies(d_qk: int, shape: tuple[int, int, int]) -> None:
    made = StreamShape.of(64 * d_qk * 2)
    assert made.pieces * made.piece_bytes == 64 * d_qk * 2 and made.piece_bytes % 16 == 0
    assert 1024 + made.slots * made.piece_bytes <= 232_448 and 8 * made.slots <= 1024
    if shape[1]:
        assert (made.pieces, made.piece_bytes, made.slots) == shape
    with pytest.raises(ValueError, match="16"):
        StreamShape.of(24)


@pytest.fixture
def simulated(headers: Path) -> Machine:
    return Machine(Simulator(SimulatorOptions(seed=1, sms=4)), torch.device("cpu"), 4, headers, 64)


@pytest.mark.parametrize(("tiles", "readers", "rounds"), [(9, 1, 1), (37, 2, 3), (1, 1, 2)])
def test_the_read_stream_reads_whole_tiles_and_ends(simulated: Machine, tiles: int, readers: int, rounds: int) -> None:
    data = torch.full((tiles * simulated.tile_bytes // 4 + 3,), 7, dtype=torch.int32)
    data[tiles * simulated.tile_bytes // 4 :] = 8
    sink = simulated.read_stream(data, readers=readers, rounds=rounds)()
    busy = min(4, tiles * readers)
    assert (sink == 7).sum() >= busy - 1 and not (sink == 8).any()


def test_products_run_under_the_simulator(simulated: Machine) -> None:
    for n in (64, 128, 256):
        assert simulated.products(n, 2)().tolist() == [0] * 4
    assert operand_bytes(256) + 1024 <= 232_448


def test_energy_is_measured_above_static_power() -> None:
    """Every operation at 500 W: what the awake chip draws is taken off, so nothing is left above it."""

    class Quick:
        device, sms, tile_bytes = torch.device("cpu"), 132, 73_728

        def _run(self, *args: Any, **kw: Any) -> Run:
            return lambda: torch.zeros(1)

        read_stream = products = awake = _run

    original = torch.empty
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *size, **kw: original(48 << 20, **kw))
        machine: Any = Quick()
        table = measure_energy(machine, FakeDevice(), FakeMeter(), seconds=0.2, heat=0.01, report=lines.append)
    assert [row.name for row in table.rows] == ["static", "hbm", "hbm_2", "l2", "wgmma_n64", "wgmma_n128", "wgmma_n256"]
    assert table.static_watts == pytest.approx(500, rel=0.1) and len(lines) == 7
    assert table.rows[0].nj is None and abs(table.hbm_to_smem_nj) < 1


def test_measured_constants_can_be_put_in_the_planners_table() -> None:
    table = EnergyTable(131.4, 104.6, 2.0, 31.6, {64: 82.4, 256: 330.6, 128: 176.0}, ())
    made = eval(energy_source(table, 700), {"EnergyModel": EnergyModel})
    assert made == EnergyModel(131.0, 700.0, 105.0, 32.0, ((64, 82.0), (128, 176.0), (256, 331.0)))


# ---- The energy model ------------------------------------------------------------------------------------------------


def predicted(rows: int, **changes: Any) -> Any:
    settings = {"d_qk": 576, "d_v": 512, "row_bytes": 1152, "tile_rows": 64, "tile_tokens": 64, "batch": 64}
    settings |= {"context": 8192}
    return decode_energy(H200, rows=rows, **{**settings, **changes})


FLASHMLA = [(16, 218, 111), (64, 237, 408), (128, 360, 536), (256, 697, 551)]
"""Rows, nJ per cached token, TFLOP/s."""


@pytest.mark.parametrize(("rows", "measured", "rate"), FLASHMLA)
def test_the_model_meets_flashmla(rows: int, measured: float, rate: float) -> None:
    """FlashMLA, sustained on an H200 at (64, 8192): within 9% of its energy and 8% of its rate.

    Its 16 heads leave three quarters of a tile zero, which toggles less than the random data of the constants.
    """
    energy = predicted(rows)
    assert energy.nj_per_token == pytest.approx(measured, rel=0.09)
    assert energy.tflops == pytest.approx(rate, rel=0.08)
    assert energy.bound == "power" and energy.watts == pytest.approx(700)


def test_energy_of_a_token_by_hand() -> None:
    energy = predicted(128, batch=1, context=1 << 24)
    assert energy.memory_nj == pytest.approx(105, rel=1e-3)
    assert energy.reread_nj == pytest.approx(32)
    assert energy.matrix_nj == pytest.approx(2 * (36 * 82 + 8 * 331) / 64)
    dynamic = energy.memory_nj + energy.reread_nj + energy.matrix_nj
    assert energy.tokens_per_second == pytest.approx(570 / dynamic * 1e9)
    assert energy.static_nj == pytest.approx(130 / energy.tokens_per_second * 1e9)
    assert energy.us == pytest.approx((1 << 24) / energy.tokens_per_second * 1e6)


def test_a_cap_out_of_reach_leaves_the_floor() -> None:
    model = dataclasses.replace(H200.energy, power_cap_watts=5000.0)
    target = dataclasses.replace(H200, energy=model)
    settings = {"d_qk": 576, "d_v": 512, "row_bytes": 1152, "tile_rows": 64, "tile_tokens": 64, "batch": 64}
    settings |= {"context": 8192}
    memory, compute = (decode_energy(target, rows=rows, **settings) for rows in (64, 128))
    assert memory.bound == "memory" and memory.gbps == pytest.approx(4580)
    assert compute.bound == "compute" and compute.tflops == pytest.approx(792)
    assert memory.watts < 5000


def test_products_between_the_measured_ones_lie_on_straight_lines() -> None:
    model = H200.energy
    assert [model.matrix_nj(n) for n in (8, 64, 256)] == [21, 82, 331]
    assert model.matrix_nj(192) == pytest.approx((176 + 331) / 2) and model.matrix_nj(48) == pytest.approx(70)


# ---- The command line ------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(cli.cli, ["bench", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "burst,bust"], "'bust' is no suite"),
        (["--shapes", "128"], "BATCHxTOKENS"),
        (["--heads", "0"], "positive"),
        (["--suite", "memory", "--shapes", "1x64"], "shapes can't be chosen for memory"),
        (["--suite", "prefill,memory", "--s-q", "2"], "query tokens can't be chosen for prefill, memory"),
        (["--peers", "flashmla,nobody"], "no such peer: nobody"),
        (["--repeats", "0"], "--repeats"),
    ],
)
def test_wrong_arguments_are_told_before_anything_else(arguments: list[str], message: str) -> None:
    result = run("deepseek_v3", *arguments)
    assert result.exit_code == 2 and message in result.stderr


def test_help_names_suites_and_peers() -> None:
    text = " ".join(run("--help").stdout.split())
    for name in (*SUITE_NAMES, *PEERS, *PREFILL_PEERS):
        assert name in text, name


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_no_bench() -> None:
    result = run("deepseek_v3", "--suite", "small", "--peers", "none")
    assert result.exit_code == 4 and "no CUDA GPU" in result.stderr


def test_a_plan_predicts_energy() -> None:
    result = CliRunner().invoke(cli.cli, ["plan", "deepseek_v3", "--json", "--batch", "64", "--context", "8192"])
    (cost,) = json.loads(result.stdout)["costs"]
    assert cost["sustained"]["bound"] == "power" and cost["sustained"]["watts"] == pytest.approx(700)
    assert cost["sustained"]["nj_per_token"] == pytest.approx(predicted(128).nj_per_token)
    text = CliRunner().invoke(cli.cli, ["plan", "deepseek_v3", "--batch", "64", "--context", "8192"]).stdout
    assert "nJ/token" in text and "predicted" in text


def play_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command line find a GPU, on which our kernels are the references; there are no ceilings."""
    import mlaforge
    from mlaforge.bench import machine, power, timing
    from mlaforge.manifest import read_manifest

    class Gpu(FakeDevice):
        sms, l2_bytes = 132, 1 << 20

        def __init__(self, device: torch.device) -> None:
            super().__init__()

    class Loaded(Ours):
        def __init__(self, folder: Path) -> None:
            self.manifest = read_manifest(folder)

    class Meter(FakeMeter):
        def __init__(self, device: torch.device) -> None:
            pass

        def describe(self) -> dict[str, Any]:
            return {"driver": "none", "power_limit_watts": 700.0}

    class NoCeilings(sessions.Session):
        def _ceilings(self, machine: Machine) -> None:
            pass

    monkeypatch.setattr("mlaforge_generator.cli.devices.why_no_hopper", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "no GPU")
    monkeypatch.setattr(mlaforge, "load", Loaded, raising=False)
    monkeypatch.setattr(machine, "Machine", lambda *arguments: None)
    monkeypatch.setattr(timing, "Gpu", Gpu)
    monkeypatch.setattr(power, "Nvml", Meter)
    monkeypatch.setattr(sessions, "Session", NoCeilings)


def test_the_bench_of_the_command_line_writes_data_tables_and_plots(
    fakes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    play_gpu(monkeypatch)
    out = tmp_path / "out"
    monkeypatch.setattr(sessions, "SCALE", SCALE, raising=False)
    from mlaforge.manifest import read_manifest

    folder = str(ROOT / "generated" / "deepseek_v3")
    monkeypatch.setattr(sys.modules[__name__], "SCALE", read_manifest(Path(folder)).softmax_scale)
    result = run(folder, "--shapes", "1x100", "--heads", "8", "--repeats", "5", "--peers", "flashmla", "-o", str(out))
    assert result.exit_code == 0, result.stdout
    assert sorted(path.name for path in out.iterdir()) == ["bench.json", "bench.txt", "roofline_burst.svg"]
    data = json.loads((out / "bench.json").read_text())
    assert data["spec"]["name"] == "deepseek_v3" and data["machine"]["driver"] == "none"
    assert "decode_" in data["machine"]["kernel"]
    assert data["burst"][0]["kernels"]["flashmla"]["us"]["count"] == 5
    assert data["burst"][0]["predicted"]["nJ_per_token"] > 100
    assert "1 x 100 tokens, 8 heads" in result.stdout and "best peer" in (out / "bench.txt").read_text()
    result = run(
        folder, "--shapes", "1x100", "--heads", "8", "--repeats", "5", "--peers", "none", "--json", "-o", str(out)
    )
    assert result.exit_code == 0 and "1 x 100 tokens, 8 heads" in result.stderr
    assert json.loads(result.stdout) == json.loads((out / "bench.json").read_text())


def test_ceilings_are_measured_with_the_calls_of_the_cases(fakes: dict[str, Any]) -> None:
    class Small:
        device, tile_bytes = torch.device("cpu"), 1024

        def read_stream(self, data: torch.Tensor) -> Run:
            return lambda: data[:8].clone()

        def gemm(self) -> Run:
            return lambda: torch.zeros(1)

    machine: Any = Small()
    options = Options(choose_suites(["burst", "sustained"], [(1, 64), (2, 64)], [8]), (), 2, 0.05, 0.01, rest=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "_BIG_STREAM", 1 << 20)
        session = Session(Ours(), FakeDevice(), options, machine=machine, meter=FakeMeter())
        result = session.run()
    ceilings = result["ceilings"]
    assert [each["bytes"] for each in ceilings["read_stream"]] == [64 * 1152, 128 * 1152, 1 << 20]
    assert ceilings["gemm"]["TFLOPs"] > 0 and set(ceilings["sustained"]) == {"read_stream", "gemm"}
    entry = result["burst"][1]
    stream, ours = ceilings["read_stream"][1]["GBps"], entry["kernels"][OURS]
    assert entry["of_read_stream"] == pytest.approx(ours["GBps"] / stream)
    assert entry["of_gemm"] == pytest.approx(ours["TFLOPs"] / ceilings["gemm"]["TFLOPs"])
    picture = to_svg(result)
    assert picture is not None and 'class="roof"' in picture
    ElementTree.fromstring(picture)
    machine.gemm = lambda: 1 / 0
    lines: list[str] = []
    session = Session(Ours(), FakeDevice(), options, machine=machine, report=lines.append)
    assert session.run()["ceilings"] == {} and "no ceilings: ZeroDivisionError: division by zero" in lines
