"""Errors name fields as the client did, whatever their names in the engine or another API."""

import asyncio
import re

import pytest
from serve_builders import FakeEngine, chat, completion, post

from shoal.core import InvalidRequest
from shoal.serve.openai.error_field_names import client_field_names

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


class Refusing(FakeEngine):
    """An engine that refuses grammars."""

    async def submit(self, service, prompt, sampling, *others):
        raise InvalidRequest("NoExtensionBias", param="grammar")


def error_of(path, body, engine=None):
    response = asyncio.run(post(path, body, engine))
    assert response.status_code == 400, response.text
    return response.json()["error"]


def responses(**fields):
    return {"model": "chat", "input": "hi"} | fields


def ollama(**options):
    return {"model": "base", "prompt": "hi", "options": options}


def test_quoted_client_text_stays_unchanged():
    with pytest.raises(InvalidRequest) as found, client_field_names({"max_tokens": "options.num_predict"}):
        raise InvalidRequest(
            "max_tokens is 9, and property \"max_tokens\" or 'max_tokens' is unknown", "max_tokens"
        )
    said = "options.num_predict is 9, and property \"max_tokens\" or 'max_tokens' is unknown"
    assert (str(found.value), found.value.param) == (said, "options.num_predict")


def names(message):
    """Names of limits and sampling fields in the engine and all APIs that occur in ``message``."""
    return re.findall(r"[\w.]*(?:_tokens|_predict|_penalty|top_p|temperature)\b", message)


@pytest.mark.parametrize(
    ("path", "body", "param", "named"),
    [
        (CHAT, chat(max_tokens=1000), "max_tokens", ["max_tokens"]),
        (CHAT, chat(max_completion_tokens=1000), "max_completion_tokens", ["max_completion_tokens"]),
        (
            CHAT,
            chat(max_completion_tokens=5, min_tokens=8),
            "min_tokens",
            ["min_tokens", "max_completion_tokens"],
        ),
        (CHAT, chat(messages=[{"role": "user", "content": "x" * 300}]), "messages", []),
        (RESPONSES, responses(max_output_tokens=1000), "max_output_tokens", ["max_output_tokens"]),
        (RESPONSES, responses(input="x" * 300), "input", []),
        ("/v1/completions", completion(prompt="x" * 300), "prompt", []),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_name_the_clients_fields(path, body, param, named, stream):
    error = error_of(path, body | {"stream": stream})
    assert error["param"] == param
    assert names(error["message"]) == named
    if not named:
        assert "tokens of prompt and output together" in error["message"]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_predict": 0}, "options.num_predict"),
        ({"num_predict": 1000}, "options.num_predict"),
        ({"top_p": 7}, "options.top_p"),
        ({"temperature": -1}, "options.temperature"),
        ({"repeat_penalty": 1000}, "options.repeat_penalty"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_ollama_s_errors_name_options(options, name, stream):
    message = error_of("/api/generate", ollama(**options) | {"stream": stream})
    assert names(message) == [name]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, chat(guided_json={"$ref": "#"}), "guided_json"),
        (CHAT, chat(grammar_string='root ::= "a"'), "grammar_string"),
        (CHAT, chat(regex_pattern="a", grammar=""), "regex_pattern"),
        (CHAT, chat(response_format={"type": "regex", "value": "a"}), "response_format"),
        (
            CHAT,
            chat(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="required"),
            "tools",
        ),
        (RESPONSES, responses(text={"format": {"type": "json_object"}}), "text.format"),
        ("/api/generate", ollama() | {"format": {"$ref": "#"}}, "format"),
    ],
)
def test_a_refused_grammar_is_named_by_its_field(path, body, field):
    error = error_of(path, body, Refusing(context=4000))
    message = error if isinstance(error, str) else error["message"]
    assert message == f"{field} cannot be used: NoExtensionBias"
    assert isinstance(error, str) or error["param"] == field


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_no_prompt_is_truncated_to_nothing(path):
    text = {"input": "hi"} if path == "/v1/embeddings" else {"prompt": "hi"}
    error = error_of(path, {"model": "base", "truncate_prompt_tokens": 0, **text})
    assert error["param"] == "truncate_prompt_tokens"
    assert error["message"].startswith("truncate_prompt_tokens must be a valid integer from 1 on, or -1")


def test_an_output_for_which_truncation_makes_no_room_is_the_invalid_field():
    error = error_of("/v1/completions", completion(truncate_prompt_tokens=-1, max_tokens=1000))
    assert error["param"] == "max_tokens"
