"""The timeline of one block under the simulator: who issues, waits and computes, and the life of the buffers.

The machine writes events (`SimulatorOptions.trace`). `read_events` reads them, `make_timeline` makes lanes of them, one
for each warp and each region of shared memory (small ones that share a line of 128 bytes share a lane), and `to_svg`
and `to_perfetto` draw the lanes. Time is counted in the machine's steps, the turns of its threads and the events
themselves: it orders what happens and measures nothing.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from mlaforge.api import load
from mlaforge.manifest import DecodeKernel, Manifest, SmemRegion
from mlaforge.simulator import SimulationError, SimulatorOptions
from mlaforge.verify import Problem, make_inputs

_WARP = 32
_LINE = 128
"""Bytes of shared memory that the machine tells apart."""


# ---- Events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """What the machine wrote of one event. Waits and barriers are those of a warp's first lane."""

    time: int
    until: int
    """The last step of plain accesses that are told together; else `time`."""
    thread: int
    what: str
    place: str
    """File and line of the kernel."""
    arguments: Mapping[str, int]
    touched: tuple[tuple[int, int], ...]
    """Bytes of shared memory, begin and end, to the 128-byte line."""

    @property
    def warp(self) -> int:
        """The warp of the thread."""
        return self.thread // _WARP


def read_events(path: Path) -> list[Event]:
    """Read the file that a run wrote."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        time, until, thread, what, place, arguments, touched = line.split("\t")
        pairs = (word.split("=") for word in arguments.split())
        ranges = (each.split("-") for each in touched.split(",") if each)
        events.append(
            Event(
                time=int(time),
                until=int(until),
                thread=int(thread),
                what=what,
                place=place,
                arguments={name: int(value) for name, value in pairs},
                touched=tuple((int(begin), int(end)) for begin, end in ranges),
            )
        )
    return events


# ---- Timeline --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """Something that takes from one step to another."""

    kind: str
    """A key of `KINDS`."""
    begin: int
    end: int
    name: str
    places: tuple[str, ...]
    """Lines of the kernel that are behind it."""
    details: Mapping[str, int | str] = field(default_factory=dict)
    ended: bool = True
    """False if the run was over before."""


@dataclass(frozen=True)
class Lane:
    """A warp or a buffer."""

    name: str
    group: str
    """The warp's role."""
    end: int
    """The step at which the warp left; of a buffer, that of the whole timeline."""
    spans: tuple[Span, ...]
    """What the warp waits for, or the states of the buffer: one at a time."""
    marks: tuple[Span, ...] = ()
    """Arrivals, those of a warp's lanes together."""
    flights: tuple[Span, ...] = ()
    """Asynchronous operations of the warp, from issue to landing (TMA) or to the end of the wait for them (WGMMA)."""


@dataclass(frozen=True)
class Timeline:
    """One block's run."""

    title: str
    steps: int
    warps: tuple[Lane, ...]
    buffers: tuple[Lane, ...]
    fault: str | None = None
    """What ended the run early."""
    sources: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Lines of the kernel's files."""

    def source(self, place: str) -> str:
        """Give the kernel's text at a place; empty if there is none."""
        file, _, number = place.rpartition(":")
        lines = self.sources.get(file, ())
        return lines[int(number) - 1].strip() if 0 < int(number) <= len(lines) else ""


@dataclass(frozen=True)
class _Kind:
    colour: str
    legend: str


KINDS: Mapping[str, _Kind] = {
    "run": _Kind("#d5dbe3", "runs, or could: another warp has the turn"),
    "wait": _Kind("#f0a04b", "waits for an mbarrier"),
    "barrier": _Kind("#b07d5b", "waits at a named barrier"),
    "wgmma wait": _Kind("#b39ddb", "waits for its WGMMA"),
    "wgmma": _Kind("#6a3fb5", "WGMMA, issue to the end of the wait"),
    "copy": _Kind("#2f7fd0", "TMA copy, issue to landing"),
    "expect": _Kind("#2f7fd0", "arrives and expects bytes"),
    "arrive": _Kind("#1b1b1b", "arrives"),
    "tma": _Kind("#7db7ee", "being filled by TMA"),
    "stores": _Kind("#63c5ba", "being written by threads"),
    "full": _Kind("#f4d35e", "full, will be read"),
    "read": _Kind("#7bbf6a", "being read"),
    "free": _Kind("#ffffff", "free: not read before it is filled again"),
}
"""What spans are, and how they are drawn."""

_WAITS = {"wait": "waited", "barrier": "barrier passed", "wgmma wait": "wgmma waited"}
_MARKS = {"arrive": "arrive", "expect": "expect", "barrier arrive": "arrive"}
_NOT_BY_THE_WARP = ("landed", "wgmma landed", "phase")
"""Events that come of what a warp has issued, when it may have left."""
_FLIGHTS = ("wgmma", "copy")
_STATES = ("tma", "stores", "full", "read", "free")
_BUFFER_GROUP = "shared memory"


def _short(kind: str) -> str:
    return re.split("[,:]", KINDS[kind].legend)[0]


def default_problem(manifest: Manifest, h_q: int = 16) -> Problem:
    """Give a small problem of two requests that uses every tile of the ring of the kernel for `h_q` heads twice."""
    kernel = manifest.decode_for(h_q)
    tokens = kernel.tile_tokens
    return Problem(lengths=(2 * kernel.stages * tokens - tokens // 4, tokens + 6), h_q=h_q)


def trace_decode(folder: Path, problem: Problem | None = None, options: SimulatorOptions | None = None) -> Timeline:
    """Run a problem under the simulator and give the timeline of one block, `options.trace_block`.

    Args:
        folder: what `mlaforge generate` made.
        problem: `default_problem` if None.
        options: how the machine runs; with one multiprocessor, one block has all the requests.

    Raises:
        ValueError: the grid has no such block.
    """
    options = options or SimulatorOptions(sms=1)
    with tempfile.TemporaryDirectory(prefix="mlaforge-") as scratch:
        path = Path(scratch) / "events"
        mla = load(folder, device="sim", simulator=dataclasses.replace(options, trace=path))
        problem = problem or default_problem(mla.manifest)
        inputs = make_inputs(problem, mla.manifest, "cpu")
        fault = None
        try:
            mla.decode(
                inputs.q,
                inputs.kv_cache,
                inputs.block_table,
                inputs.cache_seqlens,
                tensor_scale=inputs.tensor_scale,
                causal=problem.causal,
                softmax_scale=problem.softmax_scale or None,
            )
        except SimulationError as error:
            fault = str(error)
        events = read_events(path)
    x, y, z = options.trace_block
    kernel = mla.manifest.decode_for(problem.s_q * problem.h_q // problem.h_kv)
    title = (
        f"{mla.manifest.name}, {kernel.source.name}, block ({x}, {y}, {z}): {problem}; "
        f"{options.sms} SM{'s' if options.sms > 1 else ''}, {options.mode}, seed {options.seed}"
    )
    return make_timeline(events, kernel, title, fault)


def make_timeline(events: Sequence[Event], kernel: DecodeKernel, title: str, fault: str | None = None) -> Timeline:
    """Make the lanes of a block from its events."""
    steps = max((event.until for event in events), default=0) + 1
    of_warp: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        of_warp[event.warp].append(event)
    roles = [role.name for role in kernel.roles for _ in range(role.warps)]
    warps = []
    for warp, role in enumerate(roles):
        mine = of_warp[warp]
        left = any(event.what == "exit" for event in mine)
        # The first lane tells of its exit; others may still have something to do.
        last = max((event.until for event in mine if event.what not in _NOT_BY_THE_WARP), default=0)
        warps.append(
            Lane(
                name=f"warp {warp}",
                group=role,
                end=last if left else steps,
                spans=tuple(_waits(mine, kernel, steps)),
                marks=tuple(_marks(mine, kernel)),
                flights=tuple([*_copies(mine, kernel, steps), *_matmuls(mine, steps)]),
            )
        )
    sources = {path.name: path.read_text(encoding="utf-8").splitlines() for path in kernel.source.parent.glob("*.cu*")}
    return Timeline(title, steps, tuple(warps), tuple(_buffers(events, kernel, steps)), fault, sources)


def _subject(event: Event, kernel: DecodeKernel) -> str:
    """Name the barrier of an event; empty if it has none."""
    if "id" in event.arguments:
        return f"named barrier {event.arguments['id']}"
    offset = event.arguments.get("mbarrier")
    return "" if offset is None else kernel.mbarriers.get(offset, f"mbarrier at {offset}")


def _waits(events: Iterable[Event], kernel: DecodeKernel, steps: int) -> Iterable[Span]:
    begun: Event | None = None
    for event in events:
        if event.what in _WAITS:
            begun = event
        elif begun is not None and event.what == _WAITS[begun.what]:
            yield _wait(begun, event.time, kernel)
            begun = None
    if begun is not None:
        yield dataclasses.replace(_wait(begun, steps, kernel), ended=False)


def _wait(begun: Event, end: int, kernel: DecodeKernel) -> Span:
    details = {name: value for name, value in begun.arguments.items() if name in ("parity", "threads")}
    return Span(begun.what, begun.time, end, _subject(begun, kernel) or "", (begun.place,), details)


def _marks(events: Iterable[Event], kernel: DecodeKernel) -> Iterable[Span]:
    same: dict[tuple[object, ...], list[Event]] = defaultdict(list)
    for event in events:
        if event.what in _MARKS:
            # An mbarrier has its phase; a named barrier is told arrival by arrival of the first lane's thread.
            which = event.arguments.get("phase", event.time)
            same[event.what, event.place, _subject(event, kernel), which].append(event)
    for group in same.values():
        first = group[0]
        details: dict[str, int | str] = {"arrivals": len(group)}
        details |= {name: first.arguments[name] for name in ("phase", "bytes") if first.arguments.get(name)}
        yield Span(_MARKS[first.what], first.time, group[-1].time, _subject(first, kernel), (first.place,), details)


def _regions_of(event: Event, kernel: DecodeKernel) -> list[str]:
    return [
        region.name
        for region in kernel.regions
        if any(begin < region.offset + region.size and region.offset < end for begin, end in event.touched)
    ]


def _copies(events: Iterable[Event], kernel: DecodeKernel, steps: int) -> Iterable[Span]:
    events = list(events)
    landed = {event.arguments["copy"]: event for event in events if event.what == "landed"}
    for event in events:
        if event.what == "copy":
            end = landed.get(event.arguments["copy"])
            yield Span(
                "copy",
                event.time,
                end.time if end else steps,
                ", ".join(_regions_of(end, kernel)) if end else "",
                (event.place,),
                {
                    "bytes": event.arguments["bytes"],
                    "mbarrier": _subject(event, kernel),
                    "phase": event.arguments["phase"],
                    "lane": event.thread % _WARP,
                },
                ended=end is not None,
            )


def _matmuls(events: Iterable[Event], steps: int) -> Iterable[Span]:
    """Give the groups of a warp's WGMMA: what one commit closed."""
    issued: list[Event] = []
    open_groups: list[list[Event]] = []
    for event in events:
        if event.what == "wgmma":
            issued.append(event)
        elif event.what == "commit" and issued:
            open_groups.append(issued)
            issued = []
        elif event.what == "wgmma waited":
            while open_groups and open_groups[0][-1].arguments["operation"] <= event.arguments["operation"]:
                yield _group(open_groups.pop(0), event.time, event.place)
    for group in (*open_groups, *([issued] if issued else [])):
        yield dataclasses.replace(_group(group, steps, ""), ended=False)


def _group(operations: Sequence[Event], end: int, waited_at: str) -> Span:
    places = tuple(dict.fromkeys([*(each.place for each in operations), *([waited_at] if waited_at else [])]))
    details = {"operations": len(operations), "last issued": operations[-1].time}
    return Span("wgmma", operations[0].time, end, "", places, details)


# ---- Buffers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Access:
    kind: str  # "tma", "stores" or "read"
    begin: int
    end: int
    warp: int
    place: str
    bytes: int = 0


def _buffers(events: Sequence[Event], kernel: DecodeKernel, steps: int) -> Iterable[Lane]:
    lanes = {region.name: name for name, regions in _told_apart(kernel).items() for region in regions}
    accesses: dict[str, list[_Access]] = {name: [] for name in lanes.values()}
    for event, access in _accesses(events, steps):
        touched = (lanes[region] for region in _regions_of(event, kernel) if region in lanes)
        for name in dict.fromkeys(touched):
            accesses[name].append(access)
    for name, mine in accesses.items():
        yield Lane(name, _BUFFER_GROUP, steps, tuple(_life(name, mine, steps)))


def _told_apart(kernel: DecodeKernel) -> dict[str, list[SmemRegion]]:
    """Give the regions without those of mbarriers, by lane: events can't tell apart what lies in the same line."""
    barriers = kernel.mbarriers.keys()
    groups: list[list[SmemRegion]] = []
    for region in kernel.regions:
        if any(region.offset <= barrier < region.offset + region.size for barrier in barriers):
            continue
        last = groups[-1][-1] if groups else None
        if last is not None and (last.offset + last.size - 1) // _LINE == region.offset // _LINE:
            groups[-1].append(region)
        else:
            groups.append([region])
    return {" to ".join(dict.fromkeys((group[0].name, group[-1].name))): group for group in groups}


def _accesses(events: Sequence[Event], steps: int) -> Iterable[tuple[Event, _Access]]:
    """Give the accesses to shared memory, each with the event that knows what it touched."""
    copies = {event.arguments["copy"]: event for event in events if event.what == "copy"}
    matmuls = {(event.warp, event.arguments["operation"]): event for event in events if event.what == "wgmma"}
    waited: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event.what == "wgmma waited":
            waited[event.warp].append((event.arguments["operation"], event.time))
    for event in events:
        if event.what in ("read", "write"):
            kind = "read" if event.what == "read" else "stores"
            yield event, _Access(kind, event.time, event.until + 1, event.warp, event.place)
        elif event.what == "landed":
            issue = copies[event.arguments["copy"]]
            yield event, _Access("tma", issue.time, event.time, event.warp, event.place, issue.arguments["bytes"])
        elif event.what == "wgmma landed":
            operation = event.arguments["operation"]
            end = next((time for last, time in waited[event.warp] if operation <= last), steps)
            issue = matmuls[event.warp, operation]
            yield event, _Access("read", issue.time, end, event.warp, event.place)


def _life(name: str, accesses: Sequence[_Access], steps: int) -> Iterable[Span]:
    """Give the states of a buffer, from the accesses alone: no barrier is asked what it guards."""
    # Where TMA fills a buffer, what threads store there is a change of what is in it.
    filler = "tma" if any(access.kind == "tma" for access in accesses) else "stores"
    fills = sorted((access for access in accesses if access.kind == filler), key=lambda access: access.begin)
    uses = sorted((access for access in accesses if access.kind != filler), key=lambda access: access.begin)
    rounds: list[list[_Access]] = []
    for fill in fills:
        if rounds and not any(rounds[-1][-1].begin < use.begin < fill.begin for use in uses):
            rounds[-1].append(fill)
        else:
            rounds.append([fill])
    filling = [(each[0].begin, max(fill.end for fill in each)) for each in rounds]
    storing = _union(use for use in uses if use.kind == "stores")
    reading = _union(use for use in uses if use.kind == "read")

    def state(at: int) -> str:
        if _inside(filling, at):
            return filler
        if _inside(storing, at):
            return "stores"
        if _inside(reading, at):
            return "read"
        refilled = next((begin for begin, _ in filling if begin > at), steps)
        return "full" if any(at < use.begin < refilled for use in uses) else "free"

    borders = sorted({0, steps, *(border for each in (*filling, *storing, *reading) for border in each)})
    begin = 0
    for at, following in pairwise(borders):
        now = state(at)
        if following < steps and state(following) == now:
            continue
        behind = [each for each in accesses if each.kind == now and each.begin < following and begin < each.end]
        details: dict[str, int | str] = {}
        if behind:
            details["warps"] = ", ".join(map(str, sorted({each.warp for each in behind})))
        if now == "tma":
            details |= {"copies": len(behind), "bytes": sum(each.bytes for each in behind)}
        places = tuple(sorted({each.place for each in behind}))
        yield Span(now, begin, following, name, places, details)
        begin = following


def _union(accesses: Iterable[_Access]) -> list[tuple[int, int]]:
    """Join accesses, sorted by their begin, that overlap or touch."""
    joined: list[tuple[int, int]] = []
    for access in accesses:
        if joined and access.begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], access.end))
        else:
            joined.append((access.begin, access.end))
    return joined


def _inside(intervals: Iterable[tuple[int, int]], at: int) -> bool:
    return any(begin <= at < end for begin, end in intervals)


# ---- Perfetto --------------------------------------------------------------------------------------------------------

_WARPS, _BUFFERS = 1, 2  # processes of the trace


def to_perfetto(timeline: Timeline) -> str:
    """Give the timeline as JSON in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

    A microsecond stands for one step. Warps and buffers are threads; asynchronous operations, which overlap, are
    asynchronous events of their warp's process.
    """
    events: list[dict[str, Any]] = []
    processes = ((_WARPS, "warps", timeline.warps), (_BUFFERS, _BUFFER_GROUP, timeline.buffers))
    for process, title, lanes in processes:
        events.append(_metadata("process_name", process, 0, title))
        for thread, lane in enumerate(lanes):
            label = f"{lane.name}, {lane.group}" if process == _WARPS else lane.name
            events.append(_metadata("thread_name", process, thread, label))
            common = {"pid": process, "tid": thread}
            for span in lane.spans:
                of_span = {**common, **_described(timeline, span), "ts": span.begin}
                if span.ended:
                    events.append({**of_span, "ph": "X", "dur": span.end - span.begin})
                else:
                    events.append({**of_span, "ph": "B"})
            for mark in lane.marks:
                events.append({**common, **_described(timeline, mark), "ph": "i", "s": "t", "ts": mark.begin})
            for number, flight in enumerate(lane.flights):
                of_flight = {**common, **_described(timeline, flight), "id": f"{lane.name}.{number}"}
                events.append({**of_flight, "ph": "b", "ts": flight.begin})
                if flight.ended:
                    events.append({**of_flight, "ph": "e", "ts": flight.end, "args": {}})
    other = {"title": timeline.title, "time": _NO_CYCLES}
    if timeline.fault is not None:
        other["fault"] = timeline.fault
    return json.dumps({"traceEvents": events, "otherData": other}, indent=1) + "\n"


def _metadata(name: str, process: int, thread: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": {"name": value}}


def _described(timeline: Timeline, span: Span) -> dict[str, Any]:
    arguments: dict[str, Any] = dict(span.details)
    arguments["at"] = ", ".join(span.places)
    if span.places:
        arguments["source"] = timeline.source(span.places[0])
    name = _short(span.kind) if span.kind in _STATES else f"{span.kind} {span.name}".strip()
    return {"name": name, "cat": span.kind, "args": arguments}


# ---- SVG -------------------------------------------------------------------------------------------------------------

_NO_CYCLES = "steps of the simulator: an order of events, not cycles; widths say nothing about speed"
_LEFT, _PLOT, _RIGHT = 150, 1500, 20
_LANE, _FLIGHT, _GAP = 13, 7, 3


def to_svg(timeline: Timeline) -> str:
    """Draw the timeline. What a mark means, and the kernel's line behind it, show when a pointer rests on it."""
    scale = _PLOT / timeline.steps
    under = ["The run failed: " + timeline.fault] if timeline.fault is not None else [f"Time: {_NO_CYCLES}."]
    under = [line for text in under for line in text.splitlines()]
    header = 32 + 14 * len(under)
    body: list[str] = []
    top = y = header + _LEGEND_ROW * -(-len(KINDS) // _IN_LEGEND) + 4
    group = None
    for lane in (*timeline.warps, *timeline.buffers):
        if lane.group != group:
            group = lane.group
            y += 18
            body.append(f'<text x="8" y="{y - 4}" class="group">{escape(group)}</text>')
        body.append(f'<g><text x="{_LEFT - 8}" y="{y + 10}" class="lane">{escape(lane.name)}</text>')
        body += _lane(timeline, lane, y, scale, is_warp=lane.group != _BUFFER_GROUP)
        body.append("</g>")
        y += _LANE + _GAP + (_FLIGHT if lane.flights else 0)
    width, height = _LEFT + _PLOT + _RIGHT, y + 34
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="20" class="title">{escape(timeline.title)}</text>',
    ]
    for i, line in enumerate(under):
        style = "note" if timeline.fault is None else "fault"
        head.append(f'<text x="8" y="{37 + 14 * i}" class="{style}">{escape(line)}</text>')
    return "\n".join([*head, *_legend(header), *_axis(timeline.steps, scale, top, y), *body, "</svg>"]) + "\n"


_STYLE = (
    "text{font-family:system-ui,sans-serif;font-size:10px;fill:#222}"
    ".title{font-size:14px;font-weight:bold}.note{font-size:11px;fill:#555}.fault{font-size:11px;fill:#b00020}"
    ".group{font-weight:bold;font-size:11px}.lane{text-anchor:end}.tick{text-anchor:middle;fill:#666}"
    ".in{font-size:9px;pointer-events:none}.state{stroke:#9aa4b0;stroke-width:.4}"
)
_IN_LEGEND, _LEGEND_ROW = 5, 17  # entries in a row of the legend, its height


def _legend(top: int) -> Iterable[str]:
    column = (_LEFT + _PLOT) // _IN_LEGEND
    for i, (kind, style) in enumerate(KINDS.items()):
        x, y = 8 + i % _IN_LEGEND * column, top + i // _IN_LEGEND * _LEGEND_ROW
        yield _symbol(kind, x + 6 if kind in _MARKS.values() else x, y + 5 if kind in _FLIGHTS else y, 12)
        yield f'<text x="{x + 20}" y="{y + 9}">{escape(style.legend)}</text>'


def _symbol(kind: str, x: float, y: float, width: float, title: str = "") -> str:
    """Draw a span of a kind with its upper left corner at (x, y); arrivals are triangles with their tip at x."""
    colour = KINDS[kind].colour
    if kind in _MARKS.values():
        return f'<path d="M{x:.1f} {y}l3 -6h-6z" transform="translate(0 {_LANE})" fill="{colour}">{title}</path>'
    height = _LANE if kind not in _FLIGHTS else 3
    edge = ' class="state"' if kind in _STATES and width > 3 else ""
    opacity = ' fill-opacity=".7"' if kind == "copy" else ""
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.6):.1f}" height="{height}" fill="{colour}"{edge}{opacity}>'
        f"{title}</rect>"
    )


def _axis(steps: int, scale: float, top: int, bottom: int) -> Iterable[str]:
    tick = next(n for power in range(12) for n in (10**power, 2 * 10**power, 5 * 10**power) if n * scale >= 90)
    for at in range(0, steps, tick):
        x = _LEFT + at * scale
        yield f'<path d="M{x:.1f} {top + 4}V{bottom + 4}" stroke="#e3e7ec"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 16}" class="tick">{at:,}</text>'
    yield f'<text x="{_LEFT}" y="{bottom + 29}" class="note">{_NO_CYCLES}</text>'


def _lane(timeline: Timeline, lane: Lane, y: int, scale: float, *, is_warp: bool) -> Iterable[str]:
    def draw(span: Span, top: int) -> str:
        title = f"<title>{escape(_hover(timeline, lane, span))}</title>"
        return _symbol(span.kind, _LEFT + span.begin * scale, top, (span.end - span.begin) * scale, title)

    if is_warp:
        yield draw(Span("run", 0, lane.end, "", ()), y)
    for span in lane.spans:
        yield draw(span, y)
        text = span.name if is_warp else _short(span.kind)
        if len(text) * 5 + 4 < (span.end - span.begin) * scale:
            yield f'<text x="{_LEFT + span.begin * scale + 2:.1f}" y="{y + 10}" class="in">{escape(text)}</text>'
    for i, flight in enumerate(lane.flights):
        # Two rows, for one group is issued before the last has ended.
        yield draw(flight, y + _LANE + i % 2 * 3)
    for mark in lane.marks:
        yield draw(mark, y)


def _hover(timeline: Timeline, lane: Lane, span: Span) -> str:
    name = f", {span.name}" if span.name and span.name != lane.name else ""
    lines = [f"{lane.name}: {KINDS[span.kind].legend}{name}"]
    lines.append(f"steps {span.begin:,} to {f'{span.end:,}' if span.ended else 'the end of the run'}")
    for key, value in span.details.items():
        lines.append(f"{key}: {value:,}" if isinstance(value, int) else f"{key}: {value}")
    lines += [f"{place}  {timeline.source(place)}" for place in span.places]
    return "\n".join(lines)
