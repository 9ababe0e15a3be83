"""Building of step plans from scheduled batches: block tables grow, requests advance."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from shoal.core import BlockCopy, NewSequence, StepPlan, SyntheticPrompt
from shoal.kvcache import BlockPool
from shoal.schedule.admitter import Admitted
from shoal.schedule.batching import ScheduledBatch
from shoal.schedule.co_batching import CoBatched, CoBatcher
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.request_state import RequestState
from shoal.schedule.request_store import RequestStore
from shoal.schedule.running_batch import Rows, RunningBatch
from shoal.schedule.service_state import ServiceState
from shoal.schedule.step_tracker import InFlightStep, PlannedRows, StepTracker
from shoal.schedule.weights import Weights

_Columns = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class PlanBuilder:
    """Builds plans, which are then in flight, and updates the scheduler's state as if they were running."""

    def __init__(
        self,
        pool: BlockPool,
        store: RequestStore,
        weights: Weights,
        steps: StepTracker,
        options: SchedulerOptions,
    ) -> None:
        self._pool = pool
        self._store = store
        self._weights = weights
        self._steps = steps
        self._co_batcher = CoBatcher(pool, store.services, options)
        self._columns: dict[str, _Columns] = {}
        self._joint_columns: dict[str, _Columns] = {}

    def commit(
        self, state: ServiceState, scheduled: ScheduledBatch, admitted: Sequence[Admitted], now_ns: int
    ) -> StepPlan:
        """The next plan: the running requests of ``scheduled``, the admitted ones, and co-batched decodes.

        The pool has free blocks for the growth of ``scheduled``.
        """
        batch, store, service = state.running, self._store, state.service
        blocks = self._pool.allocate(service, scheduled.new_blocks) if scheduled.new_blocks else []
        assert blocks is not None
        others = self._co_batcher.form(state, scheduled, admitted) if state.companions else []
        grown = _grow(batch, scheduled.growth, blocks)
        swapped: list[int] = []
        first = len(batch)
        for new in admitted:
            store.admit(new.request, now_ns)
            swapped += store.take_swapped(new.request)
        for row, end in scheduled.slices:
            batch.slice_end[row] = end
        chunks = [*scheduled.chunks, *enumerate((new.num_new_tokens for new in admitted), start=first)]
        decodes = len(scheduled.decodes)
        all_rows = decodes == len(batch)
        # Admitted requests come after these rows.
        rows: Rows = slice(decodes) if all_rows else scheduled.decodes
        if decodes:
            batch.begin(rows, 1)
            if np.count_nonzero(batch.prefilling):
                batch.prefilling[rows] = 0
        ones, sampled = _decode_columns(decodes)
        requests = batch.requests.copy()
        if not all_rows:
            numbers = scheduled.decodes.tolist() + [row for row, _ in chunks]
            sampled += tuple(_advance_chunks(batch, chunks, decodes))
            in_order = len(numbers) == len(batch) and decodes + len(admitted) == len(batch)
            rows = slice(len(batch)) if in_order else np.array(numbers, dtype=np.int64)
            if not in_order:
                requests = [requests[row] for row in numbers]
        seq_ids = tuple(batch.seq_id[rows].tolist())
        plan = self._make_plan(
            service,
            (seq_ids, ones + tuple([count for _, count in chunks]), sampled),
            grown=grown,
            joined=tuple([_new_sequence(batch, row) for row in range(first, len(batch))]),
            copies=tuple([copy for new in admitted for copy in new.copies]),
        )
        self._count_steps(plan, state, prefill=bool(chunks))
        pinned = [copy.source for copy in plan.copies if not copy.source_host]
        parts = [PlannedRows(plan, requests, rows, batch.num_removals)]
        if others:
            parts += [_begin_decodes(plan.number, other) for other in others]
            plan = self._join(parts)
        self._steps.report(1)
        return self._steps.begin(InFlightStep(plan, parts, pinned, swapped))

    def _join(self, parts: Sequence[PlannedRows]) -> StepPlan:
        """Merge the plans of several services; all but the first have decodes only."""
        plans = [part.plan for part in parts]
        leader = plans[0]
        all_seq_ids = tuple([seq_id for plan in plans for seq_id in plan.seq_ids])
        decodes = range(len(leader.seq_ids), len(all_seq_ids))
        columns = (all_seq_ids, leader.new_tokens + (1,) * len(decodes), leader.sampled + tuple(decodes))
        seq_ids, new_tokens, sampled = _reuse_equal(self._joint_columns, leader.service, columns)
        return replace(
            leader,
            seq_ids=seq_ids,
            new_tokens=new_tokens,
            sampled=sampled,
            grown=tuple([grown for plan in plans for grown in plan.grown]),
            co_batched=tuple([(plan.service, len(plan.seq_ids)) for plan in plans[1:]]),
        )

    def commit_run(
        self, state: ServiceState, steps: int, grown: Sequence[tuple[int, tuple[int, ...]]]
    ) -> StepPlan:
        """The next plan, with ``steps`` iterations, in which all running requests decode.

        grown: (sequence, blocks) already appended to the block tables.
        """
        batch = state.running
        rows = slice(len(batch))
        batch.begin(rows, steps)
        ones, sampled = _decode_columns(len(batch))
        columns = (tuple(batch.seq_id.tolist()), ones, sampled)
        plan = self._make_plan(state.service, columns, grown=tuple(grown), iterations=steps)
        self._count_steps(plan, state, prefill=False)
        part = PlannedRows(plan, batch.requests.copy(), rows, batch.num_removals)
        return self._steps.begin(InFlightStep(plan, (part,), [], []))

    def _make_plan(
        self,
        service: str,
        columns: _Columns,
        *,
        grown: tuple[tuple[int, tuple[int, ...]], ...],
        iterations: int = 1,
        joined: tuple[NewSequence, ...] = (),
        copies: tuple[BlockCopy, ...] = (),
    ) -> StepPlan:
        """The plan of some rows, with all pending changes for the executor."""
        store = self._store
        evict, fetch = self._weights.take_changes()
        seq_ids, new_tokens, sampled = _reuse_equal(self._columns, service, columns)
        plan = StepPlan(
            number=self._steps.planned,
            service=service,
            seq_ids=seq_ids,
            new_tokens=new_tokens,
            sampled=sampled,
            iterations=iterations,
            joined=joined,
            left=tuple(store.left),
            grown=grown,
            swap_out_copies=tuple(store.swap_out_copies),
            zero=self._pool.take_dirty(),
            copies=copies,
            moved=tuple(store.moved.items()),
            evict=evict,
            fetch=fetch,
        )
        store.left.clear()
        store.swap_out_copies.clear()
        store.moved.clear()
        return plan

    def commit_changes(self) -> StepPlan:
        """The next plan, without rows, with all pending changes for the executor."""
        return self._steps.begin(InFlightStep(self.pending(), (), [], []))

    def pending(self, joins: RequestState | None = None) -> StepPlan:
        """A plan without rows, with all pending changes for the executor. It has no update.

        joins: a request that starts to run with its KV in place.
        """
        if joins is None:
            return self._make_plan("", ((), (), ()), grown=())
        batch = self._store.services[joins.service].running
        joined = _new_sequence(batch, batch.row_of(joins))
        return self._make_plan(joins.service, ((), (), ()), grown=(), joined=(joined,))

    def _count_steps(self, plan: StepPlan, state: ServiceState, *, prefill: bool) -> None:
        """Update the step counters that orders read."""
        for other in self._store.services.values():
            if other is not state:
                other.consecutive_steps = 0
        state.consecutive_steps = 0 if prefill else state.consecutive_steps + plan.iterations
        state.last_step = state.last_turn = plan.number + plan.iterations - 1
        if prefill:
            state.last_prefill = plan.number


def _new_sequence(batch: RunningBatch, row: int) -> NewSequence:
    """A request for the executor; a synthetic prompt gets consecutive numbers as token ids."""
    request = batch.requests[row]
    prompt_tokens = request.num_prompt_tokens
    known = prompt_tokens + int(batch.num_generated[row])
    synthetic = isinstance(request.request.prompt, SyntheticPrompt)
    return NewSequence(
        seq_id=request.seq_id,
        tokens=range(known) if synthetic else tuple(request.token_ids),
        prompt_tokens=prompt_tokens,
        computed=int(batch.num_computed[row]),
        blocks=tuple(request.block_ids),
        sampling=request.request.sampling,
        seed=request.request.seed,
    )


@lru_cache(maxsize=64)
def _decode_columns(decodes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(new tokens, sampled rows) of ``decodes`` decodes; cached, so the same tuples each time."""
    return (1,) * decodes, tuple(range(decodes))


def _reuse_equal(known: dict[str, _Columns], service: str, columns: _Columns) -> _Columns:
    """The tuples of the last plan if they are equal, so that the executor can compare by identity."""
    last = known.get(service)
    if columns == last:
        return last
    known[service] = columns
    return columns


def _begin_decodes(number: int, other: CoBatched) -> PlannedRows:
    """Begin the decodes of a co-batched service in plan ``number``."""
    state, batch = other.state, other.state.running
    all_rows = len(other.rows) == len(batch)
    rows: Rows = slice(len(batch)) if all_rows else other.rows
    grown = _grow(batch, [(row, 1) for row in other.growing], other.blocks)
    batch.begin(rows, 1)
    if other.complete:
        state.last_step = number
    seq_ids = tuple(batch.seq_id[rows].tolist())
    requests = batch.requests.copy() if all_rows else [batch.requests[row] for row in other.rows.tolist()]
    new_tokens, sampled = _decode_columns(len(seq_ids))
    plan = StepPlan(
        number=number,
        service=state.service,
        seq_ids=seq_ids,
        new_tokens=new_tokens,
        sampled=sampled,
        grown=grown,
    )
    return PlannedRows(plan, requests, rows, batch.num_removals)


def _advance_chunks(batch: RunningBatch, chunks: Sequence[tuple[int, int]], first: int) -> list[int]:
    """Mark chunks as scheduled; returns the plan's rows, from ``first`` on, that sample a token."""
    sampled = []
    for place, (row, count) in enumerate(chunks, start=first):
        batch.num_scheduled[row] += count
        batch.in_flight[row] += 1
        if batch.num_scheduled[row] == batch.num_tokens_with_in_flight[row]:
            sampled.append(place)
            batch.num_tokens_with_in_flight[row] += 1
            batch.prefilling[row] = 0
    return sampled


def _grow(
    batch: RunningBatch, growth: Sequence[tuple[int, int]], blocks: Sequence[int]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Append ``blocks`` to the block tables of ``growth``."""
    grown = []
    start = 0
    for row, count in growth:
        share = blocks[start : start + count]
        batch.grow(row, share)
        grown.append((batch.requests[row].seq_id, tuple(share)))
        start += count
    return tuple(grown)
