"""Multi-step scheduling: runs of decode steps that need no decision, and the blocks for them.

While only one service has requests, all of them decode, and no other request can be admitted, steps follow
one another until something ends; only counts change. Such steps become one plan with several iterations.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np

from shoal.core import StepPlan
from shoal.kvcache import BlockPool
from shoal.schedule.admitter import Rejection
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.plan_builder import PlanBuilder
from shoal.schedule.request_state import RequestState
from shoal.schedule.request_store import RequestStore
from shoal.schedule.residency import Residency
from shoal.schedule.running_batch import IntArray, RunningBatch
from shoal.schedule.service_state import ServiceState
from shoal.schedule.starvation import earliest_starvation_ns
from shoal.schedule.step_tracker import StepTracker


class DecodeRun(NamedTuple):
    """Steps that the scheduler would plan one after another if nothing happened between them."""

    service: str
    rows: int
    """Sequences in each step."""
    steps: int
    """At least 1."""
    context: int
    """Positions that the first step attends, over all rows; each further step attends one more per row."""
    until_ns: int
    """Every step, or the first step of its plan, must be planned before this time."""
    max_iterations: int
    """Limit on the steps of one plan, if they are planned one plan after another."""

    def planned(self, steps: int) -> int:
        """Steps that are planned until ``steps`` are done, rounded up to whole plans."""
        return min(-(-steps // self.max_iterations) * self.max_iterations, self.steps)


class Growth(NamedTuple):
    """Blocks allocated for a run, in the order in which single steps would have allocated them."""

    grown: Sequence[tuple[int, tuple[int, ...]]]
    """(sequence, its blocks), as in a plan."""
    first_steps: Sequence[int]
    """For each of these, the step (from 0) of its first block; the next follow every ``block_size`` steps."""
    block_size: int
    live_before: int
    """Live blocks of the service before the run."""

    def live_blocks(self, steps: int, max_iterations: int) -> list[int]:
        """Live blocks of the service during each of ``steps`` steps, ``max_iterations`` to a plan."""
        taken = [0] * steps
        for (_, blocks), first in zip(self.grown, self.first_steps, strict=True):
            for step in range(first, first + len(blocks) * self.block_size, self.block_size):
                taken[step - step % max_iterations] += 1
        return list(accumulate(taken, initial=self.live_before))[1:]

    def plans(self, plan: StepPlan, max_iterations: int) -> Iterator[StepPlan]:
        """The plans that would have been made one after another instead of one for the whole run."""
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


class _Rejected(NamedTuple):
    """A rejection that holds until blocks or a slot are freed."""

    request: RequestState
    step: int
    """Number of the step that was planned."""
    removals: int
    """Until then, as ``DecodeRuns._removals`` counts them."""
    entries: int | None
    """It also ends when a request enters the queue, which had so many entries; None: it does not."""


class DecodeRuns:
    """Finds runs of decode steps, and plans them."""

    def __init__(
        self,
        pool: BlockPool,
        store: RequestStore,
        options: SchedulerOptions,
        steps: StepTracker,
        builder: PlanBuilder,
        steppable: Mapping[str, ServiceState],
        residency: Residency,
    ) -> None:
        self._pool = pool
        self._store = store
        self._steppable = steppable
        self._residency = residency
        self._options = options
        self._steps = steps
        self._builder = builder
        self._rejected: _Rejected | None = None

    def note_rejection(self, request: RequestState, reason: Rejection) -> None:
        """``request`` was not admitted in the step that is being planned."""
        options = self._options
        stays = options.admission.stays_rejected and options.preempt_for_waiting == "never"
        if reason in (Rejection.SLOTS, Rejection.BATCH) or (reason is Rejection.MEMORY and stays):
            # Another request of the batch that runs may come.
            waiting = self._store.services[request.service].waiting
            arrivals = waiting.entries if reason is Rejection.BATCH else None
            self._rejected = _Rejected(request, self._steps.planned, self._removals(), arrivals)

    def _removals(self) -> int:
        """How often a slot or memory was freed by an ended, removed or preempted request, or by a lease.

        The blocks of such a request may be kept until a plan in flight has ended.
        """
        removals = sum([state.running.num_removals for state in self._store.services.values()])
        return removals + self._store.num_releases + self._store.leases.num_ended

    def next_run(self, now_ns: int, max_steps: int) -> DecodeRun | None:
        """The decode steps, at most ``max_steps``, that need no decision from ``now_ns`` on.

        None if the next step may be another one, or if plans in flight are not decodes of the same requests;
        ``max_steps`` is rounded up to whole plans. Changes nothing.
        """
        store, options, in_flight = self._store, self._options, self._steps.in_flight
        if len(in_flight) >= options.max_in_flight:
            return None
        if not all(
            step.parts and step.decodes_all(store.services[step.plan.service].running) for step in in_flight
        ):
            return None
        max_iterations = options.max_iterations
        states = [state for state in self._steppable.values() if len(state.running) or state.waiting]
        if len(states) != 1 or store.swap_out_copies or store.moved:
            return None
        [state] = states
        if self._residency.may_owe_step(state.service):  # a decision follows on the step that it owes
            return None
        batch = state.running
        if state.waiting and not options.order.steady:
            return None
        if not len(batch) or len(batch) > state.limit.rows or np.count_nonzero(batch.prefilling):
            return None
        if state.limit.suspects() or np.count_nonzero(batch.is_ending) or np.count_nonzero(batch.postponed):
            return None
        limit = -(-max_steps // max_iterations) * max_iterations
        limit = min(limit, self._steps_before_admission(state))
        limit = limit and min(limit, _steps_left(batch))
        if limit <= 0:
            return None
        until_ns = min(earliest_starvation_ns(state), self._residency.settled_until(now_ns))
        # The order of a queue changes then, or a request ends; also one that waits for weights.
        for other in store.services.values():
            if other.waiting and (slo_expired_ns := other.waiting.next_slo_expired_ns) is not None:
                until_ns = min(until_ns, slo_expired_ns)
        if until_ns <= now_ns:
            return None
        steps = self._steps_within_memory(state, limit)
        context = sum(batch.num_tokens_with_in_flight.tolist())
        if not steps:
            return None
        return DecodeRun(state.service, len(batch), steps, context, until_ns, max_iterations)

    def _steps_before_admission(self, state: ServiceState) -> int:
        """Steps without an admission, as long as the running requests only decode."""
        if not state.waiting:
            return sys.maxsize
        if self._rejected is not None:
            rejected = self._rejected
            # The blocks of a prompt can be shared only after its plan has ended.
            published = state.last_prefill <= rejected.step - self._options.max_in_flight
            unchanged = published and rejected.removals == self._removals()
            unchanged = unchanged and rejected.entries in (None, state.waiting.entries)
            if rejected.request is state.waiting[0] and unchanged:
                return sys.maxsize
        return -self._steps.planned % self._options.admission.admit_every

    def _steps_within_memory(self, state: ServiceState, steps: int) -> int:
        """Steps for which all blocks can be allocated: ``steps``, halved until they fit; not the maximum.

        Single steps may evict cached prefixes. Plans of several steps must not, and are shortened as each of
        them would be by itself.
        """
        pool, longest = self._pool, self._options.max_iterations
        evict = longest == 1
        at_most = len(state.running) * (steps // pool.block_size + 1)
        if pool.can_allocate(state.service, at_most, evict=evict):
            return steps
        while steps:
            blocks = int(self._missing_blocks(state.running, steps).sum())
            if pool.can_allocate(state.service, blocks, evict=evict):
                break
            steps = longest if longest < steps < 2 * longest else steps // 2
        return steps - steps % longest if steps > longest else steps

    def _missing_blocks(self, batch: RunningBatch, steps: int) -> IntArray:
        """Blocks that each row needs to allocate for ``steps`` steps."""
        spare = batch.num_blocks * self._pool.block_size - batch.num_scheduled
        missing: IntArray = -((spare - steps) // self._pool.block_size)
        return np.maximum(missing, 0, out=missing)

    def commit(self, run: DecodeRun, steps: int) -> tuple[StepPlan, Growth]:
        """The plan of the first ``steps`` of a run, as iterations, with the blocks allocated for it.

        It allocates the same blocks as the single plans of the run would. No request may have been admitted,
        ended or preempted since ``next_run``. The rest of the run may be committed later.
        """
        state = self._store.services[run.service]
        self._steps.report(steps)
        growth = self._grow(state, steps)
        return self._builder.commit_run(state, steps, growth.grown), growth

    def _grow(self, state: ServiceState, steps: int) -> Growth:
        """Extend the block tables as ``steps`` single steps would, each in the order of its rows."""
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
        """One block for each entry of ``steps`` (ascending), allocating the blocks of a step together."""
        pool = self._pool
        layout = pool.layout
        in_order = layout.kind == "merged" and layout.services[service].blocks_per_merged == 1
        # Blocks are the same if all are allocated at once.
        counts = [len(steps)] if in_order and not pool.prefix_caching else Counter(steps).values()
        taken: list[int] = []
        for count in counts:
            blocks = pool.allocate(service, count)
            assert blocks is not None
            taken += blocks
        return taken


def _steps_left(batch: RunningBatch) -> int:
    """Steps in which all rows only decode; requests may end in the last of them."""
    end = np.minimum(batch.num_final_tokens, batch.slice_end)
    # A request must not outgrow its predicted length.
    outgrown = batch.num_prompt_tokens + batch.predicted_tokens
    bounded = outgrown < batch.num_final_tokens
    if np.count_nonzero(bounded):
        end = np.where(bounded, np.minimum(end, outgrown - 1), end)
    left = end - batch.num_tokens_with_in_flight
    return int(left[left.argmin()])
