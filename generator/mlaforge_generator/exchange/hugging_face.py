"""A model's config.json, of Hugging Face transformers or of a repository with code of its own, to a spec.

The field names of a spec are those of config.json, so most of this is about where models differ: names of their own, a
text model inside of a multimodal one, rope_scaling against the rope_parameters of transformers 5. transformers itself
is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .draft import Draft, ForeignFileError, name_of, value_of

_FIELDS: Mapping[str, tuple[str, ...]] = {
    "num_attention_heads": ("num_attention_heads",),
    # The second name of each is openPangu-Ultra-MoE's.
    "kv_lora_rank": ("kv_lora_rank", "attention_kv_lora_dim"),
    "q_lora_rank": ("q_lora_rank", "attention_q_lora_dim"),
    "qk_nope_head_dim": ("qk_nope_head_dim", "attention_qk_dim"),
    "qk_rope_head_dim": ("qk_rope_head_dim", "attention_qk_rope_dim"),
    "v_head_dim": ("v_head_dim", "attention_v_dim"),
    "hidden_size": ("hidden_size",),
    # The second is LongCat-Flash's.
    "num_hidden_layers": ("num_hidden_layers", "num_layers"),
}
"""Names in config.json, by the field of a spec's model."""

_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}

_ROPE_TYPES = {
    **{name: name for name in ("yarn", "longrope", "linear", "dynamic", "llama3")},
    # vLLM's name of DeepSeek's yarn, and Phi-3's first name of longrope.
    "deepseek_yarn": "yarn",
    "su": "longrope",
}
_ROPE = "model.rope_scaling"
_ROPE_FIELDS = ("factor", "mscale", "mscale_all_dim")

_SPARSE = "sparse attention; the kernels attend to every cached token"
_ROTATION = "part of the rotation, whose table the caller makes"
_LAYERS = "num_hidden_layers counts layers of every kind; only those with latent attention need a cache of this kind"
_ATTENTION: Mapping[str, str] = {
    "index_topk": _SPARSE,
    "index_n_heads": _SPARSE,
    "index_head_dim": _SPARSE,
    "indexer_types": _SPARSE,
    "index_kpool": _SPARSE,
    "sliding_window": "attention to a window; the kernels attend to every cached token",
    "layer_types": _LAYERS,
    "layer_group_size": _LAYERS,
    "linear_attn_config": _LAYERS,
    "kv_source_layers": "layers that share a cache",
    "no_rope_layers": _ROTATION,
    "mla_use_nope": "no positional rotation; the kernels take q and k as they are",
    "mla_scale_q_lora": "a factor of the latents, for the projections to apply",
    "mla_scale_kv_lora": "a factor of the latents, for the projections to apply",
    "rope_theta": _ROTATION,
    "partial_rotary_factor": _ROTATION,
    "rope_interleave": "for `interleaved` of mla.append",
    "rope_interleaved": "for `interleaved` of mla.append",
    "attention_bias": "part of the projections",
    "attention_dropout": "training only",
    "attn_logit_softcapping": "the kernels cap no scores",
    "quantization_config": "of the weights; for that of the cache see cache.dtype",
    "llama_4_scaling_beta": "a factor of q by its position, for the caller to apply",
    "apply_yarn_scaling": "the softmax scale follows from mscale_all_dim alone",
    "attention_factor": "a factor of the rotation, whose table the caller makes",
}
"""What else concerns attention, and why it has no place in a spec."""

# What follows from the fields above, and so is lost by nobody.
_DERIVED = {"head_dim", "qk_head_dim", "num_key_value_heads", "q_head_dim"}
_SUSPICIOUS = re.compile(r"attn|attention|rope|rotary|window|sink|qk_|kv_|lora|mla|softmax|logit_scale")


def read_config(tree: Mapping[str, Any], filename: str, settings: Mapping[str, object]) -> Draft:
    """Draft a spec from a config.json.

    Raises:
        ForeignFileError: it is not that of a model with latent attention, or of more than one.
    """
    prefix, config = _language_model(tree, filename)
    draft = Draft(filename, _kind(tree, config, prefix), settings=settings)
    if config.get("use_mla") is False:
        raise ForeignFileError(f"{filename}: {prefix}use_mla: is false: this model has no latent attention")
    _put_name(draft, tree, config, prefix)
    for target, aliases in _FIELDS.items():
        _put_field(draft, config, prefix, target, aliases)
    rope, rope_name = _rope(draft, config, prefix)
    if rope is not None:
        _put_rope(draft, rope, rope_name)
    _put_dtype(draft, tree, config, prefix)
    _keep_the_rest(draft, config, prefix)
    if prefix:
        draft.others += [name_of(name) for name in tree if name not in (prefix.rstrip("."), *_NAMES, *_DTYPE_NAMES)]
    return draft


def _language_model(tree: Mapping[str, Any], filename: str) -> tuple[str, Mapping[str, Any]]:
    """Find what describes the attention: the whole, or the one mapping inside that has a latent."""

    def has_latent(config: Mapping[str, Any]) -> bool:
        return any(name in config for name in _FIELDS["kv_lora_rank"])

    if has_latent(tree):
        return "", tree
    inner = [(name, value) for name, value in tree.items() if isinstance(value, dict) and has_latent(value)]
    if not inner:
        raise ForeignFileError(
            f"{filename}: kv_lora_rank: missing, here and in the configs inside; is this a model with latent attention?"
        )
    if len(inner) > 1:
        names = " and ".join(name_of(name) for name, _ in inner)
        raise ForeignFileError(f"{filename}: {names} each have a kv_lora_rank; keep the one that is meant")
    name, config = inner[0]
    return f"{name}.", config


def _kind(tree: Mapping[str, Any], config: Mapping[str, Any], prefix: str) -> str:
    model = config.get("model_type", tree.get("model_type"))
    of = f" of {value_of(model)}" if model is not None else ""
    inside = f", of which {name_of(prefix.rstrip('.'))} was read" if prefix else ""
    return f"a Hugging Face config{of}{inside}"


_NAMES = ("model_type",)


def _put_name(draft: Draft, tree: Mapping[str, Any], config: Mapping[str, Any], prefix: str) -> None:
    """Name a spec after the whole model: the text model inside is often called by the name of another."""
    if "model_type" in tree:
        draft.put("name", tree["model_type"], "model_type")
    elif "model_type" in config:
        draft.put("name", config["model_type"], f"{prefix}model_type")


def _put_field(draft: Draft, config: Mapping[str, Any], prefix: str, target: str, aliases: Sequence[str]) -> None:
    found = [name for name in aliases if name in config]
    if not found:
        return
    first, *others = found
    draft.put(f"model.{target}", config[first], prefix + first)
    for other in others:
        if config[other] != config[first]:
            values = f"{value_of(config[other])} here and {value_of(config[first])} as {first}"
            draft.fault(
                prefix + other, f"the same thing twice, with {values}; remove one of the two", f"model.{target}"
            )


def _rope(draft: Draft, config: Mapping[str, Any], prefix: str) -> tuple[Mapping[str, Any] | None, str]:
    """Find how the rotation was stretched: rope_parameters since transformers 5, rope_scaling before."""
    found = [(name, config[name]) for name in ("rope_parameters", "rope_scaling") if config.get(name) is not None]
    if not found:
        return None, ""
    # Some configs hold both: the old one as it was published, and the new one made of it.
    name, rope = found[0]
    if not isinstance(rope, dict):
        draft.fault(prefix + name, f"must be an object; got {value_of(rope)}", _ROPE)
        return None, ""
    if len(found) == 2:
        draft.others.append(name_of(prefix + found[1][0]))
    if len(found) == 2 and isinstance(found[1][1], dict):
        old = found[1][1]
        for each in (*_ROPE_FIELDS, "type"):
            one, two = (_rope_type(rope), _rope_type(old)) if each == "type" else (rope.get(each), old.get(each))
            if one != two:
                values = f"{value_of(one)} here and {value_of(two)} in {prefix}{found[1][0]}"
                draft.fault(f"{prefix}{name}.{each}", f"{values}; remove one of the two", f"{_ROPE}.{each}")
    if rope and all(isinstance(value, dict) for value in rope.values()):
        return _rope_of_layers(draft, rope, prefix + name)
    return rope, prefix + name


def _rope_of_layers(draft: Draft, rope: Mapping[str, Any], source: str) -> tuple[Mapping[str, Any] | None, str]:
    """Take the one of all kinds of layers, if they agree in what matters here."""
    kinds = {
        (value_of(_rope_type(each)), *(value_of(each.get(name)) for name in _ROPE_FIELDS)): f"{source}.{layer}"
        for layer, each in rope.items()
    }
    first = next(iter(rope))
    if len(kinds) > 1:
        layers = ", ".join(map(name_of, rope))
        draft.fault(
            source, f"differs by kind of layer, {layers}; --set {_ROPE}=VALUE gives the one that is meant", _ROPE
        )
        return None, ""
    for layer in list(rope)[1:]:
        draft.others.append(name_of(f"{source}.{layer}"))
    return rope[first], f"{source}.{first}"


def _rope_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _put_rope(draft: Draft, rope: Mapping[str, Any], source: str) -> None:
    kind = _rope_type(rope)
    type_name = f"{source}.{'rope_type' if 'rope_type' in rope else 'type'}"
    if "type" in rope and "rope_type" in rope and rope["type"] != rope["rope_type"]:
        values = f"{value_of(rope['type'])} here and {value_of(kind)} as rope_type"
        draft.fault(f"{source}.type", f"{values}; remove one of the two", f"{_ROPE}.type")
    used = {"type", "rope_type"}
    if kind not in ("default", None):
        if isinstance(kind, str) and kind in _ROPE_TYPES:
            draft.put(f"{_ROPE}.type", _ROPE_TYPES[kind], type_name)
            for name in _ROPE_FIELDS:
                if rope.get(name) is not None:
                    draft.put(f"{_ROPE}.{name}", rope[name], f"{source}.{name}")
                    used.add(name)
        else:
            # It may change the softmax scale: nobody but the user knows.
            known = ", ".join(("default", *_ROPE_TYPES))
            draft.fault(type_name, f"must be one of {known}; got {value_of(kind)}", f"{_ROPE}.type")
    for name, value in rope.items():
        if name not in used and value is not None:
            draft.note(f"{source}.{name}", value, _ATTENTION.get(name, _ROTATION))


_DTYPE_NAMES = ("dtype", "torch_dtype")


def _put_dtype(draft: Draft, tree: Mapping[str, Any], config: Mapping[str, Any], prefix: str) -> None:
    for source, value in _dtypes(tree, config, prefix):
        word = str(value).removeprefix("torch.")
        if word in _DTYPES:
            draft.put("cache.dtype", _DTYPES[word], source)
        else:
            draft.note(source, value, "no type of a cache: see cache.dtype, which is bf16 unless it is set")
        return


def _dtypes(tree: Mapping[str, Any], config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for place, before in ((config, prefix), (tree, "")):
        for name in _DTYPE_NAMES:
            if place.get(name) is not None:
                yield before + name, place[name]


def _keep_the_rest(draft: Draft, config: Mapping[str, Any], prefix: str) -> None:
    """Note what concerns attention, name the rest; what is off or absent concerns nobody."""
    taken = set(draft.sources.values())
    for name, value in config.items():
        source = prefix + name
        if source in taken or name in (*_NAMES, *_DTYPE_NAMES, "rope_parameters", "rope_scaling"):
            continue
        if any(name in aliases for aliases in _FIELDS.values()):
            continue
        if name == "qk_head_dim":
            _check_sum(draft, config, source, value)
        off = value is None or value is False or value in ([], {}, 0)
        # A list of what layers there are says nothing if they are all alike.
        off |= name == "layer_types" and isinstance(value, list) and all(each == "full_attention" for each in value)
        if name in _ATTENTION and not off:
            draft.note(source, value, _ATTENTION[name])
            if name == "quantization_config":
                _note_cache_scheme(draft, source, value)
        elif _SUSPICIOUS.search(name) and name not in _DERIVED and not off:
            draft.note(source, value, "not known here; see whether it changes attention")
        else:
            draft.others.append(name_of(source))


def _note_cache_scheme(draft: Draft, source: str, value: object) -> None:
    """Tell of a quantised cache: which format it is in depends on what serves the model."""
    for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
        if isinstance(value, dict) and value.get(name) is not None:
            why = "of the cache; --set cache.dtype=fp8_e4m3, or another format, gives it"
            draft.note(f"{source}.{name}", value[name], why)


def _check_sum(draft: Draft, config: Mapping[str, Any], source: str, value: object) -> None:
    parts = [draft.tree.get("model", {}).get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if all(type(part) is int for part in parts) and value not in (None, sum(parts)):
        draft.fault(source, f"is {value_of(value)}, but qk_nope_head_dim + qk_rope_head_dim is {sum(parts)}")
