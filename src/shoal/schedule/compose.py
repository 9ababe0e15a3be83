"""What the running requests of a turn would compute, before anything is committed."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

from shoal.schedule.group import Group
from shoal.schedule.running import Running
from shoal.schedule.tracked import BY_SEQUENCE, Tracked

_FEW = 8
"""More prompts under way than this are not worth taking out one by one."""


@dataclass(frozen=True, slots=True)
class Share:
    """The running requests' part of a step.

    decodes: compute one token each. chunks: (request, tokens) of prompts not yet through. growth:
    (request, blocks) that they need first. claimed: blocks needed in all. budget: tokens left for newcomers.
    slices: (request, its new ``slice_end``) of those that begin a slice.
    """

    decodes: list[Tracked]
    chunks: list[tuple[Tracked, int]]
    growth: list[tuple[Tracked, int]]
    claimed: int
    budget: int
    slices: Sequence[tuple[Tracked, int]] = ()

    def has(self, one: Tracked) -> bool:
        """Whether a request takes part."""
        return one in self.decodes or any(other is one for other, _ in self.chunks)


def compose(running: Sequence[Tracked], budget: int, block_size: int) -> Share:
    """Decodes first, then prompts in chunks, in the order given, until ``budget`` tokens are spent.

    The decodes that got a token are then put in the order of admission.
    """
    decodes = [
        one
        for one in running
        if one.expected - one.scheduled == 1
        and one.expected < one.last_token
        and one.ending is None
        and one.sequence is not None
    ]
    prompts: list[Tracked] = []
    if len(decodes) != len(running):
        prompts = [
            one
            for one in running
            if one.expected - one.scheduled > 1
            and one.expected < one.last_token
            and one.ending is None
            and one.sequence is not None
        ]
    del decodes[budget:]
    decodes.sort(key=BY_SEQUENCE)
    # The remainder tells of most that they need no block.
    growth = [
        (one, 1)
        for one in decodes
        if not one.scheduled % block_size and one.scheduled == len(one.blocks) * block_size
    ]
    return _with_prompts(decodes, growth, prompts, budget, block_size)


def compose_all(group: Group, running: Running, budget: int, block_size: int) -> Share | None:
    """The same for all running requests of a service, by their columns; None where one must look at each."""
    rows, columns, begun = group.rows, group.columns, group.prefills
    if len(running) != len(rows) or len(rows) > budget or group.ending or len(begun) > _FEW:
        return None
    if any(one.expected - one.scheduled == 1 for one in begun):
        return None
    expected = columns.expected
    decodes = rows.copy()
    if group.in_flight:  # some may get their last token by that plan
        decodes = list(compress(rows, (expected < columns.last_tokens).tolist()))
    for one in begun:
        decodes.remove(one)
    # The remainder tells of most that they need no block; of the others the table's length is asked.
    (due,) = (expected % block_size == 1 % block_size).nonzero()
    growth = [
        (one, 1)
        for one in [rows[at] for at in due.tolist()]
        if one.scheduled == len(one.blocks) * block_size
        and one.expected - one.scheduled == 1
        and one.expected < one.last_token
    ]
    prompts = begun if len(begun) < 2 else [one for one in running if one in begun]
    return _with_prompts(decodes, growth, prompts, budget, block_size)


def compose_cohort(group: Group, budget: int, block_size: int) -> Share | None:
    """The same for all running requests of a service that has a cohort; None where one must look at each."""
    cohort = group.cohort
    if not cohort.rows or len(cohort.rows) > budget or cohort.steps_left <= 0:
        return None
    if any(one.expected - one.scheduled == 1 or one.ending is not None for one in group.prefills):
        return None
    growth = [(one, 1) for one in cohort.growing()]
    return _with_prompts(cohort.rows, growth, group.prefills, budget, block_size)


def compose_slices(
    running: Iterable[Tracked],
    budget: int,
    block_size: int,
    slice_tokens: int,
    can_allocate: Callable[[int], bool],
) -> Share:
    """The same where requests own the blocks of a slice: those inside one go on, the others if they get one.

    A slice that begins reserves the blocks of all its tokens (``slice_blocks``). Slices are handed out in
    the order given; who gets none keeps its KV and is not part of the step.
    """
    decodes: list[Tracked] = []
    prompts: list[Tracked] = []
    growth: list[tuple[Tracked, int]] = []
    slices: list[tuple[Tracked, int]] = []
    claimed = 0
    refused = sys.maxsize  # so many blocks or more are not to be had
    for one in running:
        expected, scheduled = one.expected, one.scheduled
        if (
            expected < one.slice_end
            and expected - scheduled == 1
            and one.ending is None
            and one.sequence is not None
        ):
            if len(decodes) < budget:
                decodes.append(one)
            continue
        if expected >= one.last_token or one.ending is not None or one.sequence is None:
            continue
        if expected == scheduled:
            continue
        if expected - scheduled == 1 and len(decodes) == budget:
            continue
        if expected >= one.slice_end:
            further = slice_blocks(one, slice_tokens, block_size) - len(one.blocks)
            if further > 0:
                if claimed + further >= refused:
                    continue
                if not can_allocate(claimed + further):
                    refused = claimed + further
                    continue
                growth.append((one, further))
                claimed += further
            slices.append((one, slice_end(one, slice_tokens)))
        if expected - scheduled == 1:
            decodes.append(one)
        else:
            prompts.append(one)
    decodes.sort(key=BY_SEQUENCE)
    chunks, _, budget = _chunk(prompts, budget - len(decodes), block_size)
    return Share(decodes, chunks, growth, claimed, budget, slices)


def slice_end(one: Tracked, slice_tokens: int) -> int:
    """Tokens expected at which a slice that begins now ends."""
    return min(one.expected + slice_tokens, one.last_token)


def slice_blocks(one: Tracked, slice_tokens: int, block_size: int) -> int:
    """Blocks of its whole table once a slice that begins now is reserved: ceil((a + min(S, rest)) / B)."""
    return -(-slice_end(one, slice_tokens) // block_size)


def _with_prompts(
    decodes: list[Tracked],
    growth: list[tuple[Tracked, int]],
    prompts: Iterable[Tracked],
    budget: int,
    block_size: int,
) -> Share:
    chunks, further, budget = _chunk(prompts, budget - len(decodes), block_size)
    growth += further
    return Share(decodes, chunks, growth, sum([count for _, count in growth]), budget)


def _chunk(
    prompts: Iterable[Tracked], budget: int, block_size: int
) -> tuple[list[tuple[Tracked, int]], list[tuple[Tracked, int]], int]:
    """(request, tokens) of prompts while ``budget`` lasts, (request, blocks) needed, and what is left."""
    chunks = []
    growth = []
    for one in prompts:
        count = min(budget, one.expected - one.scheduled)
        if count == 0:
            break
        chunks.append((one, count))
        budget -= count
        further = -(-(one.scheduled + count) // block_size) - len(one.blocks)
        if further > 0:
            growth.append((one, further))
    return chunks, growth, budget
