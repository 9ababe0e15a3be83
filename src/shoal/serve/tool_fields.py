"""Fields of chats about tools, reasoning and the chat template."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, Field

from shoal.core import InvalidRequest
from shoal.models.chat_template import Layout
from shoal.serve.neutral import MAX_FIELDS, StrictModel
from shoal.serve.tools.use import ToolUse

MAX_TOOLS = 128
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Json = dict[str, Any]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]

REASONING_VARIABLES = ("enable_thinking", "thinking")
"""Variables by which chat templates are told whether the model is to reason: most know the first, DeepSeek's,
Granite's and Kimi's the second."""

# Variables of templates that have fields of their own.
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


class FunctionDefinition(StrictModel):
    """A function that the model may call."""

    name: FunctionName
    """Letters, digits, _ and -, at most 64."""
    description: str | None = None
    parameters: Json | None = None
    """JSON schema of its arguments; none: it has no arguments."""
    strict: bool | None = None
    """Ignored: calls that tool_choice asks for are always valid."""


class Tool(StrictModel):
    """A tool."""

    type: Literal["function"]
    function: FunctionDefinition


class ChosenName(StrictModel):
    """Names a function."""

    name: FunctionName


class ChosenTool(StrictModel):
    """Calls this tool."""

    type: Literal["function"]
    function: ChosenName


def tool_for_template(function: FunctionDefinition) -> Json:
    """A tool as chat templates expect it."""
    parameters = function.parameters or {"type": "object", "properties": {}}
    definition = {"name": function.name, "description": function.description or "", "parameters": parameters}
    return {"type": "function", "function": definition}


def _for_template(tools: list[Tool]) -> list[Json]:
    # A worker process may send them back: plain dicts are unpickled faster.
    return [tool_for_template(tool.function) for tool in tools]


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(_for_template)]


class ToolFields(StrictModel):
    """Fields about tools."""

    tools: Tools | None = None
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    """auto (the default): the model decides; required: it calls some tool; or the tool that it calls."""
    parallel_tool_calls: bool | None = None
    """Allow several calls in an answer that tool_choice asks calls of. Default true."""

    def tool_use(self) -> ToolUse:
        """What the request wants with its tools; raises InvalidRequest where that is not possible."""
        chosen = self.tool_choice
        named = isinstance(chosen, ChosenTool)
        return ToolUse(
            tools=cast("list[Json]", self.tools or []),
            choice="function" if isinstance(chosen, ChosenTool) else chosen or "auto",
            name=chosen.function.name if isinstance(chosen, ChosenTool) else None,
            several=self.parallel_tool_calls is not False and not named,
        )


class TemplateFields(StrictModel):
    """Fields about the chat template and reasoning."""

    add_generation_prompt: bool | None = None
    """False: lay the messages out without the beginning of an answer."""
    continue_final_message: bool | None = None
    """Continue the last message, which is the assistant's, instead of a new one."""
    chat_template_kwargs: Annotated[Json, Field(max_length=MAX_FIELDS)] | None = None
    """Variables of the chat template, for example enable_thinking."""
    documents: Annotated[list[Json], Field(max_length=MAX_FIELDS, fail_fast=True)] | None = None
    """Documents, for chat templates that show them."""
    reasoning_effort: ReasoningEffort | None = None
    """For the chat template; none: without reasoning."""
    include_reasoning: bool | None = None
    """Return the reasoning that the model marks. Default true."""

    @property
    def may_reason(self) -> bool:
        """Whether the client leaves it to the model to reason."""
        return self.reasoning_effort != "none"

    def check_last(self, messages: Sequence[Json]) -> None:
        """Raise InvalidRequest where the last message cannot go on as it is to."""
        last = messages[-1]
        if self.continue_final_message and (last["role"] != "assistant" or last.get("tool_calls")):
            raise InvalidRequest(
                "continue_final_message: the last message must be the assistant's, and without tool_calls",
                param="continue_final_message",
            )

    def layout(self, template: str, thinks: bool) -> Layout:
        """How the messages are laid out with ``template``; thinks: whether the model may reason.

        Raises InvalidRequest where fields contradict each other or the template.
        """
        given = self.chat_template_kwargs or {}
        for name in given:
            if name in _RESERVED:
                raise InvalidRequest(
                    f"chat_template_kwargs.{name}: send {name} as a field of the request",
                    param=f"chat_template_kwargs.{name}",
                )
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt: a new answer cannot begin where the last"
                " message goes on",
                param="continue_final_message",
            )
        if self.documents and "documents" not in template:
            raise InvalidRequest(
                "the chat template of this model shows no documents; put them into a message",
                param="documents",
            )
        variables: Json = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        if not thinks or not self.may_reason:
            variables |= dict.fromkeys(REASONING_VARIABLES, False)
        return Layout(
            documents=self.documents or (),
            variables={**variables, **given},
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
        )
