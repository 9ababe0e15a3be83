"""What a request wants with its tools, and the grammar that follows from it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.core import Grammar, GrammarKind, InvalidRequest, SamplingParams
from shoal.serve.tools.call_formats import Function, ToolFormat
from shoal.serve.tools.lark_rules import json_rule


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request, and which of them must or may be called."""

    tools: Sequence[Mapping[str, Any]] = ()
    """As OpenAI's chat API has them."""
    choice: str = "auto"
    """"auto", "required", "none" or, to call one tool, "function"."""
    name: str | None = None
    """Of that one tool."""
    several: bool = True
    """Whether an answer may have several calls, where it must have one."""

    def __post_init__(self) -> None:
        """Raise InvalidRequest for names that occur twice or not at all, and parameters of a wrong type."""
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
    def parsed(self) -> bool:
        """Whether calls are looked for in the output."""
        return bool(self.tools) and self.choice != "none"

    @property
    def must_call(self) -> bool:
        """Whether the output is nothing but calls."""
        return self.choice in ("required", "function")

    @property
    def functions(self) -> list[Function]:
        """The tools that may be called."""
        return [
            Function(tool["function"]["name"], tool["function"]["parameters"])
            for tool in self.tools
            if self.name in (None, tool["function"]["name"])
        ]

    def constrain(self, sampling: SamplingParams, format: ToolFormat) -> SamplingParams:
        """``sampling`` with the grammar of the calls that are wanted, and with the text of their markers.

        Where calls are possible and other output has a grammar, an output is either. Where nothing but calls
        is, stop strings are left out. Raises InvalidRequest where grammars cannot be put together.
        """
        if not self.parsed:
            return sampling
        shown = replace(
            sampling, skip_special_tokens=sampling.skip_special_tokens and not format.special_tokens
        )
        if self.choice == "auto" and sampling.grammar is None:
            return shown
        rules = format.grammar(self.functions, self.several and format.several and self.name is None)
        if self.choice == "auto":
            rules += f"\nanswer: {_answer(sampling.grammar)}"
        start = "calls | answer" if self.choice == "auto" else "calls"
        # A stop string would leave a piece of a call.
        stop = () if self.must_call else sampling.stop
        return replace(shown, grammar=Grammar(GrammarKind.LARK, f"start: {start}\n{rules}\n"), stop=stop)


def _answer(grammar: Grammar | None) -> str:
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
