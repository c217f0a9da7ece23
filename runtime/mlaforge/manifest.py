"""The manifest of a generated folder: all that the runtime needs to know of its kernels."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

FORMAT = 5
"""The manifest format that this runtime reads."""


_MAX_BYTES = 1 << 20
"""Longest manifest that is read; a shipped one has some thousand bytes."""

# A manifest may come from anywhere, and these go on: to the file system, to compilers, and into the simulator's text.
_SOURCE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.cu")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_TARGET = re.compile(r"sm_[0-9]{2,3}[af]?")
_CTYPE = re.compile(r"[A-Za-z_][A-Za-z0-9_ ]{0,99}\*?")
_DIMENSIONS = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_MAX_DIMENSION = 1 << 20


class ManifestError(ValueError):
    """A folder holds no manifest that this version can read."""


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter behind the tensor maps."""

    name: str
    ctype: str


@dataclass(frozen=True)
class SmemRegion:
    """A named piece of a block's dynamic shared memory, bytes."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class WarpRole:
    """Successive warps that do the same."""

    name: str
    warps: int


@dataclass(frozen=True)
class DecodeKernel:
    """The decode kernel's launch facts."""

    source: Path
    entry: str
    threads: int
    smem_bytes: int
    """Dynamic shared memory of a block."""
    tile_rows: int
    tile_tokens: int
    stages: int
    """Whole tiles of K in shared memory at once."""
    fixed_overhead_blocks: int
    max_parts: int
    """Parts that can share a request."""
    boxes: Mapping[str, tuple[int, ...]]
    """TMA box of each tensor, elements, innermost first."""
    regions: tuple[SmemRegion, ...]
    """The whole of dynamic shared memory, in order of their offsets; each stage of K is one."""
    mbarriers: Mapping[int, str]
    """Names by offset."""
    roles: tuple[WarpRole, ...]
    """Of all warps of a block, in order."""
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class Kernel:
    """Any other kernel's launch facts."""

    source: Path
    entry: str
    threads: int
    smem_bytes: int
    """Dynamic shared memory of a block."""
    boxes: Mapping[str, tuple[int, ...]]
    """TMA box of each tensor map, in the order of the parameters that they lead; elements, innermost first."""
    constants: Mapping[str, int]
    """Numbers of the kernel's text that its launch needs."""
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class CacheFormat:
    """The paged cache."""

    dtype: str
    """As cache.dtype of a spec: the type of an element, or a quantised format, whose rows are bytes."""
    page_size: int
    """Tokens."""
    row_bytes: int
    """Of a token."""
    quantised: bool
    tensor_scale: bool
    """A float32 scale goes with the cache of each layer."""


@dataclass(frozen=True)
class Manifest:
    """One spec's kernels."""

    folder: Path
    name: str
    target: str
    model: Mapping[str, Any]
    """Dimensions, in the words of config.json."""
    tensor_parallel: int
    element: str
    """Type of q, of results, of new tokens and of what gather reads from the cache: bf16 or fp16."""
    cache: CacheFormat
    prefill_absorption_threshold: int
    """New tokens of a request up to which a layer attends in the latent space, by decode, instead of by prefill."""
    softmax_scale: float
    d_qk: int
    d_v: int
    decodes: tuple[DecodeKernel, ...]
    """The decode kernels, fewest rows first."""
    kernels: Mapping[str, Kernel]
    """The other kernels, by what they do."""

    @property
    def decode(self) -> DecodeKernel:
        """The decode kernel that serves any number of rows."""
        return self.decodes[-1]

    @property
    def narrow_decodes(self) -> tuple[DecodeKernel, ...]:
        """Those for calls whose rows fit into one narrower tile, fewest rows first."""
        return self.decodes[:-1]

    def decode_for(self, rows: int) -> DecodeKernel:
        """Choose the decode kernel for a call: the narrowest tile that holds all rows, s_q x heads of a kv head."""
        return next((each for each in self.narrow_decodes if rows <= each.tile_rows), self.decode)

    @property
    def sources(self) -> tuple[Path, ...]:
        """The files to compile."""
        decodes = (self.decode, *self.narrow_decodes)
        return (*(each.source for each in decodes), *(each.source for each in self.kernels.values()))

    @property
    def dynamic_smem(self) -> Mapping[Path, int]:
        """Dynamic shared memory of a block of each kernel, by its file."""
        others = {kernel.source: kernel.smem_bytes for kernel in self.kernels.values()}
        return {**{kernel.source: kernel.smem_bytes for kernel in self.decodes}, **others}


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Read `manifest.json` of a generated folder.

    Raises:
        ManifestError: the file is missing, damaged, of another format, or names a file outside of the folder.
    """
    folder = Path(folder)
    path = folder / "manifest.json"
    try:
        data = json.loads(_read(path), parse_constant=_no_number)
    except FileNotFoundError:
        raise ManifestError(f"{folder} holds no manifest.json; is it a folder made by `mlaforge generate`?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ManifestError(f"{path} can't be read: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else None
        raise ManifestError(f"{path} has format {found!r}, this version reads {FORMAT}; generate the folder again")
    try:
        return _parse(folder, data)
    except ManifestError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ManifestError(f"{path} is damaged: {error!r}; generate the folder again") from None


def _read(path: Path) -> bytes:
    """Read a plain file of bounded size, and wait for no pipe."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("no plain file")
    if status.st_size > _MAX_BYTES:
        raise ValueError(f"larger than {_MAX_BYTES:,} bytes")
    return path.read_bytes()


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _parse(folder: Path, data: Mapping[str, Any]) -> Manifest:
    return Manifest(
        folder=folder,
        name=_text(_NAME, data["name"]),
        target=_text(_TARGET, data["target"]),
        model=_model(data["model"]),
        tensor_parallel=int(data["tensor_parallel"]),
        element=str(data["element"]),
        cache=CacheFormat(
            str(data["cache"]["dtype"]),
            int(data["cache"]["page_size"]),
            int(data["cache"]["row_bytes"]),
            bool(data["cache"]["quantised"]),
            bool(data["cache"]["tensor_scale"]),
        ),
        prefill_absorption_threshold=int(data["dispatch"]["prefill_absorption_threshold"]),
        softmax_scale=_finite(data["softmax_scale"]),
        d_qk=int(data["d_qk"]),
        d_v=int(data["d_v"]),
        decodes=tuple(_decode(folder, item) for item in (*data["narrow_decodes"], data["decode"])),
        kernels={str(name): _kernel(folder, item) for name, item in data["kernels"].items()},
    )


def _model(item: Mapping[str, Any]) -> Mapping[str, Any]:
    model = dict(item)
    for name in _DIMENSIONS:
        if type(model[name]) is not int or not 0 <= model[name] < _MAX_DIMENSION:
            raise ValueError(f"model.{name} is {model[name]!r:.100}")
    return model


def _decode(folder: Path, item: Mapping[str, Any]) -> DecodeKernel:
    return DecodeKernel(
        source=_source(folder, item["file"]),
        entry=_text(_IDENTIFIER, item["entry"]),
        threads=int(item["threads"]),
        smem_bytes=int(item["smem_bytes"]),
        tile_rows=int(item["tile_rows"]),
        tile_tokens=int(item["tile_tokens"]),
        stages=int(item["stages"]),
        fixed_overhead_blocks=int(item["fixed_overhead_blocks"]),
        max_parts=int(item["max_parts"]),
        boxes={name: tuple(map(int, box)) for name, box in item["boxes"].items()},
        regions=tuple(
            SmemRegion(str(each["name"]), int(each["offset"]), int(each["size"])) for each in item["regions"]
        ),
        mbarriers={int(each["offset"]): str(each["name"]) for each in item["mbarriers"]},
        roles=tuple(WarpRole(str(each["name"]), int(each["warps"])) for each in item["roles"]),
        parameters=_parameters(item["parameters"]),
    )


def _kernel(folder: Path, item: Mapping[str, Any]) -> Kernel:
    return Kernel(
        source=_source(folder, item["file"]),
        entry=_text(_IDENTIFIER, item["entry"]),
        threads=int(item["threads"]),
        smem_bytes=int(item["smem_bytes"]),
        boxes={str(name): tuple(map(int, box)) for name, box in item["boxes"].items()},
        constants={str(name): int(value) for name, value in item["constants"].items()},
        parameters=_parameters(item["parameters"]),
    )


def _source(folder: Path, name: str) -> Path:
    """Give a file that the manifest names, which is one of its own folder and no other."""
    manifest, source = folder / "manifest.json", folder / _text(_SOURCE, name)
    # Package managers make links of whole folders, file by file: what lies beside the manifest in truth is its own.
    if source.is_symlink() and source.resolve().parent not in (folder.resolve(), manifest.resolve().parent):
        raise ManifestError(f"{manifest} names {name!r}, a link that leads out of its folder")
    return source


def _text(form: re.Pattern[str], value: object) -> str:
    if not isinstance(value, str) or not form.fullmatch(value):
        raise ValueError(f"{value!r:.100} must be of the form {form.pattern}")
    return value


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r:.100} is not finite")
    return number


def _parameters(items: list[Mapping[str, str]]) -> tuple[Parameter, ...]:
    return tuple(Parameter(_text(_IDENTIFIER, item["name"]), _text(_CTYPE, item["ctype"])) for item in items)
