"""Hypothesis strategies for specs: valid ones, ones broken in one named way, and YAML that is no spec at all.

All are constructive: what must fit together is drawn so that it does, and nothing is filtered. In `sampled_from` the
simplest choice comes first, because that is the one hypothesis shrinks to.
"""

from __future__ import annotations

import copy
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml
from hypothesis import strategies as st

from mlaforge_generator.spec import Cache, Decode, Dispatch, Kernels, Model, RopeScaling, Spec, dump_spec

_FIRST = string.ascii_lowercase
_REST = string.ascii_lowercase + string.digits + "_"


MOST_ROWS = {128: 56, 256: 56, 384: 40, 512: 32}
"""Of a tile in the swapped schedule, by the width of V: NVRTC spills with more."""


def _optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def names() -> st.SearchStrategy[str]:
    """Draw names of specs, among them words that YAML 1.1 reads as something else."""
    plain = st.builds(str.__add__, st.sampled_from(_FIRST), st.text(_REST, max_size=63))
    return st.one_of(plain, st.sampled_from(["a", "no", "on", "yes", "null", "true", "e1", "y", "o17", "inf"]))


def rope_scalings() -> st.SearchStrategy[RopeScaling]:
    """Draw the rope_scaling of a model; yarn always with its factor."""
    factors = st.sampled_from([1.0, 32.0, 40.0, 128.0]) | st.floats(1, 1e6)
    mscales = _optional(st.sampled_from([1.0, 0.707, 0.0]) | st.floats(0, 100))
    yarn = st.builds(RopeScaling, type=st.just("yarn"), factor=factors, mscale=mscales, mscale_all_dim=mscales)
    kinds = st.sampled_from(["longrope", "linear", "dynamic", "llama3"])
    return yarn | st.builds(RopeScaling, type=kinds, factor=_optional(factors), mscale_all_dim=mscales)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Draw a valid spec of which a decode kernel can exist."""
    ranks = draw(st.sampled_from([1, 2, 4, 8]))
    heads_per_rank = draw(
        st.sampled_from([16, 1, 4, 5, 8, 10, 12, 20, 24, 32, 40, 48, 64, 96, 128]) | st.integers(1, 128)
    )
    rank = draw(st.sampled_from([512, 256, 128, 384]))
    model = Model(
        num_attention_heads=ranks * heads_per_rank,
        kv_lora_rank=rank,
        q_lora_rank=draw(_optional(st.integers(1, 4096))),
        qk_nope_head_dim=draw(st.sampled_from([128, 64, 192, 256]) | st.integers(1, 256)),
        qk_rope_head_dim=draw(st.sampled_from([64, 0, 16, 32, 48])),
        v_head_dim=draw(st.sampled_from([128, 64, 256]) | st.integers(1, 256)),
        hidden_size=draw(_optional(st.integers(1, 16384))),
        num_hidden_layers=draw(_optional(st.integers(1, 128))),
        rope_scaling=draw(_optional(rope_scalings())),
    )
    swapped = [32, 16, 8, 24, *(rows for rows in (40, 48, 56) if rows <= MOST_ROWS[rank])]
    schedule, tile_rows = draw(
        st.sampled_from(
            [
                *(("auto", rows) for rows in ("auto", 64, *swapped)),
                *((each, rows) for each in ("plain", "skewed") for rows in ("auto", 64)),
                *(("swapped", rows) for rows in ("auto", *swapped)),
            ]
        )
    )
    return Spec(
        name=draw(names()),
        model=model,
        tensor_parallel=ranks,
        cache=Cache(
            dtype=draw(st.sampled_from(["bf16", "fp16"])), page_size=draw(st.sampled_from([64, 1, 16, 32, 128]))
        ),
        kernels=Kernels(decode=Decode.model_validate({"schedule": schedule, "tile_rows": tile_rows})),
        dispatch=Dispatch(prefill_absorption_threshold=draw(st.sampled_from([256, 0, 1, 1 << 20]))),
    )


@dataclass(frozen=True)
class BrokenSpec:
    """YAML with one fault: what was done to a valid spec, and the field that the error must name."""

    mutation: str
    field: str
    text: str


_REQUIRED = [
    "name",
    "model",
    "model.num_attention_heads",
    "model.kv_lora_rank",
    "model.qk_nope_head_dim",
    "model.qk_rope_head_dim",
    "model.v_head_dim",
]
INTEGERS = [
    "tensor_parallel",
    "model.num_attention_heads",
    "model.kv_lora_rank",
    "model.q_lora_rank",
    "model.qk_nope_head_dim",
    "model.qk_rope_head_dim",
    "model.v_head_dim",
    "model.hidden_size",
    "model.num_hidden_layers",
    "cache.page_size",
    "dispatch.prefill_absorption_threshold",
    "kernels.decode.tile_rows",
    "kernels.decode.tile_tokens",
    "kernels.decode.stages",
    "kernels.prefill.tile_q",
    "kernels.prefill.tile_kv",
    "kernels.prefill.stages",
]
NO_INTEGERS: list[Any] = [True, False, 1.0, 1.5, 64.0, "1", "64", "no", [], {}, [64], {"a": 64}]
_WORDS = ["name", "cache.dtype", "target", "kernels.decode.schedule"]
_NOT_OFFERED: dict[str, list[Any]] = {
    "cache.dtype": ["fp8", "BF16", "auto"],
    "cache.page_size": [0, 2, 63, 65, 256],
    "target": ["sm_90", "sm_100a", "auto"],
    "kernels.decode.schedule": ["fast", "Auto"],
    "kernels.decode.tile_rows": [63, 128, "plain"],
    "kernels.decode.tile_tokens": [32, 128, "auto"],
    "kernels.decode.stages": [0, 9, "all"],
    "kernels.prefill.tile_q": [64, 129, "all"],
    "kernels.prefill.tile_kv": [48, 112, "all"],
    "kernels.prefill.stages": [0, 9, "all"],
}
_MAPPINGS = ["model", "cache", "kernels", "kernels.decode", "kernels.prefill", "dispatch"]

_Tree = dict[str, Any]
_Mutation = Callable[[st.DrawFn, _Tree], str]


def _parent(tree: _Tree, field: str) -> tuple[_Tree, str]:
    *parents, last = field.split(".")
    for name in parents:
        tree = tree[name]
    return tree, last


def _put(tree: _Tree, field: str, value: object) -> str:
    parent, name = _parent(tree, field)
    parent[name] = value
    return field


def _drop_required(draw: st.DrawFn, tree: _Tree) -> str:
    field = draw(st.sampled_from(_REQUIRED))
    parent, name = _parent(tree, field)
    del parent[name]
    return field


def _unknown_field(draw: st.DrawFn, tree: _Tree) -> str:
    parent = draw(st.sampled_from(["", *(f"{name}." for name in _MAPPINGS)]))
    name = draw(st.sampled_from(["gather", "launch", "head_dim", "on", "zz"]))
    return _put(tree, parent + name, draw(st.sampled_from([1, "auto", None])))


def _wrong_type(draw: st.DrawFn, tree: _Tree) -> str:
    wrong_integers: st.SearchStrategy[Any] = st.sampled_from(NO_INTEGERS)
    wrong_words: st.SearchStrategy[Any] = st.sampled_from([True, 1, 1.5, None, [], {}, ["a"]])
    wrong_mappings: st.SearchStrategy[Any] = st.sampled_from([True, 1, "auto", [], None])
    fields, values = draw(
        st.sampled_from([(INTEGERS, wrong_integers), (_WORDS, wrong_words), (_MAPPINGS, wrong_mappings)])
    )
    return _put(tree, draw(st.sampled_from(fields)), draw(values))


def _out_of_bounds(draw: st.DrawFn, tree: _Tree) -> str:
    value = draw(st.sampled_from([-1, 1 << 21, -(1 << 63), 1 << 64, 10**39]))
    return _put(tree, draw(st.sampled_from(INTEGERS)), value)


def _not_offered(draw: st.DrawFn, tree: _Tree) -> str:
    field = draw(st.sampled_from(sorted(_NOT_OFFERED)))
    return _put(tree, field, draw(st.sampled_from(_NOT_OFFERED[field])))


def _ranks_do_not_divide(draw: st.DrawFn, tree: _Tree) -> str:
    ranks = draw(st.integers(2, 64))
    remainder = draw(st.integers(1, ranks - 1))
    tree["model"]["num_attention_heads"] = ranks * draw(st.integers(0, 15)) + remainder
    return _put(tree, "tensor_parallel", ranks)


def _bad_name(draw: st.DrawFn, tree: _Tree) -> str:
    bad = st.sampled_from(
        ["", "A", "1a", "_a", "a-b", "a b", "a.b", "../a", "a/b", "a\\b", "a\n", "a*/", "a\0", "ä", "a" * 65, "a\u2028"]
    )
    return _put(tree, "name", draw(bad))


def _yarn_without_factor(draw: st.DrawFn, tree: _Tree) -> str:
    tree["model"]["rope_scaling"] = draw(st.sampled_from([{"type": "yarn"}, {"type": "yarn", "factor": None}]))
    return "model.rope_scaling.factor"


def _bad_factor(draw: st.DrawFn, tree: _Tree) -> str:
    value = draw(st.sampled_from([0, 0.5, -40, float("inf"), float("nan"), 1e7, "40", True]))
    tree["model"]["rope_scaling"] = {"type": draw(st.sampled_from(["yarn", "linear"])), "factor": value}
    return "model.rope_scaling.factor"


_MUTATIONS: list[_Mutation] = [
    _drop_required,
    _unknown_field,
    _wrong_type,
    _out_of_bounds,
    _not_offered,
    _ranks_do_not_divide,
    _bad_name,
    _yarn_without_factor,
    _bad_factor,
]


@st.composite
def broken_specs(draw: st.DrawFn) -> BrokenSpec:
    """Draw a valid spec's YAML with one mutation, and the field that the error must name."""
    tree = copy.deepcopy(yaml.safe_load(dump_spec(draw(specs()))))
    mutation = draw(st.sampled_from(_MUTATIONS))
    field = mutation(draw, tree)
    return BrokenSpec(mutation.__name__.strip("_"), field, yaml.safe_dump(tree, sort_keys=False))


_PRINTABLE = st.characters(
    codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="\u2028\u2029\ufeff\ufffe\uffff"
)


def yaml_trees(max_leaves: int = 20) -> st.SearchStrategy[dict[str, Any]]:
    """Draw mappings of anything that YAML can hold, no deeper than the reader allows."""
    texts = st.text(_PRINTABLE, max_size=20) | st.sampled_from(
        ["no", "1e3", "0x10", "1_000", "~", "<<", "name", "null"]
    )
    scalars = (
        st.none()
        | st.booleans()
        | st.integers(-(10**30), 10**30)
        | st.floats(allow_nan=False, allow_infinity=False)
        | texts
    )
    values = st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
        max_leaves=max_leaves,
    )
    return st.dictionaries(texts, values, max_size=5)
