"""OfflineBatch: the prompts of one offline call, their requests, and their outputs (``Completion``)."""

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
"""Sampling of embedding requests; the one token that they generate is not used."""

_call_numbers = count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    service: str
    choice: int
    """Index among the ``n`` outputs of the prompt."""
    prompt_tokens: int
    text: str
    """Text without stop strings and stop tokens."""
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of each newly generated token; None: not requested."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    error: str | None = None
    """Why it failed; None: it did not."""
    record: RequestRecord | None = None
    """Arrival and token times; None if it failed."""
    embedding: tuple[float, ...] | None = None
    """Embedding of the prompt; None: not requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The outputs of one prompt."""

    prompt: str | Sequence[int]
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    """Its ``n`` completions, in the order of their choices."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Of each prompt token, where the first has None; None: not requested."""

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text


@dataclass(slots=True)
class _Choice:
    """One choice of a prompt, from its submission on."""

    reader: ChoiceReader
    service: str
    prompt_tokens: int
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of ``tokens``, if requested."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt tokens from the second on; only in the first choice, if requested."""
    embedding: bytes | None = None
    """Embedding of the prompt, if requested."""
    completion: Completion | None = None
    """None: unfinished."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt that was submitted."""

    prompt: str | Sequence[int]
    tokens: tuple[int, ...]
    choices: list[_Choice]
    scored: bool
    """Whether log-probabilities of the prompt were requested."""

    def output(self) -> RequestOutput:
        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=self.tokens,
            outputs=tuple(choice.completion for choice in self.choices if choice.completion),
            prompt_logprobs=(None, *self.choices[0].prompt_logprobs) if self.scored else None,
        )


class OfflineBatch:
    """Prompts that are added one by one and submitted together, with their outputs.

    on_delta: called with each delta, in the thread that steps the engine.

    Prompts are added by the caller's thread; from ``submit`` on, only the engine thread uses the batch.
    """

    def __init__(self, engine: Engine, on_delta: Callable[[Delta], None] | None = None) -> None:
        self._engine = engine
        self._on_delta = on_delta
        self._prompts: list[_Prompt] = []
        self._requests: list[list[Request]] = []
        self._unfinished: dict[str, _Choice] = {}  # by request id
        self.done: Future[list[RequestOutput]] = Future()
        """The outputs, or the error that ended the batch; set by the engine thread."""
        self.done.set_running_or_notify_cancel()  # a waiter cannot cancel it

    @property
    def unfinished(self) -> Collection[str]:
        """Ids of unfinished requests."""
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

        output: earlier output to continue; eos_token_ids: of the model, one of which may end that output.
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
                self._add_delta(request.id, delta)
        self._requests.append([request for request in requests if request.id in self._unfinished])
        self._prompts.append(_Prompt(prompt, tuple(tokens), choices, sampling.prompt_logprobs is not None))

    def prepare(self) -> Sequence[Future[None]]:
        """Lease places for the grammars until the batch is done; returns futures of their compilation.

        Raises InvalidRequest if there are too many grammars, or one is invalid, and QueueFull if too many
        other grammars are in use.
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
        with ExitStack() as stack:
            leases = []
            for service, grammar in grammars:
                leases.append(self._engine.prepare(service, grammar))
                stack.callback(leases[-1].release)
            held = stack.pop_all()
            self.done.add_done_callback(lambda _: held.close())
        return [lease.ready for lease in leases]

    def submit(self) -> None:
        """Submit all requests, or none: raises as ``Engine.submit``."""
        try:
            for requests in self._requests:
                self._engine.submit(*requests)
        except BaseException:
            self.cancel()
            raise

    def add_event(self, event: TokenEvent) -> None:
        """Process an event; events of finished requests are ignored."""
        choice = self._unfinished.get(event.request_id)
        if choice is None:
            return
        delta = choice.reader.read(event, self._engine.now_ns())
        self._add_delta(event.request_id, delta)
        if delta.finish is not None and event.finish is None:
            self._engine.cancel(event.request_id, complete=True)

    def cancel(self) -> None:
        """Cancel the unfinished requests."""
        for request_id in self._unfinished:
            self._engine.cancel(request_id)
        self._unfinished.clear()

    def outputs(self) -> list[RequestOutput]:
        """The outputs of all prompts, which have ended."""
        return [prompt.output() for prompt in self._prompts]

    def _add_delta(self, request_id: str, delta: Delta) -> None:
        choice = self._unfinished[request_id]
        choice.text.append(delta.text)
        choice.tokens += delta.tokens
        choice.logprobs += delta.logprobs or ()
        choice.prompt_logprobs += delta.prompt_logprobs or ()
        choice.embedding = delta.embedding or choice.embedding
        if delta.finish is not None:
            del self._unfinished[request_id]
            choice.completion = _make_completion(choice, delta, delta.finish)
        if self._on_delta is not None:
            self._on_delta(delta)


def _make_completion(choice: _Choice, last: Delta, finish: FinishReason) -> Completion:
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
    """Decode the embedding of an event."""
    return struct.unpack(f"<{len(vector) // 4}f", vector)
