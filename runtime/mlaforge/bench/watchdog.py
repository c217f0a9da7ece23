"""Notices work on a device that does not come back: a kernel that hangs blocks whoever waits for it, for good.

Nothing interrupts such a wait, so another thread watches the time. What it can do is to say what hangs and to end the
process: only with it does the device's context go.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

from mlaforge.bench.timing import Device, Timed

PATIENCE = 120.0
"""Seconds that a call, and what judges it, need on no GPU."""


class Watchdog:
    """Calls a function if what it watches takes too long; for use with `with`."""

    def __init__(self, seconds: float) -> None:
        """Take how long anything may be watched."""
        self.seconds = seconds
        self._changed = threading.Condition()
        self._watched: tuple[float, Callable[[], None]] | None = None
        self._ended = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        """Begin to watch."""
        self._ended = False
        self._thread = threading.Thread(target=self._watch, name="mlaforge watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    @contextlib.contextmanager
    def watching(self, late: Callable[[], None], *, longer: float = 0.0) -> Iterator[None]:
        """Watch what is done inside.

        Args:
            late: called by another thread if it takes too long, while it is still being waited for. What comes back
                meanwhile goes on when `late` has returned.
            longer: seconds that it may take more than usual.
        """
        with self._changed:
            self._watched = (time.monotonic() + self.seconds + longer, late)
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._watched = None
                self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._ended:
                if self._watched is None:
                    self._changed.wait()
                    continue
                end, late = self._watched
                left = end - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                else:
                    self._watched = None
                    late()


class WatchedTiming:
    """A device's `time` under a watchdog."""

    _SLACK = 10.0
    """Rounds may take so much longer than the one before them."""

    def __init__(self, device: Device, watchdog: Watchdog, late: Callable[[str | None], None]) -> None:
        """Take what to call if a call hangs: with its name, None if that can't be said."""
        self._device, self._watchdog, self._late = device, watchdog, late
        self._round = 0.0

    def time(self, calls: Mapping[str, Timed], repeats: int) -> dict[str, list[float]]:
        """Time calls in turn, as the device does."""
        begun = time.perf_counter()
        longer = self._SLACK * self._round * repeats
        with self._watchdog.watching(lambda: self._late(self._device.unfinished()), longer=longer):
            samples = self._device.time(calls, repeats)
        self._round = (time.perf_counter() - begun) / max(repeats, 1)
        return samples
