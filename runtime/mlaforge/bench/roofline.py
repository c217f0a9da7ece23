"""The roofline plot of a result as SVG: arithmetic intensity against reached rate, below the machine's two ceilings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from mlaforge.bench.cases import Case
from mlaforge.bench.session import OURS
from mlaforge.bench.svg import colours, dot, frame

_WIDTH, _HEIGHT = 960, 560
_LEFT, _TOP, _RIGHT, _BOTTOM = 70, 56, 200, 50


@dataclass(frozen=True)
class _Point:
    kernel: str
    intensity: float
    """FLOP per byte."""
    rate: float
    """TFLOP/s."""
    title: str


@dataclass(frozen=True)
class _Axis:
    """A logarithmic axis."""

    low: float
    high: float
    begin: float
    """Pixel of `low`."""
    end: float

    @classmethod
    def around(cls, values: Sequence[float], begin: float, end: float) -> _Axis:
        return cls(min(values) / 1.5, max(values) * 1.5, begin, end)

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> Iterator[float]:
        for power in range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1):
            for digit in (1, 2, 5):
                if self.low <= digit * 10.0**power <= self.high:
                    yield digit * 10.0**power


def to_svg(result: Mapping[str, Any], mode: str = "burst") -> str | None:
    """Draw the points of `burst` or `sustained`; None if there are none. What a point is shows under a pointer."""
    points = list(_points(result, mode))
    if not points:
        return None
    kernels = list(dict.fromkeys(point.kernel for point in points))
    hues = dict(zip(kernels, colours(len(kernels)), strict=True))
    bandwidth, product = _ceilings(result)
    intensities = [point.intensity for point in points]
    rates = [point.rate for point in points]
    if bandwidth and product:
        intensities.append(1e3 * product / bandwidth)
        rates.append(product)
    x = _Axis.around(intensities, _LEFT, _WIDTH - _RIGHT)
    y = _Axis.around(rates, _HEIGHT - _BOTTOM, _TOP)
    name, gpu = result["spec"]["name"], result["machine"].get("gpu", "")
    parts = [
        *frame(
            _WIDTH,
            _HEIGHT,
            _LEFT,
            f"{name}: decode, {mode}, {gpu}".rstrip(", "),
            "useful FLOP per byte of cache, q and out; TFLOP/s; each point a shape",
        ),
        *_grid(x, y),
    ]
    if bandwidth and product:
        parts += _roof(x, y, bandwidth, product)
    parts += [dot(x.at(p.intensity), y.at(p.rate), hues[p.kernel], p.kernel == OURS, p.title) for p in points]
    for i, kernel in enumerate(kernels):
        top = _TOP + 10 + 18 * i
        parts.append(dot(_WIDTH - _RIGHT + 20, top, hues[kernel], kernel == OURS, kernel))
        parts.append(f'<text x="{_WIDTH - _RIGHT + 32}" y="{top + 4}">{escape(kernel)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _points(result: Mapping[str, Any], mode: str) -> Iterator[_Point]:
    for entry in result[mode]:
        case = Case(entry["b"], entry["s_k"], entry["h"], entry["s_q"])
        # Ours last, on top of the others.
        for name, each in sorted(entry["kernels"].items(), key=lambda item: item[0] == OURS):
            if "TFLOPs" in each:
                title = f"{name}\n{case}\n{each['TFLOPs']:.0f} TFLOP/s, {each['GBps']:,.0f} GB/s"
                yield _Point(name, 1e3 * each["TFLOPs"] / each["GBps"], each["TFLOPs"], title)


def _ceilings(result: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Give the fastest read stream, GB/s, and the matrix product, TFLOP/s."""
    ceilings = result["ceilings"]
    if not ceilings:
        return None, None
    return max(each["GBps"] for each in ceilings["read_stream"]), ceilings["gemm"]["TFLOPs"]


def _roof(x: _Axis, y: _Axis, bandwidth: float, product: float) -> Iterator[str]:
    ridge = 1e3 * product / bandwidth
    low = max(x.low, 1e3 * y.low / bandwidth)
    corners = [(low, low * bandwidth / 1e3), (ridge, product), (x.high, product)]
    path = "L".join(f"{x.at(a):.1f} {y.at(b):.1f}" for a, b in corners)
    yield f'<path d="M{path}" class="roof"/>'
    yield (
        f'<text x="{x.at(x.high) - 4:.1f}" y="{y.at(product) - 6:.1f}" text-anchor="end">'
        f"{product:.0f} TFLOP/s, bf16 product; {bandwidth:,.0f} GB/s, read stream</text>"
    )


def _grid(x: _Axis, y: _Axis) -> Iterator[str]:
    for value in x.ticks():
        at = x.at(value)
        yield f'<path d="M{at:.1f} {y.end:.1f}V{y.begin:.1f}" class="grid"/>'
        yield f'<text x="{at:.1f}" y="{y.begin + 16:.1f}" class="tick" text-anchor="middle">{value:g}</text>'
    for value in y.ticks():
        at = y.at(value)
        yield f'<path d="M{x.begin:.1f} {at:.1f}H{x.end:.1f}" class="grid"/>'
        yield f'<text x="{x.begin - 6:.1f}" y="{at + 4:.1f}" class="tick" text-anchor="end">{value:g}</text>'
    yield f'<text x="{(x.begin + x.end) / 2:.1f}" y="{y.begin + 36:.1f}" text-anchor="middle">FLOP per byte</text>'
    middle = f"{(y.begin + y.end) / 2:.1f}"
    yield f'<text x="18" y="{middle}" transform="rotate(-90 18 {middle})">TFLOP/s</text>'
