"""The iteration scheduler: turns policies' choices into plans, and results into events."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from shoal.core import (
    FinishReason,
    Idle,
    InvalidRequest,
    Request,
    StepPlan,
    StepResult,
    TokenEvent,
)
from shoal.core.slo import resolve_slo
from shoal.forecast import ServiceMonitor, make_predictor
from shoal.kvcache import BlockPool
from shoal.schedule.admitter import Admitter, Rejection
from shoal.schedule.batching import ScheduledBatch, form_batch, form_slices, next_slice_blocks
from shoal.schedule.decode_runs import DecodeRun, DecodeRuns, Growth
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.orders import Turn
from shoal.schedule.output import OutputProcessor, check_result
from shoal.schedule.planning import InFlightStep, Planner
from shoal.schedule.preemption import Preemptor
from shoal.schedule.request_state import RequestState, hash_prompt, new_request_state
from shoal.schedule.request_store import OnEnd, RequestStore
from shoal.schedule.service_state import ServiceState, ServiceStatistics
from shoal.schedule.starvation import StarvationGuard
from shoal.schedule.stats import Observed, SchedulerStats
from shoal.schedule.validation import ServiceLimits, check_request, longest_total
from shoal.schedule.victims import VICTIMS
from shoal.schedule.view import SchedulerView, ServiceView


class _Drain(Exception):
    """Memory is short, and plans in flight may free some: wait for them before anybody is preempted."""


class Scheduler:
    """Owner of all requests of one engine, and of their block tables.

    One plan at a time is made for one service: its decodes, then chunks of its unfinished prompts, then
    requests that wait. The order proposes turns, the admission says who fits, the victim policy makes room.
    host: pool of KV saved in host memory, where preempted KV is to be swapped instead of computed again.
    on_end: told of every request that ends.

    Progress. When running requests need blocks and none is free, the pool is compacted, or requests are
    preempted until it fits; then nobody is admitted in that step. A request that waits preempts nobody,
    unless it may preempt those less urgent or has starved. The request admitted longest ago, over all
    services, is never a candidate (but for a starved one). It alone fits into the pool, because the most it
    may take does; so it runs to its end, the next then is the oldest, and two requests cannot preempt each
    other for ever. A request that needs blocks is itself a candidate. Where requests own slices, nobody is
    preempted inside one; if all holders of memory wait for a slice that none can get, one of them is
    preempted.

    With plans in flight a shortage waits for them first: they may end requests. So a preempted request is
    never part of a plan in flight, and its blocks can be freed at once. Blocks of a request that ends while
    it is part of a later plan are freed at that plan's update.

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
        self.on_steps: Callable[[int, int], None] | None = None
        """Set it to be told of steps as they are planned: the number of the first, and how many; those
        running now are in all of them."""
        self._pool = pool
        self._limits = services
        self._order = options.order
        self._admission = options.admission
        self._guard = StarvationGuard(round(options.starvation_s * 1e9))
        self._services = {name: self._new_service(name) for name in services}
        self._store = RequestStore(pool, self._services, self._order, host, on_end)
        self._planner = Planner(pool, self._store)
        self._outputs = OutputProcessor(pool, self._store)
        self._preemptor = Preemptor(
            pool, self._store, self._order, VICTIMS[options.victim](), self._admission
        )
        self._runs = DecodeRuns(pool, self._store, self._guard, options)
        self._in_flight: deque[InFlightStep] = deque()
        self._num_submitted = 0
        self._num_steps = 0
        self._epoch = 0
        """Goes up with everything that happens; in the same epoch a second look is the same as the first."""

    def _new_service(self, name: str) -> ServiceState:
        limits = self._limits[name]
        longest = max(1, self.most_tokens(name, 1))
        history = self._admission.new_history(longest)
        monitor = ServiceMonitor() if limits.execution_s is None else ServiceMonitor(limits.execution_s)
        read = self._order.reads_lengths or self._admission.reads_lengths
        lengths = self.options.lengths if read or self.options.lengths != "history" else "maximum"
        predictor = make_predictor(lengths, longest, history)
        return ServiceState(
            self._pool.layout.services[name],
            self._pool.block_size,
            ServiceStatistics(history, monitor, predictor),
            self._guard.due_ns,
            slo=limits.slo,
            execution_s=limits.execution_s,
            quota=limits.quota,
        )

    @property
    def services(self) -> Mapping[str, ServiceView]:
        """What policies see of each service, for those who watch a scheduler; not to be changed."""
        return self._services

    @property
    def unfinished(self) -> int:
        """Requests submitted and not yet ended."""
        return len(self._store.requests)

    @property
    def waiting(self) -> int:
        """Requests that hold no memory."""
        return sum([len(state.waiting) for state in self._services.values()])

    @property
    def running(self) -> int:
        """Requests that hold memory."""
        return sum([len(state.running) for state in self._services.values()])

    @property
    def in_flight(self) -> int:
        """Plans made and not yet updated."""
        return len(self._in_flight)

    def most_tokens(self, service: str, prompt_tokens: int) -> int:
        """Most output tokens that such a prompt leaves room for; below 1 where it leaves none."""
        return longest_total(self._pool, service, self._limits[service]) - prompt_tokens

    def submit(self, request: Request, now_ns: int) -> None:
        """Queue a request; raises as ``submit_all`` does."""
        self.submit_all((request,), now_ns)

    def submit_all(self, requests: Sequence[Request], now_ns: int) -> None:
        """Queue all of ``requests`` or none.

        Neighbours with the same prompt object are choices of one call: it is hashed and computed once.

        Raises:
            InvalidRequest: one of them can never be served as asked, or its id is in use.
        """
        most = []
        for request in requests:
            if request.id in self._store.requests:
                raise InvalidRequest(
                    f"request id {request.id!r} is in use by an unfinished request", param="id"
                )
            most.append(check_request(request, self._limits, self._pool))
        choices: list[RequestState] = []
        hashes: list[bytes] = []
        for request, most_tokens in zip(requests, most, strict=True):
            if not choices or request.prompt is not choices[0].request.prompt:
                choices = []
                if self._pool.prefix_caching:
                    hashes = hash_prompt(request.prompt, self._pool.block_size)
            choices.append(self._queue(request, most_tokens, hashes, now_ns))
            if len(choices) > 1:
                for choice in choices:
                    choice.choices = choices

    def _queue(
        self, request: Request, most_tokens: int, hashes: Sequence[bytes], now_ns: int
    ) -> RequestState:
        eos = self._limits[request.service].eos_token_ids
        waiting = new_request_state(request, self._num_submitted, most_tokens, eos, hashes)
        state = self._services[request.service]
        waiting.slo = resolve_slo(request.slo, state.slo, state.execution_s)
        predictor = state.statistics.predictor
        waiting.predicted_tokens = predictor.predict(request, 0, waiting.max_new_tokens)
        self._num_submitted += 1
        self._store.add(waiting, now_ns)
        return waiting

    def cancel(
        self, request_id: str, now_ns: int, reason: FinishReason = FinishReason.CANCELLED
    ) -> TokenEvent | None:
        """End a request early; returns its last event, or None.

        reason: CANCELLED, or STOP where its text is complete: only then its length is remembered.
        A request that is part of a plan in flight ends at that plan's update, which then has the event. An
        unknown id is one that has ended already: nothing happens.
        """
        request = self._store.requests.get(request_id)
        if request is None:
            return None
        if request.seq_id >= 0:
            batch = self._services[request.service].running
            row = batch.row_of(request)
            if batch.in_flight[row]:
                request.ending = reason
                batch.is_ending[row] = 1
                return None
        self._epoch += 1
        return self._store.end(request, reason, now_ns)

    def schedule(self, now_ns: int) -> StepPlan | Idle:
        """Commit the next plan; Idle where there is nothing to do before an event (or before its time)."""
        if len(self._in_flight) >= self.options.depth:
            return Idle()
        if self.options.max_iterations > 1:
            run = self.decode_run(now_ns, self.options.max_iterations)
            if run is not None and run.steps > 1:
                return self.commit_run(run, run.steps)[0]
        try:
            plan = self._serve_starved(now_ns)
            while plan is None:
                decision = self._order.decide(SchedulerView(self._services, self._num_steps), now_ns)
                epoch = self._epoch
                for turn in decision.turns:
                    plan = self._take(turn)
                    if plan is not None:
                        return plan
                # A turn that made room may have preempted the very requests it was for.
                if epoch == self._epoch and not self._unstick():
                    return self._idle(decision.until_ns)
        except _Drain:
            return Idle()
        return plan

    def _serve_starved(self, now_ns: int) -> StepPlan | None:
        for request in self._guard.starving(self._services.values(), now_ns):
            state = self._services[request.service]
            batch = state.running
            keys = None
            if request.seq_id < 0:
                turn = Turn(request.service, np.zeros(0, dtype=np.int64), waiting=(request,), prefill=True)
            elif batch.prefilling[batch.row_of(request)]:
                turn = Turn(request.service, np.array([request.seq_id]))
            else:
                keys = (batch.seq_id != request.seq_id).astype(np.float64)
                turn = Turn(request.service, batch.seq_id.copy(), keys)
            plan = self._take(turn, urgent=request)
            if plan is not None:
                if request in self._in_flight[-1].requests:
                    self._guard.served(state, now_ns)
                return plan
        return None

    def _idle(self, until_ns: int | None) -> Idle:
        if self._in_flight or not self.unfinished:
            return Idle(until_ns)
        starves_ns = self._guard.next_ns(self._services.values())
        times = [time for time in (until_ns, starves_ns) if time is not None]
        return Idle(min(times, default=None))

    def _take(self, turn: Turn, urgent: RequestState | None = None) -> StepPlan | None:
        """The plan for a turn, or None if it comes to nothing.

        urgent: a starved request that the turn is for; if it waits, it preempts whom it must.
        """
        batch = self._services[turn.service].running
        made_room = False
        waiting = turn.waiting
        while True:
            scheduled = self._form(turn)
            if urgent is not None and urgent.seq_id >= 0 and not scheduled.has(batch.row_of(urgent)):
                if not self._help_to_slice(urgent):
                    return None
                continue
            if scheduled.new_blocks and not self._pool.can_allocate(turn.service, scheduled.new_blocks):
                if turn.prefill and not scheduled.prefills(batch):
                    return None
                self._make_room(turn.service, scheduled.new_blocks)
                made_room = True
                continue
            admitter = self._admit(turn.service, waiting, scheduled, urgent, allowed=not made_room)
            if admitter.admitted or admitter.rejected is None or not self._make_way(admitter, urgent):
                break
            # Way was made for this one; nobody else, least of all who made it, is to take it.
            waiting = (admitter.rejected[0],)
        if turn.prefill and not admitter.admitted and not scheduled.prefills(batch):
            return None
        if scheduled.empty and not admitter.admitted:
            return None
        return self._commit(turn.service, scheduled, admitter)

    def _form(self, turn: Turn) -> ScheduledBatch:
        """What the turn's running requests would compute."""
        batch = self._services[turn.service].running
        budget, size = self.options.max_batched_tokens, self._pool.block_size
        slice_tokens = self._admission.slice_tokens
        if slice_tokens is None:
            return form_batch(batch, turn, budget, size)
        return form_slices(
            batch,
            turn,
            budget,
            size,
            slice_tokens,
            lambda blocks: self._pool.can_allocate(turn.service, blocks),
        )

    def _commit(self, service: str, scheduled: ScheduledBatch, admitter: Admitter) -> StepPlan:
        blocks = self._pool.allocate(service, scheduled.new_blocks) if scheduled.new_blocks else []
        assert blocks is not None
        step = self._planner.commit(
            self._num_steps, self._services[service], scheduled, admitter.admitted, blocks
        )
        self._in_flight.append(step)
        if self.on_steps is not None:
            self.on_steps(self._num_steps, 1)
        self._num_steps += 1
        self._epoch += 1
        return step.plan

    def _admit(
        self,
        service: str,
        waiting: Iterable[RequestState],
        scheduled: ScheduledBatch,
        urgent: RequestState | None,
        *,
        allowed: bool,
    ) -> Admitter:
        """Admit from a turn's queue until somebody is rejected, if anybody is to be asked now."""
        admitter = Admitter(
            self._pool,
            self._admission,
            service,
            self._services,
            scheduled.new_blocks,
            self._store.num_ended,
        )
        running = self.running
        if urgent is None and (not allowed or (running and self._num_steps % self._admission.admit_every)):
            return admitter
        admitter.admit_all(waiting, scheduled.budget, running, self.options.max_running, self._epoch, urgent)
        if admitter.rejected is not None and admitter.rejected[1] is Rejection.MEMORY:
            self._runs.rejected(admitter.rejected[0], self._num_steps)
        return admitter

    def _make_way(self, admitter: Admitter, urgent: RequestState | None) -> bool:
        """Do something so that the rejected request may be admitted now; whether anything was done."""
        assert admitter.rejected is not None
        request, rejection = admitter.rejected
        try:
            if rejection is Rejection.FRAGMENTED:
                self._require_drained()
                done = self._preemptor.compact(request.service, admitter.needed)
            elif rejection is Rejection.MEMORY and (self.options.preempt_for_waiting or urgent is not None):
                done = self._preempt_for(request, starved=urgent is not None)
            else:
                done = False
        except _Drain:
            request.rejected_epoch = -1  # it is to be looked at again as soon as the pipeline is empty
            raise
        if done:
            self._epoch += 1
        return done

    def _preempt_for(self, request: RequestState, *, starved: bool) -> bool:
        """Preempt those who must give way to ``request``, the least urgent first, if enough of them can."""
        preemptible = self._preemptor.preemptible(request, starved=starved)
        if not preemptible or not self._preemptor.would_fit(request, preemptible, always=starved):
            return False
        self._require_drained()
        few, enough = 0, len(preemptible)
        while enough - few > 1:
            half = (few + enough) // 2
            if self._preemptor.would_fit(request, preemptible[-half:], always=starved):
                enough = half
            else:
                few = half
        for victim in preemptible[-enough:]:
            victim.num_preempted_by_starvation += starved
            self._store.preempt(victim)
        return True

    def _help_to_slice(self, request: RequestState) -> bool:
        """A starved holder of memory gets no slice: preempt another who is between slices, if any is."""
        if self._admission.slice_tokens is None:
            return False
        batch = self._services[request.service].running
        row = batch.row_of(request)
        others = self._preemptor.preemptible(request, starved=True)
        others = [other for other in others if other is not request]
        if not others or batch.num_tokens_with_in_flight[row] < batch.slice_end[row]:
            return False
        self._require_drained()
        others[-1].num_preempted_by_starvation += 1
        self._store.preempt(others[-1])
        self._epoch += 1
        return True

    def _make_room(self, service: str, blocks: int) -> None:
        """Free memory for running requests: in pieces that are there, or else somebody's."""
        self._require_drained()
        if not self._preemptor.compact(service, blocks):
            self._preemptor.preempt_one()
        self._epoch += 1

    def _unstick(self) -> bool:
        """Where all holders of memory wait for a slice, help one to it or preempt one; whether so."""
        slice_tokens = self._admission.slice_tokens
        if slice_tokens is None or self._in_flight or self.running < 2:
            return False
        for state in self._services.values():
            for blocks in next_slice_blocks(state.running, slice_tokens, self._pool.block_size):
                if self._preemptor.compact(state.service, blocks):
                    self._epoch += 1
                    return True
        self._preemptor.preempt_one()
        self._epoch += 1
        return True

    def _require_drained(self) -> None:
        if self._in_flight:
            raise _Drain

    def update(self, plan: StepPlan, result: StepResult, now_ns: int) -> list[TokenEvent]:
        """Process what the oldest plan in flight produced; returns one event for each request it changed.

        Raises:
            ValueError: the plan is not the oldest in flight, or the result does not fit it.
        """
        if not self._in_flight or self._in_flight[0].plan is not plan:
            oldest = self._in_flight[0].plan.number if self._in_flight else "none"
            raise ValueError(f"update of plan {plan.number}, but the oldest in flight is {oldest}")
        check_result(plan, result)
        step = self._in_flight.popleft()
        self._epoch += 1
        if step.pinned_blocks:
            self._pool.free(plan.service, step.pinned_blocks)
        self._store.free_swapped(plan.service, step.swapped_blocks)
        missing = plan.iterations - len(result.durations_ns)
        if missing:
            self._num_steps -= missing
            self._planner.withdraw(self._services[plan.service], missing)
        return self._outputs.process(step, result, now_ns)

    def decode_run(self, now_ns: int, most: int) -> DecodeRun | None:
        """The decode steps, at most ``most``, that could be made from ``now_ns`` on without a decision.

        None where the next step is or may be something else. Where a plan makes several, ``most`` is rounded
        up to whole plans. Changes nothing.
        """
        return None if self._in_flight else self._runs.foresee(now_ns, most, self._num_steps)

    def commit_run(self, run: DecodeRun, steps: int) -> tuple[StepPlan, Growth]:
        """The plan of the first ``steps`` of a run, as iterations, and when it takes which blocks.

        It leaves the same blocks as the plans of the run would, one after another; nobody may have come in
        between. ``update`` may be told of fewer iterations, of those of the last plan.
        """
        state = self._services[run.service]
        if self.on_steps is not None:
            self.on_steps(self._num_steps, steps)
        growth = self._runs.grow(state, steps)
        step = self._planner.commit_run(self._num_steps, state, steps, growth)
        self._in_flight.append(step)
        self._num_steps += steps
        self._epoch += 2 * steps
        return step.plan, growth

    def stats(self) -> SchedulerStats:
        """Counts so far."""
        return self._store.stats(self._num_steps)

    def observed(self, now_ns: int) -> dict[str, Observed]:
        """What was learned of each service; reads all requests of the windows, unlike ``stats``."""
        return {name: state.statistics.observed(now_ns) for name, state in self._services.items()}
