"""A plugin's JSON in the manner of TensorRT-LLM, `{"mla_plugin": {...}}`, from and to a spec.

What the plugin's fields can't say stands beside them in an object `mlaforge`, in the words of a spec, so that a spec
comes back as it was. No fact stands twice, but for `num_stages` of a spec that leaves it to the planner: readers need a
number, and it is the planner's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..plan import Plan, make_plan
from ..spec import Spec, check_spec
from .draft import Draft, name_of, value_of

PLUGIN = "mla_plugin"
_REST = "mlaforge"

_FIELDS: Mapping[str, str] = {
    "name": "name",
    "num_heads": "model.num_attention_heads",
    "head_dim_content": "model.qk_nope_head_dim",
    "latent_kv_dim": "model.kv_lora_rank",
    "rope_dim": "model.qk_rope_head_dim",
    "page_size": "cache.page_size",
    "prefill_absorption_threshold": "dispatch.prefill_absorption_threshold",
}
"""Fields of a spec that are the plugin's under another name."""

_DTYPES = {
    **{name: "bf16" for name in ("bf16", "bfloat16")},
    **{name: "fp16" for name in ("fp16", "float16", "half")},
    # Elsewhere fp8 is e4m3, with one scale for the cache.
    **{name: "fp8_e4m3" for name in ("fp8", "e4m3", "float8_e4m3fn")},
}
_FLOAT32 = ("fp32", "float32", "float")


def read_plugin(tree: Mapping[str, Any], filename: str, settings: Mapping[str, object]) -> Draft:
    """Draft a spec from a plugin's JSON, which may have been written by `write_plugin` or by others."""
    draft = Draft(filename, "a plugin's JSON", settings=settings)
    plugin, rest = tree[PLUGIN], tree.get(_REST, {})
    for name, value in ((PLUGIN, plugin), (_REST, rest)):
        if not isinstance(value, dict):
            draft.fault(name, f"must be an object; got {value_of(value)}")
            return draft
    _put_rest(draft, rest, (_REST,))
    for name, value in plugin.items():
        source = f"{PLUGIN}.{name}"
        if name in _FIELDS:
            draft.put(_FIELDS[name], value, source)
        elif name == "kv_cache_dtype":
            draft.put("cache.dtype", _DTYPES.get(value, value) if isinstance(value, str) else value, source)
        elif name == "rope_compute_dtype":
            if value not in _FLOAT32:
                draft.note(source, value, "rotations are computed in float32")
        elif name == "enable_matrix_absorption":
            if value is not True:
                draft.note(source, value, "decode always absorbs the projections")
        elif name not in ("tile_s", "num_stages"):
            draft.note(source, value, "not known here")
    draft.others += [name_of(name) for name in tree if name not in (PLUGIN, _REST)]
    put_tuning(draft, plugin, f"{PLUGIN}.", "tile_s", "num_stages")
    return draft


def _put_rest(draft: Draft, value: Any, path: tuple[str, ...]) -> None:
    """Take a mapping's leaves; what is no field of a spec is found when the whole is checked."""
    if isinstance(value, dict) and value:
        for name, child in value.items():
            if "." in name:
                draft.fault(".".join((*path, name)), "unknown field")
            else:
                _put_rest(draft, child, (*path, name))
    elif len(path) > 1:
        draft.put(".".join(path[1:]), value, ".".join(path))


def put_tuning(draft: Draft, values: Mapping[str, Any], prefix: str, tile_name: str, stages_name: str) -> None:
    """Take the size of a tile and the stages, which were another kernel's, as far as ours can have them."""
    tile, stages = "kernels.decode.tile_tokens", "kernels.decode.stages"
    if tile_name in values:
        value, source = values[tile_name], prefix + tile_name
        if why := _why_invalid(draft, tile, value):
            draft.note(source, value, why)
        else:
            draft.put(tile, value, source)
    if stages_name not in values:
        return
    value, source = values[stages_name], prefix + stages_name
    if stages in draft.sources:
        planned = _plan(draft, {})
        if planned is not None and value != planned.decode.tile.stages:
            auto, takes = draft.sources[stages], planned.decode.tile.stages
            draft.note(source, value, f"{auto} leaves it to the planner, which takes {takes}")
    elif why := _why_invalid(draft, stages, value):
        draft.note(source, value, why)
    elif _plan(draft, {}) is not None and _plan(draft, {stages: value}) is None:
        draft.note(source, value, f"no kernel of this shape has so many; {stages} is left to the planner")
    else:
        draft.put(stages, value, source)


def trial_spec(draft: Draft, settings: Mapping[str, object]) -> Spec:
    """Check the spec as it stands, under a name that is none of its faults."""
    trial = Draft(draft.filename, draft.kind, draft.tree, settings={**draft.settings, **settings, "name": "trial"})
    return check_spec(trial.whole())


def _why_invalid(draft: Draft, target: str, value: object) -> str:
    try:
        trial_spec(draft, {target: value})
    except SpecError as error:
        return next((f"{target} {each.message}" for each in error.problems if each.field == target), "")
    return ""


def _plan(draft: Draft, settings: Mapping[str, object]) -> Plan | None:
    try:
        return make_plan(trial_spec(draft, settings))
    except SpecError:
        return None


def write_plugin(plan: Plan) -> str:
    """Write the JSON of a plan's spec."""
    spec = plan.spec
    tree = spec.model_dump(exclude_none=True)
    first = ("name", "num_heads", "head_dim_content", "latent_kv_dim", "rope_dim")
    plugin: dict[str, Any] = {name: _take(tree, _FIELDS[name]) for name in first}
    plugin["tile_s"] = _take(tree, "kernels.decode.tile_tokens")
    if spec.kernels.decode.stages != "auto":
        plugin["num_stages"] = _take(tree, "kernels.decode.stages")
    else:
        plugin["num_stages"] = plan.decode.tile.stages
    plugin["page_size"] = _take(tree, _FIELDS["page_size"])
    plugin["enable_matrix_absorption"] = True
    plugin["prefill_absorption_threshold"] = _take(tree, _FIELDS["prefill_absorption_threshold"])
    plugin["rope_compute_dtype"] = "fp32"
    plugin["kv_cache_dtype"] = _take(tree, "cache.dtype")
    return json.dumps({PLUGIN: plugin, _REST: _without_empty(tree)}, indent=2) + "\n"


def _take(tree: dict[str, Any], target: str) -> Any:
    *parents, name = target.split(".")
    for parent in parents:
        tree = tree[parent]
    return tree.pop(name)


def _without_empty(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_empty(value) if isinstance(value, dict) else value for name, value in tree.items() if value != {}
    }
