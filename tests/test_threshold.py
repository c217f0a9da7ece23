"""The threshold between a layer's two ways without a GPU: what is measured, chosen, told and written.

References in torch take the kernels' place, and a device that gives prescribed times the GPU's.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import mlaforge
from attention_models import ExactKernels, manifest_for
from mlaforge.attention_config import AttentionConfig
from mlaforge.bench import power, threshold, timing
from mlaforge.bench.peers import Run
from mlaforge.bench.session import BenchError
from mlaforge.bench.threshold import (
    CONTEXTS,
    TOKENS,
    Options,
    Point,
    ThresholdTuning,
    choose,
    crossings,
    difference,
    explain,
    make_layer,
    make_points,
    rate,
)
from mlaforge.bench.threshold_plot import to_svg
from mlaforge.bench.timing import Launch, Timed
from mlaforge.compiler import CompileError
from mlaforge.formats import FORMATS
from mlaforge.manifest import CacheFormat, read_manifest
from mlaforge.toolchain import ToolchainError
from mlaforge_generator import cli
from mlaforge_generator.resources import find_spec, spec_dir
from mlaforge_generator.spec import Dispatch, Spec, dump_spec, load_spec, parse_spec
from mlaforge_generator.threshold_tables import threshold_tables
from mlaforge_generator.write_back import (
    faster_words,
    threshold_remarks,
    write_back,
    write_threshold,
)
from strategies import specs
from test_bench import FakeDevice
from test_verify import one_thread as one_thread

MINIMAL = """\
name: tiny
model: {num_attention_heads: 4, kv_lora_rank: 256, qk_nope_head_dim: 64, qk_rope_head_dim: 32, v_head_dim: 64}
"""


# ---- What is chosen --------------------------------------------------------------------------------------------------


def measured(ratios: Mapping[tuple[int, int], float]) -> list[dict[str, Any]]:
    """Give points, by context and tokens, of a ratio of times."""
    return [
        {"b": 1, "tokens": n, "context": c, "us": {"absorbed": {"median": 7 * r}, "decompressed": {"median": 7.0}}}
        for (c, n), r in ratios.items()
    ]


def power_law(crossing: Mapping[int, float], slope: float = 0.5, tokens: Iterable[int] = TOKENS) -> list[Any]:
    """Give points of ratios that are straight in the logarithms, so that interpolation is exact."""
    return measured({(c, n): (n / at) ** slope for c, at in crossing.items() for n in tokens})


@pytest.mark.parametrize("at", [1.5, 37.3, 200.6, 1024.5])
def test_one_context_is_cut_where_it_crosses(at: float) -> None:
    points = power_law({4096: at})
    (only,) = crossings(points)
    assert only["context"] == 4096 and only["first"] == "absorbed" and only["crossings"] == [pytest.approx(at)]
    # With as many tokens as that the absorbed way is still the faster one, with one more it is not.
    assert choose(points) == int(at)
    assert rate(points, int(at)) == {
        "threshold": int(at),
        "mean": 0,
        "worst": 0,
        "tokens": None,
        "context": None,
    }


def test_ways_that_do_not_cross() -> None:
    always, never = power_law({0: 1e6}), power_law({0: 0.1})
    assert choose(always) == 2048 and crossings(always) == [{"context": 0, "first": "absorbed", "crossings": []}]
    assert choose(never) == 0 and crossings(never) == [{"context": 0, "first": "decompressed", "crossings": []}]
    assert faster_words(crossings(always)[0]) == "absorbed faster throughout"
    assert explain(always, 2048).endswith("; more new tokens than that were not measured")
    assert explain(never, 0).endswith("at each of 15 points, 0.00% in the mean and 0.0% at most")


def test_ways_that_cross_twice() -> None:
    points = measured({(0, 1): 2.0, (0, 2): 0.5, (0, 4): 0.5, (0, 8): 2.0})
    (only,) = crossings(points)
    assert only["first"] == "decompressed" and only["crossings"] == pytest.approx([math.sqrt(2), math.sqrt(32)])
    assert faster_words(only) == (
        "decompressed faster up to 1 tokens, absorbed faster up to 6 tokens, then decompressed"
    )
    assert choose(points) == 5


def test_contexts_that_disagree_meet_between() -> None:
    points = power_law({0: 64.5, 65536: 512.5})
    # What one gains per step of the threshold the other loses: where both lose the same.
    assert choose(points) == pytest.approx(math.sqrt(64.5 * 512.5), abs=1)
    # A context at which much is at stake has its way.
    steep = [*power_law({0: 64.5}, slope=0.01), *power_law({65536: 512.5}, slope=1)]
    assert 480 <= choose(steep) <= 512


def test_losses_are_those_of_the_points() -> None:
    points = measured({(0, 64): 0.8, (0, 256): 1.25, (16, 64): 0.5, (16, 256): 0.4})
    assert rate(points, 0)["mean"] == pytest.approx((0.25 + 0 + 1 + 1.5) / 4)
    assert rate(points, 64)["mean"] == rate(points, 255)["mean"] == pytest.approx(1.5 / 4)
    assert rate(points, 256) == {
        "threshold": 256,
        "mean": pytest.approx(0.25 / 4),
        "worst": pytest.approx(0.25),
        "tokens": 256,
        "context": 0,
    }
    assert rate(points, 63)["worst"] == pytest.approx(1.5) and rate(points, 63)["context"] == 16


@settings(max_examples=60)
@given(st.data())
def test_no_threshold_loses_less_than_the_one_that_is_found(data: st.DataObject) -> None:
    tokens = data.draw(st.sets(st.integers(1, 300), min_size=1, max_size=6))
    contexts = data.draw(st.sets(st.integers(0, 4), min_size=1, max_size=3))
    ratios = st.floats(0.05, 20)
    points = measured({(c, n): data.draw(ratios) for c in contexts for n in tokens})
    found = choose(points)
    assert 0 <= found <= max(tokens)
    least = rate(points, found)["mean"]
    assert all(least <= rate(points, each)["mean"] for each in range(max(tokens) + 2))


# ---- What is measured ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [4, 16, 128])
def test_every_point_fills_the_gpu_or_is_at_a_limit(heads: int) -> None:
    points = make_points(TOKENS, CONTEXTS, heads, sms=132)
    assert len(set(points)) == len(TOKENS) * len(CONTEXTS) == len(points)
    assert [point.context for point in points] == sorted(point.context for point in points)

    def filled(b: int, point: Point) -> bool:
        prefill = b * heads * math.ceil(point.tokens / 128)
        decode = b * math.ceil(point.tokens * heads / 64) * math.ceil((point.context + point.tokens) / 64)
        return min(prefill, decode) >= 4 * 132

    for point in points:
        more = point.b + 1
        limit = more > 256 or more * (point.context + point.tokens) > 1 << 22
        assert filled(point.b, point) or limit
        assert point.b == 1 or not filled(point.b - 1, point)
    assert make_points([8, 2, 8], [5, 0], 4, 1)[0].tokens == 2


def test_a_difference_is_that_of_the_worst_token() -> None:
    want = torch.randn(2100, 3, 4, generator=torch.Generator().manual_seed(0))
    got = want.clone()
    assert difference(got, want) == 0
    got[2050] *= 1.25
    assert difference(got, want) == pytest.approx(0.25)
    for bad in (math.nan, math.inf):
        got[7, 1, 2] = bad
        assert difference(got, want) == math.inf
    # Nothing at all is no result.
    assert difference(torch.zeros(1, 3, 4), torch.zeros(1, 3, 4)) == math.inf


CONFIG = AttentionConfig(
    hidden_size=48,
    num_attention_heads=6,
    q_lora_rank=None,
    kv_lora_rank=32,
    qk_nope_head_dim=20,
    qk_rope_head_dim=16,
    v_head_dim=12,
    max_position_embeddings=64,
    softmax_scale=1 / 6,
    rotation=None,
)
"""Of another model than that of the shipped spec, whose kernels are the same."""


def kernels(ranks: int = 1) -> ExactKernels:
    return ExactKernels(manifest_for(CONFIG, ranks=ranks, prefill_absorption_threshold=3))


class Clock(FakeDevice):
    """A device on which absorbing takes a microsecond a token of a request, and decompressing 6 in all."""

    def time(self, calls: Mapping[str, Timed], repeats: int) -> dict[str, list[float]]:
        assert list(calls) == ["absorbed", "decompressed"]
        self.rounds.append((list(calls), repeats))
        absorbed, decompressed = (call.run.args[2] for call in calls.values())  # type: ignore[attr-defined]
        # Each call goes its way, with all tokens.
        (group,), prompts = absorbed.decode, decompressed.prefill
        assert absorbed.prefill is None and decompressed.decode == ()
        assert group.requests * group.s_q == prompts.total_tokens == absorbed.total_tokens
        us = {"absorbed": float(group.s_q), "decompressed": 6.0}
        return {name: [us[name] + i / 1000 for i in range(repeats)] for name in calls}


POINTS = make_points([1, 4, 9], [0, 70], heads=6, sms=1)


def tuning(
    mla: ExactKernels | None = None, device: FakeDevice | None = None, **changes: Any
) -> tuple[ThresholdTuning, list[dict[str, Any]], list[str]]:
    saved: list[dict[str, Any]] = []
    lines: list[str] = []
    run = ThresholdTuning(
        mla or kernels(),
        device or Clock(),
        Options(**{"points": POINTS, "repeats": 5, "rest": 0.0, **changes}),
        about={"gpu": "a CPU & no GPU", "driver": "1.2", "cuda": "13.0"},
        report=lines.append,
        save=lambda result: saved.append(json.loads(json.dumps(result, allow_nan=False))),
    )
    return run, saved, lines


def text_of(result: Mapping[str, Any]) -> str:
    console = Console(record=True, width=150, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in threshold_tables(result):
        console.print(part)
    return console.export_text()


def test_a_run_from_points_to_tables() -> None:
    steps: list[str] = []
    run, saved, lines = tuning()
    run._advance = steps.append
    result = run.run()
    assert steps == [str(point) for point in POINTS] and [len(each["points"]) for each in saved] == list(range(1, 7))
    assert saved[-1] == json.loads(json.dumps(result)) and result["failed"] == [] and result["stopped"] is None
    both = ["absorbed", "decompressed"]
    assert isinstance(run.device, Clock) and run.device.rounds == [(both, 1), (both, 1), (both, 5)] * 6
    for point, got in zip(POINTS, result["points"], strict=True):
        assert (got["b"], got["tokens"], got["context"], got["repeats"]) == (
            point.b,
            point.tokens,
            point.context,
            5,
        )
        # Two ways of rounding to bf16, and no more.
        assert 0 <= got["difference"] < 0.01 and got["us"]["absorbed"]["median"] == pytest.approx(point.tokens + 0.002)
    assert max(got["difference"] for got in result["points"]) > 0
    assert result["found"] == 5
    at = [each["crossings"] for each in result["contexts"]]
    assert at == [[pytest.approx(6, abs=0.2)]] * 2
    rated = {each["threshold"]: each for each in result["thresholds"]}
    # The usual ones, the spec's own and the one that was found.
    assert list(rated) == [3, 5, 128, 256, 512] and rated[5]["mean"] == 0
    assert rated[128]["mean"] == pytest.approx(0.5 / 3, rel=1e-3) and rated[128]["worst"] == rated[512]["worst"]
    assert rated[3]["mean"] == pytest.approx(0.5 / 3, rel=1e-3) and rated[3]["tokens"] == 4
    assert lines[0] == f"{POINTS[0]}: absorbed 1.0 us, decompressed 6.0 us"

    text = " ".join(text_of(result).split())
    assert "5 0.00% 0.0% found" in text and f"3 {rated[3]['mean']:.2%} 50.0% 4 new tokens" in text
    assert "context 0 the spec's own" in text
    assert "absorbed faster up to 6 tokens, then decompressed" in text and "9.0 (9.0..9.0) 6.0 (6.0..6.0) 1.500" in text
    assert "Failed" not in text

    told = threshold_remarks(result)
    assert told[0].startswith("Threshold measured by mlaforge ") and "a CPU & no GPU, driver 1.2, CUDA 13.0" in told[0]
    others = ", ".join(f"{each} {rated[each]['mean']:.2%}" for each in (3, 128, 256, 512))
    assert told[1] == (
        "5: the least loss against the faster way at each of 6 points, 0.00% in the mean and 0.0% at most. Others, in "
        f"the mean: {others}."
    )
    assert "5 graph replays" in told[2] and "6 heads" in told[2]
    assert told[3] == (
        "context 0, absorbed faster up to 6 tokens, then decompressed: 1: 1.0 / 6.0, 4: 4.0 / 6.0, 9: 9.0 / 6.0"
    )
    assert len(told) == 5


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_quantised_cache_goes_both_ways(dtype: str) -> None:
    """Both read the same rows: what a format loses is no difference between them."""
    form = FORMATS[dtype]
    cache = CacheFormat(dtype, 64, form.row_bytes(128, 16), quantised=True, tensor_scale=form.layout.tensor_scale)
    manifest = manifest_for(dataclasses.replace(CONFIG, kv_lora_rank=128), cache=cache)
    result = tuning(ExactKernels(manifest))[0].run()
    assert result["failed"] == [] and result["found"] == 5 and result["spec"]["dtype"] == dtype
    assert all(0 <= point["difference"] < 0.01 for point in result["points"])


def test_the_picture() -> None:
    run, _, _ = tuning(points=make_points([1, 16, 256], [0, 70], heads=6, sms=1))
    result = run.run()
    assert to_svg({**result, "points": []}) is None
    picture = str(to_svg(result))
    root = ElementTree.fromstring(picture)
    space = "{http://www.w3.org/2000/svg}"
    circles = root.findall(f"{space}circle")
    # Two contexts of three points each, and two in the legend; the found threshold is wrong nowhere.
    assert len(circles) == 8 and not any(each.get("fill") != "none" for each in circles)
    assert "a CPU &amp; no GPU" in picture and f"found: {result['found']}" in picture and ">context 70<" in picture
    # Of the usual thresholds those that have a place.
    assert {each.text for each in root.findall(f"{space}text")} >= {"128", "256"} and ">512<" not in picture
    wrong = str(to_svg({**result, "found": 0}))
    filled = [e for e in ElementTree.fromstring(wrong).findall(f"{space}circle") if e.get("fill") != "none"]
    assert len(filled) == 2 and "found: 0" not in wrong


def test_a_rank_has_its_share_of_the_heads() -> None:
    run, _, _ = tuning(kernels(ranks=2), points=POINTS[:1])
    assert run.run()["spec"]["heads"] == 3 and make_layer(kernels(ranks=2), torch.device("cpu")).w_uk.shape[0] == 3


class Faulty(ExactKernels):
    """Kernels of which one goes wrong from some call on, where the contexts are long."""

    def __init__(self, then: Callable[[torch.Tensor], object], after: int = 0) -> None:
        super().__init__(kernels().manifest)
        self.then, self.left = then, after

    def decode(self, q: Any, cache: Any, table: Any, lengths: Any, **options: Any) -> Any:
        out, lse = super().decode(q, cache, table, lengths, **options)
        if int(lengths.max()) > 70 and q.shape[1] == 4:
            self.left -= 1
            if self.left < 0:
                self.then(out)
        return out, lse


def raising(error: BaseException) -> Callable[[torch.Tensor], object]:
    def raises(out: torch.Tensor) -> None:
        raise error

    return raises


WRONG = {
    "one token": (lambda out: out[0, 2].mul_(1.1), 0, "the two results differ by 0.1"),
    "NaN": (lambda out: out[0, 1, 0].fill_(math.nan), 0, "differ by inf"),
    # Two runs come before the timing.
    "after the timing": (lambda out: out.mul_(1.1), 2, "after they were timed the two results differ by"),
    "an exception": (raising(ValueError("too\nlong")), 0, "ValueError: too | long"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_point_whose_ways_differ_is_told_and_left_out(name: str) -> None:
    then, after, reason = WRONG[name]
    run, saved, lines = tuning(Faulty(then, after))
    result = run.run()
    (failed,) = result["failed"]
    assert (failed["tokens"], failed["context"]) == (4, 70) and reason in failed["reason"]
    assert len(result["points"]) == 5 and len(saved) == 6 and any(reason in line for line in lines)
    assert "Failed" in text_of(result) and reason in " ".join(text_of(result).split())


def test_a_call_that_no_graph_takes_fails() -> None:
    class NoGraph(Clock):
        def prepare(self, run: Run, launch: Launch = "graph") -> Timed:
            return Timed(run, "launches", run(), run, "can't be captured: it waits")

    run, _, _ = tuning(device=NoGraph())
    result = run.run()
    assert result["points"] == [] and len(result["failed"]) == 6 and result["found"] is None
    assert result["failed"][0]["reason"] == "absorbed: can't be captured: it waits"


@pytest.mark.parametrize(
    ("error", "raised", "reason"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), BenchError, "illegal memory access"),
        (KeyboardInterrupt(), KeyboardInterrupt, "interrupted"),
    ],
)
def test_what_was_measured_before_a_stop_stays(error: BaseException, raised: type, reason: str) -> None:
    run, saved, _ = tuning(Faulty(raising(error)))
    with pytest.raises(raised):
        run.run()
    assert len(saved[-1]["points"]) == 4 and saved[-1]["found"] is not None and reason in saved[-1]["stopped"]


def test_a_budget_lowers_repeats_and_drops_nothing() -> None:
    class Slow(Clock):
        def time(self, calls: Mapping[str, Timed], repeats: int) -> dict[str, list[float]]:
            time.sleep(0.01)
            return super().time(calls, repeats)

    run, _, lines = tuning(device=Slow(), repeats=100_000, budget=0.5)
    result = run.run()
    assert len(result["points"]) == 6 and all(5 <= point["repeats"] < 100 for point in result["points"])
    assert any("instead of 100000 repeats, to keep the budget" in line for line in lines)


def test_kernels_without_prefill_have_one_way() -> None:
    mla = kernels()
    mla.manifest = manifest_for(CONFIG, kernels={k: v for k, v in mla.manifest.kernels.items() if k != "prefill"})
    with pytest.raises(ValueError, match="has no prefill kernel: `mlaforge plan` says why"):
        tuning(mla)


# ---- What is written back --------------------------------------------------------------------------------------------

REMARKS = ["Threshold measured by mlaforge 1.0 on a day.", "context 0: 1: 3.0 / 4.0"]
COMMENT = "# Threshold measured by mlaforge 1.0 on a day.\n#   context 0: 1: 3.0 / 4.0\n"
FIELD = "prefill_absorption_threshold"

LAYOUTS = {
    "no dispatch": (MINIMAL + "# that's all\n", f"{MINIMAL}# that's all\n\n{COMMENT}dispatch: {{{FIELD}: 96}}\n"),
    "braces": (
        f"{MINIMAL}dispatch: {{{FIELD}: 256}}  # usual\n",
        f"{MINIMAL}{COMMENT}dispatch: {{{FIELD}: 96}}  # usual\n",
    ),
    "empty": (MINIMAL + "dispatch: {}\n", f"{MINIMAL}{COMMENT}dispatch: {{{FIELD}: 96}}\n"),
    "block": (
        f"dispatch:\n  # why\n  {FIELD}: 256  # usual\n\n{MINIMAL}",
        f"{COMMENT}dispatch:\n  # why\n  {FIELD}: 96  # usual\n\n{MINIMAL}",
    ),
    "tuned before, kernels too": (
        f"{MINIMAL}# Tuned by mlaforge 1.0.\n#   1 x 64: 9\nkernels: {{decode: {{stages: 2}}}}\n"
        f"# Threshold measured by mlaforge 0.9.\n#   context 7\ndispatch: {{{FIELD}: 300}}\n",
        f"{MINIMAL}# Tuned by mlaforge 1.0.\n#   1 x 64: 9\nkernels: {{decode: {{stages: 2}}}}\n"
        f"{COMMENT}dispatch: {{{FIELD}: 96}}\n",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    text, want = LAYOUTS[name]
    assert write_threshold(text, 96, REMARKS) == want
    assert write_threshold(want, 96, REMARKS) == want


def test_tuned_kernels_leave_a_threshold_and_its_remarks() -> None:
    text = write_threshold(MINIMAL, 96, REMARKS)
    new = write_back(text, {"stages": 2}, ["Tuned by mlaforge 1.0.", "1 x 64: 9"])
    assert COMMENT in new and parse_spec(new).dispatch.prefill_absorption_threshold == 96
    assert parse_spec(new).kernels.decode.stages == 2


@pytest.mark.parametrize("name", sorted(path.stem for path in spec_dir().glob("*.yaml")))
def test_shipped_specs_keep_their_comments(name: str) -> None:
    text = find_spec(name).read_text()
    new = write_threshold(text, 96, REMARKS)
    assert parse_spec(new) == parse_spec(text).model_copy(
        update={"dispatch": Dispatch(prefill_absorption_threshold=96)}
    )
    rest = iter(new.splitlines())
    assert all(line in rest for line in text.splitlines() if FIELD not in line)


@given(specs(), st.booleans())
def test_any_spec_reads_back_with_its_threshold(spec: Spec, flow: bool) -> None:
    text = yaml.safe_dump(yaml.safe_load(dump_spec(spec)), sort_keys=False, default_flow_style=flow, width=60)
    new = parse_spec(write_threshold(text, 96, REMARKS))
    assert new == spec.model_copy(update={"dispatch": Dispatch(prefill_absorption_threshold=96)})


# ---- The command line ------------------------------------------------------------------------------------------------


def invoke(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(cli.cli, ["tune", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(f"# ours\n{MINIMAL}dispatch: {{{FIELD}: 2}}  # a guess\n")
    return path


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[ExactKernels]]:
    made: dict[str, type[ExactKernels]] = {"kernels": ExactKernels}

    class Gpu(Clock):
        sms = 1

        def __init__(self, device: torch.device) -> None:
            super().__init__()

    class Nvml:
        def __init__(self, device: torch.device) -> None:
            pass

        def describe(self) -> dict[str, Any]:
            return {"driver": "580.1"}

    monkeypatch.setattr("mlaforge_generator.cli.devices.why_no_hopper", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "no GPU")
    monkeypatch.setitem(mlaforge.__dict__, "load", lambda folder: made["kernels"](read_manifest(folder)))
    monkeypatch.setattr("mlaforge.compiler.compile_many", lambda sources: None)
    monkeypatch.setattr(timing, "Gpu", Gpu)
    monkeypatch.setattr(power, "Nvml", Nvml)
    monkeypatch.setattr(threshold, "Options", functools.partial(Options, rest=0.0))
    return made


QUICK = ("--threshold", "--tokens", "1,4 9", "--contexts", "0", "--contexts", "70", "--repeats", "3")


def test_the_threshold_is_written_with_its_measurements(machine: object, spec: Path, tmp_path: Path) -> None:
    before, data = spec.read_text(), tmp_path / "data"
    result = invoke(spec, *QUICK, "--data", data)
    assert result.exit_code == 0, result.output
    assert spec.read_text() == before
    assert sorted(path.name for path in data.iterdir()) == [
        "threshold.json",
        "threshold.svg",
        "threshold.txt",
        "tiny.yaml",
    ]
    assert "found: 5: the least loss against " in result.stdout and f"{data / 'tiny.yaml'}: written" in result.stdout
    text = (data / "tiny.yaml").read_text()
    assert text.startswith(f"# ours\n{MINIMAL}# Threshold measured by mlaforge ")
    assert f"dispatch: {{{FIELD}: 5}}  # a guess\n" in text and "no GPU, driver 580.1" in text
    assert "#   context 70, absorbed faster up to 6 tokens" in text and "9: 9.0 / 6.0" in " ".join(text.split())
    assert all(line.startswith("#") or len(line) < 120 for line in text.splitlines())
    changed = load_spec(spec).model_copy(update={"dispatch": Dispatch(prefill_absorption_threshold=5)})
    assert load_spec(data / "tiny.yaml") == changed
    made = json.loads((data / "threshold.json").read_text())
    assert made["found"] == 5 and [each["threshold"] for each in made["thresholds"]] == [2, 5, 128, 256, 512]
    assert made["machine"]["sms"] == 1 and made["spec"]["threshold"] == 2 and made["stopped"] is None
    assert "the spec's own" in (data / "threshold.txt").read_text()


def test_in_place_and_again(machine: object, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke(spec, *QUICK, "--write").exit_code == 0
    assert load_spec(spec).dispatch.prefill_absorption_threshold == 5
    assert (tmp_path / "threshold-tiny" / "threshold.svg").is_file()
    result = invoke(spec, *QUICK, "--write", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["found"] == 5 and "found: 5" in result.stderr
    assert spec.read_text().count("Threshold measured by mlaforge") == 1


def test_a_failed_point_leaves_the_spec_alone(
    machine: dict[str, type[ExactKernels]], spec: Path, tmp_path: Path
) -> None:
    class Wrong(ExactKernels):
        def decode(self, q: Any, *arguments: Any, **options: Any) -> Any:
            out, lse = super().decode(q, *arguments, **options)
            return (out.mul_(1.5) if q.shape[1] == 9 else out), lse

    machine["kernels"] = Wrong
    data, before = tmp_path / "data", spec.read_text()
    result = invoke(spec, *QUICK, "--data", data, "--write")
    assert result.exit_code == 1 and spec.read_text() == before and "found:" not in result.stdout
    assert result.stderr == f"2 of 6 points failed\nwhat was measured is in {data}, and no spec was written\n"
    assert len(json.loads((data / "threshold.json").read_text())["points"]) == 4


def test_an_interrupt_keeps_the_data(machine: dict[str, type[ExactKernels]], spec: Path, tmp_path: Path) -> None:
    class Stopped(ExactKernels):
        def decode(self, q: Any, *arguments: Any, **options: Any) -> Any:
            if q.shape[1] == 4:
                raise KeyboardInterrupt
            return super().decode(q, *arguments, **options)

    machine["kernels"] = Stopped
    data = tmp_path / "data"
    result = invoke(spec, *QUICK, "--data", data)
    assert result.exit_code == 1 and result.stderr.startswith("stopped: interrupted\n")
    assert sorted(path.name for path in data.iterdir()) == ["threshold.json", "threshold.svg", "threshold.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threshold", "--sweep", "stages"], "--sweep has no effect with --threshold"),
        (["--threshold", "--shapes", "1x64"], "--shapes has no effect with --threshold"),
        (["--threshold", "--examples", "24"], "--examples has no effect with --threshold"),
        (["--tokens", "4"], "--tokens needs --threshold"),
        (["--contexts", "4"], "--contexts needs --threshold"),
        (["--threshold", "--tokens", "0,4"], "'0' is not a number from 1 to 65,536"),
        (["--threshold", "--contexts", "1k"], "'1k' is not a number from 0 to 4,194,304"),
        (["--threshold", "--device", "sim"], "--device sim: the simulator counts no time"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_are_told_before_anything_else(spec: Path, arguments: list[str], message: str) -> None:
    result = invoke(spec, *arguments)
    assert result.exit_code == 2 and result.stdout == "" and message in " ".join(result.stderr.split())


def test_specs_that_have_no_threshold_to_find(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    # A head of keys that no prefill kernel has.
    path.write_text(MINIMAL.replace("qk_nope_head_dim: 64", "qk_nope_head_dim: 40"))
    result = invoke(path, "--threshold")
    assert result.exit_code == 2 and f"{path}: there is no prefill kernel" in result.stderr
    path.write_text(MINIMAL.replace("256", "320"))
    result = invoke(path, "--threshold")
    assert result.exit_code == 2 and "model.kv_lora_rank" in result.stderr


def test_toolchains_that_fail(machine: object, spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: Exception, sources: object) -> None:
        raise error

    broken = CompileError(Path("decode.cu"), "warning: hm\ndecode.cu(7): error: no such thing\nmore")
    for error, words in (
        (broken, "tiny does not compile: decode.cu(7): error: no such thing\n"),
        (ToolchainError("run: pip install nvidia-cutlass"), "run: pip install nvidia-cutlass\n"),
    ):
        monkeypatch.setattr("mlaforge.compiler.compile_many", functools.partial(fail, error))
        result = invoke(spec, *QUICK)
        assert result.exit_code == 3 and result.stderr == words


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_no_threshold(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(spec, "--threshold")
    assert result.exit_code == 4 and result.stdout == "" and list(tmp_path.iterdir()) == [spec]
    assert result.stderr == (
        "no CUDA GPU found; tuning needs a Hopper GPU to time on, and the simulator counts no time\n"
    )
