"""Fields of OpenAI and vLLM that are accepted, but have no effect.

Fields that never change a response are ignored. The others are not implemented and accept only their neutral
values. The types say so in the OpenAPI document. Their descriptions begin with "Not supported", and other
values are rejected with this text.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

MAX_FIELDS = 128
TOO_MANY_FIELDS = "too_many_fields"
UNION_TAG = "union:"
"""Begins names of branches of unions, which are no fields."""


class StrictModel(BaseModel):
    """Accepts only the declared fields, with exactly the declared types."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, frozen=True, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, sent: Any) -> Any:
        # Each unknown field would make an error of its own, and only one error is reported.
        if isinstance(sent, dict) and len(sent) > MAX_FIELDS:
            raise PydanticCustomError(TOO_MANY_FIELDS, f"{len(sent)} fields, at most {MAX_FIELDS} are read")
        return sent

    @classmethod
    def unsupported(cls) -> dict[str, str]:
        """Fields that accept only neutral values, each with what to do instead, as its description says."""
        described = {
            name: " ".join((field.description or "").split()) for name, field in cls.model_fields.items()
        }
        return {
            name: description.partition(": ")[2].rstrip(".") or "leave it out"
            for name, description in described.items()
            if description.startswith("Not supported")
        }


def _must_be_false(value: bool) -> bool:
    # Literal[False] would accept 0 as well.
    if value:
        raise PydanticCustomError("must_be_false", "Must be false")
    return value


def _must_be_true(value: bool) -> bool:
    if not value:
        raise PydanticCustomError("must_be_true", "Must be true")
    return value


NotTrue = Annotated[bool, AfterValidator(_must_be_false), WithJsonSchema({"const": False})]
NotFalse = Annotated[bool, AfterValidator(_must_be_true), WithJsonSchema({"const": True})]
EmptyList = Annotated[list[Any], Field(max_length=0)]
EmptyDict = Annotated[dict[str, Any], Field(max_length=0)]
Ignored = Annotated[dict[str, Any], Field(max_length=MAX_FIELDS), AfterValidator(lambda sent: {})]


class NeutralFields(StrictModel):
    """Fields of both generation endpoints."""

    user: str | None = None
    """Ignored."""
    spaces_between_special_tokens: bool | None = None
    """Ignored: tokenizers here write none."""
    length_penalty: float | None = None
    """Ignored: it is for beam search."""

    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    """Not supported: ask for n outputs with logprobs, and choose the best of them."""
    early_stopping: bool | None = None
    """Ignored: it is for beam search."""
    request_id: str | None = None
    """Ignored: a response has an id of its own."""
    truncation_side: Literal["left"] | None = None
    """Not supported: truncate_prompt_tokens keeps the end of a prompt."""
    thinking_token_budget: None = None
    """Not supported."""
    repetition_detection: None = None
    """Not supported: frequency_penalty and repetition_penalty make repetitions rarer."""
    use_beam_search: NotTrue | None = None
    """Not supported: ask for n outputs with logprobs, and choose the best of them."""
    logits_processors: EmptyList | None = None
    """Not supported: logit_bias, allowed_token_ids and bad_words say which tokens are sampled."""
    kv_transfer_params: None = None
    """Not supported."""
    vllm_xargs: EmptyDict | None = None
    """Not supported."""


class NeutralCompletionFields(NeutralFields):
    """Fields of completions."""

    include_reasoning: bool | None = None
    """Ignored: reasoning is text like any other."""

    suffix: Literal[""] | None = None
    """Not supported: write the text before and after the gap into the prompt, with the tokens that the model
    has for that (such as <fim_prefix>, <fim_suffix> and <fim_middle>)."""
    prompt_embeds: None = None
    """Not supported: send the prompt as text or token ids."""


class NeutralChatFields(NeutralFields):
    """Fields of chats."""

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
    prediction: Ignored | None = None
    """Ignored: it may speed up a response, but does not change it."""

    echo: NotTrue | None = None
    """Not supported: the answer is a new message."""
    add_special_tokens: NotTrue | None = None
    """The chat template already has them."""
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    functions: EmptyList | None = None
    """Not supported: it is an old form of tools."""
    function_call: Literal["none", "auto"] | None = None
    """Not supported: it is an old form of tool_choice."""
    audio: None = None
    """Not supported."""
    verbosity: Literal["medium"] | None = None
    """Not supported."""
    web_search_options: None = None
    """Not supported."""
    chat_template: None = None
    """Not supported; a service may have one in its configuration."""
    mm_processor_kwargs: EmptyDict | None = None
    """Not supported."""
    media_io_kwargs: EmptyDict | None = None
    """Not supported."""


class NeutralMessageFields(StrictModel):
    """Fields of messages; those that OpenAI returns may be sent back if they are empty."""

    name: str | None = None
    """Ignored, except with role tool: the function that gave the result."""
    refusal: Literal[""] | None = None
    function_call: None = None
    """Not supported: it is an old form of tool_calls."""
    audio: None = None
    """Not supported."""
    annotations: EmptyList | None = None
    provider_specific_fields: Ignored | None = None
    """Ignored: a client adds it to the messages that it returns."""


UNSUPPORTED = (
    NeutralCompletionFields.unsupported()
    | NeutralChatFields.unsupported()
    | NeutralMessageFields.unsupported()
)
