"""The request body of /v1/responses."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, Field

from shoal.core import Grammar, GrammarKind, InvalidRequest, SamplingDefaults, SamplingParams
from shoal.core.sampling import MAX_LOGPROBS
from shoal.serve.openai.chat_fields import (
    MAX_TOOLS,
    ChosenKind,
    Effort,
    FunctionDefinition,
    FunctionName,
    Json,
    TemplateFields,
    tool_to_template,
)
from shoal.serve.openai.error_field_names import GRAMMAR, client_field_names
from shoal.serve.openai.extra_fields import INT32_MAX
from shoal.serve.openai.json_schemas import close_schema
from shoal.serve.openai.nested_objects import Goals, StreamOptions
from shoal.serve.openai.other_server_fields import OtherServerFields
from shoal.serve.openai.request_bodies import (
    Count,
    Penalty,
    ServiceBody,
    TopP,
    engine_parameters,
)
from shoal.serve.responses_api.input_items import InputItems, to_messages
from shoal.serve.strict_model import EmptyDict, Ignored, NotTrue, StrictModel
from shoal.serve.tools.tool_use import ToolUse

FIELD_NAMES = {GRAMMAR: "text.format", "max_tokens": "max_output_tokens", "prompt": "input"}
"""The client's names of fields, by the names in the engine's errors."""
_LOGPROBS = "message.output_text.logprobs"
_STATELESS = "is not supported, since nothing is stored here; send the whole history as input"


class _FunctionType(StrictModel):
    type: Literal["function"]


class FunctionTool(FunctionDefinition, _FunctionType):
    """A function that the model may call."""


class ChosenFunction(StrictModel):
    """Calls this function."""

    limits_output = True

    type: Literal["function"]
    name: FunctionName


class PlainText(StrictModel):
    """Any text."""

    limits_output = True

    type: Literal["text"]


class JsonObject(StrictModel):
    """Any JSON object."""

    limits_output = True

    type: Literal["json_object"]


class JsonSchemaText(StrictModel):
    """JSON that is valid for a schema."""

    limits_output = True

    type: Literal["json_schema"]
    name: FunctionName
    """Ignored."""
    json_schema: Annotated[Json, Field(alias="schema")]
    description: str | None = None
    """Ignored."""
    strict: bool | None = None
    """Ignored: the output is always valid."""


class TextOptions(StrictModel):
    """What the text is like."""

    limits_output = True

    format: Annotated[PlainText | JsonObject | JsonSchemaText, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """For the chat template; without effect where that does not use it."""


class ReasoningOptions(StrictModel):
    """How to reason."""

    effort: Effort = None
    """For the chat template; none also sets its enable_thinking to false."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Ignored: reasoning is given in full."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """Ignored."""


class ResponsesBody(OtherServerFields, ServiceBody):
    """Write the next items of a conversation."""

    field_errors: ClassVar[Mapping[str, str]] = {
        "content": 'must be a string or a list of parts {"type": "input_text", "text": "..."}; images, '
        "audio and files are not supported",
        "role": "must be system, developer, user or assistant; results of tools are items of type "
        "function_call_output",
        "tool_choice": 'must be "none", "auto", "required" or {"type": "function", "name": "..."}',
    }
    top_level_errors: ClassVar[Mapping[str, str]] = {
        "input": "must be a string, or a list of items that is not empty; items are messages, function_call, "
        "function_call_output and reasoning",
        "previous_response_id": _STATELESS,
        "conversation": _STATELESS,
        "background": "must be false: nothing is stored here; read the response as a stream",
        "prompt": "is not supported, since no prompts are stored here; send instructions and input",
        "truncation": 'must be "disabled"; shorten the input yourself',
        "messages": "is a field of /v1/chat/completions; send input",
        "max_tokens": "is a field of /v1/chat/completions; send max_output_tokens",
        "response_format": "is a field of /v1/chat/completions; send text.format",
        "stop": "is not supported: responses have no stop strings; use /v1/chat/completions",
        "logit_bias": "is not supported: responses have no biases; use /v1/chat/completions",
        "n": "is not supported: a response is one output; send several requests",
    }

    input: Annotated[str | InputItems, AfterValidator(to_messages)]
    """A text of the user, or the items of the conversation: messages, function_call, function_call_output and
    reasoning."""
    instructions: str | None = None
    """A system message that goes before the input."""
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Functions that the model may call."""
    tool_choice: ChosenKind | ChosenFunction | None = None
    """As in chats, but the name is at the top."""
    parallel_tool_calls: bool | None = None
    """As in chats."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: Count | None = None
    """Most output tokens; default: as many as fit."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """As in chats, like the other parameters of sampling."""
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    slo: Goals | None = None
    """Latency goals, as in chats."""
    stream: bool | None = None
    include: Annotated[list[str], Field(max_length=32)] | None = None
    """message.output_text.logprobs: report log-probabilities; others are ignored."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """With log-probabilities: also of this many of the likeliest tokens."""
    metadata: dict[str, str] | None = None
    """Returned as it is."""

    store: bool | None = None
    """Ignored: nothing is stored."""
    stream_options: StreamOptions | None = None
    """Ignored."""
    user: str | None = None
    """Ignored."""
    service_tier: str | None = None
    """Ignored."""
    prompt_cache_key: str | None = None
    """Ignored."""
    prompt_cache_retention: str | None = None
    """Ignored."""
    prompt_cache_options: Ignored | None = None
    """Ignored."""
    safety_identifier: str | None = None
    """Ignored."""
    max_tool_calls: Count | None = None
    """Ignored: it is for tools that run on the server."""
    truncation: Literal["disabled"] | None = None
    """Not supported."""
    background: NotTrue | None = None
    """Not supported."""
    previous_response_id: None = None
    """Not supported: nothing is stored."""
    conversation: None = None
    """Not supported: nothing is stored."""
    prompt: EmptyDict | None = None
    """Not supported: nothing is stored."""

    def conversation_messages(self) -> list[Json]:
        """The messages for the chat template."""
        messages = cast("list[Json]", self.input)
        if self.instructions is None:
            return messages
        system = {"role": "system", "content": self.instructions}
        if messages[0]["role"] == "system":  # most templates take one such message
            return [system | {"content": f"{self.instructions}\n\n{messages[0]['content']}"}, *messages[1:]]
        return [system, *messages]

    def tool_use(self) -> ToolUse:
        """The tools and tool_choice of the request; raises InvalidRequest if they contradict each other."""
        chosen = self.tool_choice
        name = chosen.name if isinstance(chosen, ChosenFunction) else None
        return ToolUse(
            tools=[tool_to_template(tool) for tool in self.tools or ()],
            choice="function" if isinstance(chosen, ChosenFunction) else chosen or "auto",
            name=name,
            parallel=self.parallel_tool_calls is not False,
        )

    def template_fields(self) -> TemplateFields:
        """Fields of chats about the chat template, from those of this body."""
        return TemplateFields(
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            verbosity=self.text.verbosity if self.text else None,
        )

    def grammar(self) -> Grammar | None:
        """The grammar of ``text.format``."""
        match self.text.format if self.text else None:
            case JsonObject():
                schema: Json = {"type": "object"}
            case JsonSchemaText(json_schema=sent):
                schema = close_schema(sent)
            case _:
                return None
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))

    def sampling(self, defaults: SamplingDefaults) -> SamplingParams:
        """The parameters for the engine; raises InvalidRequest if fields contradict each other."""
        reports_logprobs = _LOGPROBS in (self.include or ())
        if self.top_logprobs and not reports_logprobs:
            raise InvalidRequest(f"top_logprobs needs include: [{_LOGPROBS!r}]", param="top_logprobs")
        parameters: dict[str, Any] = {
            name: value
            for name in SamplingParams.__dataclass_fields__
            if name != "grammar" and (value := getattr(self, name, None)) is not None
        }
        parameters["max_tokens"] = self.max_output_tokens
        parameters["logprobs"] = (self.top_logprobs or 0) if reports_logprobs else None
        parameters["grammar"] = self.grammar()
        with client_field_names(FIELD_NAMES):
            return defaults.params(engine_parameters(parameters))
