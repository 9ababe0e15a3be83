"""From a conversation to a prompt, and to the way its outputs are read."""

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

# Most characters that a chat template may write for each byte of the largest body.
_TEMPLATE_GROWTH = 2

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat as the engine takes it."""

    text: str
    """The prompt, with its special tokens."""
    sampling: SamplingParams
    reading: ChatParsing
    field_names: FieldNames
    """What the body calls fields that errors may name."""


async def prepare_chat(
    api: Api,
    service: str,
    messages: Messages,
    use: ToolUse,
    fields: TemplateFields,
    sampling: SamplingParams,
    field_names: FieldNames,
) -> PreparedChat:
    """Lay ``messages`` out with the chat template of ``service``.

    sampling: what the request asks for without its tools. field_names: what the body calls its fields.
    Output that has a grammar begins at once, without reasoning, and so does all output where the client wants
    none. Raises InvalidRequest where none of that is possible.
    """
    tokenizer = api.tokenizer(service)
    template = tokenizer.chat_template.chosen(bool(use.tools))
    format = format_of(template.source, tokenizer.special_token)
    own_grammar = sampling.grammar
    with client_field_names({GRAMMAR: "tools"}):
        sampling = use.constrain(sampling, format)
    free = sampling.grammar is None
    thinks = free and fields.may_reason
    text = await chat_text(api, service, messages, fields.layout(template.source, thinks), use.tools)
    marks = None if fields.continue_final_message else reasoning_tags(template.source)
    opened = marks is not None and opens_reasoning(text, marks)
    if marks is not None and opened and not thinks:
        text, opened = f"{text}\n{marks[1]}\n\n", False
    if marks is not None and tokenizer.special_token(marks[1]) is not None:
        sampling = replace(sampling, skip_special_tokens=False)
    reading = ChatParsing(
        parser=partial(_parser, use, format, marks if free else None, opened),
        calls=use.parsed,
        call_id=format.call_id,
        include_reasoning=fields.shows_reasoning,
    )
    if sampling.grammar is not own_grammar:
        field_names = {**field_names, GRAMMAR: "tools"}
    return PreparedChat(text, sampling, reading, field_names)


async def chat_text(
    api: Api,
    service: str,
    messages: Messages,
    layout: Layout,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The conversation as the text of a prompt; raises the errors of ``ChatTemplate.render``."""
    tokenizer = api.tokenizer(service)
    template = tokenizer.chat_template.chosen(bool(tools))
    return await api.workers.run(
        f"chats of {service}",
        f"laying out these messages with the chat template of {service}",
        render_chat,
        template,
        messages,
        layout,
        tools,
        format_of(template.source, tokenizer.special_token),
        _TEMPLATE_GROWTH * api.max_body_bytes,
    )


def render_chat(
    template: ChatTemplate,
    messages: Messages,
    layout: Layout,
    tools: Sequence[Mapping[str, Any]],
    format: ToolFormat,
    max_characters: int,
) -> str:
    """The conversation as text, with tools as ``format`` has them; raises the errors of ``render``."""
    messages = sort_results(messages)
    if not format.described:
        history = split_parallel_calls(template, format.in_history(messages))
        return template.render(history, max_characters, replace(layout, tools=tools))
    try:
        return template.render(tools_as_text(messages, tools, True), max_characters, layout)
    except InvalidRequest:
        if not tools or messages[0]["role"] == "system":
            raise
    # Some templates refuse system messages, and would take the client's for one that comes later.
    return template.render(tools_as_text(messages, tools, False), max_characters, layout)


def _parser(use: ToolUse, format: ToolFormat, marks: ReasoningTags | None, opened: bool) -> OutputParser:
    names = {tool["function"]["name"] for tool in use.tools}
    inner: OutputParser = format.parser(names, use.must_call) if use.parsed else ContentParser()
    return inner if marks is None else ReasoningParser(marks, opened, inner)
