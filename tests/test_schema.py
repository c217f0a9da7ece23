"""The JSON schema for editors: complete, explained, and in step with the committed file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mlaforge_generator.schema import json_schema, schema_text

SPECS = Path(__file__).resolve().parents[1] / "specs"


def test_the_committed_schema_is_in_step() -> None:
    assert (SPECS / "schema.json").read_text(encoding="utf-8") == schema_text(), "write schema_text() to schema.json"


def test_the_text_does_not_depend_on_the_process() -> None:
    program = "from mlaforge_generator.schema import schema_text; print(schema_text(), end='')"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert run.stdout == schema_text()


def test_the_text_is_the_schema() -> None:
    assert json.loads(schema_text()) == json_schema()
    assert json_schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def objects(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {"Spec": schema, **schema["$defs"]}


def test_every_field_is_explained_and_no_other_is_allowed() -> None:
    for name, node in objects(json_schema()).items():
        assert node["additionalProperties"] is False, name
        for field, child in node["properties"].items():
            assert len(child.get("description", "")) > 10, f"{name}.{field}"


def test_every_integer_is_bounded_or_listed() -> None:
    def check(node: dict[str, Any], where: str) -> None:
        if node.get("type") in ("integer", "number"):
            assert "enum" in node or "const" in node or {"minimum", "maximum"} <= node.keys(), where
        for option in node.get("anyOf", []):
            check(option, where)

    for name, node in objects(json_schema()).items():
        for field, child in node["properties"].items():
            check(child, f"{name}.{field}")


def test_only_name_and_model_are_required() -> None:
    schema = json_schema()
    assert schema["required"] == ["name", "model"]
    assert all("required" not in schema["$defs"][part] for part in ("Cache", "Kernels", "Decode", "Prefill"))


def test_the_stages_of_decode_are_auto_or_a_bounded_integer() -> None:
    options = json_schema()["$defs"]["Decode"]["properties"]["stages"]["anyOf"]
    assert options == [{"const": "auto", "type": "string"}, {"maximum": 8, "minimum": 1, "type": "integer"}]
