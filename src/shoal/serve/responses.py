"""What the server answers, in OpenAI's shapes; one type serves encoding and the OpenAPI document.

Structs of msgspec, because a stream encodes one of them for every few tokens. ``stop_reason`` is
vLLM's addition: the stop string or token id that ended the output.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from shoal.core import SamplingDefaults

FinishWord = Literal["stop", "length"]
encode = msgspec.json.Encoder().encode


class ErrorBody(Struct):
    """What went wrong; ``param`` names the field of the request, ``code`` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Struct):
    """The body of every answer that is not a success."""

    error: ErrorBody


class PromptTokensDetails(Struct):
    """Prompt tokens whose KV was found in the prefix cache."""

    cached_tokens: int


class Usage(Struct):
    """Tokens of one answer; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(Struct):
    """Parallel lists, one entry for each output token; offsets count characters."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(Struct):
    """One output, or in a stream a piece of one (``finish_reason`` is null until the last)."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishWord | None
    stop_reason: int | str | None = None


class Completion(Struct):
    """Answer of /v1/completions, and a chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


class TopLogprob(Struct):
    """A token that was likely at a position. bytes: its UTF-8, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct):
    """The token that was sampled, and the likeliest ones there."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities of a message's tokens."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatMessage(Struct):
    """The model's message."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    """One message."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord
    stop_reason: int | str | None = None


class ChatCompletion(Struct):
    """Answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class ChatDelta(Struct):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """A piece of one message."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishWord | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatChunk(Struct):
    """A chunk of a streamed chat completion."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class ModelCard(Struct):
    """A service, as OpenAI lists models.

    max_model_len: prompt and output together, in tokens. sampling_defaults: what a request takes where it
    leaves a field out.
    """

    id: str
    created: int
    max_model_len: int
    sampling_defaults: SamplingDefaults
    object: Literal["model"] = "model"
    owned_by: str = "shoal"


class ModelList(Struct):
    """Answer of /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Health(Struct):
    """Answer of /health when requests are taken."""

    status: Literal["ok"] = "ok"


class Version(Struct):
    """Answer of /version."""

    version: str
