"""Compaction of fragmented KV memory: which merged blocks are emptied, and where their live blocks move.

A service whose own free and cached sub-blocks do not suffice needs merged blocks of other services. Merged
blocks without live sub-blocks can simply be evicted; in the rest, live sub-blocks can be packed:

    |A A . .| |A . . .| |A A A .|   ->   |A A . .| |. . . .| |A A A A|
                                                    free

The requesting service itself is not packed: it can use its free sub-blocks where they are.
"""

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.kvcache.service_blocks import ServiceBlocks


@dataclass(frozen=True, slots=True)
class BlockMove:
    """Move a live block's content and references to another block of its service."""

    service: str
    source: int
    target: int


def num_releasable(owned: ServiceBlocks, num_cached: int, excluded: Collection[int]) -> int:
    """Number of merged blocks with live sub-blocks that a service could empty by packing, from counts alone.

    num_cached: cached blocks of the service. excluded: merged blocks that must not be packed.
    """
    per_merged = owned.blocks_per_merged
    used = owned.num_merged - len(owned.evictable)
    live = owned.num_merged * per_merged - owned.num_free_slots - num_cached
    for merged in excluded:
        if (merged in owned.free_slots or merged in owned.num_cached) and merged not in owned.evictable:
            used -= 1
            live -= num_live(owned, merged)
    return used - -(-live // per_merged)


def num_live(owned: ServiceBlocks, merged: int) -> int:
    """Live sub-blocks of a merged block."""
    return owned.blocks_per_merged - len(owned.free_slots.get(merged, ())) - owned.num_cached.get(merged, 0)


def choose_sources(
    services: Sequence[ServiceBlocks], requester: int, wanted: int, excluded: Collection[int]
) -> dict[int, list[int]] | None:
    """Merged blocks to empty, by service, so that ``wanted`` become free with the fewest bytes copied.

    Any choice of a service's merged blocks leaves the same room in the rest. So each service except the
    requester offers as many of its emptiest as it can spare, and the emptiest of all offers are taken, with
    fewer cached blocks first among equals. None if fewer than ``wanted`` can be emptied.
    """
    offers: list[tuple[float, int, int, int]] = []
    for service, owned in enumerate(services):
        if service == requester:
            continue
        per_merged = owned.blocks_per_merged
        live = partly_live(owned, excluded)
        spare = len(live) - -(-sum(live.values()) // per_merged)
        offers += heapq.nsmallest(
            spare,
            (
                (live[merged] / per_merged, owned.num_cached.get(merged, 0), service, merged)
                for merged in live
            ),
        )
    if len(offers) < wanted:
        return None
    emptied: dict[int, list[int]] = {}
    for *_, service, merged in heapq.nsmallest(wanted, offers):
        emptied.setdefault(service, []).append(merged)
    return emptied


def partly_live(owned: ServiceBlocks, excluded: Collection[int]) -> dict[int, int]:
    """Number of live sub-blocks by merged block, for merged blocks that are partly live."""
    not_full = dict.fromkeys((*owned.free_slots, *owned.num_cached))
    return {
        merged: num_live(owned, merged)
        for merged in not_full
        if merged not in owned.evictable and merged not in excluded
    }


def choose_targets(owned: ServiceBlocks, live: Mapping[int, int], count: int) -> list[tuple[int, int]]:
    """(merged, free slots to fill) with room for ``count`` blocks, the fullest first.

    live: number of live sub-blocks by merged block.
    """
    targets = []
    for merged in sorted(live, key=lambda merged: (-live[merged], merged)):
        if not count:
            break
        filled = min(count, len(owned.free_slots.get(merged, ())))
        if filled:
            targets.append((merged, filled))
            count -= filled
    return targets


def live_blocks(owned: ServiceBlocks, merged: int, cached: Collection[int]) -> Iterable[int]:
    """The live sub-blocks of a merged block, in order."""
    first = merged * owned.blocks_per_merged
    free = set(owned.free_slots.get(merged, ()))
    return (
        block
        for block in range(first, first + owned.blocks_per_merged)
        if block not in free and block not in cached
    )
