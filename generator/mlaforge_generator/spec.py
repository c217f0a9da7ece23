"""What a spec says: one MLA attention configuration, its cache, its target, and what its kernels may choose.

Field names are those of Hugging Face's config.json. Checked here is what a spec means; whether a kernel of that shape
fits the hardware is for the planner, which reports through `Spec.problem`.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from .cache_layout import LAYOUTS, CacheLayout
from .errors import Problem, SpecError
from .yaml_source import KeyPath, Origin, Source, Tree, parse_yaml, read_bytes, shown

_HeadDim = Annotated[int, Field(ge=1, le=1024)]
_Rank = Annotated[int, Field(ge=1, le=8192)]
_HiddenSize = Annotated[int, Field(ge=1, le=1 << 20)]
_LayerCount = Annotated[int, Field(ge=1, le=10_000)]
_Factor = Annotated[float, Field(ge=1, le=1_000_000)]
_MScale = Annotated[float, Field(ge=0, le=100)]
_StageCount = Annotated[int, Field(ge=1, le=8)]


def _exact_type(value: object) -> object:
    """Refuse true for 1 and 64.0 for 64, which pydantic takes for equal to a Literal even when it is strict."""
    if type(value) not in (int, str):
        raise PydanticCustomError("exact_type", "must be an integer or text")
    return value


_Listed = BeforeValidator(_exact_type)


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class RopeScaling(_Part):
    """How the positional rotation was stretched; here it matters only for the softmax scale."""

    type: Literal["yarn", "longrope", "linear", "dynamic", "llama3"] = Field(
        description="Kind of scaling. Only yarn changes the softmax scale, and only with mscale_all_dim."
    )
    factor: _Factor | None = Field(
        default=None,
        validate_default=True,
        description="How many times the context was stretched. Needed for yarn.",
    )
    mscale: _MScale | None = Field(
        default=None,
        description="yarn's attention factor for the rotary dimensions; part of the rotation, not of the kernels.",
    )
    mscale_all_dim: _MScale | None = Field(
        default=None,
        description="yarn's attention factor for all dimensions: the softmax scale is multiplied by "
        "(0.1 * mscale_all_dim * ln(factor) + 1)^2.",
    )

    @field_validator("factor")
    @classmethod
    def _yarn_needs_factor(cls, factor: float | None, info: ValidationInfo) -> float | None:
        if factor is None and info.data.get("type") == "yarn":
            raise ValueError(
                "yarn needs a factor, a number from 1 to 1000000; add it, or change model.rope_scaling.type"
            )
        return factor


class Model(_Part):
    """The attention of one model, in the words of its config.json."""

    num_attention_heads: int = Field(
        ge=1, le=1024, description="Query heads of one layer, before they are split over tensor-parallel ranks."
    )
    kv_lora_rank: _Rank = Field(
        description="Elements of the compressed latent of one token; in absorbed attention the width of V."
    )
    q_lora_rank: _Rank | None = Field(
        default=None, description="Elements of the compressed query; null if queries are projected directly."
    )
    qk_nope_head_dim: _HeadDim = Field(description="Elements of one query or key head that are not rotated.")
    qk_rope_head_dim: int = Field(
        ge=0, le=1024, description="Elements of one query or key head that carry the positional rotation; 0 if none do."
    )
    v_head_dim: _HeadDim = Field(description="Elements of one value head, after decompression.")
    hidden_size: _HiddenSize | None = Field(default=None, description="Width of the residual stream, in elements.")
    num_hidden_layers: _LayerCount | None = Field(default=None, description="Layers of the model.")
    rope_scaling: RopeScaling | None = Field(
        default=None, description="The model's rope_scaling; null if its context was not stretched."
    )


class Cache(_Part):
    """The paged cache of latents."""

    dtype: Literal["bf16", "fp16", "fp8_e4m3", "fp8_e4m3_token", "fp8_ds_mla", "nvfp4"] = Field(
        default="bf16",
        description="Type of an element of the cache and of q; or a quantised format of the cache, whose q is bf16.",
    )
    page_size: Annotated[Literal[1, 16, 32, 64, 128], _Listed] = Field(
        default=64, description="Tokens in one page of the cache."
    )


class Decode(_Part):
    """What the decode kernel may choose; auto leaves a choice to the planner."""

    schedule: Literal["auto", "plain", "skewed", "swapped", "stored"] = Field(
        default="auto",
        description="Which arrangement of warps, loads and multiplications is used. Quantised caches are read by "
        "swapped, nvfp4 also by stored, which auto has for calls of up to 16 rows.",
    )
    tile_rows: Annotated[Literal["auto", 8, 16, 24, 32, 40, 48, 56, 64], _Listed] = Field(
        default="auto",
        description="Rows (heads times query tokens) that one thread block works on: in the swapped schedule multiples "
        "of 8 up to 56, as far as its registers hold kv_lora_rank columns of them, on a quantised cache 16, 32 or 64, "
        "in stored 16, and 64 in the others. If this and the schedule are auto, there are several kernels, and a call "
        "takes the one that its rows fill best.",
    )
    tile_tokens: Annotated[Literal[64], _Listed] = Field(
        default=64, description="Cached tokens in one step of a thread block."
    )
    stages: Literal["auto"] | _StageCount = Field(
        default="auto", description="Token tiles held in shared memory at once, so that loads run ahead."
    )


class Prefill(_Part):
    """What the prefill kernel may choose; auto leaves a choice to the planner."""

    tile_q: Annotated[Literal["auto", 128, 192], _Listed] = Field(
        default="auto", description="Rows of queries that one thread block works on, 64 a warpgroup."
    )
    tile_kv: Annotated[Literal["auto", 64, 80, 96, 128], _Listed] = Field(
        default="auto", description="Tokens in one step of a thread block."
    )
    stages: Literal["auto"] | _StageCount = Field(
        default="auto", description="Blocks of keys, and of values, held in shared memory at once."
    )


class Kernels(_Part):
    """The kernels to generate, each with its choices."""

    decode: Decode = Field(default_factory=Decode, description="Absorbed attention over the paged latent cache.")
    prefill: Prefill = Field(
        default_factory=Prefill, description="Decompressed attention over sequences that lie one behind the other."
    )


class Dispatch(_Part):
    """Which kernel a layer takes."""

    prefill_absorption_threshold: int = Field(
        default=256,
        ge=0,
        le=1 << 20,
        description="New tokens of a request up to which it is attended to in the latent space, by the decode kernel; "
        "one with more has keys and values decompressed, for the prefill kernel.",
    )


class Spec(_Part):
    """One MLA attention configuration, and what is generated for it."""

    name: str = Field(
        pattern=r"^[a-z][a-z0-9_]{0,63}$",
        description="Name of the spec and of the folder under generated/: a lower-case letter, then at most 63 of "
        "a-z, 0-9 and _.",
    )
    model: Model = Field(description="Shape of the model's attention.")
    tensor_parallel: int = Field(
        default=1, ge=1, le=1024, description="Ranks that the heads are split over; divides num_attention_heads."
    )
    cache: Cache = Field(default_factory=Cache, description="Format of the cache that the kernels read.")
    target: Literal["sm_90a"] = Field(default="sm_90a", description="GPU architecture; sm_90a is Hopper.")
    kernels: Kernels = Field(default_factory=Kernels, description="Choices for each of the generated kernels.")
    dispatch: Dispatch = Field(default_factory=Dispatch, description="Which kernel serves which request.")

    _origin: Origin = PrivateAttr(default_factory=Origin)

    @field_validator("tensor_parallel")
    @classmethod
    def _ranks_divide_heads(cls, ranks: int, info: ValidationInfo) -> int:
        model = info.data.get("model")
        if isinstance(model, Model) and model.num_attention_heads % ranks:
            heads = model.num_attention_heads
            divisors = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
            raise ValueError(
                f"must divide model.num_attention_heads = {heads}; got {ranks}; "
                f"use one of {divisors}, or change model.num_attention_heads"
            )
        return ranks

    @property
    def heads_per_rank(self) -> int:
        """Query heads that one tensor-parallel rank works on."""
        return self.model.num_attention_heads // self.tensor_parallel

    @property
    def d_qk(self) -> int:
        """Elements of an absorbed query, and of a cached token: the latent, then the rotary part."""
        return self.model.kv_lora_rank + self.model.qk_rope_head_dim

    @property
    def d_v(self) -> int:
        """Elements of an absorbed output: V is the latent, the head of K."""
        return self.model.kv_lora_rank

    @property
    def element(self) -> Literal["bf16", "fp16"]:
        """Type of an element of q, of results, of new tokens, and of what gather reads from the cache."""
        return "fp16" if self.cache.dtype == "fp16" else "bf16"

    @property
    def layout(self) -> CacheLayout | None:
        """Rows of the cache if it is quantised, else None."""
        return LAYOUTS.get(self.cache.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of a cached token of one layer; ValueError if a quantised format has no row of the model's widths."""
        if self.layout is None:
            return 2 * self.d_qk
        return self.layout.row_bytes(self.model.kv_lora_rank, self.model.qk_rope_head_dim)

    @property
    def softmax_scale(self) -> float:
        """What logits are multiplied with: that of the decompressed heads, not d_qk^-1/2, and yarn's factor squared."""
        scale = 1 / math.sqrt(self.model.qk_nope_head_dim + self.model.qk_rope_head_dim)
        rope = self.model.rope_scaling
        if rope is None or rope.type != "yarn" or rope.factor is None or rope.mscale_all_dim is None:
            return scale
        return scale * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1) ** 2

    def problem(self, field: str, message: str) -> Problem:
        """Make a problem at a dotted field such as `kernels.decode.stages`, or at its nearest parent in the file."""
        return self._origin.problem(tuple(field.split(".")), message)


def parse_spec(text: str | bytes, filename: str = "<string>") -> Spec:
    """Read a spec from YAML; SpecError holds every fault of the text. `filename` is only for messages."""
    return _check(parse_yaml(text, filename))


def check_spec(tree: dict[str, Tree], filename: str = "<spec>") -> Spec:
    """Make a spec of plain data; SpecError names the field of every fault. `filename` is only for messages."""
    return _check(Source(tree, Origin(filename), (), frozenset(), {}))


def _check(source: Source) -> Spec:
    try:
        spec = Spec.model_validate(source.tree)
    except ValidationError as error:
        raise SpecError([*source.problems, *_explain(error, source)]) from None
    if source.problems:
        raise SpecError(source.problems)
    spec._origin = source.origin
    return spec


def load_spec(path: str | os.PathLike[str]) -> Spec:
    """Read a spec from a file; SpecError if it can't be read or has faults."""
    return parse_spec(read_bytes(path), os.fspath(path))


def dump_spec(spec: Spec) -> str:
    """Write a spec as YAML, every default spelled out; `parse_spec` gives an equal spec back."""
    return yaml.safe_dump(spec.model_dump(exclude_none=True), sort_keys=False)


# Messages. The words for what a field needs come from the JSON schema, so that they can't differ from the declaration.


@functools.cache
def _schema() -> dict[str, Any]:
    return Spec.model_json_schema()


def _options(node: dict[str, Any]) -> list[dict[str, Any]]:
    """Give the alternatives of a schema node, references resolved."""
    if "$ref" in node:
        node = _schema()["$defs"][node["$ref"].rpartition("/")[2]]
    return [option for each in node["anyOf"] for option in _options(each)] if "anyOf" in node else [node]


def _fields(node: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Give the fields of the mapping that a schema node allows."""
    return {name: child for option in _options(node) for name, child in option.get("properties", {}).items()}


def _descend(path: KeyPath) -> tuple[KeyPath, dict[str, Any]]:
    """Follow a path as far as the schema has fields for it; pydantic adds names of union members at the end."""
    node = _schema()
    for depth, part in enumerate(path):
        fields = _fields(node)
        if not isinstance(part, str) or part not in fields:
            return path[:depth], node
        node = fields[part]
    return path, node


def _all_fields(node: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, child in _fields(node).items():
        yield (*path, name)
        yield from _all_fields(child, (*path, name))


def _need(node: dict[str, Any]) -> str:
    """Say what a schema node allows, as the end of "must be"."""
    values: list[str] = []
    others: list[str] = []
    for option in _options(node):
        kind = option.get("type")
        if "const" in option or "enum" in option:
            values += [str(value) for value in option.get("enum", [option.get("const")])]
        elif kind == "null":
            values.append("null")
        elif kind == "object":
            required = option.get("required", [])
            others.append(f"a mapping with {_list(required, 'and')}" if required else "a mapping")
        elif kind == "string":
            others.append(f"text of the form {option['pattern'].strip('^$')}")
        else:
            noun = "an integer" if kind == "integer" else "a number"
            others.append(f"{noun} from {option['minimum']:g} to {option['maximum']:.10g}")
    return _list(others + values, "or")


def _list(words: list[str], last: str) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def _explain(error: ValidationError, source: Source) -> Iterator[Problem]:
    """Reword pydantic's errors: one for each field, at its place in the file."""
    seen: set[KeyPath] = set()
    for item in error.errors(include_url=False):
        path, node = _descend(item["loc"])
        unknown = item["type"] == "extra_forbidden"
        if unknown:
            path = item["loc"]
        if path in seen or source.is_refused(path):
            continue
        seen.add(path)
        if unknown:
            message = _unknown_field(str(path[-1]), path[:-1], node)
        elif item["type"] == "missing":
            message = f"missing; it must be {_need(node)}"
        elif item["type"] == "value_error":
            message = str(item["ctx"]["error"])
        else:
            message = f"must be {_need(node)}; got {shown(item['input'])}"
            if hint := _hint(path, node, item["input"], source):
                message += f" ({hint})"
        yield source.origin.problem(path, message, at_key=unknown)


def _hint(path: KeyPath, node: dict[str, Any], value: object, source: Source) -> str | None:
    kinds = {option.get("type") for option in _options(node)}
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        return f"write {value:.0f}, without a decimal point or an exponent"
    if value is not None and not isinstance(value, str) and kinds == {"string"}:
        return "put it in quotes if it is meant as text"
    return source.hints.get(path)


def _unknown_field(name: str, parent: KeyPath, node: dict[str, Any]) -> str:
    fields = list(_fields(node))
    elsewhere = [path for path in _all_fields(_schema()) if path[-1] == name]
    if elsewhere:
        return f"unknown field here; did you mean {' or '.join('.'.join(path) for path in elsewhere)}?"
    near = difflib.get_close_matches(name[:80].lower(), fields, n=1)
    if near:
        return f"unknown field; did you mean {near[0]}?"
    return f"unknown field; the fields {'here' if parent else 'of a spec'} are {_list(fields, 'and')}"
