"""Fields of OpenAI's and vLLM's APIs that have no effect here: ignored, or accepted only when turned off."""

from typing import Annotated, Any, Literal

from pydantic import Field

from shoal.serve.strict_model import MAX_FIELDS, EmptyDict, EmptyList, Ignored, NotTrue, StrictModel

TemplateOnly = Annotated[Any, Field(description="Ignored: it is for chat templates.")]


class InertFields(StrictModel):
    """Fields without effect of both generation endpoints."""

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


class InertCompletionFields(InertFields):
    """Fields without effect of completions."""

    include_reasoning: bool | None = None
    """Ignored: reasoning is text like any other."""
    reasoning: TemplateOnly = None
    reasoning_effort: TemplateOnly = None
    reasoning_format: TemplateOnly = None
    separate_reasoning: TemplateOnly = None
    think: TemplateOnly = None
    thinking: TemplateOnly = None
    enable_thinking: TemplateOnly = None
    verbosity: TemplateOnly = None

    suffix: Literal[""] | None = None
    """Not supported: write the text before and after the gap into the prompt, with the tokens that the model
    has for that (such as <fim_prefix>, <fim_suffix> and <fim_middle>)."""
    prompt_embeds: None = None
    """Not supported: send the prompt as text or token ids."""


class InertChatFields(InertFields):
    """Fields without effect of chats."""

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
    web_search_options: None = None
    """Not supported."""
    media_io_kwargs: EmptyDict | None = None
    """Not supported."""


class InertMessageFields(StrictModel):
    """Fields without effect of messages; clients may send back the empty fields that OpenAI returns."""

    name: str | None = None
    """Ignored, except with role tool: the function that gave the result."""
    function_call: None = None
    """Not supported: it is an old form of tool_calls."""
    audio: None = None
    """Not supported."""
    images: EmptyList | None = None
    """Not supported: models here read text."""
    files: EmptyList | None = None
    """Not supported: models here read text."""
    attachments: EmptyList | None = None
    """Not supported: models here read text."""
    experimental_attachments: EmptyList | None = None
    """Not supported: models here read text."""
    prefix: NotTrue | None = None
    """Not supported: continue_final_message goes on with the last message."""
    partial: NotTrue | None = None
    """Not supported: continue_final_message goes on with the last message."""
    annotations: Annotated[list[Any], Field(max_length=MAX_FIELDS)] | None = None
    """Ignored: where an earlier answer had its facts from."""
    provider_specific_fields: Ignored | None = None
    """Ignored: a client adds it to the messages that it returns."""
