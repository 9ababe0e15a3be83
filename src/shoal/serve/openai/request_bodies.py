"""Request bodies of /v1/completions and /v1/chat/completions, and their sampling parameters.

Types are strict: a string is not a number, and ``true`` is not 1. But 1.0 is, since JSON has one number type.
A null is the same as a missing field. ``inert_fields`` has the fields without effect.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, cast

from pydantic import AfterValidator, Field, PrivateAttr

from shoal.core import InvalidRequest, SamplingDefaults, SamplingParams
from shoal.core.sampling import MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from shoal.serve.openai.chat_fields import TemplateFields, ToolFields
from shoal.serve.openai.content_parts import MAX_PARTS
from shoal.serve.openai.error_field_names import GRAMMAR, client_field_names
from shoal.serve.openai.extra_fields import EXTRA_FIELD_ERRORS, INT32_MAX, ExtraFields, TokenId
from shoal.serve.openai.inert_fields import InertChatFields, InertCompletionFields
from shoal.serve.openai.messages import MAX_MESSAGES, Message, messages_to_template
from shoal.serve.openai.nested_objects import Goals, StreamOptions, UsageOptions
from shoal.serve.openai.other_server_fields import OtherServerFields
from shoal.serve.openai.response_formats import StreamUsage
from shoal.serve.openai.structured_outputs import MAX_OPTIONS, StructuredFields
from shoal.serve.strict_model import StrictModel

MAX_STOP_TOKENS = 256
DEFAULT_COMPLETION_TOKENS = 16


Count = Annotated[int, Field(ge=1, le=INT32_MAX)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
TokenLists = Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
TopP = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]

# Fixed error texts, mostly for unions: what pydantic reports for the branches of a union does not help.
FIELD_ERRORS = EXTRA_FIELD_ERRORS | {
    "stop": f"must be a string of 1 to {MAX_STOP_CHARACTERS} characters, or a list of at most "
    f"{MAX_STOP_STRINGS} such strings",
    "content": 'must be a string, or a list of parts {"type": "text", "text": "..."} '
    f"and has at most {MAX_PARTS}; an assistant's may be of type refusal or thinking; "
    "images, audio and files are not supported",
    "role": "must be system, developer, user, assistant or tool",
    "tool_choice": 'must be "none", "auto", "required" or {"type": "function", "function": {"name": "..."}}',
    "functions": "is an old form that is not supported; send tools",
    "function_call": "is an old form that is not supported; send tool_choice, and tool_calls in messages",
    "response_format": 'must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
    '"json_schema": {"name": "...", "schema": {...}}}',
    "structured_outputs": "must be an object with one of json (a JSON schema), regex (a string), choice (a "
    f"list of at most {MAX_OPTIONS} strings), grammar (Lark or GBNF) and json_object (true)",
    "guided_json": "must be a JSON schema, as an object or as text",
    "modalities": 'is not supported, except ["text"]',
}


class ServiceBody(StrictModel):
    """Base of the bodies that name a service."""

    field_errors: ClassVar[Mapping[str, str]] = {}
    """Error texts of fields anywhere in the body; they override ``FIELD_ERRORS``."""
    top_level_errors: ClassVar[Mapping[str, str]] = {}
    """Error texts of top-level fields, but not of what is within them; also of unknown fields, which are then
    refused."""

    model: str
    """Name of a service; GET /v1/models lists them."""
    _sent_names: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def refused_names(cls) -> Collection[str]:
        return cls.top_level_errors

    def set_sent_names(self, sent: Mapping[str, str]) -> None:
        """Note the client's names of fields, by our names, where they differ."""
        self._sent_names.update(sent)

    def sent_name(self, name: str) -> str:
        """The client's name of the field ``name``."""
        return self._sent_names.get(name, name)

    def token_prompts(self) -> list[list[int]]:
        """Prompts that were sent as token ids, whose lengths are checked while parsing."""
        return []


class GenerationBody(ExtraFields, StructuredFields, OtherServerFields, ServiceBody):
    """The fields of both generation endpoints."""

    aliases: ClassVar[Mapping[str, str]] = {
        "max_new_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
        "max_tokens_to_sample": "max_tokens",
        "max_gen_len": "max_tokens",
        "max_gen_toks": "max_tokens",
        "maximum_tokens": "max_tokens",
        "max_response_tokens": "max_tokens",
        "n_predict": "max_tokens",
        "num_predict": "max_tokens",
        "min_new_tokens": "min_tokens",
        "stop_sequences": "stop",
        "stop_sequence": "stop",
        "stop_strings": "stop",
        "stopping_strings": "stop",
        "stop_words": "stop",
        "streaming": "stream",
        "temp": "temperature",
        "repeat_penalty": "repetition_penalty",
        "rep_pen": "repetition_penalty",
        "token_repetition_penalty": "repetition_penalty",
        "presence_pen": "presence_penalty",
        "freq_pen": "frequency_penalty",
        "random_seed": "seed",
        "sampling_seed": "seed",
        "sampler_seed": "seed",
        "num_return_sequences": "n",
        "n_cmpl": "n",
        "ban_eos_token": "ignore_eos",
        "no_stop_trim": "include_stop_str_in_output",
        "truncate": "truncate_prompt_tokens",
        "extra_key": "cache_salt",
        "grammar_string": "grammar",
        "regex_pattern": "regex",
    }

    max_tokens: Count | None = None
    """Most output tokens."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """0 always takes the likeliest token. The defaults of this and of top_p, top_k, min_p and
    repetition_penalty are the service's sampling_defaults, which /v1/models shows."""
    top_p: TopP | None = None
    """Sample from the likeliest tokens that have this probability together; 0: always the likeliest."""
    do_sample: bool | None = None
    """false: always the likeliest token, as with temperature 0."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """How many outputs of each prompt. Default 1."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    usage: UsageOptions | None = None
    stop: StopString | StopStrings | None = None
    """Strings that end the output and are not part of it."""
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    """Makes sampling repeatable; -1: another one each time."""
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None

    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    """Sample from the k likeliest tokens; 0 or -1: from all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample from tokens at least min_p times as likely as the likeliest."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    ignore_eos: bool | None = None
    """Do not stop at the model's end-of-sequence token."""
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    """Stop strings and stop tokens do not end the output before it has this many tokens."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    """Let the tokenizer add its special tokens to a text. Default true for completions."""
    slo: Goals | None = None
    """Latency goals of each output, for the scheduler and for /metrics. Default: those of the service."""

    def field_names(self) -> dict[str, str]:
        """The client's names of fields that the engine's errors may name; raises InvalidRequest."""
        structure = self.structure()
        grammar = {} if structure is None else {GRAMMAR: self.sent_name(structure[0])}
        return {"banned_sequences": "bad_words"} | self._sent_names | grammar

    def stream_usage(self) -> StreamUsage:
        """Which chunks of a stream have token counts."""
        options = self.stream_options or StreamOptions()
        include = options.include_usage or (self.usage is not None and self.usage.include)
        return StreamUsage(bool(include), bool(options.continuous_usage_stats))

    def output_limit(self) -> int | None:
        """Most output tokens; None: as many as fit."""
        return self.max_tokens

    def reported_prompt_logprobs(self) -> int | None:
        """``reported_logprobs`` of the prompt's tokens."""
        return self.prompt_logprobs

    def reported_logprobs(self) -> int | None:
        """Number of most likely tokens to report at each position; None: no log-probabilities."""
        raise NotImplementedError

    def sampling(self, defaults: SamplingDefaults, default_max_tokens: int | None = None) -> SamplingParams:
        """The parameters for the engine, with ``defaults`` for missing fields.

        Raises InvalidRequest if fields contradict each other.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "prompt_logprobs cannot be streamed; leave out stream", param="prompt_logprobs"
            )
        parameters = {
            name: value
            for name in SamplingParams.__dataclass_fields__
            if (value := getattr(self, name, None)) is not None
        }
        limit = self.output_limit()
        parameters["max_tokens"] = default_max_tokens if limit is None else limit
        parameters["logprobs"] = self.reported_logprobs()
        parameters["prompt_logprobs"] = self.reported_prompt_logprobs()
        parameters["logit_bias"] = self.biases()
        parameters["allowed_token_ids"] = tuple(self.allowed_token_ids or ())
        parameters["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        _, parameters["grammar"] = self.structure() or ("", None)
        parameters["stop_token_ids"] = tuple(self.stop_token_ids or ())
        if self.do_sample is False:
            parameters["temperature"] = 0.0
        with client_field_names(self.field_names()):
            return defaults.params(engine_parameters(parameters))


def engine_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    """Adapt parameters to the engine: ``top_p`` 0 is greedy sampling, ``seed`` -1 is none.

    vLLM and llama.cpp define them so.
    """
    if parameters.get("top_p") == 0:
        parameters |= {"top_p": 1.0, "temperature": 0.0}
    if parameters.get("seed") == -1:
        del parameters["seed"]
    return parameters


class CompletionBody(InertCompletionFields, GenerationBody):
    """Continue a text."""

    aliases: ClassVar[Mapping[str, str]] = {
        **GenerationBody.aliases,
        "max_completion_tokens": "max_tokens",
        "return_full_text": "echo",
    }
    field_errors: ClassVar[Mapping[str, str]] = {
        "prompt": "must be a string, a list of strings, a list of token ids, or a list of lists of token ids;"
        f" lists must not be empty and have at most {MAX_CHOICES} prompts, token ids are integers from 0 on",
    }

    prompt: str | Texts | TokenIds | TokenLists
    """One prompt or several, as text or as token ids."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Report the log-probability of each token, and of this many of the likeliest."""
    echo: bool | None = None
    """true: the text begins with the prompt, as do the log-probabilities; these not with stream."""
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    """Most output tokens; 0, with echo: none."""
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    """Not supported, must be 0: logprobs is a number in completions."""

    @property
    def only_echoes(self) -> bool:
        """Whether the response is the prompt alone; the engine still generates one token, which is hidden."""
        return bool(self.echo) and self.max_tokens == 0

    def output_limit(self) -> int | None:
        """``max_tokens``, at least 1."""
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens: 0 needs echo: true; ask for at least 1", param="max_tokens")
        return 1 if self.only_echoes else self.max_tokens

    def reported_logprobs(self) -> int | None:
        if self.echo and self.stream and self.logprobs is not None:
            raise InvalidRequest(
                "logprobs with echo cannot be streamed; leave out stream or logprobs", param="logprobs"
            )
        return self.logprobs

    def reported_prompt_logprobs(self) -> int | None:
        """``prompt_logprobs``, or ``logprobs`` if the prompt is echoed."""
        if self.prompt_logprobs is None and self.echo:
            return self.logprobs
        return self.prompt_logprobs

    def token_prompts(self) -> list[list[int]]:
        """As in ServiceBody, unless prompts will be truncated."""
        if self.truncate_prompt_tokens is not None:
            return []
        return [prompt for prompt in self.prompts() if not isinstance(prompt, str)]

    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        # Validation has checked that all entries of a list have one type.
        return cast(
            "list[str] | list[list[int]]", [self.prompt] if isinstance(self.prompt[0], int) else self.prompt
        )


class ChatBody(ToolFields, TemplateFields, InertChatFields, GenerationBody):
    """Write the next message of a chat."""

    aliases: ClassVar[Mapping[str, str]] = {**GenerationBody.aliases, **TemplateFields.aliases}

    messages: Annotated[
        list[Message],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        AfterValidator(messages_to_template),
    ]
    max_completion_tokens: Count | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    """Report the log-probability of each token."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Also of this many of the likeliest; needs logprobs."""

    def conversation(self) -> list[dict[str, Any]]:
        """The messages for the chat template; raises InvalidRequest if the last one cannot be continued."""
        messages = cast("list[dict[str, Any]]", self.messages)
        self.check_last_message(messages)
        return messages

    def field_names(self) -> dict[str, str]:
        limit = "max_completion_tokens" if self.max_tokens is None else self.sent_name("max_tokens")
        return super().field_names() | {"prompt": "messages", "max_tokens": limit}

    def output_limit(self) -> int | None:
        """``max_tokens`` under either of its names, which must agree."""
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise InvalidRequest(
                f"{self.sent_name('max_tokens')}={self.max_tokens} and max_completion_tokens="
                f"{self.max_completion_tokens} are two names of one limit; give one of them",
                param="max_completion_tokens",
            )
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def reported_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None
