"""The reference of specs for people, docs/spec.md: made of the schema, so that it says what is checked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from .schema import json_schema

_HEAD = """\
# The spec

<!-- Made by `mlaforge schema --format markdown`. Do not edit: change the descriptions in spec.py. -->

A spec is one YAML file: the attention of one model, its cache, and what its kernels may choose. Fields have the names
of Hugging Face's config.json. `name` and `model` are needed, all else has a default. `auto` leaves a choice to the
planner; `mlaforge plan` says what it chose, and why.

```yaml
name: my_model
model:
  num_attention_heads: 128
  kv_lora_rank: 512
  qk_nope_head_dim: 128
  qk_rope_head_dim: 64
  v_head_dim: 128
```

A field that is not listed here, a wrong type, a value out of bounds or a key that stands there twice is an error that
names file, line and field; all errors of a file come at once. Where an integer is needed, neither `64.0` nor `"64"` is
one.

What is listed here is what a spec may say. Not every such spec has kernels: which widths they need is for the planner,
whose errors name the field, the limit and what to change.
"""


def reference_text() -> str:
    """Give the text of docs/spec.md; the same on every machine."""
    schema = json_schema()
    return _HEAD + "".join(_sections(schema, schema, "")) + _TAIL


_TAIL = """
Editors complete and check specs by [specs/schema.json](../specs/schema.json), which has the same source:
`# yaml-language-server: $schema=schema.json` in the first line of a spec beside it.
"""


def _sections(schema: Mapping[str, Any], node: Mapping[str, Any], path: str) -> Iterator[str]:
    """Give the section of a mapping, then those of the mappings in it."""
    required = node.get("required", ())
    yield f"\n## {f'`{path}`' if path else 'Top level'}\n\n"
    if path:
        yield f"{node['description']}\n\n"
    yield "| field | allowed | default | meaning |\n|---|---|---|---|\n"
    inner = []
    for name, field in node["properties"].items():
        mapping = _mapping(schema, field)
        if mapping is not None:
            inner.append((f"{path}.{name}" if path else name, mapping))
        allowed = " or ".join(_allowed(schema, field))
        default = "needed" if name in required else _default(field, mapping)
        yield f"| `{name}` | {_cell(allowed)} | {default} | {_cell(field['description'])} |\n"
    for name, mapping in inner:
        yield from _sections(schema, mapping, name)


def _resolve(schema: Mapping[str, Any], node: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" not in node:
        return node
    resolved: Mapping[str, Any] = schema["$defs"][node["$ref"].rpartition("/")[2]]
    return resolved


def _options(schema: Mapping[str, Any], node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [_resolve(schema, option) for option in node.get("anyOf", [node])]


def _mapping(schema: Mapping[str, Any], node: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return next((option for option in _options(schema, node) if option.get("type") == "object"), None)


def _allowed(schema: Mapping[str, Any], node: Mapping[str, Any]) -> Iterator[str]:
    for option in _options(schema, node):
        kind = option.get("type")
        if "enum" in option or "const" in option:
            values = option.get("enum", [option.get("const")])
            yield ", ".join(f"`{value if isinstance(value, str) else json.dumps(value)}`" for value in values)
        elif kind == "null":
            yield "`null`"
        elif kind == "object":
            yield "a mapping"
        elif kind == "string":
            yield f"text of the form `{option['pattern']}`"
        else:
            noun = {"integer": "an integer", "number": "a number"}[str(kind)]
            yield f"{noun} from {option['minimum']:,} to {option['maximum']:,}"


def _default(field: Mapping[str, Any], mapping: Mapping[str, Any] | None) -> str:
    if mapping is not None and "default" not in field:
        return "its defaults"
    value = field.get("default")
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _cell(text: str) -> str:
    """Keep text of the schema from ending a table's cell."""
    return text.replace("|", "\\|")
