"""Watts, clocks and energy of a GPU by NVML, and calls back to back for seconds."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch

from mlaforge.bench.timing import Device, Timed

THROTTLE_REASONS = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal, software",
    0x40: "thermal, hardware",
    0x80: "power brake",
    0x100: "display clocks",
}
"""Bits of NVML's clocks event reasons. Idle, bit 0, is none that matters here."""


class NvmlError(RuntimeError):
    """NVML can't be used; the message is the reason in a line."""


@dataclass(frozen=True)
class Reading:
    """What NVML says at a moment."""

    at: float
    """Seconds of the host's clock."""
    joules: float
    """Of the total energy counter, which moves in steps of some milliseconds."""
    watts: float
    mhz: int
    """SM clock."""
    reasons: int
    """Bits of what keeps the clock down."""


class Meter(Protocol):
    """Where readings come from."""

    def read(self) -> Reading:
        """Read all of it."""


class Nvml:
    """NVML's view of one GPU."""

    def __init__(self, device: torch.device) -> None:
        """Open NVML.

        Raises:
            NvmlError: there is no NVML, no Python module for it, or it does not know the GPU.
        """
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            raise NvmlError("no module pynvml; pip install 'mlaforge[bench]'") from None
        try:
            self._nvml.nvmlInit()
            self._handle = self._find(device)
            self.read()
        except self._nvml.NVMLError as error:
            raise NvmlError(f"NVML: {error}") from None

    def _find(self, device: torch.device) -> Any:
        # CUDA may number GPUs otherwise, or see only some.
        uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
        if uuid:
            for name in (f"GPU-{uuid}", uuid):
                try:
                    return self._nvml.nvmlDeviceGetHandleByUUID(name)
                except self._nvml.NVMLError:
                    continue
        return self._nvml.nvmlDeviceGetHandleByIndex(device.index or 0)

    def read(self) -> Reading:
        """Read the counters."""
        nvml, handle = self._nvml, self._handle
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        if reasons is None:
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        joules = 1e-3 * nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        at = time.perf_counter()
        return Reading(
            at,
            joules,
            1e-3 * nvml.nvmlDeviceGetPowerUsage(handle),
            int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            int(reasons(handle)),
        )

    def describe(self) -> dict[str, Any]:
        """Give driver, limits and temperature; what the GPU does not tell is left out."""
        nvml, handle = self._nvml, self._handle
        queries: dict[str, Callable[[], Any]] = {
            "driver": nvml.nvmlSystemGetDriverVersion,
            "power_limit_watts": lambda: 1e-3 * nvml.nvmlDeviceGetEnforcedPowerLimit(handle),
            "max_sm_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        }
        found: dict[str, Any] = {}
        for name, query in queries.items():
            try:
                value = query()
            except self._nvml.NVMLError:
                continue
            found[name] = value.decode() if isinstance(value, bytes) else value
        return found


@dataclass(frozen=True)
class Sustained:
    """What calls back to back came to, once warm."""

    us: float
    """Of a call."""
    seconds: float
    """That were measured."""
    watts: float | None
    mhz: float | None
    """Median SM clock."""
    reasons: tuple[str, ...] = field(default=())
    """What kept the clock down in at least a tenth of the readings."""

    @property
    def joules_per_call(self) -> float | None:
        """Energy of a call, the chip's static share included."""
        return None if self.watts is None else self.watts * self.us * 1e-6


def sustain(device: Device, timed: Timed, meter: Meter | None, *, seconds: float = 2.0, heat: float = 0.6) -> Sustained:
    """Run a call back to back, first to heat the chip and then for `seconds` that count."""
    stream = device.stream(timed)
    start = time.perf_counter()
    while time.perf_counter() - start < heat or stream.mark() < 1:
        stream.feed()
        time.sleep(_PAUSE)
    first = stream.mark()
    begin = time.perf_counter()
    readings: list[Reading] = []
    while time.perf_counter() - begin < seconds or stream.mark() <= first:
        stream.feed()
        if meter is not None:
            readings.append(meter.read())
        time.sleep(_PAUSE)
    last = stream.mark()
    measured = time.perf_counter() - begin
    device.wait()
    return Sustained(
        us=stream.us_per_call(first, last),
        seconds=measured,
        watts=mean_watts(readings),
        mhz=statistics.median(reading.mhz for reading in readings) if readings else None,
        reasons=frequent_reasons(readings),
    )


_PAUSE = 0.004


def mean_watts(readings: Sequence[Reading]) -> float | None:
    """Divide energy by time between the first and the last step of the energy counter; None of nothing.

    The counter moves in steps, so only the readings that first show a step are dated; where there are fewer than two
    steps the mean of the power readings stands in.
    """
    steps = [now for before, now in pairwise(readings) if now.joules != before.joules]
    if len(steps) >= 2:
        return (steps[-1].joules - steps[0].joules) / (steps[-1].at - steps[0].at)
    return statistics.fmean(reading.watts for reading in readings) if readings else None


def frequent_reasons(readings: Sequence[Reading]) -> tuple[str, ...]:
    """Name what held the clock down in at least a tenth of the readings."""
    return tuple(
        name
        for bit, name in THROTTLE_REASONS.items()
        if readings and sum(bool(reading.reasons & bit) for reading in readings) * 10 >= len(readings)
    )
