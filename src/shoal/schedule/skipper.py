"""Skipping ahead inside the scheduler: when nothing has to be decided, and what is accounted for then."""

import sys
from collections.abc import Callable, Sequence

from shoal.core import StepPlan
from shoal.kvcache import BlockPool
from shoal.schedule.account import end
from shoal.schedule.group import Group
from shoal.schedule.ledger import Ledger
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.skip import DecodeRun, Growth, Skipped, advance, decodes_ahead, plans_of, within_memory
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
        ledger, options, pool = self._ledger, self._options, self._pool
        groups = [group for group in ledger.groups.values() if group.running or group.waiting]
        if len(groups) != 1 or not options.order.steady:
            return None
        [group] = groups
        running, service = group.running, group.service
        if not running or group.prefills or ledger.vacate or ledger.moved:
            return None
        most = min(most, self._without_newcomers(group, step))
        if most <= 0 or len(running) > options.max_batched_tokens:
            return None
        outlook = decodes_ahead(running, most, foreseen=options.admission.reads_lengths)
        if outlook is None:
            return None
        until_ns = self._guard.nobody_before_ns(group, outlook.served_ns)
        if until_ns <= now_ns:
            return None
        steps = within_memory(
            running, outlook.steps, pool.block_size, lambda count: pool.can_allocate(service, count)
        )
        return DecodeRun(service, running, steps, outlook.context, until_ns) if steps else None

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
        group, left, sequences = ledger.groups[run.service], tuple(ledger.left), run.sequences
        ledger.left.clear()
        growth: dict[int, Growth] = {}
        noted = None if on_plan is None else growth.__setitem__
        live, complete = advance(run.requests, run.service, self._pool, start_ns, ends_ns, noted)
        for other in ledger.groups.values():
            if other is not group:
                other.streak = 0
        group.streak += steps
        group.last_step = first + steps - 1
        group.changed(members=False)
        ledger.delivered(run.service, steps * len(sequences))
        if on_plan is not None:
            for plan in plans_of(run, sequences, first, steps, left, growth):
                on_plan(plan)
        if self._pool.prefix_caching:
            for one in run.requests:
                ledger.publish(one)
        for one in complete:
            end(one, ledger, ends_ns[-1])
        return Skipped(sequences, left, live)
