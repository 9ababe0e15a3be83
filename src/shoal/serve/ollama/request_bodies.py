"""Request bodies of Ollama's API, and their translation to OpenAI's."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from shoal.core import InvalidRequest
from shoal.core.sampling import MAX_STOP_STRINGS
from shoal.serve.ollama.durations import KeepAliveSeconds
from shoal.serve.ollama.messages import MAX_TOOLS, Anything, OllamaMessage
from shoal.serve.ollama.tool_results import call_id, match_results
from shoal.serve.openai.chat_fields import REASONING_VARIABLES
from shoal.serve.openai.extra_fields import INT32_MAX
from shoal.serve.openai.messages import MAX_MESSAGES
from shoal.serve.openai.other_server_fields import OtherServerSamplers
from shoal.serve.openai.request_bodies import ServiceBody
from shoal.serve.openai.token_and_embedding_bodies import MAX_INPUTS
from shoal.serve.strict_model import EmptyList, NotTrue, StrictModel

# Sampling options that OpenAI's and vLLM's bodies name differently.
_RENAMED = {"repeat_penalty": "repetition_penalty"}


def _must_not_be_0(value: int) -> int:
    if value == 0:
        raise PydanticCustomError("must_not_be_0", "Must be at least 1, or below 0: as many as fit")
    return value


Empty = Annotated[str, Field(max_length=0)]
ConfiguredNumber = Annotated[int | None, Field(description="Ignored: the configuration decides.")]
ConfiguredSwitch = Annotated[bool | None, Field(description="Ignored: the configuration decides.")]
Stops = Annotated[list[str], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]


class SamplingOptions(StrictModel):
    """Sampling options, with the service's defaults; ranges are checked after translation."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | Stops | None = None


class Options(OtherServerSamplers, SamplingOptions):
    """All options."""

    num_predict: Annotated[int, Field(ge=-2, le=INT32_MAX), AfterValidator(_must_not_be_0)] | None = None
    """Most output tokens; below 0: as many as fit."""

    num_ctx: ConfiguredNumber = None
    num_keep: ConfiguredNumber = None
    num_batch: ConfiguredNumber = None
    num_gpu: ConfiguredNumber = None
    main_gpu: ConfiguredNumber = None
    num_thread: ConfiguredNumber = None
    numa: ConfiguredSwitch = None
    f16_kv: ConfiguredSwitch = None
    low_vram: ConfiguredSwitch = None
    use_mmap: ConfiguredSwitch = None
    use_mlock: ConfiguredSwitch = None
    repeat_last_n: int | None = None
    """Ignored: the penalty looks at the whole text."""


FIELD_NAMES = {_RENAMED.get(name, name): f"options.{name}" for name in SamplingOptions.model_fields} | {
    "max_tokens": "options.num_predict",
    "max_completion_tokens": "options.num_predict",
    "response_format": "format",
    "chat_template_kwargs": "think",
    "reasoning_effort": "think",
}
"""Ollama's names of fields, by OpenAI's."""


class OptionsBody(ServiceBody):
    """Fields of Ollama's generating and embedding endpoints."""

    field_errors: ClassVar[Mapping[str, str]] = {
        "keep_alive": 'must be a number of seconds or a duration such as "10m", "1h30m" or "-1m"',
    }

    options: Options | None = None
    """Those of sampling have no effect where nothing is drawn."""
    keep_alive: KeepAliveSeconds | None = None
    """How long the service stays loaded when no other request comes: seconds, or a duration such as "10m";
    0: it is unloaded at once, below 0: it stays. Only operators may say it."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, sent: Any) -> Any:
        # To Ollama, null is a missing field.
        return (
            {key: value for key, value in sent.items() if value is not None}
            if isinstance(sent, dict)
            else sent
        )

    def keep_alive_s(self) -> float | None:
        """``keep_alive`` in seconds; infinite: forever."""
        return cast("float | None", self.keep_alive)


class GenerateBody(OptionsBody):
    """Fields of both of Ollama's generating endpoints."""

    generates_text = True
    field_errors: ClassVar[Mapping[str, str]] = {
        **OptionsBody.field_errors,
        "format": 'must be "json" or a JSON schema',
        "think": 'must be true, false, "low", "medium" or "high"',
    }

    stream: bool | None = None
    """Default true."""
    format: Literal["", "json"] | Anything | None = None
    """"json", or a JSON schema that the output must follow."""
    think: bool | Literal["low", "medium", "high"] | None = None
    """Whether the model reasons before it answers, or how much; default: as its chat template has it."""
    truncate: bool | None = None
    """Ignored: a prompt that is too long is refused, as with false."""
    shift: bool | None = None
    """Ignored: output ends where the context does, as with false."""
    logprobs: NotTrue | None = None
    """Not supported, must be false: /v1/chat/completions and /v1/completions report log-probabilities."""
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    """Not supported, must be 0: /v1/chat/completions and /v1/completions report log-probabilities."""

    def shared_fields(self) -> dict[str, Any]:
        """The fields of an OpenAI body, of those that both endpoints have."""
        options = self.options or Options()
        sampling = options.model_dump(include=set(SamplingOptions.model_fields), exclude_none=True)
        fields = {_RENAMED.get(name, name): value for name, value in sampling.items()}
        if options.num_predict is not None and options.num_predict >= 0:
            fields["max_tokens"] = options.num_predict
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format:
            schema = {"name": "format", "schema": self.format}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return {"model": self.model, "stream": self.stream is not False, **fields}

    def chat_fields(self) -> dict[str, Any]:
        """Additional fields of an OpenAI chat."""
        if self.think is None:
            return {}
        if self.think is False:
            return {"reasoning_effort": "none", "include_reasoning": False}
        level = {} if self.think is True else {"reasoning_effort": self.think}
        return level | {"chat_template_kwargs": dict.fromkeys(REASONING_VARIABLES, True)}


def _to_openai_messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """The messages in OpenAI's shape."""
    ordered = match_results(messages)
    return [_to_openai_message(messages[number], number, answered) for number, answered in ordered]


def _to_openai_message(message: OllamaMessage, number: int, answered: str | None) -> dict[str, Any]:
    """An OpenAI message. number: its position. answered: id of the call whose result it is."""
    # For the chat template, a message with calls only has no content.
    content = message.content or (None if message.tool_calls else "")
    fields: dict[str, Any] = {"role": message.role, "content": content}
    if message.role == "tool":
        fields |= {"tool_call_id": answered, "name": message.tool}
    if message.role == "assistant" and message.thinking:
        fields["reasoning_content"] = message.thinking
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call_id(number, at, call),
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": json.dumps(call.function.arguments or {}),
                },
            }
            for at, call in enumerate(message.tool_calls)
        ]
    return fields


class OllamaChatBody(GenerateBody):
    """Body of /api/chat."""

    # Translated during validation: for long chats, this is in a worker process.
    messages: Annotated[
        list[OllamaMessage],
        Field(max_length=MAX_MESSAGES, fail_fast=True),
        AfterValidator(_to_openai_messages),
    ] = Field(default=[])
    tools: Annotated[list[Anything], Field(max_length=MAX_TOOLS)] | None = None

    def is_empty(self) -> bool:
        """Whether there is nothing to generate; Ollama then only loads the model."""
        return not self.messages

    def as_chat(self) -> dict[str, Any]:
        tools = {"tools": self.tools} if self.tools else {}
        return {**self.shared_fields(), **self.chat_fields(), "messages": self.messages, **tools}


class OllamaGenerateBody(GenerateBody):
    """Body of /api/generate."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    """Continue the prompt as it is, without the chat template."""
    suffix: Empty | None = None
    """Not supported, must be empty."""
    template: Empty | None = None
    """Not supported, must be empty: services[].chat_template sets one."""
    context: EmptyList | None = None
    """Not supported, must be empty: /api/chat takes a history."""
    images: EmptyList | None = None
    """Not supported, must be empty."""

    def is_empty(self) -> bool:
        """Whether there is nothing to generate; Ollama then only loads the model."""
        return not self.prompt

    def as_chat(self) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": self.prompt}]
        return {**self.shared_fields(), **self.chat_fields(), "messages": messages}

    def as_completion(self) -> dict[str, Any]:
        """The fields of an OpenAI completion; raises InvalidRequest where it needs a chat template."""
        if self.system:
            raise InvalidRequest("system needs a chat template, and a prompt that is not raw", param="system")
        return {**self.shared_fields(), "prompt": self.prompt}


class OllamaEmbedBody(OptionsBody):
    """Body of /api/embed."""

    field_errors: ClassVar[Mapping[str, str]] = {
        **OptionsBody.field_errors,
        "input": f"must be a string or a list of at most {MAX_INPUTS} strings",
    }

    input: str | Annotated[list[str], Field(max_length=MAX_INPUTS, fail_fast=True)] = ""
    """One text or several."""
    truncate: bool | None = None
    """Let the last tokens of an input that is too long count, which is the default; else it is refused."""
    dimensions: None = None
    """Not supported: the first numbers of an embedding mean something only in models trained for that."""

    def as_embedding(self) -> dict[str, Any]:
        cut = {} if self.truncate is False else {"truncate_prompt_tokens": -1}
        return {"model": self.model, "input": self.input, **cut}


class OllamaEmbeddingsBody(OptionsBody):
    """Body of /api/embeddings, the older endpoint."""

    prompt: str = ""
    """One text."""

    def as_embedding(self) -> dict[str, Any]:
        return {"model": self.model, "input": self.prompt, "truncate_prompt_tokens": -1}


class NamedBody(ServiceBody):
    """A body that is about one model, which older clients call ``name``."""

    name: str | None = None
    """The older name of ``model``."""

    @model_validator(mode="before")
    @classmethod
    def _accept_older_name(cls, sent: Any) -> Any:
        if isinstance(sent, dict) and not sent.get("model") and sent.get("name"):
            return {**sent, "model": sent["name"]}
        return sent


class PullBody(NamedBody):
    """Body of /api/pull."""

    stream: bool | None = None
    """Default true."""
    insecure: bool | None = None
    """Ignored."""


class ShowBody(NamedBody):
    """Body of /api/show."""

    verbose: bool | None = None
    """Ignored."""
