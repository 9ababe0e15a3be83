"""/v1/responses: items in, items out, and the events of streams."""

import asyncio
import json

import pytest
from serve_builders import FakeEngine, make_app, make_client, post

from shoal.core import GrammarKind

RESPONSES = "/v1/responses"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THINKS = """\
{%- for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}{% endfor %}
{#- </think> -#}
<assistant><think>"""


def body(**fields):
    return {"model": "chat", "input": "hi", "temperature": 0} | fields


def ask(sent, says="Hello.", template=None):
    """(engine, response)"""
    engine = FakeEngine(context=4000, says=says)
    return engine, asyncio.run(post(RESPONSES, sent, engine, template=template))


def answer(sent, says="Hello.", template=None):
    response = ask(sent, says, template)[1]
    assert response.status_code == 200, response.text
    return response.json()


def prompt_of(sent, template=None):
    engine, response = ask(sent, template=template)
    assert response.status_code == 200, response.text
    return engine.decoder.decode(engine.submitted[0].prompt)


def test_response_has_openais_shape():
    response = answer(body(instructions="Be kind.", metadata={"a": "b"}, max_output_tokens=50))
    assert response["id"].startswith("resp_")
    assert response["object"] == "response"
    assert response["status"] == "completed"
    assert response["instructions"] == "Be kind."
    assert response["metadata"] == {"a": "b"}
    (item,) = response["output"]
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}],
    }
    assert response["usage"] == {
        "input_tokens": len("<system>Be kind.<user>hi"),
        "input_tokens_details": {"cached_tokens": 1},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len("<system>Be kind.<user>hi") + 7,
    }


def test_output_that_is_too_long_is_incomplete():
    response = answer(body(max_output_tokens=3))
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["content"][0]["text"] == "Hel"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("length", "calls"),
    [
        (20, []),
        (55, [("incomplete", '{"city": "')]),
        (72, [("completed", '{"city": "Oslo"}')]),
        (len(CALL) + 9, [("completed", '{"city": "Oslo"}')]),
    ],
)
def test_output_that_is_cut_has_incomplete_calls(length, calls, stream):
    sent = body(tools=[WEATHER], tool_choice="required", max_output_tokens=length, stream=stream)
    response = ask(sent, f"{CALL}\n{CALL}")[1]
    assert response.status_code == 200, response.text
    whole = json.loads(response.text.split("data: ")[-1]).get("response") if stream else response.json()
    assert whole["status"] == "incomplete"
    assert [(item["status"], item["arguments"]) for item in whole["output"]] == calls


def test_items_become_messages():
    call = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city":"Oslo"}'}
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        call | {"id": "fc_1", "status": "completed"},
        call | {"call_id": "b"},
        {"type": "function_call_output", "call_id": "a", "output": "Rain"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "Snow"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Wet.", "annotations": [], "logprobs": []}],
        },
        {"type": "message", "role": "user", "content": "Sure?"},
    ]
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert prompt_of(body(input=items, instructions="Be kind.")) == (
        f"<system>Be kind.\n\nBe brief.<user>Weather?<assistant>{written}\n{written}"
        "<user><tool_response>\nRain\n</tool_response>\n<tool_response>\nSnow\n</tool_response>"
        "<assistant>Wet.<user>Sure?"
    )


def test_output_can_be_sent_back():
    first = answer(body(tools=[WEATHER]), f"Let me see.\n{CALL}")
    assert [item["type"] for item in first["output"]] == ["message", "function_call"]
    call = first["output"][1]
    history = [
        {"role": "user", "content": "Weather?"},
        *first["output"],
        {"type": "function_call_output", "call_id": call["call_id"], "output": "Rain"},
    ]
    assert f"<assistant>Let me see.\n{CALL}<user><tool_response>\nRain" in prompt_of(body(input=history))


def test_calls_are_items():
    response = answer(body(tools=[WEATHER]), CALL)
    (item,) = response["output"]
    assert item.pop("id").startswith("fc_")
    assert item.pop("call_id").startswith("call_")
    assert item == {
        "type": "function_call",
        "name": "weather",
        "arguments": '{"city": "Oslo"}',
        "status": "completed",
    }
    assert response["tools"] == [WEATHER | {"description": None}]


def test_reasoning_is_an_item():
    response = answer(body(reasoning={"effort": "low"}), "Hm.</think>Yes.", THINKS)
    reasoning, message = response["output"]
    assert reasoning["type"] == "reasoning"
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "Yes."
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    history = [*response["output"], {"role": "user", "content": "Sure?"}]
    assert prompt_of(body(input=history), THINKS).startswith("<assistant>Hm.Yes.<user>Sure?")


def test_formats_and_choices_become_grammars():
    schema = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
    closed = CITY | {"additionalProperties": False}
    for format, expected in ((schema, closed), ({"type": "json_object"}, {"type": "object"})):
        engine, response = ask(body(text={"format": format}))
        grammar = engine.submitted[0].sampling.grammar
        assert grammar.kind is GrammarKind.JSON_SCHEMA
        assert json.loads(grammar.source) == expected
        assert response.json()["text"]["format"] == format
    engine, _ = ask(body(tools=[WEATHER], tool_choice={"type": "function", "name": "weather"}), CALL)
    assert engine.submitted[0].sampling.grammar.kind is GrammarKind.LARK


def streamed(sent, says="Hello.", template=None):
    _, response = ask(sent | {"stream": True}, says, template)
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_events_of_text():
    events = streamed(body())
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == "Hello."
    assert [event["type"] for event in events if event not in deltas[1:]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    last = events[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == "Hello."
    assert last["usage"]["output_tokens"] == 7
    assert {event.get("item_id", last["output"][0]["id"]) for event in events} == {last["output"][0]["id"]}


def test_events_of_reasoning_and_calls():
    events = streamed(body(tools=[WEATHER]), f"Hm.</think>Well.\n{CALL}", THINKS)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for kind in dict.fromkeys(kinds) if kind.endswith("delta")] == [
        "reasoning_text.delta",
        "output_text.delta",
        "function_call_arguments.delta",
    ]
    arguments = [event for event in events if "function_call_arguments" in event["type"]]
    assert "".join(event["delta"] for event in arguments[:-1]) == arguments[-1]["arguments"]
    assert {event["output_index"] for event in arguments} == {2}
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert done == events[-1]["response"]["output"]


@pytest.mark.parametrize("fields", [{}, {"instructions": "Be brief."}, {"tools": [WEATHER]}])
def test_input_tokens_are_counted_as_they_are_used(fields):
    sent = body(**fields)
    response = asyncio.run(post(f"{RESPONSES}/input_tokens", sent, FakeEngine(context=10)))
    used = answer(sent)["usage"]["input_tokens"]
    assert response.json() == {"object": "response.input_tokens", "input_tokens": used}


def test_a_stream_that_is_cut_ends_incomplete():
    events = streamed(body(max_output_tokens=3))
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_an_error_in_a_stream_is_an_event():
    engine = FakeEngine(context=4000, says="Hello.", fail_after=2)
    response = asyncio.run(post(RESPONSES, body(stream=True), engine))
    sent = response.text.rstrip("\n").split("\n\n")
    name, data = sent[-1].split("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert error.pop("message").startswith("the engine process ended")
    assert error == {
        "type": "error",
        "sequence_number": len(sent) - 1,
        "code": "engine_died",
        "param": None,
    }


def test_logprobs():
    sent = body(include=["message.output_text.logprobs"], top_logprobs=2)
    entries = answer(sent)["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == [*"Hello.", ""]
    assert len(entries[0]["top_logprobs"]) == 2
    events = streamed(sent)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry["token"] for event in deltas for entry in event["logprobs"]] == [*"Hello."]
    (done,) = (event for event in events if event["type"] == "response.output_text.done")
    assert [entry["token"] for entry in done["logprobs"]] == [*"Hello.", ""]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole history"),
        ({"stop": ["a"]}, "stop", "stop is not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "logit_bias is not supported"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "unknown field"),
        ({"conversation": "conv_1"}, "conversation", "whole history"),
        ({"conversation": {"id": "a"}}, "conversation", "whole history"),
        ({"background": True}, "background", "stream"),
        ({"prompt": {"id": "a"}}, "prompt", "instructions"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "messages", "send input"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format", "text.format"),
        ({"n": 2}, "n", "several requests"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"input": []}, "input", "not empty"),
        ({"input": 5}, "input", "string"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0", "function_call_output"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content", "images"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input.0.role", "assistant"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "function"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "two tools"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice", '"name"'),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "json_schema"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
        ({"model": "base"}, "messages", "chat_template"),
    ],
)
def test_errors_say_what_is_possible(fields, param, says):
    _, response = ask(body(**fields))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"background": False, "previous_response_id": None, "truncation": "disabled"},
        {"include": ["reasoning.encrypted_content"], "text": {"verbosity": "medium"}},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"reasoning": {"summary": "auto"}, "service_tier": "auto", "user": "me", "prompt_cache_key": "a"},
    ],
)
def test_fields_without_effect_are_accepted(fields):
    assert answer(body(**fields))["output"][0]["content"][0]["text"] == "Hello."


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")],
)
def test_nothing_is_stored(method, path):
    async def call():
        async with make_client(make_app()) as client:
            return await client.request(method, f"{RESPONSES}/resp_1{path}")

    response = asyncio.run(call())
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "response_not_found"
    assert "not stored" in response.json()["error"]["message"]
