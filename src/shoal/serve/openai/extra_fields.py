"""Fields with effect beyond sampling: logit_bias, bad_words, prompt_logprobs, truncation, priority, salt."""

from typing import Annotated, Literal

from pydantic import Field

from shoal.core.sampling import LARGEST_BIAS, MAX_BIASED_TOKENS, MAX_LOGPROBS
from shoal.serve.strict_model import StrictModel

INT32_MAX = 2**31 - 1
MAX_ALLOWED_TOKENS = 2**16
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_SALT_CHARACTERS = 256

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenIdText = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
Bias = Annotated[float, Field(ge=-LARGEST_BIAS, le=LARGEST_BIAS)]
Truncation = Literal[-1] | Annotated[int, Field(ge=1, le=INT32_MAX)]
Priority = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)]
Salt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]

EXTRA_FIELD_ERRORS = {
    "logit_bias": "must be an object of token ids, written as strings, and numbers from "
    f'-{LARGEST_BIAS:g} to {LARGEST_BIAS:g}, such as {{"42": -100}}, at most {MAX_BIASED_TOKENS}',
    "truncate_prompt_tokens": "must be a valid integer from 1 on, or -1: as many as leave room for output",
}
"""Fixed error texts of these fields."""


class ExtraFields(StrictModel):
    """Fields of both generation endpoints."""

    logit_bias: Annotated[dict[TokenIdText, Bias], Field(max_length=MAX_BIASED_TOKENS)] | None = None
    """Added to the logits of tokens, by token id; -100 and 100 in effect ban a token or take it always."""
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS, fail_fast=True)] | None
    ) = None
    """Only these tokens can be sampled."""
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    """The output contains none of these, as their tokens at the beginning of a text and behind a blank."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Report the log-probability of each prompt token, and of this many of the likeliest; not with stream."""
    skip_special_tokens: bool | None = None
    """false: special tokens are part of the text. Default true."""
    include_stop_str_in_output: bool | None = None
    """true: the stop string or stop token that ends the output is part of it. Default false."""
    return_token_ids: bool | None = None
    """true: also return the token ids of prompt and output."""
    return_tokens_as_token_ids: bool | None = None
    """true: log-probabilities name tokens as token_id:42 instead of their text."""
    truncate_prompt_tokens: Truncation | None = None
    """Keep only this many last tokens of the prompt; -1: as many as leave room for max_tokens."""
    priority: Priority | None = None
    """Lower ones come first. Other than 0 only where scheduler.order is priority."""
    cache_salt: Salt | None = None
    """The prompt's KV is shared only with requests that have the same salt."""

    def biases(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as (token id, bias) pairs."""
        return tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items())
