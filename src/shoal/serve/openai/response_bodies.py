"""Response bodies in OpenAI's shapes; the types are also the schemas of the OpenAPI document.

They are msgspec structs because a stream encodes one every few tokens. ``stop_reason`` is vLLM's addition:
the stop string or token id that ended the output.
"""

from typing import Any, Literal, TypeVar, cast

import msgspec
from msgspec import UNSET, Struct, UnsetType

from shoal.core import SamplingDefaults

FinishReasonName = Literal["stop", "length", "tool_calls"]
encode = msgspec.json.Encoder().encode

Value = TypeVar("Value")


def encoded(value: Value) -> Value:
    """``value`` encoded in advance, as a part of a larger value.

    Encoding megabytes at once would hold the GIL, and stall all streams.
    """
    return cast(Value, msgspec.Raw(encode(value)))


class ErrorBody(Struct):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The invalid field of the request."""
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
    """A token at a position of the prompt."""

    logprob: float
    rank: int
    """Rank among all tokens by probability, from 1."""
    decoded_token: str
    """A part of a character is written as U+FFFD."""


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""vLLM's log-probabilities of a prompt: at each position, by token id, of the token itself and of the most
likely tokens; null for the first position."""


class CompletionLogprobs(Struct):
    """Log-probabilities of a text: parallel lists with an entry for each token, of the prompt too if it is
    echoed. That of the first token, before which there is nothing, is null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]
    """Offset of each token in the text, in characters."""


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
    """In a stream only in the first piece; with return_token_ids."""
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


class CalledFunction(Struct):
    """A function with its arguments."""

    name: str
    arguments: str
    """JSON text as the model wrote it; it may be invalid unless tool_choice forced the call."""


class ToolCall(Struct):
    """A call that the model makes."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(Struct):
    """The model's message."""

    content: str | None
    """Null where there are only calls or reasoning."""
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """The model's reasoning, if its chat template has tags for it."""


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


class FunctionDelta(Struct):
    """What a chunk adds to a call: first the name, then pieces of the arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """What a chunk adds to the call at ``index``; id and type come first."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


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
    """Number of tokens."""
    max_model_len: int
    """As in ModelCard."""
    tokens: list[int]
    token_strs: list[str] | None
    """Texts of the tokens, with return_token_strs; a part of a character is U+FFFD."""


class Detokenized(Struct):
    """Response of /detokenize."""

    prompt: str


class InputTokensDetails(Struct):
    """Prompt tokens whose KV was found in the prefix cache."""

    cached_tokens: int


class OutputTokensDetails(Struct):
    """Tokens of the reasoning, counted from its text."""

    reasoning_tokens: int


class ResponseUsage(Struct):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class InputTokenCount(Struct):
    """Response of /v1/responses/input_tokens."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ResponseObject(Struct, kw_only=True):
    """Response of /v1/responses; most fields repeat the request."""

    id: str
    created_at: int
    model: str
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    top_logprobs: int
    user: str | None
    output: list[dict[str, Any]] = msgspec.field(default_factory=list)
    """Items: message, function_call and reasoning."""
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"
    incomplete_details: dict[str, str] | None = None
    completed_at: int | None = None
    usage: ResponseUsage | None = None
    object: Literal["response"] = "response"
    error: None = None
    background: bool = False
    store: bool = False
    previous_response_id: None = None
    truncation: Literal["disabled"] = "disabled"


class ResponseEvent(Struct):
    """An event of a streamed response; other fields follow from its type."""

    type: str
    sequence_number: int


class ModelCard(Struct):
    """A service, as OpenAI lists models."""

    id: str
    created: int
    max_model_len: int
    """Most tokens of prompt and output together."""
    sampling_defaults: SamplingDefaults
    """Defaults of sampling parameters that a request leaves out."""
    object: Literal["model"] = "model"
    owned_by: str = "shoal"


class ModelList(Struct):
    """Response of /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Version(Struct):
    """Response of /version."""

    version: str


class Scale(Struct):
    """Response of /scale."""

    wanted_engines: int
    """Engines that are to run."""
    running_engines: int
    """Engines that have loaded and run."""
    engines: int
    """All engines, those on standby included."""


class Index(Struct):
    """Response of /."""

    version: str
    routes: list[str]
    """Methods and paths."""
    server: str = "shoal"
    docs: str = "/docs"
    base_url: str = "/v1"
    """The end of the base URL for OpenAI's clients."""
