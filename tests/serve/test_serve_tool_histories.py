"""Earlier calls and results, rendered for chat templates from every route."""

import asyncio

import pytest
from serve_builders import FakeEngine, chat, post, tool
from tool_templates import CALLS, GEMMA, HERMES, LLAMA, MISTRAL

ASKED = {"role": "user", "content": "Weather?"}
TOOLS = [tool("weather"), tool("now")]
# Writes every key of every message. The comment marks the template as one with tools.
KEYS = """\
{%- for m in messages %}<{{ m.role }}
{%- if 'content' in m %} content={{ m.content }}{% endif %}
{%- for c in m.tool_calls %} {{ c.function.name }}({{ c.id }}){% endfor %}
{%- for key in m if key not in ('role', 'content', 'tool_calls') %} {{ key }}={{ m[key] }}{% endfor %}>
{%- endfor %}{# tools <tool_call> #}"""
# In the style of GLM, which writes any content that is no list; of Llama 4, which takes all but text for one;
# and of DeepSeek, which adds texts.
ANY_KIND = """\
{%- macro text(c) %}{% if c is string %}{{ c }}{% elif c is iterable and c is not mapping %}
{%- for part in c %}{{ part.text }}{% endfor %}{% else %}{{ c }}{% endif %}{% endmacro %}
{%- for m in messages %}<{{ m.role }}>{{ text(m.content) }}
{%- for c in m.tool_calls %}[{{ c.function.name }}]{% endfor %}{% endfor %}{# tools <tool_call> #}"""
TEXT_OR_LIST = """\
{%- for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}
{%- for c in m.tool_calls %}[{{ c.function.name }}]{% endfor %}{% endfor %}{# tools <tool_call> #}"""
ADDS = """\
{%- for m in messages %}{{ '<' + m.role + '>' + m.content }}
{%- for c in m.tool_calls %}[{{ c.function.name }}]{% endfor %}{% endfor %}{# tools <tool_call> #}"""
# Writes the first call and drops others.
FIRST_ONLY = """\
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}{% endfor %}{# tools <tool_call> #}"""


def call(id, name="weather", arguments="{}"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(id, content):
    return {"role": "tool", "tool_call_id": id, "content": content}


def prompt_of(path, body, template):
    engine = FakeEngine(context=4000, says="ok")
    response = asyncio.run(post(path, body, engine, template=template))
    assert response.status_code == 200, response.text
    return engine.decoder.decode(engine.submitted[0].prompt)


def prompt(messages, template, **fields):
    return prompt_of("/v1/chat/completions", chat(messages=messages, **fields), template)


def by_chat(template):
    message = {"role": "assistant", "content": None, "tool_calls": [call("a")], "reasoning_content": None}
    return prompt([ASKED, message], template)


def by_responses(template):
    called = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}
    return prompt_of("/v1/responses", {"model": "chat", "input": [ASKED, called], "temperature": 0}, template)


def by_ollama(template):
    function = {"name": "weather", "arguments": {}}
    message = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": function}]}
    body = {"model": "chat", "messages": [ASKED, message], "stream": False, "options": {"temperature": 0}}
    return prompt_of("/api/chat", body, template)


def by_tokenize(template):
    messages = [ASKED, {"role": "assistant", "tool_calls": [call("a")]}]
    response = asyncio.run(
        post("/tokenize", {"model": "chat", "messages": messages}, FakeEngine(), template=template)
    )
    assert response.status_code == 200, response.text
    return FakeEngine().decoder.decode(response.json()["tokens"])


@pytest.mark.parametrize("ask", [by_chat, by_responses, by_ollama, by_tokenize])
def test_a_message_with_calls_only_has_no_content(ask):
    assert ask(KEYS) == "<user content=Weather?><assistant weather(a)>"
    for template in (ANY_KIND, TEXT_OR_LIST, ADDS):
        assert ask(template) == "<user>Weather?<assistant>[weather]"


def test_calls_may_have_no_arguments():
    for function in ({"name": "now"}, {"name": "now", "arguments": None}, {"name": "now", "arguments": ""}):
        message = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
        assert '{"name": "now", "arguments": {}}' in prompt([ASKED, message], HERMES)


def test_arguments_may_be_an_object():
    for arguments in ('{"city": "Oslo"}', {"city": "Oslo"}):
        message = {"role": "assistant", "tool_calls": [call("a", arguments=arguments)]}
        assert '{"name": "weather", "arguments": {"city": "Oslo"}}' in prompt([ASKED, message], HERMES)


def test_a_refusal_is_the_assistants_content():
    refused = {"role": "assistant", "content": None, "refusal": "I cannot."}
    in_part = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]}
    for message in (refused, in_part):
        assert prompt([ASKED, message], KEYS) == "<user content=Weather?><assistant content=I cannot.>"
    by_item = {"model": "chat", "input": [ASKED, in_part], "temperature": 0}
    assert prompt_of("/v1/responses", by_item, KEYS).endswith("<assistant content=I cannot.>")


def test_parts_may_have_the_names_of_responses():
    asked = {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}
    said = {"type": "output_text", "text": "Rain.", "annotations": [], "logprobs": []}
    answered = {"role": "assistant", "content": [said, {"type": "text", "text": "Or snow."}]}
    shown = "<user content=Weather?><assistant content=Rain.\nOr snow.>"
    assert prompt([asked, answered], KEYS) == shown


@pytest.mark.parametrize(
    "thoughts",
    [
        [{"type": "thinking", "thinking": "Hm.\nYes.", "signature": "x"}],
        [{"type": "thinking", "thinking": "Hm."}, {"type": "thinking", "thinking": "Yes."}],
        [{"type": "thinking", "thinking": [{"type": "text", "text": text} for text in ("Hm.", "Yes.")]}],
    ],
)
def test_a_part_may_be_the_reasoning_of_an_earlier_turn(thoughts):
    message = {"role": "assistant", "content": [*thoughts, {"type": "text", "text": "Rain."}]}
    shown = "<user content=Weather?><assistant content=Rain. reasoning_content={}>"
    assert prompt([ASKED, message], KEYS) == shown.format("Hm.\nYes.")
    # A field of the message takes precedence, as with its other names.
    assert prompt([ASKED, message | {"reasoning": "So."}], KEYS) == shown.format("So.")


def test_reasoning_may_come_before_calls():
    message = {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}]}
    called = prompt([ASKED, message | {"tool_calls": [call("a")]}], KEYS)
    assert called == "<user content=Weather?><assistant content= weather(a) reasoning_content=Hm.>"


@pytest.mark.parametrize("content", [[], "", None, [{"type": "text", "text": ""}]])
def test_a_result_may_be_empty(content):
    messages = [ASKED, {"role": "assistant", "tool_calls": [call("a")]}, result("a", content)]
    expected = "<user content=Weather?><assistant weather(a)><tool content= tool_call_id=a name=weather>"
    assert prompt(messages, KEYS) == expected


def test_an_empty_list_of_parts_is_an_empty_text():
    assert prompt([{"role": "user", "content": []}], KEYS) == "<user content=>"


def test_two_calls_of_a_model_are_rendered_in_its_history():
    engine = FakeEngine(context=4000, says=CALLS["llama"])
    body = chat(messages=[ASKED], tools=TOOLS)
    response = asyncio.run(post("/v1/chat/completions", body, engine, template=LLAMA)).json()
    message = response["choices"][0]["message"]
    first, second = (made["id"] for made in message["tool_calls"])
    # The client sends results in order of completion.
    history = [
        ASKED,
        message,
        result(second, "noon"),
        result(first, "rain"),
        {"role": "user", "content": "So?"},
    ]
    assert prompt(history, LLAMA) == (
        "<|h|>user<|/h|>Weather?<|eot_id|>"
        '<|h|>assistant<|/h|>{"name": "weather", "parameters": {"city": "Oslo"}}<|eot_id|>'
        '<|h|>ipython<|/h|>"rain"<|eot_id|>'
        '<|h|>assistant<|/h|>{"name": "now", "parameters": {}}<|eot_id|>'
        '<|h|>ipython<|/h|>"noon"<|eot_id|>'
        "<|h|>user<|/h|>So?<|eot_id|><|h|>assistant<|/h|>"
    )


def test_calls_are_split_for_templates_that_drop_some():
    message = {"role": "assistant", "content": "Hm.", "tool_calls": [call("a"), call("b", "now")]}
    history = [ASKED, message, result("b", "noon"), result("x", "of no call")]
    expected = "<user>Weather?<assistant>Hm.weather<assistant>now<tool>noon<tool>of no call"
    assert prompt(history, FIRST_ONLY) == expected
    assert prompt([ASKED, message], FIRST_ONLY) == "<user>Weather?<assistant>Hm.weather<assistant>now"


def test_calls_stay_together_for_templates_with_parallel_calls():
    message = {"role": "assistant", "tool_calls": [call("aaaaaaaa1"), call("aaaaaaaa2", "now")]}
    history = [ASKED, message, result("aaaaaaaa2", "noon"), result("aaaaaaaa1", "rain")]
    assert prompt(history, KEYS) == (
        "<user content=Weather?><assistant weather(aaaaaaaa1) now(aaaaaaaa2)>"
        "<tool content=rain tool_call_id=aaaaaaaa1 name=weather>"
        "<tool content=noon tool_call_id=aaaaaaaa2 name=now>"
    )
    assert prompt(history, HERMES).count("<|im_start|>assistant") == 2  # and that of the answer
    assert prompt(history, MISTRAL).count("[TOOL_CALLS]") == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_results_have_the_order_of_their_calls(path):
    # This template writes no ids, so the model would take noon for the weather.
    calls = [call("a"), call("b", "now")]
    if path == "/v1/responses":
        called = [{"type": "function_call", "call_id": c["id"], **c["function"]} for c in calls]
        given = [("b", "noon"), ("a", "rain")]
        results = [{"type": "function_call_output", "call_id": id, "output": text} for id, text in given]
        text = prompt_of(
            path, {"model": "chat", "input": [ASKED, *called, *results], "temperature": 0}, HERMES
        )
    else:
        given = [result("x", "of no call"), result("b", "noon"), result("a", "rain")]
        text = prompt([ASKED, {"role": "assistant", "tool_calls": calls}, *given], HERMES)
        assert text.index("noon") < text.index("of no call")
    assert text.index("rain") < text.index("noon")


def test_a_system_message_that_a_template_refuses_is_refused_with_tools_too():
    messages = [{"role": "system", "content": "Be brief."}, ASKED]
    for tools in ({}, {"tools": TOOLS}):
        body = chat(messages=messages, **tools)
        response = asyncio.run(post("/v1/chat/completions", body, FakeEngine(context=4000), template=GEMMA))
        assert response.status_code == 400
        assert "System role not supported" in response.text
