"""A set of prompts that runs to its end in this process."""

import itertools
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from shoal.core import SLO, FinishReason, RequestRecord, SamplingParams, TokenEvent, TokenLogprobs
from shoal.core.service import NO_GOALS
from shoal.engine.choices import expand_choices
from shoal.engine.core import Engine
from shoal.engine.detokenize import Decoder
from shoal.engine.progress import TokenProgress
from shoal.engine.reader import ChoiceReader, Delta

_POLL_S = 0.001
_call_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished output."""

    service: str
    """The service that made it."""
    choice: int
    """Which of the ``n`` outputs of its prompt this is, from 0."""
    prompt_tokens: int
    """Length of the prompt."""
    text: str
    """The text, without stop strings and stop tokens."""
    tokens: tuple[int, ...]
    """The output tokens."""
    finish_reason: FinishReason
    """Why it ended."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of each token made now, if they were asked for."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix index."""
    error: str | None = None
    """What went wrong, if something did."""
    record: RequestRecord | None = None
    """Its times; None if it failed."""
    embedding: tuple[float, ...] | None = None
    """The prompt's, if it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The outputs of one prompt."""

    prompt: str | Sequence[int]
    """The prompt as it was given."""
    prompt_token_ids: tuple[int, ...]
    """Its tokens."""
    outputs: tuple[Completion, ...]
    """Its ``n`` completions, in the order of their choices."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Of each prompt token, if they were asked for; None of the first, before which there is nothing."""

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text


@dataclass(slots=True)
class _Choice:
    """One choice of a prompt, from its submission on."""

    reader: ChoiceReader
    """Makes text of its events."""
    service: str
    """The service that generates it."""
    prompt_tokens: int
    """Length of the prompt."""
    text: list[str] = field(default_factory=list)
    """Pieces of text so far."""
    tokens: list[int] = field(default_factory=list)
    """Output tokens so far."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Their log-probabilities, if asked for."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens but the first; of the first choice, if asked for."""
    embedding: bytes | None = None
    """The prompt's, if asked for."""
    completion: Completion | None = None
    """The finished output, once it has ended."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt that was submitted."""

    prompt: str | Sequence[int]
    """The prompt as it was given."""
    tokens: tuple[int, ...]
    """Its tokens."""
    choices: list[_Choice]
    """Its ``n`` choices."""
    scored: bool
    """Whether log-probabilities of the prompt were asked for."""

    def output(self) -> RequestOutput:
        """All of it, once it has ended."""
        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=self.tokens,
            outputs=tuple(choice.completion for choice in self.choices if choice.completion),
            prompt_logprobs=(None, *self.choices[0].prompt_logprobs) if self.scored else None,
        )


class Batch:
    """Prompts that are added one by one and then run together, once."""

    def __init__(self, engine: Engine, *, progress: bool) -> None:
        self._engine = engine
        self._show = progress
        self._prompts: list[_Prompt] = []
        self._unfinished: dict[str, _Choice] = {}  # by request id

    def add(
        self,
        prompt: str | Sequence[int],
        service: str,
        tokens: Sequence[int],
        sampling: SamplingParams,
        decoder: Decoder,
        slo: SLO = NO_GOALS,
        output: Sequence[int] = (),
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """Submit a prompt that has passed ``check_request``.

        output: to go on from; eos_token_ids: of the model, one of which may be its end.
        """
        call_id = f"offline-{next(_call_numbers)}"
        now_ns = self._engine.now_ns()
        requests = expand_choices(call_id, service, tokens, sampling, now_ns, slo, tuple(output))
        choices = []
        for number, request in enumerate(requests):
            reader = ChoiceReader(request, number, sampling, decoder, eos_token_ids)
            choice = _Choice(reader, service, len(tokens), [reader.past_text])
            choice.tokens += output[: reader.output_tokens]
            choices.append(choice)
            self._unfinished[request.id] = choice
            if (delta := reader.read_past(now_ns)) is not None:
                self._add(request.id, delta)
        self._engine.submit(*[request for request in requests if request.id in self._unfinished])
        self._prompts.append(_Prompt(prompt, tuple(tokens), choices, sampling.prompt_logprobs is not None))

    def run(self) -> list[RequestOutput]:
        """Step the engine until every output is finished."""
        with (
            TokenProgress(len(self._unfinished), shown=self._show) as bar,
            _deferred_interrupt() as interrupted,
        ):
            while self._unfinished or self._engine.busy:
                if interrupted():
                    self.cancel()
                    raise KeyboardInterrupt
                events = self._engine.step()
                started = time.monotonic_ns()
                before = len(self._unfinished)
                tokens = sum(self._take(event) for event in events)
                bar.advance(before - len(self._unfinished), tokens)
                self._engine.add_reply_time(time.monotonic_ns() - started)
                if self._unfinished and self._engine.waits:
                    self._wait()
        return [prompt.output() for prompt in self._prompts]

    def cancel(self) -> None:
        """Cancel what is unfinished, and let the engine finish the steps that it has begun."""
        for request_id in self._unfinished:
            self._engine.cancel(request_id)
        self._unfinished.clear()
        while self._engine.busy:
            self._engine.step()

    def _take(self, event: TokenEvent) -> int:
        """Read one event; returns how many output tokens it brought."""
        choice = self._unfinished.get(event.request_id)
        if choice is None:
            return 0
        delta = choice.reader.read(event, self._engine.now_ns())
        self._add(event.request_id, delta)
        if delta.finish is not None and event.finish is None:
            self._engine.cancel(event.request_id, complete=True)
        return len(delta.tokens)

    def _add(self, request_id: str, delta: Delta) -> None:
        """Add what is new to a choice."""
        choice = self._unfinished[request_id]
        choice.text.append(delta.text)
        choice.tokens += delta.tokens
        choice.logprobs += delta.logprobs or ()
        choice.prompt_logprobs += delta.prompt_logprobs or ()
        choice.embedding = delta.embedding or choice.embedding
        if delta.finish is not None:
            del self._unfinished[request_id]
            choice.completion = Completion(
                service=choice.service,
                choice=delta.choice,
                prompt_tokens=choice.prompt_tokens,
                text="".join(choice.text),
                tokens=tuple(choice.tokens),
                finish_reason=delta.finish,
                stop_reason=delta.stop_reason,
                logprobs=tuple(choice.logprobs) if choice.logprobs else None,
                cached_tokens=delta.cached_tokens,
                error=delta.error,
                record=choice.reader.record(),
                embedding=None if choice.embedding is None else read_embedding(choice.embedding),
            )

    def _wait(self) -> None:
        until_ns = self._engine.idle_until_ns
        if self._engine.polls:
            time.sleep(_POLL_S)
            return
        if until_ns is None:
            raise RuntimeError(
                f"{len(self._unfinished)} requests are unfinished, but the scheduler has nothing to do"
            )
        time.sleep(max(0, until_ns - self._engine.now_ns()) / 1e9)


def read_embedding(vector: bytes) -> tuple[float, ...]:
    """The numbers of an embedding as events have it."""
    return struct.unpack(f"<{len(vector) // 4}f", vector)


@contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag, so that no step ends halfway; a second Ctrl-C interrupts at once.

    Yields a function that says whether it was pressed. Signals reach only the main thread; in others
    nothing is changed.
    """
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return

    def press(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    previous = signal.signal(signal.SIGINT, press)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, previous)
