"""Response formats: their protocol, collected outputs, and the writer of completions, full or as chunks."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, cast

from msgspec import UNSET, UnsetType

from shoal.core import FinishReason, TokenLogprobs
from shoal.frontend.reader import Delta
from shoal.serve.openai.logprobs import LogprobFormatter
from shoal.serve.openai.response_bodies import (
    Completion,
    CompletionChoice,
    FinishReasonName,
    Usage,
    encode,
)
from shoal.serve.openai.response_extras import ResponseExtras


@dataclass(slots=True)
class Output:
    """The complete output of one choice, collected from its deltas."""

    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """From the prompt's second token on; only the first choice of a prompt has them."""
    embedding: bytes | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        self.pieces.append(delta.text)
        self.tokens.extend(delta.tokens)
        self.logprobs.extend(delta.logprobs or ())
        self.prompt_logprobs.extend(delta.prompt_logprobs or ())
        self.embedding = delta.embedding or self.embedding
        if delta.finish is not None:
            self.finish, self.stop_reason = delta.finish, delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """Which chunks of a stream have token counts."""

    final_chunk: bool
    """A final chunk without choices has the counts of the whole response."""
    every_chunk: bool
    """Every chunk has the counts of its choice so far; only with ``final_chunk``."""

    def in_chunk(self, usage: Usage) -> Usage | UnsetType | None:
        """The ``usage`` field of a chunk that has a choice."""
        if not self.final_chunk:
            return UNSET
        return usage if self.every_chunk else None


class Format(Protocol):
    """Writes one response as JSON."""

    def chunks(self, index: int, delta: Delta, usage: Usage) -> Iterator[bytes]:
        """The chunks of a delta of choice ``index``. usage: token counts of the choice so far."""

    def usage_chunk(self, usage: Usage) -> bytes | None:
        """The final chunk with token counts; None: the client does not want it."""

    def full(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        """The full response."""


class CompletionFormat:
    def __init__(
        self,
        request_id: str,
        model: str,
        logprobs: LogprobFormatter | None,
        usage: StreamUsage,
        extras: ResponseExtras,
    ) -> None:
        self._header = (request_id, int(time.time()), model)
        self._logprobs = logprobs
        self._usage = usage
        self._extras = extras
        self._started_choices: set[int] = set()

    def chunks(self, index: int, delta: Delta, usage: Usage) -> Iterator[bytes]:
        """First the echoed prompt and its token ids, then text, then the finish reason."""
        if index not in self._started_choices:
            self._started_choices.add(index)
            prompt, prompt_ids = self._extras.echo(index), self._extras.prompt_token_ids(index)
            if prompt or prompt_ids:
                begin = CompletionChoice(index, prompt, None, None, prompt_token_ids=prompt_ids)
                yield self._chunk(begin, usage)
        logprob_entries = delta.logprobs if self._logprobs else None
        ids = self._extras.token_ids(delta.tokens)
        if delta.text or logprob_entries or ids:
            logprobs = None
            if self._logprobs is not None and logprob_entries:
                logprobs = self._logprobs.completion(index, logprob_entries, self._extras.prompt(index))
            yield self._chunk(CompletionChoice(index, delta.text, logprobs, None, token_ids=ids), usage)
        if delta.finish is not None:
            yield self._chunk(
                CompletionChoice(index, "", None, finish_reason(delta.finish), delta.stop_reason), usage
            )

    def _chunk(self, choice: CompletionChoice, usage: Usage) -> bytes:
        return encode(Completion(*self._header, [choice], self._usage.in_chunk(usage)))

    def usage_chunk(self, usage: Usage) -> bytes | None:
        """A chunk with token counts and no choices."""
        return encode(Completion(*self._header, [], usage)) if self._usage.final_chunk else None

    def full(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        choices = [self._choice(index, outputs) for index in range(len(outputs))]
        return encode(Completion(*self._header, choices, usage))

    def _choice(self, index: int, outputs: Sequence[Output]) -> CompletionChoice:
        output, extras = outputs[index], self._extras
        prompt_logprobs = outputs[extras.first_choice(index)].prompt_logprobs
        prompt, echo = extras.prompt(index), extras.echo(index)
        logprobs = None
        if self._logprobs is not None and extras.echoed is not None:
            logprobs = self._logprobs.completion(index, [*prompt_logprobs, *output.logprobs], prompt, echo)
        elif self._logprobs is not None:
            logprobs = self._logprobs.completion(index, output.logprobs, prompt)
        return CompletionChoice(
            index,
            echo + output.text,
            logprobs,
            finish_reason(output.finish),
            output.stop_reason,
            extras.token_ids(output.tokens),
            extras.prompt_token_ids(index),
            extras.prompt_logprobs(prompt_logprobs),
        )


def finish_reason(finish: FinishReason | None) -> FinishReasonName:
    """OpenAI's name of the reason; other reasons end the whole request earlier."""
    if finish not in (FinishReason.STOP, FinishReason.LENGTH):
        raise AssertionError(f"a choice ended with {finish}")
    return cast(Literal["stop", "length"], finish.value)
