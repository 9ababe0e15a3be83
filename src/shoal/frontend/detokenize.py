"""Tokens into text, one token at a time: whole characters only, and nothing past a stop string."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

REPLACEMENT = "\ufffd"

# An unfinished UTF-8 character is at most 3 bytes, so at most 3 tokens that have text.
_UNFINISHED_TOKENS = 3
# How many tokens may wait for the rest of a character before the bytes are taken to be wrong.
_MAX_WAITING = 16


class Decoder(Protocol):
    """The part of a tokenizer that turns tokens into text."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``tokens``."""


class IncrementalDecoder:
    """Text of a growing token sequence; what it has returned adds up to the decode of the whole.

    Decoders treat a token differently at the start of a text (some strip a leading space), and one
    character may be spread over several tokens. So a short window is decoded instead of single
    tokens: ``_tokens[:_read]`` is text that was returned already, the rest waits. The window is
    bounded, hence the cost of a token too. ``context`` is what the text continues (the end of a prompt).
    ``skip_special_tokens``: these have no text.
    """

    def __init__(
        self, decoder: Decoder, context: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._tokens = list(context)
        self._read_text = self._decode(self._tokens)
        if self._read_text.endswith(REPLACEMENT):
            # Half a character: what completes it cannot be told from what follows it.
            self._tokens, self._read_text = [], ""
        self._read = len(self._tokens)

    def push(self, token: int) -> str:
        """Text that ``token`` completes; empty while a character is unfinished."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        waiting = len(self._tokens) - self._read
        if not text.endswith(REPLACEMENT):
            return self._take(len(self._tokens), text, keep_window=waiting < _MAX_WAITING)
        if waiting < _MAX_WAITING:
            return ""
        end = self._last_boundary(text)
        return self._take(end, self._decode(self._tokens[:end]), keep_window=False)

    @property
    def waiting(self) -> str:
        """The text still waiting, an unfinished character as U+FFFD."""
        return self._decode(self._tokens)[len(self._read_text) :] if len(self._tokens) > self._read else ""

    def finish(self) -> str:
        """Return the text still waiting."""
        return self._take(len(self._tokens), self._decode(self._tokens), keep_window=False)

    def _take(self, end: int, text: str, keep_window: bool) -> str:
        """Return the text of the waiting tokens up to ``end``; ``text`` is that of the window up to there."""
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
        """Where to cut waiting tokens whose bytes are no UTF-8: not within a character."""
        for end in range(len(self._tokens) - _UNFINISHED_TOKENS, self._read, -1):
            if text.startswith(self._decode(self._tokens[:end])):
                return end
        return len(self._tokens)

    def _decode(self, tokens: Sequence[int]) -> str:
        if not tokens:
            return ""
        return self._decoder.decode(tokens, skip_special_tokens=self._skip_special_tokens)


class StopStrings:
    """Cuts a text at the first stop string to be completed, however the text is split.

    Text that may be the beginning of a stop string is held back until that is known. Of stop strings that
    are completed together, the longest counts. ``include``: it is shown, too. The search is that of Knuth,
    Morris and Pratt (1977), so its cost does not depend on how much is held back.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._include = include
        self._stops = sorted(stops, key=len, reverse=True)
        # How much of each stop string the text so far ends with.
        self._matched = [0] * len(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """What can be shown of the text so far; sets ``found`` when a stop string is complete."""
        if not self._stops:
            return text
        new, text = len(self._held), self._held + text
        for end in range(new + 1, len(text) + 1):
            for number, stop in enumerate(self._stops):
                self._matched[number] = _advance(stop, self._matched[number], text[end - 1])
                if self._matched[number] == len(stop):
                    self.found, self._held = stop, ""
                    self._matched = [0] * len(self._stops)
                    return text[: end if self._include else end - len(stop)]
        shown = len(text) - max(self._matched)
        self._held = text[shown:]
        return text[:shown]

    def release(self) -> str:
        """The text held back, now that it begins no stop string."""
        held, self._held = self._held, ""
        return held


def _advance(stop: str, matched: int, character: str) -> int:
    """How much of ``stop`` a text ends with, that ended with ``matched`` of it before this character."""
    while character != stop[matched]:
        if not matched:
            return 0
        matched = _borders(stop)[matched - 1]
    return matched + 1


@lru_cache(maxsize=256)
def _borders(stop: str) -> list[int]:
    """Of every beginning of ``stop``: the length of its longest other end that is a beginning, too."""
    borders = [0]
    for end in range(1, len(stop)):
        length = borders[-1]
        while length and stop[end] != stop[length]:
            length = borders[length - 1]
        borders.append(length + (stop[end] == stop[length]))
    return borders


class IncrementalDetokenizer:
    """Text of one output, as it may be shown: whole characters, and cut before a stop string.

    Stop strings count only in text of tokens after the first ``min_tokens``; ``include_stop``: the text is
    cut behind them. Special tokens have no text unless ``skip_special_tokens`` is false. After
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
        self._exempt = min_tokens

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the output."""
        return self._stops.found

    def push(self, token: int) -> str:
        """Text to show after one more output token; it may be empty."""
        if self._stops.found is not None:
            return ""
        text = self._text.push(token)
        if self._exempt > 0:
            self._exempt -= 1
            return text
        return self._stops.push(text)

    def finish(self) -> str:
        """What remains to be shown once the output has ended; it may complete a stop string."""
        if self._stops.found is not None:
            return ""
        text = self._stops.push(self._text.finish())
        return text + self._stops.release()
