"""The classes of what is in a group, and of the group itself."""

from collections.abc import Collection, Iterable, Sequence

from shoal.cluster.packing.classes import SizeClass, size_class
from shoal.cluster.packing.items import Item
from shoal.cluster.packing.packing import Occupancy

QUOTAS = {SizeClass.SMALL: 3, SizeClass.MEDIUM: 2}
"""How many of a class make a group of that class full."""


def planned_size(item: Item, *, by_forecast: bool) -> int:
    """The size that its class is of."""
    return item.expected if by_forecast else item.size


class Structure:
    """Classes by present size, or by the size that is expected."""

    def __init__(self, *, by_forecast: bool) -> None:
        self._by_forecast = by_forecast

    def class_in(self, occupancy: Occupancy, item: Item) -> SizeClass:
        """The class that a request has or would have in this group."""
        return size_class(planned_size(item, by_forecast=self._by_forecast), occupancy.group.capacity)

    def of(self, occupancy: Occupancy) -> SizeClass:
        """The class of an active group: that of its largest request, at least TINY."""
        most = max(planned_size(item, by_forecast=self._by_forecast) for item in occupancy.items.values())
        return max(SizeClass.TINY, size_class(most, occupancy.group.capacity))

    def members(self, occupancy: Occupancy, classes: Collection[SizeClass]) -> list[Item]:
        """Requests of these classes in a group, in its order."""
        return [item for item in occupancy.items.values() if self.class_in(occupancy, item) in classes]

    def tiny(self, occupancy: Occupancy) -> list[Item]:
        """Requests that give way to larger ones."""
        return self.members(occupancy, (SizeClass.TINY, SizeClass.BUNDLED))

    def latest(self, active: Sequence[Occupancy], wanted: SizeClass) -> Occupancy | None:
        """The group of this class that was activated last."""
        return next((one for one in reversed(active) if self.of(one) is wanted), None)


def bundle_of(items: Iterable[Item], capacity: int, room: int) -> list[Item]:
    """What moves as one T item: a request over C/8, or smaller ones bundled to at least that.

    items: requests of at most C/4. Bundles are formed when something is to be moved, with the largest
    requests first, so that they have few. One of all the small requests there are may be smaller. Empty
    where nothing fits in ``room``.
    """
    largest_first = sorted(items, key=lambda item: (-item.size, item.id))
    for item in largest_first:
        if item.size <= room and 8 * item.size > capacity:
            return [item]
    bundle: list[Item] = []
    total = 0
    for item in largest_first:
        if 8 * item.size <= capacity and total + item.size <= room and 8 * total <= capacity:
            bundle.append(item)
            total += item.size
    all_small = all(8 * item.size <= capacity for item in largest_first)
    return bundle if 8 * total > capacity or (all_small and len(bundle) == len(largest_first)) else []
