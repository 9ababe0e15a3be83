"""What an output must look like, as text that is compiled where tokens are chosen."""

from dataclasses import dataclass
from enum import StrEnum

MAX_GRAMMAR_BYTES = 128 << 10
"""Longest source of a grammar, in UTF-8."""


class GrammarKind(StrEnum):
    """Languages in which a grammar can be written."""

    JSON_SCHEMA = "json_schema"
    """A JSON schema, as JSON text."""
    REGEX = "regex"
    """A regular expression, which the whole output matches."""
    LARK = "lark"
    """A context-free grammar in the syntax of Lark, or of GBNF."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A set of texts, of which the output is one."""

    kind: GrammarKind
    """The language of ``source``."""
    source: str
    """The schema, expression or grammar."""
