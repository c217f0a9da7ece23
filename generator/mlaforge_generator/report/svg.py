"""SVG as a tree: what is text stays text."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from markupsafe import Markup

_NAMESPACE = "http://www.w3.org/2000/svg"
_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML can't hold, not even escaped."""


class Picture:
    """A picture that takes its colours from the page: shapes have classes, no colours."""

    def __init__(self, width: float, title: str, height: float = 0) -> None:
        self.width = width
        self.root = ET.Element(
            "svg",
            {"xmlns": _NAMESPACE, "viewBox": f"0 0 {width:g} {height:g}", "role": "img", "aria-label": _text(title)},
        )
        self.root.set("style", f"--width:{width:g}px")

    def shape(self, tag: str, classes: str, title: str = "", **attributes: float | str) -> ET.Element:
        """Add a shape; `title` shows under a pointer."""
        element = ET.SubElement(self.root, tag, {"class": classes})
        for name, value in attributes.items():
            element.set(name.replace("_", "-"), _text(value) if isinstance(value, str) else f"{value:.2f}")
        if title:
            ET.SubElement(element, "title").text = _text(title)
        return element

    def text(self, x: float, y: float, words: str, classes: str = "", anchor: str = "start") -> ET.Element:
        """Add words on a baseline."""
        element = ET.SubElement(self.root, "text", {"x": f"{x:.2f}", "y": f"{y:.2f}", "class": classes})
        if anchor != "start":
            element.set("text-anchor", anchor)
        element.text = _text(words)
        return element

    def markup(self, height: float | None = None) -> Markup:
        """Give the picture for a page; `height`, if it was not known before."""
        if height is not None:
            self.root.set("viewBox", f"0 0 {self.width:g} {height:g}")
        return Markup(ET.tostring(self.root, encoding="unicode"))


def _text(words: str) -> str:
    return _NO_XML.sub("\ufffd", words)


def embed(text: str, scope: str) -> Markup:
    """Put a picture that was made as a file of its own into a page.

    Its style is held to the class `scope`, for in a page it would be everybody's, and its white ground is left out.

    Args:
        text: an SVG as the runtime draws it, with one flat style sheet.
        scope: a class that is the picture's alone.
    """
    root = ET.fromstring(text)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    width = root.get("width", "")
    for child in list(root):
        if child.tag == "style":
            child.text = re.sub(
                r"([^{}]+)\{",
                lambda rule: ",".join(f".{scope} {each.strip()}" for each in rule[1].split(",")) + "{",
                child.text or "",
            )
        elif child.tag == "rect" and child.get("width") == width:
            root.remove(child)
    for name in ("width", "height"):
        root.attrib.pop(name, None)
    root.set("xmlns", _NAMESPACE)
    root.set("class", scope)
    root.set("role", "img")
    root.set("style", f"--width:{width}px")
    return Markup(ET.tostring(root, encoding="unicode"))
