"""The engine core: the step loop that drives scheduler and executor, with plans in flight.

Synchronous and single-threaded, without sockets and without text.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from shoal.core import (
    ConfigError,
    EngineDied,
    FinishReason,
    Grammar,
    Idle,
    InvalidRequest,
    Request,
    Service,
    StepPlan,
    StepResult,
    TokenEvent,
)
from shoal.engine import wire
from shoal.engine.absent_weights import AbsentWeights, absent_weights
from shoal.engine.grammar_leases import GrammarLeases
from shoal.engine.info import ServiceInfo
from shoal.engine.migration import wire as migration_wire
from shoal.engine.migration.engine_access import EngineAccess
from shoal.engine.migration.handler import MigrationHandler
from shoal.engine.migration.transfer import KVTransfer
from shoal.engine.service_changes import ServiceChanges
from shoal.engine.speed import measure_speed
from shoal.engine.stats import EngineStats, StepTotals
from shoal.engine.step_samples import StepSample, StepSamples
from shoal.engine.weights_log import log_arrival, log_evictions
from shoal.execute.grammar.pool import GrammarLease, GrammarPool
from shoal.execute.protocol import Executor, Interrupted, StepFailed, never
from shoal.kvcache.pool import BlockPool
from shoal.schedule.request_store import OnTransition
from shoal.schedule.scheduler import Scheduler

_log = logging.getLogger(__name__)


class PlanObserver(Protocol):
    """Callbacks before and after each plan runs in the executor, in order."""

    def begin(self, plan: StepPlan, request_ids: Sequence[str]) -> None:
        """Called before a plan of these requests is submitted to the executor."""

    def end(self, plan: StepPlan) -> None:
        """Called when the plan is finished, or has failed in a step that can be retried."""


class Engine:
    """Runs requests: gets plans from the scheduler and tokens from the executor, and returns events.

    depth: maximum plans in flight; with 2 the next plan is made while the executor computes.
    clock: nanoseconds; arrival times are on the same clock. grammars: those of the executor.
    changes: adds and removes services; None: the services are fixed.

    A step that failed (``StepFailed``) is rolled back, and its requests are retried. Any other error of
    the executor is raised from ``step`` and ends the engine: it is then unknown which KV the plans in flight
    have written, and that KV might be published to the prefix index.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pool: BlockPool,
        executor: Executor,
        *,
        depth: int = 1,
        clock: Callable[[], int] = time.monotonic_ns,
        grammars: GrammarPool | None = None,
        changes: ServiceChanges | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._executor = executor
        self._depth = depth
        self._clock = clock
        self._grammars = GrammarLeases(grammars)
        self._changes = changes
        self.interrupted: Interrupted = never
        """Whether a submit or cancel is pending: the iterations of a plan then end early. Set by the owner;
        it is called between two iterations, so it must be quick."""
        self.observer: PlanObserver | None = None
        """Set by the owner; optional."""
        self._migrations: MigrationHandler | None = None
        self._in_flight: deque[StepPlan] = deque()
        self._ended: list[TokenEvent] = []  # ends between steps, for the next step to report
        self._idle: Idle | None = None
        self._times = StepTotals()
        self._samples = StepSamples(scheduler)
        self._busy_since_ns: int | None = None  # the end of the last step, if it was busy since
        self._failure: str | None = None

    def measure_speed(self, service: ServiceInfo, name: str, *, compiles: bool = False) -> ServiceInfo:
        """``service`` with its measured speed on this engine, which must have no requests; runs a few steps.

        compiles: as in ``speed.measure_speed``.
        """
        self._require_alive()
        max_tokens, vocab_size = service.max_total_tokens, service.vocab_size
        speed = measure_speed(self._executor, self._pool, name, max_tokens, vocab_size, compiles=compiles)
        return service if speed is None else replace(service, **speed._asdict())

    def updated(self, services: Mapping[str, ServiceInfo]) -> dict[str, ServiceInfo]:
        """The given services as they are now: capacity for KV, pins, and without those removed meanwhile."""
        capacity = {
            name: self._pool.max_blocks(name) * self._pool.block_size for name in self._pool.layout.services
        }
        return {
            name: replace(
                info,
                max_total_tokens=min(info.context_tokens, capacity[name]),
                kv_tokens=capacity[name],
                pinned=self._scheduler.is_pinned(name),
            )
            for name, info in services.items()
            if name in capacity
        }

    @property
    def weight_bytes(self) -> int:
        """Size of the weights of all services; 0 where the services are fixed."""
        return 0 if self._changes is None else self._changes.weight_bytes

    def submit(self, *requests: Request) -> None:
        """Queue requests, such as the choices of a call: all or, where an error is raised, none.

        A resumed request whose output is complete ends with the next step. A request whose grammar cannot be
        used ends with an error. Raises InvalidRequest if one can never be served, QueueFull if there is no
        place for a grammar (and ``prepare`` reserved none), EngineDied after an error.
        """
        self._require_alive()
        with self._grammars.acquire(requests):
            self._ended += self._scheduler.submit_all(requests, self._clock())
        self._idle = None

    def prepare(self, service: str, grammar: Grammar, *, accepted: bool = False) -> GrammarLease:
        """Reserve a place for a grammar, and compile it for requests of a service; returns at once.

        Release the lease after the submit: submitted requests hold leases of their own. accepted: the
        requests were accepted before, so the lease waits for a place instead of failing. Raises QueueFull
        where too many grammars are in use, InvalidRequest where this engine masks no logits.
        """
        if self._grammars.pool is None:
            raise InvalidRequest("this engine chooses no tokens, so none can follow a grammar", "grammar")
        return self._grammars.pool.lease(service, grammar, accepted=accepted)

    def cancel(self, request_id: str, *, complete: bool = False) -> None:
        """End a request; its last event comes with the current or next step. Unknown ids are ignored.

        complete: a stop string ended its text, so it counts as finished.
        """
        reason = FinishReason.STOP if complete else FinishReason.CANCELLED
        if self._migrations is not None:
            self._migrations.cancel(request_id)
        event = self._scheduler.cancel(request_id, self._clock(), reason)
        if event is not None:
            self._ended.append(event)
        self._idle = None

    def cancel_all(self) -> None:
        """Cancel every request. Migrating requests have no further event."""
        if self._migrations is not None:
            self._migrations.clear()
        for request_id in self._scheduler.request_ids:
            self.cancel(request_id)

    def detach(self, request_id: str) -> Request | None:
        """Remove a request, with the output returned so far: any engine of its service can resume it.

        It has no further event here. None: it is unknown, or about to end.
        """
        self._idle = None
        request = self._scheduler.detach(request_id, self._clock())
        if request is None and self._migrations is not None:
            request = self._migrations.detach(request_id)
        if request is not None:
            self._grammars.release(request_id)
        return request

    def connect(self, transfer: KVTransfer, send: Callable[[wire.FromEngine], None]) -> None:
        """Enable migrations to and from other engines.

        send: sends replies to the client; called by ``begin``, after all events so far were returned.
        """
        self._migrations = MigrationHandler(
            EngineAccess(self._scheduler, self._pool, self._executor, transfer, send, self.now_ns)
        )

    def migrate(self, command: migration_wire.ToEngine) -> None:
        """Carry out a migration command, once no plan is in flight."""
        assert self._migrations is not None, "the engine is not connected"
        self._migrations.add(command)

    def add_service(self, service: Service, folder: Path) -> Future[ServiceInfo]:
        """Load a service's model from ``folder`` while steps go on, and add it between two steps.

        The future raises ConfigError, ModelUnavailable or ModelUnsupported.
        """
        self._require_alive()
        return _services_are_fixed() if self._changes is None else self._changes.add(service, folder)

    def remove_service(self, name: str, *, drain: bool) -> Future[None]:
        """Reject further requests of a service, and unload it when it has none left.

        drain: unfinished requests run to their ends, else they are cancelled now. The future raises
        ConfigError for an unknown service.
        """
        self._require_alive()
        removed: Future[None] = _services_are_fixed() if self._changes is None else self._changes.remove(name)
        removed.add_done_callback(lambda _: self._samples.forget(name))
        if not drain and not removed.done():
            for request_id in self._scheduler.requests_of(name):
                self.cancel(request_id)
        self._idle = None
        return removed

    def pin_service(self, name: str, pinned: bool) -> Future[None]:
        """Have the weights of a service always in the device's memory, or end that; done when this returns.

        The future raises ConfigError as ``Scheduler.pin_service`` does.
        """
        self._require_alive()
        done: Future[None] = Future()
        try:
            self._scheduler.pin_service(name, pinned)
        except ConfigError as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        self._idle = None
        return done

    def step(self) -> list[TokenEvent]:
        """Fill the pipeline, wait for its oldest plan, and return the events since the last step."""
        self.begin()
        return self.complete()

    def begin(self) -> None:
        """The first half of ``step``: plan what can be planned now, and hand it to the executor."""
        self._require_alive()
        try:
            self._fill_pipeline()
        except BaseException as error:
            self._fail(error)
            raise

    def begin_with(self, plan: StepPlan) -> None:
        """In place of ``begin``, with the scheduler's next plan; fewer than ``depth`` plans are in flight."""
        self._executor.submit(plan)
        self._in_flight.append(plan)

    def complete(self) -> list[TokenEvent]:
        """The second half of ``step``: wait for the oldest plan, if there is any, and return events."""
        self._require_alive()
        try:
            if self._in_flight:
                self._idle = None
                self._ended += self._complete_oldest()
        except BaseException as error:
            self._fail(error)
            raise
        events, self._ended = self._ended, []
        self._grammars.release_ended(events)
        return events

    def observe_transitions(self, listener: OnTransition) -> None:
        """Call ``listener`` whenever a request is admitted or preempted."""
        self._scheduler.observe_transitions(listener)

    @property
    def depth(self) -> int:
        """Maximum plans in flight now: one while migrated requests are about to join."""
        return 1 if self._migrations is not None and self._migrations.expecting else self._depth

    @property
    def unfinished(self) -> int:
        """Requests whose last event has not been returned by ``step``."""
        return self._scheduler.unfinished + sum(event.finish is not None for event in self._ended)

    @property
    def busy(self) -> bool:
        """Whether requests are unfinished, or a plan in flight still holds the blocks of ended ones."""
        return self.unfinished > 0 or bool(self._in_flight)

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing until ``idle_until_ns``, a submit or a cancel."""
        return self._idle is not None and not self._in_flight and not self._ended and not self.needs_pause

    @property
    def needs_pause(self) -> bool:
        """Whether service changes or migrations are ready, for which no plan may be in flight."""
        if self._changes is not None and self._changes.ready:
            return True
        return self._migrations is not None and self._migrations.ready

    @property
    def needs_polling(self) -> bool:
        """While the engine is idle: whether to step again soon without a message, because weights are coming,
        a KV transfer is blocked, or a grammar's next token mask is not ready."""
        if self._scheduler.fetching:
            return True
        if self._migrations is not None and self._migrations.blocked:
            return True
        return bool(self._scheduler.postponed)

    @property
    def weights_changes(self) -> int:
        """Number of changes of where weights are."""
        return self._scheduler.weights_changes

    @property
    def absent_weights(self) -> tuple[AbsentWeights, ...]:
        """Weights that are not in memory and not coming."""
        return absent_weights(self._scheduler)

    @property
    def idle_until_ns(self) -> int | None:
        """While the engine is idle: when to step again although nothing was submitted; None: never."""
        return self._idle.until_ns if self._idle is not None else None

    def now_ns(self) -> int:
        return self._clock()

    def add_reply_time(self, duration_ns: int) -> None:
        """Count time that the owner spent on passing on events."""
        self._times.reply_ns += duration_ns

    def step_samples(self) -> Mapping[str, Sequence[StepSample]]:
        """By service, a sample of the steps of its present model."""
        return self._samples.services

    def stats(self) -> EngineStats:
        """Counters since the start, recent traffic, and the present queues and memory."""
        return EngineStats.collect(
            self._scheduler.stats(),
            self._scheduler.observed(self._clock()),
            self._pool.usage(),
            self._times,
            self._pool.block_size,
        )

    def close(self) -> None:
        """Release the executor."""
        self._executor.close()

    def _fail(self, error: BaseException) -> None:
        self._failure = f"{type(error).__name__}: {error}"

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise EngineDied(f"the engine ended with an earlier error ({self._failure}); build a new one")

    def _fill_pipeline(self) -> None:
        self._idle = None
        if self._scheduler.fetching:
            for arrival in self._executor.arrivals():
                log_arrival(arrival, self._scheduler.weights)
                self._scheduler.arrived(arrival, self._clock())
        if postponed := self._scheduler.postponed:
            self._scheduler.ready(self._executor.ready(postponed))
        if self.needs_pause:
            if self._in_flight:
                return  # the pipeline drains first
            self._apply_changes()
        depth = self.depth
        while len(self._in_flight) < depth:
            started = self._clock()
            plan = self._scheduler.schedule(started)
            self._times.schedule_ns += self._clock() - started
            self._ended += self._scheduler.take_refused()
            if isinstance(plan, Idle):
                self._idle = plan
                if not self._in_flight:
                    self._busy_since_ns = None
                return
            if self.observer is not None:
                self.observer.begin(plan, self._scheduler.newest_plan_ids)
            log_evictions(plan.evict, self._scheduler.weights)
            self._executor.submit(plan, lambda: self.needs_pause or self.interrupted())
            self._in_flight.append(plan)

    def _apply_changes(self) -> None:
        """Apply service changes and migrations; no plan is in flight."""
        self._busy_since_ns = None
        if self._changes is not None and self._changes.ready:
            self._changes.apply()
        if self._migrations is not None and self._migrations.ready:
            self._migrations.work()

    def _complete_oldest(self) -> list[TokenEvent]:
        plan = self._in_flight.popleft()
        try:
            result = self._collect(plan)
        except StepFailed as failure:
            return self._abandon(plan, str(failure))
        return self._update(plan, result)

    def _collect(self, plan: StepPlan) -> StepResult:
        """The result of the oldest plan; after an error that ends the engine, the observer keeps the plan."""
        try:
            result = self._executor.collect()
        except StepFailed:
            self._observe_end(plan)
            raise
        self._observe_end(plan)
        return result

    def _observe_end(self, plan: StepPlan) -> None:
        if self.observer is not None:
            self.observer.end(plan)

    def _abandon(self, failed: StepPlan, error: str) -> list[TokenEvent]:
        """Roll back a failed plan and the later plans in flight, which the executor did not run."""
        while self._in_flight:
            plan = self._in_flight.popleft()
            try:
                self._collect(plan)
            except StepFailed:
                continue
            raise RuntimeError(f"the executor ran plan {plan.number} behind {failed.number}, which failed")
        events = self._scheduler.abandon(error, self._clock())
        alone = [event.request_id for event in events if event.finish is FinishReason.ERROR]
        _log.warning(
            "%s: a step with %d requests and %d tokens failed (%s); %s",
            failed.service,
            len(failed.seq_ids),
            sum(failed.new_tokens),
            error,
            f"request {alone[0]} ends, as it was alone in it"
            if alone
            else "its requests are tried in smaller steps",
        )
        return events

    def _update(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        started = self._clock()
        since_ns, self._busy_since_ns = self._busy_since_ns, started
        self._samples.add(plan, result, 0 if since_ns is None else started - since_ns)
        events = self._scheduler.update(plan, result, started)
        self._times.add(result, self._clock() - started)
        return events


def _services_are_fixed() -> Future[Any]:
    """The result of every service change of an engine that was built without ``ServiceChanges``."""
    failed: Future[Any] = Future()
    failed.set_exception(ConfigError("the services of this engine are fixed"))
    return failed
