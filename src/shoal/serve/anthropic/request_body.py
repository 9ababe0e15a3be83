"""The request bodies of /v1/messages and /v1/messages/count_tokens."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, Field

from shoal.core import Grammar, GrammarKind, InvalidRequest, SamplingDefaults, SamplingParams
from shoal.serve.anthropic.content_blocks import InputMessage, TextBlocks, joined_text, to_messages
from shoal.serve.openai.chat_fields import (
    MAX_TOOLS,
    FunctionName,
    Json,
    TemplateFields,
    Thinking,
    tool_to_template,
)
from shoal.serve.openai.chat_fields import FunctionDefinition as OpenAIFunction
from shoal.serve.openai.error_field_names import GRAMMAR, client_field_names
from shoal.serve.openai.extra_fields import INT32_MAX
from shoal.serve.openai.json_schemas import close_schema
from shoal.serve.openai.messages import MAX_MESSAGES
from shoal.serve.openai.nested_objects import Goals
from shoal.serve.openai.other_server_fields import OtherServerFields
from shoal.serve.openai.request_bodies import Count, ServiceBody, StopStrings, TopP, engine_parameters
from shoal.serve.strict_model import EmptyList, Ignored, StrictModel
from shoal.serve.tools.tool_use import ToolUse

FIELD_NAMES = {GRAMMAR: "output_config.format", "prompt": "messages", "stop": "stop_sequences"}
"""The client's names of fields, by the names in the engine's errors."""


class ClientTool(StrictModel):
    """A function of the client that the model may call."""

    type: Literal["custom"] | None = None
    name: FunctionName
    """Letters, digits, _ and -, at most 64."""
    description: str | None = None
    input_schema: Json
    """JSON schema of its arguments."""
    strict: bool | None = None
    """Ignored: calls that tool_choice asks for are always valid."""
    cache_control: Ignored | None = None
    """Ignored: prefixes are always cached."""
    eager_input_streaming: bool | None = None
    """Ignored: arguments are streamed as they come."""
    allowed_callers: Annotated[list[str], Field(max_length=MAX_TOOLS)] | None = None
    """Ignored."""
    defer_loading: bool | None = None
    """Ignored: the model sees all tools."""
    input_examples: Annotated[list[Json], Field(max_length=MAX_TOOLS)] | None = None
    """Ignored."""

    def to_template(self) -> Json:
        """The tool for the chat template."""
        return tool_to_template(
            OpenAIFunction(name=self.name, description=self.description, parameters=self.input_schema)
        )


class ToolChoice(StrictModel):
    """Whether to call tools, and which."""

    limits_output = True

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    """With type tool: which."""
    disable_parallel_tool_use: bool | None = None
    """At most one call in an answer, where calls are forced."""


class ThinkingOptions(StrictModel):
    """Whether to reason."""

    type: Literal["enabled", "disabled", "adaptive"]
    """adaptive: as the chat template has it."""
    budget_tokens: int | None = None
    """Ignored: max_tokens limits reasoning and answer together."""
    display: Literal["summarized", "omitted"] | None = None
    """omitted: do not return the reasoning; else it is returned in full."""


class JsonOutput(StrictModel):
    """JSON that is valid for a schema."""

    limits_output = True

    type: Literal["json_schema"]
    json_schema: Annotated[Json, Field(alias="schema")]


class OutputConfig(StrictModel):
    """What the answer is like."""

    limits_output = True

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """For the chat template; without effect where that does not use it."""
    format: JsonOutput | None = None


class CountBody(OtherServerFields, ServiceBody):
    """The fields that make a prompt."""

    field_errors: ClassVar[Mapping[str, str]] = {
        "content": "must be a string, or a list of blocks of type text, tool_use, tool_result, thinking or "
        "redacted_thinking; images and documents are not supported",
        "role": "must be user, assistant or system; results of tools are blocks of a user's message",
        "tools": "must be a list of functions with name and input_schema; tools that run on the server are"
        " not supported",
        "tool_choice": 'must be {"type": "auto"}, {"type": "any"}, {"type": "none"} or {"type": "tool", '
        '"name": "..."}',
    }

    messages: Annotated[
        list[InputMessage],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        AfterValidator(to_messages),
    ]
    """The conversation. An assistant's message at its end is continued."""
    system: str | TextBlocks | None = None
    """The system prompt."""
    tools: Annotated[list[ClientTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None  # type: ignore[assignment]
    cache_control: Ignored | None = None
    """Ignored: prefixes are always cached."""
    context_management: Ignored | None = None
    """Ignored: nothing is left out of the conversation."""
    mcp_servers: EmptyList | None = None
    """Not supported: nothing is looked up; results of tools go into messages."""

    def conversation_messages(self) -> list[Json]:
        """The messages for the chat template."""
        messages = cast("list[Json]", self.messages)
        text = joined_text(self.system)
        if not text:
            return messages
        system = {"role": "system", "content": text}
        if messages[0]["role"] == "system":  # most templates take one such message
            return [system | {"content": f"{text}\n\n{messages[0]['content']}"}, *messages[1:]]
        return [system, *messages]

    def tool_use(self) -> ToolUse:
        """The tools and tool_choice; raises InvalidRequest if they contradict each other."""
        chosen = self.tool_choice or ToolChoice(type="auto")
        if chosen.type == "tool" and chosen.name is None:
            raise InvalidRequest(
                "tool_choice.name is missing: which tool is to be called", "tool_choice.name"
            )
        names: dict[str, Literal["auto", "required", "function", "none"]] = {
            "any": "required",
            "tool": "function",
            "none": "none",
        }
        return ToolUse(
            tools=[tool.to_template() for tool in self.tools or ()],
            choice=names.get(chosen.type, "auto"),
            name=chosen.name if chosen.type == "tool" else None,
            parallel=not chosen.disable_parallel_tool_use and chosen.type != "tool",
        )

    def template_fields(self) -> TemplateFields:
        """Fields of chats about the chat template, from those of this body."""
        last = cast("list[Json]", self.messages)[-1]
        effort = None if self.output_config is None else self.output_config.effort
        thinking = self.thinking
        return TemplateFields(
            reasoning_effort="xhigh" if effort == "max" else effort,
            thinking=None if thinking is None else Thinking(type=thinking.type),
            include_reasoning=False if thinking is not None and thinking.display == "omitted" else None,
            continue_final_message=(last["role"] == "assistant" and not last.get("tool_calls")) or None,
        )

    def sampling(self, defaults: SamplingDefaults) -> SamplingParams:
        """The parameters for the engine; raises InvalidRequest if fields contradict each other."""
        with client_field_names(FIELD_NAMES):
            return defaults.params(engine_parameters(self.engine_values()))

    def engine_values(self) -> dict[str, Any]:
        """Values of ``SamplingParams``."""
        return {"grammar": self.grammar()}

    def grammar(self) -> Grammar | None:
        """The grammar of ``output_config.format``."""
        format = None if self.output_config is None else self.output_config.format
        if format is None:
            return None
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(close_schema(format.json_schema)))


class MessagesBody(CountBody):
    """Write the next message of a conversation."""

    top_level_errors: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "is a field of /v1/chat/completions; send max_tokens",
        "stop": "is a field of /v1/chat/completions; send stop_sequences",
        "response_format": "is a field of /v1/chat/completions; send output_config.format",
        "n": "is not supported: an answer is one message; send several requests",
    }

    max_tokens: Count
    """Most output tokens."""
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """Default: the service's, which /v1/models shows; as of the next two."""
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    """Makes sampling repeatable."""
    stop_sequences: StopStrings | None = None
    """Strings that end the output and are not part of it."""
    slo: Goals | None = None
    """Latency goals, as in chats."""
    metadata: Ignored | None = None
    """Ignored."""
    service_tier: str | None = None
    """Ignored."""
    inference_geo: str | None = None
    """Ignored."""
    container: Any = None
    """Ignored: no tools run on the server."""

    def engine_values(self) -> dict[str, Any]:
        names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
        sent = {name: value for name in names if (value := getattr(self, name)) is not None}
        return super().engine_values() | sent | {"stop": tuple(self.stop_sequences or ())}
