"""What the running requests of a turn would compute, before anything is committed."""

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.schedule.tracked import Tracked


@dataclass(frozen=True, slots=True)
class Share:
    """The running requests' part of a step.

    decodes: compute one token each. chunks: (request, tokens) of prompts not yet through. growth:
    (request, blocks) that they need first. claimed: blocks needed in all. budget: tokens left for newcomers.
    """

    decodes: list[Tracked]
    chunks: list[tuple[Tracked, int]]
    growth: list[tuple[Tracked, int]]
    claimed: int
    budget: int


def compose(running: Iterable[Tracked], budget: int, block_size: int) -> Share:
    """Decodes first, then prompts in chunks, in the order given, until ``budget`` tokens are spent."""
    decodes: list[Tracked] = []
    prompts: list[Tracked] = []
    growth: list[tuple[Tracked, int]] = []
    for one in running:
        expected, scheduled = one.expected, one.scheduled
        if expected >= one.last_token or one.ending is not None or one.sequence is None:
            continue
        if expected - scheduled == 1:
            if len(decodes) == budget:
                continue
            decodes.append(one)
            # The remainder tells at once of most that they need no block; the table's length is asked then.
            if not scheduled % block_size and scheduled == len(one.blocks) * block_size:
                growth.append((one, 1))
        elif expected > scheduled:
            prompts.append(one)
    budget -= len(decodes)
    chunks = []
    for one in prompts:
        count = min(budget, one.expected - one.scheduled)
        if count == 0:
            break
        chunks.append((one, count))
        budget -= count
        further = -(-(one.scheduled + count) // block_size) - len(one.blocks)
        if further:
            growth.append((one, further))
    return Share(decodes, chunks, growth, sum(count for _, count in growth), budget)
