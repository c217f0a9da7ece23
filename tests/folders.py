"""Folders of kernels that no shipped spec has as such."""

from __future__ import annotations

from pathlib import Path

from mlaforge_generator.emit import write_folder
from mlaforge_generator.plan import Plan, make_plan
from mlaforge_generator.render import render
from mlaforge_generator.resources import find_spec
from mlaforge_generator.spec import Spec, load_spec


def plan_with(name: str, **decode: str | int) -> Plan:
    """Plan a shipped spec with fields of kernels.decode set; `tile_rows=64` leaves the kernels of fewer rows out."""
    tree = load_spec(find_spec(name)).model_dump(exclude_none=True)
    tree["kernels"]["decode"] |= decode
    return make_plan(Spec.model_validate(tree))


def generate(into: Path, name: str, **decode: str | int) -> Path:
    """Generate what `plan_with` plans."""
    write_folder(into, render(plan_with(name, **decode)))
    return into
