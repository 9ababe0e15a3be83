"""The iteration scheduler: turns policies' choices into plans, and results into events."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from shoal.core import FinishReason, Idle, Request, StepPlan, StepResult, TokenEvent
from shoal.kvcache import BlockPool
from shoal.schedule.decode_runs import DecodeRun, Growth
from shoal.schedule.leases import Leases
from shoal.schedule.migration import HeldRequest, KVTable, Mover
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.output import OutputProcessor
from shoal.schedule.plan_builder import InFlightStep, PlanBuilder
from shoal.schedule.plan_chooser import PlanChooser, Steps
from shoal.schedule.policies.view import ServiceView
from shoal.schedule.recovery import Recovery
from shoal.schedule.request_store import OnEnd, RequestStore
from shoal.schedule.results import check_result
from shoal.schedule.running_batch import IntArray
from shoal.schedule.service_registry import ServiceRegistry
from shoal.schedule.starvation import StarvationGuard
from shoal.schedule.stats import Observed, SchedulerStats
from shoal.schedule.submission import Submitter, resumable_request
from shoal.schedule.validation import ServiceLimits, longest_total


class Scheduler:
    """Owner of all requests of one engine, and of their block tables.

    One plan at a time is made for one service: its decodes, then chunks of its unfinished prompts, then
    requests that wait; and decodes of services on the same weights. The order proposes turns, the admission
    says who fits, the victim policy makes room.
    host: pool of KV saved in host memory, where preempted KV is to be swapped instead of computed again.
    on_end: told of every request that ends.

    Progress: the request admitted longest ago is never preempted (but for a starved one). It alone fits into
    the pool, so it runs to its end, and two requests cannot preempt each other for ever (see ``Preemptor``).

    Looking again changes nothing: a head that was rejected is not examined again before something happened.
    """

    def __init__(
        self,
        pool: BlockPool,
        services: Mapping[str, ServiceLimits],
        options: SchedulerOptions,
        host: BlockPool | None = None,
        on_end: OnEnd | None = None,
    ) -> None:
        self.options = options
        self._pool = pool
        self._guard = StarvationGuard(round(options.starvation_s * 1e9))
        self._registry = ServiceRegistry(pool, options, self._guard.due_ns, services)
        self._services, self._limits = self._registry.states, self._registry.limits
        longest_gap_ns = round(options.max_token_gap_s * 1e9)
        self._store = RequestStore(pool, self._services, options.order, host, on_end, longest_gap_ns)
        self._submitter = Submitter(pool, self._limits, self._store)
        self._mover = Mover(pool, self._store, self._submitter, self._limits)
        self._outputs = OutputProcessor(pool, self._store)
        self._recovery = Recovery(self._store, self._outputs)
        self._steps = Steps()
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Make those who remember something of services and layouts."""
        self._planner = PlanBuilder(self._pool, self._store, self.options)
        self._chooser = PlanChooser(
            self._pool, self._store, self._registry, self.options, self._steps, self._planner, self._guard
        )

    @property
    def max_running(self) -> int:
        """Most requests that hold KV at once."""
        return self._registry.max_running

    @property
    def services(self) -> Mapping[str, ServiceView]:
        """What policies see of each service, for those who watch a scheduler; not to be changed."""
        return self._services

    def observe_steps(self, told: Callable[[int, int], None]) -> None:
        """From now on tell of the first step of each plan, and of how many at most it has."""
        self._steps.on_steps = told

    def observe_inter_token_latency(self, told: Callable[[str, IntArray, int | IntArray], None]) -> None:
        """From now on tell of the times between tokens: of which service, in ns (0: none), how often each."""
        for name, state in self._services.items():
            state.running.on_gaps = partial(told, name)

    @property
    def unfinished(self) -> int:
        """Requests submitted and not yet ended."""
        return len(self._store.requests)

    @property
    def request_ids(self) -> list[str]:
        """Of all requests that have not ended."""
        return list(self._store.requests)

    @property
    def newest_plan_ids(self) -> list[str]:
        """Ids of the requests of the newest plan in flight."""
        return [request.request.id for rows in self._steps.in_flight[-1].parts for request in rows.requests]

    @property
    def waiting(self) -> int:
        """Requests that hold no memory."""
        return sum([len(state.waiting) for state in self._services.values()])

    @property
    def running(self) -> int:
        """Requests that hold memory."""
        return self._registry.running

    @property
    def in_flight(self) -> int:
        """Plans made and not yet updated."""
        return len(self._steps.in_flight)

    def max_output_tokens(self, service: str, prompt_tokens: int) -> int:
        """Most output tokens that such a prompt leaves room for; below 1 where it leaves none."""
        return longest_total(self._pool, service, self._limits[service]) - prompt_tokens

    def submit(self, request: Request, now_ns: int) -> list[TokenEvent]:
        """Queue a request; returns and raises as ``submit_all`` does."""
        return self.submit_all((request,), now_ns)

    def submit_all(self, requests: Sequence[Request], now_ns: int) -> list[TokenEvent]:
        """Queue all of ``requests`` or none; returns the last events of those whose output is complete.

        Neighbours with the same prompt object are choices of one call: it is hashed and computed once.

        Raises:
            InvalidRequest: one of them can never be served as asked, or its id is in use.
        """
        events = self._submitter.submit_all(requests, now_ns)
        self._steps.note(bool(events))
        return events

    def cancel(
        self, request_id: str, now_ns: int, reason: FinishReason = FinishReason.CANCELLED
    ) -> TokenEvent | None:
        """End a request early; returns its last event, or None: unknown, or in a plan whose update has it.

        reason: CANCELLED, or STOP where its text is complete: only then its length is remembered.
        """
        event = self._store.cancel(request_id, now_ns, reason)
        self._steps.note(event is not None)
        return event

    def take_refused(self) -> list[TokenEvent]:
        """The last events of requests that ``schedule`` has refused since this was last asked."""
        return self._store.take_refused()

    def detach(self, request_id: str, now_ns: int) -> Request | None:
        """Take a request out, to be submitted again elsewhere; it has no further event here.

        What a plan in flight makes of it is dropped. None: it is unknown, or about to end.
        """
        request = self._store.requests.get(request_id)
        if request is None or request.ending is not None:
            return None
        self._steps.note(True)
        self._store.remove(request)
        return resumable_request(request, now_ns)

    def schedule(self, now_ns: int) -> StepPlan | Idle:
        """Commit the next plan; Idle where there is nothing to do before an event (or before its time)."""
        return self._chooser.choose(now_ns)

    def decode_run(self, now_ns: int, most: int) -> DecodeRun | None:
        """The decode steps, at most ``most``, that could be made from ``now_ns`` on without a decision.

        None where the next step may be another, or plans in flight are not decodes of the same requests;
        ``most`` is rounded up to whole plans. Changes nothing.
        """
        return self._chooser.decode_run(now_ns, most)

    def commit_run(self, run: DecodeRun, steps: int) -> tuple[StepPlan, Growth]:
        """The plan of the first ``steps`` of a run, as iterations, and when it takes which blocks.

        It leaves the same blocks as the plans of the run would, one after another; nobody may have been
        admitted, ended or preempted since. What follows of the run may be committed after it.
        """
        return self._chooser.commit_run(run, steps)

    def update(self, plan: StepPlan, result: StepResult, now_ns: int) -> list[TokenEvent]:
        """Process what the oldest plan in flight produced; returns one event for each request it changed.

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
            state.stepped(part.plan, result.durations_ns, scored=bool(result.prompt_logprobs))
            state.limit.succeeded(plan, part.requests)
        return self._outputs.process(step, result, now_ns)

    @property
    def postponed(self) -> list[int]:
        """Sequences that were postponed, and are left out of plans until they are ``ready``."""
        batches = [state.running for state in self._services.values() if len(state.running)]
        return [seq_id for batch in batches for seq_id in batch.seq_id[batch.postponed != 0].tolist()]

    def ready(self, seq_ids: Sequence[int]) -> None:
        """The executor can sample for these sequences again; those that left meanwhile are ignored."""
        if not seq_ids:
            return
        for state in self._services.values():
            rows, run = state.running.rows_of(np.array(seq_ids))
            state.running.postponed[rows[run]] = 0
        self._steps.note(True)

    def abandon(self, error: str, now_ns: int) -> list[TokenEvent]:
        """Take back all plans in flight: the oldest failed with ``error``, those behind it were not run.

        All their copies and changes of the batch were carried out. Returns the last events of requests that
        end: one that failed by itself, and those cancelled meanwhile. A plan taken back counts as a step.
        """
        steps = [self._finish_oldest(1) for _ in range(self.in_flight)]
        return self._recovery.rollback(steps, error, now_ns)

    def _finish_oldest(self, iterations: int) -> InFlightStep:
        """The oldest plan in flight is over after so many iterations."""
        step, missing = self._steps.finish_oldest(iterations)
        if missing:
            self._planner.rollback_step_counts(self._services[step.plan.service], missing)
        return step

    def add_service(self, service: str, limits: ServiceLimits) -> None:
        """A service comes, of which the pool has a view by now; no plan is in flight."""
        self._registry.add(service, limits)
        self._follow_layout()

    def close_service(self, service: str) -> None:
        """Further requests of a service are refused; those that there are go on."""
        self._registry.close(service)

    def remove_service(self, service: str) -> None:
        """A service without requests goes, of which the pool has no view any more; no plan is in flight."""
        self._registry.remove(service)
        self._follow_layout()

    def has_request(self, request_id: str) -> bool:
        """Whether there is an unfinished one of that id."""
        return request_id in self._store.requests

    def requests_of(self, service: str) -> list[str]:
        """Ids of the unfinished requests of a service."""
        return [name for name, request in self._store.requests.items() if request.service == service]

    def has_requests(self, service: str) -> bool:
        """Whether it has any, or blocks are kept for such as move."""
        state = self._services[service]
        return len(state.waiting) + len(state.running) + len(self._store.leases.of(service)) > 0

    def max_committed_tokens(self, service: str) -> int:
        """Most tokens, prompt and output together, that one of its unfinished requests may get to.

        Those that are held count, since they may go on here.
        """
        requests = [*self.leases.held, *self._store.requests.values()]
        own = [request for request in requests if request.service == service]
        return max([request.num_prompt_tokens + request.max_new_tokens for request in own], default=0)

    def preempt_all(self) -> None:
        """Every running request gives up its blocks, and waits, and leases end; no plan is in flight."""
        self._store.preempt_all()

    def drop_swapped(self) -> None:
        """Nothing of what is saved in host memory will be read: it is computed again."""
        self._store.drop_all_swapped()

    def pending_plan(self) -> StepPlan:
        """A plan without rows: all that the executor is still to be told. It is not updated."""
        return self._planner.pending(self._steps.planned)

    def num_tokens(self, request_id: str) -> int | None:
        """Length of an unfinished request, prompt and output so far; None: there is none of that id.

        One that is held counts, since it may go on here.
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
        """Where the KV of a request lies, as long as no plan is in flight; None: it does not run."""
        return self._mover.table_of(request_id)

    @property
    def leases(self) -> Leases:
        """Blocks that are kept for requests that move; to be read only."""
        return self._store.leases

    def lease(self, key: str, service: str, blocks: int) -> bool:
        """Keep so many blocks, or so many more, for a request that comes; whether there is room.

        Nobody is preempted for it. They may be written when ``pending_plan`` was carried out.
        """
        if self.options.admission.slice_tokens is not None:
            return False  # a slice is handed out with its blocks
        if key not in self.leases and self.running + len(self.leases) >= self.max_running:
            return False
        return self._steps.note(self._mover.lease(key, service, blocks))

    def hold(self, key: str, request_id: str, now_ns: int) -> HeldRequest | None:
        """Take a running request out, and lease its blocks; no plan is in flight.

        It has no further event here. None, and nothing changes: it does not run, or in slices.
        """
        if self.options.admission.slice_tokens is not None:
            return None
        held = self._mover.hold(key, request_id, now_ns)
        self._steps.note(held is not None)
        return held

    def join(self, key: str, request: Request, computed: int, now_ns: int) -> StepPlan:
        """Let a request run on the blocks of a lease, of which ``computed`` tokens are written.

        No plan is in flight. Returns a plan without rows that has to be carried out next; it is not updated.
        Raises InvalidRequest, and nothing changes, where this request cannot run on this lease.
        """
        state = self._mover.join(key, request, computed, now_ns)
        self._steps.note(True)
        return self._planner.pending(self._steps.planned, state)

    def resume(self, key: str, now_ns: int, request_id: str | None = None) -> StepPlan:
        """Let a request that was held run again, under another id if one is given; as ``join`` does."""
        state = self._mover.resume(key, request_id, now_ns)
        self._steps.note(True)
        return self._planner.pending(self._steps.planned, state)

    def release(self, key: str) -> None:
        """A lease ends, and with it a request that was held. Unknown ones are ignored."""
        self._steps.note(self._store.leases.release(key))

    def _follow_layout(self) -> None:
        self._begin_anew()
        self._steps.note(True)

    def stats(self) -> SchedulerStats:
        """Counts so far."""
        return self._store.stats(self._steps.planned)

    def observed(self, now_ns: int) -> dict[str, Observed]:
        """What was learned of each service; reads all requests of the windows, unlike ``stats``."""
        return {name: state.statistics.observed(now_ns) for name, state in self._services.items()}
