"""The results of a bench as pictures: time of others over ours, and rates as bars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from .pictures import HUES
from .results import DecodeEntry, Result, Timed
from .svg import Picture

OURS = "mlaforge"


@dataclass(frozen=True)
class Plot:
    """A picture with its words."""

    title: str
    note: str
    picture: Markup


def plots(result: Result) -> list[Plot]:
    """Draw what a result has."""
    titles = {name: each.title for peers in (result.peers, result.prefill_peers) for name, each in peers.items()}
    found = []
    for suite in dict.fromkeys(entry.suite for entry in result.burst):
        entries = [entry for entry in result.burst if entry.suite == suite and _us(entry.kernels.get(OURS))]
        if any(len(entry.kernels) > 1 for entry in entries):
            note = (
                "Requests x cached tokens: the time of a call over that of ours, which is on the right. Right of 1 "
                "ours is faster. Medians of single calls on a cold L2, metadata ready; triangles are beyond the border."
            )
            found.append(Plot(f"Decode, {suite}", note, _ratios(entries, titles, f"decode, {suite}")))
        elif entries:
            bars = [(_shape(entry), entry.kernels) for entry in entries]
            picture = _bars(bars, titles, f"decode, {suite}")
            found.append(
                Plot(f"Decode, {suite}", "TFLOP/s of single calls on a cold L2; requests x cached tokens.", picture)
            )
    for title, note, groups in (
        (
            "Decode, sustained",
            "TFLOP/s of calls back to back, with the watts of the chip and the energy of a cached token.",
            [(_shape(entry), entry.kernels) for entry in result.sustained],
        ),
        (
            "Prefill, causal",
            "TFLOP/s of single calls on a cold L2, of the half that the mask leaves.",
            [(f"{each.b} x {each.s:,}, {each.h} heads", each.kernels) for each in result.prefill],
        ),
        (
            "Kernels that move data",
            "GB/s, read and written together, beside a copy of as many bytes by a kernel.",
            [(f"{each.kernel}, {each.tokens:,} tokens", each.kernels) for each in result.memory],
        ),
    ):
        timed = [(label, kernels) for label, kernels in groups if any(map(_rate, kernels.values()))]
        if timed:
            found.append(Plot(title, note, _bars(timed, titles, title)))
    return found


def _shape(entry: DecodeEntry) -> str:
    return f"{entry.b} x {entry.s_k:,}, {entry.h} heads" + (f", s_q {entry.s_q}" if entry.s_q > 1 else "")


def _us(timed: Timed | None) -> float | None:
    return timed.us if timed is not None else None


def _rate(timed: Timed) -> float | None:
    """TFLOP/s; of kernels that do not multiply GB/s."""
    return timed.tflops or timed.gbps


def _hues(kernels: Iterable[str]) -> dict[str, int]:
    """Give each kernel a colour: ours the first."""
    others = [name for name in dict.fromkeys(kernels) if name != OURS]
    return {OURS: 0, **{name: 1 + i % (HUES - 1) for i, name in enumerate(others)}}


_WIDTH, _NAMES, _ROW = 600, 92, 22
_LETTER = 6.4
"""Width of a letter at most, about."""
_MOST = 2.0
"""Ratios beyond lie on the border: what matters is near to 1."""


def _legend(picture: Picture, hues: Mapping[str, int], titles: Mapping[str, str]) -> float:
    """Draw who is who; give the height."""
    x, y = 6.0, 14.0
    for name, hue in hues.items():
        words = "mlaforge" if name == OURS else titles.get(name, name)
        words = words if len(words) <= 60 else f"{words[:59]}..."
        needed = 22 + _LETTER * len(words)
        if x > 6 and x + needed > _WIDTH:
            x, y = 6.0, y + 18
        picture.shape("circle", f"dot c{hue}", cx=x + 5, cy=y - 4, r=4.5)
        picture.text(x + 14, y, words)
        x += needed
    return y + 10


def _ratios(entries: Sequence[DecodeEntry], titles: Mapping[str, str], title: str) -> Markup:
    hues = _hues(name for entry in entries for name, each in entry.kernels.items() if each.us)
    groups = list(dict.fromkeys((entry.h, entry.s_q) for entry in entries))
    picture = Picture(_WIDTH, title)
    top = _legend(picture, hues, titles) + 16
    ratios = [
        each.us / ours
        for entry in entries
        if (ours := _us(entry.kernels[OURS]))
        for name, each in entry.kernels.items()
        if name != OURS and each.us
    ]
    low = min([0.95, *ratios]) / 1.03
    high = min(max([1.1, *ratios]) * 1.03, _MOST)
    left, right = _NAMES + 8.0, _WIDTH - 128.0

    def at(ratio: float) -> float:
        share = math.log(ratio / low) / math.log(high / low)
        return left + min(max(share, 0), 1) * (right - left)

    bottom = top + (_ROW + 6) * len(groups) + _ROW * len(entries)
    last = -math.inf
    for tick in (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.2, 1.3, 1.5, 1.75, 2):
        if low <= tick <= high and (at(tick) - last > 26 or tick == 1):
            last = at(tick)
            picture.shape("path", "one" if tick == 1 else "grid", d=f"M{at(tick):.1f} {top - 4:.1f}V{bottom:.1f}")
            picture.text(at(tick), top - 8, f"{tick:g}", "note", "middle")
    y = top
    for heads, s_q in groups:
        y += _ROW + 6
        picture.text(6, y - 7, f"{heads} heads" + (f", s_q {s_q}" if s_q > 1 else ""), "group")
        for entry in entries:
            if (entry.h, entry.s_q) != (heads, s_q):
                continue
            middle = y + _ROW / 2
            own = entry.kernels[OURS]
            picture.shape("path", "grid", d=f"M{left:.1f} {middle:.1f}H{right:.1f}")
            picture.text(_NAMES, middle + 4, f"{entry.b} x {entry.s_k:,}", "name", "end")
            rate = f"{own.gbps:,.0f} GB/s" if own.gbps else ""
            picture.text(_WIDTH - 4, middle + 4, f"{own.us:.1f} us  {rate}".rstrip(), "figure", "end")
            picture.shape("circle", "dot c0", f"mlaforge: {own.us:.1f} us", cx=at(1), cy=middle, r=4.5)
            for name, each in entry.kernels.items():
                if name == OURS or not each.us or not own.us:
                    continue
                ratio = each.us / own.us
                hover = f"{titles.get(name, name)}: {each.us:.1f} us, {ratio:.2f} of ours"
                x = at(ratio)
                if ratio > high:
                    picture.shape("path", f"dot c{hues[name]}", hover, d=f"M{x + 5:.1f} {middle:.1f}l-8 -5v10z")
                else:
                    picture.shape("circle", f"dot c{hues[name]}", hover, cx=x, cy=middle, r=4.5)
            y += _ROW
    return picture.markup(y + 8)


def _bars(groups: Sequence[tuple[str, Mapping[str, Timed]]], titles: Mapping[str, str], title: str) -> Markup:
    hues = _hues(name for _, kernels in groups for name in kernels)
    picture = Picture(_WIDTH, title)
    most = max(rate for _, kernels in groups for each in kernels.values() if (rate := _rate(each)))
    left, room = 176.0, _WIDTH - 176.0 - 4
    y = 0.0
    for label, kernels in groups:
        y += 28
        picture.text(6, y - 6, label, "group")
        for name, each in sorted(kernels.items(), key=lambda item: item[0] != OURS):
            if not (rate := _rate(each)):
                continue
            words = f"{rate:,.0f} {'TFLOP/s' if each.tflops else 'GB/s'}"
            words += f", {each.watts:.0f} W" if each.watts else ""
            words += f", {each.nj_per_token:.0f} nJ" if each.nj_per_token else ""
            full = titles.get(name, name)
            shown = full if len(full) <= 25 else f"{full[:23]}..."
            picture.text(left - 8, y + 12, shown, "name", "end")
            length = rate / most * room
            picture.shape(
                "rect", f"region c{hues[name]}", f"{full}: {words}", x=left, y=y + 1, width=length, height=15, rx=2
            )
            if length > _LETTER * len(words) + 12:
                picture.text(left + length - 6, y + 12, words, "in", "end")
            else:
                picture.text(left + length + 6, y + 12, words, "figure")
            y += 20
    return picture.markup(y + 8)
