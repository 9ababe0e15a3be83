"""Size classes of a group's requests, and of the group itself (Mell)."""

from collections.abc import Collection, Iterable, Sequence

from shoal.cluster.packing.classes import SizeClass, size_class
from shoal.cluster.packing.items import Item
from shoal.cluster.packing.packing import Occupancy

QUOTAS = {SizeClass.SMALL: 3, SizeClass.MEDIUM: 2}
"""Number of requests that fill a group of their class."""


def planned_size(item: Item, *, by_forecast: bool) -> int:
    """The size that determines the class."""
    return item.expected if by_forecast else item.size


class Structure:
    """Classes by present or by expected size."""

    def __init__(self, *, by_forecast: bool) -> None:
        self._by_forecast = by_forecast

    def class_in(self, occupancy: Occupancy, item: Item) -> SizeClass:
        """Class of a request in this group."""
        return size_class(planned_size(item, by_forecast=self._by_forecast), occupancy.group.capacity)

    def of(self, occupancy: Occupancy) -> SizeClass:
        """Class of an active group: that of its largest request, at least TINY."""
        most = max(planned_size(item, by_forecast=self._by_forecast) for item in occupancy.items.values())
        return max(SizeClass.TINY, size_class(most, occupancy.group.capacity))

    def members(self, occupancy: Occupancy, classes: Collection[SizeClass]) -> list[Item]:
        return [item for item in occupancy.items.values() if self.class_in(occupancy, item) in classes]

    def tiny(self, occupancy: Occupancy) -> list[Item]:
        """T and bundled requests, which make room for larger ones."""
        return self.members(occupancy, (SizeClass.TINY, SizeClass.BUNDLED))

    def latest(self, active: Sequence[Occupancy], wanted: SizeClass) -> Occupancy | None:
        return next((one for one in reversed(active) if self.of(one) is wanted), None)


def bundle_of(items: Iterable[Item], capacity: int, room: int) -> list[Item]:
    """Requests that move as one T item: one over C/8, or a bundle of smaller ones of at least that size.

    items: requests of at most C/4. A bundle takes the largest first, so that it has few. A bundle of all
    small requests may be smaller than C/8. Empty if nothing fits in ``room``.
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
