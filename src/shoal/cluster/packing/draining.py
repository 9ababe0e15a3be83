"""Draining a device group: moves all of its requests into other active groups, if they fit."""

from collections.abc import Callable, Sequence

from shoal.cluster.packing.items import Item
from shoal.cluster.packing.packing import Occupancy, Packing

FitsWith = Callable[[Occupancy, Item, Sequence[Item]], bool]
"""Whether a request fits in a group in addition to other inincoming ones."""


def drain(packing: Packing, occupancy: Occupancy, fits: FitsWith, *, fullest_first: bool) -> bool:
    """Move all requests of a group into other active ones, or none if not all fit.

    The largest goes first. fullest_first: into the fullest group that it fits in; otherwise the emptiest.
    """
    if any(item.stays for item in occupancy.items.values()):
        return False
    sign = 1 if fullest_first else -1
    free = {one.group.name: one.idle for one in packing.active() if one is not occupancy}
    incoming: dict[str, list[Item]] = {name: [] for name in free}
    items = sorted(occupancy.items.values(), key=lambda item: (-item.size, item.id))
    for item in items:
        for name in sorted(free, key=lambda name: sign * free[name]):
            if fits(packing.groups[name], item, incoming[name]):
                incoming[name].append(item)
                free[name] -= item.size
                break
        else:
            return False
    packing.take_out(items)
    for name, arriving in incoming.items():
        for item in arriving:
            packing.put(item, packing.groups[name])
    return True
