"""Skipping ahead inside the scheduler: when nothing has to be decided, and what is accounted for then."""

import sys
from collections.abc import Callable, Sequence
from itertools import accumulate, islice

from shoal.core import StepPlan
from shoal.kvcache import BlockPool
from shoal.schedule.account import end
from shoal.schedule.group import Group
from shoal.schedule.ledger import Ledger
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.skip import DecodeRun, Growth, Skipped, plans_of
from shoal.schedule.starvation import Guard
from shoal.schedule.tracked import Tracked


class Skipper:
    """Foresees runs of decode steps, and enters them into the books; asked while no plan is in flight."""

    def __init__(self, pool: BlockPool, ledger: Ledger, guard: Guard, options: SchedulerOptions) -> None:
        self._pool = pool
        self._ledger = ledger
        self._guard = guard
        self._options = options
        self._refused: tuple[Tracked, int, int] | None = None  # who, in which step, after how many ends

    def refused(self, one: Tracked, step: int) -> None:
        """There was no memory to let ``one`` in with ``step``."""
        self._refused = (one, step, self._ledger.ends)

    def foresee(self, now_ns: int, most: int, step: int) -> DecodeRun | None:
        """The run of at most ``most`` steps that begins with ``step`` at ``now_ns``, if there is one."""
        ledger, options = self._ledger, self._options
        groups = [group for group in ledger.groups.values() if group.running or group.waiting]
        if len(groups) != 1:
            return None
        [group] = groups
        if group.waiting and not options.order.steady:
            return None
        if not group.running or group.prefills or ledger.vacate or ledger.moved:
            return None
        most = min(most, self._without_newcomers(group, step))
        if most <= 0 or len(group.running) > options.max_batched_tokens:
            return None
        cohort = group.cohort
        if not cohort.rows and not cohort.form(group.rows):
            return None
        until_ns = self._guard.nobody_before_ns(group, cohort.served_ns)
        if until_ns <= now_ns:
            return None
        steps = self._within_memory(group, min(most, cohort.steps_left))
        return DecodeRun(group.service, cohort.sequences, steps, cohort.context, until_ns) if steps else None

    def _within_memory(self, group: Group, steps: int) -> int:
        """Steps for which all blocks can be had: ``steps``, halved until they can; not the most there are."""
        pool, cohort = self._pool, group.cohort
        if pool.can_allocate(group.service, len(cohort.rows) * (steps // pool.block_size + 1)):
            return steps
        while steps and not pool.can_allocate(group.service, cohort.blocks_within(steps)):
            steps //= 2
        return steps

    def _without_newcomers(self, group: Group, step: int) -> int:
        """Steps in which nobody who waits can be let in, as long as those running only decode."""
        if not group.waiting:
            return sys.maxsize
        admission = self._options.admission
        if admission.stays_refused and not self._options.preempt and self._refused is not None:
            one, when, ends = self._refused
            if one is group.waiting[0] and ends == self._ledger.ends and group.last_prefill < when:
                return sys.maxsize
        return -step % admission.admit_every

    def account(
        self,
        run: DecodeRun,
        first: int,
        start_ns: int,
        ends_ns: Sequence[int],
        on_plan: Callable[[StepPlan], None] | None,
    ) -> Skipped:
        """Enter the steps that ended at ``ends_ns``; ``first`` is the number of the first (see ``skip``)."""
        ledger, steps = self._ledger, len(ends_ns)
        group, left = ledger.groups[run.service], tuple(ledger.left)
        ledger.left.clear()
        growth: dict[int, Growth] = {}
        live = self._grow(group, steps, None if on_plan is None else growth)
        group.cohort.advance(start_ns, ends_ns)
        group.forget_columns()
        for other in ledger.groups.values():
            if other is not group:
                other.streak = 0
        group.streak += steps
        group.last_step = first + steps - 1
        group.changed(members=False)
        ledger.delivered(run.service, steps * len(run.sequences))
        if on_plan is not None:
            for plan in plans_of(run, first, steps, left, growth):
                on_plan(plan)
        for one in group.cohort.pop_complete():
            end(one, ledger, ends_ns[-1])
        return Skipped(run.sequences, left, live)

    def _grow(self, group: Group, steps: int, noted: dict[int, Growth] | None) -> list[int]:
        """Allocate what the next steps need, and extend the tables; returns the live blocks at each step."""
        pool, service, cohort = self._pool, group.service, group.cohort
        before, count = pool.live_blocks(service), len(cohort.rows)
        at_once = noted is None and _allocates_in_order(service, pool)
        if at_once and cohort.all_grow():
            blocks = _allocate(pool, service, count * steps)
            for row, one in enumerate(cohort.rows):
                one.blocks += blocks[row::count]
            cohort.grown(steps)
            return list(range(before + count, before + count * steps + 1, count))
        taken, growth = [0] * steps, list(cohort.growth(steps))
        for step, rows in growth:
            taken[step] = len(rows)
        ahead = iter(_allocate(pool, service, sum(taken)) if at_once else ())
        for step, rows in growth:
            blocks = list(islice(ahead, len(rows))) if at_once else _allocate(pool, service, len(rows))
            for one, block in zip(rows, blocks, strict=True):
                one.blocks.append(block)
            if noted is not None:
                noted[step] = tuple(
                    (one.sequence or 0, (block,)) for one, block in zip(rows, blocks, strict=True)
                )
        return list(accumulate(taken, initial=before))[1:]


def _allocates_in_order(service: str, pool: BlockPool) -> bool:
    """Whether the pool gives many blocks at once as it gives one after another."""
    whole = pool.layout.services[service].blocks_per_merged == 1
    return whole and pool.layout.kind == "merged" and not pool.prefix_caching


def _allocate(pool: BlockPool, service: str, count: int) -> list[int]:
    blocks = pool.allocate(service, count)
    assert blocks is not None
    return blocks
