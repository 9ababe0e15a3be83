"""Where in a text its tokens begin."""

from collections.abc import Sequence

from shoal.frontend.detokenize import REPLACEMENT, IncrementalDecoder
from shoal.frontend.reader import CONTEXT_TOKENS
from shoal.serve.backend import TextCodec

# Bytes of UTF-8 from here on begin a character; those below it, down to the other, go on with one.
_FIRST_LEADING = 0xC0
_FIRST_CONTINUING = 0x80


class TextOffsets:
    """Counts the characters before each token of a text.

    A token that begins within a character is where that character begins. context: tokens before the text.
    start: offset of the first token. echo: the text, where it is known; it shows special tokens or not. Else
    ``skip_special_tokens`` says whether they have no text.
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
        self._length = start  # of the text that the decoder returned
        self._unfinished: int | None = None  # where a character begins that is not complete yet

    def push(self, token: int) -> int:
        """The offset of the next token."""
        raw = self._tokenizer.token_bytes(token)
        goes_on = bool(raw) and _FIRST_CONTINUING <= raw[0] < _FIRST_LEADING
        offset = self._unfinished if goes_on else None
        if offset is None:
            offset = self._length + len(self._decoder.waiting)
        self._length += len(self._decoder.push(token)) + self._special_token_length(token, offset)
        waiting = self._decoder.waiting
        if not waiting.endswith(REPLACEMENT):
            self._unfinished = None
        elif self._unfinished is None or any(byte >= _FIRST_LEADING for byte in raw):
            # Its first token shows of it one U+FFFD; further ones may show more.
            self._unfinished = self._length + len(waiting) - 1
        return offset

    def _special_token_length(self, token: int, offset: int) -> int:
        """Characters of a special token that is seen in the echo."""
        if self._echo is None or self._tokenizer.decode([token]):
            return 0
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return len(text) if self._echo.startswith(text, offset) else 0
