"""The fields of a request body that say what the output must look like: those of OpenAI and of vLLM."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from shoal.core import Grammar, GrammarKind, InvalidRequest
from shoal.serve.json_schemas import closed, closed_text
from shoal.serve.neutral import NotTrue, StrictModel

MAX_OPTIONS = 4096
_ANY_OBJECT = '{"type": "object"}'

Options = Annotated[list[str], Field(min_length=1, max_length=MAX_OPTIONS, fail_fast=True)]
Source = Annotated[str, Field(min_length=1)]
# Written as text where the body is parsed: of large bodies, in another process.
SchemaObject = Annotated[dict[str, Any], AfterValidator(lambda schema: json.dumps(closed(schema)))]
Schema = Annotated[Source, AfterValidator(closed_text)] | SchemaObject


class JsonSchema(StrictModel):
    """A JSON schema, as OpenAI sends it."""

    name: str | None = None
    """Ignored."""
    description: str | None = None
    """Ignored: the prompt should say what is wanted."""
    schema_: SchemaObject | None = Field(default=None, alias="schema")
    """The schema. Default: any object."""
    strict: bool | None = None
    """Ignored: every output follows the schema."""


class ResponseFormat(StrictModel):
    """OpenAI's field."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    """For the type json_schema."""

    def grammar(self) -> Grammar | None:
        """What the output must look like; raises InvalidRequest."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequest(
                "response_format.json_schema must be given with the type json_schema, and only then",
                param="response_format",
            )
        if self.type == "text":
            return None
        schema = None if self.json_schema is None else self.json_schema.schema_
        return _of_text(GrammarKind.JSON_SCHEMA, _ANY_OBJECT if schema is None else schema)


class StructuredOutputs(StrictModel):
    """vLLM's field: one of its languages."""

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
        """What was given, with its place in the body."""
        return _named(
            {
                "structured_outputs.json": _of_text(GrammarKind.JSON_SCHEMA, self.json_),
                "structured_outputs.regex": _of_text(GrammarKind.REGEX, self.regex),
                "structured_outputs.choice": _of_options(self.choice),
                "structured_outputs.grammar": _of_text(GrammarKind.LARK, self.grammar),
                "structured_outputs.json_object": _of_text(
                    GrammarKind.JSON_SCHEMA, _ANY_OBJECT if self.json_object else None
                ),
            }
        )


class StructuredFields(StrictModel):
    """Fields of both generation endpoints, of which one may be given."""

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
    guided_decoding_backend: str | None = None
    """Ignored: there is one implementation."""
    guided_whitespace_pattern: None = None
    """Not supported: JSON has one space, or a line break and an indentation, wherever it may have any."""

    def structure(self) -> tuple[str, Grammar] | None:
        """What the output must look like, and the field that says so.

        Raises InvalidRequest where several do.
        """
        given = _named(
            {
                "response_format": None if self.response_format is None else self.response_format.grammar(),
                "guided_json": _of_text(GrammarKind.JSON_SCHEMA, self.guided_json),
                "guided_regex": _of_text(GrammarKind.REGEX, self.guided_regex),
                "guided_choice": _of_options(self.guided_choice),
                "guided_grammar": _of_text(GrammarKind.LARK, self.guided_grammar),
            }
        )
        if self.structured_outputs is not None:
            given += self.structured_outputs.grammars()
        if len(given) > 1:
            names = ", ".join(name for name, _ in given)
            raise InvalidRequest(f"{names}: an output can follow one of them; give one", param=given[1][0])
        return given[0] if given else None


def _named(grammars: dict[str, Grammar | None]) -> list[tuple[str, Grammar]]:
    return [(name, grammar) for name, grammar in grammars.items() if grammar is not None]


def _of_text(kind: GrammarKind, source: str | dict[str, Any] | None) -> Grammar | None:
    return None if source is None else Grammar(kind, str(source))


def _of_options(options: Sequence[str] | None) -> Grammar | None:
    if options is None:
        return None
    return Grammar(GrammarKind.LARK, "start: " + " | ".join(map(json.dumps, options)))
