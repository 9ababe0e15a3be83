"""The iteration scheduler: turns policies' choices into plans, and results into events."""

from collections import deque
from collections.abc import Mapping, Sequence

from shoal.core import (
    FinishReason,
    Idle,
    InvalidRequest,
    Request,
    StepPlan,
    StepResult,
    TokenEvent,
)
from shoal.kvcache import BlockPool
from shoal.schedule.account import account
from shoal.schedule.commit import Committer, Flight
from shoal.schedule.compose import Share, compose
from shoal.schedule.group import Group
from shoal.schedule.intake import ServiceLimits, check_request, longest_total
from shoal.schedule.ledger import Ledger
from shoal.schedule.newcomers import Door, Newcomer
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.orders import ORDERS, Standing, Turn
from shoal.schedule.stats import SchedulerStats
from shoal.schedule.tracked import Tracked, track
from shoal.schedule.victims import VICTIMS, Shortage


class _Drain(Exception):
    """Memory is short, and plans in flight may free some: wait for them before anybody is evicted."""


class Scheduler:
    """Owner of all requests of one engine, and of their block tables.

    One plan at a time is made for one service: its decodes, then chunks of its unfinished prompts, then
    newcomers. The order policy proposes turns, the admission lets newcomers in, the victim policy makes room.

    Progress. When running requests need blocks and none is free, victims are evicted until it fits; a
    newcomer evicts nobody, and nobody is admitted in that step. The request admitted longest ago, over all
    services, is never a candidate, whatever the policy. It alone fits into the pool, because its ceiling
    does; so it runs to its end, the next then is the oldest, and two requests cannot evict each other for
    ever. A request that needs blocks is itself a candidate.

    With plans in flight a shortage waits for them first: they may end requests. So a victim is never part
    of a plan in flight, and its blocks can be freed at once. Blocks of a request that ends while it is part
    of a later plan are freed at that plan's update.

    Looking again changes nothing: a head that was refused is not examined again before something happened.
    """

    def __init__(
        self, pool: BlockPool, services: Mapping[str, ServiceLimits], options: SchedulerOptions
    ) -> None:
        self.options = options
        self._pool = pool
        self._limits = services
        self._order = ORDERS[options.order]()
        self._victim = VICTIMS[options.victim]()
        self._admission = options.admission
        self._groups = {
            name: Group(
                pool.layout.services[name],
                pool.block_size,
                self._admission.new_history(max(1, self.ceiling(name, 1))),
            )
            for name in services
        }
        self._ledger = Ledger(pool, self._groups)
        self._committer = Committer(pool, self._ledger)
        self._flights: deque[Flight] = deque()
        self._submitted = 0
        self._steps = 0
        self._epoch = 0
        self._composed: tuple[int, Sequence[Tracked], Share] | None = None

    @property
    def unfinished(self) -> int:
        """Requests submitted and not yet ended."""
        return len(self._ledger.requests)

    @property
    def in_flight(self) -> int:
        """Plans made and not yet updated."""
        return len(self._flights)

    def ceiling(self, service: str, prompt_tokens: int) -> int:
        """Most output tokens that such a prompt leaves room for; below 1 where it leaves none."""
        return longest_total(self._pool, service, self._limits[service]) - prompt_tokens

    def submit(self, request: Request, now_ns: int) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: it can never be served as asked, or its id is in use.
        """
        if request.id in self._ledger.requests:
            raise InvalidRequest(f"request id {request.id!r} is in use by an unfinished request", param="id")
        ceiling = check_request(request, self._limits, self._pool)
        eos = self._limits[request.service].eos_token_ids
        hashed = self._pool.block_size if self._pool.prefix_caching else None
        one = track(request, self._submitted, ceiling, eos, hashed)
        self._submitted += 1
        self._ledger.add(one)

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
        if one.in_flight:
            one.ending = reason
            return None
        self._epoch += 1
        return self._ledger.end(one, reason)

    def schedule(self, now_ns: int) -> StepPlan | Idle:
        """Commit the next plan; Idle where there is nothing to do before an event (or before its time)."""
        if len(self._flights) >= self.options.depth:
            return Idle()
        decision = self._order.decide(Standing(self._groups, self._steps, self._ledger.admissions), now_ns)
        for turn in decision.turns:
            try:
                plan = self._take(turn)
            except _Drain:
                return Idle()
            if plan is not None:
                return plan
        return Idle(decision.until_ns)

    def _take(self, turn: Turn) -> StepPlan | None:
        """The plan for a turn, or None if it comes to nothing."""
        pool = self._pool
        share = self._share(turn)
        newcomers = self._let_in(turn, share)
        if turn.prefill and not newcomers and not share.chunks:
            return None
        while (blocks := pool.allocate(turn.service, share.claimed)) is None:
            self._evict()
            share = self._share(turn)
        if not (share.decodes or share.chunks or newcomers):
            return None
        flight = self._committer.commit(self._steps, self._groups[turn.service], share, newcomers, blocks)
        self._flights.append(flight)
        self._steps += 1
        self._epoch += 1
        return flight.plan

    def _share(self, turn: Turn) -> Share:
        """What the turn's running requests would compute; kept for a second turn of the same ones."""
        if self._composed is not None:
            epoch, running, share = self._composed
            if epoch == self._epoch and running is turn.running:
                return share
        share = compose(turn.running, self.options.max_batched_tokens, self._pool.block_size)
        self._composed = (self._epoch, turn.running, share)
        return share

    def _let_in(self, turn: Turn, share: Share) -> list[Newcomer]:
        running = sum(len(group.running) for group in self._groups.values())
        if running and self._steps % self._admission.admit_every:
            return []
        if not self._pool.can_allocate(turn.service, share.claimed):
            return []
        door: Door | None = None
        budget = share.budget
        for one in turn.waiting:
            if budget == 0 or running == self.options.max_running or one.refused_epoch == self._epoch:
                break
            if door is None:
                group = self._groups[turn.service]
                others = [other for other in self._groups.values() if other is not group and other.running]
                door = Door(self._pool, self._admission, group, others, share.claimed)
            spent = door.admit(one, budget, always=running == 0)
            if spent == 0:
                one.refused_epoch = self._epoch
                if one.refused_at is None:
                    one.refused_at = self._ledger.admissions
                break
            budget -= spent
            running += 1
        return [] if door is None else door.joined

    def _evict(self) -> None:
        """Take the KV of one running request; it waits again with its tokens."""
        if self._flights:
            raise _Drain
        everybody = [one for group in self._groups.values() for one in group.running]
        everybody.sort(key=lambda one: one.sequence or 0)
        crowds = {name: group.crowd() for name, group in self._groups.items()}
        one = self._victim.choose(Shortage(everybody[1:], self._groups, crowds, self._pool.capacity))
        self._ledger.evict(one)
        self._epoch += 1

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
        self._groups[plan.service].changed(members=False)
        return account(flight, result, self._ledger, self._pool)

    def stats(self) -> SchedulerStats:
        """Counts so far."""
        return self._ledger.stats(self._steps)
