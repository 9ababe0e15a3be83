"""From text to token ids, as long as these can be a prompt."""

from shoal.engine.info import ServiceInfo
from shoal.engine.validation import check_prompt_length
from shoal.serve.backend import TextCodec

# Long text is first looked at in pieces of so many characters.
_PIECE = 2**15


def encode_prompt(
    tokenizer: TextCodec, limits: ServiceInfo, service: str, text: str, add_special_tokens: bool
) -> list[int]:
    """Token ids of ``text``; raises InvalidRequest if they are far too many, before there is memory for them.

    A tokenizer takes a hundred bytes and more for each token until it has all of them.
    """
    check_prompt_length(limits, service, tokenizer.least_tokens(text), at_least=True)
    if len(text) > _PIECE:
        counted = 0
        for start in range(0, len(text), _PIECE):
            counted += len(tokenizer.encode(text[start : start + _PIECE], add_special_tokens=False))
            # A cut makes tokens of its own, but never as many as the text has.
            check_prompt_length(limits, service, counted // 2, at_least=True)
    return tokenizer.encode(text, add_special_tokens)
