"""Packing live blocks closer, so that merged blocks come free: which are emptied, and into which.

A service whose own free and cached sub-blocks do not suffice needs merged blocks of others. Those that
hold no live block are evicted anyway; the others' live sub-blocks can move together:

    |A A . .| |A . . .| |A A A .|   ->   |A A . .| |. . . .| |A A A A|
                                                    free

Packing the service that asks gains nothing: its holes are of use to it where they are.
"""

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.kvcache.held import Held


@dataclass(frozen=True, slots=True)
class Move:
    """A live block's content and references go to another block of its service."""

    service: str
    source: int
    target: int


def releasable(held: Held, cached: int, shut: Collection[int]) -> int:
    """Merged blocks with live sub-blocks that a service could empty into its others, from counts alone.

    cached: number of cached blocks of the service. shut: merged blocks that take no part.
    """
    per_merged = held.per_merged
    used = held.merged - len(held.idle)
    live = held.merged * per_merged - held.free_slots - cached
    for merged in shut:
        if (merged in held.holes or merged in held.parked) and merged not in held.idle:
            used -= 1
            live -= live_in(held, merged)
    return used - -(-live // per_merged)


def live_in(held: Held, merged: int) -> int:
    """Live sub-blocks of a merged block."""
    return held.per_merged - len(held.holes.get(merged, ())) - held.parked.get(merged, 0)


def choose_emptied(
    helds: Sequence[Held], asking: int, wanted: int, shut: Collection[int]
) -> dict[int, list[int]] | None:
    """Merged blocks to empty, by service, so that ``wanted`` come free with the fewest bytes copied.

    Any choice of a service's merged blocks leaves the same room in the rest, so each service offers as many
    of its emptiest as it can spare, and the emptiest of all offers are taken. Where two are as empty, the
    one with fewer cached blocks. None where fewer than ``wanted`` can be emptied.
    """
    offers: list[tuple[float, int, int, int]] = []
    for number, held in enumerate(helds):
        if number == asking:
            continue
        live = partly_live(held, shut)
        spare = len(live) - -(-sum(live.values()) // held.per_merged)
        offers += heapq.nsmallest(
            spare, ((live[m] / held.per_merged, held.parked.get(m, 0), number, m) for m in live)
        )
    if len(offers) < wanted:
        return None
    emptied: dict[int, list[int]] = {}
    for *_, number, merged in heapq.nsmallest(wanted, offers):
        emptied.setdefault(number, []).append(merged)
    return emptied


def partly_live(held: Held, shut: Collection[int]) -> dict[int, int]:
    """Live sub-blocks by merged block, of merged blocks with live and with other sub-blocks."""
    either = dict.fromkeys((*held.holes, *held.parked))
    return {
        merged: live_in(held, merged) for merged in either if merged not in held.idle and merged not in shut
    }


def choose_targets(held: Held, live: Mapping[int, int], count: int) -> list[tuple[int, int]]:
    """(merged, holes to fill) that take in ``count`` blocks, the fullest of ``live`` (by merged) first."""
    targets = []
    for merged in sorted(live, key=lambda one: (-live[one], one)):
        if not count:
            break
        filled = min(count, len(held.holes.get(merged, ())))
        if filled:
            targets.append((merged, filled))
            count -= filled
    return targets


def live_blocks(held: Held, merged: int, cached: Collection[int]) -> Iterable[int]:
    """The live sub-blocks of a merged block, in order."""
    first = merged * held.per_merged
    free = set(held.holes.get(merged, ()))
    return (b for b in range(first, first + held.per_merged) if b not in free and b not in cached)
