"""Fields of llama.cpp, SGLang, TGI, Anthropic and other APIs that would change the output and are refused.

They are declared so that none of them is silently ignored. Each accepts only the values that turn it off;
other values are rejected with its description. They come from llama.cpp, SGLang, TGI, transformers,
text-generation-webui, OpenRouter, Mistral, Anthropic and Gemini.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema

from shoal.serve.strict_model import EmptyDict, EmptyList, NotFalse, NotTrue, StrictModel

_DRAWN = "temperature, top_k, top_p and min_p say how tokens are drawn"
_PENALTIES = "repetition_penalty, presence_penalty and frequency_penalty make repetitions rarer"

Off = Annotated[
    Annotated[float, Field(ge=0, le=0)] | None, Field(description=f"Not supported, must be 0: {_DRAWN}.")
]
Unit = Annotated[
    Annotated[float, Field(ge=1, le=1)] | None, Field(description=f"Not supported, must be 1: {_DRAWN}.")
]
NoRepeats = Annotated[
    Annotated[float, Field(ge=0, le=0)] | None, Field(description=f"Not supported, must be 0: {_PENALTIES}.")
]
Detail = Annotated[Any, Field(description="Ignored where what it belongs to is off, which it must be.")]
FixedOrder = Annotated[
    EmptyList | None,
    Field(description="Not supported: penalties, temperature, top_k, top_p and min_p follow in this order."),
]
OneBeam = Annotated[
    Annotated[int, Field(ge=1, le=1)] | None,
    Field(description="Not supported: ask for n outputs with logprobs, and choose the best of them."),
]
Adapter = Annotated[
    Annotated[str, Field(max_length=0)] | EmptyList | None,
    Field(description="Not supported: name the service that has the weights as model."),
]
Outside = Annotated[
    EmptyList | EmptyDict | NotTrue | None,
    Field(description="Not supported: nothing is looked up; what the model is to know goes into the prompt."),
]
Media = Annotated[EmptyList | EmptyDict | None, Field(description="Not supported: models here read text.")]
Wrapper = Annotated[
    EmptyDict | None, Field(description="Not supported: send its fields at the top of the body.")
]
Schema = Annotated[EmptyDict | None, Field(description="Not supported: response_format takes a schema.")]
Instruction = Annotated[
    Annotated[str, Field(max_length=0)] | EmptyList | None,
    Field(description="Not supported: send it as a message with role system, or in the prompt."),
]
Continuation = Annotated[
    Annotated[str, Field(max_length=0)] | None,
    Field(description="Not supported: send it as an assistant's last message, with continue_final_message."),
]
Least = Annotated[
    Annotated[int, Field(le=1)] | None,
    Field(description="Not supported, must be at most 1: top_k, top_p and min_p leave unlikely tokens out."),
]
Budget = Annotated[
    Annotated[int, Field(ge=-1, le=-1)] | None,
    Field(description="Not supported: max_tokens limits reasoning and answer together."),
]
Span = Annotated[
    Annotated[float, Field(le=0)] | None,
    Field(description="Not supported: max_tokens limits the output, and the server's own limits its time."),
]


class OtherServerSamplers(StrictModel):
    """Sampling methods that are not implemented."""

    generates_text = True

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The schema without these fields, which would only clutter it."""
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for name in OtherServerFields.known_names():
            properties.pop(name, None)
        return schema

    mirostat: Off = None
    mirostat_mode: Off = None
    mirostat_tau: Detail = None
    mirostat_eta: Detail = None
    typical_p: Unit = None
    typical: Unit = None
    tfs_z: Unit = None
    tfs: Unit = None
    top_a: Off = None
    top_n_sigma: Annotated[
        Annotated[float, Field(le=0)] | None, Field(description=f"Not supported, must be 0: {_DRAWN}.")
    ] = None
    nsigma: Off = None
    epsilon_cutoff: Off = None
    eta_cutoff: Off = None
    smoothing_factor: Off = None
    smoothing_curve: Detail = None
    dynatemp_range: Off = None
    dynatemp_exponent: Detail = None
    dynamic_temperature: NotTrue | None = None
    """Not supported, must be false: temperature is one number."""
    dynatemp_low: Detail = None
    dynatemp_high: Detail = None
    xtc_probability: Off = None
    xtc_threshold: Detail = None
    dry_multiplier: NoRepeats = None
    dry_base: Detail = None
    dry_allowed_length: Detail = None
    dry_penalty_last_n: Detail = None
    dry_sequence_breakers: Detail = None
    no_repeat_ngram_size: NoRepeats = None
    encoder_repetition_penalty: Unit = None
    penalty_alpha: Off = None
    penalize_newline: NotFalse | None = None
    """Not supported, must be true: penalties count every token."""
    penalize_nl: NotFalse | None = None
    """Not supported, must be true: penalties count every token."""
    min_keep: Least = None
    min_tokens_to_keep: Least = None
    guidance_scale: Unit = None
    cfg_scale: Unit = None
    negative_prompt: Instruction = None
    samplers: FixedOrder = None
    sampler_order: FixedOrder = None
    sampler_priority: FixedOrder = None
    num_beams: OneBeam = None
    num_beam_groups: OneBeam = None
    diversity_penalty: Off = None
    watermark: NotTrue | None = None
    """Not supported."""
    custom_logit_processor: None = None
    """Not supported: logit_bias, allowed_token_ids and bad_words say which tokens are sampled."""
    logprob_token_ids: None = None
    """Not supported: logprobs reports the likeliest tokens."""


class OtherServerFields(OtherServerSamplers):
    """Fields of bodies that generate text."""

    max_length: None = None
    """Not supported: max_tokens limits the output, without the prompt."""
    min_length: Annotated[int, Field(ge=0, le=0)] | None = None
    """Not supported, must be 0: min_tokens counts the output, without the prompt."""
    max_time: Span = None
    t_max_predict_ms: Span = None
    stop_token: None = None
    """Not supported: send stop or stop_token_ids."""
    eos_token_id: None = None
    """Not supported: stop_token_ids names further tokens that end the output."""
    bad_words_ids: EmptyList | None = None
    """Not supported: send bad_words or logit_bias."""
    force_words_ids: EmptyList | None = None
    """Not supported: structured_outputs says what the output must look like."""
    suppress_tokens: EmptyList | None = None
    """Not supported: send logit_bias."""
    banned_tokens: EmptyList | None = None
    """Not supported: send logit_bias."""
    banned_strings: EmptyList | None = None
    """Not supported: send bad_words."""
    custom_token_bans: Annotated[str, Field(max_length=0)] | None = None
    """Not supported: send logit_bias."""
    token_healing: NotTrue | None = None
    """Not supported: end the prompt with a whole word."""
    deferred: NotTrue | None = None
    """Not supported: nothing is stored here; read the response as a stream."""
    custom_stopping_strings: Annotated[str, Field(max_length=0)] | EmptyList | None = None
    """Not supported: send stop."""
    stop_regex: None = None
    """Not supported: stop takes strings."""
    n_indent: Annotated[int, Field(ge=0, le=0)] | None = None
    """Not supported, must be 0."""
    n_probs: Annotated[int, Field(ge=0, le=0)] | None = None
    """Not supported, must be 0: logprobs reports the likeliest tokens."""
    top_n_tokens: Annotated[int, Field(ge=0, le=0)] | None = None
    """Not supported, must be 0: logprobs reports the likeliest tokens."""
    return_logprob: NotTrue | None = None
    """Not supported: logprobs reports log-probabilities."""
    post_sampling_probs: NotTrue | None = None
    """Not supported: log-probabilities are those of the model."""
    return_tokens: NotTrue | None = None
    """Not supported: return_token_ids returns them."""
    return_hidden_states: NotTrue | None = None
    """Not supported: /v1/embeddings returns the last one of a text."""
    return_routed_experts: NotTrue | None = None
    """Not supported."""
    detokenize: NotFalse | None = None
    """Not supported, must be true: return_token_ids returns token ids beside the text."""
    add_bos_token: NotFalse | None = None
    """Not supported, must be true: add_special_tokens says it of completions."""
    safe_prompt: NotTrue | None = None
    """Not supported: send such a text as a message with role system."""
    tool_prompt: Instruction = None
    system: Instruction = None
    system_prompt: Instruction = None
    system_instruction: Instruction = None
    preamble: Instruction = None
    memory: Instruction = None
    assistant_prefill: Continuation = None
    response_prefix: Continuation = None
    prefill: Continuation = None
    chat_history: EmptyList | None = None
    """Not supported: send it as messages."""
    prompt_mode: None = None
    """Not supported: reasoning_effort says whether and how much to reason."""
    prompt_template: None = None
    """Not supported; a service may have a chat template in its configuration."""
    instruction_template: None = None
    """Not supported; a service may have a chat template in its configuration."""
    character: None = None
    """Not supported: send its text as a message with role system."""
    preset: None = None
    """Not supported: send what it stands for."""
    input_ids: EmptyList | None = None
    """Not supported: /v1/completions takes token ids as prompt."""
    input_embeds: EmptyList | None = None
    """Not supported: send the prompt as text or token ids."""
    image_data: Media = None
    video_data: Media = None
    audio_data: Media = None
    images: Media = None
    image_urls: Media = None
    files: Media = None
    attachments: Media = None
    lora: Adapter = None
    lora_path: Adapter = None
    lora_request: Adapter = None
    adapter_id: Adapter = None
    adapters: Adapter = None
    session_params: EmptyDict | None = None
    """Not supported: nothing is kept between requests; send the whole history."""
    connectors: Outside = None
    plugins: Outside = None
    mcp_servers: Outside = None
    web_search: Outside = None
    enable_search: Outside = None
    search_parameters: Outside = None
    data_sources: Outside = None
    thinking_budget: Budget = None
    thinking_budget_tokens: Budget = None
    reasoning_budget: Budget = None
    max_thinking_tokens: Budget = None
    grammar_triggers: EmptyList | None = None
    """Not supported: a grammar holds from the first token on."""
    grammar_lazy: NotTrue | None = None
    """Not supported: a grammar holds from the first token on."""
    structural_tag: None = None
    """Not supported: structured_outputs says what the output must look like."""
    response_schema: Schema = None
    response_json_schema: Schema = None
    output_schema: Schema = None
    response_mime_type: Literal["text/plain"] | None = None
    """Not supported: response_format asks for JSON."""
    schema_: Annotated[Schema, Field(alias="schema")] = None
    json_mode: NotTrue | None = None
    """Not supported: response_format asks for JSON."""
    thinking_config: EmptyDict | None = None
    """Not supported: reasoning_effort says whether and how much to reason."""
    output_config: EmptyDict | None = None
    """Not supported: send response_format and reasoning_effort."""
    tool_config: EmptyDict | None = None
    """Not supported: send tool_choice."""
    guided_decoding: EmptyDict | None = None
    """Not supported: structured_outputs says what the output must look like."""
    extra_body: Wrapper = None
    parameters: Wrapper = None
    params: Wrapper = None
    sampling_params: Wrapper = None
    generation_config: Wrapper = None
    model_kwargs: Wrapper = None
    nvext: Wrapper = None
    extra_params: Wrapper = None
    model_params: Wrapper = None
