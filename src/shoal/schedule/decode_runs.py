"""Runs of decode steps that need no decision: how many there are, and the blocks they take.

While one service alone has requests, all of them decode, and nobody else can be admitted, one step follows
another until something ends: nothing but counts change. Such steps are made as one plan with many iterations.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from shoal.core import StepPlan
from shoal.kvcache import BlockPool
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.request_state import RequestState
from shoal.schedule.request_store import RequestStore
from shoal.schedule.running_batch import IntArray, RunningBatch
from shoal.schedule.service_state import ServiceState
from shoal.schedule.starvation import StarvationGuard


@dataclass(frozen=True, slots=True)
class DecodeRun:
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
    """Every step must begin before this time, or the first of its plan."""
    max_iterations: int
    """Most steps of a plan, as they would be planned one plan after another."""

    def planned(self, steps: int) -> int:
        """Steps in all that are planned until so many are made: those of whole plans."""
        return min(-(-steps // self.max_iterations) * self.max_iterations, self.steps)


@dataclass(frozen=True, slots=True)
class Growth:
    """Blocks handed out to the steps of a run, in the order in which the steps would have got them."""

    step: IntArray
    """For which step each block is, from 0."""
    seq_id: IntArray
    """For which sequence."""
    block: IntArray
    """Its number."""
    live_before: int
    """Live blocks of the service before."""

    def live_blocks(self, steps: int, max_iterations: int) -> IntArray:
        """Live blocks of the service during each of so many steps, ``max_iterations`` to a plan."""
        plans = np.bincount(self.step // max_iterations, minlength=-(-steps // max_iterations))
        live: IntArray = plans.cumsum().repeat(max_iterations)[:steps] + self.live_before
        return live

    def by_sequence(self, first: int = 0, end: int = sys.maxsize) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """(sequence, its blocks) for the steps from ``first`` to before ``end``, as a plan has it."""
        grown = defaultdict(list)
        steps = slice(*self.step.searchsorted((first, end)).tolist())
        for seq_id, block in zip(self.seq_id[steps].tolist(), self.block[steps].tolist(), strict=True):
            grown[seq_id].append(block)
        return tuple([(seq_id, tuple(blocks)) for seq_id, blocks in grown.items()])

    def plans(self, plan: StepPlan, max_iterations: int) -> Iterator[StepPlan]:
        """The plans that would have been made one after another, in place of one for the whole run."""
        for first in range(0, plan.iterations, max_iterations):
            end = min(first + max_iterations, plan.iterations)
            yield replace(
                plan,
                number=plan.number + first,
                iterations=end - first,
                left=plan.left if first == 0 else (),
                grown=self.by_sequence(first, end),
            )


class DecodeRuns:
    """Foresees runs of decode steps and finds blocks for them; asked while no plan is in flight."""

    def __init__(
        self, pool: BlockPool, store: RequestStore, guard: StarvationGuard, options: SchedulerOptions
    ) -> None:
        self._pool = pool
        self._store = store
        self._guard = guard
        self._options = options
        self._rejected: tuple[RequestState, int, int] | None = None  # who, in which step, after how many ends

    def rejected(self, request: RequestState, step: int) -> None:
        """There was no memory to admit ``request`` with ``step``."""
        self._rejected = (request, step, self._store.num_ended)

    def foresee(self, now_ns: int, most: int, step: int) -> DecodeRun | None:
        """The run of at most ``most`` steps that begins with ``step`` at ``now_ns``, if there is one.

        A run ends where one of its plans does; ``most`` is rounded up to whole plans.
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
        if not len(batch) or len(batch) > options.max_batched_tokens or batch.prefilling.any():
            return None
        most = -(-most // max_iterations) * max_iterations
        most = min(most, self._before_admission(state, step), _steps_left(batch))
        if most <= 0:
            return None
        until_ns = self._guard.nobody_before_ns(state)
        if until_ns <= now_ns:
            return None
        steps = self._within_memory(state, most)
        context = int(batch.num_tokens_with_in_flight.sum())
        if not steps:
            return None
        return DecodeRun(state.service, len(batch), steps, context, until_ns, max_iterations)

    def _before_admission(self, state: ServiceState, step: int) -> int:
        """Steps in which nobody who waits can be admitted, as long as those running only decode."""
        if not state.waiting:
            return sys.maxsize
        admission = self._options.admission
        if admission.stays_rejected and not self._options.preempt_for_waiting and self._rejected is not None:
            request, when, ended = self._rejected
            if request is state.waiting[0] and ended == self._store.num_ended and state.last_prefill < when:
                return sys.maxsize
        return -step % admission.admit_every

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
        return np.maximum(0, -((spare - steps) // self._pool.block_size))

    def grow(self, state: ServiceState, steps: int) -> Growth:
        """Extend the tables as so many steps would, one after another."""
        batch, size = state.running, self._pool.block_size
        live = self._pool.live_blocks(state.service)
        needs = self._needs(batch, steps)
        total = int(needs.sum())
        rows = np.arange(len(batch)).repeat(needs)
        ends = needs.cumsum()
        nth = np.arange(total) - (ends - needs).repeat(needs)
        when = np.maximum(batch.num_blocks * size - batch.num_scheduled, 0)[rows] + nth * size
        if size == 1 and total == len(batch) * steps:
            order = np.arange(total).reshape(len(batch), steps).T.ravel()
        else:
            order = np.lexsort((rows, when))
        blocks = np.empty(total, dtype=np.int64)
        if total:
            blocks[order] = self._allocate(state.service, when[order])
        start, by_row = 0, blocks.tolist()
        for row, end in enumerate(ends.tolist()):
            if end > start:
                batch.requests[row].block_ids += by_row[start:end]
                start = end
        batch.num_blocks += needs
        return Growth(when[order], batch.seq_id[rows[order]], blocks[order], live)

    def _allocate(self, service: str, when: IntArray) -> list[int]:
        """Blocks as the steps in ``when`` (rising) would get them, each its own at once."""
        pool = self._pool
        layout = pool.layout
        in_order = layout.kind == "merged" and layout.services[service].blocks_per_merged == 1
        if in_order and not pool.prefix_caching:
            blocks = pool.allocate(service, len(when))
            assert blocks is not None
            return blocks
        taken: list[int] = []
        _, counts = np.unique(when, return_counts=True)
        for count in counts.tolist():
            blocks = pool.allocate(service, count)
            assert blocks is not None
            taken += blocks
        return taken


def _steps_left(batch: RunningBatch) -> int:
    """Steps that all can take before more has to be done for one than to count; the last may end some."""
    tokens = batch.num_tokens_with_in_flight
    if (tokens - batch.num_scheduled != 1).any() or batch.ending.any():
        return 0
    end = np.minimum(batch.num_final_tokens, batch.slice_end)
    # A step that makes a request outgrow what is predicted of its length is not one of them.
    outgrown = batch.num_prompt_tokens + batch.predicted_tokens
    milestone = np.where(outgrown >= batch.num_final_tokens, end, np.minimum(end, outgrown - 1))
    return int((milestone - tokens).min())
