"""Skipping ahead: runs of decode steps that need no decision, for simulations.

While one service alone has requests, all of them decode, and nobody else can be let in, one step follows
another until something ends: nothing but counts change. A run stops before the first step that could differ,
or with the step that ends a request.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shoal.core import StepPlan
from shoal.kvcache import BlockPool
from shoal.schedule.tracked import Tracked

IntArray = npt.NDArray[np.int64]
Growth = tuple[tuple[int, tuple[int, ...]], ...]
"""(sequence, further blocks) of the tables that grow in one step."""


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Steps that the scheduler would plan one after another if nothing happened between them.

    requests: the rows of every step. steps: how many, at least 1. context: positions that the first step
    attends, over all rows; each further step attends one more per row. until_ns: every step must begin
    before this time (None: whenever).
    """

    service: str
    requests: Sequence[Tracked]
    steps: int
    context: int
    until_ns: int | None

    @property
    def sequences(self) -> tuple[int, ...]:
        """Of the rows."""
        return tuple([one.sequence for one in self.requests if one.sequence is not None])


@dataclass(frozen=True, slots=True)
class Skipped:
    """What the executor and the books of a simulation must know of steps that were skipped.

    sequences: of the rows. left: sequences that were to be dropped with the first of the steps. live_blocks:
    of the service during each step.
    """

    sequences: tuple[int, ...]
    left: tuple[int, ...]
    live_blocks: IntArray


def decodes_ahead(requests: Sequence[Tracked], most: int, *, foreseen: bool) -> tuple[int, int]:
    """(steps, context): how long these requests only decode, at most ``most`` steps, and what they attend.

    The last of the steps may end some of them. 0 steps where one of them computes anything else, or begins
    a slice with the next step. foreseen: the run ends before a request outgrows its predicted length.
    """
    steps, context = most, 0
    for one in requests:
        expected = one.expected
        if expected - one.scheduled != 1 or one.tokens or one.ending is not None:
            return 0, 0
        left = min(one.last_token, one.slice_end) - expected
        if foreseen:
            left = min(left, one.predicted - one.generated - 1)
        if left < steps:
            if left <= 0:
                return 0, 0
            steps = left
        context += expected
    return steps, context


def within_memory(
    requests: Sequence[Tracked], steps: int, block_size: int, fits: Callable[[int], bool]
) -> int:
    """The first so many of ``steps`` for which all blocks can be had (a power of two less, not the most)."""
    free = [len(one.blocks) * block_size - one.scheduled for one in requests]
    while steps:
        blocks = sum(-(-(steps - room) // block_size) for room in free if room < steps)
        if fits(blocks):
            return steps
        steps //= 2
    return 0


def advance(
    requests: Sequence[Tracked],
    service: str,
    pool: BlockPool,
    start_ns: int,
    ends_ns: Sequence[int],
    on_growth: Callable[[int, Growth], None] | None = None,
) -> IntArray:
    """Account for one decode step of each request at each of ``ends_ns``; the live blocks at each step.

    Who has its last token now has not ended yet: that is for the caller. on_growth: told of each step's number from 0, and of the tables that grow in it.
    """
    steps, last_ns = len(ends_ns), ends_ns[-1]
    spent_ns, longest_ns = last_ns - start_ns, _longest(ends_ns)
    live = np.zeros(steps, dtype=np.int64)
    for step, rows in _growth(requests, steps, pool.block_size):
        blocks = pool.allocate(service, len(rows))
        assert blocks is not None
        for one, block in zip(rows, blocks, strict=True):
            one.blocks.append(block)
        live[step] = len(rows)
        if on_growth is not None:
            on_growth(step, tuple((one.sequence or 0, (at,)) for one, at in zip(rows, blocks, strict=True)))
    first_ns = ends_ns[0]
    for one in requests:
        one.scheduled += steps
        one.computed += steps
        one.expected += steps
        one.generated += steps
        one.charged_ns += spent_ns
        one.served_ns = last_ns
        gap_ns = max(first_ns - one.last_token_ns, longest_ns)
        if gap_ns > one.largest_gap_ns:
            one.largest_gap_ns = gap_ns
        one.last_token_ns = last_ns
    held = pool.live_blocks(service) - int(live.sum())
    found: IntArray = held + live.cumsum()
    return found


def plans_of(
    run: DecodeRun,
    sequences: tuple[int, ...],
    first: int,
    steps: int,
    left: tuple[int, ...],
    growth: Mapping[int, Growth],
) -> Iterator[StepPlan]:
    """The plans that were skipped, written out; ``first`` is the number of the first."""
    for step in range(steps):
        yield StepPlan(
            number=first + step,
            service=run.service,
            sequences=sequences,
            new_tokens=(1,) * len(sequences),
            sampled=tuple(range(len(sequences))),
            left=left if step == 0 else (),
            grown=growth.get(step, ()),
        )


def _longest(ends_ns: Sequence[int]) -> int:
    """The longest of the steps after the first."""
    return max((end - start for start, end in pairwise(ends_ns)), default=0)


def _growth(
    requests: Sequence[Tracked], steps: int, block_size: int
) -> Iterator[tuple[int, Sequence[Tracked]]]:
    """Which tables need a block in which steps, by step."""
    if block_size == 1 and all(one.scheduled == len(one.blocks) for one in requests):
        for step in range(steps):
            yield step, requests
        return
    growing: dict[int, list[Tracked]] = {}
    for one in requests:
        for step in range(len(one.blocks) * block_size - one.scheduled, steps, block_size):
            growing.setdefault(step, []).append(one)
    yield from sorted(growing.items())
