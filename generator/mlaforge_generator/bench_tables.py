"""The result of a bench as tables for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .tables import table


def bench_tables(result: Mapping[str, Any], ours: str) -> Iterator[RenderableType]:
    """Give the tables of a result, as far as it goes: machine, suites, energy, peers without a figure.

    Args:
        result: as `mlaforge.bench.session` makes it.
        ours: the name that our kernels have in it.
    """
    yield _machine(result)
    if result["burst"]:
        yield _burst(result["burst"], ours)
        yield _summary(
            "Against the best peer of each point: geometric means",
            ("ratio", "least_ratio", "ratio_anew", "of_read_stream", "of_gemm"),
            ("ratio>", "least>", "with planning>", "of read stream>", "of GEMM>"),
            result["summary"].get("burst", ()),
        )
        yield _each("Time of each kernel over ours: geometric means", result["summary"].get("burst", ()))
    if result["sustained"]:
        yield _sustained(result["sustained"], ours)
        yield _summary(
            "Sustained, against the best peer",
            ("ratio", "least_ratio", "energy_ratio"),
            ("ratio>", "least>", "energy>"),
            result["summary"].get("sustained", ()),
        )
        yield _each("Sustained, time of each kernel over ours", result["summary"].get("sustained", ()))
    if result["prefill"]:
        yield _prefill(result["prefill"], result["summary"]["prefill"], ours)
    if result["memory"]:
        yield _memory(result["memory"], ours)
    if result["energy"]:
        yield _energy(result["energy"])
    peers = (("", result["peers"]), (_PREFILL, result["prefill_peers"]))
    missing = [
        (f"{name}{kind}", each["reason"]) for kind, entries in peers for name, each in entries.items() if each["reason"]
    ]
    refused = sorted(
        {
            (f"{name}{kind}", each[key] if key == "reason" else f"with planning: {each[key]}")
            for kind, entries in (("", (*result["burst"], *result["sustained"])), (_PREFILL, result["prefill"]))
            for entry in entries
            for name, each in entry["kernels"].items()
            for key in ("reason", "reason_anew")
            if each.get(key)
        }
    )
    if missing or refused:
        yield table("Not timed", ("peer", "reason"), dict.fromkeys((*missing, *refused)))


_PREFILL = " (prefill)"
"""Behind the name of a peer, for some are decode's, too."""


def _ratio(value: float | None) -> Text:
    if value is None:
        return Text("-")
    return Text(f"{value:.3f}", style="green" if value >= 1 else "red")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _figure(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _machine(result: Mapping[str, Any]) -> Table:
    rows: list[tuple[object, ...]] = [(name, value) for name, value in result["machine"].items()]
    rows += [(name, value) for name, value in result["versions"].items()]
    ceilings = result["ceilings"]
    for each in ceilings.get("read_stream", ()):
        us = each["us"]
        rows.append(
            (
                f"read stream, {each['bytes'] / 1e6:,.0f} MB in random tiles",
                f"{each['GBps']:,.0f} GB/s ({us['median']:.1f} us, {us['q1']:.1f} to {us['q3']:.1f})",
            )
        )
    if "gemm" in ceilings:
        rows.append(("bf16 product of 8192^3", f"{ceilings['gemm']['TFLOPs']:.0f} TFLOP/s"))
    for name, each in ceilings.get("sustained", {}).items():
        rate = f"{each['TFLOPs']:.0f} TFLOP/s" if "TFLOPs" in each else f"{each['GBps']:,.0f} GB/s"
        rows.append((f"sustained {name}", f"{rate}, {_figure(each['watts'])} W, {_figure(each['mhz'])} MHz"))
    rows.append(("seconds of the run", result["seconds"]))
    return table(f"{result['spec']['name']} on this machine", ("what", "value"), rows)


def _case(entry: Mapping[str, Any]) -> tuple[object, ...]:
    return entry["b"], f"{entry['s_k']:,}", entry["h"], entry["s_q"]


def _burst(entries: Sequence[Mapping[str, Any]], ours: str) -> Table:
    rows = []
    for entry in entries:
        own = entry["kernels"][ours]
        best = entry["best_peer"]
        predicted = entry["predicted"] or {}
        rows.append(
            (
                *_case(entry),
                *_times(own["us"]),
                f"{own['TFLOPs']:.0f}",
                f"{own['GBps']:,.0f}",
                _figure(predicted.get("floor_us"), 1),
                _share(entry.get("of_read_stream")),
                _share(entry.get("of_gemm")),
                best or "-",
                "-" if best is None else f"{entry['kernels'][best]['us']['median']:.1f}",
                _ratio(entry["ratio"]),
                _ratio(entry["ratio_anew"]),
            )
        )
    columns = ("b>", "s_k>", "h>", "s_q>", "us>", "quartiles>", "TFLOP/s>", "GB/s>", "floor>", "stream>", "GEMM>")
    return table(
        "Burst: time of a call on the GPU, L2 overwritten before each",
        (*columns, "best peer", "us>", "ratio>", "planning>"),
        rows,
        caption="ratio: time of the best peer over ours, above 1 is a win; planning: the same with metadata made in "
        "the call; floor: the plan's",
    )


def _sustained(entries: Sequence[Mapping[str, Any]], ours: str) -> Table:
    rows = []
    for entry in entries:
        own_us = entry["kernels"][ours]["us"]
        timed = {name: each for name, each in entry["kernels"].items() if "us" in each}
        for name, each in timed.items():
            rows.append(
                (
                    *_case(entry),
                    name,
                    f"{each['TFLOPs']:.0f}",
                    f"{each['GBps']:,.0f}",
                    _figure(each["watts"]),
                    _figure(each["mhz"]),
                    _figure(each["nJ_per_token"]),
                    "" if name == ours else _ratio(each["us"] / own_us),
                    ", ".join(each["throttle_reasons"]),
                )
            )
        if predicted := entry["predicted"]:
            rows.append(
                (
                    *_case(entry),
                    "(predicted)",
                    f"{predicted['TFLOPs']:.0f}",
                    f"{predicted['GBps']:,.0f}",
                    _figure(predicted["watts"]),
                    "",
                    _figure(predicted["nJ_per_token"]),
                    "",
                    f"bound by {predicted['bound']}",
                )
            )
    columns = ("b>", "s_k>", "h>", "s_q>", "kernel", "TFLOP/s>", "GB/s>", "W>", "MHz>", "nJ/token>", "ratio>", "clock")
    return table(
        "Sustained: seconds of calls back to back",
        columns,
        rows,
        caption="ratio: time over ours, above 1 is a win of ours; nJ/token: energy of the chip per cached token",
    )


def _prefill(entries: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], ours: str) -> Table:
    rows = []
    for entry in entries:
        for name, each in entry["kernels"].items():
            if "us" not in each:
                continue
            own = name == ours
            rows.append(
                (
                    *((entry["b"], f"{entry['s']:,}", entry["h"]) if own else ("", "", "")),
                    name,
                    *_times(each["us"]),
                    f"{each['TFLOPs']:.0f}",
                    _share(entry["of_gemm"]) if own else "",
                    _ratio(entry["ratio"]) if own else "",
                    _ratio(entry["ratio_fa3"]) if own else "",
                )
            )
    return table(
        f"Prefill, causal, ({entries[0]['d_qk']}, {entries[0]['d_v']}): time of a call, L2 overwritten before each",
        ("b>", "s>", "h>", "kernel", "us>", "quartiles>", "TFLOP/s>", "GEMM>", "ratio>", "FA3>"),
        rows,
        caption="TFLOP/s: of the half that the mask leaves; ratio: time of the best peer over ours, above 1 is a win; "
        "FA3: the same with FlashAttention-3's fastest build. Geometric means: "
        f"{_figure(summary['ratio'], 3)}, {_figure(summary['ratio_fa3'], 3)}",
    )


def _memory(entries: Sequence[Mapping[str, Any]], ours: str) -> Table:
    rows = []
    for entry in entries:
        own, copy = entry["kernels"][ours], entry["kernels"]["copy"]
        rows.append(
            (
                entry["kernel"],
                f"{entry['tokens']:,}",
                f"{entry['bytes'] / 1e6:,.0f}",
                *_times(own["us"]),
                f"{own['GBps']:,.0f}",
                f"{copy['GBps']:,.0f}",
                _share(entry["of_copy"]),
            )
        )
    return table(
        "Kernels that move data: time of a call, L2 overwritten before each",
        ("kernel", "tokens>", "MB>", "us>", "quartiles>", "GB/s>", "copy GB/s>", "of copy>"),
        rows,
        caption="MB: read and written together; copy: of as many bytes, by a kernel of torch",
    )


def _times(us: Mapping[str, float]) -> tuple[str, str]:
    return f"{us['median']:.1f}", f"{us['q1']:.1f}..{us['q3']:.1f}"


def _summary(title: str, keys: Sequence[str], columns: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        (
            group["suite"],
            group["h"],
            group["s_q"],
            *(_share(group[key]) if key.startswith("of_") else _plain_or_ratio(key, group[key]) for key in keys),
            group["wins"],
            group["losses"],
        )
        for group in groups
    ]
    return table(title, ("suite", "h>", "s_q>", *columns, "wins>", "losses>"), rows)


def _each(title: str, groups: Sequence[Mapping[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for group in groups for name in group["ratios"]))
    rows = [
        (group["suite"], group["h"], group["s_q"], *(_ratio(group["ratios"].get(name)) for name in names))
        for group in groups
    ]
    return table(title, ("suite", "h>", "s_q>", *(f"{name}>" for name in names)), rows)


def _plain_or_ratio(key: str, value: float | None) -> object:
    # Of energy less is better.
    return _figure(value, 3) if key == "energy_ratio" else _ratio(value)


def _energy(energy: Mapping[str, Any]) -> Table:
    return table(
        "Energy of single operations, above static power",
        ("operation", "nJ>", "W>", "MHz>", "per second>"),
        (
            (
                row["what"],
                _figure(row["nj"], 1),
                _figure(row["watts"]),
                _figure(row["mhz"]),
                "-" if row["nj"] is None else f"{row['per_second']:.3e}",
            )
            for row in energy["rows"]
        ),
    )
