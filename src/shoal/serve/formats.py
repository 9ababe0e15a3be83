"""The JSON of responses: what their formats share, and completions, full or as chunks of a stream."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, cast

from msgspec import UNSET, UnsetType

from shoal.core import FinishReason, TokenLogprobs
from shoal.engine.reader import Delta
from shoal.serve.logprobs import LogprobFormatter
from shoal.serve.responses import (
    Completion,
    CompletionChoice,
    FinishReasonName,
    Usage,
    encode,
)


@dataclass(slots=True)
class Output:
    """The complete output of one choice, collected from its deltas."""

    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self.pieces.append(delta.text)
        self.logprobs.extend(delta.logprobs or ())
        if delta.finish is not None:
            self.finish, self.stop_reason = delta.finish, delta.stop_reason

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """Which chunks of a stream have token counts."""

    final_chunk: bool
    """A final chunk without choices has the counts of the whole response."""
    every_chunk: bool
    """Every chunk has the counts of its choice so far; only with ``final_chunk``."""

    def in_chunk(self, usage: Usage) -> Usage | UnsetType | None:
        """The ``usage`` field of a chunk with a choice."""
        if not self.final_chunk:
            return UNSET
        return usage if self.every_chunk else None


class Format(Protocol):
    """Writes one response as JSON."""

    def chunks(self, index: int, delta: Delta, usage: Usage) -> Iterator[bytes]:
        """Chunks for a delta of choice ``index``; ``usage``: its token counts so far."""

    def usage_chunk(self, usage: Usage) -> bytes | None:
        """The final chunk with the token counts, if the client wants it."""

    def full(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        """The response that is not streamed."""


class CompletionFormat:
    """Completions."""

    def __init__(
        self, request_id: str, model: str, logprobs: LogprobFormatter | None, usage: StreamUsage
    ) -> None:
        self._header = (request_id, int(time.time()), model)
        self._logprobs = logprobs
        self._usage = usage

    def chunks(self, index: int, delta: Delta, usage: Usage) -> Iterator[bytes]:
        """Text, then the finish reason."""
        entries = delta.logprobs if self._logprobs else None
        if delta.text or entries:
            logprobs = self._logprobs.completion(index, entries) if self._logprobs and entries else None
            yield self._chunk(CompletionChoice(index, delta.text, logprobs, None), usage)
        if delta.finish is not None:
            yield self._chunk(
                CompletionChoice(index, "", None, finish_reason(delta.finish), delta.stop_reason), usage
            )

    def _chunk(self, choice: CompletionChoice, usage: Usage) -> bytes:
        return encode(Completion(*self._header, [choice], self._usage.in_chunk(usage)))

    def usage_chunk(self, usage: Usage) -> bytes | None:
        """Token counts, without choices."""
        return encode(Completion(*self._header, [], usage)) if self._usage.final_chunk else None

    def full(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        """One text for each choice."""
        choices = [
            CompletionChoice(
                index,
                output.text,
                self._logprobs.completion(index, output.logprobs) if self._logprobs else None,
                finish_reason(output.finish),
                output.stop_reason,
            )
            for index, output in enumerate(outputs)
        ]
        return encode(Completion(*self._header, choices, usage))


def finish_reason(finish: FinishReason | None) -> FinishReasonName:
    """OpenAI's name of the reason; other reasons end the whole request before they get here."""
    if finish not in (FinishReason.STOP, FinishReason.LENGTH):
        raise AssertionError(f"a choice ended with {finish}")
    return cast(Literal["stop", "length"], finish.value)
