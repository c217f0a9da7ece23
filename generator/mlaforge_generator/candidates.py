"""The ways to fill in what a spec leaves open: every one that its fields offer, and what the planner says to each.

The fields and their values are read from the declaration of `kernels.decode`, so that a new schedule or a new field is
swept without a word here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .errors import SpecError
from .plan import make_plan
from .render import render
from .spec import Decode, Spec

AUTO = "auto"
Value = str | int | bool

_ALL_BELOW = 16
"""Ranges with more integers than this are sampled."""


@dataclass(frozen=True)
class Candidate:
    """One way to fill in the fields, with its kernels' text if there can be any."""

    label: str
    """The settings that tell it from the others; `auto` if the fields stay open."""
    settings: Mapping[str, Value]
    """Of kernels.decode, by field; empty where what the planner makes of open fields is what no setting gives."""
    spec: Spec
    files: Mapping[str, str] | None
    """What `render` gives, by name; None if it can't be planned."""
    reason: str | None
    """Why it can't be planned."""
    planner: bool = False
    """Whether the planner, left alone, makes the same text."""
    same: tuple[Mapping[str, Value], ...] = ()
    """Other settings that give the same text."""


@dataclass(frozen=True)
class Sweep:
    """All candidates of a spec."""

    fields: Mapping[str, tuple[Value, ...]]
    """What was filled in, and with which values."""
    candidates: tuple[Candidate, ...]

    @property
    def buildable(self) -> tuple[Candidate, ...]:
        """Those that have a text."""
        return tuple(each for each in self.candidates if each.files is not None)


def open_fields(spec: Spec) -> tuple[str, ...]:
    """Name the fields of kernels.decode that a spec leaves to the planner."""
    return tuple(name for name in Decode.model_fields if getattr(spec.kernels.decode, name) == AUTO)


def field_values(declaration: Mapping[str, Any]) -> tuple[Value, ...]:
    """List what a field may be set to, `auto` left out.

    Args:
        declaration: of the field, as JSON Schema. An integer range with more than 16 members is sampled: its ends, the
            powers of two in it, and one and a half times them.

    Raises:
        ValueError: the values can't be listed.
    """
    values: list[Value] = []
    for option in declaration.get("anyOf", [declaration]):
        if "const" in option or "enum" in option:
            values += option.get("enum", [option.get("const")])
        elif option.get("type") == "boolean":
            values += [False, True]
        elif option.get("type") == "integer" and "minimum" in option and "maximum" in option:
            values += _sample(option["minimum"], option["maximum"])
        else:
            raise ValueError(f"values of {option} can't be listed")
    return tuple(value for value in dict.fromkeys(values) if value != AUTO)


def _sample(low: int, high: int) -> list[int]:
    if high - low < _ALL_BELOW:
        return list(range(low, high + 1))
    powers = [1 << n for n in range(high.bit_length())]
    steps = {low, high, *powers, *(3 * power // 2 for power in powers[1:])}
    return sorted(step for step in steps if low <= step <= high)


def enumerate_candidates(spec: Spec, fields: Sequence[str] = ()) -> Sweep:
    """Fill in the open fields of kernels.decode in every way, plan and render each.

    Settings that give the same text are one candidate. What the planner makes of the open fields is always among them.

    Args:
        spec: what is tuned.
        fields: what to fill in, whether or not the spec has fixed it; the open ones if empty.

    Raises:
        ValueError: there is no such field, or nothing is open.
    """
    chosen = tuple(dict.fromkeys(fields)) or open_fields(spec)
    if unknown := [name for name in chosen if name not in Decode.model_fields]:
        raise ValueError(
            f"kernels.decode has no field {', '.join(unknown)}; its fields are {', '.join(Decode.model_fields)}"
        )
    if not chosen:
        raise ValueError(
            f"kernels.decode leaves nothing open: none of {', '.join(Decode.model_fields)} is auto; "
            "set one to auto, or name those to sweep"
        )
    declared = Decode.model_json_schema()["properties"]
    values = {name: field_values(declared[name]) for name in chosen}
    left_open = with_settings(spec, {name: AUTO for name in chosen if _may_be_auto(declared[name])})
    # A field with one value tells no candidate from another.
    told = [name for name in chosen if len(values[name]) > 1] or list(chosen)

    found: dict[str, Candidate] = {}
    for combination in itertools.product(*values.values()):
        settings = dict(zip(chosen, combination, strict=True))
        label = ", ".join(_word(name, settings[name]) for name in told)
        _add(found, _candidate(label, settings, with_settings(spec, settings)))
    own = _candidate(AUTO, {}, left_open)
    twin = _twin(found, own)
    if twin is None:
        found = {own.label: replace(own, planner=True), **found}
    else:
        found[twin.label] = replace(twin, planner=True)
    return Sweep(values, tuple(found.values()))


def with_settings(spec: Spec, settings: Mapping[str, Value]) -> Spec:
    """Give the spec with fields of kernels.decode set; pydantic's ValidationError if it does not take a value."""
    decode = Decode.model_validate({**spec.kernels.decode.model_dump(), **settings})
    return spec.model_copy(update={"kernels": spec.kernels.model_copy(update={"decode": decode})})


def _may_be_auto(declaration: Mapping[str, Any]) -> bool:
    options = declaration.get("anyOf", [declaration])
    return any(AUTO in option.get("enum", [option.get("const")]) for option in options)


def _candidate(label: str, settings: Mapping[str, Value], spec: Spec) -> Candidate:
    try:
        return Candidate(label, settings, spec, render(make_plan(spec)), None)
    except SpecError as error:
        reasons = (f"{problem.field}: {problem.message}" for problem in error.problems)
        return Candidate(label, settings, spec, None, "; ".join(reasons))


def _add(found: dict[str, Candidate], candidate: Candidate) -> None:
    twin = _twin(found, candidate)
    if twin is None:
        found[candidate.label] = candidate
    else:
        found[twin.label] = replace(twin, same=(*twin.same, candidate.settings))


def _twin(found: Mapping[str, Candidate], candidate: Candidate) -> Candidate | None:
    if candidate.files is None:
        return None
    return next((each for each in found.values() if each.files == candidate.files), None)


def _word(name: str, value: Value) -> str:
    # Words speak for themselves.
    return value if isinstance(value, str) else f"{name} {str(value).lower()}"
