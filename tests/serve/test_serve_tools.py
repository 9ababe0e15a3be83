"""Tools in chats: requests, prompts, grammars and responses."""

import asyncio
import json
from functools import cache

import llguidance
import pytest
from serve_builders import (
    SERVICES,
    ByteTokenizer,
    FakeEngine,
    InlineWorkers,
    chat,
    events,
    make_client,
    make_tokenizers,
    post,
    tool,
)
from tool_templates import CALLS, GEMMA, GEMMA_FUNCTIONS, HERMES, MISTRAL, PLAIN, TEMPLATES

from shoal.core import Grammar, GrammarKind, InvalidRequest, SamplingParams
from shoal.models.chat_template.template import ChatTemplate
from shoal.serve import create_app
from shoal.serve.openai.chat_fields import TemplateFields
from shoal.serve.openai.chat_prompt import render_chat
from shoal.serve.openai.messages import Message, messages_to_template
from shoal.serve.tools.call_formats import Function, format_of
from shoal.serve.tools.tool_use import ToolUse

CHAT = "/v1/chat/completions"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NOTHING = {"type": "object", "properties": {}}
TOOLS = [
    tool("weather", description="Tells the weather.", parameters=CITY),
    tool("now", description="", parameters=NOTHING),
]
ASKED = [{"role": "user", "content": "Weather in Oslo?"}]


def ask(body, says=None, template=None):
    """(engine, response) of a request for a chat."""
    engine = FakeEngine(context=4000, says=says)
    response = asyncio.run(post(CHAT, body, engine, template=template))
    return engine, response


def message_of(body, says=None, template=None):
    _, response = ask(body, says, template)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


def prompt_of(body, template):
    engine, response = ask(body, "ok", template)
    assert response.status_code == 200, response.text
    return engine.decoder.decode(engine.submitted[0].prompt)


@pytest.mark.parametrize("family", TEMPLATES)
def test_calls_in_every_format(family):
    _, response = ask(chat(messages=ASKED, tools=TOOLS), CALLS[family], TEMPLATES[family])
    choice = response.json()["choices"][0]
    first, second = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}
    assert first["type"] == "function"
    assert first["function"]["name"] == "weather"
    assert json.loads(first["function"]["arguments"]) == {"city": "Oslo"}
    assert second["function"] == {"name": "now", "arguments": "{}"}
    assert first["id"] != second["id"]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("family", TEMPLATES)
def test_every_template_renders_histories_with_calls(family):
    message = message_of(chat(messages=ASKED, tools=TOOLS), CALLS[family], TEMPLATES[family])
    calls = message["tool_calls"][:1]
    history = [
        *ASKED,
        message | {"tool_calls": calls},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "Rain, 4 degrees"},
    ]
    prompt = prompt_of(chat(messages=history, tools=TOOLS), TEMPLATES[family])
    assert "Weather in Oslo?" in prompt
    assert "Rain, 4 degrees" in prompt
    assert "weather" in prompt


def test_tools_are_in_the_models_own_layout():
    prompt = prompt_of(chat(messages=ASKED, tools=TOOLS), HERMES)
    described = {
        "type": "function",
        "function": {"name": "weather", "description": "Tells the weather.", "parameters": CITY},
    }
    assert f"<tools>{json.dumps(described)}" in prompt
    assert prompt.endswith("<|im_start|>assistant\n")


def test_a_template_for_tools_is_used_with_tools():
    class Two(ByteTokenizer):
        chat_template = ChatTemplate(PLAIN, {}, tool_use=HERMES)

    def prompt(path, body):
        engine = FakeEngine(context=4000, says=CALLS["hermes"])
        app = create_app(engine, make_tokenizers() | {"chat": Two()}, SERVICES, workers=InlineWorkers())

        async def main():
            async with make_client(app) as client:
                return (await client.post(path, json=body)).json()

        answer = asyncio.run(main())
        tokens = answer["tokens"] if "tokens" in answer else engine.submitted[0].prompt
        return engine.decoder.decode(tokens), answer

    with_tools = chat(messages=ASKED, tools=TOOLS)
    written, answer = prompt(CHAT, with_tools)
    assert "<tools>" in written
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 2
    assert prompt("/tokenize", {"model": "chat", "messages": ASKED, "tools": TOOLS})[0] == written
    for path in (CHAT, "/tokenize"):
        assert prompt(path, {"model": "chat", "messages": ASKED})[0] == "<user>Weather in Oslo?"


def test_arguments_in_histories_are_objects_for_the_template():
    call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Zürich"}'}}
    history = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
    prompt = prompt_of(chat(messages=history, tools=TOOLS), HERMES)
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>' in prompt
    call["function"]["arguments"] = '{"city":'
    prompt = prompt_of(chat(messages=history, tools=TOOLS), HERMES)
    assert '"arguments": "{\\"city\\":"}' in prompt


def test_results_have_the_name_of_their_function():
    call = {"id": "x", "type": "function", "function": {"name": "now", "arguments": ""}}
    history = [
        *ASKED,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "noon"},
    ]
    assert "<start_function_response>response:nownoon" in prompt_of(chat(messages=history), GEMMA_FUNCTIONS)


def test_ids_are_shortened_for_mistral():
    call = {"id": "call_0123456789", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    history = [
        *ASKED,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0123456789", "content": "1"},
    ]
    prompt = prompt_of(chat(messages=history, tools=TOOLS), MISTRAL)
    id = prompt.partition('"id": "')[2][:9]
    assert id.isalnum()
    assert f'"call_id": "{id}"' in prompt


def test_tools_are_described_for_templates_without_tools():
    prompt = prompt_of(chat(messages=[{"role": "system", "content": "Be kind."}, *ASKED], tools=TOOLS), PLAIN)
    assert prompt.startswith("<system>Be kind.\n\nYou have tools.")
    assert '{"name": "weather", "description": "Tells the weather.", "parameters": ' in prompt
    assert prompt.endswith("<user>Weather in Oslo?")


def test_history_for_templates_without_tools():
    call = {"id": "x", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    history = [
        *ASKED,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call, call | {"id": "y"}]},
        {"role": "tool", "tool_call_id": "x", "content": "noon"},
        {"role": "tool", "tool_call_id": "y", "content": [{"type": "text", "text": "again"}]},
        {"role": "assistant", "content": "Noon."},
    ]
    written = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert prompt_of(chat(messages=history), PLAIN) == (
        f"<user>Weather in Oslo?<assistant>Let me see.\n{written}\n{written}"
        "<user><tool_response>\nnoon\n</tool_response>\n<tool_response>\nagain\n</tool_response>"
        "<assistant>Noon."
    )


def test_without_system_messages_the_user_describes_the_tools():
    prompt = prompt_of(chat(messages=ASKED, tools=TOOLS), GEMMA)
    assert prompt.startswith("<start_of_turn>user\nWeather in Oslo?\n\nYou have tools.")


def test_a_template_that_refuses_the_messages_says_why():
    _, response = ask(chat(messages=[*ASKED, *ASKED], tools=TOOLS), template=GEMMA)
    assert response.status_code == 400
    assert "alternate" in response.json()["error"]["message"]


def test_text_without_call_is_content():
    _, response = ask(chat(messages=ASKED, tools=TOOLS), "It rains.", HERMES)
    choice = response.json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "It rains.", "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_a_tool_needs_only_a_name():
    prompt = prompt_of(chat(messages=ASKED, tools=[tool("now", strict=True)]), HERMES)
    function = {"name": "now", "description": "", "parameters": NOTHING}
    assert json.dumps({"type": "function", "function": function}) in prompt


def test_without_tools_nothing_is_parsed():
    assert message_of(chat(messages=ASKED), CALLS["hermes"], HERMES)["content"] == CALLS["hermes"]


def test_tool_choice_none_renders_tools_but_parses_no_calls():
    body = chat(messages=ASKED, tools=TOOLS, tool_choice="none")
    assert message_of(body, CALLS["hermes"], HERMES)["content"] == CALLS["hermes"]
    assert "<tools>" in prompt_of(body, HERMES)


def test_an_incomplete_call_is_returned_unchanged():
    _, response = ask(chat(messages=ASKED, tools=TOOLS, max_tokens=60), CALLS["hermes"], HERMES)
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"'


def streamed(body, says, template):
    """(chunks except that of usage, messages assembled from their deltas, by index of the choice)."""
    _, response = ask(body | {"stream": True}, says, template)
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    messages = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            message = messages.setdefault(choice["index"], {"content": "", "tool_calls": []})
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    assert set(call) == {"index", "id", "type", "function"}
                    message["tool_calls"].append(dict(call["function"]))
                else:
                    message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"]
    return chunks, messages


@pytest.mark.parametrize("family", TEMPLATES)
def test_streamed_calls(family):
    body = chat(messages=ASKED, tools=TOOLS, n=2)
    chunks, messages = streamed(body, CALLS[family], TEMPLATES[family])
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    for message in messages.values():
        (first, second) = message.pop("tool_calls")
        assert (first["name"], json.loads(first["arguments"])) == ("weather", {"city": "Oslo"})
        assert second == {"name": "now", "arguments": "{}"}
        assert message == {"content": "", "finish_reason": "tool_calls"}
    assert len(messages) == 2


def test_streamed_text_before_a_call_and_pieces_of_arguments():
    chunks, messages = streamed(chat(messages=ASKED, tools=TOOLS), f"Let me look.\n{CALLS['hermes']}", HERMES)
    assert messages[0]["content"] == "Let me look."
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    pieces = [
        call["function"]["arguments"]
        for delta in deltas
        for call in delta.get("tool_calls", ())
        if call["index"] == 0
    ]
    assert pieces[0] == ""
    assert len(pieces) > 5


def test_logprobs_of_all_tokens_are_reported_with_calls():
    body = chat(messages=ASKED, tools=TOOLS, logprobs=True)
    _, response = ask(body, CALLS["hermes"], HERMES)
    whole = [entry["token"] for entry in response.json()["choices"][0]["logprobs"]["content"]]
    chunks, _ = streamed(body, CALLS["hermes"], HERMES)
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry["token"] for logprobs in found if logprobs for entry in logprobs["content"]] == whole
    assert "".join(whole) == CALLS["hermes"]


def grammar_of(body, template):
    engine, response = ask(body, "ok", template)
    assert response.status_code == 200, response.text
    return engine.submitted[0].sampling.grammar


def test_only_forced_calls_are_constrained():
    assert grammar_of(chat(messages=ASKED, tools=TOOLS), HERMES) is None
    assert grammar_of(chat(messages=ASKED, tools=TOOLS, tool_choice="auto"), HERMES) is None
    assert grammar_of(chat(messages=ASKED, tools=TOOLS, tool_choice="none"), HERMES) is None
    required = grammar_of(chat(messages=ASKED, tools=TOOLS, tool_choice="required"), HERMES)
    assert grammar_of(chat(messages=ASKED, tools=TOOLS, tool_choice="any"), HERMES) == required
    assert required.kind is GrammarKind.LARK
    assert "weather" in required.source
    assert "now" in required.source
    choice = {"type": "function", "function": {"name": "now"}}
    named = grammar_of(chat(messages=ASKED, tools=TOOLS, tool_choice=choice), HERMES)
    assert "now" in named.source
    assert "weather" not in named.source


def test_special_tokens_are_shown_and_named_by_id():
    def special_token(text):
        return {"[TOOL_CALLS]": 9}.get(text)

    format = format_of(MISTRAL, special_token)
    use = ToolUse(tools=TOOLS, choice="required")
    sampling = use.constrain(SamplingParams(), format)
    assert not sampling.skip_special_tokens
    assert '<[9]> "["' in sampling.grammar.source
    assert use.constrain(SamplingParams(), format_of(HERMES, special_token)).skip_special_tokens


FUNCTIONS = [Function("weather", CITY), Function("now", NOTHING)]
ONE = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "llama": '{"name": "weather", "parameters": {"city": "Oslo"}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]',
    "mistral-named": '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}',
    "gemma-functions": "<start_function_call>call:weather{city:<escape>Oslo<escape>}<end_function_call>",
}
ONE["gemma"] = ONE["plain"] = ONE["hermes"]


class Bytes:
    """One token for each byte, and one for the end."""

    eos_token_id, bos_token_id = 256, None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text):
        return list(text)


@cache
def byte_tokenizer():
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


def accepts(grammar, text):
    """Whether the grammar allows exactly ``text``."""
    matcher = llguidance.LLMatcher(byte_tokenizer(), llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.get_error()
    data = text.encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize("family", TEMPLATES)
def test_grammars_allow_what_parsers_read(family):
    format = format_of(TEMPLATES[family], lambda text: None)
    one, several = (f"start: calls\n{format.grammar(FUNCTIONS, flag)}\n" for flag in (False, True))
    assert accepts(one, ONE[family])
    assert accepts(several, ONE[family])
    for wrong in (ONE[family].replace("weather", "other"), ONE[family].replace("city", "town"), "It rains."):
        assert not accepts(several, wrong)
    if family == "hermes":
        assert accepts(several, CALLS[family])
        assert not accepts(one, CALLS[family])
    if family == "mistral-named":
        assert accepts(several, CALLS[family])


@pytest.mark.parametrize("family", TEMPLATES)
def test_calls_or_json(family):
    format = format_of(TEMPLATES[family], lambda text: None)
    schema = '{"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}'
    sampling = SamplingParams(grammar=Grammar(GrammarKind.JSON_SCHEMA, schema))
    grammar = ToolUse(tools=TOOLS).constrain(sampling, format).grammar.source
    assert accepts(grammar, ONE[family])
    assert accepts(grammar, '{"x": 4}')
    assert not accepts(grammar, '{"x": "a"}')


def test_calls_and_other_grammars_cannot_be_combined():
    sampling = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "a+"))
    with pytest.raises(InvalidRequest, match="JSON"):
        ToolUse(tools=TOOLS).constrain(sampling, format_of(HERMES, lambda text: None))
    assert (
        ToolUse(tools=TOOLS, choice="none").constrain(sampling, format_of(HERMES, lambda text: None))
        is sampling
    )


def test_schemas_of_any_shape_become_grammars():
    strange = [
        {"type": "object", "properties": [1], "required": 3},
        {"type": "object", "properties": {"a": 1, "b": {"type": ["string", "null"]}}, "required": "a"},
        {"type": "object", "properties": {"c": {"enum": []}, "d": {"type": "array", "items": [1]}}},
    ]
    for template in TEMPLATES.values():
        format = format_of(template, lambda text: None)
        assert format.grammar([Function(f"f{n}", schema) for n, schema in enumerate(strange)], True)


def test_formats_are_detected_from_the_template():
    for family, template in TEMPLATES.items():
        name = type(format_of(template, lambda text: None)).__name__
        expected = {"gemma-functions": "Gemma", "gemma": "Prompted", "plain": "Prompted"}
        assert name == f"{expected.get(family, family.title().replace('-', ''))}Format"


def test_large_histories_render_in_a_worker_as_plain_values():
    messages = messages_to_template([Message.model_validate(message) for message in ASKED])
    template, layout = ChatTemplate(PLAIN, {}), TemplateFields().layout(PLAIN, True)
    text = render_chat(template, messages, layout, TOOLS, format_of(PLAIN, lambda text: None), 10_000)
    assert text.endswith("<user>Weather in Oslo?")
