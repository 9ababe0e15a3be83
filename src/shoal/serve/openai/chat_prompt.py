"""Renders a chat as a prompt: chat template, tools and reasoning; and decides how its outputs are parsed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shoal.core import InvalidRequest, SamplingParams
from shoal.models.chat_template.template import ChatTemplate, Layout
from shoal.serve.api import Api
from shoal.serve.openai.chat_fields import TemplateFields
from shoal.serve.openai.chat_format import ChatParsing
from shoal.serve.openai.error_field_names import GRAMMAR, FieldNames, client_field_names
from shoal.serve.openai.reasoning_parser import (
    ContentParser,
    ReasoningParser,
    ReasoningTags,
    opens_reasoning,
    reasoning_tags,
)
from shoal.serve.tools.call_formats import ToolFormat, format_of
from shoal.serve.tools.output_pieces import OutputParser
from shoal.serve.tools.parallel_calls import split_parallel_calls
from shoal.serve.tools.result_order import sort_results
from shoal.serve.tools.tool_use import ToolUse
from shoal.serve.tools.tools_as_text import tools_as_text

# A rendered chat has at most this many characters for each byte of the largest body.
_MAX_CHARACTERS_PER_BODY_BYTE = 2

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class PreparedChat:
    text: str
    """The prompt, with its special tokens."""
    sampling: SamplingParams
    parsing: ChatParsing
    field_names: FieldNames
    """The client's names of fields that errors may name."""


async def prepare_chat(
    api: Api,
    service: str,
    messages: Messages,
    use: ToolUse,
    fields: TemplateFields,
    sampling: SamplingParams,
    field_names: FieldNames,
) -> PreparedChat:
    """Render ``messages`` with the chat template of ``service``, and add the grammar of forced tool calls.

    sampling: the request's parameters, without tools. field_names: the client's names of fields.
    The model reasons only where the output has no grammar and the client does not turn reasoning off.
    Raises InvalidRequest if fields contradict each other, or the template refuses the messages.
    """
    tokenizer = api.tokenizer(service)
    template = tokenizer.chat_template.chosen(bool(use.tools))
    await tokenizer.ready()
    format = format_of(template.source, tokenizer.special_token)
    client_grammar = sampling.grammar
    with client_field_names({GRAMMAR: "tools"}):
        sampling = use.constrain(sampling, format)
    unconstrained = sampling.grammar is None
    may_reason = unconstrained and fields.may_reason
    text = await chat_text(api, service, messages, fields.layout(template.source, may_reason), use.tools)
    tags = None if fields.continue_final_message else reasoning_tags(template.source)
    is_open = tags is not None and opens_reasoning(text, tags)
    if tags is not None and is_open and not may_reason:
        text, is_open = f"{text}\n{tags[1]}\n\n", False
    if tags is not None and tokenizer.special_token(tags[1]) is not None:
        sampling = replace(sampling, skip_special_tokens=False)
    parsing = ChatParsing(
        parser=partial(_parser, use, format, tags if unconstrained else None, is_open),
        calls=use.parses_calls,
        call_id=format.call_id,
        include_reasoning=fields.shows_reasoning,
    )
    if sampling.grammar is not client_grammar:
        field_names = {**field_names, GRAMMAR: "tools"}
    return PreparedChat(text, sampling, parsing, field_names)


async def chat_text(
    api: Api,
    service: str,
    messages: Messages,
    layout: Layout,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The conversation as the text of a prompt, rendered in a worker process.

    Raises the errors of ``ChatTemplate.render``.
    """
    tokenizer = api.tokenizer(service)
    template = tokenizer.chat_template.chosen(bool(tools))
    await tokenizer.ready()
    return await api.workers.run(
        f"chats of {service}",
        f"laying out these messages with the chat template of {service}",
        render_chat,
        template,
        messages,
        layout,
        tools,
        format_of(template.source, tokenizer.special_token),
        _MAX_CHARACTERS_PER_BODY_BYTE * api.max_body_bytes,
    )


def render_chat(
    template: ChatTemplate,
    messages: Messages,
    layout: Layout,
    tools: Sequence[Mapping[str, Any]],
    format: ToolFormat,
    max_characters: int,
) -> str:
    """The conversation as text, with tools in the way of ``format``; raises the errors of ``render``."""
    messages = sort_results(messages)
    if not format.prompted:
        history = split_parallel_calls(template, format.translate_history(messages))
        return template.render(history, max_characters, replace(layout, tools=tools))
    try:
        return template.render(tools_as_text(messages, tools, True), max_characters, layout)
    except InvalidRequest:
        if not tools or messages[0]["role"] == "system":
            raise
    # Some templates refuse system messages; then the tools go into the first user message.
    return template.render(tools_as_text(messages, tools, False), max_characters, layout)


def _parser(use: ToolUse, format: ToolFormat, tags: ReasoningTags | None, is_open: bool) -> OutputParser:
    names = {tool["function"]["name"] for tool in use.tools}
    inner: OutputParser = format.parser(names, use.must_call) if use.parses_calls else ContentParser()
    return inner if tags is None else ReasoningParser(tags, is_open, inner)
