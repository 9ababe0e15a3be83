"""Chats over Ollama's API: reasoning, and the calls that results answer."""

import asyncio
import json

import pytest
from serve_builders import ByteTokenizer, FakeEngine, make_app, make_client

# It reasons unless either variable turns reasoning off.
SWITCH = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ reasoning_effort }}"
    "{% if (enable_thinking is defined and not enable_thinking) %}<think>\n\n</think>\n\n"
    "{% elif enable_thinking is defined %}[on]{% endif %}"
)
OTHER_SWITCH = SWITCH.replace("enable_thinking", "thinking")
# It always reasons.
OPENED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<think>\n{# </think> #}"
RESULTS = (
    "{% for m in messages %}{% for c in m.tool_calls %}[{{ c.function.name }} {{ c.id }}]{% endfor %}"
    "{% if m.role == 'tool' %}<{{ m.name }} {{ m.tool_call_id }}>{% endif %}{{ m.reasoning_content }}"
    "{{ m.content }}{% endfor %}{{ tools and none or '' }}<tool_call>"
)


def prompt_of(path, body, template):
    """The response, and the engine's prompt."""
    engine = FakeEngine(context=2000, says=" so </think>\n\nYes")
    defaults = {"model": "chat", "stream": False, "options": {"temperature": 0}}

    async def main():
        async with make_client(make_app(engine, template=template)) as client:
            return await client.post(f"/api/{path}", json=defaults | body)

    answer = asyncio.run(main())
    assert answer.status_code == 200, answer.text
    return answer.json(), ByteTokenizer().decode(engine.submitted[0].prompt)


ASKED = {"chat": {"messages": [{"role": "user", "content": "hi"}]}, "generate": {"prompt": "hi"}}


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("template", [SWITCH, OTHER_SWITCH])
@pytest.mark.parametrize(
    ("think", "end"),
    [
        (None, "hi"),
        (True, "hi[on]"),
        (False, "hinone<think>\n\n</think>\n\n"),
        ("low", "hilow[on]"),
        ("high", "hihigh[on]"),
    ],
)
def test_think_sets_variables_of_the_template(path, template, think, end):
    _, prompt = prompt_of(path, ASKED[path] | {"think": think}, template)
    assert prompt == f"<user>{end}"


@pytest.mark.parametrize("path", ASKED)
def test_a_template_without_a_variable_reasons_unless_think_is_false(path):
    answer, prompt = prompt_of(path, ASKED[path], OPENED)
    assert prompt == "<user>hi<think>\n"
    said = answer["message"] if path == "chat" else answer
    assert (said["thinking"], said.get("content", said.get("response"))) == ("so", "Yes")
    _, prompt = prompt_of(path, ASKED[path] | {"think": False}, OPENED)
    assert prompt == "<user>hi<think>\n\n</think>\n\n"


def test_unwanted_reasoning_is_hidden():
    model_thinks = FakeEngine(context=2000, says="<think>so</think>Yes")

    async def main():
        body = ASKED["chat"] | {"model": "chat", "stream": False, "options": {"temperature": 0}}
        async with make_client(make_app(model_thinks, template=SWITCH)) as client:
            return [
                (await client.post("/api/chat", json=body | {"think": think})).json()["message"]
                for think in (True, False)
            ]

    shown, hidden = asyncio.run(main())
    assert shown == {"role": "assistant", "content": "Yes", "thinking": "so"}
    assert hidden == {"role": "assistant", "content": "Yes"}


@pytest.mark.parametrize("template", [None, SWITCH])
def test_think_has_no_effect_without_a_template(template):
    _, prompt = prompt_of("generate", {"prompt": "hi", "raw": True, "think": False}, template)
    assert prompt == "hi"
    _, prompt = prompt_of("generate", {"model": "base", "prompt": "hi", "think": True}, template)
    assert prompt == "hi"


def test_earlier_reasoning_reaches_the_template():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "thinking": "because "},
        {"role": "user", "content": "c"},
    ]
    _, prompt = prompt_of("chat", {"messages": messages}, RESULTS)
    assert prompt == "abecause bc<tool_call>"


def call(name, id=None):
    return {"function": {"name": name, "arguments": {}}} | ({} if id is None else {"id": id})


def result(content, **fields):
    return {"role": "tool", "content": content} | fields


F, G = call("f", "id-f"), call("g", "id-g")


@pytest.mark.parametrize(
    ("calls", "results", "laid_out"),
    [
        # By order, without ids and names.
        ([call("f"), call("g")], [result("1"), result("2")], "<f call_1_0>1<g call_1_1>2"),
        # By name, in any order.
        (
            [call("f"), call("g")],
            [result("1", tool_name="g"), result("2", tool_name="f")],
            "<f call_1_0>2<g call_1_1>1",
        ),
        (
            [call("f"), call("g")],
            [result("1", name="g"), result("2", name="f")],
            "<f call_1_0>2<g call_1_1>1",
        ),
        # Two calls of one tool are matched in order.
        (
            [call("f"), call("f")],
            [result("1", tool_name="f"), result("2", tool_name="f")],
            "<f call_1_0>1<f call_1_1>2",
        ),
        # An id takes precedence, wherever its result is.
        (
            [call("f", "a"), call("f", "b")],
            [result("1", tool_name="f"), result("2", tool_name="f", tool_call_id="a")],
            "<f a>2<f b>1",
        ),
        ([F, G], [result("1", tool_call_id="id-g"), result("2", tool_call_id="id-f")], "<f id-f>2<g id-g>1"),
        # A result without a name does not take the call of a later result with a name.
        ([F, G], [result("1"), result("2", tool_name="f")], "<f id-f>2<g id-g>1"),
        # A result of a tool that was not called matches no call.
        ([F], [result("1", tool_name="h"), result("2")], "<f id-f>2<h call_2>1"),
    ],
)
def test_results_are_matched_with_calls_and_sorted(calls, results, laid_out):
    asked = {"role": "user", "content": ""}
    messages = [asked, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g", "h")]
    _, prompt = prompt_of("chat", {"messages": messages, "tools": tools}, RESULTS)
    assert prompt.removesuffix("<tool_call>").rpartition("]")[2] == laid_out


def test_calls_without_results_do_not_match_later_results():
    turn = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call("f")]},
    ]
    messages = [*turn, *turn, result("1", tool_name="f")]
    _, prompt = prompt_of("chat", {"messages": messages}, RESULTS)
    assert prompt == "a[f call_1_0]a[f call_3_0]<f call_3_0>1<tool_call>"


def test_repeated_ids_match_the_last_turn():
    calls = {"role": "assistant", "content": "", "tool_calls": [call("f", "a"), call("g", "b")]}
    results = [result("1", tool_call_id="b"), result("2", tool_call_id="a")]
    _, prompt = prompt_of("chat", {"messages": [calls, *results, calls, *results]}, RESULTS)
    assert prompt == "[f a][g b]<f a>2<g b>1[f a][g b]<f a>2<g b>1<tool_call>"


PAGE = {"Origin": "https://example.com"}


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/api/chat", {}, 200),
        ("/api/chat", {"Content-Type": "application/x-www-form-urlencoded"}, 200),
        ("/api/chat", {"Content-Type": "text/plain; charset=latin-1"}, 200),
        ("/api/chat", {"Sec-Fetch-Site": "none"}, 200),
        ("/api/chat", {"Sec-Fetch-Site": "same-origin"}, 200),
        ("/api/chat", {"Sec-Fetch-Site": "cross-site"}, 415),
        ("/api/chat", {"Sec-Fetch-Site": "same-site"}, 415),
        ("/api/chat", PAGE, 415),
        ("/api/chat", {"Origin": "null", "Content-Type": "text/plain"}, 415),
        ("/api/chat", PAGE | {"Content-Type": "application/json"}, 200),
        ("/v1/chat/completions", {}, 415),
        ("/v1/chat/completions", {"Content-Type": "text/plain"}, 415),
    ],
)
def test_bodies_need_no_type_unless_a_page_sends_them(path, headers, status):
    content = json.dumps({"model": "chat", "messages": ASKED["chat"]["messages"]}).encode()

    async def main():
        async with make_client(make_app()) as client:
            return await client.post(path, content=content, headers=headers)

    answer = asyncio.run(main())
    assert answer.status_code == status, answer.text
    if status == 415:
        assert "application/json" in answer.text
        assert ("web page" in answer.text) == path.startswith("/api/")


def test_calls_may_have_no_arguments():
    for function in ({"name": "now"}, {"name": "now", "arguments": None}, {"name": "now", "arguments": {}}):
        call = {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}
        messages = [{"role": "user", "content": "hi"}, call, {"role": "tool", "content": "noon"}]
        _, prompt = prompt_of("chat", {"messages": messages}, RESULTS)
        assert prompt.endswith("hi[now a]<now a>noon<tool_call>")


def test_the_developer_role_becomes_system():
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    _, prompt = prompt_of("chat", {"messages": messages}, SWITCH)
    assert prompt.endswith("<system>Be brief.<user>hi")
