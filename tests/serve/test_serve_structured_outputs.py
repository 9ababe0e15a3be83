"""Fields for structured outputs over HTTP, in front of a fake engine."""

import asyncio
import json

import pytest
from serve_builders import FakeEngine, chat, completion, make_app, make_client, post

from shoal.core import Grammar, GrammarKind, InvalidRequest
from shoal.core.grammar import MAX_GRAMMAR_BYTES

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
WRITTEN = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA | {"additionalProperties": False}))
ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
JSON_SCHEMA = {"name": "thing", "description": "A thing.", "schema": SCHEMA, "strict": True}
CHOICES = Grammar(GrammarKind.LARK, 'start: "red" | "gr\\u00fcn\\n"')
REGEX = Grammar(GrammarKind.REGEX, "[0-9]+")
LARK = Grammar(GrammarKind.LARK, 'start: "a"+')
ACCEPTED = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
    ({"response_format": {"type": "json_schema", "json_schema": JSON_SCHEMA}}, WRITTEN),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}}, ANY_OBJECT),
    ({"structured_outputs": {}}, None),
    ({"structured_outputs": None, "guided_json": None}, None),
    ({"structured_outputs": {"json": SCHEMA}}, WRITTEN),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, WRITTEN),
    ({"structured_outputs": {"regex": "[0-9]+", "disable_fallback": True}}, REGEX),
    ({"structured_outputs": {"choice": ["red", "grün\n"]}}, CHOICES),
    ({"structured_outputs": {"grammar": 'start: "a"+'}}, LARK),
    ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
    ({"structured_outputs": {"json_object": False}}, None),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, WRITTEN),
    ({"guided_json": json.dumps(SCHEMA)}, WRITTEN),
    ({"guided_regex": "[0-9]+"}, REGEX),
    ({"guided_choice": ["red", "grün\n"]}, CHOICES),
    ({"guided_grammar": 'start: "a"+', "response_format": {"type": "text"}}, LARK),
]
REFUSED = [
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "text", "json_schema": JSON_SCHEMA}}, "response_format"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}, "response_format"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"yaml": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_choice": "red"}, "guided_choice"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"guided_regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "guided_regex"),
    ({"guided_json": {"enum": ["a" * MAX_GRAMMAR_BYTES]}}, "guided_json"),
]


@pytest.mark.parametrize(("fields", "grammar"), ACCEPTED, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_fields_become_grammars(path, fields, grammar):
    engine = FakeEngine()
    body = completion(**fields) if path == "/v1/completions" else chat(**fields)
    assert asyncio.run(post(path, body, engine)).status_code == 200
    assert engine.submitted[0].sampling.grammar == grammar


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_contradictions_are_refused(fields, param):
    engine = FakeEngine()
    response = asyncio.run(post("/v1/chat/completions", chat(**fields), engine))
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert not engine.submitted


class Refusing(FakeEngine):
    """An engine that refuses grammars."""

    async def submit(self, service, prompt, sampling, *others):
        raise InvalidRequest('Unimplemented keys: ["if"]', param="grammar")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", ["guided_json", "structured_outputs.json"])
def test_the_engines_errors_about_a_grammar_name_the_field(field, stream):
    name, _, inner = field.partition(".")
    fields = {name: {inner: {"if": {}}} if inner else {"if": {}}, "stream": stream}

    async def ask():
        async with make_client(make_app(Refusing())) as client:
            return await client.post("/v1/chat/completions", json=chat(**fields))

    response = asyncio.run(ask())
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert error["message"] == f'{field} cannot be used: Unimplemented keys: ["if"]'


def test_a_schema_that_is_nested_too_deep_is_refused():
    deep = '{"items":' * 10_000 + "{}" + "}" * 10_000
    body = '{"model": "chat", "messages": [{"role": "user", "content": "hi"}], "guided_json": ' + deep + "}"
    response = asyncio.run(post("/v1/chat/completions", body.encode()))
    assert response.status_code == 400
