"""The router: accepts calls for all engines, and owns their streams and tokens.

It sends events to the pure ``Manager`` and executes its actions. It holds the prompt and the output of every
unfinished request, so that any engine can resume it.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from shoal.cluster.backends.interface import EngineBackend
from shoal.cluster.manager.dispatch import PackerDispatch, dispatch_named
from shoal.cluster.manager.events import ClusterEvent, EpochBegan, Submitted, Ticked, WeightsMoved
from shoal.cluster.manager.manager import Manager
from shoal.cluster.options import ClusterOptions, EnginePlan
from shoal.cluster.placing.placer import Placer, Searcher
from shoal.cluster.placing.search_process import SearchProcess
from shoal.cluster.placing.status import PlacingStatus
from shoal.cluster.predicted_lengths import PredictedLengths
from shoal.cluster.router.action_runner import ActionRunner, OnDecision
from shoal.cluster.router.administration import Administration
from shoal.cluster.router.call import Call
from shoal.cluster.router.call_table import CallTable
from shoal.cluster.router.fleet import Fleet
from shoal.cluster.router.migration_runner import MigrationRunner
from shoal.cluster.router.remote_engine import OpenChannel
from shoal.cluster.status import ClusterInfo, EngineStatus, RequestTable, ServiceStatus
from shoal.core import SLO, Client, EngineDied, QueueFull, Request, SamplingParams
from shoal.core.service import NO_GOALS
from shoal.engine import wire
from shoal.engine.process.child_process import BUILDER
from shoal.engine.stats import EngineStats
from shoal.frontend.choice_requests import expand_choices
from shoal.frontend.detokenize import Decoder
from shoal.frontend.engine_connection import EngineConnection
from shoal.frontend.stream import Stream
from shoal.frontend.validation import check_priority, check_request
from shoal.schedule.request_state import hash_prompt

_log = logging.getLogger(__name__)
_STATS_INTERVAL_S = 1.0


class Router:
    """Submits calls to engines and streams their output back; needs a running event loop.

    Detokenization, stop strings and client-side latencies are computed here. A call whose engine ends is
    resumed on another engine, or on the same after its restart, from the delivered tokens.
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
        open_channel: OpenChannel = EngineConnection,
        clock: Callable[[], int] = time.monotonic_ns,
        on_decision: OnDecision | None = None,
        search: Searcher | None = None,
    ) -> None:
        self._options = options
        self._decoders = dict(tokenizers)
        self._max_queue = max_queue
        self._clock = clock
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
            emit=self._emit,
            on_message=self._handle_message,
            on_end=lambda engine, reason: self._calls.engine_ended(engine, reason),
        )
        batching = options.batching
        self._lengths = None if batching is None else PredictedLengths(batching.lengths)
        self._placer = Placer(
            options, self._manager, self._fleet, self._emit, clock, search or SearchProcess()
        )
        self._calls = CallTable(self._fleet, self._emit, clock, self._finished, self._placer.ended)
        self._migration_runner = MigrationRunner(self._fleet, self._calls, self._emit, clock)
        self._runner = ActionRunner(
            self._manager,
            self._fleet,
            self._calls,
            self._migration_runner,
            clock=clock,
            on_decision=on_decision,
        )
        self.administration = Administration(
            self._manager, self._fleet, self._decoders, self._emit, self._placer
        )
        self._numbers = itertools.count(1)
        self._closed_reason: str | None = None  # why no new calls are accepted
        self._closed = False
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
        """Start all engines, or attach to running ones, and wait until their models are loaded.

        folders, tokenizers: by service name. builder: "module:function" that builds the engine in its
        process.

        Raises ConfigError, ModelUnavailable or ModelUnsupported as loading does, EngineDied if a process
        ends.
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
        """Start the engines and the periodic tasks; called once, by ``start``."""
        self._spawn(self._tick())
        self._spawn(self._watch())
        if isinstance(self._dispatch, PackerDispatch):
            self._spawn(self._begin_epochs())
        try:
            await self._fleet.start(progress)
            self.administration.watch_idle_services()
            self._spawn(self._placer.run())
        except BaseException:
            await self.close()
            raise

    @property
    def info(self) -> ClusterInfo:
        """Limits of the services."""
        return self._fleet.catalog.info

    @property
    def engines(self) -> Sequence[EngineStatus]:
        return [self._fleet.engines[status.name].complete_status(status) for status in self._manager.engines]

    @property
    def wanted_engines(self) -> int:
        """Number of engines that are to run."""
        return self._manager.wanted_engines

    @property
    def found_engines(self) -> Mapping[str, int]:
        """Process ids by name of the engines that ran already at the start; they have cancelled their old
        requests."""
        return self._fleet.found

    @property
    def services(self) -> Mapping[str, ServiceStatus]:
        resumed = self._calls.recovery_log.resumed
        return {
            name: replace(status, resumed=resumed.get(name, 0))
            for name, status in self._manager.services.items()
        }

    @property
    def placing(self) -> PlacingStatus:
        """What the placement policy did last."""
        return self._placer.status

    def waits_for_load(self, service: str) -> bool:
        """Whether requests of a service wait until running engines have loaded it."""
        return self._manager.waits_for_load(service)

    @property
    def unfinished(self) -> int:
        """Number of unfinished choices."""
        return sum(len(call.unfinished) for call in self._calls.all())

    def requests(self, most: int, services: Set[str] | None = None) -> RequestTable:
        """Unfinished requests, the oldest first, and the last that ended; at most ``most`` of each.

        services: of these alone; None: of all.
        """
        return self._calls.requests(most, services)

    @property
    def waiting(self) -> int:
        """Number of choices without a first token."""
        return self._calls.waiting

    async def stats(self, engine: str) -> EngineStats:
        """An engine's stats after its present step; raises EngineDied if it is not running."""
        return (await self._fleet.engines[engine].ask(wire.AskStats, wire.Stats)).stats

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
        client: Client | None = None,
    ) -> Stream:
        """Accept a call and return its stream.

        slo: goals, which replace the service's. arrival_ns: arrival on the monotonic clock; None: now.
        priority, cache_salt, client: as in ``Request``. log_name: added to its id in log lines.

        Raises InvalidRequest, QueueFull or EngineDied before anything is sent.
        """
        info = self.info
        check_request(info, service, prompt, sampling, slo)
        check_priority(info, priority)
        if self._closed_reason is not None:
            raise EngineDied(self._closed_reason)
        waiting = self._calls.waiting
        if waiting > 0 and waiting + sampling.n > self._max_queue:
            raise QueueFull(
                f"{waiting} requests wait already and at most {self._max_queue} may "
                f"(max_queue); {sampling.n} more do not fit now",
                self._calls.retry_after_s(waiting + sampling.n - self._max_queue),
            )
        if sampling.max_tokens is None:
            # Set here, so that it is the same on every engine.
            total_tokens = self._fleet.catalog.default_total_tokens(service, len(prompt))
            sampling = replace(sampling, max_tokens=total_tokens - len(prompt))
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
            client=client,
        )
        call = self._open(call_id, requests, sampling, log_name)
        if sampling.grammar is not None:
            try:
                await call.accepted
            except BaseException:
                self._calls.cancel(call)
                raise
        return call.stream

    def _open(
        self, call_id: str, requests: Sequence[Request], sampling: SamplingParams, log_name: str | None
    ) -> Call:
        """Create and dispatch the call of new requests."""
        first = requests[0]
        stream = Stream(call_id, len(first.prompt), lambda: self._calls.cancel(call))
        eos = self.info.services[first.service].eos_token_ids
        decoder = self._decoders[first.service]
        slo = self._fleet.catalog.goals(first)
        call = Call(call_id, dict(enumerate(requests)), sampling, decoder, eos, stream, log_name, slo)
        self._calls.add(call)
        self._placer.arrived(call)
        assert sampling.max_tokens is not None
        self._emit(
            Submitted(
                call_id,
                first.service,
                len(first.prompt),
                sampling.max_tokens,
                len(requests),
                self._prefix(first),
                _is_kv_transferable(sampling),
                *self._batch_facts(first, sampling.max_tokens),
            )
        )
        if call.engine is None and self.waits_for_load(call.service):
            call.waits_for_load_ns = self._clock()
        return call

    def _batch_facts(self, request: Request, most_tokens: int) -> tuple[int, float | None]:
        """Predicted output and end-to-end goal of a request, if batches are formed by them."""
        if self._lengths is None:
            return 0, None
        service = self._fleet.catalog.services[request.service]
        return self._lengths.facts(request, most_tokens, service.slo, service.execution_s)

    def _finished(self, call: Call, output_tokens: int) -> None:
        if self._lengths is not None:
            self._lengths.record(call.request, output_tokens)

    def _prefix(self, request: Request) -> tuple[int, ...]:
        """Hashes of the prompt's full blocks, if the dispatch policy reads them."""
        if not self._dispatch.reads_prefixes:
            return ()
        hashes = hash_prompt(request.prompt, self._fleet.block_size, request.cache_salt)
        return tuple(int.from_bytes(digest[:8]) for digest in hashes)

    async def close(self, drain_s: float = 0) -> None:
        """Reject new calls, wait up to ``drain_s`` seconds for unfinished ones, and end the engines.

        Streams unfinished by then raise EngineDied. Closing twice does nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._closed_reason = "the engine is shutting down and takes no new requests"
        if self._calls and drain_s > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._calls.emptied.wait(), drain_s)
        for call in self._calls.all():
            self._calls.end(call, EngineDied("the engine was shut down before the request finished"))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._fleet.close()

    async def _tick(self) -> None:
        """Send ticks to the manager."""
        while True:
            await asyncio.sleep(self._options.tick_s)
            self._emit(Ticked())

    async def _begin_epochs(self) -> None:
        """Send output lengths to the manager's packer, once per epoch."""
        while True:
            await asyncio.sleep(self._options.packing.epoch_s)
            self._emit(EpochBegan({call.id: call.output_tokens for call in self._calls.all()}))

    async def _watch(self) -> None:
        """Refresh the engines' stats, so that readers need not wait for the end of a step."""
        while True:
            await asyncio.sleep(_STATS_INTERVAL_S)
            self._fleet.ask_stats()

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the router is broken: restart the server", exc_info=error)

    def _emit(self, event: ClusterEvent) -> None:
        self._runner.process(event)

    def _handle_message(self, name: str, message: wire.FromEngine) -> None:
        match message:
            case wire.Stepped():
                self._calls.stepped(message.events)
            case wire.Transitions():
                self._calls.transitioned(message.transitions)
            case wire.Refused():
                self._calls.refused(message)
            case wire.Accepted():
                self._calls.accepted(message)
            case wire.Stats() | wire.Steps() | wire.ServiceChanged():
                self._fleet.engines[name].handle_answer(message)
            case wire.WeightsMoved():
                self._emit(WeightsMoved(name, self._fleet.engines[name].incarnation, message.absent))
            case wire.Forgotten():
                self._fleet.kill_inconsistent(name, "it has forgotten its requests")
            case _:
                self._migration_runner.handle(name, message)


def _is_kv_transferable(sampling: SamplingParams) -> bool:
    """Whether KV and tokens are all that an engine needs to resume a call."""
    return sampling.n == 1 and sampling.grammar is None and sampling.prompt_logprobs is None
