"""A plan as pictures: shared memory to scale, and the warps of a block with their registers."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from ..block import SmemMap, SmemRegion, WarpRole
from .svg import Picture

HUES = 8
"""Classes c0 to c7 of the page."""


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Give places for labels, at least `gap` apart and within bounds if they fit, near to where they are wanted.

    `wanted` ascends, and so does the result.
    """
    places: list[float] = []
    for each in wanted:
        places.append(max(each, places[-1] + gap if places else low))
    limit = high
    for i in range(len(places) - 1, -1, -1):
        places[i] = min(places[i], limit)
        limit = places[i] - gap
    return places


_MAP_WIDTH, _MAP_TOP, _MAP_HEIGHT, _BAR, _LABEL = 350, 8, 430, 96, 142


def smem_picture(smem: SmemMap, title: str) -> Markup:
    """Draw shared memory to scale, offset 0 on top; what borrows another region's bytes lies over it."""
    own = sorted((region for region in smem.regions if region.alias_of is None), key=lambda region: region.offset)
    borrowed = [region for region in smem.regions if region.alias_of is not None]
    hues = {region.name: i % HUES for i, region in enumerate(own)}
    picture = Picture(_MAP_WIDTH, title, _MAP_TOP + _MAP_HEIGHT + 10)
    scale = _MAP_HEIGHT / smem.limit

    def at(offset: float) -> float:
        return _MAP_TOP + offset * scale

    picture.shape("rect", "ground", x=1, y=at(0), width=_BAR, height=_MAP_HEIGHT)
    for region in own:
        size = region.size / region.count
        for i in range(region.count):
            picture.shape(
                "rect",
                f"region c{hues[region.name]}",
                _hover(region),
                x=1,
                y=at(region.offset + i * size),
                width=_BAR,
                height=max(size * scale, 0.5),
            )
            if size * scale > 13 and region.count > 1:
                middle = at(region.offset + (i + 0.5) * size)
                picture.text(1 + _BAR / 2, middle + 4, f"{region.name} {i}", "in", "middle")
    for region in borrowed:
        picture.shape(
            "rect",
            "borrowed",
            _hover(region),
            x=1 + _BAR * 0.55,
            y=at(region.offset),
            width=_BAR * 0.45,
            height=max(region.size * scale, 2),
        )
    labels = [
        (region.offset + region.size / 2, region.name, f"{_times(region)}{region.size:,} B", f"c{hues[region.name]}")
        for region in own
    ]
    labels += [
        (region.offset + region.size / 2, region.name, f"{region.size:,} B, in {region.alias_of}", "")
        for region in borrowed
    ]
    if spare := smem.limit - smem.total:
        labels.append((smem.total + spare / 2, "to spare", f"{spare:,} B", "free"))
    labels.sort(key=lambda label: label[0])
    places = spread([at(label[0]) for label in labels], 17, _MAP_TOP + 8, _MAP_TOP + _MAP_HEIGHT)
    for (offset, name, figure, hue), y in zip(labels, places, strict=True):
        bend = 1 + _BAR
        picture.shape("path", "leader", d=f"M{bend} {at(offset):.1f}L{bend + 14} {y:.1f}H{_LABEL - 13}")
        if hue:
            picture.shape("rect", f"swatch {hue}", x=_LABEL - 11, y=y - 4, width=8, height=8)
        picture.text(_LABEL, y + 4, name, "name")
        picture.text(_MAP_WIDTH - 2, y + 4, figure, "figure", "end")
    return picture.markup()


def _times(region: SmemRegion) -> str:
    return f"{region.count} x {region.size // region.count:,} = " if region.count > 1 else ""


def _hover(region: SmemRegion) -> str:
    where = f", in the bytes of {region.alias_of}" if region.alias_of else ""
    return f"{region.name}{where}: {region.size:,} B from {region.offset:,}\n{region.what}"


_WARP_WIDTH, _ROW, _NAMES = 440, 26, 92


def warps_picture(roles: Sequence[WarpRole], registers_per_sm: int, title: str) -> Markup:
    """Draw the registers of a block: a row for each role, as long as the registers that its warps hold together."""
    height = _ROW * len(roles) + 34
    picture = Picture(_WARP_WIDTH, title, height)
    plot = _WARP_WIDTH - _NAMES - 2
    scale = plot / registers_per_sm
    begin = 0
    for i, role in enumerate(roles):
        held = role.warps * 32 * role.registers
        top = 4 + i * _ROW
        picture.text(_NAMES - 8, top + 14, role.name, "name", "end")
        picture.shape("rect", "ground", x=_NAMES, y=top, width=plot, height=_ROW - 6)
        for warp in range(role.warps):
            picture.shape(
                "rect",
                f"region c{i % HUES}",
                f"{role.name}: {role.warps} warps, {role.registers} registers a thread\n{role.what}",
                x=_NAMES + (begin + warp * held / role.warps) * scale,
                y=top,
                width=held / role.warps * scale,
                height=_ROW - 6,
            )
        words = f"{role.warps} warp{'s' if role.warps > 1 else ''} x 32 x {role.registers}"
        end = _NAMES + (begin + held) * scale
        # Beside the bar, on the side that has the room.
        if end + 8 + 6.6 * len(words) < _WARP_WIDTH:
            picture.text(end + 6, top + 14, words, "figure")
        else:
            picture.text(_NAMES + begin * scale - 6, top + 14, words, "figure", "end")
        begin += held
    picture.text(_NAMES, height - 8, f"{begin:,} of {registers_per_sm:,} registers of an SM", "note")
    return picture.markup()
