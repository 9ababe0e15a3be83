"""Vocabulary: the text of each token, which is all that detokenization needs.

It takes a few bytes per token; a tokenizer, which also encodes, takes fifty times as much and seconds to
load.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import tokenizers
from tokenizers.decoders import Decoder

from shoal.core import ModelUnavailable
from shoal.models.tokenizer.load import state_of
from shoal.models.tokenizer.token_bytes import BYTES_OF_PIECE, TokenAlphabet, alphabet_of

_MAX_TOKENS = 1 << 22
_NO_TOKEN, _PLAIN, _SPECIAL = range(3)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The text of each token; immutable, picklable."""

    pieces: bytes
    """Pieces of all tokens, concatenated, in UTF-8."""
    bounds: "array[int]"
    """Offset of each token's piece, and the length of ``pieces`` at the end."""
    kinds: bytes
    """Kind of each id: no token, plain or special."""
    special_ids: Mapping[str, int]
    """Ids of special tokens by text."""
    decoder: Decoder | None
    """The library's decoder of pieces; None if pieces are joined with blanks."""
    alphabet: TokenAlphabet

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> Self:
        """The vocabulary of a tokenizer; raises ModelUnavailable if its ids are too large."""
        count = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        if count > _MAX_TOKENS:
            raise ModelUnavailable(
                f"the tokenizer has a token {count - 1}; ids up to {_MAX_TOKENS - 1} are possible"
            )
        known = [backend.id_to_token(token) for token in range(count)]
        added = backend.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        encoded = [(piece or "").encode() for piece in known]
        return cls(
            pieces=b"".join(encoded),
            bounds=array("I", accumulate(map(len, encoded), initial=0)),
            kinds=bytes(
                _NO_TOKEN if piece is None else _SPECIAL if piece in special else _PLAIN for piece in known
            ),
            special_ids={
                token.content: number
                for number, token in added.items()
                if token.special and backend.token_to_id(token.content) == number
            },
            decoder=backend.decoder,
            alphabet=alphabet_of(state_of(backend.decoder)),
        )

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``tokens``; bytes that are not valid UTF-8 (yet) become U+FFFD, unknown ids nothing."""
        kinds, bounds, all_pieces, count = self.kinds, self.bounds, self.pieces, len(self.kinds)
        shown = _SPECIAL if skip_special_tokens else _SPECIAL + 1
        pieces = [
            all_pieces[bounds[token] : bounds[token + 1]].decode()
            for token in tokens
            if 0 <= token < count and _NO_TOKEN < kinds[token] < shown
        ]
        if self.decoder is None:
            return " ".join(pieces)
        text: str = self.decoder.decode(pieces)
        return text

    def is_plain(self, token: int) -> bool:
        """Whether ``token`` is in the vocabulary and not special."""
        return 0 <= token < len(self.kinds) and self.kinds[token] == _PLAIN

    def token_bytes(self, token: int) -> bytes:
        """The bytes that ``token`` adds to a text; empty for an id outside the vocabulary."""
        if not 0 <= token < len(self.kinds):
            return b""
        piece = self.pieces[self.bounds[token] : self.bounds[token + 1]].decode()
        return BYTES_OF_PIECE[self.alphabet](piece)
