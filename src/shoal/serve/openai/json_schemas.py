"""JSON schemas of clients, read as they mean them: an object has the properties that are declared."""

import json
from collections.abc import Mapping
from typing import Any

_MAPS = ("properties", "$defs", "definitions", "patternProperties")
"""Keywords whose values are schemas by name."""
_SINGLE = ("items", "additionalProperties", "contains", "additionalItems", "propertyNames")
"""Keywords whose value is a schema."""
_LISTS = ("anyOf", "prefixItems", "items")
"""Keywords whose value is a list of schemas."""
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "anyOf", "$ref")
"""Keywords beside ``properties`` that say which others an object may have."""
_SEVERAL_VIEWS = ("allOf", "oneOf", "not", "if", "dependentSchemas", "$dynamicRef", "$recursiveRef")
"""Keywords with which a value must fit more than one schema, or must not fit one."""


class _OverlappingSchemas(Exception):
    """What a schema says of an object is in several places."""


def close_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """``schema``, but objects with declared properties have no others unless it says that they may.

    Most schemas are written for a reader who would not invent properties; a small model does, without end.
    What is valid is also valid for ``schema``. That is returned as it is where parts of it bear on one object
    together (allOf, oneOf and the like), so that closing one would exclude what another asks for.
    """
    try:
        return _close(dict(schema))
    except _OverlappingSchemas:
        return dict(schema)


def close_schema_text(text: str) -> str:
    """The same of a schema as text; text that is no JSON object stays as it is."""
    try:
        schema = json.loads(text)
        return json.dumps(close_schema(schema)) if isinstance(schema, dict) else text
    except (ValueError, RecursionError):
        return text


def _close(schema: dict[str, Any]) -> dict[str, Any]:
    describes = any(name in schema for name in ("properties", "required", "patternProperties"))
    if any(name in schema for name in _SEVERAL_VIEWS) or (
        describes and ("anyOf" in schema or "$ref" in schema)
    ):
        raise _OverlappingSchemas
    result = dict(schema)
    for name in _MAPS:
        if isinstance(members := schema.get(name), dict):
            result[name] = {key: _close_any(member) for key, member in members.items()}
    for name in _SINGLE:
        if isinstance(schema.get(name), dict):
            result[name] = _close(schema[name])
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            result[name] = [_close_any(member) for member in schema[name]]
    if _can_be_closed(schema):
        result["additionalProperties"] = False
    return result


def _close_any(schema: Any) -> Any:
    return _close(schema) if isinstance(schema, dict) else schema


def _can_be_closed(schema: dict[str, Any]) -> bool:
    declared, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(declared, dict) or not isinstance(required, list):
        return False
    least = schema.get("minProperties", 0)
    return (
        not any(name in schema for name in _OPEN)
        and set(map(str, required)) <= set(declared)
        and isinstance(least, int)
        and least <= len(declared)
    )
