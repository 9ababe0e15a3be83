"""Tokenises what requests bring, and rejects prompts that are too long before they use much memory."""

from collections.abc import Sequence

from shoal.engine.info import ServiceInfo
from shoal.frontend.validation import check_prompt_length
from shoal.serve.backend import TextCodec


async def banned_sequences(tokenizer: TextCodec, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token ids of words that an output must not have: each as a text begins with it, and behind a blank."""
    spellings = [spelling for word in words for spelling in (word, f" {word.lstrip()}")]
    encoded = (await tokenizer.encode_texts(spellings, add_special_tokens=False)).tokens
    return tuple(dict.fromkeys(tuple(tokens) for tokens in encoded if tokens))


async def encode_prompts(
    tokenizer: TextCodec, limits: ServiceInfo, service: str, texts: Sequence[str], add_special_tokens: bool
) -> list[list[int]]:
    """Token ids of ``texts``; raises InvalidRequest early if one has far too many."""
    encoded = await tokenizer.encode_texts(texts, add_special_tokens, limits.max_total_tokens - 1)
    if encoded.at_least is not None:
        check_prompt_length(limits, service, encoded.at_least, at_least=True)
    return encoded.tokens
