"""From choices to a plan: tables grow, requests advance, and the executor's deltas are written down."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shoal.core import BlockCopy, NewSequence, StepPlan, SyntheticPrompt
from shoal.kvcache import BlockPool
from shoal.schedule.admitter import Admitted
from shoal.schedule.batching import ScheduledBatch
from shoal.schedule.co_batching import CoBatched, CoBatcher
from shoal.schedule.decode_runs import Growth
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.request_state import RequestState
from shoal.schedule.request_store import RequestStore
from shoal.schedule.running_batch import Rows, RunningBatch
from shoal.schedule.service_state import ServiceState

_Columns = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class PlannedRows(NamedTuple):
    """The rows of one service in a plan in flight, and whom they are about."""

    plan: StepPlan
    """Of these rows alone: the plan itself, where no other service takes part."""
    requests: Sequence[RequestState]
    """Of each row."""
    rows: Rows
    """Their rows in the running batch, as long as nobody is removed from it."""
    num_removals: int
    """The batch's, when the plan was made."""


class InFlightStep(NamedTuple):
    """A plan in flight."""

    plan: StepPlan
    """What the executor does."""
    parts: Sequence[PlannedRows]
    """The rows of its service, then those of each that decodes with it."""
    pinned_blocks: list[int]
    """Blocks of its service that are referenced until the update: sources of copies."""
    swapped_blocks: list[int]
    """Host blocks of its service that are referenced until the update."""

    def decodes_all(self, batch: RunningBatch) -> bool:
        """Whether its rows are those of a ``batch``, each to get one token, and its update frees no block."""
        plan, rows = self.plan, len(batch)
        if len(self.parts) > 1 or self.pinned_blocks or self.swapped_blocks:
            return False
        each_one = len(plan.sampled) == len(plan.seq_ids) == rows == plan.new_tokens.count(1)
        return each_one and plan.seq_ids == tuple(batch.seq_id.tolist())


class PlanBuilder:
    """Makes plans of what was chosen; from then on the scheduler's state says that they run."""

    def __init__(self, pool: BlockPool, store: RequestStore, options: SchedulerOptions) -> None:
        self._pool = pool
        self._store = store
        self._co_batcher = CoBatcher(pool, store.services, options)
        self._columns: dict[str, _Columns] = {}
        self._joint_columns: dict[str, _Columns] = {}

    def commit(
        self,
        number: int,
        state: ServiceState,
        scheduled: ScheduledBatch,
        admitted: Sequence[Admitted],
        now_ns: int,
    ) -> InFlightStep:
        """Plan ``number``: the batch of those running, for whose growth there are blocks, those admitted, and
        decodes of others on the same weights.
        """
        batch, store, service = state.running, self._store, state.service
        blocks = self._pool.allocate(service, scheduled.new_blocks) if scheduled.new_blocks else []
        assert blocks is not None
        others = self._co_batcher.form(state, scheduled, admitted) if state.companions else []
        grown = _grow(batch, scheduled.growth, blocks)
        swapped: list[int] = []
        first = len(batch)
        for some in admitted:
            store.admit(some.request, now_ns)
            swapped += store.forget_swapped(some.request)
        for row, end in scheduled.slices:
            batch.slice_end[row] = end
        chunks = [*scheduled.chunks, *enumerate((some.num_new_tokens for some in admitted), start=first)]
        decodes = len(scheduled.decodes)
        everybody = decodes == len(batch)
        # Later additions come behind these rows.
        rows: Rows = slice(decodes) if everybody else scheduled.decodes
        if decodes:
            batch.begin(rows, 1)
            if np.count_nonzero(batch.prefilling):
                batch.prefilling[rows] = 0
        alike, sampled = _decode_columns(decodes)
        requests = batch.requests.copy()
        if not everybody:
            numbers = scheduled.decodes.tolist() + [row for row, _ in chunks]
            sampled += tuple(_advance_chunks(batch, chunks, decodes))
            in_order = len(numbers) == len(batch) and decodes + len(admitted) == len(batch)
            rows = slice(len(batch)) if in_order else np.array(numbers, dtype=np.int64)
            if not in_order:
                requests = [requests[row] for row in numbers]
        seq_ids = tuple(batch.seq_id[rows].tolist())
        plan = self._make_plan(
            number,
            service,
            (seq_ids, alike + tuple([count for _, count in chunks]), sampled),
            grown=grown,
            joined=tuple([_joined(some.request) for some in admitted]),
            copies=tuple([copy for some in admitted for copy in some.copies]),
        )
        self._count_steps(number, 1, state, prefill=bool(chunks))
        pinned = [copy.source for copy in plan.copies if not copy.source_host]
        part = PlannedRows(plan, requests, rows, batch.num_removals)
        if not others:
            return InFlightStep(plan, (part,), pinned, swapped)
        parts = (part, *[_begin_decodes(number, other) for other in others])
        return InFlightStep(self._join(parts), parts, pinned, swapped)

    def _join(self, parts: Sequence[PlannedRows]) -> StepPlan:
        """One plan of those of several services, of which all but the first have decodes only."""
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

    def commit_run(self, number: int, state: ServiceState, steps: int, growth: Growth) -> InFlightStep:
        """A plan with ``steps`` iterations in which all running requests decode, and have blocks for it."""
        batch = state.running
        rows = slice(len(batch))
        batch.begin(rows, steps)
        alike, sampled = _decode_columns(len(batch))
        plan = self._make_plan(
            number,
            state.service,
            (tuple(batch.seq_id.tolist()), alike, sampled),
            grown=tuple(growth.grown),
            iterations=steps,
        )
        self._count_steps(number, steps, state, prefill=False)
        part = PlannedRows(plan, batch.requests.copy(), rows, batch.num_removals)
        return InFlightStep(plan, (part,), [], [])

    def _make_plan(
        self,
        number: int,
        service: str,
        columns: _Columns,
        *,
        grown: tuple[tuple[int, tuple[int, ...]], ...],
        iterations: int = 1,
        joined: tuple[NewSequence, ...] = (),
        copies: tuple[BlockCopy, ...] = (),
    ) -> StepPlan:
        """The plan of some rows, with all that the executor was not told of yet."""
        store = self._store
        seq_ids, new_tokens, sampled = _reuse_equal(self._columns, service, columns)
        plan = StepPlan(
            number=number,
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
        )
        store.left.clear()
        store.swap_out_copies.clear()
        store.moved.clear()
        return plan

    def pending(self, number: int, joins: RequestState | None = None) -> StepPlan:
        """A plan without rows, of all that the executor was not told of yet.

        joins: a request whose KV is in place, and that runs from now on.
        """
        if joins is None:
            return self._make_plan(number, "", ((), (), ()), grown=())
        return self._make_plan(number, joins.service, ((), (), ()), grown=(), joined=(_joined(joins),))

    def rollback_step_counts(self, state: ServiceState, steps: int) -> None:
        """So many steps of the last plan were not made."""
        state.last_step -= steps
        state.last_turn -= steps
        state.consecutive_steps -= steps

    def _count_steps(self, number: int, steps: int, state: ServiceState, *, prefill: bool) -> None:
        """Steps of a service, ``number`` the first: what orders that alternate between services read."""
        for other in self._store.services.values():
            if other is not state:
                other.consecutive_steps = 0
        state.consecutive_steps = 0 if prefill else state.consecutive_steps + steps
        state.last_step = state.last_turn = number + steps - 1
        if prefill:
            state.last_prefill = number


def _joined(request: RequestState) -> NewSequence:
    """The delta for the executor; a synthetic prompt has no ids, so counting numbers stand for them."""
    synthetic = isinstance(request.request.prompt, SyntheticPrompt)
    return NewSequence(
        seq_id=request.seq_id,
        tokens=range(request.num_tokens) if synthetic else tuple(request.token_ids),
        prompt_tokens=request.num_prompt_tokens,
        computed=request.num_computed,
        blocks=tuple(request.block_ids),
        sampling=request.request.sampling,
        seed=request.request.seed,
    )


@lru_cache(maxsize=64)
def _decode_columns(decodes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """New tokens, and rows that sample, of so many decodes; the same tuples each time."""
    return (1,) * decodes, tuple(range(decodes))


def _reuse_equal(known: dict[str, _Columns], service: str, columns: _Columns) -> _Columns:
    """The same tuples as last time where they are equal, so that an executor can tell by identity."""
    last = known.get(service)
    if columns == last:
        return last
    known[service] = columns
    return columns


def _begin_decodes(number: int, other: CoBatched) -> PlannedRows:
    """Decodes that another service's plan ``number`` takes in, with a plan of them alone."""
    state, batch = other.state, other.state.running
    everybody = len(other.rows) == len(batch)
    rows: Rows = slice(len(batch)) if everybody else other.rows
    grown = _grow(batch, [(row, 1) for row in other.growing], other.blocks)
    batch.begin(rows, 1)
    if other.complete:
        state.last_step = number
    seq_ids = tuple(batch.seq_id[rows].tolist())
    requests = batch.requests.copy() if everybody else [batch.requests[row] for row in other.rows.tolist()]
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
    """Count tokens as scheduled; the plan's rows, from ``first``, that sample a token."""
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
    """Hand out ``blocks`` to the tables that need them."""
    grown = []
    start = 0
    for row, count in growth:
        share = blocks[start : start + count]
        batch.grow(row, share)
        grown.append((batch.requests[row].seq_id, tuple(share)))
        start += count
    return tuple(grown)
