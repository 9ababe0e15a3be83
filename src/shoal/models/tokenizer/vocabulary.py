"""What the tokens of a vocabulary stand for: all that it takes to turn tokens into text.

That is a few bytes for each, where a tokenizer, which also encodes, takes fifty times as much and seconds to
read.
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

_MOST_TOKENS = 1 << 22
_NO_TOKEN, _PLAIN, _SPECIAL = range(3)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The text of each token, as the tokenizer library has it; immutable, picklable."""

    pieces: bytes
    """Of all tokens, one behind the other, in UTF-8."""
    bounds: "array[int]"
    """Where the piece of each token begins; where it ends, that of the next does."""
    kinds: bytes
    """Of each id: no token, a token, or one that texts do not show."""
    special_ids: Mapping[str, int]
    """Special tokens by their text."""
    decoder: Decoder | None
    """The library's, from pieces to text; None: they are joined with blanks."""
    alphabet: TokenAlphabet
    """How pieces write bytes."""

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> Self:
        """That of a tokenizer; raises ModelUnavailable where its ids are no numbers of a table."""
        count = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        if count > _MOST_TOKENS:
            raise ModelUnavailable(
                f"the tokenizer has a token {count - 1}; ids up to {_MOST_TOKENS - 1} are possible"
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

    def token_bytes(self, token: int) -> bytes:
        """The bytes that ``token`` adds to a text; empty for an id outside the vocabulary."""
        if not 0 <= token < len(self.kinds):
            return b""
        piece = self.pieces[self.bounds[token] : self.bounds[token + 1]].decode()
        return BYTES_OF_PIECE[self.alphabet](piece)
