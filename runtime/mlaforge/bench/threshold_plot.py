"""The plot of a threshold's measurement as SVG: for each context the ratio of the two ways' times, over new tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from mlaforge.bench.svg import colours, dot, frame
from mlaforge.bench.threshold import ABSORBED, DECOMPRESSED, USUAL, Point, ratio

_WIDTH, _HEIGHT = 960, 560
_LEFT, _TOP, _RIGHT, _BOTTOM = 70, 84, 200, 50


def to_svg(result: Mapping[str, Any]) -> str | None:
    """Draw all points; None if there are none. Filled is where the threshold that was found takes the slower way."""
    points = result["points"]
    if not points:
        return None
    found = result["found"]
    contexts = [each["context"] for each in result["contexts"]]
    hues = dict(zip(contexts, colours(len(contexts)), strict=True))
    tokens = sorted({point["tokens"] for point in points})
    axes = _Axes(tokens[0], tokens[-1], [ratio(point) for point in points])
    name, gpu = result["spec"]["name"], result["machine"].get("gpu", "")
    parts = [
        *frame(
            _WIDTH,
            _HEIGHT,
            20,
            f"{name}: absorbed and decompressed attention, {gpu}".rstrip(", "),
            "time of the absorbed way over that of the decompressed one, medians; above 1 decompressed is faster; "
            "filled: where the found threshold takes the slower way",
        ),
        *axes.grid(tokens),
    ]
    for threshold in sorted({*USUAL, found}):
        if axes.holds(threshold):
            parts += axes.upright(threshold, strong=threshold == found)
    for context in contexts:
        here = sorted((point for point in points if point["context"] == context), key=lambda point: point["tokens"])
        path = "L".join(f"{axes.x(point['tokens']):.1f} {axes.y(ratio(point)):.1f}" for point in here)
        parts.append(f'<path d="M{path}" fill="none" stroke="{hues[context]}"/>')
        for point in here:
            us = point["us"]
            words = str(Point(point["b"], point["tokens"], context))
            times = (f"{way} {us[way]['median']:,.1f} us" for way in (ABSORBED, DECOMPRESSED))
            slower = (ratio(point) > 1) == (point["tokens"] <= found) and ratio(point) != 1
            title = "\n".join([words, *times])
            parts.append(dot(axes.x(point["tokens"]), axes.y(ratio(point)), hues[context], slower, title))
    for i, context in enumerate(contexts):
        top = _TOP + 10 + 18 * i
        words = f"context {context:,}"
        parts.append(dot(_WIDTH - _RIGHT + 20, top, hues[context], False, words))
        parts.append(f'<text x="{_WIDTH - _RIGHT + 32}" y="{top + 4}">{escape(words)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Axes:
    """New tokens and ratios of times, both logarithmic."""

    def __init__(self, fewest: int, most: int, ratios: list[float]) -> None:
        self._low, self._high = math.log(fewest / 1.3), math.log(most * 1.3)
        self._least, self._most = math.log(min(*ratios, 1.0) / 1.2), math.log(max(*ratios, 1.0) * 1.2)

    def holds(self, tokens: int) -> bool:
        """Whether so many tokens have a place."""
        return tokens > 0 and self._low <= math.log(tokens) <= self._high

    def x(self, tokens: float) -> float:
        """Give the pixel of a number of tokens."""
        return _LEFT + (math.log(tokens) - self._low) / (self._high - self._low) * (_WIDTH - _RIGHT - _LEFT)

    def y(self, value: float) -> float:
        """Give the pixel of a ratio."""
        share = (math.log(value) - self._least) / (self._most - self._least)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)

    def upright(self, tokens: int, strong: bool) -> Iterator[str]:
        """Draw a line at a threshold, with its number above."""
        x = self.x(tokens)
        look = 'class="roof"' if strong else 'stroke="#8a94a0" stroke-dasharray="4 3"'
        yield f'<path d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" {look}/>'
        # A found threshold may lie close to a usual one.
        words, above = (f"found: {tokens}", 20) if strong else (f"{tokens}", 6)
        yield f'<text x="{x:.1f}" y="{_TOP - above}" text-anchor="middle">{words}</text>'

    def grid(self, tokens: list[int]) -> Iterator[str]:
        """Draw lines at the tokens that were measured and at round ratios, a strong one at 1."""
        bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        for each in tokens:
            x = self.x(each)
            yield f'<path d="M{x:.1f} {_TOP}V{bottom}" class="grid"/>'
            yield f'<text x="{x:.1f}" y="{bottom + 16}" class="tick" text-anchor="middle">{each:,}</text>'
        for power in range(math.floor(self._least / math.log(10)), math.ceil(self._most / math.log(10)) + 1):
            for digit in (1, 2, 5):
                value = digit * 10.0**power
                if self._least <= math.log(value) <= self._most:
                    y = self.y(value)
                    yield f'<path d="M{_LEFT} {y:.1f}H{right}" class="{"roof" if value == 1 else "grid"}"/>'
                    yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" class="tick" text-anchor="end">{value:g}</text>'
        yield f'<text x="{(_LEFT + right) / 2}" y="{bottom + 36}" text-anchor="middle">new tokens of a request</text>'
