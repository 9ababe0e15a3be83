"""Response bodies in OpenAI's shapes; each type serves both encoding and the OpenAPI document.

They are msgspec structs because a stream encodes one every few tokens. ``stop_reason`` is vLLM's addition:
the stop string or token id that ended the output.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from shoal.core import SamplingDefaults

FinishReasonName = Literal["stop", "length"]
encode = msgspec.json.Encoder().encode


class ErrorBody(Struct):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field of the request that is wrong."""
    code: str | None
    """The kind of error, for programs."""


class ErrorResponse(Struct):
    """The body of every error response."""

    error: ErrorBody


class PromptTokensDetails(Struct):
    """Prompt tokens whose KV was found in the prefix cache."""

    cached_tokens: int


class Usage(Struct):
    """Token counts of one response; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(Struct):
    """A token at some place of the prompt."""

    logprob: float
    rank: int
    """Its place among all tokens by falling probability, from 1."""
    decoded_token: str
    """Its text; a part of a character is shown as U+FFFD."""


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""vLLM's log-probabilities of a prompt: by token id of each token itself and of the likeliest ones; null for
the first."""


class CompletionLogprobs(Struct):
    """Log-probabilities of a text: parallel lists with an entry for each token, of the prompt too if it is
    echoed. That of the first token, before which there is nothing, is null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]
    """Where each token begins in the text, in characters."""


class CompletionChoice(Struct):
    """One output, or a piece of one in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName | None
    """Null until the last piece."""
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    """Of the output, or of this piece; with return_token_ids."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Of the prompt, in a stream only in the first piece; with return_token_ids."""
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """With prompt_logprobs."""


class Completion(Struct):
    """Response of /v1/completions, and a chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


class TopLogprob(Struct):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]
    """The token in UTF-8; it may be a part of a character."""


class ChatTokenLogprob(Struct):
    """The sampled token, and the likeliest tokens at its position."""

    token: str
    logprob: float
    bytes: list[int]
    """The token in UTF-8; it may be a part of a character."""
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
    """One output as a message."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    """With return_token_ids."""


class ChatCompletion(Struct):
    """Response of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET
    """With return_token_ids."""
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """With prompt_logprobs."""


class ChatDelta(Struct):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """A piece of one message."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReasonName | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    """With return_token_ids."""


class ChatChunk(Struct):
    """A chunk of a streamed chat completion."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    prompt_token_ids: list[int] | UnsetType = UNSET
    """In the first chunk, with return_token_ids."""


class Embedding(Struct):
    """The vector of one input."""

    index: int
    embedding: list[float] | str
    """Numbers, or base64 of float32 in little-endian order."""
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(Struct):
    """Token counts of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct):
    """Response of /v1/embeddings."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class Tokenized(Struct):
    """Response of /tokenize."""

    count: int
    """How many tokens there are."""
    max_model_len: int
    """As in ModelCard."""
    tokens: list[int]
    token_strs: list[str] | None
    """Their text, with return_token_strs; a part of a character is U+FFFD."""


class Detokenized(Struct):
    """Response of /detokenize."""

    prompt: str
    """The text."""


class ModelCard(Struct):
    """A service, as OpenAI lists models."""

    id: str
    created: int
    max_model_len: int
    """Most tokens of prompt and output together."""
    sampling_defaults: SamplingDefaults
    """Sampling parameters of requests that leave them out."""
    object: Literal["model"] = "model"
    owned_by: str = "shoal"


class ModelList(Struct):
    """Response of /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Health(Struct):
    """Response of /health while the server takes requests."""

    status: Literal["ok"] = "ok"


class Version(Struct):
    """Response of /version."""

    version: str


class Index(Struct):
    """Response of /."""

    version: str
    routes: list[str]
    """Methods and paths."""
    server: str = "shoal"
    docs: str = "/docs"
    """A page about them."""
    base_url: str = "/v1"
    """Where the base URL of OpenAI's clients ends."""
