"""Encoding clients' texts with a limit on tokens, and tokenize responses as JSON."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from shoal.models.tokenizer.messages import Encoded, Tokenized

# Characters of a piece when the tokens of a long text are counted.
_PIECE_CHARACTERS = 2**15


class Encoder(Protocol):
    """A tokenizer that encodes texts; see ``Tokenizer``."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token."""

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens of ``text``, cheap to compute."""


def encode_texts(
    tokenizer: Encoder, texts: Sequence[str], add_special_tokens: bool, most_tokens: int | None
) -> Encoded:
    """Token ids of ``texts``, up to the first text with more than ``most_tokens`` (None: no limit)."""
    tokens: list[list[int]] = []
    for text in texts:
        if most_tokens is not None:
            for at_least in _bounds(tokenizer, text):
                if at_least > most_tokens:
                    return Encoded(tokens, at_least)
        tokens.append(tokenizer.encode(text, add_special_tokens))
    return Encoded(tokens)


def _bounds(tokenizer: Encoder, text: str) -> Iterator[int]:
    """Increasing lower bounds on the tokens of ``text``; encoding all of it takes a hundred bytes per
    token."""
    yield tokenizer.least_tokens(text)
    if len(text) <= _PIECE_CHARACTERS:
        return
    count = 0
    for start in range(0, len(text), _PIECE_CHARACTERS):
        count += len(tokenizer.encode(text[start : start + _PIECE_CHARACTERS], add_special_tokens=False))
        # Splitting into pieces adds tokens, but fewer than the text itself has.
        yield count // 2


def tokenize(tokenizer: Encoder, text: str, add_special_tokens: bool, with_strings: bool) -> Tokenized:
    """Token ids of ``text`` as JSON, and the text of each token if with_strings."""
    tokens = tokenizer.encode(text, add_special_tokens)
    strings = None
    if with_strings:
        texts = {token: tokenizer.token_bytes(token).decode(errors="replace") for token in set(tokens)}
        strings = msgspec.json.encode([texts[token] for token in tokens])
    return Tokenized(len(tokens), msgspec.json.encode(tokens), strings)
