"""What the plan of every kernel beside decode says: enough to render it, compile it and launch it.

A kernel has a module of its own that plans it, with a subclass of `KernelPlan` for the numbers that only its template
prints, and an entry in the list of kernels.py. The rest follows from what is said here: the file under generated/, the
entry of the manifest, its rows in `mlaforge plan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

ELEMENT_BYTES = 2
"""Bytes of a bf16 or fp16 element."""
ELEMENTS = {"bf16": "Bf16", "fp16": "Fp16"}
"""The device's name of an element, by Spec.element."""


@dataclass(frozen=True)
class Choice:
    """A field that was left to the planner."""

    field: str
    value: str
    why: str


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter after the tensor maps, in order."""

    name: str
    ctype: str


def divisor(name: str) -> tuple[Parameter, ...]:
    """Give a number and what division by it becomes; see `divided` in division.cuh."""
    return (Parameter(name, "int"), Parameter(f"{name}_multiplier", "unsigned"), Parameter(f"{name}_shift", "int"))


@dataclass(frozen=True, kw_only=True)
class KernelPlan:
    """One kernel: its template prints the fields, the runtime launches by what `manifest` gives of them."""

    name: str
    """What the kernel does, in a word: the key of its manifest entry, and the stem of its file."""
    what: str
    """The same in a line."""
    template: str
    entry: str
    threads: int
    """Of a block."""
    grid: tuple[str, ...]
    """Blocks, in words."""
    smem_bytes: int = 0
    """Dynamic shared memory of a block."""
    boxes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """TMA box of each tensor map, which lead the parameters in this order; elements, innermost first."""
    parameters: tuple[Parameter, ...]
    constants: Mapping[str, int] = field(default_factory=dict)
    """Numbers that the text holds and the launch needs, too."""
    choices: tuple[Choice, ...] = ()

    @property
    def file(self) -> str:
        """Name of the generated file."""
        return f"{self.name}.cu"

    def manifest(self) -> dict[str, Any]:
        """Give the kernel's entry of the manifest, as plain data."""
        return {
            "file": self.file,
            "entry": self.entry,
            "threads": self.threads,
            "smem_bytes": self.smem_bytes,
            "boxes": {tensor: list(box) for tensor, box in self.boxes.items()},
            "constants": dict(self.constants),
            "parameters": [asdict(parameter) for parameter in self.parameters],
        }
