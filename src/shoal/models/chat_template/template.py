"""ChatTemplate: renders a conversation into one prompt with a model's Jinja template, in a sandbox.

Templates may use the names of the Hugging Face ecosystem: ``raise_exception``, ``strftime_now``, ``tojson``
and the ``generation`` block.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal.core import InvalidRequest
from shoal.models.chat_template.continuation import cut_after_last_content
from shoal.models.chat_template.messages import Message, plain_messages


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it only renders its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Inputs of a template beside the messages."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that the assistant may call, in the format of OpenAI's chat API."""
    documents: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    """End with the beginning of the assistant's answer."""
    continue_final_message: bool = False
    """End with the content of the last message, so that the answer continues it."""


_PLAIN_LAYOUT = Layout()


@dataclass(frozen=True)
class ChatTemplate:
    """A model's chat template; picklable."""

    source: str
    special_tokens: Mapping[str, str]
    """Texts of special tokens by template variable, such as ``bos_token``."""
    tool_use: str | None = None
    """Jinja source for conversations with tools; None for the same source."""

    def chosen(self, with_tools: bool) -> "ChatTemplate":
        """The template for conversations with tools or without them."""
        source = self.tool_use if with_tools and self.tool_use is not None else self.source
        return ChatTemplate(source, self.special_tokens)

    def check_syntax(self) -> None:
        """Raise InvalidRequest with the param ``chat_template`` if the source is not valid Jinja.

        This evaluates nothing, so it is safe for any source, but it does not check names of filters.
        """
        with _jinja_errors():
            _environment().parse(self.source)

    def check(self) -> None:
        """Raise InvalidRequest if the template cannot be compiled.

        Jinja evaluates constant expressions when it compiles, so this can take as long as rendering.
        """
        with _jinja_errors():
            _compiled(self.source)

    def render(
        self,
        messages: Sequence[Message],
        max_characters: int | None = None,
        layout: Layout = _PLAIN_LAYOUT,
    ) -> str:
        """The conversation as text that ends with the beginning of the answer, or as ``layout`` says.

        messages: in the format of OpenAI's chat API; text parts of a content are joined, keys without a value
        are omitted. Raises InvalidRequest if they are malformed, if the template rejects them or writes more
        than ``max_characters``.
        """

        def write(messages: Sequence[Message]) -> str:
            try:
                return self._write(messages, max_characters, layout)
            except InvalidRequest:
                # Some templates need a content even in messages that only have tool calls.
                filled = [{"content": "", **message} for message in messages]
                if filled == messages:
                    raise
                return self._write(filled, max_characters, layout)

        plain = plain_messages(messages)
        text = write(plain)
        return cut_after_last_content(text, plain, write) if layout.continue_final_message else text

    def _write(self, messages: Sequence[Message], max_characters: int | None, layout: Layout) -> str:
        names = {
            **layout.variables,
            **self.special_tokens,
            "messages": messages,
            "tools": list(layout.tools) or None,
            "documents": list(layout.documents) or None,
            "add_generation_prompt": layout.add_generation_prompt and not layout.continue_final_message,
        }
        with _jinja_errors():
            template = _compiled(self.source)
        try:
            text = _join(template.generate(names), max_characters)
            text.encode()  # fails for lone surrogates
        except InvalidRequest:
            raise
        except Exception as error:  # a template may raise anything
            raise InvalidRequest(
                f"the model's chat template cannot lay out these messages: {error or type(error).__name__}",
                param="messages",
            ) from error
        return text


@contextmanager
def _jinja_errors() -> Iterator[None]:
    """Turn errors of a template's source into InvalidRequest."""
    try:
        yield
    except TemplateSyntaxError as error:
        raise InvalidRequest(
            f"the chat template is not valid Jinja: line {error.lineno}: {error.message}",
            param="chat_template",
        ) from error
    except Exception as error:  # Python cannot compile the code that Jinja generates
        raise InvalidRequest(
            f"the chat template cannot be compiled: {error or type(error).__name__}",
            param="chat_template",
        ) from error


def _join(pieces: Iterable[str], max_characters: int | None) -> str:
    written: list[str] = []
    remaining = max_characters
    for piece in pieces:
        written.append(piece)
        if remaining is not None:
            remaining -= len(piece)
            if remaining < 0:
                raise InvalidRequest(
                    f"the model's chat template writes more than {max_characters} characters for them",
                    param="messages",
                )
    return "".join(written)


@lru_cache(maxsize=64)
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    # Jinja's own tojson escapes for HTML, which would put \u003c where the model expects <.
    environment.filters["tojson"] = _to_json
    del environment.globals["lipsum"]  # generates filler text of any length
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise InvalidRequest(f"the model's chat template refuses these messages: {message}", param="messages")
