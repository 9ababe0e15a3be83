"""Gemma's syntax of call arguments, ``{city:<escape>Oslo<escape>,days:[1,2]}``: reader and grammar rules.

Strings have special quotes, keys have none. Everything else is as in JSON.
"""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from shoal.serve.tools.lark_rules import literal

_BARE = re.compile(r"[^,:{}\[\]\s]+")


def to_json(text: str, quote: str) -> str:
    """``text`` as JSON; unchanged if it is invalid. quote: the delimiter of strings."""
    try:
        value, end = _Reader(text, quote).value(0)
    except (ValueError, RecursionError):
        return text
    return json.dumps(value, ensure_ascii=False) if not text[end:].strip() else text


class _Reader:
    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote

    def value(self, at: int) -> tuple[Any, int]:
        """The value that begins at ``at``, and its end; raises ValueError."""
        at = self._skip(at)
        if self._text.startswith(self._quote, at):
            begin = at + len(self._quote)
            end = self._text.index(self._quote, begin)
            return self._text[begin:end], end + len(self._quote)
        if self._text.startswith("{", at):
            return self._members(at + 1)
        if self._text.startswith("[", at):
            return self._entries(at + 1)
        if not (word := _BARE.match(self._text, at)):
            raise ValueError
        return _scalar(word[0]), word.end()

    def _members(self, at: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        while not self._text.startswith("}", at := self._skip(at)):
            begin = at
            at = self._text.index(":", at)
            key = self._text[begin:at].strip().removeprefix(self._quote).removesuffix(self._quote)
            found[key], at = self.value(at + 1)
            at = self._after_entry(at, "}")
        return found, at + 1

    def _entries(self, at: int) -> tuple[list[Any], int]:
        found = []
        while not self._text.startswith("]", at := self._skip(at)):
            entry, at = self.value(at)
            found.append(entry)
            at = self._after_entry(at, "]")
        return found, at + 1

    def _after_entry(self, at: int, end: str) -> int:
        """The position after the comma of an entry, or of ``end``."""
        at = self._skip(at)
        if self._text.startswith(",", at):
            return at + 1
        if not self._text.startswith(end, at):
            raise ValueError
        return at

    def _skip(self, at: int) -> int:
        while self._text[at : at + 1].isspace():
            at += 1
        return at


def _scalar(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


def arguments_rules(name: str, schema: Mapping[str, Any], quote: str) -> str:
    """Lark rules for values of ``schema``, by its type, properties, required, enum, const and items.

    name: of the first rule, and prefix of all others. quote: the terminal that delimits strings.
    """
    writer = _RuleWriter(name, quote)
    writer.write(schema, name)
    writer.lines.append(f"{name}_any: {quote} {_TEXT} {quote} | {_NUMBER} | {_WORDS}")
    return "\n".join(writer.lines)


_TEXT = "/[^<]*/"
_NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?/"
_WORDS = '"true" | "false" | "null"'
_SCALARS = {
    "number": _NUMBER,
    "integer": "/-?(0|[1-9][0-9]*)/",
    "boolean": '"true" | "false"',
    "null": '"null"',
}


class _RuleWriter:
    def __init__(self, prefix: str, quote: str) -> None:
        self.lines: list[str] = []
        self._names: Iterator[str] = (f"{prefix}_{number}" for number in count())
        self._any = f"{prefix}_any"
        self._quote = quote

    def rule(self, schema: Any) -> str:
        """The name of a rule for values of ``schema``."""
        if not isinstance(schema, Mapping):
            return self._any
        name = next(self._names)
        self.write(schema, name)
        return name

    def write(self, schema: Mapping[str, Any], name: str) -> None:
        """Write the rule ``name`` for values of ``schema``."""
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        kind = schema.get("type")
        if isinstance(choices, list) and choices:
            body = " | ".join(map(self._constant, choices))
        elif kind == "object" and isinstance(members := schema.get("properties"), Mapping) and members:
            required = schema.get("required")
            body = self._members(members, required if isinstance(required, list) else (), name)
        elif kind == "object":
            body = '"{" "}"'
        elif kind == "array":
            item = self.rule(schema.get("items"))
            body = f'"[" ({item} ("," {item})*)? "]"'
        elif kind == "string":
            body = f"{self._quote} {_TEXT} {self._quote}"
        else:
            body = _SCALARS.get(kind, self._any) if isinstance(kind, str) else self._any
        self.lines.append(f"{name}: {body}")

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {literal(value)} {self._quote}"
        return literal(json.dumps(value))

    def _members(self, properties: Mapping[str, Any], required: Any, name: str) -> str:
        """The body of an object's rule; keys are in alphabetical order, as in the chat template."""
        first, later = '"}"', '"}"'
        for number, key in reversed(list(enumerate(sorted(properties)))):
            member = f"{literal(f'{key}:')} {self.rule(properties[key])}"
            with_it, after_it = f"{member} {name}_after{number}", f'"," {member} {name}_after{number}'
            self.lines.append(f"{name}_after{number}: {later}")
            if key in required:
                first, later = with_it, after_it
            else:
                self.lines.append(f"{name}_from{number}: {with_it} | {first}")
                self.lines.append(f"{name}_next{number}: {after_it} | {later}")
                first, later = f"{name}_from{number}", f"{name}_next{number}"
        return f'"{{" {first}'
