"""A generation request under way: its prompts' streams merged, its token counts and its times."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field

from msgspec.structs import replace
from prometheus_client import Histogram

from shoal.core import (
    SLO,
    EngineDied,
    FinishReason,
    InvalidRequest,
    QueueFull,
    RequestRecord,
    SamplingParams,
    ServiceUnavailable,
    SLOExpired,
)
from shoal.core.service import NO_GOALS
from shoal.frontend.reader import Delta
from shoal.serve.backend import Backend, DeltaStream
from shoal.serve.errors import GenerationFailed
from shoal.serve.metrics.server_metrics import ServerMetrics
from shoal.serve.openai.error_field_names import FieldNames, errors_named
from shoal.serve.openai.response_bodies import PromptTokensDetails, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What one HTTP request asks of the engine: ``sampling.n`` choices of every prompt."""

    id: str
    service: str
    prompts: Sequence[Sequence[int]]
    """Token ids of each prompt."""
    sampling: SamplingParams
    arrival_ns: int
    """When the headers of the HTTP request had been read, on the monotonic clock."""
    slo: SLO = NO_GOALS
    """Latency goals of the request; they override those of the service."""
    priority: int = 0
    """As in ``shoal.core.Request``."""
    cache_salt: str | None = None
    """As in ``shoal.core.Request``."""
    silent: bool = False
    """What it asks is about its prompts: the output, which is one token, is not shown and does not count."""
    field_names: FieldNames = field(default_factory=dict)
    """What the body calls fields that the engine's errors may name."""


@dataclass(slots=True)
class _ChoiceProgress:
    """How far one choice is."""

    output_tokens: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    queue_ns: int = 0
    finish: FinishReason | None = None


@dataclass(slots=True)
class Generation:
    """A generation request in the engine. Choice ``c`` of prompt ``p`` has the index ``p * n + c``."""

    request: GenerationRequest
    streams: Sequence[DeltaStream]
    """One stream for each prompt, with all of its choices."""
    metrics: ServerMetrics
    _choices: list[_ChoiceProgress] = field(init=False)
    _cached_tokens: dict[int, int] = field(init=False, default_factory=dict)
    """Prompt tokens found in the prefix cache, by the prompt's number."""

    _inter_token: Histogram = field(init=False)

    def __post_init__(self) -> None:
        """Create the progress of every choice."""
        self._inter_token = self.metrics.inter_token(self.request.service)
        self._choices = [_ChoiceProgress() for _ in range(len(self.streams) * self.request.sampling.n)]

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """(index, delta) of all choices in order of arrival; raises the error that ends the request early."""
        n = self.request.sampling.n
        if len(self.streams) == 1:
            async for delta in self.streams[0]:
                self._add(delta.choice, delta)
                yield delta.choice, self._shown(delta)
            return
        async with aclosing(_merge(self.streams)) as merged:
            async for prompt, delta in merged:
                index = prompt * n + delta.choice
                self._add(index, delta)
                yield index, self._shown(delta)

    def _shown(self, delta: Delta) -> Delta:
        if not self.request.silent:
            return delta
        finish = delta.finish and FinishReason.LENGTH
        return replace(delta, text="", tokens=(), logprobs=None, finish=finish, stop_reason=None)

    def _add(self, index: int, delta: Delta) -> None:
        choice = self._choices[index]
        if delta.tokens:
            now_ns = time.monotonic_ns()
            if choice.output_tokens:
                # Where a client reads slowly, several tokens come at once: their mean.
                self._inter_token.observe((now_ns - choice.last_token_ns) / len(delta.tokens) / 1e9)
            else:
                choice.first_token_ns, choice.queue_ns = now_ns, delta.queue_ns
            choice.last_token_ns = now_ns
            choice.output_tokens += len(delta.tokens)
        prompt, number = divmod(index, self.request.sampling.n)
        if number == 0:  # the others find the prompt that the first computed
            self._cached_tokens[prompt] = delta.cached_tokens
        if delta.finish is None:
            return
        if delta.finish is FinishReason.INVALID:
            raise InvalidRequest(delta.error or "")
        if delta.finish not in (FinishReason.STOP, FinishReason.LENGTH):
            raise GenerationFailed(f"the engine ended the request: {delta.error or delta.finish.value}")
        choice.finish = delta.finish
        record = self._record(index, choice)
        self.metrics.count_finished(delta.finish, record, self.request.slo, choice.queue_ns / 1e9)

    def _record(self, index: int, choice: _ChoiceProgress) -> RequestRecord:
        now_ns = time.monotonic_ns()
        return RequestRecord(
            request_id=f"{self.request.id}-{index}",
            service=self.request.service,
            arrival_ns=self.request.arrival_ns,
            first_token_ns=choice.first_token_ns or now_ns,
            finish_ns=now_ns,
            prompt_tokens=len(self.request.prompts[index // self.request.sampling.n]),
            output_tokens=choice.output_tokens,
        )

    def count_unfinished(self, reason: FinishReason) -> None:
        """Count the choices that have not finished."""
        for choice in self._choices:
            if choice.finish is None:
                self.metrics.count_unfinished(self.request.service, reason, self.request.slo)

    def count_refused(self, error: SLOExpired | ServiceUnavailable) -> None:
        """Count the choices that have not begun as refused, those that have not finished as failed."""
        service, slo = self.request.service, self.request.slo
        begun = sum(choice.output_tokens > 0 for choice in self._choices if choice.finish is None)
        waiting = sum(not choice.output_tokens for choice in self._choices if choice.finish is None)
        self.metrics.count_refused(service, error, waiting, slo)
        for _ in range(begun):
            self.metrics.count_unfinished(service, FinishReason.ERROR, slo)

    def first_times(self) -> tuple[float | None, float | None]:
        """Seconds from arrival to the admission and first token of the choice that had one first, if any."""
        begun = [choice for choice in self._choices if choice.output_tokens]
        if not begun:
            return None, None
        first = min(begun, key=lambda choice: choice.first_token_ns)
        return first.queue_ns / 1e9, (first.first_token_ns - self.request.arrival_ns) / 1e9

    @property
    def load_ns(self) -> int:
        """How long it waited until its service was loaded; 0: it was."""
        return max(stream.load_ns for stream in self.streams)

    def choice_usage(self, index: int) -> Usage:
        """Token counts of one choice so far, with its prompt."""
        prompt_number = index // self.request.sampling.n
        prompt_tokens = len(self.request.prompts[prompt_number])
        output_tokens = self._count(self._choices[index : index + 1])
        return _usage(prompt_tokens, output_tokens, self._cached_tokens.get(prompt_number, 0))

    def usage(self) -> Usage:
        """Token counts of all choices so far."""
        prompt_tokens = sum(map(len, self.request.prompts))
        return _usage(prompt_tokens, self._count(self._choices), sum(self._cached_tokens.values()))

    def _count(self, choices: Sequence[_ChoiceProgress]) -> int:
        """Output tokens of some choices that are shown."""
        return 0 if self.request.silent else sum(choice.output_tokens for choice in choices)


def _usage(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> Usage:
    return Usage(
        prompt_tokens, output_tokens, prompt_tokens + output_tokens, PromptTokensDetails(cached_tokens)
    )


@asynccontextmanager
async def submit_request(
    backend: Backend, request: GenerationRequest, metrics: ServerMetrics
) -> AsyncIterator[Generation]:
    """Submit ``request``; on exit, its unfinished choices are cancelled in the engine.

    Raises what ``Backend.submit`` raises; prompts that were already submitted are cancelled then.
    """
    async with AsyncExitStack() as stack:
        streams: list[DeltaStream] = []
        for prompt in request.prompts:
            try:
                with errors_named(request.field_names):
                    stream = await backend.submit(
                        request.service,
                        prompt,
                        request.sampling,
                        request.slo,
                        request.arrival_ns,
                        request.priority,
                        request.cache_salt,
                        request.id,
                    )
            except (QueueFull, EngineDied) as error:
                choices = len(request.prompts) * request.sampling.n
                metrics.count_refused(request.service, error, choices, request.slo)
                raise
            streams.append(stream)
            stack.push_async_callback(stream.aclose)
        generation = Generation(request, streams, metrics)
        try:
            yield generation
        except (SLOExpired, ServiceUnavailable) as error:
            generation.count_refused(error)
            raise
        except InvalidRequest:
            generation.count_unfinished(FinishReason.INVALID)
            raise
        except Exception:
            generation.count_unfinished(FinishReason.ERROR)
            raise
        except BaseException:
            generation.count_unfinished(FinishReason.CANCELLED)
            raise


async def _merge(streams: Sequence[DeltaStream]) -> AsyncGenerator[tuple[int, Delta], None]:
    """(stream's number, delta) in order of arrival; the first error ends all streams."""
    # Unread deltas wait in their streams, which join them; so this queue holds only one.
    queue: asyncio.Queue[tuple[int, Delta | BaseException | None]] = asyncio.Queue(1)

    async def pump(number: int, stream: DeltaStream) -> None:
        try:
            async for delta in stream:
                await queue.put((number, delta))
        except Exception as error:
            await queue.put((number, error))
        else:
            await queue.put((number, None))

    pumps = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        unfinished = len(pumps)
        while unfinished:
            number, item = await queue.get()
            if item is None:
                unfinished -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield number, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
