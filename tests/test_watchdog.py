"""Kernels that hang: who notices, what is named, and how the tuner ends. A thread that waits plays the hang."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mlaforge.bench.threshold import Options as ThresholdOptions
from mlaforge.bench.threshold import ThresholdTuning
from mlaforge.bench.timing import Gpu, Timed
from mlaforge.bench.tune import Candidate, Options, Tuning
from mlaforge.bench.watchdog import Watchdog, WatchedTiming
from mlaforge.verify import Problem
from test_bench import FakeDevice
from test_threshold import POINTS, kernels
from test_threshold import Clock as ThresholdClock
from test_tune import CASES, LARGE, QUICK, SMALL, Clock, Faulty, Machine, entry, invoke, made
from test_tune import machine as machine
from test_tune import spec as spec
from test_verify import one_thread as one_thread


class Hang:
    """Blocks who calls it until it is ended, and then unwinds them."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.ends = 0

    def __call__(self) -> None:
        assert self.ended.wait(20), "nobody noticed"
        raise KeyboardInterrupt

    def end(self) -> None:
        self.ends += 1
        self.ended.set()


# ---- The watchdog ----------------------------------------------------------------------------------------------------


def test_what_is_late_is_told_once_and_what_is_not_is_not() -> None:
    late: list[str] = []
    with Watchdog(0.1) as watchdog:
        for _ in range(3):
            with watchdog.watching(lambda: late.append("quick")):
                time.sleep(0.05)
        # Between what is watched nothing is late.
        time.sleep(0.2)
        with watchdog.watching(lambda: late.append("longer"), longer=5):
            time.sleep(0.2)
        with watchdog.watching(lambda: late.append("slow")):
            time.sleep(0.35)
    assert late == ["slow"]
    assert not any(thread.name == "mlaforge watchdog" for thread in threading.enumerate())


def test_who_comes_back_waits_for_the_late_call() -> None:
    order: list[str] = []

    def late() -> None:
        time.sleep(0.2)
        order.append("late")

    with Watchdog(0.05) as watchdog:
        with watchdog.watching(late):
            time.sleep(0.1)
        order.append("on")
    assert order == ["late", "on"]


def test_timing_is_as_the_devices_and_names_what_hangs() -> None:
    hang, named = Hang(), []

    class Device(FakeDevice):
        def unfinished(self) -> str | None:
            return "b"

    def late(name: str | None) -> None:
        named.append(name)
        hang.end()

    def timed(run: Any) -> Timed:
        return Timed(run, "graph", torch.zeros(1))

    device = Device()
    with Watchdog(0.2) as watchdog:
        timing = WatchedTiming(device, watchdog, late)
        samples = timing.time({"a": timed(lambda: None)}, 3)
        assert list(samples) == ["a"] and len(samples["a"]) == 3 and device.rounds == [(["a"], 3)]
        with pytest.raises(KeyboardInterrupt):
            timing.time({"a": timed(lambda: None), "b": timed(hang)}, 1)
    assert named == ["b"]


def test_many_rounds_may_take_as_long_as_one_says() -> None:
    late: list[str | None] = []
    call = Timed(lambda: time.sleep(0.05), "graph", torch.zeros(1))
    with Watchdog(0.15) as watchdog:
        timing = WatchedTiming(FakeDevice(), watchdog, late.append)
        timing.time({"a": call}, 1)
        timing.time({"a": call}, 10)
    assert late == []


def test_a_gpu_names_the_first_call_that_it_has_not_finished() -> None:
    class Event:
        def __init__(self, done: bool) -> None:
            self.done = done

        def query(self) -> bool:
            return self.done

    gpu = object.__new__(Gpu)
    gpu._enqueuing = None
    gpu._round = [(name, Event(name in "ab")) for name in "abcd"]
    assert gpu.unfinished() == "c"
    gpu._round, gpu._enqueuing = gpu._round[:2], "e"
    assert gpu.unfinished() == "e"


# ---- Tuning ----------------------------------------------------------------------------------------------------------


def hung_tuning(
    candidates: list[Candidate], hang: Hang, device: FakeDevice | None = None
) -> tuple[dict[str, Any], list[str]]:
    saved: list[dict[str, Any]] = []
    lines: list[str] = []

    def abandon() -> None:
        # What is saved by now stays: the process ends.
        saved.append(json.loads(json.dumps(run.result, allow_nan=False)))
        hang.end()

    options = Options(CASES, **{**SMALL, "patience": 1.0})
    times = {each.label: 10.0 for each in candidates}
    device = device or Clock(times)
    run = Tuning("tiny", candidates, device, options, report=lines.append, abandon=abandon)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert hang.ends == 1
    return saved[-1], lines


@pytest.mark.parametrize("where", ["a small problem", "1 x 200 tokens, 4 heads, s_q 1"])
def test_a_candidate_that_hangs_is_named(where: str) -> None:
    hang = Hang()
    small = where == "a small problem"
    faulty = Faulty(when=lambda q, lengths: small or int(lengths.max()) == LARGE, then=hang)
    result, lines = hung_tuning([made("a", planner=True), made("b", faulty)], hang)
    assert result["stopped"] == f"b hangs: {where} did not end within 1 s"
    found = entry(result, "b")
    assert found["state"] == "hangs" and found["reason"] == f"{where} did not end within 1 s"
    assert Problem.parse(found["problem"]).tokens <= LARGE
    assert f"b: hangs, excluded: {where} did not end within 1 s" in lines
    # What was measured before is there, and b has no place in it.
    assert len(result["cases"]) == (0 if small else 2)
    assert [each["label"] for each in result["ranking"]] == ([] if small else ["a"])


@pytest.mark.parametrize("known", [True, False])
def test_a_candidate_that_hangs_while_it_is_timed(known: bool) -> None:
    hang = Hang()

    class Hanging(Clock):
        def time(self, calls: Mapping[str, Timed], repeats: int) -> dict[str, list[float]]:
            if repeats == SMALL["repeats"]:
                hang()
            return super().time(calls, repeats)

        def unfinished(self) -> str | None:
            return "b" if known else None

    result, _ = hung_tuning([made("a", planner=True), made("b")], hang, Hanging({"a": 10, "b": 20}))
    words = "2 x 70 tokens, 4 heads, s_q 1 did not end within 1 s"
    assert result["stopped"] == f"{'b' if known else 'a candidate'} hangs: {words}"
    assert entry(result, "b")["state"] == ("hangs" if known else "right")


def test_a_way_that_hangs_is_named() -> None:
    hang = Hang()

    class Hanging(ThresholdClock):
        def result(self, timed: Timed) -> torch.Tensor:
            batch = timed.run.args[2]  # type: ignore[attr-defined]
            if batch.prefill is not None and batch.total_tokens == POINTS[2].b * POINTS[2].tokens:
                hang()
            return super().result(timed)

    saved: list[dict[str, Any]] = []

    def abandon() -> None:
        saved.append(json.loads(json.dumps(run.result, allow_nan=False)))
        hang.end()

    options = ThresholdOptions(points=POINTS, repeats=5, rest=0.0, patience=1.0)
    run = ThresholdTuning(kernels(), Hanging(), options, abandon=abandon)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    (result,) = saved
    reason = "decompressed hangs: it did not end within 1 s"
    assert result["stopped"] == f"{POINTS[2]}: {reason}" and result["failed"][0]["reason"] == reason
    assert len(result["points"]) == 2


def test_the_command_line_ends_with_what_it_has(
    machine: Machine, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang, codes = Hang(), []

    def leave(code: int) -> None:
        codes.append(code)
        hang.end()

    monkeypatch.setattr("mlaforge_generator.cli.tuned.os._exit", leave)
    machine.decoders[3] = Faulty(when=lambda q, lengths: int(lengths.max()) == 64, then=hang)
    data = tmp_path / "data"
    result = invoke(spec, *QUICK, "--data", data, "--patience", "1")
    assert codes == [1]
    assert "stopped: stages 3 hangs: 2 x 64 tokens, 4 heads, s_q 1 did not end within 1 s" in result.stderr
    assert "reproduce: mlaforge verify" in result.stdout and (data / "wrong_stages_3.yaml").is_file()
    assert not (data / "tiny.yaml").exists() and "hangs" in (data / "tune.json").read_text()
