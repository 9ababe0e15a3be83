"""Main loop of the scheduler: starved requests, then turns of the order; admission, preemption, next plan."""

import sys
from collections.abc import Iterable

from shoal.core import Idle, StepPlan
from shoal.kvcache import BlockPool
from shoal.schedule.admitter import Admitter
from shoal.schedule.batching import Batcher
from shoal.schedule.decode_runs import DecodeRuns
from shoal.schedule.inter_token_latency import InterTokenLatencyGuard
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.plan_builder import PlanBuilder
from shoal.schedule.policies.orders import Turn
from shoal.schedule.policies.view import SchedulerView
from shoal.schedule.preemption import Preemptor, WaitForInFlight
from shoal.schedule.recovery import prepend_suspect_turns
from shoal.schedule.request_state import RequestState
from shoal.schedule.request_store import RequestStore
from shoal.schedule.residency import Residency
from shoal.schedule.service_registry import ServiceRegistry
from shoal.schedule.starvation import next_starvation_ns, starved_turns
from shoal.schedule.step_tracker import StepTracker


class PlanChooser:
    """Chooses the next plan, and commits it."""

    def __init__(
        self,
        pool: BlockPool,
        store: RequestStore,
        registry: ServiceRegistry,
        options: SchedulerOptions,
        steps: StepTracker,
        builder: PlanBuilder,
        decode_runs: DecodeRuns,
        residency: Residency,
    ) -> None:
        self._pool = pool
        self._store = store
        self._registry = registry
        self._steps = steps
        self._builder = builder
        self._decode_runs = decode_runs
        self._residency = residency
        self._itl_guard = InterTokenLatencyGuard(round(options.max_token_gap_s * 1e9))
        self._services = registry.steppable
        self._order, self._admission = options.order, options.admission
        self._batcher = Batcher(pool, self._admission.slice_tokens)
        self._preemptor = Preemptor(pool, store, registry.weights, options, steps.in_flight)

    def choose(self, now_ns: int) -> StepPlan | Idle:
        """Commit the next plan; Idle if there is nothing to do before an event (or its ``until_ns``)."""
        steps = self._steps
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
        for request, turn in starved_turns(self._services, now_ns):
            plan = self._plan_turn(turn, now_ns, starved=request)
            if plan is not None:
                if request in self._steps.in_flight[-1].parts[0].requests:
                    self._services[turn.service].starved_served_ns = now_ns
                return plan
        return None

    def _idle(self, until_ns: int | None, now_ns: int) -> Idle:
        store = self._store
        decides_ns = self._residency.settled_until(now_ns)
        if decides_ns < sys.maxsize:
            until_ns = min(decides_ns, sys.maxsize if until_ns is None else until_ns)
        if self._steps.in_flight or not store.requests:
            return Idle(until_ns)
        starves_ns = next_starvation_ns(self._services.values())
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
            admitter = Admitter(
                self._pool, self._admission, turn.service, self._store, self._services, scheduled
            )
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
        return self._builder.commit(state, scheduled, admitter.admitted, now_ns)

    def _admit(
        self, admitter: Admitter, waiting: Iterable[RequestState], starved: RequestState | None
    ) -> None:
        """Admit from a turn's queue until a request is rejected, unless ``admit_every`` skips this step."""
        steps = self._steps
        running = sum([len(state.running) for state in self._services.values()])
        if starved is None and running and steps.planned % self._admission.admit_every:
            return
        running += len(self._store.leases)
        admitter.admit_all(waiting, running, self._registry.max_running, steps.epoch, starved)
        if admitter.rejected is not None:
            self._decode_runs.note_rejection(*admitter.rejected)
