"""Batch formation: decodes first, then chunked prefill, within the token budget; slices. Commits nothing."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from shoal.kvcache import BlockPool
from shoal.schedule.policies.orders import Turn
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import BoolArray, FloatArray, IntArray, RunningBatch
from shoal.schedule.step_limit import StepLimit

NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)


class ScheduledBatch(NamedTuple):
    """The running requests' part of a step, by their rows in the running batch."""

    decodes: IntArray
    """Rows that compute one token, in the order of admission."""
    chunks: Sequence[tuple[int, int]]
    """(row, tokens) of unfinished prompts."""
    growth: Sequence[tuple[int, int]]
    """(row, blocks) to allocate first."""
    new_blocks: int
    """Sum of ``growth``."""
    budget: int
    """Tokens left for waiting requests."""
    budget_rows: int
    """Limit on the number of admitted requests."""
    prompt_budget: int
    """Further prompt tokens that the step may compute."""
    slices: Sequence[tuple[int, int]] = ()
    """(row, new ``slice_end``) of requests that begin a slice."""

    @property
    def empty(self) -> bool:
        return not len(self.decodes) and not self.chunks

    def has(self, row: int) -> bool:
        return row in self.decodes or any(row == other for other, _ in self.chunks)

    def prefills(self, batch: RunningBatch) -> bool:
        """Whether prompt tokens are computed; the last token of a prompt alone looks like a decode."""
        return bool(self.chunks) or bool(np.count_nonzero(batch.prefilling[self.decodes]))


class Batcher:
    """Forms batches of the running requests of a turn.

    slice_tokens: length of slices; None: no slices.
    """

    def __init__(self, pool: BlockPool, slice_tokens: int | None) -> None:
        self._pool = pool
        self._slice_tokens = slice_tokens

    def form(
        self, batch: RunningBatch, turn: Turn, limit: StepLimit, max_prompt_tokens: int
    ) -> ScheduledBatch:
        """The part of the turn's running requests in the step; changes nothing."""
        size = self._pool.block_size
        if self._slice_tokens is None:
            return form_batch(batch, turn, limit, max_prompt_tokens, size)
        return form_slices(
            batch,
            turn,
            limit,
            max_prompt_tokens,
            size,
            self._slice_tokens,
            lambda blocks: self._pool.can_allocate(turn.service, blocks),
        )


def form_batch(
    batch: RunningBatch, turn: Turn, limit: StepLimit, max_prompt_tokens: int, block_size: int
) -> ScheduledBatch:
    """Decodes first, then prompts in chunks, by priority, up to the ``limit``."""
    budget, budget_rows = limit.tokens, limit.rows
    prefilling, in_flight = np.count_nonzero(batch.prefilling), np.count_nonzero(batch.in_flight)
    postponed = np.count_nonzero(batch.postponed)
    rows = keys = None
    if turn.seq_ids is not None:
        rows, keys = _rows_of_turn(batch, turn)
    chunks: list[tuple[int, int]] = []
    if not prefilling and not in_flight and not postponed and (rows is None or len(rows) == len(batch)):
        # Every request has exactly one token to compute.
        decodes = np.arange(len(batch))
    else:
        missing = batch.num_tokens_with_in_flight - batch.num_scheduled
        eligible = _eligible(batch)
        if rows is not None and len(rows) < len(batch):
            eligible &= _mask(rows, len(batch))
        decodes = (eligible & (missing == 1)).nonzero()[0]
        prompts = eligible & (missing > 1)
    if len(decodes) > budget_rows:
        wanted = decodes if rows is None else _by_key(rows, keys, _mask(decodes, len(batch)))
        decodes = np.sort(wanted[:budget_rows])
    full = (batch.num_scheduled == batch.num_blocks * block_size)[decodes]
    growth = [(row, 1) for row in decodes[full].tolist()]
    budget -= len(decodes)
    budget_rows -= len(decodes)
    if prefilling and np.count_nonzero(prompts):
        wanted = prompts.nonzero()[0] if rows is None else _by_key(rows, keys, prompts)
        allowed = min(budget, max_prompt_tokens)
        chunks, further, left = _chunk_prompts(batch, wanted[:budget_rows].tolist(), allowed, block_size)
        growth += further
        budget, max_prompt_tokens = budget - allowed + left, max_prompt_tokens - allowed + left
    new_blocks = sum([count for _, count in growth])
    rows_left = budget_rows - len(chunks)
    return ScheduledBatch(decodes, chunks, growth, new_blocks, budget, rows_left, max_prompt_tokens)


def _eligible(batch: RunningBatch) -> BoolArray:
    """Rows that the plans in flight do not bring to their end, and that are not postponed."""
    eligible = batch.num_tokens_with_in_flight < batch.num_final_tokens
    eligible &= batch.is_ending == 0
    eligible &= batch.postponed == 0
    return eligible


def _rows_of_turn(batch: RunningBatch, turn: Turn) -> tuple[IntArray, FloatArray | None]:
    """Rows of a turn that are still running, and their keys."""
    assert turn.seq_ids is not None
    rows, run = batch.rows_of(turn.seq_ids)
    if np.count_nonzero(run) == len(run):
        return rows, turn.keys
    return rows[run], None if turn.keys is None else turn.keys[run]


def _mask(rows: IntArray, count: int) -> BoolArray:
    mask = np.zeros(count, dtype=np.bool_)
    mask[rows] = True
    return mask


def _by_key(rows: IntArray, keys: FloatArray | None, among: BoolArray) -> IntArray:
    """``rows`` filtered by the mask ``among``, smallest key first; stable."""
    chosen = among[rows]
    if keys is None:
        return rows[chosen]
    some = rows[chosen]
    return some[keys[chosen].argsort(kind="stable")]


def _chunk_prompts(
    batch: RunningBatch, rows: Iterable[int], budget: int, block_size: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]], int]:
    """Chunks (row, tokens) within ``budget``, their growth (row, blocks), and the remaining budget."""
    chunks = []
    growth = []
    for row in rows:
        scheduled = int(batch.num_scheduled[row])
        count = min(budget, int(batch.num_tokens_with_in_flight[row]) - scheduled)
        if count == 0:
            break
        chunks.append((row, count))
        budget -= count
        further = -(-(scheduled + count) // block_size) - int(batch.num_blocks[row])
        if further > 0:
            growth.append((row, further))
    return chunks, growth, budget


def form_slices(
    batch: RunningBatch,
    turn: Turn,
    limit: StepLimit,
    max_prompt_tokens: int,
    block_size: int,
    slice_tokens: int,
    can_allocate: Callable[[int], bool],
) -> ScheduledBatch:
    """As ``form_batch``, with slices: requests inside a slice continue, the others if they get a new one.

    A new slice reserves the blocks of all its tokens. Slices are given in the order of the turn; a request
    without one keeps its KV and is not part of the step.
    """
    missing = batch.num_tokens_with_in_flight - batch.num_scheduled
    eligible = _eligible(batch) & (missing > 0)
    rows, keys = (np.arange(len(batch)), None) if turn.seq_ids is None else _rows_of_turn(batch, turn)
    wanted = _by_key(rows, keys, eligible)
    ends = slice_ends(batch.num_tokens_with_in_flight, batch.num_final_tokens, slice_tokens)
    further_blocks = np.array(next_slice_blocks(batch, slice_tokens, block_size))
    starting = (batch.num_tokens_with_in_flight >= batch.slice_end)[wanted]
    columns = (wanted, starting, missing[wanted] == 1, further_blocks[wanted], ends[wanted])
    decodes: list[int] = []
    prompts: list[int] = []
    growth: list[tuple[int, int]] = []
    slices: list[tuple[int, int]] = []
    new_blocks = 0
    refused = sys.maxsize  # this many blocks or more cannot be allocated
    for row, starts, decodes_now, further, end in zip(*[column.tolist() for column in columns], strict=True):
        if len(decodes) + len(prompts) == limit.rows:
            break
        if decodes_now and len(decodes) == limit.tokens:
            continue
        if starts:
            if further > 0:
                if new_blocks + further >= refused:
                    continue
                if not can_allocate(new_blocks + further):
                    refused = new_blocks + further
                    continue
                growth.append((row, further))
                new_blocks += further
            slices.append((row, end))
        (decodes if decodes_now else prompts).append(row)
    decodes.sort()
    budget = limit.tokens - len(decodes)
    allowed = min(budget, max_prompt_tokens)
    chunks, _, left = _chunk_prompts(batch, prompts, allowed, block_size)
    return ScheduledBatch(
        np.array(decodes, dtype=np.int64),
        chunks,
        growth,
        new_blocks,
        budget - allowed + left,
        limit.rows - len(decodes) - len(chunks),
        max_prompt_tokens - allowed + left,
        slices,
    )


def slice_ends(tokens: IntArray, final_tokens: IntArray, slice_tokens: int) -> IntArray:
    """Number of tokens at the end of slices that begin now."""
    return np.minimum(tokens + slice_tokens, final_tokens)


def slice_end(request: RequestState, slice_tokens: int) -> int:
    """As ``slice_ends``, for a waiting request."""
    return min(request.num_tokens + slice_tokens, request.num_final_tokens)


def slice_blocks(request: RequestState, slice_tokens: int, block_size: int) -> int:
    """Length of its block table with a slice that begins now: ceil((a + min(S, rest)) / B)."""
    return -(-slice_end(request, slice_tokens) // block_size)


def next_slice_blocks(batch: RunningBatch, slice_tokens: int, block_size: int) -> list[int]:
    """Blocks that each running request needs to allocate for a slice that begins now."""
    ends = slice_ends(batch.num_tokens_with_in_flight, batch.num_final_tokens, slice_tokens)
    blocks: list[int] = (-(-ends // block_size) - batch.num_blocks).tolist()
    return blocks
