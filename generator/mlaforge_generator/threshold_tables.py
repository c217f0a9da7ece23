"""The measurement of a threshold as tables for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .tables import table
from .write_back import faster_words


def threshold_tables(result: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Give the tables of a result, as far as it goes: thresholds, crossings, times of all points, what failed.

    Args:
        result: as `mlaforge.bench.threshold` makes it.
    """
    if result["points"]:
        yield _thresholds(result)
        yield table(
            "Where the two ways cross",
            ("context>", "which is faster"),
            [(f"{each['context']:,}", faster_words(each)) for each in result["contexts"]],
            caption="interpolated between measured numbers of new tokens, in the logarithms of tokens and time",
        )
        yield _times(result)
    if result["failed"]:
        rows = [
            (f"{each['context']:,}", f"{each['tokens']:,}", each["b"], Text(each["reason"], style="bold red"))
            for each in result["failed"]
        ]
        yield table("Failed", ("context>", "new tokens>", "requests>", "reason"), rows)


def _thresholds(result: Mapping[str, Any]) -> Table:
    rows = []
    # The one that was found first, also where another loses no more.
    for each in sorted(result["thresholds"], key=lambda each: (each["mean"], each["threshold"] != result["found"])):
        threshold = each["threshold"]
        is_found = threshold == result["found"]
        words = ["found"] if is_found else []
        words += ["the spec's own"] if threshold == result["spec"]["threshold"] else []
        at = "" if each["tokens"] is None else f"{each['tokens']:,} new tokens, context {each['context']:,}"
        style = "bold" if is_found else ""
        figures = (f"{each['mean']:.2%}", f"{each['worst']:.1%}", at, ", ".join(words))
        rows.append((Text(f"{threshold:,}", style=style), *figures))
    machine = result["machine"]
    return table(
        f"{result['spec']['name']}, thresholds by what they lose, {machine.get('gpu', 'no GPU')}",
        ("new tokens>", "mean loss>", "worst>", "where", ""),
        rows,
        caption="loss: what the way that a threshold takes needs longer than the faster one; the mean is over all "
        f"{len(result['points'])} points, each of the same weight. {result['seconds']:.0f} s in all",
    )


def _times(result: Mapping[str, Any]) -> Table:
    rows = []
    for point in result["points"]:
        us = point["us"]
        absorbed, decompressed = (us[way] for way in ("absorbed", "decompressed"))
        ahead = absorbed["median"] <= decompressed["median"]
        rows.append(
            (
                f"{point['context']:,}",
                f"{point['tokens']:,}",
                point["b"],
                Text(_figures(absorbed), style="green" if ahead else ""),
                Text(_figures(decompressed), style="" if ahead else "green"),
                f"{absorbed['median'] / decompressed['median']:.3f}",
                f"{point['difference']:.2%}",
            )
        )
    return table(
        "Time of each way on the GPU, microseconds: median (quartiles)",
        ("context>", "new tokens>", "requests>", "absorbed>", "decompressed>", "ratio>", "difference>"),
        rows,
        caption="products with W_UK and W_UV included, L2 overwritten before each, in turn; difference: the largest "
        "between the two results of a token",
    )


def _figures(us: Mapping[str, float]) -> str:
    return f"{us['median']:,.1f} ({us['q1']:,.1f}..{us['q3']:,.1f})"
