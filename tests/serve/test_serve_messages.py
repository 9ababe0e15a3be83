"""/v1/messages, Anthropic's API: conversations in, messages out, and the events of streams."""

import asyncio
import json

import pytest
from serve_builders import FakeEngine, make_app, make_client, post

from shoal.config.api_keys import ApiKey
from shoal.core import GrammarKind

MESSAGES = "/v1/messages"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Of a city.", "input_schema": CITY}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THINKS = """\
{%- for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}{% endfor %}
{#- </think> -#}
<assistant><think>"""
CALLS = """\
{%- for m in messages %}<{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}>{{ m.content or "" -}}
{%- for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}
{%- endfor %}{% if tools %}{# <tool_call> #}{% endif %}<assistant>"""


def body(**fields):
    sent = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
    return sent | {"temperature": 0} | fields


def ask(sent, says="Hello.", template=None, path=MESSAGES):
    """(engine, response)"""
    engine = FakeEngine(context=4000, says=says)
    return engine, asyncio.run(post(path, sent, engine, template=template))


def answer(sent, says="Hello.", template=None):
    response = ask(sent, says, template)[1]
    assert response.status_code == 200, response.text
    return response.json()


def prompt_of(sent, template=None):
    engine, response = ask(sent, template=template)
    assert response.status_code == 200, response.text
    return engine.decoder.decode(engine.submitted[0].prompt)


def error_of(sent, status=400):
    response = ask(sent)[1]
    assert response.status_code == status, response.text
    error = response.json()
    assert error["type"] == "error"
    assert error["request_id"] == response.headers["x-request-id"]
    return error["error"]["type"], error["error"]["message"]


def events_of(sent, says="Hello.", template=None):
    """The stream's events; their names are their types."""
    response = ask(sent | {"stream": True}, says, template)[1]
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def assembled(events):
    """The message that a client builds from events, as Anthropic documents it."""
    assert [events[0]["type"], events[-2]["type"], events[-1]["type"]] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    message = events[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    partial = ""
    for event in events[1:-2]:
        kind, index = event["type"], event["index"]
        if kind == "content_block_start":
            assert index == len(message["content"])
            message["content"].append(event["content_block"])
            partial = ""
        elif kind == "content_block_delta":
            assert index == len(message["content"]) - 1
            delta = dict(event["delta"])
            kind = delta.pop("type")
            if kind == "input_json_delta":
                partial += delta["partial_json"]
            else:
                (name,) = delta
                assert kind == f"{name}_delta"
                message["content"][-1][name] += delta[name]
        else:
            assert kind == "content_block_stop"
            if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = json.loads(partial or "{}")
    message |= events[-2]["delta"]
    message["usage"] |= events[-2]["usage"]
    return message


def test_a_message_has_anthropics_shape():
    message = answer(body(system="Be kind.", metadata={"user_id": "a"}))
    assert message.pop("id").startswith("msg_")
    prompt = len("<system>Be kind.<user>hi")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "chat",
        "content": [{"type": "text", "text": "Hello."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt - 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": 7,
        },
    }


@pytest.mark.parametrize(
    ("sent", "says", "template"),
    [
        (body(), "Hello.", None),
        (body(max_tokens=3), "Hello.", None),
        (body(stop_sequences=["lo", "zz"]), "Hello.", None),
        (body(tools=[WEATHER]), f"Let me see.{CALL}{CALL}", None),
        (body(), "Well.</think>Yes.", THINKS),
        (body(max_tokens=4), "Well.</think>Yes.", THINKS),
    ],
)
def test_a_stream_has_the_parts_of_the_full_answer(sent, says, template):
    whole = answer(sent, says, template)
    parts = assembled(events_of(sent, says, template))
    for message in (whole, parts):
        message.pop("id")
        for block in message["content"]:
            block.pop("id", None)
    assert parts == whole


@pytest.mark.parametrize(
    ("fields", "reason", "stop", "text"),
    [
        ({"max_tokens": 3}, "max_tokens", None, "Hel"),
        ({"stop_sequences": ["lo", "zz"]}, "stop_sequence", "lo", "Hel"),
        ({}, "end_turn", None, "Hello."),
    ],
)
def test_why_an_answer_ended(fields, reason, stop, text):
    message = answer(body(**fields))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)
    assert message["content"] == [{"type": "text", "text": text}]


def test_calls_of_tools_are_blocks_with_objects():
    message = answer(body(tools=[WEATHER]), f"Let me see.{CALL}{CALL}")
    assert message["stop_reason"] == "tool_use"
    text, first, second = message["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert first["id"] != second["id"]
    for call in (first, second):
        del call["id"]
        assert call == {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}}


def test_a_call_that_is_cut_off_has_no_arguments():
    message = answer(body(tools=[WEATHER], max_tokens=55), CALL)
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][0]["input"] == {}


def test_reasoning_is_a_block_before_the_text():
    message = answer(body(), "Well.</think>Yes.", THINKS)
    assert message["content"] == [
        {"type": "thinking", "thinking": "Well.", "signature": ""},
        {"type": "text", "text": "Yes."},
    ]


def test_what_answers_sent_can_be_sent_back():
    """A whole round: the answer's blocks, and the results of its calls with a question."""
    first = answer(body(tools=[WEATHER]), f"Let me see.{CALL}{CALL}")
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": content}
        for block, content in zip(
            first["content"][1:], ("rain", [{"type": "text", "text": "sun"}]), strict=True
        )
    ]
    history = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Oslo?", "cache_control": {"type": "ephemeral"}}],
        },
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]},
    ]
    sent = body(
        messages=history,
        tools=[WEATHER],
        system=[{"type": "text", "text": "A"}, {"type": "text", "text": "B"}],
    )
    call = '[weather {"city": "Oslo"}]'
    assert prompt_of(sent, CALLS) == (
        f"<system>A\nB<user>Oslo?<assistant>Let me see.{call}{call}<tool weather>rain<tool weather>sun"
        "<user>And?<assistant>"
    )


def test_earlier_reasoning_reaches_templates_that_show_it():
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    earlier = [thinking, {"type": "redacted_thinking", "data": "z"}, {"type": "text", "text": "Yes."}]
    history = [*body()["messages"], {"role": "assistant", "content": earlier}, *body()["messages"]]
    assert "<assistant>Hm.Yes.<user>hi" in prompt_of(body(messages=history), THINKS)


def test_an_assistants_message_at_the_end_is_continued():
    history = [*body()["messages"], {"role": "assistant", "content": "Hel"}]
    assert prompt_of(body(messages=history)).endswith("<assistant>Hel")


@pytest.mark.parametrize(
    ("thinking", "reasons"),
    [({"type": "enabled", "budget_tokens": 1024}, True), ({"type": "disabled"}, False), (None, None)],
)
def test_thinking_sets_the_templates_variable(thinking, reasons):
    template = "{{ messages[0].content }} {{ enable_thinking is defined and enable_thinking }}"
    fields = {} if thinking is None else {"thinking": thinking}
    assert prompt_of(body(**fields), template) == f"hi {bool(reasons)}"


def test_system_messages_of_both_kinds_are_one():
    system = [{"role": "system", "content": [{"type": "text", "text": "B"}]}, *body()["messages"]]
    assert prompt_of(body(messages=system)) == "<system>B<user>hi"
    assert prompt_of(body(messages=system, system="A")) == "<system>A\n\nB<user>hi"


def test_reasoning_may_be_left_out():
    sent = body(thinking={"type": "adaptive", "display": "omitted"})
    assert answer(sent, "Well.</think>Yes.", THINKS)["content"] == [{"type": "text", "text": "Yes."}]


def test_a_schema_constrains_the_answer():
    sent = body(output_config={"format": {"type": "json_schema", "schema": CITY}, "effort": "max"})
    engine, response = ask(sent)
    assert response.status_code == 200, response.text
    grammar = engine.submitted[0].sampling.grammar
    assert grammar.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(grammar.source)["required"] == ["city"]


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "weather"}, True),
    ],
)
def test_tool_choice(choice, forced):
    engine, response = ask(body(tools=[WEATHER], tool_choice=choice), CALL)
    assert response.status_code == 200, response.text
    assert (engine.submitted[0].sampling.grammar is not None) == forced


def test_sampling_parameters_reach_the_engine():
    sent = body(max_tokens=9, temperature=0.5, top_p=0.9, top_k=7, seed=3, stop_sequences=["a", "b"])
    engine, response = ask(sent)
    assert response.status_code == 200, response.text
    sampling = engine.submitted[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.9, 7)


def test_tokens_are_counted_with_system_and_tools():
    sent = body(system="Be kind.")
    del sent["max_tokens"], sent["temperature"]
    response = ask(sent, path=f"{MESSAGES}/count_tokens")[1]
    assert (response.status_code, response.json()) == (200, {"input_tokens": len("<system>Be kind.<user>hi")})


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"model": "chat", "messages": [{"role": "user", "content": "hi"}]}, "max_tokens"),
        (body(messages=[]), "messages"),
        (
            body(messages=[{"role": "tool", "content": "x"}]),
            "results of tools are blocks of a user's message",
        ),
        (
            body(messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}]),
            "images and documents are not supported",
        ),
        (
            body(messages=[{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]),
            "messages.0.content",
        ),
        (body(tools=[{"type": "web_search_20250305", "name": "web_search"}]), "run on the server"),
        (body(tools=[WEATHER, WEATHER]), "two tools have the name 'weather'"),
        (body(tool_choice={"type": "any"}), "there are no tools"),
        (body(tools=[WEATHER], tool_choice={"type": "tool"}), "tool_choice.name is missing"),
        (body(tool_choice="auto"), 'must be {"type": "auto"}'),
        (body(stop="x"), "send stop_sequences"),
        (body(mcp_servers=[{"type": "url"}]), "nothing is looked up"),
        (body(max_token=5), "max_tokens"),
        (body(max_tokens=5000), "max_tokens"),
    ],
)
def test_invalid_bodies_are_explained(sent, message):
    kind, text = error_of(sent)
    assert kind == "invalid_request_error"
    assert message in text


def test_errors_have_anthropics_types():
    assert error_of(body(model="gpt"), 404)[0] == "not_found_error"


def test_keys_may_be_sent_as_anthropics_clients_do():
    async def scenario():
        app = make_app(
            FakeEngine(context=4000, says="Hello."), api_keys=(ApiKey(name="a", key="secret-key-of-a"),)
        )
        async with make_client(app) as client:
            return [
                await client.post(MESSAGES, json=body(), headers=headers)
                for headers in ({"x-api-key": "secret-key-of-a"}, {"x-api-key": "other"}, {})
            ]

    right, wrong, missing = asyncio.run(scenario())
    assert right.status_code == 200, right.text
    for refused in (wrong, missing):
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
