"""A running generation request: submission, merged streams of its prompts, token counts and latencies."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field

from msgspec.structs import replace
from prometheus_client import Histogram

from shoal.core import (
    SLO,
    Client,
    EngineDied,
    FinishReason,
    InvalidRequest,
    QueueFull,
    RequestRecord,
    SamplingParams,
    ServiceUnavailable,
    SLOExpired,
    TokenDeadlines,
)
from shoal.core.service import NO_GOALS
from shoal.frontend.reader import Delta
from shoal.frontend.stream import Stream
from shoal.frontend.timeline import Timeline
from shoal.serve.backend import Backend
from shoal.serve.errors import GenerationFailed
from shoal.serve.metrics.server_metrics import ServerMetrics
from shoal.serve.openai.error_field_names import FieldNames, client_field_names
from shoal.serve.openai.response_bodies import PromptTokensDetails, Usage
from shoal.serve.pacing import Indexed, pace


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """The work of one HTTP request: ``sampling.n`` choices of every prompt."""

    id: str
    service: str
    prompts: Sequence[Sequence[int]]
    """Token ids of each prompt."""
    sampling: SamplingParams
    arrival_ns: int
    """When the headers of the HTTP request were complete, on the monotonic clock."""
    slo: SLO = NO_GOALS
    """Latency goals that override those of the service."""
    priority: int = 0
    """As in ``shoal.core.Request``."""
    cache_salt: str | None = None
    """As in ``shoal.core.Request``."""
    client: Client | None = None
    """As in ``shoal.core.Request``."""
    pace_s: float | None = None
    """Time between two tokens to which its stream is smoothed; None: tokens are sent as they come."""
    hide_output: bool = False
    """Whether only the prompts matter: the output, one token, is neither returned nor counted."""
    field_names: FieldNames = field(default_factory=dict)
    """The client's names of fields, by the names in the engine's errors."""


@dataclass(slots=True)
class _ChoiceProgress:
    """Progress of one choice; times on the monotonic clock."""

    output_tokens: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    largest_gap_ns: int = 0
    queue_ns: int = 0
    finish: FinishReason | None = None


@dataclass(slots=True)
class Generation:
    """A submitted generation request. Choice ``c`` of prompt ``p`` has the index ``p * n + c``."""

    request: GenerationRequest
    streams: Sequence[Stream]
    """One stream for each prompt, with all of its choices."""
    metrics: ServerMetrics
    _choices: list[_ChoiceProgress] = field(init=False)
    _cached_tokens: dict[int, int] = field(init=False, default_factory=dict)
    """Tokens of prefix cache hits, by the prompt's number."""
    _inter_token: Histogram = field(init=False)
    _deadlines: TokenDeadlines | None = field(init=False)

    def __post_init__(self) -> None:
        service, slo = self.request.service, self.request.slo
        self._inter_token = self.metrics.inter_token(service)
        self._deadlines = self.metrics.token_deadlines(service, slo, self.request.arrival_ns)
        self._choices = [_ChoiceProgress() for _ in range(len(self.streams) * self.request.sampling.n)]

    async def deltas(self, pace_s: float | None = None) -> AsyncGenerator[Indexed]:
        """(index, delta) of all choices in order of arrival; raises the error that ends the request.

        pace_s: time between two tokens to which bursts are smoothed; None: they are passed on as they come.
        """
        arriving = self._arriving()
        sent = arriving if pace_s is None else pace(arriving, pace_s)
        async with aclosing(arriving), aclosing(sent):
            async for index, delta in sent:
                self._record_delta(index, delta)
                yield index, self._visible(delta)

    async def _arriving(self) -> AsyncGenerator[Indexed]:
        if len(self.streams) == 1:
            async for delta in self.streams[0]:
                yield delta.choice, delta
            return
        async with aclosing(_merge(self.streams)) as merged:
            async for prompt, delta in merged:
                yield prompt * self.request.sampling.n + delta.choice, delta

    def _visible(self, delta: Delta) -> Delta:
        if not self.request.hide_output:
            return delta
        finish = delta.finish and FinishReason.LENGTH
        return replace(delta, text="", tokens=(), logprobs=None, finish=finish, stop_reason=None)

    def _record_delta(self, index: int, delta: Delta) -> None:
        choice = self._choices[index]
        if delta.tokens:
            now_ns = time.monotonic_ns()
            if choice.output_tokens:
                gap_ns = now_ns - choice.last_token_ns
                choice.largest_gap_ns = max(choice.largest_gap_ns, gap_ns)
                # With a slow reader, a delta has several tokens: record their mean.
                self._inter_token.observe(gap_ns / len(delta.tokens) / 1e9)
            else:
                choice.first_token_ns, choice.queue_ns = now_ns, delta.queue_ns
            if self._deadlines is not None:
                count = len(delta.tokens)
                on_time = self._deadlines.num_on_time(choice.output_tokens, count, now_ns)
                self.metrics.count_deadlines(self.request.service, on_time, count - on_time)
            choice.last_token_ns = now_ns
            choice.output_tokens += len(delta.tokens)
        prompt, number = divmod(index, self.request.sampling.n)
        if number == 0:  # later choices of the prompt hit the KV of the first
            self._cached_tokens[prompt] = delta.cached_tokens
        if delta.finish is None:
            return
        if delta.finish is FinishReason.INVALID:
            raise InvalidRequest(delta.error or "")
        if delta.finish not in (FinishReason.STOP, FinishReason.LENGTH):
            raise GenerationFailed(f"the engine ended the request: {delta.error or delta.finish.value}")
        choice.finish = delta.finish
        record = self._finished_record(index, choice)
        self.metrics.count_finished(delta.finish, record, self.request.slo, choice.queue_ns / 1e9)

    def _finished_record(self, index: int, choice: _ChoiceProgress) -> RequestRecord:
        now_ns = time.monotonic_ns()
        return RequestRecord(
            request_id=f"{self.request.id}-{index}",
            service=self.request.service,
            arrival_ns=self.request.arrival_ns,
            first_token_ns=choice.first_token_ns or now_ns,
            finish_ns=now_ns,
            prompt_tokens=len(self.request.prompts[index // self.request.sampling.n]),
            output_tokens=choice.output_tokens,
            largest_gap_ns=choice.largest_gap_ns,
        )

    def count_unfinished(self, reason: FinishReason) -> None:
        """Count the unfinished choices."""
        for choice in self._choices:
            if choice.finish is None:
                self.metrics.count_unfinished(self.request.service, reason, self.request.slo)

    def count_refused(self, error: SLOExpired | ServiceUnavailable) -> None:
        """Count unfinished choices: as refused those without a token, as failed the others."""
        service, slo = self.request.service, self.request.slo
        started = sum(choice.output_tokens > 0 for choice in self._choices if choice.finish is None)
        waiting = sum(not choice.output_tokens for choice in self._choices if choice.finish is None)
        self.metrics.count_refused(service, error, waiting, slo)
        for _ in range(started):
            self.metrics.count_unfinished(service, FinishReason.ERROR, slo)

    def first_choice_times(self) -> tuple[float | None, float | None]:
        """Queue time and TTFT in seconds, of the choice whose first token came first; None: no token came."""
        started = [choice for choice in self._choices if choice.output_tokens]
        if not started:
            return None, None
        first = min(started, key=lambda choice: choice.first_token_ns)
        return first.queue_ns / 1e9, (first.first_token_ns - self.request.arrival_ns) / 1e9

    @property
    def timelines(self) -> list[Timeline]:
        """Of all choices, by index, where the backend keeps them."""
        return [timeline for stream in self.streams for timeline in stream.timelines]

    @property
    def load_ns(self) -> int:
        """How long the request waited for its service to load; 0: the service was loaded."""
        return max(stream.load_ns for stream in self.streams)

    def choice_usage(self, index: int) -> Usage:
        """Token counts of one choice and its prompt so far."""
        prompt_number = index // self.request.sampling.n
        prompt_tokens = len(self.request.prompts[prompt_number])
        output_tokens = self._output_tokens(self._choices[index : index + 1])
        return _usage(prompt_tokens, output_tokens, self._cached_tokens.get(prompt_number, 0))

    def usage(self) -> Usage:
        """Token counts of all choices so far."""
        prompt_tokens = sum(map(len, self.request.prompts))
        return _usage(prompt_tokens, self._output_tokens(self._choices), sum(self._cached_tokens.values()))

    def _output_tokens(self, choices: Sequence[_ChoiceProgress]) -> int:
        return 0 if self.request.hide_output else sum(choice.output_tokens for choice in choices)


def _usage(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> Usage:
    return Usage(
        prompt_tokens, output_tokens, prompt_tokens + output_tokens, PromptTokensDetails(cached_tokens)
    )


@asynccontextmanager
async def submit_request(
    backend: Backend, request: GenerationRequest, metrics: ServerMetrics
) -> AsyncIterator[Generation]:
    """Submit ``request``; on exit, its unfinished choices are cancelled in the engine.

    Raises the errors of ``Backend.submit``, after cancelling the prompts already submitted.
    """
    async with AsyncExitStack() as stack:
        streams: list[Stream] = []
        for prompt in request.prompts:
            try:
                with client_field_names(request.field_names):
                    stream = await backend.submit(
                        request.service,
                        prompt,
                        request.sampling,
                        request.slo,
                        request.arrival_ns,
                        request.priority,
                        request.cache_salt,
                        request.id,
                        request.client,
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


async def _merge(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Delta], None]:
    """(stream's number, delta) in order of arrival; the first error ends all streams."""
    # A queue of one: unread deltas stay in their streams, which join them.
    queue: asyncio.Queue[tuple[int, Delta | BaseException | None]] = asyncio.Queue(1)

    async def pump(number: int, stream: Stream) -> None:
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
