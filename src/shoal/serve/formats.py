"""The two faces of an answer: chat completions and completions, whole or as chunks."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, cast

from msgspec import UNSET, UnsetType

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


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """Where a stream has token counts: in a last chunk of its own, and then perhaps in every chunk."""

    last: bool
    every: bool

    def in_chunk(self, usage: Usage) -> Usage | UnsetType | None:
        """What a chunk with a choice says."""
        if not self.last:
            return UNSET
        return usage if self.every else None


class Format(Protocol):
    """Writes one answer as JSON."""

    def chunks(self, index: int, delta: Delta, usage: Usage) -> Iterator[bytes]:
        """Chunks of a stream for what is new in choice ``index``; ``usage``: its tokens so far."""

    def last_chunk(self, usage: Usage) -> bytes | None:
        """The chunk with the token counts, if it was asked for."""

    def whole(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        """The answer in one piece."""


class ChatFormat:
    """Chat completions. logprobs: None, or what writes them. usage: where a stream has token counts."""

    def __init__(
        self, call_id: str, model: str, logprobs: LogprobFormatter | None, usage: StreamUsage
    ) -> None:
        self._head = (call_id, int(time.time()), model)
        self._logprobs = logprobs
        self._usage = usage
        self._begun: set[int] = set()

    def chunks(self, index: int, delta: Delta, usage: Usage) -> Iterator[bytes]:
        """The role before anything else, then text, then the reason why it ended."""
        if index not in self._begun:
            self._begun.add(index)
            yield self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content="")), usage)
        logprobs = self._logprobs.chat(delta.logprobs) if self._logprobs and delta.logprobs else None
        if delta.text or logprobs:
            yield self._chunk(ChatChunkChoice(index, ChatDelta(content=delta.text), logprobs), usage)
        if delta.finish is not None:
            end = ChatChunkChoice(
                index, ChatDelta(), finish_reason=_word(delta.finish), stop_reason=delta.stop_reason
            )
            yield self._chunk(end, usage)

    def _chunk(self, choice: ChatChunkChoice, usage: Usage) -> bytes:
        return encode(ChatChunk(*self._head, [choice], self._usage.in_chunk(usage)))

    def last_chunk(self, usage: Usage) -> bytes | None:
        """Token counts, without choices."""
        return encode(ChatChunk(*self._head, [], usage)) if self._usage.last else None

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
    """Completions. logprobs: None, or what writes them. usage: where a stream has token counts."""

    def __init__(
        self, call_id: str, model: str, logprobs: LogprobFormatter | None, usage: StreamUsage
    ) -> None:
        self._head = (call_id, int(time.time()), model)
        self._logprobs = logprobs
        self._usage = usage

    def chunks(self, index: int, delta: Delta, usage: Usage) -> Iterator[bytes]:
        """Text, then the reason why it ended."""
        entries = delta.logprobs if self._logprobs else None
        if delta.text or entries:
            logprobs = self._logprobs.completion(index, entries) if self._logprobs and entries else None
            yield self._chunk(CompletionChoice(index, delta.text, logprobs, None), usage)
        if delta.finish is not None:
            yield self._chunk(
                CompletionChoice(index, "", None, _word(delta.finish), delta.stop_reason), usage
            )

    def _chunk(self, choice: CompletionChoice, usage: Usage) -> bytes:
        return encode(Completion(*self._head, [choice], self._usage.in_chunk(usage)))

    def last_chunk(self, usage: Usage) -> bytes | None:
        """Token counts, without choices."""
        return encode(Completion(*self._head, [], usage)) if self._usage.last else None

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
