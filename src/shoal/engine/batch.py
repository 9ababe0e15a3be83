"""A set of prompts run to their end in this process."""

import itertools
import signal
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
from shoal.engine.reader import ChoiceReader

_call_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished output. ``record`` has its times; None where it failed."""

    service: str
    choice: int
    prompt_tokens: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cached_tokens: int = 0
    error: str | None = None
    record: RequestRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What became of one prompt: ``n`` completions in the order of their choices."""

    prompt: str | Sequence[int]
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text


@dataclass(slots=True)
class _Growing:
    """One choice while it runs."""

    reader: ChoiceReader
    service: str
    prompt_tokens: int
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    completion: Completion | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    prompt: str | Sequence[int]
    tokens: tuple[int, ...]
    choices: list[_Growing]


class Batch:
    """Prompts added one by one, then run together; used once."""

    def __init__(self, engine: Engine, *, progress: bool) -> None:
        self._engine = engine
        self._show = progress
        self._asked: list[_Asked] = []
        self._open: dict[str, _Growing] = {}

    def add(
        self,
        prompt: str | Sequence[int],
        service: str,
        tokens: Sequence[int],
        sampling: SamplingParams,
        decoder: Decoder,
        slo: SLO = NO_GOALS,
    ) -> None:
        """Submit a prompt that has passed ``check_request``."""
        call_id = f"offline-{next(_call_numbers)}"
        requests = expand_choices(call_id, service, tokens, sampling, self._engine.now_ns(), slo)
        choices = []
        for choice, request in enumerate(requests):
            growing = _Growing(ChoiceReader(request, choice, sampling, decoder), service, len(tokens))
            self._open[request.id] = growing
            choices.append(growing)
        self._engine.submit(*requests)
        self._asked.append(_Asked(prompt, tuple(tokens), choices))

    def run(self) -> list[RequestOutput]:
        """Step the engine until every prompt is answered."""
        with TokenProgress(len(self._open), shown=self._show) as bar, _deferred_interrupt() as interrupted:
            while self._open or self._engine.busy:
                if interrupted():
                    self.cancel()
                    raise KeyboardInterrupt
                events = self._engine.step()
                started = time.monotonic_ns()
                before = len(self._open)
                tokens = sum(self._take(event) for event in events)
                bar.advance(before - len(self._open), tokens)
                self._engine.add_reply_time(time.monotonic_ns() - started)
                if self._open and self._engine.waits:
                    self._wait()
        return [
            RequestOutput(
                prompt=asked.prompt,
                prompt_token_ids=asked.tokens,
                outputs=tuple(growing.completion for growing in asked.choices if growing.completion),
            )
            for asked in self._asked
        ]

    def cancel(self) -> None:
        """Cancel what is open, and let the engine finish the steps that it has begun."""
        for request_id in self._open:
            self._engine.cancel(request_id)
        self._open.clear()
        while self._engine.busy:
            self._engine.step()

    def _take(self, event: TokenEvent) -> int:
        """Read one event; returns how many output tokens it brought."""
        growing = self._open.get(event.request_id)
        if growing is None:
            return 0
        delta = growing.reader.read(event, self._engine.now_ns())
        growing.text.append(delta.text)
        growing.tokens += delta.tokens
        growing.logprobs += delta.logprobs or ()
        if delta.finish is not None:
            del self._open[event.request_id]
            if event.finish is None:
                self._engine.cancel(event.request_id, complete=True)
            growing.completion = Completion(
                service=growing.service,
                choice=delta.choice,
                prompt_tokens=growing.prompt_tokens,
                text="".join(growing.text),
                tokens=tuple(growing.tokens),
                finish_reason=delta.finish,
                stop_reason=delta.stop_reason,
                logprobs=tuple(growing.logprobs) if growing.logprobs else None,
                cached_tokens=delta.cached_tokens,
                error=delta.error,
                record=growing.reader.record(),
            )
        return len(delta.tokens)

    def _wait(self) -> None:
        until_ns = self._engine.idle_until_ns
        if until_ns is None:
            raise RuntimeError(
                f"{len(self._open)} requests are unfinished, but the scheduler has nothing to do"
            )
        time.sleep(max(0, until_ns - self._engine.now_ns()) / 1e9)


@contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag, so that it ends no step halfway; a second Ctrl-C interrupts at once.

    Yields a function that tells whether it was pressed. Signals reach only the main thread; in others
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
