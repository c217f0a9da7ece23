"""How long a call takes on a GPU: replays of a captured graph between two events, on a cold L2 cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from mlaforge.bench.peers import Run, one_line

_cuda: Any = torch.cuda  # Much of it has no types.

Launch = Literal["graph", "launches", "host"]
"""A replay of a captured graph; plain launches; plain launches with work of the host, which waits for the device."""


@dataclass(frozen=True)
class Timed:
    """A call that is ready to be timed."""

    run: Callable[[], object]
    """Enqueues it."""
    launch: Launch
    out: torch.Tensor
    """Where its result lies after a run; of plain launches the result of the first."""
    held: object = None
    """What must live as long as the call: a graph reads tensors that nothing else may hold."""
    why: str = ""
    """Why it is no graph."""


class Timing(Protocol):
    """What times calls."""

    def time(self, calls: Mapping[str, Timed], repeats: int) -> dict[str, list[float]]:
        """Time calls in turn, `repeats` rounds; microseconds of each."""


class Device(Timing, Protocol):
    """What a session needs of a GPU; a test may play it on a CPU."""

    device: torch.device

    def prepare(self, run: Run, launch: Launch = "graph") -> Timed:
        """Run a call once or twice and capture it if that is wanted and possible."""

    def result(self, timed: Timed) -> torch.Tensor:
        """Give the result of a fresh run: what was there before is overwritten first."""

    def unfinished(self) -> str | None:
        """Name the call that `time` is waiting for; asked by another thread. None if none is known."""

    def stream(self, timed: Timed) -> Stream:
        """Give a stream of calls without a gap."""

    def wait(self) -> None:
        """Wait for all that was enqueued; a fault of an earlier call may show here."""

    def clear(self) -> None:
        """Give back memory that nothing holds."""


class Stream(Protocol):
    """Calls without a gap."""

    def feed(self) -> None:
        """Enqueue more, so that the device does not run dry for the next tenth of a second."""

    def mark(self) -> int:
        """Give the number of chunks that are finished."""

    def us_per_call(self, first: int, last: int) -> float:
        """Give the time of a call, microseconds, from the end of chunk `first` to the end of chunk `last`."""


class Gpu:
    """The device that the kernels run on."""

    def __init__(self, device: torch.device) -> None:
        """Allocate what overwrites L2."""
        self.device = device
        properties = torch.cuda.get_device_properties(device)
        self.sms = int(properties.multi_processor_count)
        self.l2_bytes = int(properties.L2_cache_size)
        size = max(256 << 20, 2 * self.l2_bytes)
        self._written, self._read = (torch.zeros(size // 4, device=device) for _ in range(2))
        self._round: list[tuple[str, Any]] = []
        self._enqueuing: str | None = None

    def prepare(self, run: Run, launch: Launch = "graph") -> Timed:
        """Run a call and capture it. Where the capture fails its plain launches are taken, and the reason kept."""
        if launch != "graph":
            return Timed(run, launch, run(), run)
        side: Any = _cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            # The first run compiles or allocates, the second is what will be captured.
            run()
            out = run()
        torch.cuda.current_stream(self.device).wait_stream(side)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(side):
                graph.capture_begin()
                try:
                    out = run()
                finally:
                    graph.capture_end()
        except Exception as error:
            torch.cuda.synchronize(self.device)
            # The end of a broken capture fails, too: what broke it is told.
            reason = one_line(error.__context__ if isinstance(error.__context__, Exception) else error)
            return Timed(run, "launches", run(), run, f"can't be captured: {reason}")
        return Timed(graph.replay, "graph", out, (run, graph))

    def result(self, timed: Timed) -> torch.Tensor:
        """NaN goes where the result will be: a graph that captured nothing shows itself."""
        timed.out.fill_(float("nan"))
        made = timed.run()
        torch.cuda.synchronize(self.device)
        return made if isinstance(made, torch.Tensor) else timed.out

    def time(self, calls: Mapping[str, Timed], repeats: int) -> dict[str, list[float]]:
        """Time calls in turn; each round begins with another, so that none always follows the same."""
        events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
        names = list(calls)
        for i in range(repeats):
            at = i % len(names)
            self._round = []
            for name in names[at:] + names[:at]:
                call, self._enqueuing = calls[name], name
                begin, end = _event(), _event()
                if call.launch == "launches":
                    # Launches one by one take the host longer than overwriting L2 does.
                    _cuda._sleep(_HOST_CYCLES)
                self._flush()
                if call.launch == "host":
                    # What the host does before its first launch counts.
                    torch.cuda.synchronize(self.device)
                begin.record()
                call.run()
                end.record()
                events[name].append((begin, end))
                self._round.append((name, end))
            self._enqueuing = None
            torch.cuda.synchronize(self.device)
            # Without it a round of heavy calls would run into the power cap, and be no burst.
            time.sleep(_ROUND_PAUSE)
        return {name: [1e3 * begin.elapsed_time(end) for begin, end in pairs] for name, pairs in events.items()}

    def unfinished(self) -> str | None:
        """Name the first call of the round whose end the device has not reached, or else the one being enqueued."""
        return next((name for name, end in self._round if not end.query()), self._enqueuing)

    def _flush(self) -> None:
        """Overwrite L2, then read as much again: no call pays for writing back what overwrote it.

        It takes the device some 150 us, in which the host enqueues the call.
        """
        self._written.zero_()
        self._read.sum()

    def stream(self, timed: Timed) -> GpuStream:
        """Give a stream of calls; finds out first how long one takes."""
        begin, end = _event(), _event()
        timed.run()
        begin.record()
        for _ in range(3):
            timed.run()
        end.record()
        torch.cuda.synchronize(self.device)
        return GpuStream(timed.run, max(begin.elapsed_time(end) / 3e3, 1e-6))

    def wait(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def clear(self) -> None:
        """Give cached memory back to the driver."""
        torch.cuda.empty_cache()


def _event() -> Any:
    return _cuda.Event(enable_timing=True)


_HOST_CYCLES = 600_000  # 0.3 ms
_ROUND_PAUSE = 0.002
_CHUNK_SECONDS = 0.04
_AHEAD = 3


class GpuStream:
    """Chunks of calls, a few ahead of the device, each with an event behind it."""

    def __init__(self, run: Callable[[], object], seconds: float) -> None:
        """Take a call and about how many seconds it needs."""
        self._run = run
        self.calls_per_chunk = max(round(_CHUNK_SECONDS / seconds), 1)
        self._events: list[Any] = []
        self._done = 0

    def feed(self) -> None:
        """Enqueue chunks until a few are waiting."""
        while len(self._events) - self.mark() < _AHEAD:
            for _ in range(self.calls_per_chunk):
                self._run()
            event = _event()
            event.record()
            self._events.append(event)

    def mark(self) -> int:
        """Count the finished chunks."""
        while self._done < len(self._events) and self._events[self._done].query():
            self._done += 1
        return self._done

    def us_per_call(self, first: int, last: int) -> float:
        """Divide the time between two events by the calls between them; ValueError if there is no chunk between."""
        if not 0 < first < last <= self._done:
            raise ValueError(f"no finished chunk between {first} and {last}")
        milliseconds = self._events[first - 1].elapsed_time(self._events[last - 1])
        return 1e3 * float(milliseconds) / ((last - first) * self.calls_per_chunk)


def sleep(seconds: float) -> None:
    """Let the device rest."""
    time.sleep(seconds)
