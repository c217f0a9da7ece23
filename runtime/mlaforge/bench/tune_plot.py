"""The plot of a tune as SVG: for each case the times of all candidates, as multiples of the planner's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from mlaforge.bench.cases import Case
from mlaforge.bench.svg import colours, dot, frame

_WIDTH = 960
_LEFT, _TOP, _RIGHT, _BOTTOM = 250, 66, 210, 44
_ROW = 30


def to_svg(result: Mapping[str, Any]) -> str | None:
    """Draw the ranked candidates; None if there are none.

    A case's unit is the median of the planner's own choice, or of the fastest where that is not right.
    """
    labels = [each["label"] for each in result["ranking"]]
    if not labels:
        return None
    cases, winner = result["cases"], result["winner"]
    planner = next((each["label"] for each in result["candidates"] if each["planner"]), None)
    by_planner = planner in labels
    hues = dict(zip(sorted(labels), colours(len(labels)), strict=True))
    # Keep points apart that are level.
    offsets = {label: (i + 1) / (len(labels) + 1) - 0.5 for i, label in enumerate(labels)}
    scaled = []
    for case in cases:
        times = {label: case["kernels"][label]["us"] for label in labels}
        unit = times[planner]["median"] if by_planner else min(us["median"] for us in times.values())
        scaled.append({label: {key: us[key] / unit for key in ("q1", "median", "q3")} for label, us in times.items()})
    every = [value for row in scaled for figures in row.values() for value in figures.values()]
    axis = _Axis(min(every), max(every))
    bottom = _TOP + _ROW * max(len(cases), len(labels))
    unit_words = "of the planner's own choice" if by_planner else "of the fastest in each case"
    name, gpu = result["spec"]["name"], result["machine"].get("gpu", "")
    parts = [
        *frame(
            _WIDTH,
            bottom + _BOTTOM,
            20,
            f"{name}: decode, tuned, {gpu}".rstrip(", "),
            f"time of a call in units {unit_words}; point: median, line: quartiles; filled: the winner",
        ),
        *axis.grid(bottom),
    ]
    for i, (case, row) in enumerate(zip(cases, scaled, strict=True)):
        middle = _TOP + _ROW * (i + 0.5)
        words = str(Case(case["b"], case["s_k"], case["h"], case["s_q"]))
        parts.append(f'<text x="{_LEFT - 12}" y="{middle + 4:.1f}" text-anchor="end">{escape(words)}</text>')
        # The winner last, on top of the others.
        for label in sorted(labels, key=lambda label: label == winner):
            y, figures, us = middle + 0.8 * _ROW * offsets[label], row[label], case["kernels"][label]["us"]
            left, x, right = (axis.at(figures[key]) for key in ("q1", "median", "q3"))
            title = f"{label}\n{words}\n{us['median']:.1f} us ({us['q1']:.1f} to {us['q3']:.1f})"
            parts.append(f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="{hues[label]}"/>')
            parts.append(dot(x, y, hues[label], label == winner, title))
            if figures["median"] > axis.high:
                parts.append(f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" class="tick">{figures["median"]:.2f}</text>')
    for i, label in enumerate(labels):
        top = _TOP + 10 + 18 * i
        words = f"{label} (planner's)" if label == planner else label
        parts.append(dot(_WIDTH - _RIGHT + 20, top, hues[label], label == winner, words))
        parts.append(f'<text x="{_WIDTH - _RIGHT + 32}" y="{top + 4}">{escape(words)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


_MOST = 1.6
"""What takes longer than this is drawn at the edge, with its number."""


class _Axis:
    """Multiples of a unit, linear, with room on both sides."""

    def __init__(self, low: float, high: float) -> None:
        room = max(0.05 * (min(high, _MOST) - low), 0.01)
        self.low, self.high = min(low, 1.0) - room, min(max(high, 1.0) + room, _MOST)

    def at(self, value: float) -> float:
        """Give the pixel of a value, that of the edge for those beyond it."""
        return _LEFT + (min(value, self.high) - self.low) / (self.high - self.low) * (_WIDTH - _RIGHT - _LEFT)

    def grid(self, bottom: float) -> Iterator[str]:
        """Draw lines at round values, and a strong one at the unit."""
        span = self.high - self.low
        power = 10.0 ** math.floor(math.log10(span / 4))
        step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= span / 8)
        for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1):
            x = self.at(i * step)
            yield f'<path d="M{x:.1f} {_TOP}V{bottom:.1f}" class="grid"/>'
            yield f'<text x="{x:.1f}" y="{bottom + 16:.1f}" class="tick" text-anchor="middle">{i * step:.6g}</text>'
        yield f'<path d="M{self.at(1):.1f} {_TOP}V{bottom:.1f}" class="roof"/>'
