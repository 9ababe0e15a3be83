"""Runs of decode steps that need no decision: how many there are, and the blocks they take.

While one service alone has requests, all of them decode, and nobody else can be admitted, one step follows
another until something ends: nothing but counts change. Such steps are made as one plan with many iterations.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np

from shoal.core import StepPlan
from shoal.kvcache import BlockPool
from shoal.schedule.admitter import Rejection
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.request_state import RequestState
from shoal.schedule.request_store import RequestStore
from shoal.schedule.running_batch import IntArray, RunningBatch
from shoal.schedule.service_state import ServiceState
from shoal.schedule.starvation import StarvationGuard


class DecodeRun(NamedTuple):
    """Steps that the scheduler would plan one after another if nothing happened between them."""

    service: str
    """Whose steps they are."""
    rows: int
    """How many sequences decode in each."""
    steps: int
    """How many, at least 1."""
    context: int
    """Positions that the first step attends, over all rows; each further step attends one more per row."""
    until_ns: int
    """Every step must be planned before this time, or the first of its plan."""
    max_iterations: int
    """Most steps of a plan, as they would be planned one plan after another."""

    def planned(self, steps: int) -> int:
        """Steps in all that are planned until so many are made: those of whole plans."""
        return min(-(-steps // self.max_iterations) * self.max_iterations, self.steps)


class Growth(NamedTuple):
    """Blocks handed out to a run, in the order in which its steps would have got them."""

    grown: Sequence[tuple[int, tuple[int, ...]]]
    """(sequence, its blocks), as a plan has it."""
    first_steps: Sequence[int]
    """For which step each of these gets its first block, from 0; the others a block's tokens later each."""
    block_size: int
    """Tokens in a block."""
    live_before: int
    """Live blocks of the service before."""

    def live_blocks(self, steps: int, max_iterations: int) -> list[int]:
        """Live blocks of the service during each of so many steps, ``max_iterations`` to a plan."""
        taken = [0] * steps
        for (_, blocks), first in zip(self.grown, self.first_steps, strict=True):
            for step in range(first, first + len(blocks) * self.block_size, self.block_size):
                taken[step - step % max_iterations] += 1
        return list(accumulate(taken, initial=self.live_before))[1:]

    def plans(self, plan: StepPlan, max_iterations: int) -> Iterator[StepPlan]:
        """The plans that would have been made one after another, in place of one for the whole run."""
        by_plan: dict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
        for (seq_id, blocks), first in zip(self.grown, self.first_steps, strict=True):
            steps = range(first, first + len(blocks) * self.block_size, self.block_size)
            by_number = groupby(zip(steps, blocks, strict=True), key=lambda pair: pair[0] // max_iterations)
            for number, pairs in by_number:
                by_plan[number].append((seq_id, tuple([block for _, block in pairs])))
        for number, start in enumerate(range(0, plan.iterations, max_iterations)):
            yield replace(
                plan,
                number=plan.number + start,
                iterations=min(max_iterations, plan.iterations - start),
                left=plan.left if start == 0 else (),
                zero=plan.zero if start == 0 else (),
                grown=tuple(by_plan[number]),
            )


class DecodeRuns:
    """Finds runs of decode steps and the blocks for them."""

    def __init__(
        self, pool: BlockPool, store: RequestStore, guard: StarvationGuard, options: SchedulerOptions
    ) -> None:
        self._pool = pool
        self._store = store
        self._guard = guard
        self._options = options
        # Who was rejected as will be until somebody gives up blocks, in which step, after how many removals.
        self._rejected: tuple[RequestState, int, int] | None = None

    def rejected(self, request: RequestState, reason: Rejection, step: int) -> None:
        """``request`` could not be admitted with ``step``."""
        options = self._options
        stays = options.admission.stays_rejected and options.preempt_for_waiting == "never"
        if reason is Rejection.SLOTS or (reason is Rejection.MEMORY and stays):
            self._rejected = (request, step, self._removals())

    def _removals(self) -> int:
        """How often a place or memory was given up: by requests that ended, were preempted or left, which may
        keep their blocks until a plan in flight has ended, and by leases.
        """
        removals = sum([state.running.num_removals for state in self._store.services.values()])
        return removals + self._store.num_releases + self._store.leases.num_ended

    def next_run(self, now_ns: int, most: int, step: int) -> DecodeRun | None:
        """The run of at most ``most`` steps from ``step`` on, planned at ``now_ns``, if there is one.

        A run ends where one of its plans does; ``most`` is rounded up to whole plans. Plans in flight must be
        decodes of all that run.
        """
        store, options = self._store, self._options
        max_iterations = options.max_iterations
        states = [state for state in store.services.values() if len(state.running) or state.waiting]
        if len(states) != 1 or store.swap_out_copies or store.moved:
            return None
        [state] = states
        batch = state.running
        if state.waiting and not options.order.steady:
            return None
        if not len(batch) or len(batch) > state.limit.rows or np.count_nonzero(batch.prefilling):
            return None
        if state.limit.suspects() or np.count_nonzero(batch.is_ending) or np.count_nonzero(batch.postponed):
            return None
        most = -(-most // max_iterations) * max_iterations
        most = min(most, self._before_admission(state, step))
        most = most and min(most, _steps_left(batch))
        if most <= 0:
            return None
        until_ns = self._guard.earliest_starvation_ns(state)
        if (slo_expired_ns := state.waiting.next_slo_expired_ns) is not None:
            until_ns = min(until_ns, slo_expired_ns)  # the queue is another then
        if until_ns <= now_ns:
            return None
        steps = self._within_memory(state, most)
        context = sum(batch.num_tokens_with_in_flight.tolist())
        if not steps:
            return None
        return DecodeRun(state.service, len(batch), steps, context, until_ns, max_iterations)

    def _before_admission(self, state: ServiceState, step: int) -> int:
        """Steps in which nobody who waits can be admitted, as long as those running only decode."""
        if not state.waiting:
            return sys.maxsize
        if self._rejected is not None:
            request, when, removals = self._rejected
            # What a prompt leaves for others to share is known when its plan has ended.
            known = state.last_prefill <= when - self._options.depth
            nothing_new = known and removals == self._removals()
            if request is state.waiting[0] and nothing_new:
                return sys.maxsize
        return -step % self._options.admission.admit_every

    def _within_memory(self, state: ServiceState, steps: int) -> int:
        """Steps for which all blocks can be had: ``steps``, halved until they can; not the most there are.

        Single steps may evict cached prefixes. Plans of several must not, and are cut as each of them would
        be by itself.
        """
        pool, longest = self._pool, self._options.max_iterations
        evict = longest == 1
        at_most = len(state.running) * (steps // pool.block_size + 1)
        if pool.can_allocate(state.service, at_most, evict=evict):
            return steps
        while steps:
            blocks = int(self._needs(state.running, steps).sum())
            if pool.can_allocate(state.service, blocks, evict=evict):
                break
            steps = longest if longest < steps < 2 * longest else steps // 2
        return steps - steps % longest if steps > longest else steps

    def _needs(self, batch: RunningBatch, steps: int) -> IntArray:
        """Blocks that each needs for so many steps."""
        spare = batch.num_blocks * self._pool.block_size - batch.num_scheduled
        needs: IntArray = -((spare - steps) // self._pool.block_size)
        return np.maximum(needs, 0, out=needs)

    def grow(self, state: ServiceState, steps: int) -> Growth:
        """Extend the tables as so many steps would, one after another, each in the order of its rows."""
        batch, size = state.running, self._pool.block_size
        live = self._pool.live_blocks(state.service)
        spare = batch.num_blocks * size - batch.num_scheduled
        growing = (spare < steps).nonzero()[0]
        firsts, rows = spare[growing].tolist(), growing.tolist()
        if size == 1 and not any(firsts):
            blocks = self._allocate(state.service, [step for step in range(steps) for _ in rows])
            shares = [blocks[place :: len(rows)] for place in range(len(rows))]
        else:
            turns = sorted(
                [(step, place) for place, first in enumerate(firsts) for step in range(first, steps, size)]
            )
            blocks = self._allocate(state.service, [step for step, _ in turns])
            shares = [[] for _ in rows]
            for (_, place), block in zip(turns, blocks, strict=True):
                shares[place].append(block)
        grown = []
        for row, share in zip(rows, shares, strict=True):
            batch.grow(row, share)
            grown.append((batch.requests[row].seq_id, tuple(share)))
        return Growth(grown, firsts, size, live)

    def _allocate(self, service: str, steps: Sequence[int]) -> list[int]:
        """A block for each of ``steps``, which rise: those of one step at once."""
        pool = self._pool
        layout = pool.layout
        in_order = layout.kind == "merged" and layout.services[service].blocks_per_merged == 1
        # Where the pool gives the same, all at once.
        counts = [len(steps)] if in_order and not pool.prefix_caching else Counter(steps).values()
        taken: list[int] = []
        for count in counts:
            blocks = pool.allocate(service, count)
            assert blocks is not None
            taken += blocks
        return taken


def _steps_left(batch: RunningBatch) -> int:
    """Steps that all can take before more has to be done for one than to count; the last may end some."""
    end = np.minimum(batch.num_final_tokens, batch.slice_end)
    # A step that makes a request outgrow what is predicted of its length is not one of them.
    outgrown = batch.num_prompt_tokens + batch.predicted_tokens
    bounded = outgrown < batch.num_final_tokens
    if np.count_nonzero(bounded):
        end = np.where(bounded, np.minimum(end, outgrown - 1), end)
    left = end - batch.num_tokens_with_in_flight
    return int(left[left.argmin()])
