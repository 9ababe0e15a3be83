"""A set of prompts that runs to its end in this process, and its outputs."""

import struct
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, count

from shoal.core import (
    SLO,
    FinishReason,
    InvalidRequest,
    Request,
    RequestRecord,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
)
from shoal.core.service import NO_GOALS
from shoal.engine.core import Engine
from shoal.execute.grammar.pool import MAX_PROCESSES
from shoal.frontend.choice_requests import expand_choices
from shoal.frontend.detokenize import Decoder
from shoal.frontend.reader import ChoiceReader, Delta

EMBEDDING_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, embed=True)
"""Of requests for embeddings alone; the token that every request makes is not shown."""

_call_numbers = count(1)


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


class OfflineBatch:
    """Prompts that are added one by one and submitted together, and what becomes of them.

    told: called with each delta, in the thread that steps the engine.

    Prompts are added in the thread that made it; from ``submit`` on it belongs to the one that steps the
    engine.
    """

    def __init__(self, engine: Engine, told: Callable[[Delta], None] | None = None) -> None:
        self._engine = engine
        self._told = told
        self._prompts: list[_Prompt] = []
        self._requests: list[list[Request]] = []
        self._unfinished: dict[str, _Choice] = {}  # by request id
        self.done: Future[list[RequestOutput]] = Future()
        """The outputs, or what ended it; set by whoever steps the engine."""
        self.done.set_running_or_notify_cancel()  # it ends with what it is told, not when a waiter gives up

    @property
    def unfinished(self) -> Collection[str]:
        """Ids of requests that have not ended."""
        return self._unfinished.keys()

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
        """Add a prompt that has passed ``check_request``.

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
        self._requests.append([request for request in requests if request.id in self._unfinished])
        self._prompts.append(_Prompt(prompt, tuple(tokens), choices, sampling.prompt_logprobs is not None))

    def prepare(self) -> Sequence[Future[None]]:
        """Keep places for its grammars until it is done; they can be followed when these are done.

        Raises InvalidRequest if there are too many, or one cannot be used, and QueueFull if too many others
        are in use.
        """
        grammars = {
            (request.service, request.sampling.grammar)
            for request in chain.from_iterable(self._requests)
            if request.sampling.grammar is not None
        }
        if len(grammars) > MAX_PROCESSES:
            raise InvalidRequest(
                f"{len(grammars)} different grammars in one call, at most {MAX_PROCESSES} may be; split it",
                "grammar",
            )
        with ExitStack() as places:
            leases = []
            for service, grammar in grammars:
                leases.append(self._engine.prepare(service, grammar))
                places.callback(leases[-1].release)
            kept = places.pop_all()
            self.done.add_done_callback(lambda _: kept.close())
        return [lease.ready for lease in leases]

    def submit(self) -> None:
        """Give the engine all requests; raises as ``Engine.submit``, and then leaves none with it."""
        try:
            for requests in self._requests:
                self._engine.submit(*requests)
        except BaseException:
            self.cancel()
            raise

    def take(self, event: TokenEvent) -> None:
        """Read an event of one of the requests; those of ended ones are ignored."""
        choice = self._unfinished.get(event.request_id)
        if choice is None:
            return
        delta = choice.reader.read(event, self._engine.now_ns())
        self._add(event.request_id, delta)
        if delta.finish is not None and event.finish is None:
            self._engine.cancel(event.request_id, complete=True)

    def cancel(self) -> None:
        """Cancel what is unfinished."""
        for request_id in self._unfinished:
            self._engine.cancel(request_id)
        self._unfinished.clear()

    def outputs(self) -> list[RequestOutput]:
        """All outputs, once they are finished."""
        return [prompt.output() for prompt in self._prompts]

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
            choice.completion = _complete(choice, delta, delta.finish)
        if self._told is not None:
            self._told(delta)


def _complete(choice: _Choice, last: Delta, finish: FinishReason) -> Completion:
    """The output of a choice that has ended."""
    return Completion(
        service=choice.service,
        choice=last.choice,
        prompt_tokens=choice.prompt_tokens,
        text="".join(choice.text),
        tokens=tuple(choice.tokens),
        finish_reason=finish,
        stop_reason=last.stop_reason,
        logprobs=tuple(choice.logprobs) if choice.logprobs else None,
        cached_tokens=last.cached_tokens,
        error=last.error,
        record=choice.reader.record(),
        embedding=None if choice.embedding is None else read_embedding(choice.embedding),
    )


def read_embedding(vector: bytes) -> tuple[float, ...]:
    """The numbers of an embedding as events have it."""
    return struct.unpack(f"<{len(vector) // 4}f", vector)
