"""What clients may send: the bodies of the two generating endpoints, strictly typed.

Nothing is coerced: a string is no number, ``true`` is not 1. Fields of OpenAI that do not change the
output are taken and ignored. Those that would, and are not implemented, are declared with only their
neutral values, so the OpenAPI document says what is possible and anything else is refused by name.
A null is the same as leaving a field out.
"""

from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from shoal.core import SLO, InvalidRequest, SamplingDefaults, SamplingParams
from shoal.core.sampling import MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_STRINGS
from shoal.core.slo import LARGEST_SCALE, LONGEST_GOAL_S

INT32_MAX = 2**31 - 1
MAX_STOP_TOKENS = 256
MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_FIELDS = 64
TOO_MANY_FIELDS = "too_many_fields"
DEFAULT_COMPLETION_TOKENS = 16


def _must_be_false(value: bool) -> bool:
    # Literal[False] would take a 0 as well.
    if value:
        raise PydanticCustomError("must_be_false", "Must be false")
    return value


Count = Annotated[int, Field(ge=1, le=INT32_MAX)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
TokenLists = Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
StopString = Annotated[str, Field(min_length=1)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
NotTrue = Annotated[bool, AfterValidator(_must_be_false), WithJsonSchema({"const": False})]
EmptyList = Annotated[list[Any], Field(max_length=0)]
Ignored = Annotated[dict[str, Any], Field(max_length=MAX_FIELDS)]
EmptyDict = Annotated[dict[str, Any], Field(max_length=0)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Seconds = Annotated[float, Field(gt=0, le=LONGEST_GOAL_S)]

# What is wrong with a value of these fields is said in full: they are unions, and what a union's
# branches complain about does not help.
FORMS = {
    "prompt": "must be a string, a list of strings, a list of token ids, or a list of lists of token ids; "
    f"lists must not be empty and have at most {MAX_CHOICES} prompts, token ids are integers from 0 on",
    "stop": f"must be a string that is not empty, or a list of at most {MAX_STOP_STRINGS} such strings",
    "content": 'must be a string, or a list of parts {"type": "text", "text": "..."} that is not empty '
    f"and has at most {MAX_PARTS}; "
    "images, audio and files are not supported",
    "role": "must be system, developer, user or assistant; tools are not supported",
    "response_format": 'is not supported, except {"type": "text"}',
    "modalities": 'is not supported, except ["text"]',
}
UNSUPPORTED = frozenset(
    (
        "echo",
        "suffix",
        "best_of",
        "logit_bias",
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "tool_calls",
        "audio",
        "reasoning_effort",
        "verbosity",
        "web_search_options",
    )
)


class _Strict(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, frozen=True, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, sent: Any) -> Any:
        # Each unknown field would become an error of its own, and only one is ever told.
        if isinstance(sent, dict) and len(sent) > MAX_FIELDS:
            raise PydanticCustomError(TOO_MANY_FIELDS, f"{len(sent)} fields, at most {MAX_FIELDS} are read")
        return sent


class StreamOptions(_Strict):
    """How to stream."""

    include_usage: bool | None = None
    """Send the token counts in a last chunk."""
    include_obfuscation: bool | None = None
    """Ignored."""


class Goals(_Strict):
    """Latency goals in seconds."""

    ttft: Seconds | None = None
    """Arrival to the first token."""
    tpot: Seconds | None = None
    """Mean time per output token after the first."""
    e2e: Seconds | None = None
    """Arrival to the last token."""
    e2e_scale: Annotated[float, Field(gt=0, le=LARGEST_SCALE)] | None = None
    """The same as a multiple of the service's execution time, which must be configured. With either of the
    two, both of the service's are left aside."""

    def slo(self) -> SLO:
        """The engine's view."""
        return SLO(ttft_s=self.ttft, tpot_s=self.tpot, e2e_s=self.e2e, e2e_scale=self.e2e_scale)


class GenerationBody(_Strict):
    """What both generating endpoints take."""

    model: str
    """Name of a service; GET /v1/models lists them."""
    max_tokens: Count | None = None
    """At most so many output tokens."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """0 always takes the likeliest token. The defaults of this and of top_p, top_k, min_p and
    repetition_penalty are the service's sampling_defaults, which /v1/models shows."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """How many outputs of each prompt. Default 1."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopString | StopStrings | None = None
    """Strings that end the output and are not part of it."""
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    """Makes sampling repeatable."""
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
    """Neither stop strings nor stop tokens end the output before so many tokens."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    """Let the tokenizer add its special tokens to a text. Default true for completions."""
    slo: Goals | None = None
    """Latency goals of each output, for the scheduler and for /metrics; those left out are the service's."""

    user: str | None = None
    """Ignored."""
    logit_bias: EmptyDict | None = None
    """Not supported, must be empty."""

    def token_prompts(self) -> list[list[int]]:
        """The prompts that were sent as token ids."""
        return []

    def output_limit(self) -> int | None:
        """The most output tokens asked for; None: as many as fit."""
        return self.max_tokens

    def reported_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report; None: report nothing."""
        raise NotImplementedError

    def sampling(self, defaults: SamplingDefaults, default_max_tokens: int | None = None) -> SamplingParams:
        """The engine's view, with ``defaults`` for what was left out.

        Raises InvalidRequest where fields contradict each other.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", param="stream_options")
        given = {
            name: value
            for name in SamplingParams.__dataclass_fields__
            if (value := getattr(self, name)) is not None
        }
        limit = self.output_limit()
        given["max_tokens"] = default_max_tokens if limit is None else limit
        given["logprobs"] = self.reported_logprobs()
        given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given["stop_token_ids"] = tuple(self.stop_token_ids or ())
        return defaults.params(given)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(GenerationBody):
    """Continue a text."""

    prompt: str | Texts | TokenIds | TokenLists
    """One prompt or several, as text or as token ids."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Report the log-probability of each token, and of so many of the likeliest."""
    echo: NotTrue | None = None
    """Not supported."""
    suffix: Literal[""] | None = None
    """Not supported."""
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    """Not supported."""

    def reported_logprobs(self) -> int | None:
        """As asked."""
        return self.logprobs

    def token_prompts(self) -> list[list[int]]:
        """The prompts that were sent as token ids."""
        return [prompt for prompt in self.prompts() if not isinstance(prompt, str)]

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or several."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        # A list's first entry tells its kind; validation has seen to it that the others are alike.
        return cast(
            "list[str] | list[list[int]]", [self.prompt] if isinstance(self.prompt[0], int) else self.prompt
        )


class TextPart(_Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """One message of a chat; fields that OpenAI returns with messages may be sent back empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]
    name: str | None = None
    """Ignored."""
    refusal: Literal[""] | None = None
    tool_calls: EmptyList | None = None
    function_call: None = None
    audio: None = None
    annotations: EmptyList | None = None

    def for_template(self) -> dict[str, str]:
        """As chat templates expect it: text parts become paragraphs, "developer" is "system"."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        return {"role": role, "content": "\n".join(part.text for part in self.content)}


class TextFormat(_Strict):
    """Plain text, the only format."""

    type: Literal["text"]


class ChatBody(GenerationBody):
    """Answer a chat."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Count | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    """Report the log-probability of each token."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """And of so many of the likeliest; needs logprobs."""
    add_special_tokens: NotTrue | None = None
    """The chat template already has them."""

    metadata: Ignored | None = None
    """Ignored."""
    store: bool | None = None
    """Ignored."""
    service_tier: str | None = None
    """Ignored."""
    prompt_cache_key: str | None = None
    """Ignored."""
    prompt_cache_retention: str | None = None
    """Ignored."""
    safety_identifier: str | None = None
    """Ignored."""
    parallel_tool_calls: bool | None = None
    """Ignored."""
    prediction: Ignored | None = None
    """Ignored: it may speed up an answer, but does not change it."""

    response_format: TextFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    tools: EmptyList | None = None
    """Not supported."""
    tool_choice: Literal["none", "auto"] | None = None
    """Without tools, neither changes anything."""
    functions: EmptyList | None = None
    """Not supported."""
    function_call: Literal["none", "auto"] | None = None
    audio: None = None
    """Not supported."""
    reasoning_effort: Literal["none"] | None = None
    """Not supported."""
    verbosity: Literal["medium"] | None = None
    """Not supported."""
    web_search_options: None = None
    """Not supported."""

    def output_limit(self) -> int | None:
        """Either name of the limit; both must agree."""
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise InvalidRequest(
                f"max_tokens={self.max_tokens} and max_completion_tokens={self.max_completion_tokens} "
                "are two names of one limit; give one of them",
                param="max_completion_tokens",
            )
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def reported_logprobs(self) -> int | None:
        """``top_logprobs`` where ``logprobs`` is true."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None
