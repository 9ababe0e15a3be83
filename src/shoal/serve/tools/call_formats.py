"""Tool call formats of model families (Hermes, Llama, Mistral, Gemma): detection, parsers and grammars."""

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, ClassVar

from shoal.frontend.detokenize import StopStrings
from shoal.models.chat_template.messages import Message
from shoal.serve.tools.call_parser import CallParser, NotACall, OutputEnded, Reader
from shoal.serve.tools.gemma_values import arguments_rules, to_json
from shoal.serve.tools.lark_rules import arguments_schema, call_schema, json_rule, literal

MAX_CALLS = 16
"""Most calls of an output where calls are forced."""


@dataclass(frozen=True, slots=True)
class Function:
    """A tool that may be called."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""


class ToolFormat(ABC):
    """The tool call format of a family of models.

    special_tokens: markers that are special tokens of the model, with their ids. The parser needs their text
    in the output, and a grammar refers to them by id.
    """

    parser: ClassVar[type[CallParser]]
    parallel: ClassVar[bool] = True
    """Whether the chat template supports several calls in a message."""
    prompted: ClassVar[bool] = False
    """Whether plain messages describe tools and calls, because the chat template does not support tools."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self.special_tokens = special_tokens

    def call_id(self) -> str:
        """A new id of a call."""
        return f"call_{secrets.token_hex(12)}"

    def translate_history(self, messages: Sequence[Message]) -> list[Message]:
        """Earlier messages in the form that the chat template accepts."""
        return list(messages)

    @abstractmethod
    def grammar(self, functions: Sequence[Function], parallel: bool) -> str:
        """Lark rules for ``calls``: one call of ``functions``, or up to MAX_CALLS if ``parallel``."""

    def marker(self, text: str) -> str:
        """``text`` as a terminal of a rule: a special token or a literal."""
        token = self.special_tokens.get(text)
        return literal(text) if token is None else f"<[{token}]>"


def _alternatives(functions: Sequence[Function]) -> str:
    return " | ".join(f"call{number}" for number in range(len(functions)))


def _rules(functions: Sequence[Function]) -> str:
    """A rule ``callN`` for every function: a JSON object with its name and its arguments."""
    lines = []
    for number, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function.name)}, "arguments": '
        lines.append(f'call{number}: {literal(head)} arguments{number} "}}"')
        lines.append(f"arguments{number}: {json_rule(arguments_schema(function.parameters))}")
    return "\n".join(lines)


class _TaggedParser(CallParser):
    markers: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    end_marker = "</tool_call>"


class HermesFormat(ToolFormat):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3, and others."""

    parser = _TaggedParser

    def grammar(self, functions: Sequence[Function], parallel: bool) -> str:
        begin, end = self.marker("<tool_call>"), self.marker("</tool_call>")
        more = f'("\\n" call){{0,{MAX_CALLS - 1}}}' if parallel else ""
        return (
            f"calls: call {more}\n"
            f'call: {begin} "\\n" ({_alternatives(functions)}) "\\n" {end}\n'
            f"{_rules(functions)}"
        )


class _PromptedParser(_TaggedParser):
    """Also accepts what small models write instead: the object alone, or in a code fence."""

    markers = ("<tool_call>", "```")
    ambiguous_markers = ("```",)
    bare = True

    def _read_calls(self, marker: str) -> Reader[str | None]:
        if marker != "```":
            return (yield from super()._read_calls(marker))
        character = yield from self._read()
        while character.isalnum() or character == "_":
            character = yield from self._read()
        if character.isspace():
            character = yield from self._next_nonblank()
        yield from self._read_objects(character, known_names_only=True)
        self._held = []
        yield from self._expect("```")
        return None


class PromptedFormat(HermesFormat):
    """The Hermes format, described in a plain message for models whose chat template has no tools."""

    parser = _PromptedParser
    prompted = True


class _LlamaParser(CallParser):
    markers = ("<|python_tag|>",)
    separators = ";,"
    bare = True


class LlamaFormat(ToolFormat):
    """``{"name": ..., "parameters": {...}}`` as the whole output: Llama 3.1 to 3.3."""

    parser = _LlamaParser
    parallel = False

    def grammar(self, functions: Sequence[Function], parallel: bool) -> str:
        """As in ToolFormat; the chat template of these models supports single calls only."""
        lines = [f"calls: {_alternatives(functions)}"]
        for number, function in enumerate(functions):
            # One schema for the whole call, so that a grammar may allow it or other JSON.
            lines.append(f"call{number}: {json_rule(call_schema(function.name, function.parameters))}")
        return "\n".join(lines)


class _MistralParser(CallParser):
    markers = ("[TOOL_CALLS]",)

    def _read_calls(self, marker: str) -> Reader[str | None]:
        character = yield from self._next_nonblank()
        if character in "[{":
            yield from self._read_objects(character, known_names_only=False)
            return None
        name = ""
        while character.isalnum() or character in "_-.":
            name += character
            character = yield from self._read()
        if character == "[":
            character = yield from self._after_tags()
        if character != "{":
            raise NotACall
        self._begin_call(name)
        character = yield from self._read_arguments(character)
        self._end_call()
        return character

    def _after_tags(self) -> Reader[str]:
        """The character after ``CALL_ID]id[ARGS]`` or ``ARGS]``."""
        tag = yield from self._read_until("]")
        if tag == "CALL_ID":
            yield from self._read_until("[")
            tag = yield from self._read_until("]")
        if tag != "ARGS":
            raise NotACall
        return (yield from self._next_nonblank())


def _with_short_ids(message: Message) -> Message:
    short = dict(message)
    if "tool_calls" in short:
        short["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in short["tool_calls"]]
    if "tool_call_id" in short:
        short["tool_call_id"] = _short_id(short["tool_call_id"])
    return short


def _short_id(id: str) -> str:
    fits = len(id) == 9 and id.isascii() and id.isalnum()
    return id if fits else sha256(id.encode()).hexdigest()[:9]


class MistralFormat(ToolFormat):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``: Mistral's models up to 2024."""

    parser = _MistralParser

    def call_id(self) -> str:
        """A new id of nine letters and digits, which the chat templates of these models require."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def translate_history(self, messages: Sequence[Message]) -> list[Message]:
        """As in ToolFormat; ids of another shape are replaced."""
        return [_with_short_ids(message) for message in messages]

    def grammar(self, functions: Sequence[Function], parallel: bool) -> str:
        more = f'(", " call){{0,{MAX_CALLS - 1}}}' if parallel else ""
        return (
            f'calls: {self.marker("[TOOL_CALLS]")} "[" call {more} "]"\n'
            f"call: {_alternatives(functions)}\n"
            f"{_rules(functions)}"
        )


class MistralNamedFormat(MistralFormat):
    """``[TOOL_CALLS]name[ARGS]{...}``: Mistral's models from 2025 on."""

    def grammar(self, functions: Sequence[Function], parallel: bool) -> str:
        begin, middle = self.marker("[TOOL_CALLS]"), self.marker("[ARGS]")
        lines = [f"calls: call{{1,{MAX_CALLS if parallel else 1}}}", f"call: {_alternatives(functions)}"]
        for number, function in enumerate(functions):
            lines.append(f"call{number}: {begin} {literal(function.name)} {middle} arguments{number}")
            lines.append(f"arguments{number}: {json_rule(arguments_schema(function.parameters))}")
        return "\n".join(lines)


class _GemmaParser(CallParser):
    markers = ("<start_function_call>",)
    end_marker = "<end_function_call>"
    quote = "<escape>"

    def _read_calls(self, marker: str) -> Reader[str | None]:
        yield from self._expect("call:")
        self._begin_call((yield from self._read_until("{")).strip())
        end = StopStrings((self.end_marker,))
        body = "{"
        try:
            while end.found is None:
                body += end.push((yield from self._read()))
        except OutputEnded:
            # Other held-back text begins an end marker or a quote.
            self._add_arguments(to_json(body, self.quote))
            raise
        self._add_arguments(to_json(body, self.quote))
        self._end_call()
        return None


class GemmaFormat(ToolFormat):
    """``<start_function_call>call:name{key:<escape>text<escape>}<end_function_call>``: FunctionGemma."""

    parser: ClassVar[type[_GemmaParser]] = _GemmaParser

    def grammar(self, functions: Sequence[Function], parallel: bool) -> str:
        parser = self.parser
        begin, end = self.marker(parser.markers[0]), self.marker(parser.end_marker)
        lines = [f"calls: call{{1,{MAX_CALLS if parallel else 1}}}", f"call: {_alternatives(functions)}"]
        for number, function in enumerate(functions):
            head = literal(f"call:{function.name}")
            lines.append(f"call{number}: {begin} {head} arguments{number} {end}")
            schema = arguments_schema(function.parameters)
            lines.append(arguments_rules(f"arguments{number}", schema, self.marker(parser.quote)))
        return "\n".join(lines)


class _Gemma4Parser(_GemmaParser):
    markers = ("<|tool_call>",)
    end_marker = "<tool_call|>"
    quote = '<|"|>'


class Gemma4Format(GemmaFormat):
    """``<|tool_call>call:name{key:<|"|>text<|"|>}<tool_call|>``: Gemma 4."""

    parser = _Gemma4Parser


# By a string in the chat template; the first match counts, since a template may contain later ones, too.
_BY_TEMPLATE: tuple[tuple[str, type[ToolFormat]], ...] = (
    ("<start_function_call>", GemmaFormat),
    ("<|tool_call>", Gemma4Format),
    ("[ARGS]", MistralNamedFormat),
    ("[TOOL_CALLS]", MistralFormat),
    ("<tool_call>", HermesFormat),
    ('"parameters"', LlamaFormat),
)
_MENTIONS_TOOLS = re.compile(r"\btools\b")


def format_of(template: str, special_token: Callable[[str], int | None]) -> ToolFormat:
    """The tool call format of the model with this chat template.

    special_token: the id of the special token with this text; None: there is none.
    """
    supports_tools = _MENTIONS_TOOLS.search(template)
    format_type = next(
        (kind for text, kind in _BY_TEMPLATE if supports_tools and text in template), PromptedFormat
    )
    parser = format_type.parser
    texts = (*parser.markers, parser.end_marker, "[ARGS]", getattr(parser, "quote", ""))
    found = {text: special_token(text) for text in texts if text}
    return format_type({text: token for text, token in found.items() if token is not None})
