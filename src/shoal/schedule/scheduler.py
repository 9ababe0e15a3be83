"""The iteration scheduler: turns policies' choices into plans, and results into events."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from shoal.core import (
    FinishReason,
    Idle,
    InvalidRequest,
    Prompt,
    Request,
    StepPlan,
    StepResult,
    TokenEvent,
)
from shoal.core.slo import resolve_slo
from shoal.forecast import ServiceMonitor, make_predictor
from shoal.kvcache import BlockPool
from shoal.schedule.account import account
from shoal.schedule.commit import Committer, Flight
from shoal.schedule.compose import Share, compose, compose_all, compose_cohort, compose_slices, slice_blocks
from shoal.schedule.group import Beliefs, Group, GroupView
from shoal.schedule.intake import ServiceLimits, check_request, longest_total
from shoal.schedule.ledger import Ledger, OnEnd
from shoal.schedule.newcomers import Door, Refusal
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.orders import Standing, Turn
from shoal.schedule.room import Room
from shoal.schedule.running import Running
from shoal.schedule.skip import DecodeRun, Skipped
from shoal.schedule.skipper import Skipper
from shoal.schedule.starvation import Guard
from shoal.schedule.stats import Observed, SchedulerStats
from shoal.schedule.tracked import Tracked, hash_prompt, track
from shoal.schedule.victims import VICTIMS


class _Drain(Exception):
    """Memory is short, and plans in flight may free some: wait for them before anybody is evicted."""


class Scheduler:
    """Owner of all requests of one engine, and of their block tables.

    One plan at a time is made for one service: its decodes, then chunks of its unfinished prompts, then
    newcomers. The order policy proposes turns, the admission lets newcomers in, the victim policy makes room.
    host: pool of KV saved in host memory, where victims are to be swapped instead of computed again.
    on_end: told of every request that ends; reads what is known of it.
    on_steps: set it to be told of steps as they are planned, or before they are skipped: the number of the
    first, and how many; those running now are in all of them.

    Progress. When running requests need blocks and none is free, the pool is compacted, or victims are
    evicted until it fits; then nobody is admitted in that step. A newcomer evicts nobody, unless it may
    preempt those less urgent or has starved. The request admitted longest ago, over all services, is never
    a candidate (but for a starved one). It alone fits into the pool, because its ceiling does; so it runs to
    its end, the next then is the oldest, and two requests cannot evict each other for ever. A request that
    needs blocks is itself a candidate. Where requests own slices, nobody is evicted inside one; if all
    holders of memory wait for a slice that none can get, one of them is evicted.

    With plans in flight a shortage waits for them first: they may end requests. So a victim is never part
    of a plan in flight, and its blocks can be freed at once. Blocks of a request that ends while it is part
    of a later plan are freed at that plan's update.

    Looking again changes nothing: a head that was refused is not examined again before something happened.
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
        self._limits = services
        self._order = options.order
        self._admission = options.admission
        self._guard = Guard(round(options.starvation_s * 1e9))
        self._groups = {name: self._new_group(name) for name in services}
        self._ledger = Ledger(pool, self._groups, self._order, host, on_end)
        self._committer = Committer(pool, self._ledger, one_by_one=options.depth == 1)
        self._room = Room(pool, self._ledger, self._order, VICTIMS[options.victim](), self._admission)
        self._skipper = Skipper(pool, self._ledger, self._guard, options)
        self.on_steps: Callable[[int, int], None] | None = None
        self._flights: deque[Flight] = deque()
        self._submitted = 0
        self._steps = 0
        self._epoch = 0
        self._composed: tuple[int, Sequence[Tracked], Share] | None = None

    def _new_group(self, name: str) -> Group:
        limits = self._limits[name]
        longest = max(1, self.ceiling(name, 1))
        history = self._admission.new_history(longest)
        monitor = ServiceMonitor() if limits.execution_s is None else ServiceMonitor(limits.execution_s)
        predictor = make_predictor(self._lengths(), longest, history)
        return Group(
            self._pool.layout.services[name],
            self._pool.block_size,
            Beliefs(history, monitor, predictor),
            self._guard.due_ns,
            lambda one: self._ledger.publish(one) if self._pool.prefix_caching else None,
            slo=limits.slo,
            execution_s=limits.execution_s,
            quota=limits.quota,
        )

    def _lengths(self) -> str:
        """The name of the length predictor; ``history`` only where somebody reads what it says."""
        read = self._order.reads_lengths or self._admission.reads_lengths
        return self.options.lengths if read or self.options.lengths != "history" else "maximum"

    @property
    def groups(self) -> Mapping[str, GroupView]:
        """What policies see of each service, for those who watch a scheduler; not to be changed."""
        return self._groups

    @property
    def unfinished(self) -> int:
        """Requests submitted and not yet ended."""
        return len(self._ledger.requests)

    @property
    def waiting(self) -> int:
        """Requests that hold no memory."""
        return sum([len(group.waiting) for group in self._groups.values()])

    @property
    def running(self) -> int:
        """Requests that hold memory."""
        return sum([len(group.rows) for group in self._groups.values()])

    @property
    def in_flight(self) -> int:
        """Plans made and not yet updated."""
        return len(self._flights)

    def ceiling(self, service: str, prompt_tokens: int) -> int:
        """Most output tokens that such a prompt leaves room for; below 1 where it leaves none."""
        return longest_total(self._pool, service, self._limits[service]) - prompt_tokens

    def submit(self, request: Request, now_ns: int) -> None:
        """Queue a request; raises as ``submit_all`` does."""
        self.submit_all((request,), now_ns)

    def submit_all(self, requests: Sequence[Request], now_ns: int) -> None:
        """Queue all of ``requests`` or none. A prompt that neighbours share, as choices do, is hashed once.

        Raises:
            InvalidRequest: one of them can never be served as asked, or its id is in use.
        """
        ceilings = []
        for request in requests:
            if request.id in self._ledger.requests:
                raise InvalidRequest(
                    f"request id {request.id!r} is in use by an unfinished request", param="id"
                )
            ceilings.append(check_request(request, self._limits, self._pool))
        hashed: Prompt | None = None
        hashes: list[bytes] = []
        for request, ceiling in zip(requests, ceilings, strict=True):
            if self._pool.prefix_caching and request.prompt is not hashed:
                hashed, hashes = request.prompt, hash_prompt(request.prompt, self._pool.block_size)
            self._queue(request, ceiling, hashes, now_ns)

    def _queue(self, request: Request, ceiling: int, hashes: Sequence[bytes], now_ns: int) -> None:
        eos = self._limits[request.service].eos_token_ids
        one = track(request, self._submitted, ceiling, eos, hashes)
        group = self._groups[request.service]
        one.slo = resolve_slo(request.slo, group.slo, group.execution_s)
        one.predicted = group.beliefs.predictor.predict(request, 0, one.ceiling)
        self._submitted += 1
        self._ledger.add(one, now_ns)

    def cancel(
        self, request_id: str, now_ns: int, reason: FinishReason = FinishReason.CANCELLED
    ) -> TokenEvent | None:
        """End a request early; returns its last event, or None.

        reason: CANCELLED, or STOP where its text is complete: only then its length is remembered.
        A request that is part of a plan in flight ends at that plan's update, which then has the event. An
        unknown id is one that has ended already: nothing happens.
        """
        one = self._ledger.requests.get(request_id)
        if one is None:
            return None
        group = self._groups[one.service]
        group.settle()
        if one.in_flight:
            group.ending += one.ending is None
            one.ending = reason
            return None
        self._epoch += 1
        return self._ledger.end(one, reason, now_ns)

    def schedule(self, now_ns: int) -> StepPlan | Idle:
        """Commit the next plan; Idle where there is nothing to do before an event (or before its time)."""
        if len(self._flights) >= self.options.depth:
            return Idle()
        try:
            plan = self._serve_starved(now_ns)
            while plan is None:
                standing = Standing(self._groups, self._steps)
                decision = self._order.decide(standing, now_ns)
                epoch = self._epoch
                plan = self._first(decision.turns)
                # A turn that made room may have evicted the very requests it was for.
                if plan is None and epoch == self._epoch and not self._unstick():
                    return self._idle(decision.until_ns, now_ns)
        except _Drain:
            return Idle()
        return plan

    def _first(self, turns: Sequence[Turn]) -> StepPlan | None:
        for turn in turns:
            plan = self._take(turn)
            if plan is not None:
                return plan
        return None

    def _serve_starved(self, now_ns: int) -> StepPlan | None:
        for one in self._guard.starving(self._groups.values(), now_ns):
            group = self._groups[one.service]
            if one.sequence is None:
                turn = Turn(one.service, (), (one,), prefill=True)
            elif one in group.prefills:
                turn = Turn(one.service, (one,))
            else:
                turn = Turn(one.service, [one, *(other for other in group.running if other is not one)])
            plan = self._take(turn, urgent=one)
            if plan is not None:
                if one in self._flights[-1].requests:
                    self._guard.served(group, now_ns)
                return plan
        return None

    def _idle(self, until_ns: int | None, now_ns: int) -> Idle:
        if self._flights or not self.unfinished:
            return Idle(until_ns)
        starves_ns = self._guard.next_ns(self._groups.values(), now_ns)
        times = [time for time in (until_ns, starves_ns) if time is not None]
        return Idle(min(times, default=None))

    def _take(self, turn: Turn, urgent: Tracked | None = None) -> StepPlan | None:
        """The plan for a turn, or None if it comes to nothing.

        urgent: a starved request that the turn is for; as a newcomer it evicts whom it must.
        """
        evicted = False
        waiting = turn.waiting
        while True:
            share = self._share(turn)
            if urgent is not None and urgent.sequence is not None and not share.has(urgent):
                if not self._help_to_slice(urgent):
                    return None
                continue
            if not self._pool.can_allocate(turn.service, share.claimed):
                if turn.prefill and not self._prefills(turn, share):
                    return None
                self._make_room(turn.service, share.claimed)
                evicted = True
                continue
            if evicted and urgent is None:
                door = None
                break
            door = self._let_in(turn.service, waiting, share, urgent)
            if door is None or door.joined or door.refused is None or not self._make_way(door, urgent):
                break
            # Way was made for this one; nobody else, least of all who made it, is to take it.
            waiting = (door.refused[0],)
        newcomers = [] if door is None else door.joined
        if turn.prefill and not newcomers and not self._prefills(turn, share):
            return None
        if not (share.decodes or share.chunks or newcomers):
            return None
        blocks = self._pool.allocate(turn.service, share.claimed)
        assert blocks is not None
        flight = self._committer.commit(self._steps, self._groups[turn.service], share, newcomers, blocks)
        self._flights.append(flight)
        if self.on_steps is not None:
            self.on_steps(self._steps, 1)
        self._steps += 1
        self._epoch += 1
        return flight.plan

    def _prefills(self, turn: Turn, share: Share) -> bool:
        """Whether running requests compute part of a prompt; its last token alone looks like a decode."""
        return bool(share.chunks) or any(map(share.has, self._groups[turn.service].prefills))

    def _share(self, turn: Turn) -> Share:
        """What the turn's running requests would compute; kept for a second turn of the same ones."""
        if self._composed is not None:
            epoch, running, share = self._composed
            if epoch == self._epoch and running is turn.running:
                return share
        budget, size = self.options.max_batched_tokens, self._pool.block_size
        slice_tokens = self._admission.slice_tokens
        group = self._groups[turn.service]
        if slice_tokens is None:
            together = compose_cohort(group, budget, size) if turn.running is group.running else None
            if together is None and isinstance(turn.running, Running):
                together = compose_all(group, turn.running, budget, size)
            share = compose(turn.running, budget, size) if together is None else together
        else:
            share = compose_slices(
                turn.running,
                budget,
                size,
                slice_tokens,
                lambda blocks: self._pool.can_allocate(turn.service, blocks),
            )
        self._composed = (self._epoch, turn.running, share)
        return share

    def _let_in(
        self, service: str, waiting: Iterable[Tracked], share: Share, urgent: Tracked | None
    ) -> Door | None:
        """Admit from a turn's queue until somebody is refused; None where nobody may be asked."""
        running = self._room.holders()
        if running and urgent is None and self._steps % self._admission.admit_every:
            return None
        budget = share.budget
        door = Door(
            self._pool,
            self._admission,
            service,
            self._groups,
            share.claimed,
            self._ledger.ends,
        )
        for one in door.announced(waiting):
            if budget == 0 or (one.refused_epoch == self._epoch and urgent is None):
                break
            if running >= self.options.max_running:
                spent: int | Refusal = Refusal.MEMORY
            else:
                spent = door.admit(one, budget, always=running == 0 or one is urgent)
            if isinstance(spent, Refusal):
                one.refused_epoch = self._epoch
                door.refused = (one, spent)
                if spent is Refusal.MEMORY:
                    self._skipper.refused(one, self._steps)
                break
            budget -= spent
            running += 1
        return door

    def _make_way(self, door: Door, urgent: Tracked | None) -> bool:
        """Do something so that the request refused at the door may get in now; whether anything was done."""
        if door.refused is None:
            return False
        one, refusal = door.refused
        try:
            if refusal is Refusal.FRAGMENTED:
                self._require_drained()
                done = self._room.compact(one.service, door.needed)
            elif refusal is Refusal.MEMORY and (self.options.preempt or urgent is not None):
                done = self._preempt(one, starved=urgent is not None)
            else:
                done = False
        except _Drain:
            one.refused_epoch = -1  # it is to be looked at again as soon as the pipeline is empty
            raise
        if done:
            self._epoch += 1
        return done

    def _preempt(self, one: Tracked, *, starved: bool) -> bool:
        """Evict those who must give way to ``one``, the least urgent first, if enough of them can."""
        weaker = self._room.weaker(one, starved=starved)
        if not weaker or not self._room.would_fit(one, weaker, always=starved):
            return False
        self._require_drained()
        few, enough = 0, len(weaker)
        while enough - few > 1:
            half = (few + enough) // 2
            if self._room.would_fit(one, weaker[-half:], always=starved):
                enough = half
            else:
                few = half
        for victim in weaker[-enough:]:
            victim.displaced += starved
            self._ledger.evict(victim)
        return True

    def _help_to_slice(self, one: Tracked) -> bool:
        """A starved holder of memory gets no slice: evict another who is between slices, if there is any."""
        if self._admission.slice_tokens is None:
            return False
        others = [other for other in self._room.weaker(one, starved=True) if other is not one]
        if not others or one.expected < one.slice_end:
            return False
        self._require_drained()
        others[-1].displaced += 1
        self._ledger.evict(others[-1])
        self._epoch += 1
        return True

    def _make_room(self, service: str, blocks: int) -> None:
        """Free memory for running requests: in pieces that are there, or else somebody's."""
        self._require_drained()
        if not self._room.compact(service, blocks):
            self._room.evict_one()
        self._epoch += 1

    def _unstick(self) -> bool:
        """Where all holders of memory wait for a slice, help one to it or evict one; whether that was so."""
        slice_tokens = self._admission.slice_tokens
        holders = [one for group in self._groups.values() for one in group.running]
        if slice_tokens is None or self._flights or len(holders) < 2:
            return False
        for one in holders:
            blocks = slice_blocks(one, slice_tokens, self._pool.block_size) - len(one.blocks)
            if self._room.compact(one.service, blocks):
                break
        else:
            self._room.evict_one()
        self._epoch += 1
        return True

    def _require_drained(self) -> None:
        if self._flights:
            raise _Drain

    def update(self, plan: StepPlan, result: StepResult, now_ns: int) -> list[TokenEvent]:
        """Account for what the oldest plan in flight produced; returns one event for each request it changed.

        Raises:
            ValueError: the plan is not the oldest in flight, or the result has another number of tokens.
        """
        if not self._flights or self._flights[0].plan is not plan:
            oldest = self._flights[0].plan.number if self._flights else "none"
            raise ValueError(f"update of plan {plan.number}, but the oldest in flight is {oldest}")
        if len(result.tokens) != len(plan.sampled):
            raise ValueError(
                f"plan {plan.number} samples {len(plan.sampled)} tokens, got {len(result.tokens)}"
            )
        flight = self._flights.popleft()
        self._epoch += 1
        self._pool.free(plan.service, flight.borrowed)
        self._ledger.free_saved(plan.service, flight.saved)
        self._executed(flight, result)
        return account(flight, result, self._ledger, self._pool, now_ns)

    def _executed(self, flight: Flight, result: StepResult) -> None:
        """Tell the group of a plan that its requests took part in a step."""
        plan = flight.plan
        self._groups[plan.service].executed(
            result.duration_ns,
            flight.admissions if flight.everybody else None,
            everybody=len(plan.sampled) == len(plan.sequences),
        )

    def decode_run(self, now_ns: int, most: int) -> DecodeRun | None:
        """The decode steps, at most ``most``, that could be made from ``now_ns`` on without a decision.

        None where the next step is or may be something else. Changes nothing.
        """
        return None if self._flights else self._skipper.foresee(now_ns, most, self._steps)

    def skip(
        self,
        run: DecodeRun,
        start_ns: int,
        ends_ns: Sequence[int],
        on_plan: Callable[[StepPlan], None] | None = None,
    ) -> Skipped:
        """Account for the first steps of a run, as if each had been scheduled, executed and updated.

        ends_ns: when each step ended; the first began at ``start_ns``, each other when the one before ended.
        on_plan: told of the plans that were not made, in order.
        """
        first, steps = self._steps, len(ends_ns)
        if self.on_steps is not None:
            self.on_steps(first, steps)
        self._steps += steps
        self._epoch += 2 * steps
        return self._skipper.account(run, first, start_ns, ends_ns, on_plan)

    def stats(self) -> SchedulerStats:
        """Counts so far."""
        return self._ledger.stats(self._steps)

    def observed(self, now_ns: int) -> dict[str, Observed]:
        """What was learned of each service; reads all requests of the windows, unlike ``stats``."""
        return {name: group.beliefs.observed(now_ns) for name, group in self._groups.items()}
