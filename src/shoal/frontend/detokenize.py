"""Incremental detokenization: tokens into text, whole characters only; the search for stop strings."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

REPLACEMENT = "\ufffd"

# An unfinished UTF-8 character is at most 3 bytes, so at most 3 tokens that have text.
_UNFINISHED_TOKENS = 3
# Pending tokens without a whole character after which the bytes count as invalid UTF-8.
_MAX_PENDING = 16


class Decoder(Protocol):
    """The part of a tokenizer that turns tokens into text."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``tokens``."""


class IncrementalDecoder:
    """Text of a growing token sequence; the returned pieces add up to the decoded whole.

    Decoders treat a token differently at the start of a text (some strip a leading space), and one
    character may be spread over several tokens. So a short window is decoded instead of single
    tokens: the text of ``_tokens[:_read]`` was returned, the other tokens are pending. The window is
    bounded, hence the cost per token, too. ``context``: tokens before the text (the end of a prompt).
    """

    def __init__(
        self, decoder: Decoder, context: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._tokens = list(context)
        self._read_text = self._decode(self._tokens)
        if self._read_text.endswith(REPLACEMENT):
            # Part of a character: its completion cannot be distinguished from the text after it.
            self._tokens, self._read_text = [], ""
        self._read = len(self._tokens)

    def push(self, token: int) -> str:
        """Text completed by ``token``; empty while a character is unfinished."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        pending = len(self._tokens) - self._read
        if not text.endswith(REPLACEMENT):
            return self._take(len(self._tokens), text, keep_window=pending < _MAX_PENDING)
        if pending < _MAX_PENDING:
            return ""
        end = self._last_boundary(text)
        return self._take(end, self._decode(self._tokens[:end]), keep_window=False)

    @property
    def pending(self) -> str:
        """The pending text, with an unfinished character as U+FFFD."""
        return self._decode(self._tokens)[len(self._read_text) :] if len(self._tokens) > self._read else ""

    def finish(self) -> str:
        """Return the pending text."""
        return self._take(len(self._tokens), self._decode(self._tokens), keep_window=False)

    def _take(self, end: int, text: str, keep_window: bool) -> str:
        """Return the text of the pending tokens up to ``end``; text: of the window up to there."""
        new = text[len(self._read_text) :]
        if not new and keep_window:
            # Special tokens have no text: the window must keep some that do.
            return ""
        if new:
            del self._tokens[: self._read]
            self._read = end - self._read
        else:
            del self._tokens[self._read : end]
        self._read_text = self._decode(self._tokens[: self._read])
        return new

    def _last_boundary(self, text: str) -> int:
        """Where to cut pending tokens that are invalid UTF-8: not within a character."""
        for end in range(len(self._tokens) - _UNFINISHED_TOKENS, self._read, -1):
            if text.startswith(self._decode(self._tokens[:end])):
                return end
        return len(self._tokens)

    def _decode(self, tokens: Sequence[int]) -> str:
        if not tokens:
            return ""
        return self._decoder.decode(tokens, skip_special_tokens=self._skip_special_tokens)


class StopStrings:
    """Cuts a text at the first complete stop string, however the text is split into pieces.

    Text that may be the start of a stop string is withheld until that is known. Of stop strings that end at
    the same character, the longest counts. ``include``: the stop string is part of the text. The search is
    that of Knuth, Morris and Pratt (1977), so its cost does not depend on the withheld text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._include = include
        self._stops = sorted(stops, key=len, reverse=True)
        # Length of each stop string's prefix that the text so far ends with.
        self._matched = [0] * len(stops)
        self._withheld = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Return the text that is safe to show; sets ``found`` when a stop string is complete."""
        if not self._stops:
            return text
        new, text = len(self._withheld), self._withheld + text
        for end in range(new + 1, len(text) + 1):
            for number, stop in enumerate(self._stops):
                self._matched[number] = _advance(stop, self._matched[number], text[end - 1])
                if self._matched[number] == len(stop):
                    self.found, self._withheld = stop, ""
                    self._matched = [0] * len(self._stops)
                    return text[: end if self._include else end - len(stop)]
        shown = len(text) - max(self._matched)
        self._withheld = text[shown:]
        return text[:shown]

    def release(self) -> str:
        """Return the withheld text, as no more text follows."""
        withheld, self._withheld = self._withheld, ""
        return withheld


def _advance(stop: str, matched: int, character: str) -> int:
    """Matched length of ``stop`` after ``character``, where it was ``matched`` before."""
    while character != stop[matched]:
        if not matched:
            return 0
        matched = _prefix_function(stop)[matched - 1]
    return matched + 1


@lru_cache(maxsize=256)
def _prefix_function(stop: str) -> list[int]:
    """For each prefix of ``stop``: length of its longest proper suffix that is also a prefix."""
    lengths = [0]
    for end in range(1, len(stop)):
        length = lengths[-1]
        while length and stop[end] != stop[length]:
            length = lengths[length - 1]
        lengths.append(length + (stop[end] == stop[length]))
    return lengths


class IncrementalDetokenizer:
    """Text of one output: whole characters, cut before a stop string.

    Stop strings count only in text of tokens after the first ``min_tokens``. ``include_stop``: the text is
    cut after them. Special tokens have no text unless ``skip_special_tokens`` is false. After
    ``stop_reason`` is set, further tokens give no text.
    """

    def __init__(
        self,
        decoder: Decoder,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        context: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        self._text = IncrementalDecoder(decoder, context, skip_special_tokens)
        self._stops = StopStrings(stop, include_stop)
        self._tokens_without_stop = min_tokens

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the output; None: none did."""
        return self._stops.found

    def push(self, token: int) -> str:
        """New text after one more output token; it may be empty."""
        if self._stops.found is not None:
            return ""
        text = self._text.push(token)
        if self._tokens_without_stop > 0:
            self._tokens_without_stop -= 1
            return text
        return self._stops.push(text)

    def finish(self) -> str:
        """The remaining text after the last token; it may complete a stop string."""
        if self._stops.found is not None:
            return ""
        text = self._stops.push(self._text.finish())
        return text + self._stops.release()
