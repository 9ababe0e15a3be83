"""Offsets of tokens in the text of an output, in characters (text_offset of log-probabilities)."""

from collections.abc import Sequence

from shoal.frontend.detokenize import REPLACEMENT, IncrementalDecoder
from shoal.frontend.reader import CONTEXT_TOKENS
from shoal.serve.backend import TextCodec

# UTF-8: bytes from 0xC0 on begin a character of several bytes, those from 0x80 on continue one.
_FIRST_LEADING = 0xC0
_FIRST_CONTINUING = 0x80


class TextOffsets:
    """Counts the characters before each token of a text.

    A token that begins within a character has the offset of that character. context: tokens before the text.
    start: offset of the first token. echo: the text, if it is known, with or without special tokens; without
    ``echo``, ``skip_special_tokens`` says whether they have text.
    """

    def __init__(
        self,
        tokenizer: TextCodec,
        *,
        context: Sequence[int] = (),
        start: int = 0,
        echo: str | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._echo = echo
        self._decoder = IncrementalDecoder(
            tokenizer, context[-CONTEXT_TOKENS:], skip_special_tokens or echo is not None
        )
        self._length = start  # of the decoded text
        self._unfinished: int | None = None  # offset of an incomplete character

    def push(self, token: int) -> int:
        """The offset of the next token."""
        raw = self._tokenizer.token_bytes(token)
        continues = bool(raw) and _FIRST_CONTINUING <= raw[0] < _FIRST_LEADING
        offset = self._unfinished if continues else None
        if offset is None:
            offset = self._length + len(self._decoder.pending)
        self._length += len(self._decoder.push(token)) + self._special_token_length(token, offset)
        waiting = self._decoder.pending
        if not waiting.endswith(REPLACEMENT):
            self._unfinished = None
        elif self._unfinished is None or any(byte >= _FIRST_LEADING for byte in raw):
            # The first token of a character is decoded as one U+FFFD; later ones may add more.
            self._unfinished = self._length + len(waiting) - 1
        return offset

    def _special_token_length(self, token: int, offset: int) -> int:
        """Length of a special token's text if it is in the echo, else 0."""
        if self._echo is None or self._tokenizer.decode([token]):
            return 0
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return len(text) if self._echo.startswith(text, offset) else 0
