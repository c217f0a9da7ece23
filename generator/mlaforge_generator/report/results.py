"""The results of benches, as `mlaforge bench` writes them: read from a folder, checked, and told apart by spec.

A result may come from anywhere. What a page needs of it is checked here, and names stay text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

_MOST_BYTES = 32 << 20
"""Of a file. The longest run there is has a hundredth of it."""

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, le=1 << 40)]


def _median(value: object) -> object:
    """Give the median of timed calls, or the mean of sustained ones, which is a number already."""
    return value.get("median") if isinstance(value, dict) else value


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Timed(_Part):
    """One kernel at one shape; no `us` if it could not run."""

    us: Annotated[_Positive | None, BeforeValidator(_median)] = None
    tflops: _Positive | None = Field(default=None, alias="TFLOPs")
    gbps: _Positive | None = Field(default=None, alias="GBps")
    watts: _Positive | None = None
    nj_per_token: _Positive | None = Field(default=None, alias="nJ_per_token")


class DecodeEntry(_Part):
    """Decode at one shape."""

    suite: str
    b: _Count
    s_k: _Count
    h: _Count
    s_q: _Count
    kernels: Mapping[str, Timed]


class PrefillEntry(_Part):
    """Prefill at one shape."""

    b: _Count
    s: _Count
    h: _Count
    kernels: Mapping[str, Timed]


class MemoryEntry(_Part):
    """A kernel that moves data, beside a copy."""

    kernel: str
    tokens: _Count
    kernels: Mapping[str, Timed]


class BenchedSpec(_Part):
    """What was timed."""

    name: str
    d_qk: _Count
    d_v: _Count


class Machine(_Part):
    """Where."""

    gpu: str = ""
    driver: str = ""
    cuda: str | None = None


class PeerNamed(_Part):
    """A peer."""

    title: str


class Result(_Part):
    """One run of `mlaforge bench`."""

    format: int
    made: str
    spec: BenchedSpec
    machine: Machine
    peers: Mapping[str, PeerNamed] = {}
    prefill_peers: Mapping[str, PeerNamed] = {}
    burst: tuple[DecodeEntry, ...]
    sustained: tuple[DecodeEntry, ...]
    prefill: tuple[PrefillEntry, ...] = ()
    memory: tuple[MemoryEntry, ...] = ()


class ResultsError(ValueError):
    """A folder without results of a spec."""


def read_results(folder: Path, name: str) -> dict[str, Result]:
    """Read the results of a spec from the JSON files of a folder and those below, by their paths in it.

    Raises:
        ResultsError: there are none, or one can't be read.
    """
    if not os.path.isdir(folder):
        raise ResultsError(f"{folder}: no such folder")
    found: dict[str, Result] = {}
    others: set[str] = set()
    for path in sorted(folder.rglob("*.json")):
        if (result := _read(path)) is None:
            continue
        if result.spec.name == name:
            found[path.relative_to(folder).as_posix()] = result
        else:
            others.add(result.spec.name)
    if not found:
        has = f"there are some of {', '.join(sorted(others))}" if others else "`mlaforge bench` writes them"
        raise ResultsError(f"{folder}: no results of {name}; {has}")
    return found


def _read(path: Path) -> Result | None:
    """Read one file; None if it is no result of a bench."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ResultsError(f"{path}: more than {_MOST_BYTES:,} bytes; no result of a bench is that long")
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ResultsError):
            raise
        raise ResultsError(f"{path}: can't be read: {error}") from None
    if not (isinstance(tree, dict) and {"format", "spec", "burst", "sustained"} <= tree.keys()):
        return None
    try:
        return Result.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ResultsError(f"{path}: {where}: {first['msg']}") from None
