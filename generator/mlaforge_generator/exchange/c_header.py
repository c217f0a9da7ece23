"""A C header of constants, `static const int kNumHeads = 128;` and so on, from and to a spec.

The header is valid C and C++. Read is that form and the others of the field: constexpr, enumerators and #define, with
plain literals; a header is scanned, not compiled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import SpecError
from ..plan import Plan
from .draft import Draft, name_of, value_of
from .plugin_json import put_tuning, trial_spec

_TILE, _STAGES = "kTileS", "kNumStages"
_FIELDS: Mapping[str, str] = {
    "kNumHeads": "model.num_attention_heads",
    "kHeadDimC": "model.qk_nope_head_dim",
    "kLatentKV": "model.kv_lora_rank",
    "kRopeDim": "model.qk_rope_head_dim",
    "kHiddenDim": "model.hidden_size",
    "kNumLayers": "model.num_hidden_layers",
    "kPrefillThresh": "dispatch.prefill_absorption_threshold",
    # The field's names end here. What follows says the rest of a spec.
    "kName": "name",
    "kHeadDimV": "model.v_head_dim",
    "kQLoraRank": "model.q_lora_rank",
    "kRopeScalingType": "model.rope_scaling.type",
    "kRopeScalingFactor": "model.rope_scaling.factor",
    "kRopeScalingMscale": "model.rope_scaling.mscale",
    "kRopeScalingMscaleAllDim": "model.rope_scaling.mscale_all_dim",
    "kTensorParallel": "tensor_parallel",
    "kCacheDtype": "cache.dtype",
    "kPageSize": "cache.page_size",
    "kTarget": "target",
    "kDecodeSchedule": "kernels.decode.schedule",
    "kDecodeTileRows": "kernels.decode.tile_rows",
    "kDecodeStages": "kernels.decode.stages",
    "kPrefillTileQ": "kernels.prefill.tile_q",
    "kPrefillTileKV": "kernels.prefill.tile_kv",
    "kPrefillStages": "kernels.prefill.stages",
}
"""Fields of a spec by the name of their constant; not among them are kTileS and kNumStages."""

_SCALE = "kSoftmaxScale"

_TOKEN = re.compile(
    r"""
    (?P<comment>//[^\n]*|/\*.*?(?:\*/|\Z))
  | (?P<splice>\\\n)
  | (?P<newline>\n)
  | (?P<text>"(?:[^"\\\n]|\\.)*")
  | (?P<name>[A-Za-z_]\w*)
  | (?P<number>\.?[0-9](?:'[0-9A-Za-z]|[eEpP][-+]|[0-9A-Za-z_.])*)
  | (?P<space>[ \t\r\f\v]+)
  | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_INTEGER = re.compile(r"(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9][0-9]*)[uUlLzZ]{0,3}")
_FLOAT = re.compile(r"((?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?)[fFlL]?")
_CONSTANT = re.compile("k[A-Z]")
_MAX_DIGITS = 40


def read_header(text: str, filename: str, settings: Mapping[str, object]) -> Draft:
    """Draft a spec from a header of constants, which may have been written by `write_header` or by others."""
    draft = Draft(filename, "a C header of constants", settings=settings)
    values: dict[str, Any] = {}
    for name, words in _definitions(text):
        value = _literal(words)
        known = name in _FIELDS or name in (_TILE, _STAGES)
        if value is None:
            if known:
                target = _FIELDS.get(name, name)
                draft.fault(name, f"must be a plain literal; got {value_of(' '.join(words))}", target)
                draft.sources[target] = name
            elif _CONSTANT.match(name):
                draft.note(name, " ".join(words), "not known here")
        elif name in values and values[name] != value:
            draft.fault(
                name, f"written twice, as {value_of(values[name])} and {value_of(value)}; remove one of the two"
            )
        else:
            values[name] = value
    for name, value in values.items():
        if name in _FIELDS:
            draft.put(_FIELDS[name], value, name)
        elif name not in (_TILE, _STAGES, _SCALE):
            if _CONSTANT.match(name):
                draft.note(name, value, "not known here")
            else:
                draft.others.append(name_of(name))
    put_tuning(draft, values, "", _TILE, _STAGES)
    if _SCALE in values:
        _check_scale(draft, values[_SCALE])
    return draft


def _check_scale(draft: Draft, value: object) -> None:
    """Compare a softmax scale, which follows from the rest, with what follows."""
    try:
        scale = trial_spec(draft, {}).softmax_scale
    except SpecError:
        return
    if not (isinstance(value, float | int) and math.isclose(value, scale, rel_tol=1e-6)):
        draft.note(_SCALE, value, f"the softmax scale of the spec is {scale:.9g}")


def _definitions(text: str) -> Iterator[tuple[str, list[str]]]:
    """Give the names that are defined, and the words of what they are defined as."""
    tokens = [
        (match.lastgroup, match.group())
        for match in _TOKEN.finditer(text.replace("\r\n", "\n"))
        if match.lastgroup not in ("comment", "space", "splice")
    ]
    # So that looking ahead needs no care.
    tokens += [("newline", "\n")] * 3
    i = 0
    while i < len(tokens) - 3:
        words: list[str] = []
        (kind, word), following, third = tokens[i], tokens[i + 1][1], tokens[i + 2]
        i += 1
        if word == "#" and following == "define" and third[0] == "name":
            name = third[1]
            i += 2
            while tokens[i][0] != "newline":
                words.append(tokens[i][1])
                i += 1
            # An include guard has no value.
            if words:
                yield name, words
        elif kind == "name":
            if [following, third[1]] == ["[", "]"]:
                i += 2
            opener = tokens[i][1]
            if opener == "=" and tokens[i + 1][1] != "=":
                closers, depth = {";", ",", "}"}, 0
            elif opener == "{" and _CONSTANT.match(word):
                closers, depth = {"}"}, 0
            else:
                continue
            i += 1
            while i < len(tokens) - 3 and not (depth == 0 and tokens[i][1] in closers):
                depth += {"{": 1, "}": -1}.get(tokens[i][1], 0)
                if tokens[i][1] not in ("{", "}", "\n"):
                    words.append(tokens[i][1])
                i += 1
            yield word, words


def _literal(words: list[str]) -> int | float | str | None:
    """Read a plain literal, which may stand in parentheses or have a sign; None if it is none."""
    while len(words) > 2 and words[0] == "(" and words[-1] == ")":
        words = words[1:-1]
    sign = ""
    if len(words) == 2 and words[0] in ("-", "+"):
        sign, words = words[0], words[1:]
    if len(words) != 1:
        return None
    word = words[0]
    if word.startswith('"'):
        return None if sign or "\\" in word else word[1:-1]
    if len(word) > _MAX_DIGITS:
        return None
    word = word.replace("'", "")
    if match := _INTEGER.fullmatch(word):
        digits = match.group(1)
        octal = digits.startswith("0") and digits.isdigit() and len(digits) > 1
        value = int(digits, 8) if octal else int(digits, 0)
        return -value if sign == "-" else value
    if match := _FLOAT.fullmatch(word):
        return float(sign + match.group(1))
    return None


def write_header(plan: Plan) -> str:
    """Write the header of a plan's spec."""
    spec = plan.spec
    tree = spec.model_dump(exclude_none=True)
    guard = f"MLAFORGE_{spec.name.upper()}_CONSTANTS_H"
    lines = [
        f"// The spec {spec.name}, by mlaforge. C and C++.",
        f"#ifndef {guard}",
        f"#define {guard}",
        "",
    ]
    for name, target in _FIELDS.items():
        value = _value(tree, target)
        if target == "kernels.decode.schedule":
            tile = spec.kernels.decode.tile_tokens
            stages = spec.kernels.decode.stages
            lines.append(_constant(_TILE, tile, "kernels.decode.tile_tokens"))
            what = "kernels.decode.stages" if stages != "auto" else "what the planner chose for kernels.decode.stages"
            lines.append(_constant(_STAGES, plan.decode.tile.stages, what))
        if value is None or (name == "kDecodeStages" and value != "auto"):
            # What is absent in the spec is absent here, and a number of stages is kNumStages.
            continue
        lines.append(_constant(name, value, target))
    lines.append(_constant(_SCALE, spec.softmax_scale, "what logits are multiplied with"))
    lines += ["", f"#endif  // {guard}"]
    return "\n".join(lines) + "\n"


def _value(tree: Mapping[str, Any], target: str) -> Any:
    value: Any = tree
    for part in target.split("."):
        if part not in value:
            return None
        value = value[part]
    return value


def _constant(name: str, value: object, what: str) -> str:
    if isinstance(value, str):
        return f'static const char {name}[] = "{value}";  // {what}'
    kind = "double" if isinstance(value, float) else "int"
    return f"static const {kind} {name} = {value!r};  // {what}"
