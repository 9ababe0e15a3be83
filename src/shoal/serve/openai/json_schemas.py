"""Closes clients' JSON schemas: objects get only declared properties, unless the schema allows others."""

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
"""Keywords that say which properties an object may have besides those in ``properties``."""
_COMBINING = ("allOf", "oneOf", "not", "if", "dependentSchemas", "$dynamicRef", "$recursiveRef")
"""Keywords that apply more than one schema to a value, or a negated one."""


class _OverlappingSchemas(Exception):
    """Several parts of a schema describe one object."""


def close_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """``schema`` with ``additionalProperties: false`` in objects that declare properties and allow no others.

    Most schemas rely on readers not to invent properties; a small model does, without end. What is valid is
    also valid for ``schema``. A schema where several parts describe one object (allOf, oneOf and the like) is
    returned unchanged, because closing one part would exclude the properties of another.
    """
    try:
        return _close(dict(schema))
    except _OverlappingSchemas:
        return dict(schema)


def close_schema_text(text: str) -> str:
    """``close_schema`` of a schema as text; text that is no JSON object is returned unchanged."""
    try:
        schema = json.loads(text)
        return json.dumps(close_schema(schema)) if isinstance(schema, dict) else text
    except (ValueError, RecursionError):
        return text


def _close(schema: dict[str, Any]) -> dict[str, Any]:
    describes = any(name in schema for name in ("properties", "required", "patternProperties"))
    if any(name in schema for name in _COMBINING) or (describes and ("anyOf" in schema or "$ref" in schema)):
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
    min_properties = schema.get("minProperties", 0)
    return (
        not any(name in schema for name in _OPEN)
        and set(map(str, required)) <= set(declared)
        and isinstance(min_properties, int)
        and min_properties <= len(declared)
    )
