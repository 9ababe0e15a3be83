"""Tokenises prompts, and rejects those that are too long before they use much memory."""

from collections.abc import Sequence

from shoal.engine.info import ServiceInfo
from shoal.engine.validation import check_prompt_length
from shoal.serve.backend import TextCodec

# Characters of the pieces in which the tokens of a long text are num_tokens.
_PIECE_CHARACTERS = 2**15


def banned_sequences(tokenizer: TextCodec, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token ids of words that an output must not have: each as a text begins with it, and behind a blank."""
    spellings = [spelling for word in words for spelling in (word, f" {word.lstrip()}")]
    encoded = [tuple(tokenizer.encode(spelling, add_special_tokens=False)) for spelling in spellings]
    return tuple(dict.fromkeys(filter(None, encoded)))


def encode_prompt(
    tokenizer: TextCodec, limits: ServiceInfo, service: str, text: str, add_special_tokens: bool
) -> list[int]:
    """Token ids of ``text``; raises InvalidRequest early if they are far too many.

    Before, their number is estimated: a tokenizer needs a hundred bytes and more for each token.
    """
    check_prompt_length(limits, service, tokenizer.least_tokens(text), at_least=True)
    if len(text) > _PIECE_CHARACTERS:
        num_tokens = 0
        for start in range(0, len(text), _PIECE_CHARACTERS):
            num_tokens += len(
                tokenizer.encode(text[start : start + _PIECE_CHARACTERS], add_special_tokens=False)
            )
            # The cuts between pieces add tokens, but fewer than the text itself has.
            check_prompt_length(limits, service, num_tokens // 2, at_least=True)
    return tokenizer.encode(text, add_special_tokens)
