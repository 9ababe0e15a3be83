"""One HTTP request in the engine: its prompts' streams as one, its token counts and its times."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field

from shoal.core import SLO, EngineDied, FinishReason, QueueFull, RequestRecord, SamplingParams
from shoal.core.service import NO_GOALS
from shoal.engine.reader import Delta
from shoal.serve.backend import Backend, DeltaStream
from shoal.serve.errors import GenerationFailed
from shoal.serve.metrics import ServerMetrics
from shoal.serve.responses import PromptTokensDetails, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What is asked of the engine: choices of every prompt.

    arrival_ns: when the head of the HTTP request had been read, on the monotonic clock. slo: goals that go
    before the service's.
    """

    id: str
    service: str
    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    arrival_ns: int
    slo: SLO = NO_GOALS


@dataclass(slots=True)
class _Choice:
    """Progress of one output."""

    output_tokens: int = 0
    first_token_ns: int = 0
    finish: FinishReason | None = None


@dataclass(slots=True)
class Generation:
    """A call under way; choice ``c`` of prompt ``p`` has the index ``p * n + c``."""

    call: Call
    streams: Sequence[DeltaStream]
    metrics: ServerMetrics
    _choices: list[_Choice] = field(init=False)
    _cached: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Expect every choice."""
        self._choices = [_Choice() for _ in range(len(self.streams) * self.call.sampling.n)]

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """(index, delta) of all choices as they come; raises what ends the call early."""
        n = self.call.sampling.n
        if len(self.streams) == 1:
            async for delta in self.streams[0]:
                self._count(delta.choice, delta)
                yield delta.choice, delta
            return
        async with aclosing(_merge(self.streams)) as merged:
            async for prompt, delta in merged:
                index = prompt * n + delta.choice
                self._count(index, delta)
                yield index, delta

    def _count(self, index: int, delta: Delta) -> None:
        choice = self._choices[index]
        if delta.tokens and not choice.output_tokens:
            choice.first_token_ns = time.monotonic_ns()
        choice.output_tokens += len(delta.tokens)
        prompt = index // self.call.sampling.n
        self._cached[prompt] = max(self._cached.get(prompt, 0), delta.cached_tokens)
        if delta.finish is None:
            return
        if delta.finish not in (FinishReason.STOP, FinishReason.LENGTH):
            raise GenerationFailed(f"the engine ended the request: {delta.error or delta.finish.value}")
        choice.finish = delta.finish
        self.metrics.answered(delta.finish, self._record(index, choice), self.call.slo)

    def _record(self, index: int, choice: _Choice) -> RequestRecord:
        now_ns = time.monotonic_ns()
        return RequestRecord(
            request_id=f"{self.call.id}-{index}",
            service=self.call.service,
            arrival_ns=self.call.arrival_ns,
            first_token_ns=choice.first_token_ns or now_ns,
            finish_ns=now_ns,
            prompt_tokens=len(self.call.prompts[index // self.call.sampling.n]),
            output_tokens=choice.output_tokens,
        )

    def count_unfinished(self, reason: FinishReason) -> None:
        """Count the choices that did not come to their end."""
        for choice in self._choices:
            if choice.finish is None:
                self.metrics.ended(self.call.service, reason, self.call.slo)

    def choice_usage(self, index: int) -> Usage:
        """Tokens of one choice so far, with those of its prompt."""
        number = index // self.call.sampling.n
        prompt, output = len(self.call.prompts[number]), self._choices[index].output_tokens
        return Usage(prompt, output, prompt + output, PromptTokensDetails(self._cached.get(number, 0)))

    def usage(self) -> Usage:
        """Tokens so far."""
        prompt = sum(map(len, self.call.prompts))
        output = sum(choice.output_tokens for choice in self._choices)
        return Usage(prompt, output, prompt + output, PromptTokensDetails(sum(self._cached.values())))


@asynccontextmanager
async def generating(backend: Backend, call: Call, metrics: ServerMetrics) -> AsyncIterator[Generation]:
    """Submit ``call``; on leaving, whatever of it is unfinished is cancelled in the engine.

    Raises what ``Backend.submit`` raises; then nothing of the call stays behind.
    """
    async with AsyncExitStack() as stack:
        streams: list[DeltaStream] = []
        for prompt in call.prompts:
            try:
                stream = await backend.submit(call.service, prompt, call.sampling, call.slo, call.arrival_ns)
            except (QueueFull, EngineDied) as error:
                metrics.refused(call.service, error, len(call.prompts) * call.sampling.n)
                raise
            streams.append(stream)
            stack.push_async_callback(stream.aclose)
        generation = Generation(call, streams, metrics)
        try:
            yield generation
        except Exception:
            generation.count_unfinished(FinishReason.ERROR)
            raise
        except BaseException:
            generation.count_unfinished(FinishReason.CANCELLED)
            raise


async def _merge(streams: Sequence[DeltaStream]) -> AsyncGenerator[tuple[int, Delta], None]:
    """(stream's number, delta) in the order in which they come; the first error ends all."""
    # Streams join what waits in them; nothing should wait here.
    arrived: asyncio.Queue[tuple[int, Delta | BaseException | None]] = asyncio.Queue(1)

    async def pump(number: int, stream: DeltaStream) -> None:
        try:
            async for delta in stream:
                await arrived.put((number, delta))
        except Exception as error:
            await arrived.put((number, error))
        else:
            await arrived.put((number, None))

    pumps = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        unfinished = len(pumps)
        while unfinished:
            number, item = await arrived.get()
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
