"""Calls in the text of outputs, in every format, however the text is split."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypothesis_profiles import examples
from shoal.serve.openai.reasoning_parser import ContentParser, ReasoningParser
from shoal.serve.tools.call_formats import (
    Gemma4Format,
    GemmaFormat,
    HermesFormat,
    LlamaFormat,
    MistralFormat,
    MistralNamedFormat,
    PromptedFormat,
)
from shoal.serve.tools.output_pieces import CallArguments, CallBegin, Content, Reasoning, join_pieces

NAMES = {"f", "g"}
FORMATS = (
    HermesFormat,
    PromptedFormat,
    LlamaFormat,
    MistralFormat,
    MistralNamedFormat,
    GemmaFormat,
    Gemma4Format,
)


def parse(format_type, *pieces):
    parser = format_type.parser(NAMES)
    return join_pieces([piece for text in pieces for piece in parser.push(text)] + parser.finish())


def calls(pieces):
    """(name, arguments) of all calls."""
    found = []
    for piece in pieces:
        if isinstance(piece, CallBegin):
            found.append([piece.name, ""])
        elif isinstance(piece, CallArguments):
            found[-1][1] += piece.text
    return [tuple(call) for call in found]


def content(pieces):
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


F, G = ("f", '{"a": 1}'), ("g", "{}")


@pytest.mark.parametrize(
    ("format_type", "text", "expected_calls", "expected_content"),
    [
        (HermesFormat, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [F], ""),
        (
            HermesFormat,
            'Well.\n<tool_call>{"arguments":{"a": 1},"name":"f"}</tool_call>\n'
            '<tool_call>{"name":"g"}</tool_call>',
            [F, G],
            "Well.",
        ),
        (
            HermesFormat,
            '<tool_call>[{"name":"f","arguments":{"a": 1}}, {"name": "g"}]</tool_call>',
            [F, G],
            "",
        ),
        (HermesFormat, '<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', [F], ""),
        (HermesFormat, '<tool_call>{"name":"f","arguments":{"a": 1}</tool_call> ok', [F], " ok"),
        (HermesFormat, '<tool_call>{"name":"f","arguments":{"a": 1', [("f", '{"a": 1')], ""),
        (HermesFormat, '<tool_call>{"name":"f","arguments":{"a":', [("f", '{"a":')], ""),
        (HermesFormat, '<tool_call>{"name":"other","arguments":null}', [("other", "{}")], ""),
        (
            HermesFormat,
            '<tool_call>{"name":"f","arguments":{"s": "</tool_call>}\\"{"}}</tool_call>',
            [("f", '{"s": "</tool_call>}\\"{"}')],
            "",
        ),
        (PromptedFormat, '{"name": "f", "parameters": {"a": 1}}', [F], ""),
        (PromptedFormat, '```json\n{"name": "f", "arguments": {"a": 1}}\n```', [F], ""),
        (PromptedFormat, 'So:\n```\n[{"name":"f","arguments":{"a": 1}}]```\nDone.', [F], "So:\nDone."),
        (LlamaFormat, ' {"name": "f", "parameters": {"a": 1}}', [F], ""),
        (LlamaFormat, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', [F], ""),
        (
            LlamaFormat,
            '{"type": "function", "name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
            [F, G],
            "",
        ),
        (
            MistralFormat,
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, '
            '{"name": "g", "arguments": {}, "id": "012345678"}]',
            [F, G],
            "",
        ),
        (MistralNamedFormat, 'Hm.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', [F, G], "Hm."),
        (MistralNamedFormat, '[TOOL_CALLS]f[CALL_ID]012345678[ARGS]{"a": 1} bye', [F], " bye"),
        (MistralNamedFormat, '[TOOL_CALLS]f{"a": 1}', [F], ""),
        (
            GemmaFormat,
            "<start_function_call>call:f{a:1}<end_function_call>"
            "<start_function_call>call:g{}<end_function_call>",
            [F, G],
            "",
        ),
        (
            GemmaFormat,
            "<start_function_call>call:f{s:<escape>{a},<escape>,l:[1,-2.5,true],o:{n:null,w:word}}"
            "<end_function_call>",
            [("f", '{"s": "{a},", "l": [1, -2.5, true], "o": {"n": null, "w": "word"}}')],
            "",
        ),
        (GemmaFormat, "<start_function_call>call:f{a:", [("f", "{a:")], ""),
        (Gemma4Format, '<|tool_call>call:f{s:<|"|>x<|"|>}<tool_call|>', [("f", '{"s": "x"}')], ""),
    ],
)
def test_calls_and_content(format_type, text, expected_calls, expected_content):
    pieces = parse(format_type, text)
    assert calls(pieces) == expected_calls
    assert content(pieces) == expected_content


NOT_CALLS = [
    "",
    " ",
    "Just text.\n",
    "<tool_call>",
    "</tool_call>",
    "a <tool_call> b",
    '<tool_call>{"name": "f"',
    '<tool_call>{"name": ""}',
    '<tool_call>{"nom": "f"}</tool_call>',
    "<tool_call>[]",
    "[TOOL_CALLS]",
    "[TOOL_CALLS]f x",
    "[TOOL_CALLS]f[NO]{}",
    "<start_function_call>",
    "<start_function_call>call",
    "<|python_tag|>print(1)",
    '{"name": "unknown", "arguments": {}}',
    '{"name": "f"}',
    '{"answer": [1, {"name": "f"}]}',
    '{"name": "f", "arg',
    "```python\nprint({})\n```",
    '```json\n{"a": 1}\n```\n',
    "{{",
    "[link](address)",
    'Say {"name": "f", "arguments": {}}',
]


@pytest.mark.parametrize("format_type", FORMATS)
@pytest.mark.parametrize("text", NOT_CALLS)
def test_text_that_is_no_call_is_content(format_type, text):
    pieces = parse(format_type, text)
    assert calls(pieces) == []
    assert content(pieces) == text


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<start_function_call>call:f{",
    "<end_function_call>",
    "```json\n",
    "```",
    '{"name": "f", "arguments": ',
    '{"name":"g","parameters":',
    '{"a": "}", "b": [1]}',
    '"{\\"a\\": 1}"',
    "}",
    "]",
    ", ",
    "; ",
    "\n",
    "f",
    "<",
    "{",
    '"',
    "\\",
    "é",
    "<think>",
    "</think>",
]
OUTPUTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12).map("".join)


def cut(text, cuts):
    edges = [0, *sorted(at % (len(text) + 1) for at in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@given(format_type=st.sampled_from(FORMATS), text=OUTPUTS, cuts=st.lists(st.integers(0, 200), max_size=30))
@settings(max_examples=examples(600), deadline=None)
def test_splits_do_not_matter(format_type, text, cuts):
    assert parse(format_type, *cut(text, cuts)) == parse(format_type, text)


@given(text=OUTPUTS, opened=st.booleans(), cuts=st.lists(st.integers(0, 200), max_size=30))
@settings(max_examples=examples(300), deadline=None)
def test_splits_do_not_matter_for_reasoning(text, opened, cuts):
    def parse_all(*texts):
        parser = ReasoningParser(("<think>", "</think>"), opened, ContentParser())
        return join_pieces([piece for text in texts for piece in parser.push(text)] + parser.finish())

    pieces = parse_all(text)
    assert parse_all(*cut(text, cuts)) == pieces
    assert "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)) in text
    if not opened and not text.lstrip().startswith("<think>"):
        assert content(pieces) == text


@given(format_type=st.sampled_from(FORMATS), text=OUTPUTS)
@settings(max_examples=examples(300), deadline=None)
def test_text_without_calls_is_unchanged(format_type, text):
    pieces = parse(format_type, text)
    if not calls(pieces):
        assert content(pieces) == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(), JSON, max_size=4)


@given(arguments=st.lists(ARGUMENTS, min_size=1, max_size=3), indent=st.none() | st.just(2))
@settings(max_examples=examples(200), deadline=None)
def test_calls_as_templates_write_them_are_read_back(arguments, indent):
    def dump(value):
        return json.dumps(value, indent=indent, ensure_ascii=False)

    def call(key, value):
        return dump({"name": "f", key: value})

    written = {
        HermesFormat: "\n".join(f"<tool_call>\n{call('arguments', v)}\n</tool_call>" for v in arguments),
        LlamaFormat: "; ".join(call("parameters", v) for v in arguments),
        MistralFormat: f"[TOOL_CALLS] [{', '.join(call('arguments', v) for v in arguments)}]",
        MistralNamedFormat: "".join(f"[TOOL_CALLS]f[ARGS]{dump(v)}" for v in arguments),
    }
    for format_type, text in written.items():
        pieces = parse(format_type, text)
        assert content(pieces) == ""
        assert [(name, json.loads(text)) for name, text in calls(pieces)] == [("f", v) for v in arguments]


def test_arguments_are_streamed_as_they_come():
    parser = HermesFormat.parser(NAMES)
    assert parser.push('<tool_call>\n{"name": "f", "argu') == []
    assert parser.push('ments": {"a": "long') == [CallBegin("f"), CallArguments('{"a": "long')]
    assert parser.push(" text") == [CallArguments(" text")]
    assert parser.push('"}') == [CallArguments('"}')]
    assert parser.push("}\n</tool_call>") == []
    assert parser.finish() == []


def test_text_is_held_back_only_where_a_marker_may_begin():
    parser = HermesFormat.parser(NAMES)
    assert parser.push("a < b") == [Content("a < b")]
    assert parser.push(" <tool") == []
    assert parser.push("s") == [Content(" <tools")]


def test_empty_texts_are_no_pieces():
    parser = HermesFormat.parser(NAMES)
    assert parser.push("") == []
    assert parser.push("a") == [Content("a")]
    assert parser.push("") == []
    assert parser.finish() == []


def test_parsing_takes_linear_time():
    parser = PromptedFormat.parser(NAMES)
    text = '<tool_call>{"x": "' * 5000
    assert content(parser.push(text) + parser.finish()) == text


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, [Reasoning("Hm."), Content("Yes.")]),
        ("Hm.\n\nSo.</think>Yes.", True, [Reasoning("Hm.\n\nSo."), Content("Yes.")]),
        ("Hm. ", True, [Reasoning("Hm.")]),
        ("<think></think>", False, []),
        ("Yes <think>", False, [Content("Yes <think>")]),
        (" <thin", False, [Content(" <thin")]),
    ],
)
def test_reasoning(text, opened, expected):
    parser = ReasoningParser(("<think>", "</think>"), opened, ContentParser())
    assert join_pieces(parser.push(text) + parser.finish()) == expected
