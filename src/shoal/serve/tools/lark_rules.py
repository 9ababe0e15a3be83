"""Lark rules and JSON schemas for tool call arguments, in the syntax of llguidance."""

import json
from collections.abc import Mapping
from typing import Any

from shoal.serve.openai.json_schemas import close_schema

# JSON as models were trained to write it, so that a model cannot fill an output with whitespace.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def literal(text: str) -> str:
    """A terminal that matches exactly ``text``."""
    return json.dumps(text)


def json_rule(schema: Mapping[str, Any]) -> str:
    """The body of a rule that matches JSON that is valid for ``schema``."""
    return f"%json {json.dumps({**schema, 'x-guidance': _LAYOUT})}"


def arguments_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments: an object without undeclared properties.

    Most schemas allow undeclared arguments, but functions rarely accept them.
    """
    declared: dict[str, Any] = {} if any(name in parameters for name in _COMBINATIONS) else {"properties": {}}
    return close_schema({"type": "object", **declared, **parameters})


def call_schema(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of ``{"name": ..., "parameters": {...}}``; definitions stay at the top, for references."""
    schema = arguments_schema(parameters)
    definitions = {key: schema.pop(key) for key in ("$defs", "definitions") if key in schema}
    return definitions | {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": schema},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


_COMBINATIONS = ("$ref", "allOf", "anyOf", "oneOf", "unevaluatedProperties")
