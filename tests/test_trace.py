"""The timeline of a block: its events are whole, its lanes follow from them, and both pictures can be read."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import mlaforge
from folders import generate, plan_with
from mlaforge.manifest import DecodeKernel, Manifest, SmemRegion, read_manifest
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
from mlaforge_generator.plan import DecodePlan, Plan

GENERATED = Path(__file__).parents[1] / "generated"
FOLDERS = sorted(path.parent for path in GENERATED.glob("*/manifest.json"))
RELEASE = "      release(empty(base, ring.stage()));\n"


@dataclass(frozen=True)
class Case:
    """A run of the default problem, with more heads if it says so."""

    name: str
    mode: str
    schedule: str = "shipped"
    """The 64-row kernel of the spec; or another schedule, generated for the test."""
    h_q: int = 16

    def __str__(self) -> str:
        return f"{self.name}-{self.schedule}-{self.mode}-h{self.h_q}"


@dataclass(frozen=True)
class Run:
    """What a case came to."""

    problem: Problem
    events: tuple[Event, ...]
    manifest: Manifest
    plan: DecodePlan
    timeline: Timeline
    lines: Mapping[str, int]
    """Of each file of the kernel."""

    @property
    def kernel(self) -> DecodeKernel:
        return self.manifest.decode

    @property
    def skewed(self) -> bool:
        return self.plan.schedule_name == "skewed"

    @property
    def regions(self) -> dict[str, SmemRegion]:
        return {region.name: region for region in self.kernel.regions}

    @property
    def tiles(self) -> int:
        """How many tiles of K the block walks."""
        return sum(-(-length // self.kernel.tile_tokens) for length in self.problem.lengths)

    @property
    def landings(self) -> int:
        """How many tiles come through the ring: in the skewed schedule also one of Q for each request."""
        return self.tiles + (self.problem.batch if self.skewed else 0)

    @property
    def items(self) -> int:
        """How many items the walker writes: the last says that there is no more."""
        return self.problem.batch + 1

    @property
    def one_row_tile(self) -> bool:
        return self.problem.h_q <= self.kernel.tile_rows

    @property
    def exchanges(self) -> int:
        """How many tiles of P take turns; the kernel chooses if one of them can be columns of K instead."""
        return 1 if self.plan.tile.shared and self.one_row_tile else self.plan.tile.exchanges

    @property
    def ropes(self) -> list[str]:
        """The buffers that take turns for the columns of K behind V."""
        if self.plan.tile.shared:
            return ["rope", "rope or P"] if self.one_row_tile else ["rope"]
        return sorted(name for name in self.regions if re.fullmatch(r"rope \d", name))

    def numbered(self, name: str, used: int) -> set[str]:
        """Give the barriers of a group that are used if only the first ones are."""
        (count,) = (barrier.count for barrier in self.plan.mbarriers if barrier.name == name)
        return {f"{name} {i}" if count > 1 else name for i in range(min(count, used))}


# All ways in which a kernel has its buffers: one of them for P or columns of K, in either use; each its own; no columns
# behind V; and the other schedule.
CASES = [
    *(Case("deepseek_v3", mode) for mode in MODES),
    Case("deepseek_v3", "random", h_q=80),
    Case("minicpm3", "random"),
    Case("glm_5_3_flash", "lazy"),
    Case("deepseek_v3", "random", schedule="plain"),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def fields_of(schedule: str) -> dict[str, str | int]:
    # One decode kernel, whatever the rows of the problem.
    return {"tile_rows": 64} if schedule == "shipped" else {"schedule": schedule}


def plan_of(name: str, schedule: str = "shipped") -> Plan:
    return plan_with(name, **fields_of(schedule))


@contextlib.contextmanager
def folder_of(name: str, schedule: str = "shipped") -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield generate(Path(folder), name, **fields_of(schedule))


@functools.cache
def run_of(case: Case) -> Run:
    with folder_of(case.name, case.schedule) as folder, tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "events"
        options = SimulatorOptions(seed=3, mode=case.mode, sms=1, trace=path)
        mla = mlaforge.load(folder, device="sim", simulator=options)
        problem = replace(default_problem(mla.manifest), h_q=case.h_q)
        inputs = make_inputs(problem, mla.manifest, "cpu")
        mla.decode(inputs.q, inputs.kv_cache, inputs.block_table, inputs.cache_seqlens)
        events = tuple(read_events(path))
        return Run(
            problem=problem,
            events=events,
            manifest=mla.manifest,
            plan=plan_of(case.name, case.schedule).decode,
            timeline=make_timeline(events, mla.manifest.decode, case.name),
            lines={path.name: len(path.read_text().splitlines()) for path in folder.glob("*.cu*")},
        )


def group_of(barrier: str) -> str:
    """Give a barrier's name without its number."""
    return barrier.rstrip("0123456789").strip()


@functools.cache
def broken_timeline() -> Timeline:
    """Give the run of a kernel whose second warpgroup never gives a tile back."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = broken_folder(Path(scratch))
        return trace_decode(folder, options=SimulatorOptions(sms=1))


def broken_folder(parent: Path) -> Path:
    folder = parent / "broken"
    generate(folder, "deepseek_v3", **fields_of("shipped"))
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


@every_case
def test_events_come_in_order_and_name_the_kernel(case: Case) -> None:
    run = run_of(case)
    events = run.events
    assert all(before.time < after.time for before, after in pairwise(events))
    assert all(event.time <= event.until for event in events)
    for event in events:
        file, _, line = event.place.rpartition(":")
        assert event.what == "exit" or 0 < int(line) <= run.lines[file]
    assert sorted(event.thread for event in events if event.what == "exit") == list(range(0, run.kernel.threads, 32))


@every_case
def test_every_wait_ends(case: Case) -> None:
    ends = {"wait": "waited", "barrier": "barrier passed", "wgmma wait": "wgmma waited"}
    run = run_of(case)
    for warp in range(run.kernel.threads // 32):
        mine = [e for e in run.events if e.warp == warp and e.what in {*ends, *ends.values()}]
        assert mine and len(mine) % 2 == 0
        for begin, end in zip(mine[::2], mine[1::2], strict=True):
            assert end.what == ends[begin.what] and end.place == begin.place


@every_case
def test_copies_land_between_issue_and_the_end_of_the_wait_for_them(case: Case) -> None:
    run = run_of(case)
    events = run.events
    landed = {e.arguments["copy"]: e for e in events if e.what == "landed"}
    completed = {(e.arguments["mbarrier"], e.arguments["phase"]): e.time for e in events if e.what == "phase"}
    issued = [e for e in events if e.what == "copy"]
    assert len(issued) == len(landed) > 0
    filled_by = landing_regions(run)
    used = {run.kernel.mbarriers[copy.arguments["mbarrier"]] for copy in issued}
    assert used == filled_by.keys()
    for copy in issued:
        end = landed[copy.arguments["copy"]]
        barrier, phase = copy.arguments["mbarrier"], copy.arguments["phase"]
        assert copy.time < end.time < completed[barrier, phase]
        assert sum(last - first for first, last in end.touched) == copy.arguments["bytes"]
        region = filled_by[run.kernel.mbarriers[barrier]]
        assert all(region.offset <= first < last <= region.offset + region.size for first, last in end.touched)
        # Nobody who waits for this phase comes out before.
        for begin, waited in waits_on(events, barrier):
            if waited > copy.time and begin.arguments["parity"] == phase & 1:
                assert waited > completed[barrier, phase]


def landing_regions(run: Run) -> dict[str, SmemRegion]:
    """Give what TMA fills, by the barrier that counts it."""
    regions = run.regions
    ring = "tile" if run.skewed else "K"
    filled_by = {f"full {i}": f"{ring} {i}" for i in range(run.plan.tile.stages)}
    if not run.skewed:
        filled_by["q_full"] = "Q"
    elif run.plan.tile.rope_subtiles:
        filled_by["q_rope_full"] = "Q rope"
        filled_by |= {f"rope_full {i}": name for i, name in enumerate(run.ropes)}
    return {barrier: regions[name] for barrier, name in filled_by.items()}


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


@every_case
def test_phases_end_with_the_arrivals_that_the_plan_says(case: Case) -> None:
    run = run_of(case)
    expected = {barrier.name: barrier.arrivals for barrier in run.plan.mbarriers}
    events, names = run.events, run.kernel.mbarriers
    arrivals = Counter(
        (e.arguments["mbarrier"], e.arguments["phase"]) for e in events if e.what in ("arrive", "expect")
    )
    phases = [(e.arguments["mbarrier"], e.arguments["phase"]) for e in events if e.what == "phase"]
    # What takes turns is used from the first on, as far as it is needed.
    used = {"item_full": run.items, "item_empty": run.items - 1}
    used |= dict.fromkeys(("filled", "drained"), run.exchanges)
    used |= dict.fromkeys(("rope_full", "rope_empty"), len(run.ropes))
    used["landed"] = 0  # no request is split
    ended = {names[barrier] for barrier, _ in phases}
    assert ended == set().union(*(run.numbered(name, used.get(name, 99)) for name in expected))
    for barrier, phase in phases:
        assert arrivals[barrier, phase] == expected[group_of(names[barrier])]


@every_case
def test_products_land_between_issue_and_the_end_of_the_wait_for_them(case: Case) -> None:
    events = run_of(case).events
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


def check_map(kernel: DecodeKernel) -> None:
    end = 0
    for region in kernel.regions:
        assert region.offset == end and region.size > 0
        end += region.size
    assert end == kernel.smem_bytes
    (barriers,) = (region for region in kernel.regions if region.name == "barriers")
    assert list(kernel.mbarriers) == list(range(barriers.offset, end, 8))
    assert len({region.name for region in kernel.regions}) == len(kernel.regions)
    assert len(set(kernel.mbarriers.values())) == len(kernel.mbarriers)
    assert sum(role.warps for role in kernel.roles) * 32 == kernel.threads


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_manifest_maps_all_of_shared_memory(folder: Path) -> None:
    check_map(read_manifest(folder).decode)


# No plain kernel reads a quantised cache.
@pytest.mark.parametrize("name", [each.name for each in FOLDERS if not read_manifest(each).cache.quantised])
def test_the_manifest_of_plain_kernels_maps_all_of_shared_memory(name: str) -> None:
    with folder_of(name, "plain") as folder:
        check_map(read_manifest(folder).decode)


# What the warps of a role issue and wait for.
ROLES = {
    "scores": ({"wgmma"}, {"item_full", "full", "q_rope_full", "rope_full", "drained"}),
    "values": ({"wgmma"}, {"item_full", "full", "filled"}),
    "tile loader": ({"copy"}, {"item_full", "empty"}),
    "rope loader": ({"copy"}, {"item_full", "q_rope_empty", "rope_empty"}),
    "walker": (set(), {"item_empty"}),
    "warpgroup 0": ({"wgmma"}, {"full", "q_full", "drained"}),
    "warpgroup 1": ({"wgmma"}, {"full", "filled"}),
    "producer": ({"copy"}, {"q_empty", "empty"}),
    "idle": (set[str](), set[str]()),
}


@every_case
def test_lanes(case: Case) -> None:
    run = run_of(case)
    timeline, kernel = run.timeline, run.kernel
    assert [lane.group for lane in timeline.warps] == [role.name for role in kernel.roles for _ in range(role.warps)]
    buffers = [name for name in run.regions if name != "barriers"]
    at = buffers.index("schedule")  # four regions of 32 bytes lie in one line
    if run.skewed:
        assert buffers[at:] == ["schedule", "items 0", "items 1", "items 2", "items 3", "splits"]
        buffers[at:] = ["schedule to items 2", "items 3 to splits"]
    else:
        assert buffers[at:] == ["schedule", "splits"]
        buffers[at:] = ["schedule to splits"]
    assert [lane.name for lane in timeline.buffers] == buffers
    for lane in (*timeline.warps, *timeline.buffers):
        assert all(span.ended and span.kind in KINDS for span in (*lane.spans, *lane.marks, *lane.flights))
        assert all(before.end <= after.begin for before, after in pairwise(lane.spans))
        assert all(0 <= span.begin <= span.end <= lane.end for span in (*lane.spans, *lane.marks))
    groups = {barrier.name for barrier in run.plan.mbarriers}
    ring = range(run.plan.tile.stages)
    for lane in timeline.warps:
        issues, waits = ROLES[lane.group]
        waited = {span.name for span in lane.spans if span.kind == "wait"}
        assert {span.kind for span in lane.flights} == issues
        assert {group_of(name) for name in waited} == waits & groups
        for name in waits & {"full", "empty"}:
            assert {f"{name} {i}" for i in ring} <= waited


def expected_fills(run: Run) -> dict[str, int]:
    """Say how often TMA fills each of its buffers: they take turns."""
    fills = {"Q": run.problem.batch, "Q rope": run.problem.batch}
    stages = run.plan.tile.stages
    for i in range(stages):
        fills[f"{'tile' if run.skewed else 'K'} {i}"] = len(range(i, run.landings, stages))
    fills |= {name: len(range(i, run.tiles, len(run.ropes))) for i, name in enumerate(run.ropes)}
    return {name: count for name, count in fills.items() if name in run.regions}


def idle_buffers(run: Run) -> set[str]:
    """Name the buffers that the case leaves alone."""
    return {f"factors {i}" for i in range(run.exchanges, run.plan.tile.exchanges)}


@every_case
def test_life_of_the_buffers(case: Case) -> None:
    run = run_of(case)
    by_tma, idle = expected_fills(run), idle_buffers(run)
    assert {*by_tma, *idle} <= {lane.name for lane in run.timeline.buffers}
    for lane in run.timeline.buffers:
        assert lane.spans[0].begin == 0 and lane.spans[-1].end == lane.end
        assert all(before.end == after.begin and before.kind != after.kind for before, after in pairwise(lane.spans))
        states = [span.kind for span in lane.spans]
        if lane.name in idle:
            assert states == ["free"]
            continue
        assert states[0] == "free" and "read" in states
        # The last thing that a block does is to read that there is no more work, and which requests it shares.
        assert states[-1] == "free" or (states[-1] == "read" and " to " in lane.name)
        fills = [i for i, state in enumerate(states) if state == ("tma" if lane.name in by_tma else "stores")]
        # Every tile is filled and read at least twice, and Q once a request.
        assert len(fills) >= 2
        for first, second in pairwise(fills):
            assert "read" in states[first:second]
        if lane.name in by_tma:
            assert len(fills) == by_tma[lane.name]
            # A page is a tile here: each fill is a whole one.
            assert run.manifest.cache.page_size == run.kernel.tile_tokens
            for i in fills:
                assert lane.spans[i].details["bytes"] == run.regions[lane.name].size
                assert lane.spans[i].details["copies"] == run.regions[lane.name].size // (64 * 64 * 2)
        else:
            assert "tma" not in states


# ---- Pictures --------------------------------------------------------------------------------------------------------


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(to_perfetto(timeline))["traceEvents"]
    return events


@every_case
def test_perfetto(case: Case) -> None:
    timeline = run_of(case).timeline
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


@every_case
def test_svg(case: Case) -> None:
    timeline = run_of(case).timeline
    root = ET.fromstring(to_svg(timeline))
    svg = "{http://www.w3.org/2000/svg}"
    texts = {element.text for element in root.iter(f"{svg}text")}
    lanes = (*timeline.warps, *timeline.buffers)
    assert {lane.name for lane in lanes} | {lane.group for lane in lanes} <= texts
    assert {kind.legend for kind in KINDS.values()} <= texts
    assert any("not cycles" in (text or "") for text in texts)
    titles = [element.text or "" for element in root.iter(f"{svg}title")]
    assert any("empty 0" in title and "decode.cu:" in title and "mbarrier_wait(" in title for title in titles)
    first = "tile 0" if run_of(case).skewed else "K 0"
    assert any(title.startswith(f"{first}: being filled by TMA\n") and "tma_load_4d(" in title for title in titles)
    width = float(root.attrib["width"])
    for element in root.iter(f"{svg}rect"):
        assert 0 <= float(element.get("x", 0)) <= float(element.get("x", 0)) + float(element.attrib["width"]) <= width


def test_a_quantised_cache() -> None:
    """One with a scale for the whole of it, which decode has to be given."""
    timeline = trace_decode(GENERATED / "deepseek_v3_fp8_e4m3", Problem(lengths=(100, 3), h_q=4))
    assert timeline.fault is None
    assert all(lane.spans or lane.flights for lane in timeline.warps if lane.group != "idle")
    assert any(flight.kind == "copy" for lane in timeline.warps for flight in lane.flights)
    assert any(lane.spans for lane in timeline.buffers)


def test_a_run_that_fails_is_drawn_up_to_the_fault() -> None:
    timeline = broken_timeline()
    assert timeline.fault is not None and "deadlock" in timeline.fault
    endless = {(lane.name, span.name) for lane in timeline.warps for span in lane.spans if not span.ended}
    # The first tile holds Q, which the scores' warpgroup alone gives back.
    assert ("warp 8", "empty 1") in endless
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


@pytest.mark.parametrize("schedule", ["shipped", "plain", "swapped"])
@pytest.mark.parametrize("name", ["deepseek_v3", "minicpm3"])
def test_default_problem_depends_on_the_stages(name: str, schedule: str) -> None:
    stages = plan_of(name, schedule).decode.tile.stages
    assert stages > 1
    with folder_of(name, schedule) as folder:
        manifest = read_manifest(folder)
    assert default_problem(manifest) == Problem(lengths=(128 * stages - 16, 70), h_q=16)
