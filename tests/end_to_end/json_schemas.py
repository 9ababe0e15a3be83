"""JSON schemas of every kind that is supported: some by hand, and random ones."""

from random import Random
from typing import Any

Schema = dict[str, Any]

NULL = {"type": "null"}
SHORT = {"type": "string", "maxLength": 8}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def obj(properties: Schema, *required: str, **more: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
        **more,
    }


def array(items: Any, least: int = 0, most: int = 4, **more: Any) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most, **more}


BY_HAND: list[Schema] = [
    {"type": "null"},
    {"type": "boolean"},
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    {"type": "number", "minimum": 0.5, "maximum": 2.5},
    {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 70},
    {"type": "integer", "multipleOf": 3, "minimum": 1, "maximum": 10},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
    {"type": ["boolean", "null"]},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "string", "maxLength": 0},
    {"type": "string", "pattern": "^[a-f]{2,4}$"},
    {"type": "string", "pattern": "^(\\d{3})-(\\d{4})$"},
    {"type": "string", "pattern": "^a[^b]{1,5}b$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"enum": ["red", "green", 3, None, True, {"a": [1, 2]}, [0.5]]},
    {"enum": ["a\"b\\c\n", "\u00e9\u4e2d", "\U0001f600"]},
    {"const": "only"},
    {"const": {"a": [1, {"b": None}]}},
    {"const": -0.25},
    {"type": "object", "maxProperties": 0},
    obj({}),
    obj({"a": DIGIT}, "a"),
    obj({"a": DIGIT, "b": SHORT}),
    obj({"a": DIGIT, "b": SHORT}, "b"),
    obj({"a": {"type": "boolean"}, "b": {"type": "null"}, "c": DIGIT}, "c", "a"),
    obj({"a b": DIGIT, "\u00fc\"\\/": {"type": "boolean"}, "": {"type": "null"}}, "a b", "\u00fc\"\\/", ""),
    obj({"deep": obj({"deeper": obj({"deepest": DIGIT}, "deepest")}, "deeper")}, "deep"),
    obj({"__proto__": DIGIT, "constructor": DIGIT}, "__proto__"),
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 1},
    {**obj({"a": DIGIT}, "a"), "additionalProperties": {"type": "null"}},
    {"type": "object", "patternProperties": {"^x[0-9]$": DIGIT}, "additionalProperties": False},
    array(DIGIT),
    array(DIGIT, 2, 2),
    array(array(DIGIT, 1, 2), 1, 2),
    array({"enum": ["x", "y"]}, 1, 5),
    {"type": "array", "prefixItems": [DIGIT, {"type": "boolean"}], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [DIGIT, SHORT], "items": {"type": "null"}, "maxItems": 4},
    {"type": "array", "maxItems": 0},
    {"anyOf": [DIGIT, {"type": "boolean"}]},
    {"anyOf": [obj({"a": DIGIT}, "a"), obj({"b": SHORT}, "b")]},
    {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]},
    {"oneOf": [obj({"k": {"const": "a"}, "v": DIGIT}, "k"), obj({"k": {"const": "b"}, "v": SHORT}, "k")]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 8}]},
    {"allOf": [{"type": "object", "properties": {"a": DIGIT}, "required": ["a"]}], "maxProperties": 1},
    {"$defs": {"d": DIGIT}, "type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": 3},
    {
        "$defs": {"a/b": DIGIT, "c%d": {"type": "null"}},
        "anyOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/c%25d"}],
    },
    {"$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"type": "boolean"}}, "$ref": "#/$defs/x"},
    {
        "$defs": {"node": obj({"v": DIGIT, "next": {"anyOf": [{"$ref": "#/$defs/node"}, NULL]}}, "v")},
        "$ref": "#/$defs/node",
    },
    {"definitions": {"n": array({"$ref": "#/definitions/n"}, 0, 2)}, "$ref": "#/definitions/n"},
    {"title": "T", "description": "D", "default": 1, "examples": [2], "$comment": "c", **DIGIT},
]  # fmt: skip


def _random_leaf(random: Random) -> Schema:
    low, span = random.randint(-99, 99), random.randint(0, 200)
    least, most = random.randint(0, 3), random.randint(1, 6)
    letters = random.choice(["a-z", "A-F0-9", "xyz "])
    values = ["one", "two", 3, None, False, [], {}, "\u00fc"]
    leaves: list[Schema] = [
        {"type": random.choice(["null", "boolean"])},
        {"type": "integer", "minimum": low, "maximum": low + span},
        {"type": "number", "minimum": -least, "maximum": span / 4},
        {"type": "integer", "multipleOf": most + 1, "minimum": 0, "maximum": 100},
        {"type": "string", "minLength": least, "maxLength": least + most},
        {"type": "string", "pattern": f"^[{letters}]{{1,{most}}}$"},
        {"enum": random.sample(values, random.randint(1, 4))},
        {"const": random.choice(["fixed", 0, [1, "a"], {"k": None}])},
        {"type": "string", "format": random.choice(["date", "time", "uuid", "ipv4"])},
    ]
    return random.choice(leaves)


def random_schema(random: Random, depth: int = 3) -> Schema:
    """A schema nested at most ``depth`` deep, whose shortest values are short."""
    if depth == 0 or random.random() < 0.35:
        return _random_leaf(random)
    kind = random.choice(["object", "object", "array", "anyOf", "tuple"])
    parts = [random_schema(random, depth - 1) for _ in range(random.randint(1, 3))]
    if kind == "array":
        least = random.randint(0, 2)
        return array(parts[0], least, least + random.randint(0, 2))
    if kind == "anyOf":
        return {"anyOf": parts}
    if kind == "tuple":
        return {
            "type": "array",
            "prefixItems": parts,
            "items": False,
            "minItems": random.randint(0, len(parts)),
        }
    names = random.sample(["id", "name", "first name", "x-y", "\u00e4", "list", "9"], len(parts))
    required = [name for name in names if random.random() < 0.6]
    return obj(dict(zip(names, parts, strict=True)), *required)


def all_schemas(count: int = 200) -> list[Schema]:
    """Those by hand, and random ones, the same at every call."""
    random = Random(15)
    return BY_HAND + [random_schema(random) for _ in range(count - len(BY_HAND))]
