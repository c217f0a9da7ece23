"""The bench of decode on quantised caches, on a CPU: our own bf16 decode and the peers that read fp8 rows beside it."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from mlaforge.bench import tune
from mlaforge.bench.cases import Case, choose_suites
from mlaforge.bench.inputs import make_cache, make_problem
from mlaforge.bench.peers import PEERS, Problem
from mlaforge.bench.roofline import to_svg
from mlaforge.bench.session import BF16, OURS, Options, Session, difference
from mlaforge.formats import FORMATS
from mlaforge.manifest import read_manifest
from mlaforge.reference import decode_reference
from mlaforge_generator.bench_tables import bench_tables
from mlaforge_generator.cli import bench as bench_command
from mlaforge_generator.report.plots import plots
from mlaforge_generator.report.results import Result
from test_bench import PAGE, SCALE, FakeDevice, FakeMeter, FakeWrapper, Ours, attend, play_gpu, run
from test_verify import one_thread as one_thread

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
FP8_PEERS = ("flashmla_fp8", "flashmla_vllm_fp8", "flashinfer_fp8kv")


def manifest_of(form: str) -> Any:
    layout = FORMATS[form].layout
    cache = SimpleNamespace(
        dtype=form,
        page_size=PAGE,
        row_bytes=layout.row_bytes(512, 64),
        quantised=True,
        tensor_scale=layout.tensor_scale,
    )
    return SimpleNamespace(**{**vars(Ours.manifest), "cache": cache})


class Quantised(Ours):
    """Our kernels on a quantised cache, by the reference."""

    def __init__(self, form: str) -> None:
        self.manifest = manifest_of(form)

    def decode(self, q: Any, kv_cache: Any, block_table: Any, cache_seqlens: Any, **options: Any) -> Any:
        scale = options["tensor_scale"]
        form = FORMATS[self.manifest.cache.dtype]
        parts = form.dequantise(kv_cache, 512, 64, None if scale is None else float(scale))
        return super().decode(q, torch.cat(parts, -1), block_table, cache_seqlens, **options)


def problem(form: str = "fp8_e4m3", case: Case | None = None) -> Problem:
    case = case or Case(2, 130, 4, 2)
    manifest = manifest_of(form)
    return make_problem(manifest, case, make_cache(manifest, CPU, case.b, case.s_k, 0), 0)


def expected(given: Problem) -> torch.Tensor:
    call = given.in_bf16()
    made, _ = attend(call.q, call.kv_cache, call.block_table, call.cache_seqlens, causal=given.case.causal)
    return made


# ---- Problems and peers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_the_bf16_call_has_the_same_tokens(form: str) -> None:
    given = problem(form)
    made = given.in_bf16()
    assert made.format is None and made.tensor_scale is None and made.q is given.q
    assert made.kv_cache.dtype == torch.bfloat16 and made.kv_cache.shape == (*given.kv_cache.shape[:2], 576)
    scale = None if given.tensor_scale is None else float(given.tensor_scale)
    latent, rope = FORMATS[form].dequantise(given.kv_cache, 512, 64, scale)
    assert torch.equal(made.kv_cache, torch.cat([latent, rope], -1).bfloat16())
    assert made.elements() is made.kv_cache
    assert torch.equal(given.elements(), torch.cat([latent, rope], -1))


class Fp8:
    """FlashMLA's fp8 decode: q and cache in e4m3, softmax weights rounded to e4m3 as well."""

    def __init__(self) -> None:
        self.plans: list[object] = []

    def plan(self, lengths: Any, rows: int) -> Any:
        self.plans.append(("plan", tuple(lengths.tolist()), rows))
        return self.plans[-1], "splits"

    def decode(
        self,
        q: Any,
        kv: Any,
        table: Any,
        lengths: Any,
        plan: Any,
        scale: float,
        causal: bool,
        q_scale: Any,
        kv_scale: Any,
    ) -> Any:
        (_, planned, rows), splits = plan
        assert q.dtype == kv.dtype == torch.float8_e4m3fn and kv.shape[1:] == (PAGE, 1, 576)
        assert planned == tuple(lengths.tolist()) and splits == "splits" and rows == q.shape[1] * q.shape[2]
        assert scale == SCALE and q_scale.shape == kv_scale.shape == (1,)
        made, lse = attend(q.float() * q_scale, kv.squeeze(2).float() * kv_scale, table, lengths, causal=causal)
        return made.bfloat16(), lse


def fp8_functions(dense: Fp8) -> Any:
    """The same as vLLM's package has it."""

    def flash_mla_with_kvcache_fp8(
        q: Any,
        kv: Any,
        table: Any,
        lengths: Any,
        head_dim_v: int,
        metadata: Any,
        splits: Any,
        softmax_scale: float,
        causal: bool,
        descale_q: Any,
        descale_k: Any,
    ) -> Any:
        assert head_dim_v == 512
        plan = (metadata, splits)
        return dense.decode(q, kv, table, lengths, plan, softmax_scale, causal, descale_q, descale_k)

    def get_mla_metadata_dense_fp8(lengths: Any, rows: int, heads: int) -> Any:
        assert heads == 1
        return dense.plan(lengths, rows)

    return SimpleNamespace(
        __name__="ops",
        flash_mla_with_kvcache_fp8=flash_mla_with_kvcache_fp8,
        get_mla_metadata_dense_fp8=get_mla_metadata_dense_fp8,
    )


class Fp8Wrapper(FakeWrapper):
    def plan(self, q_starts: Any, kv_starts: Any, numbers: Any, lengths: Any, *rest: Any) -> None:
        *form, dtype = rest
        assert dtype == torch.float8_e4m3fn
        super().plan(q_starts, kv_starts, numbers, lengths, *form, torch.bfloat16)

    def run(
        self, q_nope: Any, q_pe: Any, latent: Any, rope: Any, out: Any, ckv_scale: float = 1.0, kpe_scale: float = 1.0
    ) -> None:
        parts = [(part.float() * scale).bfloat16() for part, scale in ((latent, ckv_scale), (rope, kpe_scale))]
        super().run(q_nope, q_pe, *parts, out=out)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Fp8]:
    """Stand-ins for the peers that read fp8 rows, importable under their names."""
    made = {"flash_mla": Fp8(), "flashmla_vllm": Fp8()}
    monkeypatch.setitem(sys.modules, "flash_mla", SimpleNamespace(__name__="flash_mla", dense_fp8=made["flash_mla"]))
    monkeypatch.setitem(sys.modules, "flashmla_vllm", fp8_functions(made["flashmla_vllm"]))
    monkeypatch.setitem(sys.modules, "flashinfer_mla", SimpleNamespace(BatchMLAPagedAttentionWrapper=Fp8Wrapper))
    return made


@pytest.mark.parametrize("name", FP8_PEERS)
@pytest.mark.parametrize("case", [Case(2, 130, 4, 1), Case(2, 130, 4, 2), Case(3, 64, 16, 1)], ids=str)
def test_each_adapter_calls_its_peer_as_the_peer_wants_it(fakes: dict[str, Fp8], name: str, case: Case) -> None:
    given = problem(case=case)
    peer = PEERS[name]()
    peer.load()
    assert peer.refuses(given) is None
    prepared = peer.prepare(given)
    for call in (prepared.ready, prepared.anew):
        out = call()
        assert out.shape == (case.b, case.s_q, case.h, 512)
        assert difference(out, expected(given))[0] < 1e-4
    assert prepared.planning == ("host" if name == "flashinfer_fp8kv" else "device")
    if prepared.planning == "device":
        fake = fakes["flash_mla" if name == "flashmla_fp8" else "flashmla_vllm"]
        assert len(fake.plans) == 2


def test_what_a_peer_refuses_has_a_reason(fakes: dict[str, Fp8], monkeypatch: pytest.MonkeyPatch) -> None:
    given, bf16 = problem(), problem().in_bf16()
    for name, peer in PEERS.items():
        fp8 = name in FP8_PEERS
        assert peer().refuses(given) == (None if fp8 else "reads no quantised rows")
        assert peer().refuses(bf16) == ("reads a cache of fp8_e4m3 only" if fp8 else None)
        assert peer().refuses(problem("nvfp4")) is not None
    small = dataclasses.replace(given, kv_cache=given.kv_cache.view(-1, 32, 576))
    assert PEERS["flashmla_fp8"]().refuses(small) == "takes pages of 64 only, not 32"
    monkeypatch.setitem(sys.modules, "flash_mla", SimpleNamespace(__name__="flash_mla"))
    with pytest.raises(Exception, match="flash_mla has no dense fp8 decode"):
        PEERS["flashmla_fp8"]().load()
    monkeypatch.setitem(sys.modules, "flashinfer_mla", SimpleNamespace(BatchMLAPagedAttentionWrapper=FakeWrapper))
    peer = PEERS["flashinfer_fp8kv"]()
    peer.load()
    with pytest.raises(Exception, match="takes no scale of the cache"):
        peer.prepare(given)


# ---- A whole run -----------------------------------------------------------------------------------------------------


class Clock(FakeDevice):
    """Gives each kernel a time of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.us = {OURS: 100.0, BF16: 150.0, "flashmla_fp8": 120.0, "flashinfer_fp8kv": 80.0}

    def time(self, calls: Any, repeats: int) -> dict[str, list[float]]:
        super().time(calls, 1)
        return {name: [self.us[name]] * repeats for name in calls}


def run_session(form: str, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "suites": choose_suites(["burst", "sustained"], [(2, 130)], [4], [1, 2]),
        "peers": ("flashmla", "flashmla_fp8", "flashinfer_fp8kv"),
        "repeats": 5,
        "seconds": 0.1,
        "heat": 0.02,
        "rest": 0.0,
    }
    options = Options(**{**settings, **changes})
    session = Session(Quantised(form), Clock(), options, meter=FakeMeter(), bf16=Ours())
    return json.loads(json.dumps(session.run()))


def test_a_run_from_peers_to_plots(fakes: dict[str, Fp8]) -> None:
    result = run_session("fp8_e4m3")
    assert result["peers"][BF16]["title"] == "mlaforge, bf16 cache" and result["peers"][BF16]["state"] == "ready"
    for entry in result["burst"]:
        kernels = entry["kernels"]
        assert list(kernels) == [OURS, BF16, "flashmla", "flashmla_fp8", "flashinfer_fp8kv"]
        assert kernels["flashmla"] == {"reason": "reads no quantised rows"}
        assert kernels[BF16]["check"]["cosine"] < 1e-5 and kernels[BF16]["planning"] == "none"
        # Bytes are those that each reads.
        case = Case(entry["b"], entry["s_k"], entry["h"], entry["s_q"])
        assert kernels[OURS]["GBps"] == pytest.approx(case.bytes(576, 512, 576) / 100e3)
        assert kernels[BF16]["GBps"] == pytest.approx(case.bytes(576, 512, 1152) / 150e3)
        assert entry["ratios"] == pytest.approx({BF16: 1.5, "flashmla_fp8": 1.2, "flashinfer_fp8kv": 0.8})
        # Our own is no peer.
        assert entry["best_peer"] == "flashinfer_fp8kv" and entry["ratio"] == pytest.approx(0.8)
    for group in result["summary"]["burst"]:
        assert group["ratios"] == pytest.approx({BF16: 1.5, "flashmla_fp8": 1.2, "flashinfer_fp8kv": 0.8})
        assert (group["wins"], group["losses"]) == (0, 1)
    held = result["sustained"][0]
    assert set(held["ratios"]) == {BF16, "flashmla_fp8", "flashinfer_fp8kv"} and held["energy_ratio"] is not None
    console = Console(record=True, width=180, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in bench_tables(result, OURS):
        console.print(part)
    text = console.export_text()
    assert "Time of each kernel over ours" in text and "1.500" in text and "reads no quantised rows" in text
    picture = to_svg(result)
    assert picture is not None and BF16 in picture
    assert [plot.title for plot in plots(Result.model_validate(result))] == ["Decode, burst", "Decode, sustained"]


@pytest.mark.parametrize("form", FORMATS)
def test_without_peers_our_own_bf16_is_still_there(form: str) -> None:
    result = run_session(form, peers=(), suites=choose_suites(["burst"], [(2, 130)], [4], [1]))
    (entry,) = result["burst"]
    assert list(entry["kernels"]) == [OURS, BF16] and "us" in entry["kernels"][BF16]
    assert entry["best_peer"] is None and entry["ratio"] is None and entry["ratios"] == {BF16: 1.5}
    assert result["summary"]["burst"][0]["ratios"] == {BF16: pytest.approx(1.5)}


def test_a_wrong_bf16_decode_is_not_timed() -> None:
    class Wrong(Ours):
        def decode(self, *arguments: Any, **options: Any) -> Any:
            out, lse = super().decode(*arguments, **options)
            return out.mul_(1.1), lse

    suites = choose_suites(["burst"], [(2, 130)], [4], [1])
    session = Session(Quantised("nvfp4"), Clock(), Options(suites, (), repeats=5, rest=0), bf16=Wrong())
    (entry,) = session.run()["burst"]
    assert "its result is not ours" in entry["kernels"][BF16]["reason"] and entry["ratios"] == {}


def test_tune_judges_by_what_the_rows_stand_for() -> None:
    class Judged:
        manifest = read_manifest(ROOT / "generated" / "deepseek_v3_nvfp4")

        def decode(self, q: Any, kv_cache: Any, table: Any, lengths: Any, *, tensor_scale: Any, **options: Any) -> Any:
            rows = torch.cat(FORMATS["nvfp4"].dequantise(kv_cache, 512, 64, float(tensor_scale)), -1)
            scale = options.get("softmax_scale") or self.manifest.softmax_scale
            causal = options["causal"]
            out, lse = decode_reference(q, rows, table, lengths, d_v=512, softmax_scale=scale, causal=causal)
            return options["out"].copy_(out), options["lse"].copy_(lse)

    options = tune.Options((Case(2, 130, 4, 2),), repeats=5, rest=0.0, examples=2, max_tokens=100)
    result = tune.Tuning("tiny", [tune.Candidate("a", {}, Judged())], FakeDevice(), options).run()
    assert result["winner"] == "a" and result["candidates"][0]["state"] == "right"


# ---- The command line ------------------------------------------------------------------------------------------------


def test_the_bench_of_the_command_line_makes_the_bf16_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import mlaforge

    loaded: list[Any] = []

    def load(folder: Path) -> Any:
        manifest = read_manifest(Path(folder))
        loaded.append(manifest)
        mla = Quantised(manifest.cache.dtype) if manifest.cache.quantised else Ours()
        mla.manifest = manifest
        return mla

    play_gpu(monkeypatch)
    monkeypatch.setattr(mlaforge, "load", load, raising=False)
    arguments = ("--shapes", "1x100", "--heads", "8", "--repeats", "5", "--peers", "none", "-o", str(tmp_path))
    made = run("deepseek_v3_fp8_ds_mla", *arguments)
    assert made.exit_code == 0, made.output
    quantised, bf16 = loaded
    assert (quantised.cache.dtype, bf16.cache.dtype) == ("fp8_ds_mla", "bf16")
    assert bf16.model == quantised.model and bf16.softmax_scale == quantised.softmax_scale
    assert (bf16.cache.page_size, bf16.tensor_parallel) == (quantised.cache.page_size, quantised.tensor_parallel)
    assert [each.tile_rows for each in bf16.decodes] == [16, 32, 64]
    entry = json.loads((tmp_path / "bench.json").read_text())["burst"][0]
    assert entry["kernels"][BF16]["us"]["count"] == 5 and entry["ratios"][BF16] > 0
    loaded.clear()
    assert run(str(ROOT / "generated" / "deepseek_v3"), *arguments).exit_code == 0 and len(loaded) == 1


def test_a_shape_that_bf16_can_not_have_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    manifest = read_manifest(ROOT / "generated" / "deepseek_v3_fp8_e4m3")
    wide = dataclasses.replace(manifest, model={**manifest.model, "qk_rope_head_dim": 1024})
    assert bench_command._bf16_folder(wide, tmp_path) is None
    assert "no decode of a bf16 cache beside" in capsys.readouterr().err and not list(tmp_path.iterdir())
