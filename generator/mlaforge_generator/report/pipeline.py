"""The pipeline of a kernel: who completes which barrier, and who waits for it.

What a plan says of its barriers is meant for people. Who arrives and who waits is taken from a run under the simulator,
so that the picture shows what the kernel does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ..block import Mbarrier, WarpRole
from .pictures import HUES, spread
from .svg import Picture


@dataclass(frozen=True, order=True)
class Edge:
    """Something that a role did with an mbarrier, once or often."""

    role: str
    action: str
    """`copies` (TMA completes it), `arrives` or `waits`."""
    mbarrier: str
    """Name of the group."""


_WIDTH, _BOX, _PILL, _STEP = 440, 102, 112, 46
_LEFT, _MIDDLE, _RIGHT = 1.0, (_WIDTH - _PILL) / 2, _WIDTH - _BOX - 1.0


def pipeline_picture(
    roles: Sequence[WarpRole], mbarriers: Sequence[Mbarrier], edges: Sequence[Edge], title: str
) -> Markup:
    """Draw roles, the barriers that they complete (left to middle) and the roles that wait for those (to the right)."""
    used = [each for each in mbarriers if any(edge.mbarrier == each.name for edge in edges)]
    names = list(dict.fromkeys(role.name for role in roles))
    hues = {name: i % HUES for i, name in enumerate(names)}
    doers = _in_order(names, [edge for edge in edges if edge.action != "waits"], used)
    waiters = _in_order(names, [edge for edge in edges if edge.action == "waits"], used)
    rows = max(len(used), 1)
    height = 34 + rows * _STEP
    picture = Picture(_WIDTH, title, height)
    for x, words in ((_LEFT + _BOX / 2, "completes"), (_WIDTH / 2, "mbarrier"), (_RIGHT + _BOX / 2, "waits")):
        picture.text(x, 14, words, "note", "middle")
    middle = {each.name: 34 + _STEP * (i + 0.5) - 8 for i, each in enumerate(used)}
    left = _places(doers, [edge for edge in edges if edge.action != "waits"], middle, height)
    right = _places(waiters, [edge for edge in edges if edge.action == "waits"], middle, height)
    for edge in edges:
        if edge.mbarrier not in middle:
            continue
        waits = edge.action == "waits"
        x0, y0 = (_MIDDLE + _PILL, middle[edge.mbarrier]) if waits else (_LEFT + _BOX, left[edge.role])
        x1, y1 = (_RIGHT, right[edge.role]) if waits else (_MIDDLE, middle[edge.mbarrier])
        bend = (x1 - x0) / 2
        path = f"M{x0:.1f} {y0:.1f}C{x0 + bend:.1f} {y0:.1f} {x1 - bend:.1f} {y1:.1f} {x1 - 1:.1f} {y1:.1f}"
        picture.shape(
            "path", f"edge c{hues[edge.role]} {edge.action}", f"{edge.role} {edge.action}: {edge.mbarrier}", d=path
        )
    what = {role.name: role.what for role in roles}
    for places, x in ((left, _LEFT), (right, _RIGHT)):
        for name, y in places.items():
            picture.shape(
                "rect", f"region c{hues[name]}", f"{name}: {what[name]}", x=x, y=y - 13, width=_BOX, height=26, rx=5
            )
            picture.text(x + _BOX / 2, y + 4, name, "in", "middle")
    for each in used:
        y = middle[each.name]
        expects = f"{each.bytes:,} B" if each.bytes else f"{each.arrivals} arrival{'s' if each.arrivals > 1 else ''}"
        hover = f"{each.name}: {expects}; completes when {each.what}"
        picture.shape("rect", "pill", hover, x=_MIDDLE, y=y - 17, width=_PILL, height=34, rx=17)
        count = f" x {each.count}" if each.count > 1 else ""
        picture.text(_WIDTH / 2, y - 2, f"{each.name}{count}", "name", "middle")
        picture.text(_WIDTH / 2, y + 11, expects, "figure", "middle")
    return picture.markup()


def _in_order(names: Sequence[str], edges: Sequence[Edge], used: Sequence[Mbarrier]) -> list[str]:
    """Put the roles of edges where their edges are shortest: by the mean row of their barriers."""
    rows = {each.name: i for i, each in enumerate(used)}
    mean: dict[str, float] = {}
    for name in names:
        mine = [rows[edge.mbarrier] for edge in edges if edge.role == name and edge.mbarrier in rows]
        if mine:
            mean[name] = sum(mine) / len(mine)
    return sorted(mean, key=lambda name: mean[name])


def _places(names: Sequence[str], edges: Sequence[Edge], middle: dict[str, float], height: float) -> dict[str, float]:
    wanted = []
    for name in names:
        ys = [middle[edge.mbarrier] for edge in edges if edge.role == name and edge.mbarrier in middle]
        wanted.append(sum(ys) / len(ys))
    return dict(zip(names, spread(wanted, 38, 42, height - 20), strict=True))
