"""Main loop of the scheduler: starved requests, then turns of the order; admission, preemption, next plan."""

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


class StepTracker:
    """Plans in flight, the number of planned steps, and the epoch of the scheduler's state."""

    def __init__(self) -> None:
        self.planned = 0
        """Steps planned so far, counting each iteration of a plan."""
        self.in_flight: deque[InFlightStep] = deque()
        """Plans without an update yet, oldest first."""
        self.epoch = 0
        """Increases with every change of state; within an epoch, scheduling again gives the same result."""
        self.on_steps: Callable[[int, int], None] | None = None
        """Called with the first step number and the maximum number of steps of each plan."""

    def mark_changed(self, changed: bool) -> bool:
        """Start a new epoch if ``changed``; returns ``changed``."""
        self.epoch += changed
        return changed

    def report(self, steps: int) -> None:
        """Report the next plan, of at most ``steps`` steps, to the listener."""
        if self.on_steps is not None:
            self.on_steps(self.planned, steps)

    def begin(self, step: InFlightStep) -> StepPlan:
        self.in_flight.append(step)
        self.planned += step.plan.iterations
        self.epoch += 1
        return step.plan

    def finish_oldest(self, iterations: int) -> tuple[InFlightStep, int]:
        """Remove the oldest plan in flight; also returns how many of its iterations were not done."""
        step = self.in_flight.popleft()
        self.epoch += 1
        missing = step.plan.iterations - iterations
        self.planned -= missing
        return step, missing


class PlanChooser:
    """Makes a scheduler's plans, one at a time; they are recorded in ``steps``."""

    def __init__(
        self,
        pool: BlockPool,
        store: RequestStore,
        registry: ServiceRegistry,
        options: SchedulerOptions,
        steps: StepTracker,
        builder: PlanBuilder,
        guard: StarvationGuard,
    ) -> None:
        self._pool = pool
        self._store = store
        self._registry = registry
        self._options = options
        self._steps = steps
        self._builder = builder
        self._guard = guard
        self._itl_guard = InterTokenLatencyGuard(round(options.max_token_gap_s * 1e9))
        self._services = store.services
        self._order, self._admission = options.order, options.admission
        self._batcher = Batcher(pool, self._admission.slice_tokens)
        self._preemptor = Preemptor(pool, store, options, steps.in_flight)
        self._runs = DecodeRuns(pool, store, guard, options)

    def choose(self, now_ns: int) -> StepPlan | Idle:
        """As ``Scheduler.schedule``."""
        steps, options = self._steps, self._options
        if len(steps.in_flight) >= options.max_in_flight:
            return Idle()
        refuse = options.on_hopeless == "refuse"
        steps.mark_changed(self._store.demote_or_reject_expired(now_ns, refuse=refuse))
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
                for turn in self._itl_guard.turns(turns, self._services.values(), now_ns):
                    plan = self._plan_turn(turn, now_ns)
                    if plan is not None:
                        return plan
                # A turn that made room may have preempted the requests that it was for.
                if epoch == steps.epoch and not steps.mark_changed(self._preemptor.break_slice_deadlock()):
                    return self._idle(decision.until_ns, now_ns)
        except WaitForInFlight:
            return Idle()
        return plan

    def _serve_starved(self, now_ns: int) -> StepPlan | None:
        for request, turn in self._guard.turns(self._services, now_ns):
            plan = self._plan_turn(turn, now_ns, starved=request)
            if plan is not None:
                if request in self._steps.in_flight[-1].parts[0].requests:
                    self._guard.served(self._services[turn.service], now_ns)
                return plan
        return None

    def _idle(self, until_ns: int | None, now_ns: int) -> Idle:
        store = self._store
        if self._steps.in_flight or not store.requests:
            return Idle(until_ns)
        starves_ns = self._guard.next_starvation_ns(self._services.values())
        if starves_ns is not None and starves_ns < now_ns and store.leases.demand:
            starves_ns = None  # the starved request waits for leases to end, which time alone does not do
        times = [until_ns, starves_ns]
        times += [state.waiting.next_slo_expired_ns for state in self._services.values()]
        return Idle(min([time for time in times if time is not None], default=None))

    def _plan_turn(self, turn: Turn, now_ns: int, starved: RequestState | None = None) -> StepPlan | None:
        """The plan for a turn; None if there is nothing to compute.

        starved: the starved request that the turn is for; if it is waiting, it may preempt any request.
        """
        state, mark_changed = self._services[turn.service], self._steps.mark_changed
        batch, waiting = state.running, turn.waiting
        while True:
            # A starved request rarely has a step, so it gets a full one; but scored prompts may take 10 s.
            full = starved is not None and not state.scores_prompts
            limit = sys.maxsize if full else self._itl_guard.max_prompt_tokens(state, self._services.values())
            scheduled = self._batcher.form(batch, turn, state.limit, limit)
            if starved is not None and starved.seq_id >= 0 and not scheduled.has(batch.row_of(starved)):
                if not mark_changed(self._preemptor.preempt_for_slice(starved)):
                    return None
                continue
            if scheduled.new_blocks and not self._pool.can_allocate(turn.service, scheduled.new_blocks):
                if turn.prefill and not scheduled.prefills(batch):
                    return None
                mark_changed(self._preemptor.make_room(turn.service, scheduled.new_blocks))
                if starved is None:
                    waiting = ()  # the room is for running requests, not for admission
                continue
            admitter = Admitter(self._pool, self._admission, turn.service, self._store, scheduled)
            self._admit(admitter, waiting, starved)
            if admitter.admitted or admitter.rejected is None:
                break
            request, rejection = admitter.rejected
            done = self._preemptor.make_room_for(
                request, rejection, admitter.needed, starved=request is starved
            )
            if not mark_changed(done):
                break
            waiting = (request,)  # the room is for this request only
        if turn.prefill and not admitter.admitted and not scheduled.prefills(batch):
            return None
        if scheduled.empty and not admitter.admitted:
            return None
        return self._commit(turn.service, scheduled, admitter, now_ns)

    def _commit(self, service: str, scheduled: ScheduledBatch, admitter: Admitter, now_ns: int) -> StepPlan:
        state, admitted = self._services[service], admitter.admitted
        step = self._builder.commit(self._steps.planned, state, scheduled, admitted, now_ns)
        self._steps.report(1)
        return self._steps.begin(step)

    def _admit(
        self, admitter: Admitter, waiting: Iterable[RequestState], starved: RequestState | None
    ) -> None:
        """Admit from a turn's queue until a request is rejected, unless ``admit_every`` skips this step."""
        steps = self._steps
        running = self._registry.running
        if starved is None and running and steps.planned % self._admission.admit_every:
            return
        running += len(self._store.leases)
        admitter.admit_all(waiting, running, self._registry.max_running, steps.epoch, starved)
        if admitter.rejected is not None:
            self._runs.note_rejection(*admitter.rejected, steps.planned)

    def decode_run(self, now_ns: int, max_steps: int) -> DecodeRun | None:
        """As ``Scheduler.decode_run``."""
        in_flight = self._steps.in_flight
        if len(in_flight) >= self._options.max_in_flight:
            return None
        if not all(step.decodes_all(self._services[step.plan.service].running) for step in in_flight):
            return None
        return self._runs.next_run(now_ns, max_steps, self._steps.planned)

    def commit_run(self, run: DecodeRun, steps: int) -> tuple[StepPlan, Growth]:
        """As ``Scheduler.commit_run``."""
        state = self._services[run.service]
        self._steps.report(steps)
        growth = self._runs.grow(state, steps)
        step = self._builder.commit_run(self._steps.planned, state, steps, growth)
        return self._steps.begin(step), growth
