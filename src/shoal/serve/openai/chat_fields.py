"""Fields of chats: tools and tool_choice, reasoning, and variables of the chat template."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, Field

from shoal.core import InvalidRequest
from shoal.models.chat_template.template import Layout
from shoal.serve.strict_model import MAX_FIELDS, EmptyDict, NotFalse, NotTrue, StrictModel
from shoal.serve.tools.tool_use import ToolUse

MAX_TOOLS = 128
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Json = dict[str, Any]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "auto", "default"]
Effort = Annotated[
    ReasoningEffort | None, AfterValidator(lambda sent: None if sent in ("auto", "default") else sent)
]
"""How much to reason; auto and default: the chat template decides, as with null."""
ChosenKind = Annotated[
    Literal["none", "auto", "required", "any"],
    AfterValidator(lambda sent: "required" if sent == "any" else sent),
]
"""Whether to call tools; any is Mistral's word for required."""

REASONING_VARIABLES = ("enable_thinking", "thinking")
"""Chat template variables that turn reasoning on or off: most templates use the first; those of DeepSeek,
Granite and Kimi the second."""

# Template variables that have their own fields.
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
    input_schema: EmptyDict | None = None
    """Not supported: parameters is the schema of the arguments."""


class Tool(StrictModel):
    """A tool."""

    type: Literal["function"]
    function: FunctionDefinition


class ChosenName(StrictModel):
    """Names a function."""

    limits_output = True

    name: FunctionName


class ChosenTool(StrictModel):
    """Calls this tool."""

    limits_output = True

    type: Literal["function"]
    function: ChosenName


def tool_to_template(function: FunctionDefinition) -> Json:
    """A tool for the chat template."""
    parameters = function.parameters or {"type": "object", "properties": {}}
    definition = {"name": function.name, "description": function.description or "", "parameters": parameters}
    return {"type": "function", "function": definition}


def _tools_to_template(tools: list[Tool]) -> list[Json]:
    # A worker process may send them back, and plain dicts are unpickled faster.
    return [tool_to_template(tool.function) for tool in tools]


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(_tools_to_template)]


class ToolFields(StrictModel):
    """Fields about tools."""

    tools: Tools | None = None
    """Functions that the model may call."""
    tool_choice: ChosenKind | ChosenTool | None = None
    """auto (the default): the model decides; required, any: it calls some tool; or the tool that it calls."""
    parallel_tool_calls: bool | None = None
    """Allow several calls in an answer where tool_choice forces calls. Default true."""
    parse_tool_calls: NotFalse | None = None
    """Not supported, must be true: without tools nothing is read as a call."""
    disable_parallel_tool_use: NotTrue | None = None
    """Not supported: send parallel_tool_calls."""

    def tool_use(self) -> ToolUse:
        """The tools and tool_choice of the request; raises InvalidRequest if they contradict each other."""
        chosen = self.tool_choice
        named = isinstance(chosen, ChosenTool)
        return ToolUse(
            tools=cast("list[Json]", self.tools or []),
            choice="function" if isinstance(chosen, ChosenTool) else chosen or "auto",
            name=chosen.function.name if isinstance(chosen, ChosenTool) else None,
            parallel=self.parallel_tool_calls is not False and not named,
        )


class Thinking(StrictModel):
    """Whether to reason, as clients of Anthropic, GLM and DeepSeek say it; a budget is ignored."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    """adaptive and auto: as the chat template has it."""

    def wanted(self) -> bool | None:
        """Whether to reason; None: the chat template decides."""
        return {"enabled": True, "disabled": False}.get(self.type)


class ReasoningSettings(StrictModel):
    """How to reason, as OpenRouter's clients say it; a budget is ignored."""

    effort: Effort = None
    """As reasoning_effort."""
    enabled: bool | None = None
    """Whether to reason."""
    exclude: bool | None = None
    """true: do not return the reasoning."""


class TemplateFields(StrictModel):
    """Fields about the chat template and reasoning."""

    aliases: ClassVar[Mapping[str, str]] = {"think": "enable_thinking"}

    add_generation_prompt: bool | None = None
    """False: lay the messages out without the beginning of an answer."""
    continue_final_message: bool | None = None
    """Continue the last message, which is the assistant's, instead of a new one."""
    chat_template_kwargs: Annotated[Json, Field(max_length=MAX_FIELDS)] | None = None
    """Variables of the chat template, for example enable_thinking."""
    documents: Annotated[list[Json], Field(max_length=MAX_FIELDS, fail_fast=True)] | None = None
    """Documents, for chat templates that show them."""
    reasoning_effort: Effort = None
    """For the chat template; none: without reasoning; auto, default: as it has it."""
    include_reasoning: bool | None = None
    """Return the reasoning that the model marks. Default true."""
    thinking: Thinking | None = None
    """For the chat template: enabled and disabled set its enable_thinking and its thinking."""
    enable_thinking: bool | None = None
    """The same as a truth value."""
    reasoning: ReasoningSettings | None = None
    """Effort and whether to reason, as OpenRouter has them."""
    reasoning_format: Literal["auto", "deepseek", "parsed", "hidden"] | None = None
    """hidden: do not return the reasoning. Others: return it beside the content, as always."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """For the chat template; without effect where that does not use it."""
    separate_reasoning: NotFalse | None = None
    """Not supported, must be true: reasoning is not part of the content."""
    stream_reasoning: bool | None = None
    """Ignored: reasoning is streamed."""
    chat_template: None = None
    """Not supported; a service may have one in its configuration."""
    mm_processor_kwargs: EmptyDict | None = None
    """Not supported."""

    @property
    def shows_reasoning(self) -> bool:
        excluded = self.reasoning is not None and self.reasoning.exclude
        return self.include_reasoning is not False and not excluded and self.reasoning_format != "hidden"

    def effort(self) -> ReasoningEffort | None:
        """How much to reason; raises InvalidRequest if fields contradict each other."""
        other = None if self.reasoning is None else self.reasoning.effort
        if None not in (self.reasoning_effort, other) and self.reasoning_effort != other:
            raise InvalidRequest(
                "reasoning_effort and reasoning.effort contradict each other", param="reasoning.effort"
            )
        return self.reasoning_effort or other

    def wants_reasoning(self) -> bool | None:
        """Whether to reason; None: the chat template decides.

        Raises InvalidRequest if fields contradict each other.
        """
        settings = {
            "thinking": None if self.thinking is None else self.thinking.wanted(),
            "enable_thinking": self.enable_thinking,
            "reasoning.enabled": None if self.reasoning is None else self.reasoning.enabled,
            "reasoning_effort": False if self.effort() == "none" else None,
        }
        settings = {name: value for name, value in settings.items() if value is not None}
        if len(set(settings.values())) > 1:
            raise InvalidRequest(
                f"{' and '.join(settings)} contradict each other", param=next(iter(settings))
            )
        return next(iter(settings.values()), None)

    @property
    def may_reason(self) -> bool:
        """Whether the client does not turn reasoning off."""
        return self.wants_reasoning() is not False

    def check_last_message(self, messages: Sequence[Json]) -> None:
        """Raise InvalidRequest if the last message is to be continued but cannot be."""
        last = messages[-1]
        if self.continue_final_message and (last["role"] != "assistant" or last.get("tool_calls")):
            raise InvalidRequest(
                "continue_final_message: the last message must be the assistant's, and without tool_calls",
                param="continue_final_message",
            )

    def layout(self, template: str, may_reason: bool) -> Layout:
        """Rendering options and variables for the chat template with the source ``template``.

        Raises InvalidRequest if fields contradict each other, or the template does not support them.
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
        values = {"reasoning_effort": self.effort(), "verbosity": self.verbosity}
        variables: Json = {name: value for name, value in values.items() if value is not None}
        if (reasons := self.wants_reasoning() if may_reason else False) is not None:
            variables |= dict.fromkeys(REASONING_VARIABLES, reasons)
        return Layout(
            documents=self.documents or (),
            variables={**variables, **given},
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
        )
