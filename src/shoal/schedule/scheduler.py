"""Scheduler: submit, cancel, schedule the next step, update with its result; services and migration."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from shoal.core import Arrival, FinishReason, Idle, Request, StepPlan, StepResult, TokenEvent
from shoal.kvcache import BlockPool
from shoal.schedule.decode_runs import DecodeRuns
from shoal.schedule.leases import Leases
from shoal.schedule.migration import HeldRequest, KVTable, Migrator
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.output import OutputProcessor
from shoal.schedule.plan_builder import PlanBuilder
from shoal.schedule.plan_chooser import PlanChooser
from shoal.schedule.policies.view import ServiceView
from shoal.schedule.preemption import WaitForInFlight
from shoal.schedule.recovery import Recovery
from shoal.schedule.request_store import OnEnd, OnTransition, RequestStore
from shoal.schedule.residency import Residency
from shoal.schedule.results import check_result
from shoal.schedule.running_batch import IntArray
from shoal.schedule.service_limits import ServiceLimits, max_total_tokens
from shoal.schedule.service_registry import ServiceRegistry
from shoal.schedule.stats import Observed, SchedulerStats
from shoal.schedule.step_tracker import InFlightStep, StepTracker
from shoal.schedule.submission import Submitter, resumable_request
from shoal.schedule.weights import WeightsEntry
from shoal.schedule.weights_options import WeightsOptions


class Scheduler:
    """Owner of all requests of one engine, and of their block tables.

    A plan is a step of one service: its decodes, then chunks of its unfinished prompts, then newly admitted
    requests; plus decodes of services on the same weights. The order proposes turns, the admission policy
    decides what fits, the victim policy makes room.
    host: the host's pool for swapped KV; None: preempted requests are computed again.
    on_end: called with every request that ends. weights: memory for weights, if it holds not those of all
    services; running requests of absent weights keep their KV, but give way to others.

    Progress: the request admitted longest ago is never preempted, except for a starved one. It alone fits
    into the pool, so it runs to its end, and two requests cannot preempt each other for ever (see
    ``Preemptor``).

    A rejected head of a queue is not examined again before the scheduler's state changes.
    """

    def __init__(
        self,
        pool: BlockPool,
        services: Mapping[str, ServiceLimits],
        options: SchedulerOptions,
        host: BlockPool | None = None,
        on_end: OnEnd | None = None,
        *,
        weights: WeightsOptions | None = None,
    ) -> None:
        self.options = options
        self._pool = pool
        self._registry = ServiceRegistry(pool, options, services, weights or WeightsOptions())
        self._services, self._limits = self._registry.states, self._registry.limits
        longest_gap_ns = round(options.max_token_gap_s * 1e9)
        self._store = RequestStore(pool, self._services, options.order, host, on_end, longest_gap_ns)
        self._submitter = Submitter(pool, self._limits, self._store)
        self._migrator = Migrator(pool, self._store, self._submitter, self._limits)
        self._outputs = OutputProcessor(pool, self._store)
        self._recovery = Recovery(self._store, self._outputs)
        self._steps = StepTracker()
        self._residency = Residency(self._registry.weights, self._store, self._steps)
        self._reset_planning()

    def _reset_planning(self) -> None:
        """Replace the objects that cache anything about services and layouts."""
        pool, store, options, steps = self._pool, self._store, self.options, self._steps
        registry, residency = self._registry, self._residency
        self._builder = PlanBuilder(pool, store, registry.weights, steps, options)
        self.decode_runs = DecodeRuns(
            pool, store, options, steps, self._builder, registry.steppable, residency
        )
        """Runs of decode steps that need no decision; replaced when a service is added or removed."""
        self._chooser = PlanChooser(
            pool, store, registry, options, steps, self._builder, self.decode_runs, residency
        )

    @property
    def max_running(self) -> int:
        """Limit on requests that hold KV at once."""
        return self._registry.max_running

    @property
    def services(self) -> Mapping[str, ServiceView]:
        """The policies' view of each service; read-only."""
        return self._services

    def observe_steps(self, listener: Callable[[int, int], None]) -> None:
        """Call ``listener`` with the first step number and the maximum number of steps of each plan."""
        self._steps.on_steps = listener

    def observe_transitions(self, listener: OnTransition) -> None:
        """Call ``listener`` whenever a request is admitted or preempted."""
        self._store.on_transition = listener

    def observe_inter_token_latency(self, listener: Callable[[str, IntArray, int | IntArray], None]) -> None:
        """Call ``listener`` with service, inter-token latencies in ns (0: first token), and their counts."""
        for name, state in self._services.items():
            state.running.on_inter_token_latency = partial(listener, name)

    @property
    def unfinished(self) -> int:
        """Number of requests submitted and not yet ended."""
        return len(self._store.requests)

    @property
    def request_ids(self) -> list[str]:
        """Ids of all unfinished requests."""
        return list(self._store.requests)

    @property
    def newest_plan_ids(self) -> list[str]:
        """Ids of the requests of the newest plan in flight."""
        return [request.request.id for rows in self._steps.in_flight[-1].parts for request in rows.requests]

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return sum([len(state.waiting) for state in self._services.values()])

    @property
    def running(self) -> int:
        """Number of running requests."""
        return self._registry.running

    @property
    def waiting_by_service(self) -> dict[str, int]:
        """Number of waiting requests of each service that has any."""
        return {name: count for name, state in self._services.items() if (count := len(state.waiting))}

    @property
    def running_by_service(self) -> dict[str, int]:
        """Number of running requests of each service that has any."""
        return {name: count for name, state in self._services.items() if (count := len(state.running))}

    @property
    def weights(self) -> Mapping[str, WeightsEntry]:
        """Where weights are, by name; read-only."""
        return self._registry.weights.entries

    @property
    def weights_options(self) -> WeightsOptions:
        return self._registry.weights.options

    @property
    def weights_changes(self) -> int:
        """Number of changes of the places of weights."""
        return self._registry.weights.changes

    def fetch_s(self, weights: WeightsEntry) -> float:
        """Expected duration of a fetch."""
        return self._registry.weights.fetch_s(weights)

    @property
    def fetching(self) -> bool:
        """Whether weights are coming, so that the executor will report an arrival."""
        return self._registry.weights.coming is not None

    def arrived(self, arrival: Arrival, now_ns: int) -> None:
        """Weights of ``StepPlan.fetch`` have come, or cannot be fetched.

        After several failures the requests for them end; ``take_refused`` returns their last events.
        """
        self._residency.arrived(arrival, now_ns)

    @property
    def in_flight(self) -> int:
        """Number of plans without an update yet."""
        return len(self._steps.in_flight)

    def max_output_tokens(self, service: str, prompt_tokens: int) -> int:
        """Limit on output tokens after a prompt of ``prompt_tokens``; below 1 if there is no room."""
        return max_total_tokens(self._pool, service, self._limits[service]) - prompt_tokens

    def submit(self, request: Request, now_ns: int) -> list[TokenEvent]:
        """Queue a request; see ``submit_all``."""
        return self.submit_all((request,), now_ns)

    def submit_all(self, requests: Sequence[Request], now_ns: int) -> list[TokenEvent]:
        """Queue all of ``requests`` or none; returns the last events of those with complete output.

        Adjacent requests with the same prompt object are choices of one call: the prompt is hashed and
        computed once.

        Raises:
            InvalidRequest: one of them can never be served, or its id is in use.
        """
        events = self._submitter.submit_all(requests, now_ns)
        self._steps.mark_changed(bool(events))
        return events

    def cancel(
        self, request_id: str, now_ns: int, reason: FinishReason = FinishReason.CANCELLED
    ) -> TokenEvent | None:
        """End a request early; returns its last event.

        None if the id is unknown, or if the request is in a plan, whose update returns the event.
        reason: CANCELLED, or STOP if its text is complete; only then its length is learned from.
        """
        event = self._store.cancel(request_id, now_ns, reason)
        self._steps.mark_changed(event is not None)
        return event

    def take_refused(self) -> list[TokenEvent]:
        """The last events of requests that ``schedule`` has refused since the last call."""
        return self._store.take_refused()

    def detach(self, request_id: str, now_ns: int) -> Request | None:
        """Remove a request, to be submitted to another engine; it has no further event here.

        Its tokens from plans in flight are dropped. None: it is unknown, or about to end.
        """
        request = self._store.requests.get(request_id)
        if request is None or request.ending is not None:
            return None
        self._steps.mark_changed(True)
        self._store.remove(request)
        return resumable_request(request, now_ns)

    def schedule(self, now_ns: int) -> StepPlan | Idle:
        """Commit the next plan; Idle if there is nothing to do before an event (or its ``until_ns``)."""
        options = self.options
        if self.in_flight >= options.max_in_flight:
            return Idle()
        refuse = options.on_hopeless == "refuse"
        self._steps.mark_changed(self._store.demote_or_reject_expired(now_ns, refuse=refuse))
        try:
            self._residency.decide(now_ns)
        except WaitForInFlight:
            return Idle()
        if options.max_iterations > 1:
            run = self.decode_runs.next_run(now_ns, options.max_iterations)
            if run is not None and run.steps > 1:
                return self.decode_runs.commit(run, run.steps)[0]
        plan = self._chooser.choose(now_ns)
        if isinstance(plan, Idle) and self._registry.weights.changed:
            return self._builder.commit_changes()
        return plan

    def update(self, plan: StepPlan, result: StepResult, now_ns: int) -> list[TokenEvent]:
        """Process the result of the oldest plan in flight; returns one event for each changed request.

        Raises:
            ValueError: the plan is not the oldest in flight, or the result does not fit it.
        """
        in_flight = self._steps.in_flight
        if not in_flight or in_flight[0].plan is not plan:
            oldest = in_flight[0].plan.number if in_flight else "none"
            raise ValueError(f"update of plan {plan.number}, but the oldest in flight is {oldest}")
        check_result(plan, result)
        step = self._finish_oldest(len(result.durations_ns))
        for part in step.parts:
            state = self._services[part.plan.service]
            state.record_step(part.plan, result.durations_ns, scored=bool(result.prompt_logprobs))
            state.limit.succeeded(plan, part.requests)
            self._registry.weights.stepped(part.plan.service, now_ns)
        return self._outputs.process(step, result, now_ns)

    def computed_before(self, plan: StepPlan) -> list[int] | None:
        """Tokens of each row that were computed before the oldest plan in flight.

        None if a request has left the batch since.
        """
        computed: list[int] = []
        for service, rows in plan.rows_by_service():
            running = self._services[service].running
            at, run = running.rows_of(np.array(plan.seq_ids[rows]))
            if not run.all():
                return None
            computed += running.num_computed[at].tolist()
        return computed

    @property
    def postponed(self) -> list[int]:
        """Postponed sequences, which are left out of plans until they are ``ready``."""
        batches = [state.running for state in self._services.values() if len(state.running)]
        return [seq_id for batch in batches for seq_id in batch.seq_id[batch.postponed != 0].tolist()]

    def ready(self, seq_ids: Sequence[int]) -> None:
        """The executor can sample for these sequences again; those that have left are ignored."""
        if not seq_ids:
            return
        for state in self._services.values():
            rows, run = state.running.rows_of(np.array(seq_ids))
            state.running.postponed[rows[run]] = 0
        self._steps.mark_changed(True)

    def abandon(self, error: str, now_ns: int) -> list[TokenEvent]:
        """Roll back all plans in flight: the oldest failed with ``error``, the later ones were not run.

        The executor has done all their copies and batch changes. Returns the last events of ended requests:
        one that failed alone, and those cancelled meanwhile. A plan that is rolled back counts as a step.
        """
        steps = [self._finish_oldest(1) for _ in range(self.in_flight)]
        return self._recovery.rollback(steps, error, now_ns)

    def _finish_oldest(self, iterations: int) -> InFlightStep:
        """Remove the oldest plan in flight, which has ended after ``iterations`` iterations."""
        step, missing = self._steps.finish_oldest(iterations)
        if missing:
            self._services[step.plan.service].uncount_steps(missing)
        return step

    def check_service(self, service: str, limits: ServiceLimits) -> None:
        """Raise ConfigError if the memory for weights is too small for one more service."""
        self._registry.weights.check(service, limits)

    def add_service(self, service: str, limits: ServiceLimits) -> None:
        """Add a service that the pool's layout already has; no plan is in flight."""
        self._registry.add(service, limits)
        self._follow_layout()

    def pin_service(self, service: str, pinned: bool) -> None:
        """Have the weights of a service always in the device's memory, or end that.

        Raises ConfigError, without effect, for an unknown service, and where the other weights would have too
        little memory.
        """
        self._registry.pin(service, pinned)
        self._steps.mark_changed(True)

    def is_pinned(self, service: str) -> bool:
        """Whether a service pins its weights."""
        return self._registry.weights.is_pinned(service)

    def close_service(self, service: str) -> None:
        """Refuse new requests of a service; existing ones continue."""
        self._registry.close(service)

    def remove_service(self, service: str) -> None:
        """Remove a service without requests that the pool's layout no longer has; no plan is in flight."""
        self._registry.remove(service)
        self._follow_layout()

    def has_request(self, request_id: str) -> bool:
        """Whether there is an unfinished request with this id."""
        return request_id in self._store.requests

    def requests_of(self, service: str) -> list[str]:
        """Ids of the unfinished requests of a service."""
        return [name for name, request in self._store.requests.items() if request.service == service]

    def has_requests(self, service: str) -> bool:
        """Whether a service has waiting or running requests, or leases."""
        state = self._services[service]
        return len(state.waiting) + len(state.running) + len(self._store.leases.of_service(service)) > 0

    def max_committed_tokens(self, service: str) -> int:
        """The largest possible final length, prompt and output, of the service's unfinished requests.

        Includes held requests, since they may be resumed here.
        """
        requests = [*self.leases.held, *self._store.requests.values()]
        own = [request for request in requests if request.service == service]
        return max([request.num_prompt_tokens + request.max_new_tokens for request in own], default=0)

    def preempt_all(self) -> None:
        """Preempt all running requests and revoke all leases; no plan is in flight."""
        self._store.preempt_all()

    def drop_swapped(self) -> None:
        """Drop all KV in host memory; it is computed again."""
        self._store.drop_all_swapped()

    def pending_plan(self) -> StepPlan:
        """A plan without rows, with all pending changes for the executor. It has no update."""
        return self._builder.pending()

    def num_tokens(self, request_id: str) -> int | None:
        """Length of an unfinished request, prompt and output so far; None: the id is unknown.

        Includes held requests, since they may be resumed here.
        """
        request = self._store.requests.get(request_id)
        if request is None:
            held = [each.num_tokens for each in self.leases.held if each.request.id == request_id]
            return max(held, default=None)
        if request.seq_id < 0:
            return request.num_tokens
        batch = self._services[request.service].running
        return request.num_prompt_tokens + int(batch.num_generated[batch.row_of(request)])

    def table_of(self, request_id: str) -> KVTable | None:
        """Block table of a running request, while no plan is in flight; None: it is not running."""
        return self._migrator.table_of(request_id)

    @property
    def leases(self) -> Leases:
        """Blocks reserved for migration; read-only."""
        return self._store.leases

    def lease(self, key: str, service: str, blocks: int) -> bool:
        """Reserve ``blocks`` (further) blocks for an arriving request; returns whether there is room.

        Nothing is preempted for it. The blocks may be written after ``pending_plan`` was carried out.
        """
        if self.options.admission.slice_tokens is not None:
            return False  # migrated requests have no slice
        if key not in self.leases and self.running + len(self.leases) >= self.max_running:
            return False
        return self._steps.mark_changed(self._migrator.lease(key, service, blocks))

    def hold(self, key: str, request_id: str, now_ns: int) -> HeldRequest | None:
        """Take a running request out, and lease its blocks; no plan is in flight.

        It has no further event here unless it is resumed. None, without effect: it is not running, or there
        are slices.
        """
        if self.options.admission.slice_tokens is not None:
            return None
        held = self._migrator.hold(key, request_id, now_ns)
        self._steps.mark_changed(held is not None)
        return held

    def join(self, key: str, request: Request, computed: int, now_ns: int) -> StepPlan:
        """Run a request with the blocks of a lease, in which the KV of ``computed`` tokens is written.

        No plan is in flight. Returns a plan without rows that must be executed next; it has no update.
        Raises InvalidRequest, without effect, if the request cannot run with this lease.
        """
        state = self._migrator.join(key, request, computed, now_ns)
        self._steps.mark_changed(True)
        return self._builder.pending(state)

    def resume(self, key: str, now_ns: int, request_id: str | None = None) -> StepPlan:
        """Run a held request again, with another id if one is given; returns a plan as ``join`` does."""
        state = self._migrator.resume(key, request_id, now_ns)
        self._steps.mark_changed(True)
        return self._builder.pending(state)

    def release(self, key: str) -> None:
        """End a lease, and with it a held request. Unknown keys are ignored."""
        self._steps.mark_changed(self._store.leases.release(key))

    def _follow_layout(self) -> None:
        self._reset_planning()
        self._steps.mark_changed(True)

    def stats(self) -> SchedulerStats:
        return self._store.stats(self._steps.planned, self._registry.weights.stats())

    def observed(self, now_ns: int) -> dict[str, Observed]:
        """Traffic statistics of each service; slower than ``stats``, as it reads all recent requests."""
        return {name: state.statistics.observed(now_ns) for name, state in self._services.items()}
