"""Chat templates: Jinja sources that turn a conversation into one prompt.

The names that templates may use (``raise_exception``, ``strftime_now``, ``tojson``, the
``generation`` block) are those the Hugging Face ecosystem writes its templates for.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal.core import InvalidRequest


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's words for training; here only its content counts."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


Message = Mapping[str, Any]
"""One message, as OpenAI's chat API has them; the arguments of calls are objects."""


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
    """One template; a value that can be sent to another process."""

    source: str
    """Jinja source."""
    special_tokens: Mapping[str, str]
    """Names such as ``bos_token`` and their text, as the template may write them."""

    def check_syntax(self) -> None:
        """Raise InvalidRequest that names ``chat_template`` where the source is not valid Jinja."""
        self._compile()

    def _compile(self) -> Template:
        try:
            return _compiled(self.source)
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

    def render(
        self,
        messages: Sequence[Message],
        max_characters: int | None = None,
        layout: Layout = _PLAIN_LAYOUT,
    ) -> str:
        """The conversation as text that ends where the assistant's answer begins, or as ``layout`` says.

        messages: as OpenAI's chat API has them; content parts of type text are joined. Raises
        InvalidRequest where they are malformed, where the template refuses them or writes more than
        ``max_characters``.
        """
        plain = [_plain(message, number) for number, message in enumerate(messages)]
        if not plain:
            raise InvalidRequest("messages must not be empty", param="messages")
        names = {
            **layout.variables,
            **self.special_tokens,
            "messages": plain,
            "tools": list(layout.tools) or None,
            "documents": list(layout.documents) or None,
            "add_generation_prompt": layout.add_generation_prompt and not layout.continue_final_message,
        }
        try:
            text = _join(self._compile().generate(names), max_characters)
            text.encode()  # half a character is no text
        except InvalidRequest:
            raise
        except Exception as error:  # a template may raise anything
            raise InvalidRequest(
                f"the model's chat template cannot lay out these messages: {error or type(error).__name__}",
                param="messages",
            ) from error
        return _up_to(text, plain[-1]["content"]) if layout.continue_final_message else text


def _up_to(text: str, content: str | None) -> str:
    """``text`` up to the end of the last message, which has this ``content``; templates may strip it."""
    for end in (content or "", (content or "").strip()):
        at = text.rfind(end)
        if end and at >= 0:
            return text[: at + len(end)]
    raise InvalidRequest(
        "the last message has no content that the chat template shows, so it cannot be continued",
        param="continue_final_message",
    )


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


def _plain(message: Any, number: int) -> dict[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where} must be an object with a role", param="messages")
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "".join(_part_text(part, where) for part in content)
    if content is None and not message.get("tool_calls"):
        content = ""
    if content is not None and not isinstance(content, str):
        raise InvalidRequest(f"{where}.content must be a string or a list of text parts", param="messages")
    return {**message, "content": content}


def _part_text(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise InvalidRequest(
            f'{where}.content has a part that is not {{"type": "text", "text": ...}};'
            " models here read text only",
            param="messages",
        )
    return text


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
