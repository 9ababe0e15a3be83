"""The router: takes requests for many engines, owns their streams and all of their tokens.

What goes where is decided by the pure ``Manager``. The router tells it what happens and carries out what it
decides. It holds the prompt and the output of every unfinished request, so that any engine can go on with it.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from shoal.cluster.actions import (
    ClusterAction,
    Dispatch,
    KillEngine,
    RefusalKind,
    Refuse,
    StartEngine,
    Withdraw,
)
from shoal.cluster.backend import EngineBackend
from shoal.cluster.call import Call
from shoal.cluster.dispatch import dispatch_named
from shoal.cluster.events import ClusterEvent, Ended, Progressed, Submitted, Ticked
from shoal.cluster.fleet import Fleet
from shoal.cluster.manager import TICKS_PER_HEARTBEAT, Manager
from shoal.cluster.options import ClusterOptions, EnginePlan
from shoal.cluster.recoveries import Recoveries
from shoal.cluster.remote_engine import OpenChannel, RemoteEngine
from shoal.cluster.status import ClusterInfo, EngineStatus, ServiceStatus
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
    ServiceUnavailable,
    TokenEvent,
)
from shoal.core.service import NO_GOALS
from shoal.engine import wire
from shoal.engine.channel import EngineChannel
from shoal.engine.choices import expand_choices
from shoal.engine.detokenize import Decoder
from shoal.engine.reader import ChoiceReader
from shoal.engine.stream import Stream
from shoal.engine.validation import check_priority, check_request
from shoal.schedule.request_state import hash_prompt

BUILDER = "shoal.engine.build:build_engine"
OnDecision = Callable[[int, ClusterEvent, Sequence[ClusterAction]], None]
"""Told of every event, its time, and what was decided."""

_log = logging.getLogger(__name__)
# How many first tokens are remembered, to estimate how fast the queue moves.
_RATE_WINDOW = 64
_LONGEST_RETRY_S = 60.0
_STATS_INTERVAL_S = 1.0
# When to ask again for a service that no engine runs: loading takes longer.
_NO_ENGINE_RETRY_S = 5.0


class Router:
    """Submits calls to engines and streams their output back; needs a running event loop.

    Text is made here: detokenising, stop strings and times as a client sees them. A call whose engine ends goes
    on with another one, or with the next start of the same, from the tokens that were delivered.
    """

    def __init__(
        self,
        plans: Sequence[EnginePlan],
        folders: Mapping[str, Path],
        tokenizers: Mapping[str, Decoder],
        engine_backend: EngineBackend,
        options: ClusterOptions,
        *,
        max_queue: int,
        builder: str = BUILDER,
        open_channel: OpenChannel = EngineChannel,
        clock: Callable[[], int] = time.monotonic_ns,
        on_decision: OnDecision | None = None,
    ) -> None:
        self._options = options
        self._decoders = tokenizers
        self._max_queue = max_queue
        self._clock = clock
        self._on_decision = on_decision
        self._dispatch = dispatch_named(options.dispatch)
        self._manager = Manager(options, self._dispatch)
        self._session = secrets.token_hex(4)
        self._fleet = Fleet(
            plans,
            folders,
            builder,
            options,
            engine_backend,
            session=self._session,
            open_channel=open_channel,
            clock=clock,
            tell=self._tell,
            on_message=self._handle_message,
            on_end=self._engine_ended,
        )
        self._numbers = itertools.count(1)
        self._calls: dict[str, Call] = {}
        self._readers: dict[str, tuple[Call, ChoiceReader]] = {}  # by wire id, of choices that an engine has
        self._waiting = 0  # choices that have no token yet
        self._first_tokens_ns: deque[int] = deque(maxlen=_RATE_WINDOW)
        self._recoveries = Recoveries()
        self._untold: deque[ClusterEvent] = deque()
        self._telling = False
        self._closed_reason: str | None = None  # why no new calls are accepted
        self._closed = False
        self._emptied = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(
        cls,
        plans: Sequence[EnginePlan],
        folders: Mapping[str, Path],
        tokenizers: Mapping[str, Decoder],
        engine_backend: EngineBackend,
        options: ClusterOptions | None = None,
        *,
        progress: Callable[[str], None] | None = None,
        builder: str = BUILDER,
        on_decision: OnDecision | None = None,
    ) -> Self:
        """Start all engines and wait until their models are loaded, or find those that run already.

        folders, tokenizers: by service name. builder: "module:function" that builds the engine in its process.

        Raises ConfigError, ModelUnavailable or ModelUnsupported as loading does, EngineDied if a process ends.
        """
        router = cls(
            plans,
            folders,
            tokenizers,
            engine_backend,
            options or ClusterOptions(),
            max_queue=plans[0].options.max_queue,
            builder=builder,
            on_decision=on_decision,
        )
        await router.run(progress)
        return router

    async def run(self, progress: Callable[[str], None] | None = None) -> None:
        """The rest of ``start``."""
        self._spawn(self._tick())
        self._spawn(self._watch())
        try:
            await self._fleet.start(progress)
            for engine in self._fleet.engines.values():
                await engine.ask(wire.AskStats, wire.Stats)
        except BaseException:
            await self.close()
            raise

    @property
    def info(self) -> ClusterInfo:
        """Limits of the services."""
        return self._fleet.info

    @property
    def engines(self) -> Sequence[EngineStatus]:
        """The engines, as they are now."""
        return [self._status(name, engine) for name, engine in self._fleet.engines.items()]

    @property
    def services(self) -> Mapping[str, ServiceStatus]:
        """The services, as they are now."""
        return {
            name: ServiceStatus(
                ready=view.ready,
                wanted=view.wanted,
                waiting=view.waiting,
                resumed=self._recoveries.resumed.get(name, 0),
            )
            for name, view in self._manager.services.items()
        }

    def _status(self, name: str, engine: RemoteEngine) -> EngineStatus:
        view = self._manager.engines[name]
        return EngineStatus(
            name=name,
            state=view.state,
            services=tuple(service.name for service in engine.plan.options.services),
            device=engine.plan.options.device,
            pid=engine.pid,
            restarts=view.restarts,
            requests=view.requests,
            heartbeat_age_s=engine.heartbeat_age_s,
            last_error=view.last_error,
            info=engine.info,
            stats=engine.stats,
            stats_age_s=engine.stats_age_s,
        )

    @property
    def unfinished(self) -> int:
        """Choices that have not ended."""
        return sum(len(call.unfinished) for call in self._calls.values())

    @property
    def waiting(self) -> int:
        """Choices that wait for their first token."""
        return self._waiting

    async def submit(
        self,
        service: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        slo: SLO = NO_GOALS,
        arrival_ns: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        log_name: str | None = None,
    ) -> Stream:
        """Accept a call and return its stream.

        slo: goals, which replace the service's. arrival_ns: when the call came, on the monotonic clock; None:
        now. priority, cache_salt: as in ``Request``. log_name: what log lines call it beside its own id.

        Raises InvalidRequest, QueueFull or EngineDied before anything is sent.
        """
        info = self.info
        check_request(info, service, prompt, sampling, slo)
        check_priority(info, priority)
        if self._closed_reason is not None:
            raise EngineDied(self._closed_reason)
        if self._waiting > 0 and self._waiting + sampling.n > self._max_queue:
            raise QueueFull(
                f"{self._waiting} requests wait already and at most {self._max_queue} may "
                f"(max_queue); {sampling.n} more do not fit now",
                self._retry_after_s(self._waiting + sampling.n - self._max_queue),
            )
        if sampling.max_tokens is None:
            # Decided once, so that it is the same on every engine.
            limits = info.services[service]
            sampling = replace(sampling, max_tokens=limits.max_total_tokens - len(prompt))
        call_id = f"{self._session}-{next(self._numbers)}"
        requests = expand_choices(
            call_id,
            service,
            list(prompt),
            sampling,
            self._clock() if arrival_ns is None else arrival_ns,
            slo,
            priority=priority,
            cache_salt=cache_salt,
        )
        call = self._open(call_id, requests, sampling, log_name)
        if sampling.grammar is not None:
            try:
                await call.accepted
            except BaseException:
                self._cancel(call)
                raise
        return call.stream

    def _open(
        self, call_id: str, requests: Sequence[Request], sampling: SamplingParams, log_name: str | None
    ) -> Call:
        """The call of new requests, which is dispatched."""
        first = requests[0]
        stream = Stream(call_id, len(first.prompt), lambda: self._cancel(call))
        eos = self.info.services[first.service].eos_token_ids
        decoder = self._decoders[first.service]
        named = call_id if log_name is None else f"{log_name} ({call_id})"
        call = Call(call_id, dict(enumerate(requests)), sampling, decoder, eos, stream, named)
        self._calls[call_id] = call
        self._waiting += len(requests)
        assert sampling.max_tokens is not None
        self._tell(
            Submitted(
                call_id,
                first.service,
                len(first.prompt),
                sampling.max_tokens,
                len(requests),
                self._prefix(first),
            )
        )
        return call

    def _prefix(self, request: Request) -> tuple[int, ...]:
        """Hashes of the prompt's full blocks, if the dispatch reads them."""
        if not self._dispatch.reads_prefixes:
            return ()
        hashes = hash_prompt(request.prompt, self._fleet.block_size, request.cache_salt)
        return tuple(int.from_bytes(digest[:8]) for digest in hashes)

    async def close(self, drain_s: float = 0) -> None:
        """Reject new calls, let unfinished streams go on for ``drain_s`` seconds, and end the engines.

        Streams unfinished by then raise EngineDied. Closing twice does nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._closed_reason = "the engine is shutting down and takes no new requests"
        if self._calls and drain_s > 0:
            self._emptied.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), drain_s)
        for call in list(self._calls.values()):
            self._end(call, EngineDied("the engine was shut down before the request finished"))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._fleet.close()

    async def _tick(self) -> None:
        """Tell the manager that time passes."""
        while True:
            await asyncio.sleep(self._options.heartbeat_s / TICKS_PER_HEARTBEAT)
            self._tell(Ticked())

    async def _watch(self) -> None:
        """Keep the engines' stats up to date, so that their readers need not wait for a step to end."""
        while True:
            await asyncio.sleep(_STATS_INTERVAL_S)
            self._fleet.ask_stats()

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tell(self, event: ClusterEvent) -> None:
        """Tell the manager what happened, and carry out what it decides, one event after the other."""
        self._untold.append(event)
        if self._telling:
            return
        self._telling = True
        try:
            while self._untold:
                event, now_ns = self._untold.popleft(), self._clock()
                decided = self._manager.handle(event, now_ns)
                if self._on_decision is not None:
                    self._on_decision(now_ns, event, decided)
                for action in decided:
                    self._carry_out(action)
        finally:
            self._telling = False

    def _carry_out(self, action: ClusterAction) -> None:
        match action:
            case Dispatch():
                self._send(action)
            case Withdraw():
                self._withdraw(action.request)
            case Refuse():
                self._refuse(action)
            case StartEngine():
                self._fleet.start_engine(action.engine, action.incarnation)
            case KillEngine():
                self._fleet.kill_engine(action.engine, action.incarnation, action.why)

    def _send(self, action: Dispatch) -> None:
        """Send the rest of a call to an engine."""
        call = self._calls.get(action.request)
        if call is None:
            return
        engine = self._fleet.engines[action.engine]
        self._forget(call)
        call.engine, call.attempt = action.engine, action.attempt
        if call.attempt > 1:
            call.progressed = False
            made = call.output_tokens
            _log.info(
                "%s: attempt %d on engine %s, from token %d", call.log_name, call.attempt, call.engine, made
            )
        else:
            _log.debug("%s: attempt 1 on engine %s", call.log_name, call.engine)
        for choice, reader in call.unfinished.items():
            self._readers[call.wire_id(choice)] = call, reader
        if call.grammar is None:
            engine.send(wire.Submit.from_requests(call.rest(self._clock())))
        else:
            self._spawn(self._prepare_and_send(call, call.attempt, engine, call.grammar))

    async def _prepare_and_send(
        self, call: Call, attempt: int, engine: RemoteEngine, grammar: Grammar
    ) -> None:
        """Send a call when its grammar is ready at the engine, unless it went elsewhere or ended meanwhile."""
        try:
            answer = await engine.ask(lambda key: wire.Prepare(key, call.service, grammar), wire.Prepared)
        except EngineDied:
            return
        if call.attempt != attempt or not call.unfinished:
            return
        if answer.error is None:
            engine.send(wire.Submit.from_requests(call.rest(self._clock())))
            call.accept()
        elif answer.retry_after_s is not None:
            self._end(call, QueueFull(answer.error, answer.retry_after_s))
        else:
            self._end(call, InvalidRequest(answer.error, param="grammar"))

    def _withdraw(self, call_id: str) -> None:
        """Take a call away from its engine."""
        call = self._calls.get(call_id)
        if call is not None and call.engine is not None:
            self._fleet.engines[call.engine].send(wire.Cancel(call.wire_ids()))
            self._forget(call)
            call.engine = None

    def _refuse(self, action: Refuse) -> None:
        call = self._calls.get(action.request)
        if call is None:
            return
        if action.kind is RefusalKind.NO_ENGINE:
            self._end(call, ServiceUnavailable(action.message, _NO_ENGINE_RETRY_S))
        else:
            self._end(call, EngineDied(action.message))

    def _engine_ended(self, name: str, reason: str) -> None:
        """Nothing more comes from an engine; its calls go on elsewhere."""
        calls = [call for call in self._calls.values() if call.engine == name]
        self._recoveries.engine_ended(name, reason, [call.id for call in calls], self._clock())
        for call in calls:
            self._forget(call)
            call.engine = None

    def _handle_message(self, name: str, message: wire.FromEngine) -> None:
        match message:
            case wire.Stepped():
                now_ns = self._clock()
                for event in message.events:
                    self._handle_event(event, now_ns)
            case wire.Refused():
                if (found := self._readers.get(message.request_id)) is not None:
                    self._end(found[0], InvalidRequest(message.message, message.param, message.code))
            case wire.Stats() | wire.Prepared():
                self._fleet.engines[name].answered(message)

    def _handle_event(self, event: TokenEvent, now_ns: int) -> None:
        found = self._readers.get(event.request_id)
        if found is None:
            # It ended, or it is with another engine now.
            return
        call, reader = found
        if event.finish is FinishReason.REFUSED:
            retry_after_s = self._retry_after_s(self._waiting)
            self._end(call, GoalsOutOfReach(event.error or "", retry_after_s))
            return
        if event.tokens and event.position != reader.output_tokens:
            self._distrust(call, event, reader)
            return
        was_waiting = not reader.started
        delta = reader.read(event, now_ns)
        if was_waiting and reader.started:
            self._waiting -= 1
            self._first_tokens_ns.append(now_ns)
        if not call.progressed and event.tokens:
            call.progressed = True
            self._recoveries.progressed(call.id, call.service, now_ns)
            self._tell(Progressed(call.id))
        call.stream.push(delta)
        if delta.finish is not None:
            self._finish(call, reader, delta.finish, told=event.finish is not None)

    def _distrust(self, call: Call, event: TokenEvent, reader: ChoiceReader) -> None:
        """An engine doubled or left out tokens: what it says is worth nothing."""
        assert call.engine is not None
        engine = self._fleet.engines[call.engine]
        why = f"{call.log_name} got token {event.position} after {reader.output_tokens} tokens"
        self._fleet.kill_engine(call.engine, engine.incarnation, why)

    def _finish(self, call: Call, reader: ChoiceReader, reason: FinishReason, *, told: bool) -> None:
        """A choice has ended. told: the engine knows that."""
        wire_id = call.wire_id(reader.choice)
        del call.unfinished[reader.choice], self._readers[wire_id]
        if not reader.started:
            self._waiting -= 1
        if not told and call.engine is not None:
            self._fleet.engines[call.engine].send(wire.Cancel([wire_id], complete=True))
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            call.finished_tokens.append(reader.output_tokens)
        if not call.unfinished:
            self._remove(call)
            call.stream.end()

    def _end(self, call: Call, error: Exception) -> None:
        """End a call with an error, after what came before."""
        self._cancel(call)
        call.accept(error)
        call.stream.end(error)

    def _cancel(self, call: Call) -> None:
        """Cancel the unfinished choices of a call; its stream gets nothing more."""
        if call.id not in self._calls:
            return
        if call.engine is not None and call.unfinished:
            self._fleet.engines[call.engine].send(wire.Cancel(call.wire_ids()))
        self._waiting -= call.waiting
        self._forget(call)
        call.unfinished.clear()
        self._remove(call)

    def _forget(self, call: Call) -> None:
        """Whatever an engine still says about a call counts no more."""
        for wire_id in call.wire_ids():
            self._readers.pop(wire_id, None)

    def _remove(self, call: Call) -> None:
        """A call is over."""
        del self._calls[call.id]
        finished = call.finished_tokens
        self._recoveries.ended(call.id, self._clock())
        self._tell(Ended(call.id, sum(finished) // len(finished) if finished else None))
        if not self._calls:
            self._emptied.set()

    def _retry_after_s(self, excess: int) -> float:
        """Seconds until ``excess`` requests will have left the queue, at its recent rate."""
        times = self._first_tokens_ns
        if len(times) < 2:
            return 1.0
        rate = len(times) / max(1e-3, (self._clock() - times[0]) / 1e9)
        return min(_LONGEST_RETRY_S, max(1.0, excess / rate))
