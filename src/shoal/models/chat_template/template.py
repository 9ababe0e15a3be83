"""Chat templates: Jinja sources that turn a conversation into one prompt.

The names that templates may use (``raise_exception``, ``strftime_now``, ``tojson``, the
``generation`` block) are those the Hugging Face ecosystem writes its templates for.
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
from shoal.models.chat_template.continuation import up_to_last_content
from shoal.models.chat_template.messages import Message, plain_messages


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's words for training; here only its content counts."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a conversation is laid out, beside its messages."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that the assistant may call, as OpenAI's chat API has them."""
    documents: Sequence[Mapping[str, Any]] = ()
    """Documents for the assistant."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """More variables of the template."""
    add_generation_prompt: bool = True
    """End where the assistant's answer begins."""
    continue_final_message: bool = False
    """End with the content of the last message, so that the answer continues it."""


_PLAIN_LAYOUT = Layout()


@dataclass(frozen=True)
class ChatTemplate:
    """A model's template; a value that can be sent to another process."""

    source: str
    """Jinja source."""
    special_tokens: Mapping[str, str]
    """Names such as ``bos_token`` and their text, as the template may write them."""
    tool_use: str | None = None
    """Jinja source for conversations with tools; None: the same."""

    def chosen(self, with_tools: bool) -> "ChatTemplate":
        """The template for conversations with tools or without them."""
        source = self.tool_use if with_tools and self.tool_use is not None else self.source
        return ChatTemplate(source, self.special_tokens)

    def check_syntax(self) -> None:
        """Raise InvalidRequest that names ``chat_template`` where the source is not valid Jinja.

        Nothing of it is computed, so this is safe for any source; but names of filters are not looked up.
        """
        with _jinja_errors():
            _environment().parse(self.source)

    def check(self) -> None:
        """The same of all that can be known without messages.

        Jinja computes constant expressions when it compiles, so this can take as long as rendering.
        """
        with _jinja_errors():
            _compiled(self.source)

    def render(
        self,
        messages: Sequence[Message],
        max_characters: int | None = None,
        layout: Layout = _PLAIN_LAYOUT,
    ) -> str:
        """The conversation as text that ends where the assistant's answer begins, or as ``layout`` says.

        messages: as OpenAI's chat API has them; content parts of type text are joined, keys without a value
        left out. Raises InvalidRequest where they are malformed, where the template refuses them or writes
        more than ``max_characters``.
        """

        def write(messages: Sequence[Message]) -> str:
            try:
                return self._write(messages, max_characters, layout)
            except InvalidRequest:
                # Some templates need the text of a message that is nothing but calls.
                filled = [{"content": "", **message} for message in messages]
                if filled == messages:
                    raise
                return self._write(filled, max_characters, layout)

        plain = plain_messages(messages)
        text = write(plain)
        return up_to_last_content(text, plain, write) if layout.continue_final_message else text

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
            text.encode()  # half a character is no text
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
    """What is wrong with a template's source, as InvalidRequest."""
    try:
        yield
    except TemplateSyntaxError as error:
        raise InvalidRequest(
            f"the chat template is not valid Jinja: line {error.lineno}: {error.message}",
            param="chat_template",
        ) from error
    except Exception as error:  # Python cannot compile what Jinja makes of it
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
    del environment.globals["lipsum"]  # filler text, as much as one asks for
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise InvalidRequest(f"the model's chat template refuses these messages: {message}", param="messages")
