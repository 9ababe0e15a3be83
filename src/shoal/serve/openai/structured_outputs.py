"""Fields for structured outputs (response_format, structured_outputs, guided_*, grammar), as grammars."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from shoal.core import Grammar, GrammarKind, InvalidRequest
from shoal.serve.openai.json_schemas import close_schema, close_schema_text
from shoal.serve.strict_model import NotTrue, StrictModel

MAX_OPTIONS = 4096
_ANY_OBJECT = '{"type": "object"}'

Options = Annotated[list[str], Field(min_length=1, max_length=MAX_OPTIONS, fail_fast=True)]
Source = Annotated[str, Field(min_length=1)]
# Converted to text while the body is parsed: for large bodies, in a worker process.
SchemaObject = Annotated[dict[str, Any], AfterValidator(lambda schema: json.dumps(close_schema(schema)))]
Schema = Annotated[Source, AfterValidator(close_schema_text)] | SchemaObject


class JsonSchema(StrictModel):
    """A JSON schema, as OpenAI sends it."""

    limits_output = True

    name: str | None = None
    """Ignored."""
    description: str | None = None
    """Ignored: the prompt should say what is wanted."""
    schema_: SchemaObject | None = Field(default=None, alias="schema")
    """The schema. Default: any object."""
    strict: bool | None = None
    """Ignored: every output follows the schema."""


_CONTENTS = {
    "text": (),
    "json_object": ("schema", "value"),
    "json": ("value", "schema"),
    "json_schema": ("json_schema", "schema", "value"),
    "regex": ("pattern", "value"),
    "grammar": ("grammar", "value"),
}
"""Types of a response format, with the alternative fields for its schema, pattern or grammar."""


class ResponseFormat(StrictModel):
    """OpenAI's field, also as llama.cpp, TGI, Together and Fireworks have it."""

    limits_output = True

    type: Literal["text", "json_object", "json_schema", "json", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    """For the type json_schema."""
    schema_: SchemaObject | None = Field(default=None, alias="schema")
    """For json_object and json_schema: the schema itself."""
    value: Schema | None = None
    """The schema, regular expression or grammar that belongs to the type."""
    pattern: Source | None = None
    """For the type regex."""
    grammar_: Source | None = Field(default=None, alias="grammar")
    """For the type grammar: one in the syntax of Lark or of GBNF."""

    def grammar(self) -> Grammar | None:
        """The grammar of the output; raises InvalidRequest if fields do not fit the type."""
        sent: dict[str, object] = {
            "json_schema": self.json_schema,
            "schema": self.schema_,
            "value": self.value,
            "pattern": self.pattern,
            "grammar": self.grammar_,
        }
        given = [(name, content) for name, content in sent.items() if content is not None]
        possible = _CONTENTS[self.type]
        if len(given) > 1 or any(name not in possible for name, _ in given):
            names = " and ".join(f"response_format.{name}" for name, _ in given)
            raise InvalidRequest(
                f"{names} must not be given with the type {self.type}; possible is "
                f"{'one of ' if len(possible) > 1 else ''}{', '.join(possible) or 'none'}",
                param="response_format",
            )
        if not given and self.type not in ("text", "json_object", "json"):
            raise InvalidRequest(
                f"response_format.{possible[0]} must be given with the type {self.type}",
                param="response_format",
            )
        content = given[0][1] if given else None
        match self.type:
            case "text":
                return None
            case "regex":
                return _grammar(GrammarKind.REGEX, content)
            case "grammar":
                return _grammar(GrammarKind.LARK, content)
        schema = content.schema_ if isinstance(content, JsonSchema) else content
        return _grammar(GrammarKind.JSON_SCHEMA, _ANY_OBJECT if schema is None else schema)


class StructuredOutputs(StrictModel):
    """vLLM's field: one of its languages."""

    limits_output = True

    json_: Schema | None = Field(default=None, alias="json")
    """A JSON schema, as an object or as text."""
    regex: Source | None = None
    """A regular expression, which the whole output matches."""
    choice: Options | None = None
    """The output is one of these."""
    grammar: Source | None = None
    """A context-free grammar in the syntax of Lark or of GBNF."""
    json_object: bool | None = None
    """Any JSON object."""
    disable_fallback: bool | None = None
    """Ignored: there is one implementation."""
    disable_any_whitespace: NotTrue | None = None
    disable_additional_properties: NotTrue | None = None
    structural_tag: None = None

    def grammars(self) -> list[tuple[str, Grammar]]:
        """The grammars of all fields that are set, with their paths in the body."""
        return _without_none(
            {
                "structured_outputs.json": _grammar(GrammarKind.JSON_SCHEMA, self.json_),
                "structured_outputs.regex": _grammar(GrammarKind.REGEX, self.regex),
                "structured_outputs.choice": _choice_grammar(self.choice),
                "structured_outputs.grammar": _grammar(GrammarKind.LARK, self.grammar),
                "structured_outputs.json_object": _grammar(
                    GrammarKind.JSON_SCHEMA, _ANY_OBJECT if self.json_object else None
                ),
            }
        )


class StructuredFields(StrictModel):
    """Fields of both generation endpoints, of which at most one may be set."""

    response_format: ResponseFormat | None = None
    """text, json_object or json_schema."""
    structured_outputs: StructuredOutputs | None = None
    """A JSON schema, regular expression, list of choices or grammar."""
    guided_json: Schema | None = None
    """The older name of structured_outputs.json."""
    guided_regex: Source | None = None
    """The older name of structured_outputs.regex."""
    guided_choice: Options | None = None
    """The older name of structured_outputs.choice."""
    guided_grammar: Source | None = None
    """The older name of structured_outputs.grammar."""
    guided_json_object: bool | None = None
    """The older name of structured_outputs.json_object."""
    grammar: str | None = None
    """llama.cpp's name of structured_outputs.grammar; an empty text is none."""
    ebnf: Source | None = None
    """SGLang's name of structured_outputs.grammar."""
    json_schema: Schema | None = None
    """llama.cpp's and SGLang's name of structured_outputs.json."""
    regex: Source | None = None
    """SGLang's name of structured_outputs.regex."""
    output_format: ResponseFormat | None = None
    """Anthropic's name of response_format."""
    guided_decoding_backend: str | None = None
    """Ignored: there is one implementation."""
    guided_whitespace_pattern: None = None
    """Not supported: JSON has one space, or a line break and an indentation, wherever it may have any."""

    def structure(self) -> tuple[str, Grammar] | None:
        """The field that constrains the output, and its grammar; None: there is none.

        Raises InvalidRequest if several fields are set.
        """
        given = _without_none(
            {
                "response_format": None if self.response_format is None else self.response_format.grammar(),
                "guided_json": _grammar(GrammarKind.JSON_SCHEMA, self.guided_json),
                "guided_regex": _grammar(GrammarKind.REGEX, self.guided_regex),
                "guided_choice": _choice_grammar(self.guided_choice),
                "guided_grammar": _grammar(GrammarKind.LARK, self.guided_grammar),
                "guided_json_object": _grammar(
                    GrammarKind.JSON_SCHEMA, _ANY_OBJECT if self.guided_json_object else None
                ),
                "grammar": _grammar(GrammarKind.LARK, self.grammar or None),
                "ebnf": _grammar(GrammarKind.LARK, self.ebnf),
                "json_schema": _grammar(GrammarKind.JSON_SCHEMA, self.json_schema),
                "regex": _grammar(GrammarKind.REGEX, self.regex),
                "output_format": None if self.output_format is None else self.output_format.grammar(),
            }
        )
        if self.structured_outputs is not None:
            given += self.structured_outputs.grammars()
        if len(given) > 1:
            names = ", ".join(name for name, _ in given)
            raise InvalidRequest(f"{names}: an output can follow one of them; give one", param=given[1][0])
        return given[0] if given else None


def _without_none(grammars: dict[str, Grammar | None]) -> list[tuple[str, Grammar]]:
    return [(name, grammar) for name, grammar in grammars.items() if grammar is not None]


def _grammar(kind: GrammarKind, source: object) -> Grammar | None:
    return None if source is None else Grammar(kind, str(source))


def _choice_grammar(options: Sequence[str] | None) -> Grammar | None:
    if options is None:
        return None
    return Grammar(GrammarKind.LARK, "start: " + " | ".join(map(json.dumps, options)))
