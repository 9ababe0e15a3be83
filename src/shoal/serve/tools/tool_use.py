"""Tools and tool_choice of a request, and the grammar that forces or allows tool calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.core import Grammar, GrammarKind, InvalidRequest, SamplingParams
from shoal.serve.tools.call_formats import Function, ToolFormat
from shoal.serve.tools.lark_rules import json_rule


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request, and its tool_choice."""

    tools: Sequence[Mapping[str, Any]] = ()
    """In the shape of OpenAI's chat API."""
    choice: str = "auto"
    """"auto", "required", "none", or "function" to force a call of one tool."""
    name: str | None = None
    """The tool whose call is forced."""
    parallel: bool = True
    """Whether an output with forced calls may have more than one."""

    def __post_init__(self) -> None:
        """Raise InvalidRequest for duplicate or unknown names, and parameters of a wrong type."""
        names = [tool["function"]["name"] for tool in self.tools]
        for tool in self.tools:
            if tool["function"]["parameters"].get("type", "object") != "object":
                raise InvalidRequest(
                    f"the parameters of {tool['function']['name']!r} must be a JSON schema of type object",
                    param="tools",
                )
        for name in names:
            if names.count(name) > 1:
                raise InvalidRequest(f"two tools have the name {name!r}", param="tools")
        if self.must_call and not names:
            raise InvalidRequest("tool_choice asks for a call, but there are no tools", param="tool_choice")
        if self.name is not None and self.name not in names:
            raise InvalidRequest(
                f"tool_choice names {self.name!r}, which is none of the tools; there are: {', '.join(names)}",
                param="tool_choice",
            )

    @property
    def parses_calls(self) -> bool:
        """Whether calls are parsed in the output."""
        return bool(self.tools) and self.choice != "none"

    @property
    def must_call(self) -> bool:
        """Whether the output consists of calls only."""
        return self.choice in ("required", "function")

    @property
    def functions(self) -> list[Function]:
        return [
            Function(tool["function"]["name"], tool["function"]["parameters"])
            for tool in self.tools
            if self.name in (None, tool["function"]["name"])
        ]

    def constrain(self, sampling: SamplingParams, format: ToolFormat) -> SamplingParams:
        """``sampling`` with a grammar for forced calls, and with the text of special tokens that mark calls.

        If calls are optional and other output has a grammar, the grammar allows either. If calls are forced,
        stop strings are removed. Raises InvalidRequest if the grammars cannot be combined.
        """
        if not self.parses_calls:
            return sampling
        with_markers = replace(
            sampling, skip_special_tokens=sampling.skip_special_tokens and not format.special_tokens
        )
        if self.choice == "auto" and sampling.grammar is None:
            return with_markers
        rules = format.grammar(self.functions, self.parallel and format.parallel and self.name is None)
        if self.choice == "auto":
            rules += f"\nanswer: {_answer(sampling.grammar)}"
        start = "calls | answer" if self.choice == "auto" else "calls"
        # A stop string would cut a call.
        stop = () if self.must_call else sampling.stop
        return replace(
            with_markers, grammar=Grammar(GrammarKind.LARK, f"start: {start}\n{rules}\n"), stop=stop
        )


def _answer(grammar: Grammar | None) -> str:
    """The body of the rule for an answer without calls."""
    if grammar is None or grammar.kind is not GrammarKind.JSON_SCHEMA:
        raise InvalidRequest(
            "tools that may be called go together with an answer in JSON only; send tool_choice none or"
            " required, or a JSON schema",
            param="tools",
        )
    try:
        schema = json.loads(grammar.source)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the JSON schema of the answer is no JSON: {error}", param="grammar") from error
    return json_rule(schema) if isinstance(schema, dict) else f"%json {grammar.source}"
