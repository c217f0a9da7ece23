"""The result of a tune as tables for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .tables import table

_CASES_ACROSS = 4


def tune_tables(result: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Give the tables of a result, as far as it goes: ranking, times of each case, what could not be timed.

    Args:
        result: as `mlaforge.bench.tune` makes it.
    """
    entries = {each["label"]: each for each in result["candidates"]}
    if result["ranking"]:
        yield _ranking(result, entries)
        cases = result["cases"]
        for first in range(0, len(cases), _CASES_ACROSS):
            yield _times(result, cases[first : first + _CASES_ACROSS])
    wrong = [each for each in entries.values() if each["state"] in ("wrong", "hangs")]
    if wrong:
        yield table("Wrong", ("candidate", "what is wrong"), [(_red(each["label"]), each["reason"]) for each in wrong])
    missing = [each for each in entries.values() if each["state"] == "not built"]
    if missing:
        yield table("Not built", ("candidate", "reason"), [(each["label"], each["reason"]) for each in missing])


def _ranking(result: Mapping[str, Any], entries: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = []
    for place, each in enumerate(result["ranking"], 1):
        entry = entries[each["label"]]
        checks = entry["checks"]
        words = ["winner"] if each["label"] == result["winner"] else []
        words += ["planner's own choice"] if entry["planner"] else []
        rows.append(
            (
                place,
                Text(each["label"], style="bold" if each["label"] == result["winner"] else ""),
                f"{each['us']:.1f}",
                _ratio(each["ratio"]),
                f"{each['fastest']} of {len(result['cases'])}",
                f"{checks['out_used']:.0%}",
                f"{checks['lse_used']:.1%}",
                _spills(entry),
                ", ".join(words),
            )
        )
    machine = result["machine"]
    return table(
        f"{result['spec']['name']}, candidates by the geometric mean of their medians, {machine.get('gpu', 'no GPU')}",
        ("", "candidate", "us>", "of planner's>", "fastest>", "out>", "lse>", "spills>", ""),
        rows,
        caption="of planner's: time over that of the planner's own choice; out, lse: share of the tolerance against "
        f"float64 that the worst element took; spills: bytes. {result['seconds']:.0f} s in all",
    )


def _ratio(value: float | None) -> Text:
    if value is None:
        return Text("-")
    return Text(f"{value:.3f}", style="green" if value < 1 else "red" if value > 1 else "")


def _spills(entry: Mapping[str, Any]) -> Text:
    kernels = entry["kernels"].values()
    spills = sum(each["spills"] for each in kernels)
    serialised = " serialised" if any(each["serialized"] for each in kernels) else ""
    return Text(f"{spills:,}{serialised}", style="bold red" if spills or serialised else "")


def _red(words: str) -> Text:
    return Text(words, style="bold red")


def _times(result: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> Table:
    """Put a few cases beside each other, in each the fastest in green."""
    rows = []
    for each in result["ranking"]:
        cells: list[object] = [each["label"]]
        for case in cases:
            us = case["kernels"][each["label"]]["us"]
            best = min(other["us"]["median"] for other in case["kernels"].values())
            style = "green" if us["median"] == best else ""
            cells.append(Text(f"{us['median']:.1f} ({us['q1']:.1f}..{us['q3']:.1f})", style=style))
        rows.append(cells)
    heads = (f"{case['b']} x {case['s_k']:,}, h {case['h']}, s_q {case['s_q']}>" for case in cases)
    return table(
        "Time of a call on the GPU, microseconds: median (quartiles)",
        ("candidate", *heads),
        rows,
        caption="the merge of splits included, L2 overwritten before each, all candidates in turn",
    )
