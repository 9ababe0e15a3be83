"""Outputs that end in the middle of a call: no markup gets into the content, and no text is lost."""

import asyncio

import pytest
from serve_builders import FIRST_BYTE, FakeEngine, chat, events, post, tool
from tool_templates import CALLS, HERMES, TEMPLATES

from shoal.serve.tools.call_formats import GemmaFormat, HermesFormat, LlamaFormat, PromptedFormat, format_of
from shoal.serve.tools.output_pieces import CallArguments, CallBegin, Content

TOOLS = [tool("weather", parameters={"type": "object"}), tool("now", parameters={"type": "object"})]
NAMED = {"type": "function", "function": {"name": "weather"}}
FIRST = {"name": "weather", "arguments": '{"city": "Oslo"}'}
# Ends within the markup of the first call, within its arguments, after it, and within the second's markup.
CUTS = {
    "before the name": (20, []),
    "after the name": (len('<tool_call>\n{"name": "weather",'), []),
    "in the arguments": (56, [{"name": "weather", "arguments": '{"city": "O'}]),
    "in the end marker": (70, [FIRST]),
    "in the next marker": (85, [FIRST]),
    "behind the next marker": (92, [FIRST]),
    "in the next name": (105, [FIRST]),
}


def parse(parser, text, cut=True):
    """(calls, content) of an output."""
    pieces = parser.push(text) + parser.finish(cut)
    calls = []
    for piece in pieces:
        if isinstance(piece, CallBegin):
            calls.append({"name": piece.name, "arguments": ""})
        elif isinstance(piece, CallArguments):
            calls[-1]["arguments"] += piece.text
    return calls, "".join(piece.text for piece in pieces if isinstance(piece, Content))


def parser_of(template, only_calls):
    return format_of(template, lambda text: None).parser({"weather", "now"}, only_calls)


@pytest.mark.parametrize("family", TEMPLATES)
def test_forced_calls_that_are_cut_leave_no_content(family):
    text = CALLS[family]
    whole, _ = parse(parser_of(TEMPLATES[family], True), text)
    for length in range(len(text)):
        calls, content = parse(parser_of(TEMPLATES[family], True), text[:length])
        assert content == ""
        assert [call["name"] for call in whole[: len(calls)]] == [call["name"] for call in calls]
        assert calls[:-1] == whole[: len(calls)][:-1]


@pytest.mark.parametrize("family", TEMPLATES)
def test_calls_that_are_cut_after_a_call_leave_no_content(family):
    text = CALLS[family]
    for length in range(len(text)):
        calls, content = parse(parser_of(TEMPLATES[family], False), text[:length])
        assert content in ("", text[:length])
        assert not (calls and content)


@pytest.mark.parametrize(
    ("format_type", "text", "content"),
    [
        (HermesFormat, "a <", "a <"),
        (HermesFormat, "The tag <tool_call>", "The tag <tool_call>"),
        (HermesFormat, 'So: <tool_call>\n{"name": "weather",', "So: "),
        (HermesFormat, '<tool_call>\n{"name": "now"}</tool_call> It is <', " It is <"),
        (PromptedFormat, '```json\n{"name": "a', '```json\n{"name": "a'),
        (PromptedFormat, '{"answer": 4', '{"answer": 4'),
        (LlamaFormat, '{"name": "weather"', '{"name": "weather"'),
        (LlamaFormat, '{"name": "now", "parameters": {}}; {"name": "we', ""),
    ],
)
def test_ambiguous_text_is_kept(format_type, text, content):
    assert parse(format_type.parser({"weather", "now"}), text)[1] == content


def test_an_incomplete_call_that_the_model_ended_is_content():
    text = '<tool_call>\n{"name": "weather",'
    assert parse(HermesFormat.parser({"weather"}), text, cut=False) == ([], text)


def test_gemmas_end_marker_is_not_part_of_arguments():
    calls, _ = parse(GemmaFormat.parser({"now"}), "<start_function_call>call:now{a:1}<end_func")
    assert calls == [{"name": "now", "arguments": '{"a": 1}'}]


@pytest.mark.parametrize("where", CUTS)
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_responses_that_are_cut_have_incomplete_calls(choice, where):
    length, calls = CUTS[where]
    body = chat(tools=TOOLS, tool_choice=choice, max_tokens=length)
    whole, streamed = answer(body), streamed_answer(body)
    assert whole == streamed == ("length", "", calls)


@pytest.mark.parametrize("stop", ["\n", "Oslo"])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_stop_strings_do_not_apply_to_forced_calls(choice, stop):
    body = chat(tools=TOOLS, tool_choice=choice)
    whole, streamed = answer(body | {"stop": stop}), streamed_answer(body | {"stop": stop})
    assert whole == streamed == answer(body)
    assert whole[0] == "tool_calls"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ({"stop": "slo"}, ("stop", "", [{"name": "weather", "arguments": '{"city": "O'}])),
        (
            {"stop_token_ids": [FIRST_BYTE + ord("O")]},
            ("stop", "", [{"name": "weather", "arguments": '{"city": "'}]),
        ),
        ({"stop": '"weather",'}, ("stop", "", [])),
        ({"stop": "</tool_call>"}, ("tool_calls", "", [FIRST])),
    ],
    ids=str,
)
def test_the_finish_reason_of_a_response_that_is_cut_in_a_call(stop, expected):
    body = chat(tools=TOOLS, **stop)
    assert answer(body) == streamed_answer(body) == expected


def ask(body):
    engine = FakeEngine(context=4000, says=CALLS["hermes"])
    response = asyncio.run(post("/v1/chat/completions", body, engine, template=HERMES))
    assert response.status_code == 200, response.text
    return response


def answer(body):
    """(finish reason, content, calls)"""
    choice = ask(body).json()["choices"][0]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return choice["finish_reason"], message["content"] or "", calls


def streamed_answer(body):
    """The same of a stream."""
    *chunks, _ = events(ask(body | {"stream": True}).text)
    content, calls = "", []
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append({"name": call["function"]["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return chunks[-1]["choices"][0]["finish_reason"], content, calls
