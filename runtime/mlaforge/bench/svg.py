"""What the plots share: their style and their marks."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

_COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
_STYLE = (
    "text{font-family:system-ui,sans-serif;font-size:11px;fill:#222}.title{font-size:14px;font-weight:bold}"
    ".note{fill:#555}.tick{fill:#666}.roof{fill:none;stroke:#222;stroke-width:1.5}.grid{stroke:#e3e7ec}"
)


def colours(count: int) -> list[str]:
    """Give as many colours, all different."""
    if count <= len(_COLOURS):
        return list(_COLOURS[:count])
    return [f"hsl({360 * i // count},70%,{'38%' if i % 2 else '52%'})" for i in range(count)]


def frame(width: int, height: int, left: int, title: str, note: str) -> Iterator[str]:
    """Give the head of a picture: background, and title and note from `left` on; `</svg>` must follow the rest."""
    yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    yield f"<style>{_STYLE}</style>"
    yield f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    yield f'<text x="{left}" y="22" class="title">{escape(title)}</text>'
    yield f'<text x="{left}" y="40" class="note">{escape(note)}</text>'


def dot(x: float, y: float, colour: str, filled: bool, title: str) -> str:
    """Give a circle; `title` shows under a pointer."""
    fill = colour if filled else "none"
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{5 if filled else 4}" fill="{fill}" stroke="{colour}" '
        f'stroke-width="1.4"><title>{escape(title)}</title></circle>'
    )
