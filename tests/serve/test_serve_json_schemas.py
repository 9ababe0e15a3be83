"""Closed schemas against the validator of the package jsonschema."""

import json

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.serve.openai.json_schemas import close_schema, close_schema_text

NAMES = st.sampled_from(["a", "b", "c"])
VALUES = st.recursive(
    st.none() | st.integers(-2, 2) | st.sampled_from(["x", "y"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


def objects(inner):
    return st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": st.dictionaries(NAMES, inner, max_size=2),
            "required": st.lists(NAMES, max_size=2, unique=True),
            "additionalProperties": st.booleans() | inner,
            "patternProperties": st.dictionaries(st.just("^c"), inner, min_size=1, max_size=1),
            "minProperties": st.integers(0, 2),
        },
    )


def combined(inner):
    lists = st.lists(inner, min_size=1, max_size=2)
    return (
        st.builds(lambda members: {"anyOf": members}, lists)
        | st.builds(lambda members: {"oneOf": members}, lists)
        | st.builds(lambda members: {"allOf": members}, lists)
        | st.builds(lambda inner: {"not": inner}, inner)
        | st.builds(lambda members, own: {**own, "anyOf": members}, lists, objects(inner))
    )


SCHEMAS = st.recursive(
    st.just({}) | st.sampled_from([{"type": "integer"}, {"type": "string"}, {"const": "x"}]),
    lambda inner: (
        objects(inner) | combined(inner) | st.builds(lambda items: {"type": "array", "items": items}, inner)
    ),
    max_leaves=8,
)


@given(SCHEMAS, st.lists(VALUES, min_size=1, max_size=10))
def test_what_is_valid_for_a_closed_schema_is_valid_for_the_schema(schema, values):
    before = json.dumps(schema)
    narrower = close_schema(schema)
    assert json.dumps(schema) == before
    for value in values:
        if jsonschema.Draft202012Validator(narrower).is_valid(value):
            assert jsonschema.Draft202012Validator(schema).is_valid(value)


@given(SCHEMAS)
def test_closing_twice_closes_nothing_more(schema):
    assert close_schema(close_schema(schema)) == close_schema(schema)


def test_only_declared_properties_are_valid():
    point = {"type": "object", "properties": {"x": {"type": "integer"}}}
    schema = {
        "type": "object",
        "properties": {
            "points": {"type": "array", "items": point},
            "either": {"anyOf": [point, {"type": "null"}]},
            "named": {"$ref": "#/$defs/point"},
            "properties": {"type": "string"},
            "const": {"const": point},
        },
        "$defs": {"point": point},
    }
    small = point | {"additionalProperties": False}
    assert close_schema(schema) == {
        "type": "object",
        "properties": {
            "points": {"type": "array", "items": small},
            "either": {"anyOf": [small, {"type": "null"}]},
            "named": {"$ref": "#/$defs/point"},
            "properties": {"type": "string"},
            "const": {"const": point},
        },
        "$defs": {"point": small},
        "additionalProperties": False,
    }
    assert json.loads(close_schema_text(json.dumps(schema))) == close_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"properties": {"a": {}}, "additionalProperties": True},
        {"properties": {"a": {}}, "patternProperties": {"^b": {}}},
        {"properties": {"a": {}}, "required": ["b"]},
        {"properties": {"a": {}}, "minProperties": 2},
        {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"properties": {"b": {}}}]},
        {"properties": {"a": {"properties": {}}}, "allOf": [{"properties": {"b": {}}}]},
        {"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"$ref": "#/$defs/a", "properties": {"b": {}}, "$defs": {"a": {"properties": {"a": {}}}}},
    ],
)
def test_schemas_that_allow_other_properties_stay_open(schema):
    assert close_schema(schema) == schema


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, '"a"'])
def test_other_text_stays_as_it_is(text):
    assert close_schema_text(text) == text
