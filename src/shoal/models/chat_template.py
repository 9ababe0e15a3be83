"""Chat templates: Jinja sources that lay out a conversation as one prompt.

The names that templates may use (``raise_exception``, ``strftime_now``, ``tojson``, the
``generation`` block) are those the Hugging Face ecosystem writes its templates for.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal.core import InvalidRequest


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's words for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One template, compiled when it is first used.

    special_tokens: names such as ``bos_token`` and their text, as the template may write them.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._compiled: Template | None = None

    def compile(self) -> None:
        """Check the template's syntax; raises InvalidRequest that names ``chat_template``."""
        if self._compiled is not None:
            return
        try:
            self._compiled = _environment().from_string(self._source)
        except TemplateSyntaxError as error:
            raise InvalidRequest(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}",
                param="chat_template",
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation as text that ends where the assistant is to go on.

        messages: as OpenAI's chat API has them; content parts of type text are joined. Raises
        InvalidRequest where they are malformed or the template refuses them.
        """
        plain = [_plain(message, number) for number, message in enumerate(messages)]
        if not plain:
            raise InvalidRequest("messages must not be empty", param="messages")
        self.compile()
        assert self._compiled is not None
        try:
            return self._compiled.render(
                {**self._special_tokens, "messages": plain, "add_generation_prompt": True}
                | {"tools": None, "documents": None}
            )
        except InvalidRequest:
            raise
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise InvalidRequest(
                f"the model's chat template cannot lay out these messages: {error}", param="messages"
            ) from error


def _plain(message: Any, number: int) -> dict[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where} must be an object with a role", param="messages")
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "".join(_part_text(part, where) for part in content)
    if content is None:
        content = ""
    if not isinstance(content, str):
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


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    # Jinja's own tojson escapes for HTML, which would put \u003c where the model expects <.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise InvalidRequest(f"the model's chat template refuses these messages: {message}", param="messages")
