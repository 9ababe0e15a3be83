"""Choosing the next plan: the order proposes turns, the admission says who fits, the victim makes room."""

import sys
from collections import deque
from collections.abc import Callable, Iterable

from shoal.core import Idle, StepPlan
from shoal.kvcache import BlockPool
from shoal.schedule.admitter import Admitter
from shoal.schedule.batching import Batcher, ScheduledBatch
from shoal.schedule.decode_runs import DecodeRun, DecodeRuns, Growth
from shoal.schedule.inter_token_latency import InterTokenLatencyGuard
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.plan_builder import InFlightStep, PlanBuilder
from shoal.schedule.policies.orders import Turn
from shoal.schedule.policies.view import SchedulerView
from shoal.schedule.preemption import Preemptor, WaitForInFlight
from shoal.schedule.recovery import prepend_suspect_turns
from shoal.schedule.request_state import RequestState
from shoal.schedule.request_store import RequestStore
from shoal.schedule.service_registry import ServiceRegistry
from shoal.schedule.starvation import StarvationGuard


class Steps:
    """Plans in the order in which they were made."""

    def __init__(self) -> None:
        self.planned = 0
        """Steps planned so far, each iteration of a plan counted."""
        self.in_flight: deque[InFlightStep] = deque()
        """Plans made and not yet updated, the oldest first."""
        self.epoch = 0
        """Goes up with everything that happens; in the same epoch a second look is the same as the first."""
        self.on_steps: Callable[[int, int], None] | None = None
        """Told of the first step of each plan, and of how many at most it has, for the same requests."""

    def note(self, something: bool) -> bool:
        """Note that ``something`` happened, if it did."""
        self.epoch += something
        return something

    def tell(self, steps: int) -> None:
        """The next plan has so many steps at most."""
        if self.on_steps is not None:
            self.on_steps(self.planned, steps)

    def begin(self, step: InFlightStep) -> StepPlan:
        """A plan was made; returns it."""
        self.in_flight.append(step)
        self.planned += step.plan.iterations
        self.epoch += 1
        return step.plan

    def finish_oldest(self, iterations: int) -> tuple[InFlightStep, int]:
        """The oldest plan in flight is over after so many iterations; also returns how many were not made."""
        step = self.in_flight.popleft()
        self.epoch += 1
        missing = step.plan.iterations - iterations
        self.planned -= missing
        return step, missing


class PlanChooser:
    """Makes a scheduler's plans, one at a time.

    steps: what was planned so far; plans are noted there. planner: writes them down.
    """

    def __init__(
        self,
        pool: BlockPool,
        store: RequestStore,
        registry: ServiceRegistry,
        options: SchedulerOptions,
        steps: Steps,
        planner: PlanBuilder,
        guard: StarvationGuard,
    ) -> None:
        self._pool = pool
        self._store = store
        self._registry = registry
        self._options = options
        self._steps = steps
        self._planner = planner
        self._guard = guard
        self._gaps = InterTokenLatencyGuard(round(options.max_token_gap_s * 1e9))
        self._services = store.services
        self._order, self._admission = options.order, options.admission
        self._batcher = Batcher(pool, self._admission.slice_tokens)
        self._preemptor = Preemptor(pool, store, options, steps.in_flight)
        self._runs = DecodeRuns(pool, store, guard, options)

    def choose(self, now_ns: int) -> StepPlan | Idle:
        """Commit the next plan; Idle where there is nothing to do before an event (or before its time)."""
        steps, options = self._steps, self._options
        if len(steps.in_flight) >= options.depth:
            return Idle()
        steps.note(self._store.demote_or_reject_expired(now_ns, refuse=options.on_hopeless == "refuse"))
        if options.max_iterations > 1:
            run = self.decode_run(now_ns, options.max_iterations)
            if run is not None and run.steps > 1:
                return self.commit_run(run, run.steps)[0]
        try:
            plan = self._serve_starved(now_ns)
            while plan is None:
                decision = self._order.decide(SchedulerView(self._services, steps.planned), now_ns)
                epoch = steps.epoch
                turns = prepend_suspect_turns(decision.turns, self._services)
                for turn in self._gaps.turns(turns, self._services.values(), now_ns):
                    plan = self._take(turn, now_ns)
                    if plan is not None:
                        return plan
                # A turn that made room may have preempted the very requests it was for.
                if epoch == steps.epoch and not steps.note(self._preemptor.break_slice_deadlock()):
                    return self._idle(decision.until_ns, now_ns)
        except WaitForInFlight:
            return Idle()
        return plan

    def _serve_starved(self, now_ns: int) -> StepPlan | None:
        for request, turn in self._guard.turns(self._services, now_ns):
            plan = self._take(turn, now_ns, urgent=request)
            if plan is not None:
                if request in self._steps.in_flight[-1].parts[0].requests:
                    self._guard.served(self._services[turn.service], now_ns)
                return plan
        return None

    def _idle(self, until_ns: int | None, now_ns: int) -> Idle:
        store = self._store
        if self._steps.in_flight or not store.requests:
            return Idle(until_ns)
        starves_ns = self._guard.next_ns(self._services.values())
        if starves_ns is not None and starves_ns < now_ns and store.leases.demand:
            starves_ns = None  # whoever starves already waits for leases to end, and no time does that
        times = [until_ns, starves_ns]
        times += [state.waiting.next_slo_expired_ns for state in self._services.values()]
        return Idle(min([time for time in times if time is not None], default=None))

    def _take(self, turn: Turn, now_ns: int, urgent: RequestState | None = None) -> StepPlan | None:
        """The plan for a turn, or None if it comes to nothing.

        urgent: a starved request that the turn is for; if it waits, it preempts whom it must.
        """
        state, note = self._services[turn.service], self._steps.note
        batch, waiting = state.running, turn.waiting
        while True:
            # A starved request has one step in a long time; but with scored prompts that may take 10 s.
            full = urgent is not None and not state.scores_prompts
            most = sys.maxsize if full else self._gaps.most_prompt_tokens(state, self._services.values())
            scheduled = self._batcher.form(batch, turn, state.limit, most)
            if urgent is not None and urgent.seq_id >= 0 and not scheduled.has(batch.row_of(urgent)):
                if not note(self._preemptor.help_to_slice(urgent)):
                    return None
                continue
            if scheduled.new_blocks and not self._pool.can_allocate(turn.service, scheduled.new_blocks):
                if turn.prefill and not scheduled.prefills(batch):
                    return None
                note(self._preemptor.make_room(turn.service, scheduled.new_blocks))
                if urgent is None:
                    waiting = ()  # nobody is to take it, least of all who made it
                continue
            admitter = Admitter(self._pool, self._admission, turn.service, self._store, scheduled)
            self._ask(admitter, waiting, urgent)
            if admitter.admitted or admitter.rejected is None:
                break
            request, rejection = admitter.rejected
            done = self._preemptor.make_room_for(
                request, rejection, admitter.needed, starved=request is urgent
            )
            if not note(done):
                break
            # Room was made for this one; nobody else, least of all who made it, is to take it.
            waiting = (request,)
        if turn.prefill and not admitter.admitted and not scheduled.prefills(batch):
            return None
        if scheduled.empty and not admitter.admitted:
            return None
        return self._commit(turn.service, scheduled, admitter, now_ns)

    def _commit(self, service: str, scheduled: ScheduledBatch, admitter: Admitter, now_ns: int) -> StepPlan:
        state, admitted = self._services[service], admitter.admitted
        step = self._planner.commit(self._steps.planned, state, scheduled, admitted, now_ns)
        self._steps.tell(1)
        return self._steps.begin(step)

    def _ask(self, admitter: Admitter, waiting: Iterable[RequestState], urgent: RequestState | None) -> None:
        """Admit from a turn's queue until somebody is rejected, if anybody is to be asked now."""
        steps = self._steps
        running = self._registry.running
        if urgent is None and running and steps.planned % self._admission.admit_every:
            return
        running += len(self._store.leases)
        admitter.admit_all(waiting, running, self._registry.max_running, steps.epoch, urgent)
        if admitter.rejected is not None:
            self._runs.rejected(*admitter.rejected, steps.planned)

    def decode_run(self, now_ns: int, most: int) -> DecodeRun | None:
        """As ``Scheduler.decode_run``."""
        in_flight = self._steps.in_flight
        if len(in_flight) >= self._options.depth:
            return None
        if not all(step.decodes_all(self._services[step.plan.service].running) for step in in_flight):
            return None
        return self._runs.next_run(now_ns, most, self._steps.planned)

    def commit_run(self, run: DecodeRun, steps: int) -> tuple[StepPlan, Growth]:
        """As ``Scheduler.commit_run``."""
        state = self._services[run.service]
        self._steps.tell(steps)
        growth = self._runs.grow(state, steps)
        step = self._planner.commit_run(self._steps.planned, state, steps, growth)
        return self._steps.begin(step), growth
