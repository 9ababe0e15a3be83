"""Unknown fields: ignored, mapped or refused, and never lost where they affect the output."""

import asyncio
import json
import logging

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from serve_builders import FakeEngine, chat, completion, events, make_app, make_client, post, tool

from shoal.core import GrammarKind, InvalidRequest
from shoal.serve.body_parsing import read_body
from shoal.serve.ollama.request_bodies import Options
from shoal.serve.openai.other_server_fields import OtherServerFields
from shoal.serve.openai.request_bodies import ChatBody, CompletionBody
from shoal.serve.unknown_fields import IgnoredFieldLog, nearest_name

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"
USER = {"role": "user", "content": "hi"}
BODIES = {
    COMPLETIONS: completion(),
    CHAT: chat(),
    RESPONSES: {"model": "chat", "input": "hi"},
    "/v1/responses/input_tokens": {"model": "chat", "input": "hi"},
    "/v1/embeddings": {"model": "base", "input": "hi"},
    "/tokenize": {"model": "base", "prompt": "hi"},
    "/detokenize": {"model": "base", "tokens": [5]},
    OLLAMA_CHAT: {"model": "chat", "messages": [USER], "stream": False},
    OLLAMA_GENERATE: {"model": "base", "prompt": "hi", "stream": False},
    "/api/embed": {"model": "base", "input": "hi"},
    "/api/embeddings": {"model": "base", "prompt": "hi"},
    "/api/show": {"model": "base"},
}
GENERATING = (COMPLETIONS, CHAT, RESPONSES, OLLAMA_CHAT, OLLAMA_GENERATE)


APP = make_app()  # belongs to one event loop
RUNNER = asyncio.Runner()


@pytest.fixture(scope="module", autouse=True)
def closed_at_the_end():
    yield
    RUNNER.close()


def ask(path, fields, status=200, engine=None, **options):
    async def main():
        async with make_client(make_app(engine, **options) if engine or options else APP) as client:
            return await client.post(path, json=BODIES[path] | fields)

    response = RUNNER.run(main())
    assert response.status_code == status, response.text
    return response.json()


def error_of(path, fields):
    error = ask(path, fields, 400)["error"]
    return (None, error) if isinstance(error, str) else (error["param"], error["message"])


def sampling_of(path, fields):
    """The request that reaches the engine."""
    engine = FakeEngine()
    ask(path, fields, engine=engine)
    return engine.submitted[0].sampling


def prompt_of(fields, template):
    """The engine's prompt of a chat with a template."""
    engine = FakeEngine()

    async def main():
        async with make_client(make_app(engine, template)) as client:
            response = await client.post(CHAT, json=chat(**fields))
            assert response.status_code == 200, response.text

    asyncio.run(main())
    return bytes(token - 2 for token in engine.submitted[0].prompt).decode()


# --- ignored

HARMLESS = {
    "llama.cpp": {
        "cache_prompt": True,
        "id_slot": -1,
        "timings_per_token": True,
        "n_keep": 5,
        "n_discard": 0,
    },
    "OpenRouter": {
        "provider": {"order": ["a"], "allow_fallbacks": False},
        "models": ["a", "b"],
        "route": "fallback",
        "transforms": ["middle-out"],
    },
    "LiteLLM": {
        "metadata": {"a": "b"},
        "caching": True,
        "num_retries": 2,
        "litellm_session_id": "a",
        "fallbacks": [{"a": ["b"]}],
        "api_base": "http://a",
    },
    "Open WebUI": {
        "session_id": "a",
        "chat_id": "b",
        "id": "c",
        "background_tasks": {"title_generation": True},
        "features": {"web_search": False},
        "variables": {"{{USER_NAME}}": "a"},
        "model_item": {"id": "chat"},
        "filter_ids": [],
        "tool_servers": [],
    },
    "SGLang": {"rid": "a", "data_parallel_rank": 0, "bootstrap_host": "a", "bootstrap_room": 5},
    "vLLM": {"skip_reading_prefix_cache": True, "kv_hash": "a"},
    "Anthropic": {"anthropic_version": "a", "betas": ["a"], "container": "a", "speed": "fast"},
    "Gemini": {"safety_settings": [{"category": "a"}], "safetySettings": []},
    "LM Studio": {"ttl": 60, "draft_model": "a"},
    "text-generation-webui": {"mode": "chat", "truncation_length": 2048, "name1": "You"},
    "own": {"trace_id": "a", "conversation_id": "b", "conversationId": "b", "é": 1, "": 1, "x" * 500: [{}]},
}


@pytest.mark.parametrize("client", HARMLESS)
@pytest.mark.parametrize("path", BODIES)
def test_harmless_unknown_fields_are_ignored(path, client):
    assert ask(path, HARMLESS[client])


@pytest.mark.parametrize(
    "message",
    [
        USER | {"id": "m", "createdAt": "now", "cache_control": {"type": "ephemeral"}, "weight": 1},
        USER
        | {"content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "id": "a"}]},
        USER | {"images": [], "files": [], "attachments": None, "prefix": False, "experimental": {}},
    ],
)
def test_unknown_keys_of_messages_and_parts_are_ignored(message):
    engine = FakeEngine()
    ask(CHAT, {"messages": [message]}, engine=engine)
    assert bytes(token - 2 for token in engine.submitted[0].prompt).decode() == "<user>hi"
    assert ask("/tokenize", {"model": "chat", "messages": [message], "prompt": None})["count"] == 8


def test_unknown_keys_of_a_history_with_tools_are_ignored():
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "f", "arguments": "{}", "thought_signature": "x"},
        "extra_content": {"google": {}},
        "cache_control": None,
    }
    answer = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call],
        "reasoning_details": [{"type": "reasoning.text", "text": "a"}],
        "thinking_blocks": [{"type": "thinking", "thinking": "a", "signature": "b"}],
        "annotations": [{"type": "url_citation"}],
        "status": "completed",
    }
    result = {"role": "tool", "tool_call_id": "a", "content": "b", "tool_name": "f", "is_error": False}
    described = tool("f", returns={"type": "string"}) | {"cache_control": {"type": "ephemeral"}}
    engine = FakeEngine(context=4000)
    ask(CHAT, {"messages": [USER, answer, result], "tools": [described]}, engine=engine)


def test_unknown_keys_of_objects_within_bodies_are_ignored():
    response = asyncio.run(post(CHAT, chat(stream=True, stream_options={"include_usage": True, "x": 5})))
    assert events(response.text)[-2]["usage"]
    item = {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "a", "x": 1}],
        "x": 1,
    }
    flat = {"type": "function", "name": "f", "defer_loading": True}
    asked = {"input": [item], "tools": [flat], "reasoning": {"effort": "low", "context": "auto"}}
    ask(RESPONSES, asked, engine=FakeEngine(context=4000))
    options = {
        "num_ctx": 4096,
        "num_gpu": 99,
        "num_gqa": 8,
        "rope_frequency_base": 1e6,
        "draft_num_predict": 4,
    }
    ask(OLLAMA_GENERATE, {"options": options | {"num_predict": 3}})
    ask(OLLAMA_CHAT, {"messages": [USER | {"id": "a", "thinking": "b"}]})


def test_an_ignored_field_is_logged_once_with_its_path(caplog):
    async def main():
        async with make_client(make_app()) as client:
            parts = [{"type": "text", "text": "a", "cache_control": {}}]
            for _ in range(3):
                body = chat(cache_prompt=True, messages=[USER | {"id": "a", "content": parts}])
                assert (await client.post(CHAT, json=body)).status_code == 200
            body = {"model": "base", "prompt": "hi", "options": {"num_gqa": 8}, "x\ny": 1}
            assert (await client.post(OLLAMA_GENERATE, json=body)).status_code == 200

    with caplog.at_level(logging.INFO, "shoal.serve"):
        asyncio.run(main())
    names = ["cache_prompt", "messages.content.cache_control", "messages.id", "options.num_gqa", "x\\ny"]
    assert [record.message.split("'")[1] for record in caplog.records] == names


def test_at_most_a_hundred_names_are_logged(caplog):
    ignored = IgnoredFieldLog()
    with caplog.at_level(logging.INFO, "shoal.serve"):
        for at in range(300):
            ignored.log([f"field{at % 150}"])
    lines = [record.message for record in caplog.records]
    assert sum("'field" in line for line in lines) == 100
    assert len(lines) == 101


def test_a_body_has_a_limited_number_of_unknown_fields():
    messages = [USER | {f"{at}x{key}": 1 for key in range(10)} for at in range(20)]
    assert "more than 128 unknown fields" in error_of(CHAT, {"messages": messages})[1]
    ask(CHAT, {"messages": [USER | {f"x{key}": 1 for key in range(10)}] * 20})


# --- mapped

MAPPED = [
    ({"max_new_tokens": 3}, {"max_tokens": 3}),
    ({"max_output_tokens": 3}, {"max_tokens": 3}),
    ({"max_tokens_to_sample": 3}, {"max_tokens": 3}),
    ({"n_predict": 3}, {"max_tokens": 3}),
    ({"maximum_tokens": 3}, {"max_tokens": 3}),
    ({"max_response_tokens": 3}, {"max_tokens": 3}),
    ({"max_gen_toks": 3}, {"max_tokens": 3}),
    ({"num_predict": 3, "max_tokens": None}, {"max_tokens": 3}),
    ({"max_new_tokens": 3, "max_tokens": 3}, {"max_tokens": 3}),
    ({"max_completion_tokens": 3}, {"max_tokens": 3}),
    ({"min_new_tokens": 2}, {"min_tokens": 2}),
    ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"token_repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"freq_pen": 0.5, "presence_pen": 0.25}, {"frequency_penalty": 0.5, "presence_penalty": 0.25}),
    ({"random_seed": 5}, {"seed": 5}),
    ({"ban_eos_token": True}, {"ignore_eos": True}),
    ({"no_stop_trim": True}, {"include_stop_str_in_output": True}),
    ({"temp": 0.5}, {"temperature": 0.5}),
    ({"temperature": 0.8, "top_p": 0}, {"temperature": 0.0, "top_p": 1.0}),
    ({"temperature": 0.8, "do_sample": False}, {"temperature": 0.0}),
    ({"temperature": 0.8, "do_sample": True}, {"temperature": 0.8}),
    ({"temperature": None, "top_p": 0.0}, {"temperature": 0.0}),
]


@pytest.mark.parametrize(("fields", "expected"), MAPPED)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_aliases_of_other_servers(path, fields, expected):
    fields = {"temperature": None} | fields if "temp" in fields else fields
    sampling = sampling_of(path, fields)
    assert {name: getattr(sampling, name) for name in expected} == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_sequences": ["o", "x"]},
        {"stop_words": "o"},
        {"stopping_strings": ["o"]},
        {"stop_sequence": "o"},
    ],
)
@pytest.mark.parametrize("count", ["n", "num_return_sequences", "n_cmpl"])
def test_aliases_of_stop_and_n(fields, count):
    choices = ask(COMPLETIONS, fields | {count: 2})["choices"]
    assert [choice["text"] for choice in choices] == ["hell"] * 2


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (RESPONSES, {"temperature": 0.8, "top_p": 0}),
        (OLLAMA_CHAT, {"options": {"temperature": 0.8, "top_p": 0}}),
        (OLLAMA_GENERATE, {"options": {"temperature": 0.8, "top_p": 0.0}}),
    ],
)
def test_a_top_p_of_0_is_greedy_everywhere(path, fields):
    assert sampling_of(path, fields).temperature == 0


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"seed": -1}),
        (CHAT, {"sampler_seed": -1}),
        (RESPONSES, {"seed": -1}),
        (OLLAMA_CHAT, {"options": {"seed": -1}}),
    ],
)
def test_a_seed_of_minus_1_is_none(path, fields):
    def seeds(fields):
        engine = FakeEngine()
        for _ in range(3):
            ask(path, fields, engine=engine)
        return {request.seed for request in engine.submitted}

    assert len(seeds(fields)) == 3
    given = {"options": {"seed": 5}} if "options" in fields else dict.fromkeys(fields, 5)
    assert len(seeds(given)) == 1


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_two_names_of_a_field_must_agree(path):
    param, message = error_of(path, {"max_new_tokens": 3, "max_tokens": 4})
    assert (param, "max_new_tokens and max_tokens are two names" in message) == ("max_new_tokens", True)
    assert error_of(path, {"stop_sequences": ["a"], "stop_words": ["b"]})[0] == "stop_words"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_new_tokens": "5"}, "max_new_tokens"),
        ({"max_new_tokens": 1000}, "max_new_tokens"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"repeat_penalty": 1000}, "repeat_penalty"),
        ({"n_predict": -1}, "n_predict"),
    ],
)
def test_errors_use_the_sent_names(path, fields, param):
    found, message = error_of(path, fields)
    assert found == param
    assert param in message
    assert "max_tokens" not in message


def test_usage_is_streamed_to_clients_of_openrouter():
    for fields, counted in (({"usage": {"include": True}}, True), ({"usage": {"include": False}}, False)):
        response = asyncio.run(post(CHAT, chat(stream=True, **fields)))
        assert bool(events(response.text)[-2].get("usage")) == counted
    ask(CHAT, {"usage": {"include": True}})


SHOWS = "{{ enable_thinking }} {{ thinking }} {{ reasoning_effort }} {{ verbosity }}|"


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "   "),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "True True  "),
        ({"thinking": {"type": "disabled"}}, "False False  "),
        ({"thinking": {"type": "adaptive"}}, "   "),
        ({"thinking": {"type": "enabled", "clear_thinking": False}}, "True True  "),
        ({"enable_thinking": False}, "False False  "),
        ({"think": False}, "False False  "),
        ({"reasoning": {"effort": "low"}}, "  low "),
        ({"reasoning": {"enabled": True, "max_tokens": 500}}, "True True  "),
        ({"reasoning": {"effort": "none"}}, "False False none "),
        ({"reasoning_effort": "none"}, "False False none "),
        ({"reasoning_effort": "auto"}, "   "),
        ({"reasoning_effort": "default", "thinking": {"type": "disabled"}}, "False False  "),
        ({"reasoning": {"effort": "auto"}, "reasoning_effort": "low"}, "  low "),
        ({"reasoning_effort": "high", "thinking": {"type": "enabled"}}, "True True high "),
        ({"verbosity": "low"}, "   low"),
        (
            {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}},
            "False True  ",
        ),
    ],
)
def test_whether_to_reason_reaches_the_template(fields, shown):
    assert prompt_of(fields, SHOWS) == f"{shown}|"


def test_verbosity_of_responses_reaches_the_template():
    engine = FakeEngine()

    async def main():
        async with make_client(make_app(engine, SHOWS)) as client:
            body = {"model": "chat", "input": "hi", "text": {"verbosity": "high"}}
            assert (await client.post(RESPONSES, json=body)).status_code == 200

    asyncio.run(main())
    assert bytes(token - 2 for token in engine.submitted[0].prompt) == b"   high|"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": True}, "thinking"),
        ({"thinking": {"type": "enabled"}, "enable_thinking": False}, "thinking"),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "thinking"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort"),
        ({"verbosity": "extreme"}, "verbosity"),
        ({"reasoning_format": "none"}, "reasoning_format"),
        ({"separate_reasoning": False}, "separate_reasoning"),
        ({"thinking_budget": 100}, "thinking_budget"),
    ],
)
def test_contradictions_about_reasoning_are_refused(fields, param):
    assert error_of(CHAT, fields)[0] == param


@pytest.mark.parametrize(
    "fields",
    [{"include_reasoning": False}, {"reasoning": {"exclude": True}}, {"reasoning_format": "hidden"}],
)
def test_reasoning_can_be_excluded_by_other_names(fields):
    template = "</think>{{ messages[0].content }}"
    engine = FakeEngine(says="<think>why</think>so")

    async def main(sent):
        async with make_client(make_app(engine, template)) as client:
            response = await client.post(CHAT, json=chat(**sent))
            return response.json()["choices"][0]["message"]

    assert asyncio.run(main({}))["reasoning_content"] == "why"
    assert "reasoning_content" not in asyncio.run(main(fields))


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED = SCHEMA | {"additionalProperties": False}
GBNF = 'root ::= "a" | "b"'


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"grammar": GBNF}, GrammarKind.LARK, GBNF),
        ({"ebnf": GBNF}, GrammarKind.LARK, GBNF),
        ({"grammar_string": GBNF}, GrammarKind.LARK, GBNF),
        ({"regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"json_schema": SCHEMA}, GrammarKind.JSON_SCHEMA, CLOSED),
        ({"json_schema": json.dumps(SCHEMA)}, GrammarKind.JSON_SCHEMA, CLOSED),
        ({"guided_json_object": True}, GrammarKind.JSON_SCHEMA, {"type": "object"}),
        ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, GrammarKind.JSON_SCHEMA, CLOSED),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, GrammarKind.JSON_SCHEMA, CLOSED),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, GrammarKind.JSON_SCHEMA, CLOSED),
        ({"response_format": {"type": "json", "value": SCHEMA}}, GrammarKind.JSON_SCHEMA, CLOSED),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, GrammarKind.JSON_SCHEMA, CLOSED),
        ({"response_format": {"type": "regex", "value": "a+"}}, GrammarKind.REGEX, "a+"),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, GrammarKind.REGEX, "a+"),
        ({"response_format": {"type": "grammar", "grammar": GBNF}}, GrammarKind.LARK, GBNF),
        ({"response_format": {"type": "json"}}, GrammarKind.JSON_SCHEMA, {"type": "object"}),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_constraints_of_other_servers_apply(path, fields, kind, source):
    grammar = sampling_of(path, fields).grammar
    assert grammar.kind is kind
    assert (json.loads(grammar.source) if kind is GrammarKind.JSON_SCHEMA else grammar.source) == source


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"grammar": GBNF, "json_schema": SCHEMA}, "json_schema"),
        ({"response_format": {"type": "json_object", "regex": "a"}}, "response_format"),
        ({"response_format": {"type": "json_object", "pattern": "a"}}, "response_format"),
        ({"response_format": {"type": "regex", "value": "a", "pattern": "b"}}, "response_format"),
        ({"response_format": {"type": "regex"}}, "response_format"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, "response_format"),
        ({"structured_outputs": {"json": SCHEMA, "whitespace": " "}}, "structured_outputs"),
        ({"slo": {"ttft": 1, "deadline": 5}}, "slo.deadline"),
        ({"grammar": GBNF, "grammar_lazy": True}, "grammar_lazy"),
        ({"structural_tag": {"triggers": []}}, "structural_tag"),
        ({"response_schema": SCHEMA}, "response_schema"),
        ({"schema": SCHEMA}, "schema"),
        ({"json_mode": True}, "json_mode"),
        ({"json": SCHEMA}, "json"),
        ({"choice": ["a", "b"]}, "choice"),
        ({"format": "json"}, "format"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"nvext": {"guided_json": SCHEMA}}, "nvext"),
        ({"extra_body": {"guided_json": SCHEMA}}, "extra_body"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_no_constraint_is_lost(path, fields, param):
    assert error_of(path, fields)[0] == param


def test_an_empty_grammar_is_none():
    assert sampling_of(COMPLETIONS, {"grammar": ""}).grammar is None


# --- refused

REFUSED = {
    "top_a": (0, 0.2),
    "top_n_sigma": (-1, 1.0),
    "typical_p": (1.0, 0.5),
    "tfs": (1, 0.9),
    "mirostat": (0, 2),
    "dynatemp_range": (0.0, 0.5),
    "xtc_probability": (0, 0.5),
    "dry_multiplier": (0, 0.8),
    "no_repeat_ngram_size": (0, 3),
    "smoothing_factor": (0, 0.3),
    "min_keep": (0, 4),
    "min_tokens_to_keep": (1, 4),
    "custom_stopping_strings": ("", '"a", "b"'),
    "preamble": ("", "Be brief."),
    "memory": ("", "The user is Bob."),
    "assistant_prefill": ("", "Sure"),
    "response_prefix": (None, "Sure"),
    "prefill": ("", "Sure"),
    "chat_history": ([], [{"role": "USER", "message": "a"}]),
    "connectors": ([], [{"id": "web"}]),
    "response_json_schema": ({}, {"type": "object"}),
    "output_schema": (None, {"type": "object"}),
    "guidance_scale": (1, 1.5),
    "negative_prompt": ("", "bad"),
    "samplers": ([], ["top_k"]),
    "num_beams": (1, 4),
    "watermark": (False, True),
    "max_time": (0, 2.5),
    "t_max_predict_ms": (-1, 500),
    "n_probs": (0, 5),
    "eos_token_id": (None, 5),
    "stop_regex": (None, "a+"),
    "custom_logit_processor": (None, "x"),
    "lora_path": (None, "a"),
    "lora": ([], [{"id": 0, "scale": 1.0}]),
    "adapter_id": ("", "a"),
    "system": (None, "Be brief."),
    "images": ([], ["aGk="]),
    "files": ([], [{"id": "a"}]),
    "plugins": ([], [{"id": "web"}]),
    "web_search": (False, {"enable": True}),
    "enable_search": (False, True),
    "safe_prompt": (False, True),
    "session_params": ({}, {"id": "a"}),
    "thinking_budget_tokens": (-1, 100),
    "response_mime_type": ("text/plain", "application/json"),
    "parameters": ({}, {"max_new_tokens": 5}),
    "sampling_params": ({}, {"temperature": 0}),
    "return_hidden_states": (False, True),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
def test_fields_that_change_the_output_are_refused_unless_off(path, name):
    neutral, value = REFUSED[name]
    ask(path, {name: neutral})
    ask(path, {name: None})
    param, message = error_of(path, {name: value})
    assert param.split(".")[0] == name
    assert "not supported by this server" in message


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"raw": False, "options": {}, "format": "", "suffix": ""}),
        (CHAT, {"instructions": "", "text": {}}),
        (COMPLETIONS, {"raw": False, "options": {}, "tools": [], "messages": []}),
        (RESPONSES, {"options": {}, "messages": []}),
    ],
)
def test_fields_of_other_routes_are_ignored_when_off(path, fields):
    ask(path, fields)
    for name in fields:
        assert error_of(path, {name: True})[0] == name


def test_every_field_of_other_servers_has_an_off_value_and_refuses_others():
    for name in OtherServerFields.known_names():
        for body in (CompletionBody, ChatBody):
            assert name in body.known_names()
        described = OtherServerFields.model_fields.get(
            name, OtherServerFields.model_fields.get(f"{name}_")
        ).description
        assert described.startswith(("Not supported", "Ignored")), name
        for value, says in ((None, None), ({"a": 1}, name), ([1], name), ("a", name)):
            body = json.dumps(completion(**{name: value})).encode()
            if described.startswith("Ignored") or says is None:
                read_body(body, CompletionBody, FakeEngine().info, refuses=False)
            else:
                with pytest.raises(InvalidRequest, match="not supported") as refused:
                    read_body(body, CompletionBody, FakeEngine().info, refuses=False)
                assert refused.value.param.split(".")[0] == name


def test_options_of_ollama_that_change_the_output_are_refused():
    for name in ("mirostat", "typical_p", "tfs_z", "top_a", "xtc_probability", "dry_multiplier"):
        assert name in Options.known_names()
        assert f"options.{name} is not supported" in error_of(OLLAMA_GENERATE, {"options": {name: 0.5}})[1]


MISTYPED = [
    ("max_token", "max_tokens"),
    ("max_tokns", "max_tokens"),
    ("max_tokesn", "max_tokens"),
    ("mx_tokns", "max_tokens"),
    ("maxTokens", "max_tokens"),
    ("max-tokens", "max_tokens"),
    ("MAX_TOKENS", "max_tokens"),
    ("temprature", "temperature"),
    ("tempreature", "temperature"),
    ("top-p", "top_p"),
    ("topk", "top_k"),
    ("top_pp", "top_p"),
    ("sotp", "stop"),
    ("stops", "stop"),
    ("seeed", "seed"),
    ("strem", "stream"),
    ("N", "n"),
    ("frequencyPenalty", "frequency_penalty"),
    ("respone_fromat", "response_format"),
    ("logit_biases", "logit_bias"),
    ("max_new_token", "max_new_tokens"),
    ("stop_sequence_", "stop_sequence"),
    ("modle", "model"),
    ("structured_output", "structured_outputs"),
    ("gramar", "grammar"),
]


@pytest.mark.parametrize(("written", "meant"), MISTYPED)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_misspelled_names_are_refused(path, written, meant):
    param, message = error_of(path, {written: 5})
    assert param == written
    assert f"did you mean {meant!r}" in message


@pytest.mark.parametrize(
    ("path", "fields", "where", "hint"),
    [
        (CHAT, {"mesages": []}, "mesages", "messages"),
        (CHAT, {"messages": [USER | {"tool_cals": []}]}, "messages.0.tool_cals", "tool_calls"),
        (CHAT, {"messages": [USER | {"contents": "a"}]}, "messages.0.contents", "content"),
        (CHAT, {"tools": [tool("f", paramters={})]}, "tools.0.function.paramters", "parameters"),
        (CHAT, {"tools": [tool("f", inputSchema={})]}, "tools.0.function.inputSchema", "input_schema"),
        (CHAT, {"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge", ""),
        (RESPONSES, {"max_output_token": 5}, "max_output_token", "max_output_tokens"),
        (RESPONSES, {"reasoning": {"efort": "low"}}, "reasoning.efort", "effort"),
        ("/v1/embeddings", {"dimension": 5}, "dimension", "dimensions"),
        ("/tokenize", {"add_special_token": False}, "add_special_token", "add_special_tokens"),
        ("/detokenize", {"token": [5]}, "token", "tokens"),
        (OLLAMA_CHAT, {"opions": {"temperature": 0}}, None, "options"),
        (OLLAMA_CHAT, {"options": {"num_predct": 5}}, None, "num_predict"),
        (OLLAMA_GENERATE, {"formt": "json"}, None, "format"),
    ],
)
def test_misspelled_names_are_found_everywhere(path, fields, where, hint):
    param, message = error_of(path, fields)
    assert param == where
    assert "did you mean" in message
    assert hint in message


@pytest.mark.parametrize(
    ("path", "fields", "hint"),
    [
        (CHAT, {"prompt": "x"}, "'prompt' is a field of /v1/completions"),
        (CHAT, {"input": "x"}, "'input' is a field of /v1/responses"),
        (CHAT, {"instructions": "x"}, "'instructions' is a field of /v1/responses"),
        (CHAT, {"include_usage": True, "stream": True}, "did you mean 'stream_options.include_usage'?"),
        (CHAT, {"ttft": 1}, "did you mean 'slo.ttft'?"),
        (CHAT, {"options": {"num_predict": 5}}, "'options' is a field of /api/generate"),
        (COMPLETIONS, {"messages": [USER]}, "'messages' is a field of /v1/chat/completions"),
        (COMPLETIONS, {"tools": [tool("f")]}, "'tools' is a field of /v1/chat/completions"),
        (RESPONSES, {"max_new_tokens": 5}, ""),
        (RESPONSES, {"max_tokens": 5}, "send max_output_tokens"),
        (RESPONSES, {"verbosity": "low"}, "did you mean 'text.verbosity'?"),
        (OLLAMA_CHAT, {"temperature": 0.5}, "did you mean 'options.temperature'?"),
        (OLLAMA_CHAT, {"max_tokens": 5}, "'max_tokens'"),
        (OLLAMA_CHAT, {"system": "Be brief."}, "'system'"),
        (OLLAMA_GENERATE, {"messages": [USER]}, "'messages' is a field of"),
        (OLLAMA_GENERATE, {"options": {"max_tokens": 5}}, "unknown field 'options.max_tokens'"),
    ],
)
def test_fields_of_another_route_are_refused(path, fields, hint):
    assert hint in error_of(path, fields)[1]


@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES, OLLAMA_CHAT])
def test_a_null_is_ignored_whatever_its_name(path):
    ask(path, dict.fromkeys(("max_token", "top_a", "grammar_lazy", "mesages", "previous_response_ids", "x")))


def messages(fields):
    return {"messages": [USER | fields]}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [{"role": "function", "content": "a"}]}, "messages.0.role"),
        (
            CHAT,
            {"messages": [USER | {"content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content",
        ),
        (
            CHAT,
            {"messages": [USER | {"content": [{"type": "thinking", "thinking": "a"}]}]},
            "messages.0.content",
        ),
        (CHAT, {"messages": [USER | {"images": ["aGk="]}]}, "messages.0.images"),
        (CHAT, {"messages": [USER | {"attachments": [{}]}]}, "messages.0.attachments"),
        (
            CHAT,
            {"messages": [USER, {"role": "assistant", "content": "a", "prefix": True}]},
            "messages.1.prefix",
        ),
        (
            CHAT,
            {"messages": [USER, {"role": "assistant", "content": "a", "partial": True}]},
            "messages.1.partial",
        ),
        (CHAT, {"tools": [tool("f", input_schema={"type": "object"})]}, "tools.0.function.input_schema"),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools.0.function"),
        (RESPONSES, {"input": [{"type": "web_search_call"}]}, "input"),
    ],
)
def test_unknown_parts_and_roles_are_refused(path, fields, param):
    found, _ = error_of(path, fields)
    assert found.startswith(param.removesuffix(".function")) or found == param


def test_all_unknown_fields_can_be_refused():
    for path in BODIES:
        error = ask(path, {"cache_prompt": True}, 400, unknown_fields="refuse")["error"]
        assert "unknown field 'cache_prompt'" in (error if isinstance(error, str) else error["message"])
    message = USER | {"cache_control": {}}
    refused = ask(CHAT, {"messages": [message]}, 400, unknown_fields="refuse")
    assert refused["error"]["param"] == "messages.0.cache_control"
    ask(CHAT, {"max_new_tokens": 5, "top_a": 0}, unknown_fields="refuse")
    ask(CHAT, {"max_tokens": 5, "max_new_tokens": None}, unknown_fields="refuse")


@pytest.mark.parametrize("way", ["ignore", "refuse"])
def test_the_document_says_whether_unknown_fields_are_allowed(way):
    schemas = make_app(unknown_fields=way).openapi()["components"]["schemas"]
    closed = {name for name, schema in schemas.items() if schema.get("additionalProperties") is False}
    assert {"Goals", "ResponseFormat", "StructuredOutputs"} <= closed
    assert ({"ChatBody", "Message", "TextPart", "StreamOptions"} <= closed) == (way == "refuse")
    assert "top_a" not in schemas["ChatBody"]["properties"]


# --- names


def edits(one, other):
    """The distance by its definition."""
    if not one or not other:
        return len(one) + len(other)
    found = [
        edits(one[1:], other) + 1,
        edits(one, other[1:]) + 1,
        edits(one[1:], other[1:]) + (one[0] != other[0]),
    ]
    if len(one) > 1 and len(other) > 1 and one[:2] == other[1::-1]:
        found.append(edits(one[2:], other[2:]) + 1)
    return min(found)


NAMES = frozenset({"stop", "slo", "n", "seeds", "tokens", "stream"})


@given(st.text("stopkenra", max_size=8))
@example("tsop")
@example("tkoesn")
@example("slot")
def test_nearest_name_is_within_the_allowed_edits(written):
    allowed = {"n": 0, "slo": 1, "stop": 1, "seeds": 1, "tokens": 2, "stream": 2}
    near = {name for name in NAMES if edits(written, name) <= allowed[name]}
    found = nearest_name(written, NAMES)
    assert (found in near) if near else found is None
    if near:
        assert edits(written, found) == min(edits(written, name) for name in near)
