"""Grammars for structured output, as source text: JSON schema, regular expression or Lark."""

from dataclasses import dataclass
from enum import StrEnum

MAX_GRAMMAR_BYTES = 128 << 10
"""Limit on the source of a grammar, in UTF-8."""


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    """JSON text."""
    REGEX = "regex"
    """The whole output matches it."""
    LARK = "lark"
    """A context-free grammar in the syntax of Lark, or of GBNF."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the output of a request; compiled by the executor's sampler."""

    kind: GrammarKind
    source: str
