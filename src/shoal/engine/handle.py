"""The asynchronous client of an engine process."""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from shoal.core import (
    SLO,
    EngineDied,
    FinishReason,
    GoalsOutOfReach,
    Grammar,
    InvalidRequest,
    QueueFull,
    Request,
    SamplingParams,
    TokenEvent,
)
from shoal.core.service import NO_GOALS
from shoal.engine import wire
from shoal.engine.choices import expand_choices, resume_choices
from shoal.engine.detokenize import Decoder
from shoal.engine.info import EngineInfo
from shoal.engine.launch import EngineProcess
from shoal.engine.lifeline import Failed, failure_to_error
from shoal.engine.options import EngineOptions
from shoal.engine.reader import ChoiceReader, Delta
from shoal.engine.stats import EngineStats
from shoal.engine.stream import Stream
from shoal.engine.validation import check_priority, check_request, check_resumed
from shoal.engine.vitals import Vitals

BUILDER = "shoal.engine.build:build_engine"

Answer = TypeVar("Answer", wire.Stats, wire.Prepared)

_log = logging.getLogger(__name__)
# How many first tokens are remembered, to estimate how fast the queue moves.
_RATE_WINDOW = 64
_LONGEST_RETRY_S = 60.0
_STATS_INTERVAL_S = 1.0


class _Call:
    """One call: its stream and its unfinished choices."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        """Where its deltas go."""
        self.unfinished: dict[str, ChoiceReader] = {}
        """Readers of the choices that have not ended, by request id."""


class EngineHandle:
    """Submits requests to an engine process and streams its output back.

    Text is made here: detokenising, stop strings and times as a client sees them. If the process
    ends, every unfinished stream raises EngineDied.
    """

    def __init__(
        self,
        process: EngineProcess,
        info: EngineInfo,
        decoders: Mapping[str, Decoder],
        max_queue: int,
        vitals: Vitals,
    ) -> None:
        self.info = info
        """Limits of the engine's services."""
        self.vitals = vitals
        """The engine's heartbeats and latest stats."""
        self._process = process
        self._decoders = decoders
        self._max_queue = max_queue
        self._ids = itertools.count(1)
        self._calls: dict[str, _Call] = {}  # by request id: one entry for each unfinished choice
        self._answers: dict[int, asyncio.Future[Any]] = {}  # by the key of the question
        self._waiting = 0  # choices that have no token yet
        self._first_tokens_ns: deque[int] = deque(maxlen=_RATE_WINDOW)
        self._closed_reason: str | None = None  # why no new requests are accepted
        self._closed = False
        self._emptied = asyncio.Event()
        self._receiver = asyncio.create_task(self._receive(), name="engine-receiver")
        self._watcher = asyncio.create_task(self._watch(), name="engine-watcher")

    @classmethod
    async def start(
        cls,
        options: EngineOptions,
        folders: Mapping[str, Path],
        tokenizers: Mapping[str, Decoder],
        progress: Callable[[str], None] | None = None,
        builder: str = BUILDER,
        vitals: Vitals | None = None,
    ) -> Self:
        """Start an engine process and wait until its models are loaded.

        folders, tokenizers: by service name. builder: "module:function" that builds the engine in its
        process. vitals: says how long the engine may be silent.

        Raises ConfigError, ModelUnavailable or ModelUnsupported as loading does, EngineDied if the
        process ends.
        """
        vitals = vitals or Vitals()
        process = await EngineProcess.start(options, folders, builder, vitals.heartbeat)
        try:
            info = await process.wait_ready(progress)
        except BaseException:
            await process.kill()
            raise
        handle = cls(process, info, tokenizers, options.max_queue, vitals)
        try:
            await handle.stats()
        except BaseException:
            await handle.close()
            raise
        return handle

    @property
    def alive(self) -> bool:
        """Whether the engine accepts requests."""
        return self._closed_reason is None

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    @property
    def unfinished(self) -> int:
        """Choices that have not ended."""
        return len(self._calls)

    @property
    def waiting(self) -> int:
        """Choices that wait for their first token."""
        return self._waiting

    async def wait_died(self) -> str:
        """Wait until the engine ends without being told to, and return why."""
        await asyncio.shield(self._receiver)
        return self._closed_reason or ""

    async def submit(
        self,
        service: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        slo: SLO = NO_GOALS,
        arrival_ns: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Stream:
        """Send a call to the engine and return its stream.

        slo: goals, which replace the service's. arrival_ns: when the call came, on the monotonic clock, which
        all processes of a machine share; None: now. priority, cache_salt: as in ``Request``.

        Raises InvalidRequest, QueueFull or EngineDied before anything is sent.
        """
        check_request(self.info, service, prompt, sampling, slo)
        check_priority(self.info, priority)
        if sampling.grammar is not None:
            await self.prepare(service, sampling.grammar)
        if self._closed_reason is not None:
            raise EngineDied(self._closed_reason)
        if self._waiting > 0 and self._waiting + sampling.n > self._max_queue:
            raise QueueFull(
                f"{self._waiting} requests wait already and at most {self._max_queue} may "
                f"(max_queue); {sampling.n} more do not fit now",
                self._retry_after_s(self._waiting + sampling.n - self._max_queue),
            )
        call_id = f"call-{next(self._ids)}"
        arrival_ns = time.monotonic_ns() if arrival_ns is None else arrival_ns
        requests = expand_choices(
            call_id,
            service,
            list(prompt),
            sampling,
            arrival_ns,
            slo,
            priority=priority,
            cache_salt=cache_salt,
        )
        return self._open(dict(enumerate(requests)), sampling)

    async def resume(self, requests: Mapping[int, Request], sampling: SamplingParams) -> Stream:
        """Go on with the unfinished choices of a call, from the output that each has, in a stream of its own.

        requests: by number of the choice; they get new ids. sampling: of the call, with its stop strings.
        They were accepted before, so ``max_queue`` does not count for them.

        Raises InvalidRequest or EngineDied before anything is sent.
        """
        for request in requests.values():
            check_resumed(self.info, request)
        if sampling.grammar is not None:
            await self.prepare(next(iter(requests.values())).service, sampling.grammar)
        if self._closed_reason is not None:
            raise EngineDied(self._closed_reason)
        renamed = resume_choices(f"call-{next(self._ids)}", requests, time.monotonic_ns())
        return self._open(renamed, sampling)

    async def prepare(self, service: str, grammar: Grammar) -> None:
        """Make a grammar ready in the engine; ``submit`` does so, too.

        Raises InvalidRequest about ``grammar`` if it cannot be used, QueueFull or EngineDied.
        """
        answer = await self._ask(lambda key: wire.Prepare(key, service, grammar), wire.Prepared)
        if answer.error is not None:
            if answer.retry_after_s is not None:
                raise QueueFull(answer.error, answer.retry_after_s)
            raise InvalidRequest(answer.error, param="grammar")

    async def generate(
        self, service: str, prompt: Sequence[int], sampling: SamplingParams, slo: SLO = NO_GOALS
    ) -> AsyncIterator[Delta]:
        """The deltas of a call; raises the errors of ``submit`` when the first delta is asked for."""
        async with await self.submit(service, prompt, sampling, slo) as stream:
            async for delta in stream:
                yield delta

    async def stats(self) -> EngineStats:
        """The engine's stats after its present step; raises EngineDied if it has ended."""
        return (await self._ask(wire.AskStats, wire.Stats)).stats

    async def _ask(self, question: Callable[[int], wire.ToEngine], kind: type[Answer]) -> Answer:
        """Send the question made of a key, and return the answer with that key."""
        if self._receiver.done():
            raise EngineDied(self._closed_reason or "the engine has ended")
        key = next(self._ids)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[key] = future
        self._process.send(question(key))
        try:
            return await future
        finally:
            self._answers.pop(key, None)

    async def close(self, drain_s: float = 0) -> None:
        """Reject new requests, let unfinished streams go on for ``drain_s`` seconds, and end the process.

        Streams unfinished by then raise EngineDied. Closing twice does nothing.
        """
        if self._closed:
            return
        self._closed = True
        if self._closed_reason is None:
            self._closed_reason = "the engine is shutting down and takes no new requests"
        if self._calls and drain_s > 0 and not self._receiver.done():
            self._emptied.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), drain_s)
        self._fail_all(EngineDied("the engine was shut down before the request finished"))
        for task in (self._watcher, self._receiver):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self._process.stop()

    def _open(self, requests: Mapping[int, Request], sampling: SamplingParams) -> Stream:
        """The stream of requests by number of the choice, which are sent."""
        first = next(iter(requests.values()))
        stream = Stream(first.id.rpartition("-")[0], len(first.prompt), lambda: self._cancel(call))
        call = _Call(stream)
        now_ns = time.monotonic_ns()
        for choice, request in requests.items():
            eos_token_ids = self.info.services[first.service].eos_token_ids
            reader = ChoiceReader(request, choice, sampling, self._decoders[first.service], eos_token_ids)
            if (delta := reader.read_past(now_ns)) is not None:
                stream.push(delta)
                continue
            call.unfinished[request.id] = reader
            self._calls[request.id] = call
            self._waiting += not reader.started
        if call.unfinished:
            unfinished = [request for request in requests.values() if request.id in call.unfinished]
            self._process.send(wire.Submit.from_requests(unfinished))
        else:
            stream.end()
        return stream

    async def _watch(self) -> None:
        """Keep ``vitals`` up to date, so that its readers need not wait for the engine."""
        with suppress(EngineDied):
            while True:
                await asyncio.sleep(_STATS_INTERVAL_S)
                await self.stats()

    async def _receive(self) -> None:
        reason = "the engine process ended"
        try:
            while (message := await self._process.receive()) is not None:
                if isinstance(message, Failed):
                    reason = str(failure_to_error(message, "running"))
                else:
                    self._handle_message(cast(wire.FromEngine, message))
            reason = f"{reason} ({self._process.describe_end()}, process {self.pid})"
        except Exception as error:
            _log.exception("the engine's messages can no longer be read")
            reason = f"the engine's messages can no longer be read: {error}"
        _log.error("%s; requests under way end with an error, and new ones are refused", reason)
        self._closed_reason = reason
        self._fail_all(EngineDied(reason))

    def _handle_message(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Stepped():
                now_ns = time.monotonic_ns()
                for event in message.events:
                    self._handle_event(event, now_ns)
            case wire.Refused():
                call = self._calls.get(message.request_id)
                if call is not None:
                    self._cancel(call)
                    call.stream.end(InvalidRequest(message.message, message.param, message.code))
            case wire.Stats():
                self.vitals.update(message.stats)
                self._answer(message)
            case wire.Prepared():
                self._answer(message)

    def _answer(self, message: wire.Stats | wire.Prepared) -> None:
        future = self._answers.get(message.key)
        if future is not None and not future.done():
            future.set_result(message)

    def _handle_event(self, event: TokenEvent, now_ns: int) -> None:
        call = self._calls.get(event.request_id)
        if call is None:
            # It was cancelled here in the meantime.
            return
        if event.finish is FinishReason.REFUSED:
            self._refuse(call, event)
            return
        reader = call.unfinished[event.request_id]
        was_waiting = not reader.started
        delta = reader.read(event, now_ns)
        if was_waiting and reader.started:
            self._waiting -= 1
            self._first_tokens_ns.append(now_ns)
        call.stream.push(delta)
        if delta.finish is None:
            return
        self._remove(call, reader)
        if event.finish is None:
            self._process.send(wire.Cancel([event.request_id], complete=True))
        if not call.unfinished:
            call.stream.end()

    def _refuse(self, call: _Call, event: TokenEvent) -> None:
        """The engine refuses a call of which nobody has got anything yet: all of its choices end."""
        retry_after_s = self._retry_after_s(self._waiting)
        self._cancel(call)
        call.stream.end(GoalsOutOfReach(event.error or "", retry_after_s))

    def _cancel(self, call: _Call) -> None:
        """Cancel the unfinished choices of a call; its stream gets nothing more."""
        ids = list(call.unfinished)
        for reader in list(call.unfinished.values()):
            self._remove(call, reader)
        if ids:
            self._process.send(wire.Cancel(ids))

    def _remove(self, call: _Call, reader: ChoiceReader) -> None:
        """Forget a choice that has ended."""
        del call.unfinished[reader.request_id]
        del self._calls[reader.request_id]
        if not reader.started:
            self._waiting -= 1
        if not self._calls:
            self._emptied.set()

    def _fail_all(self, error: EngineDied) -> None:
        for call in list(self._calls.values()):
            for reader in list(call.unfinished.values()):
                self._remove(call, reader)
            call.stream.end(error)
        for future in self._answers.values():
            if not future.done():
                future.set_exception(error)

    def _retry_after_s(self, excess: int) -> float:
        """Seconds until ``excess`` requests will have left the queue, at its recent rate."""
        times = self._first_tokens_ns
        if len(times) < 2:
            return 1.0
        rate = len(times) / max(1e-3, (time.monotonic_ns() - times[0]) / 1e9)
        return min(_LONGEST_RETRY_S, max(1.0, excess / rate))
