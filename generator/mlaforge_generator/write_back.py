"""A tuned spec: the text of a spec as somebody wrote it, with fields set as they were measured, and the measurements.

The measurements are comments. They are no part of what a spec means, so that the same choice gives the same kernels
whatever was measured.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from .candidates import Value, with_settings
from .errors import SpecError
from .spec import Dispatch, Spec, parse_spec

_DECODE, _DISPATCH = ("kernels", "decode"), ("dispatch",)
_DECODE_HEAD, _DISPATCH_HEAD = "Tuned by mlaforge", "Threshold measured by mlaforge"
_LINE_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")
_PLAIN = re.compile(r"[a-z][a-z0-9_]*")
_WIDTH = 112


class WriteBackError(ValueError):
    """A text is laid out in a way that can't be edited; the message says what to write by hand."""


def write_back(text: str, settings: Mapping[str, Value], remarks: Sequence[str] = ()) -> str:
    """Set fields of kernels.decode in a spec's text; comments, order and layout stay.

    Args:
        text: a valid spec.
        settings: of kernels.decode, by field.
        remarks: put above it as one comment, in place of the one that an earlier run left; see `tuned_remarks`.

    Raises:
        WriteBackError: the layout is one that can't be edited.
    """
    return _write(text, _DECODE, settings, with_settings(parse_spec(text), settings), _DECODE_HEAD, remarks)


def write_threshold(text: str, threshold: int, remarks: Sequence[str] = ()) -> str:
    """Set dispatch.prefill_absorption_threshold in a spec's text, as `write_back` does the fields of kernels.decode.

    Args:
        text: a valid spec.
        threshold: new tokens.
        remarks: see `threshold_remarks`.

    Raises:
        WriteBackError: the layout is one that can't be edited.
    """
    settings: dict[str, Value] = {"prefill_absorption_threshold": threshold}
    expected = parse_spec(text).model_copy(update={"dispatch": Dispatch.model_validate(settings)})
    return _write(text, _DISPATCH, settings, expected, _DISPATCH_HEAD, remarks)


def _write(
    text: str, path: Sequence[str], settings: Mapping[str, Value], expected: Spec, head: str, remarks: Sequence[str]
) -> str:
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    old = text.removeprefix("\ufeff")
    if remarks:
        # What an earlier run wrote: the line that begins so, and the lines behind it that are further in.
        earlier = rf"^[ \t]*# {head} [^\r\n]*(?:\r?\n|\Z)(?:[ \t]*#   [^\r\n]*(?:\r?\n|\Z))*"
        old = re.sub(earlier, "", old, flags=re.MULTILINE)
    new = mark + _Editor(old, path).edit(settings, remarks)
    try:
        if parse_spec(new) == expected:
            return new
    except SpecError:
        pass
    raise WriteBackError(f"this layout can't be edited; write it yourself: {_nested(path, settings)}")


class _Editor:
    """Changes of one text, applied from its end on, so that no change moves the place of another."""

    def __init__(self, text: str, path: Sequence[str]) -> None:
        self.text, self.path = text, path
        found = _LINE_BREAK.search(text)
        self.newline = found.group() if found else "\n"
        self.changes: list[tuple[int, int, str]] = []

    def edit(self, settings: Mapping[str, Value], remarks: Sequence[str]) -> str:
        node: Any = yaml.compose(self.text, Loader=yaml.SafeLoader)
        # The innermost key that begins its line is where the remarks go.
        above = self._line_start(node.start_mark.index)
        for depth, name in enumerate(self.path):
            entry = _entry(node, name)
            if entry is None:
                if node.flow_style:
                    self._into_flow(node, [_nested(self.path[depth:], settings)])
                    self._remark(above, remarks)
                else:
                    self._into_block(node, _lines(self.path[depth:], settings), remarks, at_end=depth == 0)
                return self._applied()
            key, node = entry
            start = self._line_start(key.start_mark.index)
            if not self.text[start : key.start_mark.index].strip(" "):
                above = start
        missing = []
        for name, value in settings.items():
            entry = _entry(node, name)
            if entry is None:
                missing.append(f"{name}: {_scalar(value)}")
            else:
                self.changes.append((entry[1].start_mark.index, entry[1].end_mark.index, _scalar(value)))
        if missing:
            if node.flow_style:
                self._into_flow(node, missing)
            else:
                self._into_block(node, missing, ())
        self._remark(above, remarks)
        return self._applied()

    def _into_flow(self, mapping: Any, entries: Sequence[str]) -> None:
        if mapping.value:
            self._insert(mapping.value[-1][1].end_mark.index, "".join(f", {entry}" for entry in entries))
        else:
            self._insert(mapping.start_mark.index + 1, ", ".join(entries))

    def _into_block(self, mapping: Any, lines: Sequence[str], remarks: Sequence[str], *, at_end: bool = False) -> None:
        """Put lines behind the last one of a mapping, or at the text's end if only comments come in between."""
        indent = " " * mapping.start_mark.column
        # Remarks stand above the innermost of what is new.
        inner = lines[-1]
        new = [*lines[:-1], *_comment(remarks, len(inner) - len(inner.lstrip())), inner]
        at = self._line_end(_content_end(mapping))
        if at_end:
            # A blank line, as between the other parts.
            new.insert(0, "")
            if all(not line or line.startswith("#") for line in map(str.strip, _LINE_BREAK.split(self.text[at:]))):
                at = len(self.text)
        begun = at > 0 and not _LINE_BREAK.fullmatch(self.text[at - 1])
        text = "".join((indent + line if line else "") + self.newline for line in new)
        self._insert(at, self.newline * begun + text)

    def _remark(self, above: int, remarks: Sequence[str]) -> None:
        line = self.text[above:]
        lines = _comment(remarks, len(line) - len(line.lstrip(" ")))
        self._insert(above, "".join(line + self.newline for line in lines))

    def _insert(self, at: int, text: str) -> None:
        self.changes.append((at, at, text))

    def _line_start(self, at: int) -> int:
        ends = [found.end() for found in _LINE_BREAK.finditer(self.text, 0, at)]
        return ends[-1] if ends else 0

    def _line_end(self, at: int) -> int:
        """Give where the next line begins; `at` itself if it is the start of a line."""
        if at > 0 and _LINE_BREAK.fullmatch(self.text[at - 1]):
            return at
        found = _LINE_BREAK.search(self.text, at)
        return found.end() if found else len(self.text)

    def _applied(self) -> str:
        text = self.text
        for start, end, new in sorted(self.changes, reverse=True):
            text = text[:start] + new + text[end:]
        return text


def _comment(remarks: Sequence[str], indent: int) -> list[str]:
    """Lay remarks out as the lines of a comment, behind the first one further in."""
    lines = []
    for i, remark in enumerate(remarks):
        first, more = (" " * indent + mark for mark in ("#   " if i else "# ", "#   "))
        text = " ".join(word for word in remark.split() if word.isprintable())
        lines += textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=more)
    return lines


def _entry(mapping: Any, name: str) -> tuple[Any, Any] | None:
    return next(((key, value) for key, value in mapping.value if key.value == name), None)


def _content_end(node: Any) -> int:
    """Find where the last text of a node ends; PyYAML has blocks last until the next token, comments included."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style:
        return _content_end(node.value[-1][1])
    return int(node.end_mark.index)


def _lines(path: Sequence[str], settings: Mapping[str, Value]) -> list[str]:
    """Write fields under a path of keys in lines."""
    lines = [f"{'  ' * depth}{name}:" for depth, name in enumerate(path)]
    return [*lines[:-1], f"{lines[-1]} {_flow(settings)}"]


def _nested(path: Sequence[str], settings: Mapping[str, Value]) -> str:
    """Write fields under a path of keys in braces."""
    name, *rest = path
    return f"{name}: {{{_nested(rest, settings)}}}" if rest else f"{name}: {_flow(settings)}"


def _flow(settings: Mapping[str, Value]) -> str:
    return "{" + ", ".join(f"{name}: {_scalar(value)}" for name, value in settings.items()) + "}"


def _scalar(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) or _PLAIN.fullmatch(value) else f"'{value}'"


# ---- What is told ----------------------------------------------------------------------------------------------------


def tuned_remarks(result: Mapping[str, Any]) -> list[str]:
    """Say where and how a result was measured, and what its winner took in each case.

    Args:
        result: as `mlaforge.bench.tune` makes it, with a winner.
    """
    winner = result["winner"]
    entries = {each["label"]: each for each in result["candidates"]}
    ranked = {each["label"] for each in result["ranking"]}
    planner = next((label for label in ranked if entries[label]["planner"]), None)
    count = _count(result["cases"])
    beside = "" if planner in (None, winner) else f"; behind it that of the planner's own choice ({planner})"
    rivals = len(ranked) - 1
    lines = [
        _where(result, _DECODE_HEAD),
        f"{winner}: {result['why']}. Timed in turn with {rivals} other{'s' * (rivals != 1)}: {count} graph replays, L2 "
        f"overwritten before each; median (quartiles), microseconds{beside}.",
    ]
    for case in result["cases"]:
        us = case["kernels"][winner]["us"]
        line = f"{case['b']} x {case['s_k']:,} tokens, {case['h']} heads, s_q {case['s_q']}: {_figures(us)}"
        if beside:
            line += f"; {_figures(case['kernels'][planner]['us'])}"
        lines.append(line)
    return lines


def _where(result: Mapping[str, Any], head: str) -> str:
    machine, versions = result["machine"], result["versions"]
    where = [machine.get("gpu", "")]
    where += [f"{name} {machine[key]}" for name, key in (("driver", "driver"), ("CUDA", "cuda")) if machine.get(key)]
    where.append(f"torch {versions['torch']}")
    return f"{head} {versions['mlaforge']} on {result['made'][:10]}: {', '.join(filter(None, where))}."


def _count(cases: Sequence[Mapping[str, Any]]) -> str:
    repeats = [case["repeats"] for case in cases]
    return f"{repeats[0]}" if min(repeats) == max(repeats) else f"{min(repeats)} to {max(repeats)}"


def threshold_remarks(result: Mapping[str, Any]) -> list[str]:
    """Say where and how a threshold was measured, what it and others cost, and what both ways took at each point.

    Args:
        result: as `mlaforge.bench.threshold` makes it, with a threshold that was found.
    """
    found, points = result["found"], result["points"]
    rated = {each["threshold"]: each for each in result["thresholds"]}
    others = ", ".join(f"{each} {rated[each]['mean']:.2%}" for each in rated if each != found)
    lines = [
        _where(result, _DISPATCH_HEAD),
        f"{found}: {result['why']}. Others, in the mean: {others}.",
        f"Below: new tokens of a request: absorbed / decompressed, microseconds, medians of {_count(points)} graph "
        f"replays in turn, L2 overwritten before each; {result['spec']['heads']} heads.",
    ]
    for each in result["contexts"]:
        here = [point for point in points if point["context"] == each["context"]]
        times = (
            f"{point['tokens']}: {point['us']['absorbed']['median']:.1f} / {point['us']['decompressed']['median']:.1f}"
            for point in here
        )
        lines.append(f"context {each['context']:,}, {faster_words(each)}: {', '.join(times)}")
    return lines


def faster_words(context: Mapping[str, Any]) -> str:
    """Say which way is faster where, of one entry of a result's `contexts`."""
    ways = ["absorbed", "decompressed"]
    if context["first"] != ways[0]:
        ways.reverse()
    crossings = context["crossings"]
    if not crossings:
        return f"{ways[0]} faster throughout"
    parts = [f"{ways[i % 2]} faster up to {at:.0f} tokens" for i, at in enumerate(crossings)]
    return ", ".join([*parts, f"then {ways[len(crossings) % 2]}"])


def _figures(us: Mapping[str, float]) -> str:
    return f"{us['median']:.1f} ({us['q1']:.1f} to {us['q3']:.1f})"
