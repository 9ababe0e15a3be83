"""The two faces of an answer: chat completions and completions, whole or as chunks."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, cast

from msgspec import UNSET

from shoal.core import FinishReason, TokenLogprobs
from shoal.engine.reader import Delta
from shoal.serve.logprobs import LogprobFormatter
from shoal.serve.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    Completion,
    CompletionChoice,
    FinishWord,
    Usage,
    encode,
)


@dataclass(slots=True)
class Output:
    """One choice, collected to its end."""

    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        """Append what is new."""
        self.pieces.append(delta.text)
        self.logprobs.extend(delta.logprobs or ())
        if delta.finish is not None:
            self.finish, self.stop_reason = delta.finish, delta.stop_reason

    @property
    def text(self) -> str:
        """All text."""
        return "".join(self.pieces)


class Format(Protocol):
    """Writes one answer as JSON."""

    def chunks(self, index: int, delta: Delta) -> Iterator[bytes]:
        """Chunks of a stream for what is new in choice ``index``."""

    def last_chunk(self, usage: Usage) -> bytes | None:
        """The chunk with the token counts, if it was asked for."""

    def whole(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        """The answer in one piece."""


class ChatFormat:
    """Chat completions. logprobs: None, or what writes them."""

    def __init__(
        self, call_id: str, model: str, logprobs: LogprobFormatter | None, include_usage: bool
    ) -> None:
        self._head = (call_id, int(time.time()), model)
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._begun: set[int] = set()

    def chunks(self, index: int, delta: Delta) -> Iterator[bytes]:
        """The role before anything else, then text, then the reason why it ended."""
        if index not in self._begun:
            self._begun.add(index)
            yield self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content="")))
        logprobs = self._logprobs.chat(delta.logprobs) if self._logprobs and delta.logprobs else None
        if delta.text or logprobs:
            yield self._chunk(ChatChunkChoice(index, ChatDelta(content=delta.text), logprobs))
        if delta.finish is not None:
            yield self._chunk(
                ChatChunkChoice(
                    index, ChatDelta(), finish_reason=_word(delta.finish), stop_reason=delta.stop_reason
                )
            )

    def _chunk(self, choice: ChatChunkChoice) -> bytes:
        return encode(ChatChunk(*self._head, [choice], None if self._include_usage else UNSET))

    def last_chunk(self, usage: Usage) -> bytes | None:
        """Token counts, without choices."""
        return encode(ChatChunk(*self._head, [], usage)) if self._include_usage else None

    def whole(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        """One message for each choice."""
        choices = [
            ChatChoice(
                index,
                ChatMessage(output.text),
                self._logprobs.chat(output.logprobs) if self._logprobs else None,
                _word(output.finish),
                output.stop_reason,
            )
            for index, output in enumerate(outputs)
        ]
        return encode(ChatCompletion(*self._head, choices, usage))


class CompletionFormat:
    """Completions. logprobs: None, or what writes them."""

    def __init__(
        self, call_id: str, model: str, logprobs: LogprobFormatter | None, include_usage: bool
    ) -> None:
        self._head = (call_id, int(time.time()), model)
        self._logprobs = logprobs
        self._include_usage = include_usage

    def chunks(self, index: int, delta: Delta) -> Iterator[bytes]:
        """Text, then the reason why it ended."""
        entries = delta.logprobs if self._logprobs else None
        if delta.text or entries:
            logprobs = self._logprobs.completion(index, entries) if self._logprobs and entries else None
            yield self._chunk(CompletionChoice(index, delta.text, logprobs, None))
        if delta.finish is not None:
            yield self._chunk(CompletionChoice(index, "", None, _word(delta.finish), delta.stop_reason))

    def _chunk(self, choice: CompletionChoice) -> bytes:
        return encode(Completion(*self._head, [choice], None if self._include_usage else UNSET))

    def last_chunk(self, usage: Usage) -> bytes | None:
        """Token counts, without choices."""
        return encode(Completion(*self._head, [], usage)) if self._include_usage else None

    def whole(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        """One text for each choice."""
        choices = [
            CompletionChoice(
                index,
                output.text,
                self._logprobs.completion(index, output.logprobs) if self._logprobs else None,
                _word(output.finish),
                output.stop_reason,
            )
            for index, output in enumerate(outputs)
        ]
        return encode(Completion(*self._head, choices, usage))


def _word(finish: FinishReason | None) -> FinishWord:
    """OpenAI's word; other reasons never get here, they end the whole call."""
    if finish not in (FinishReason.STOP, FinishReason.LENGTH):
        raise AssertionError(f"a choice ended with {finish}")
    return cast(Literal["stop", "length"], finish.value)
