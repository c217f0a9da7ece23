"""The JSON schema of specs, by which editors complete and check them."""

from __future__ import annotations

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from .spec import Spec


class _Generator(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        """Leave out titles, which would only repeat the names."""
        return False


def json_schema() -> dict[str, Any]:
    """Give the schema of a spec, draft 2020-12."""
    schema = Spec.model_json_schema(schema_generator=_Generator)
    return {"$schema": _Generator.schema_dialect, **schema, "title": "mlaforge spec"}


def schema_text() -> str:
    """Give the text of specs/schema.json; the same on every machine."""
    return json.dumps(json_schema(), indent=2) + "\n"
