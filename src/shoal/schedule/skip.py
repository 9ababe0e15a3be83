"""Skipping ahead: runs of decode steps that need no decision, for simulations.

While one service alone has requests, all of them decode, and nobody else can be let in, one step follows
another until something ends: nothing but counts change. A run stops before the first step that could differ,
or with the step that ends a request.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise

from shoal.core import StepPlan
from shoal.kvcache import BlockPool
from shoal.schedule.tracked import Tracked

Growth = tuple[tuple[int, tuple[int, ...]], ...]
"""(sequence, further blocks) of the tables that grow in one step."""


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Steps that the scheduler would plan one after another if nothing happened between them.

    requests: the rows of every step. steps: how many, at least 1. context: positions that the first step
    attends, over all rows; each further step attends one more per row. until_ns: every step must begin
    before this time.
    """

    service: str
    requests: Sequence[Tracked]
    steps: int
    context: int
    until_ns: int

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
    live_blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What requests that only decode would do next.

    steps: how many they can go on, perhaps 0. context: positions that the first step attends. served_ns: when
    the one that was served longest ago took part in a step.
    """

    steps: int
    context: int
    served_ns: int


def decodes_ahead(requests: Sequence[Tracked], most: int, *, foreseen: bool) -> Outlook | None:
    """How long these requests only decode, at most ``most`` steps; None where one of them does not.

    The last of the steps may end some of them. foreseen: the run ends before a request outgrows its
    predicted length.
    """
    steps, context, served_ns = most, 0, requests[0].served_ns
    for one in requests:
        expected = one.expected
        if expected - one.scheduled != 1 or one.tokens or one.ending is not None:
            return None
        end = one.last_token
        if one.slice_end < end:
            end = one.slice_end
        if foreseen:
            end = min(end, expected + one.predicted - one.generated - 1)
        if end - expected < steps:
            steps = end - expected
        if one.served_ns < served_ns:
            served_ns = one.served_ns
        context += expected
    return Outlook(steps, context, served_ns)


def within_memory(
    requests: Sequence[Tracked], steps: int, block_size: int, fits: Callable[[int], bool]
) -> int:
    """The first so many of ``steps`` for which all blocks can be had: halved until they can, not the most."""
    if fits(len(requests) * (steps // block_size + 1)):
        return steps
    free = [len(one.blocks) * block_size - one.scheduled for one in requests]
    while steps:
        blocks = sum([-(-(steps - room) // block_size) for room in free if room < steps])
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
) -> tuple[list[int], list[Tracked]]:
    """Account for one decode step of each request at each of ``ends_ns``.

    Returns the live blocks at each step, and those who have their last token now: ending them is for the
    caller. on_growth: told of each step's number from 0, and of the tables that grow in it.
    """
    steps, first_ns, last_ns = len(ends_ns), ends_ns[0], ends_ns[-1]
    spent_ns, longest_ns = last_ns - start_ns, _longest(ends_ns)
    live = _grow(requests, service, pool, steps, on_growth)
    complete = []
    for one in requests:
        computed = one.computed + steps
        # Between decodes all that is known but for the newest token is computed.
        one.scheduled = one.computed = computed
        one.expected = computed + 1
        one.generated += steps
        one.charged_ns += spent_ns
        gap_ns = first_ns - one.last_token_ns
        if gap_ns < longest_ns:
            gap_ns = longest_ns
        if gap_ns > one.largest_gap_ns:
            one.largest_gap_ns = gap_ns
        one.served_ns = one.last_token_ns = last_ns
        if computed + 1 == one.last_token:
            complete.append(one)
    return list(accumulate(live, initial=pool.live_blocks(service) - sum(live)))[1:], complete


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
    return max([end - start for start, end in pairwise(ends_ns)], default=0)


def _grow(
    requests: Sequence[Tracked],
    service: str,
    pool: BlockPool,
    steps: int,
    on_growth: Callable[[int, Growth], None] | None,
) -> list[int]:
    """Allocate what the steps need and extend the tables; how many blocks each step took."""
    count = len(requests)
    at_once = on_growth is None and _allocates_in_order(service, pool)
    if at_once and pool.block_size == 1 and all(one.scheduled == len(one.blocks) for one in requests):
        blocks = _allocate(pool, service, count * steps)
        for row, one in enumerate(requests):
            one.blocks += blocks[row::count]
        return [count] * steps
    taken, growth = [0] * steps, _growth(requests, steps, pool.block_size)
    for step, rows in growth:
        taken[step] = len(rows)
    ahead = iter(_allocate(pool, service, sum(taken)) if at_once else ())
    for step, rows in growth:
        blocks = list(islice(ahead, len(rows))) if at_once else _allocate(pool, service, len(rows))
        for one, block in zip(rows, blocks, strict=True):
            one.blocks.append(block)
        if on_growth is not None:
            on_growth(step, tuple((one.sequence or 0, (at,)) for one, at in zip(rows, blocks, strict=True)))
    return taken


def _allocates_in_order(service: str, pool: BlockPool) -> bool:
    """Whether the pool gives many blocks at once as it gives one after another."""
    whole = pool.layout.services[service].blocks_per_merged == 1
    return whole and pool.layout.kind == "merged" and not pool.prefix_caching


def _allocate(pool: BlockPool, service: str, count: int) -> list[int]:
    blocks = pool.allocate(service, count)
    assert blocks is not None
    return blocks


def _growth(requests: Sequence[Tracked], steps: int, block_size: int) -> list[tuple[int, list[Tracked]]]:
    """Which tables need a block in which steps, by step."""
    growing: dict[int, list[Tracked]] = {}
    for one in requests:
        step = len(one.blocks) * block_size - one.scheduled
        while step < steps:
            rows = growing.get(step)
            if rows is None:
                growing[step] = [one]
            else:
                rows.append(one)
            step += block_size
    return sorted(growing.items())
