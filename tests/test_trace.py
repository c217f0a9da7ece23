"""The timeline of a block: its events are whole, its lanes follow from them, and both pictures can be read."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import mlaforge
from mlaforge.manifest import Manifest, read_manifest
from mlaforge.simulator import MODES, SimulatorOptions
from mlaforge.trace import (
    KINDS,
    Event,
    Timeline,
    default_problem,
    make_timeline,
    read_events,
    to_perfetto,
    to_svg,
    trace_decode,
)
from mlaforge.verify import Problem, make_inputs
from mlaforge_generator import cli
from mlaforge_generator.plan import make_plan
from mlaforge_generator.resources import find_spec
from mlaforge_generator.spec import load_spec

GENERATED = Path(__file__).parents[1] / "generated"
FOLDERS = sorted(path.parent for path in GENERATED.glob("*/manifest.json"))
RUNS = [("deepseek_v3", mode) for mode in MODES] + [("minicpm3", "random")]
RELEASE = "      release(empty_bar(base, ring.stage));\n"


@functools.cache
def events_of(name: str, mode: str) -> tuple[Event, ...]:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "events"
        options = SimulatorOptions(seed=3, mode=mode, sms=1, trace=path)
        mla = mlaforge.load(GENERATED / name, device="sim", simulator=options)
        inputs = make_inputs(default_problem(mla.manifest), mla.manifest, "cpu")
        mla.decode(inputs.q, inputs.kv_cache, inputs.block_table, inputs.cache_seqlens)
        return tuple(read_events(path))


def manifest_of(name: str) -> Manifest:
    return read_manifest(GENERATED / name)


@functools.cache
def timeline_of(name: str, mode: str) -> Timeline:
    return make_timeline(events_of(name, mode), manifest_of(name), name)


@functools.cache
def broken_timeline() -> Timeline:
    """Give the run of a kernel whose second warpgroup never gives a stage back."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = broken_folder(Path(scratch))
        return trace_decode(folder, options=SimulatorOptions(sms=1))


def broken_folder(parent: Path) -> Path:
    folder = parent / "broken"
    shutil.copytree(GENERATED / "deepseek_v3", folder)
    text = (folder / "decode.cu").read_text()
    assert text.count(RELEASE) == 1
    (folder / "decode.cu").write_text(text.replace(RELEASE, "\n"))
    return folder


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(cli.cli, ["trace", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


# ---- Events ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_events_come_in_order_and_name_the_kernel(name: str, mode: str) -> None:
    events = events_of(name, mode)
    assert all(before.time < after.time for before, after in pairwise(events))
    assert all(event.time <= event.until for event in events)
    lines = {path.name: len(path.read_text().splitlines()) for path in (GENERATED / name).glob("*.cu*")}
    for event in events:
        file, _, line = event.place.rpartition(":")
        assert event.what == "exit" or 0 < int(line) <= lines[file]
    threads = manifest_of(name).decode.threads
    assert sorted(event.thread for event in events if event.what == "exit") == list(range(0, threads, 32))


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_every_wait_ends(name: str, mode: str) -> None:
    ends = {"wait": "waited", "barrier": "barrier passed", "wgmma wait": "wgmma waited"}
    for warp in range(manifest_of(name).decode.threads // 32):
        mine = [e for e in events_of(name, mode) if e.warp == warp and e.what in {*ends, *ends.values()}]
        assert mine and len(mine) % 2 == 0
        for begin, end in zip(mine[::2], mine[1::2], strict=True):
            assert end.what == ends[begin.what] and end.place == begin.place


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_copies_land_between_issue_and_the_end_of_the_wait_for_them(name: str, mode: str) -> None:
    events, manifest = events_of(name, mode), manifest_of(name)
    landed = {e.arguments["copy"]: e for e in events if e.what == "landed"}
    completed = {(e.arguments["mbarrier"], e.arguments["phase"]): e.time for e in events if e.what == "phase"}
    issued = [e for e in events if e.what == "copy"]
    assert len(issued) == len(landed) > 0
    for copy in issued:
        end = landed[copy.arguments["copy"]]
        barrier, phase = copy.arguments["mbarrier"], copy.arguments["phase"]
        assert copy.time < end.time < completed[barrier, phase]
        assert sum(last - first for first, last in end.touched) == copy.arguments["bytes"]
        stage = manifest.decode.mbarriers[barrier].replace("full", "K")
        (region,) = (r for r in manifest.decode.regions if r.name == {"q_K": "Q"}.get(stage, stage))
        assert all(region.offset <= first < last <= region.offset + region.size for first, last in end.touched)
        # Nobody who waits for this phase comes out before.
        for begin, waited in waits_on(events, barrier):
            if waited > copy.time and begin.arguments["parity"] == phase & 1:
                assert waited > completed[barrier, phase]


def waits_on(events: tuple[Event, ...], barrier: int) -> list[tuple[Event, int]]:
    """Give the waits on an mbarrier and when they ended."""
    found = []
    begun: dict[int, Event] = {}
    for event in events:
        if event.arguments.get("mbarrier") == barrier and event.what == "wait":
            begun[event.warp] = event
        elif event.arguments.get("mbarrier") == barrier and event.what == "waited":
            found.append((begun.pop(event.warp), event.time))
    return found


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_phases_end_with_the_arrivals_that_the_plan_says(name: str, mode: str) -> None:
    plan = make_plan(load_spec(find_spec(name))).decode
    expected = {barrier.name: barrier.arrivals for barrier in plan.mbarriers}
    events, names = events_of(name, mode), manifest_of(name).decode.mbarriers
    arrivals = Counter(
        (e.arguments["mbarrier"], e.arguments["phase"]) for e in events if e.what in ("arrive", "expect")
    )
    phases = [(e.arguments["mbarrier"], e.arguments["phase"]) for e in events if e.what == "phase"]
    assert {names[barrier] for barrier, _ in phases} == set(names.values())
    for barrier, phase in phases:
        assert arrivals[barrier, phase] == expected[names[barrier].rstrip("0123456789").strip()]


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_products_land_between_issue_and_the_end_of_the_wait_for_them(name: str, mode: str) -> None:
    events = events_of(name, mode)
    for warp in range(8):
        mine = [e for e in events if e.warp == warp]
        landed = {e.arguments["operation"]: e for e in mine if e.what == "wgmma landed"}
        waited = [(e.arguments["operation"], e.time) for e in mine if e.what == "wgmma waited"]
        issued = [e for e in mine if e.what == "wgmma"]
        assert [e.arguments["operation"] for e in issued] == sorted(landed)
        for product in issued:
            number = product.arguments["operation"]
            assert landed[number].touched
            assert product.time < landed[number].time < next(time for last, time in waited if number <= last)


# ---- Timeline --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_manifest_maps_all_of_shared_memory(folder: Path) -> None:
    kernel = read_manifest(folder).decode
    end = 0
    for region in kernel.regions:
        assert region.offset == end and region.size > 0
        end += region.size
    assert end == kernel.smem_bytes
    (barriers,) = (region for region in kernel.regions if region.name == "barriers")
    assert list(kernel.mbarriers) == list(range(barriers.offset, end, 8))
    assert len({region.name for region in kernel.regions}) == len(kernel.regions)
    assert sum(role.warps for role in kernel.roles) * 32 == kernel.threads


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_lanes(name: str, mode: str) -> None:
    timeline, kernel = timeline_of(name, mode), manifest_of(name).decode
    assert [lane.group for lane in timeline.warps] == [role.name for role in kernel.roles for _ in range(role.warps)]
    assert [lane.name for lane in timeline.buffers] == [r.name for r in kernel.regions if r.name != "barriers"]
    for lane in (*timeline.warps, *timeline.buffers):
        assert all(span.ended and span.kind in KINDS for span in (*lane.spans, *lane.marks, *lane.flights))
        assert all(before.end <= after.begin for before, after in pairwise(lane.spans))
        assert all(0 <= span.begin <= span.end <= lane.end for span in (*lane.spans, *lane.marks))
    kinds = {lane.group: {span.kind for span in lane.flights} for lane in timeline.warps}
    assert kinds == {"warpgroup 0": {"wgmma"}, "warpgroup 1": {"wgmma"}, "producer": {"copy"}, "idle": set()}
    waited = {lane.group: {span.name for span in lane.spans if span.kind == "wait"} for lane in timeline.warps}
    assert {"q_full", "full 0", "full 1", "drained"} <= waited["warpgroup 0"]
    assert {"full 0", "full 1", "filled"} <= waited["warpgroup 1"]
    assert {"q_empty", "empty 0", "empty 1"} <= waited["producer"]


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_life_of_the_buffers(name: str, mode: str) -> None:
    for lane in timeline_of(name, mode).buffers:
        assert lane.spans[0].begin == 0 and lane.spans[-1].end == lane.end
        assert all(before.end == after.begin and before.kind != after.kind for before, after in pairwise(lane.spans))
        states = [span.kind for span in lane.spans]
        assert states[0] == states[-1] == "free" and "read" in states
        filling = "tma" if lane.name == "Q" or lane.name.startswith("K") else "stores"
        fills = [i for i, state in enumerate(states) if state == filling]
        # Every stage is filled and read at least twice, and Q once a request.
        assert len(fills) >= 2
        for first, second in pairwise(fills):
            assert "read" in states[first:second]
        if lane.name.startswith("K"):
            assert all({"copies", "bytes"} <= lane.spans[i].details.keys() for i in fills)


# ---- Pictures --------------------------------------------------------------------------------------------------------


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(to_perfetto(timeline))["traceEvents"]
    return events


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_perfetto(name: str, mode: str) -> None:
    timeline = timeline_of(name, mode)
    events = trace_events(timeline)
    assert {event["ph"] for event in events} == {"M", "X", "i", "b", "e"}
    threads = [e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"]
    assert threads == [f"{x.name}, {x.group}" for x in timeline.warps] + [x.name for x in timeline.buffers]
    begun = [(e["id"], e["cat"], e["name"]) for e in events if e["ph"] == "b"]
    assert len(set(begun)) == len(begun)
    assert begun == [(e["id"], e["cat"], e["name"]) for e in events if e["ph"] == "e"]
    for event in events:
        assert event["ph"] == "M" or 0 <= event["ts"] <= event["ts"] + event.get("dur", 0) <= timeline.steps
        if event["ph"] in ("i", "b") or event.get("cat") in ("wait", "barrier", "wgmma wait", "tma", "read"):
            assert ".cu" in event["args"]["at"]
    waits = [event["args"] for event in events if event.get("cat") == "wait"]
    assert waits and all("mbarrier_wait(" in arguments["source"] for arguments in waits)


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_svg(name: str, mode: str) -> None:
    timeline = timeline_of(name, mode)
    root = ET.fromstring(to_svg(timeline))
    svg = "{http://www.w3.org/2000/svg}"
    texts = {element.text for element in root.iter(f"{svg}text")}
    lanes = (*timeline.warps, *timeline.buffers)
    assert {lane.name for lane in lanes} | {lane.group for lane in lanes} <= texts
    assert {kind.legend for kind in KINDS.values()} <= texts
    assert any("not cycles" in (text or "") for text in texts)
    titles = [element.text or "" for element in root.iter(f"{svg}title")]
    assert any("empty 0" in title and "decode.cu:" in title and "mbarrier_wait(" in title for title in titles)
    assert any(title.startswith("K 0: being filled by TMA\n") and "tma_load_4d(" in title for title in titles)
    width = float(root.attrib["width"])
    for element in root.iter(f"{svg}rect"):
        assert 0 <= float(element.get("x", 0)) <= float(element.get("x", 0)) + float(element.attrib["width"]) <= width


def test_a_run_that_fails_is_drawn_up_to_the_fault() -> None:
    timeline = broken_timeline()
    assert timeline.fault is not None and "deadlock" in timeline.fault
    endless = {(lane.name, span.name) for lane in timeline.warps for span in lane.spans if not span.ended}
    assert ("warp 8", "empty 0") in endless
    events = trace_events(timeline)
    assert sum(event["ph"] == "B" for event in events) == len(endless)
    root = ET.fromstring(to_svg(timeline))
    assert any("deadlock" in (element.text or "") for element in root.iter())


# ---- Command line ----------------------------------------------------------------------------------------------------


def test_command_same_seed_same_bytes(tmp_path: Path) -> None:
    def drawn(seed: int) -> tuple[bytes, bytes]:
        svg, trace = tmp_path / "a.svg", tmp_path / "a.json"
        result = run("minicpm3", "-o", svg, "--perfetto", trace, "--schedule-seed", str(seed))
        assert result.exit_code == 0 and result.stderr == ""
        assert [line.partition(":")[0] for line in result.stdout.splitlines()] == [str(svg), str(trace)]
        return svg.read_bytes(), trace.read_bytes()

    first = drawn(1)
    second = drawn(2)
    assert drawn(1) == first and first[0] != second[0] and first[1] != second[1]


def test_command_of_another_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    problem = ("--problem", "lengths=700,100 h_q=128", "--sms", "4", "--mode", "lazy")
    result = run(GENERATED / "deepseek_v3", *problem, "--block", "1,1,0")
    assert result.exit_code == 0 and "block (1, 1, 0): lengths=700,100 h_q=128; 4 SMs, lazy" in result.stdout
    ET.fromstring((tmp_path / "deepseek_v3.trace.svg").read_text())
    result = run(GENERATED / "deepseek_v3", *problem, "--block", "0,2,0")
    assert result.exit_code == 2 and "there is no block (0, 2, 0) to trace: the grid is (2, 2, 1)" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--block", "1,2"), "'1,2' is not three numbers"),
        (("--block", "-1,0,0"), "no block (-1, 0, 0)"),
        (("--problem", "lengths=a"), "--problem"),
        (("--mode", "fast"), "eager"),
        (("--output", "/dev/null/a.svg"), "can't be written"),
    ],
)
def test_command_line_that_is_wrong(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    output = () if "--output" in arguments else ("--output", str(tmp_path / "a.svg"))
    result = run("deepseek_v3", *output, *arguments)
    assert result.exit_code == 2 and words in result.stderr
    assert not list(tmp_path.iterdir())


def test_command_fails_with_the_fault_and_still_draws(tmp_path: Path) -> None:
    result = run(broken_folder(tmp_path), "-o", tmp_path / "a.svg")
    assert result.exit_code == 1 and "deadlock" in result.stderr
    assert "The run failed" in (tmp_path / "a.svg").read_text()


def test_command_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    result = run("deepseek_v3", "-o", tmp_path / "a.svg")
    assert result.exit_code == 3 and "apt-get install g++" in result.stderr


def test_default_problem_depends_on_the_stages() -> None:
    assert default_problem(manifest_of("deepseek_v3")) == Problem(lengths=(240, 70), h_q=16)
    assert default_problem(manifest_of("minicpm3")) == Problem(lengths=(496, 70), h_q=16)
