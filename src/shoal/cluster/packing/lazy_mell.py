"""Our Mell: classes still say where requests go, and nothing moves unless that saves a device."""

from collections.abc import Sequence

from shoal.cluster.packing.draining import drain
from shoal.cluster.packing.fits import forecast_peak
from shoal.cluster.packing.items import Item
from shoal.cluster.packing.mell import ClassMell
from shoal.cluster.packing.packing import Occupancy, Packing
from shoal.cluster.packing.priority import EQUAL_WEIGHTS, Priority

_RATIO, _MORE = 4 / 3, 2
"""The paper's competitive ratio, and what may be beyond it before holes are filled by classes."""
_DRAINED = 2
"""So many of the emptiest groups are tried."""


class LazyMell(ClassMell):
    """Leaves holes to arrivals, and moves requests where that saves a group.

    Empties a group when the others can take all it has; makes room for a request by moving one other before
    it activates a group.

    Where more than 4/3 of the groups that are needed for certain are active, and 2 more, holes are filled
    as ``ClassMell`` fills them. by_forecast: classes are of expected sizes, and groups go first that will
    have room for a request until it ends. Shares of a group's memory keep growth from undoing at once what
    was done: headroom stays free where something is placed, relief where something left an overload, spare
    where a group takes from one that is emptied. Smaller shares save devices and cost migrations.
    """

    def __init__(
        self,
        packing: Packing,
        *,
        headroom: float = 0.05,
        relief: float = 0.08,
        spare: float = 0.25,
        by_forecast: bool = False,
        priority: Priority = EQUAL_WEIGHTS,
    ) -> None:
        super().__init__(packing, headroom=headroom, by_forecast=by_forecast, priority=priority)
        self._relief, self._spare = relief, spare
        self._by_forecast = by_forecast

    def place(self, item: Item) -> bool:
        """Where nobody need move; else with one move; else in a new group; else where no headroom is left."""
        target = self._without_moves(item)
        if target is not None:
            self.packing.put(item, target)
            return True
        return self._after_one_move(item) or self.activate_for(item) or self._into_headroom(item)

    def relieve(self, occupancy: Occupancy) -> None:
        """The smallest request leaves that makes enough room, or else the largest."""
        relief = int(self._relief * occupancy.group.capacity)
        while occupancy.overloaded:
            items = [item for item in occupancy.items.values() if not item.stays]
            if not items:
                break
            enough = [item for item in items if item.size >= relief - occupancy.idle]
            self.move_away(min(enough, key=_by_size) if enough else max(items, key=_by_size))

    def updated(self, ids: list[str]) -> None:
        """A class that changed moves nobody."""

    def rearrange(self) -> None:
        """Empty groups while there are more than needed."""
        self._holes.clear()
        packing = self.packing
        while len(packing.active()) > packing.fewest_groups():
            emptiest = sorted(packing.active(), key=lambda one: one.used / one.group.capacity)[:_DRAINED]
            if not any(drain(packing, one, self._fits_with_spare, fullest_first=True) for one in emptiest):
                break
        if len(packing.active()) > _RATIO * self._needed_for_certain() + _MORE:
            self._holes.update(dict.fromkeys(one.group.name for one in packing.active()))
            super().rearrange()

    def _needed_for_certain(self) -> int:
        """No packing has fewer groups; two requests over half of the largest group are never together."""
        half = max(one.group.capacity for one in self.packing.groups.values()) / 2
        return max(
            self.packing.fewest_groups(), sum(item.size > half for item in self.packing.items.values())
        )

    def _without_moves(self, item: Item) -> Occupancy | None:
        fitting = [one for one in self.packing.active() if self.fits(one, item)]
        if self._by_forecast and fitting:
            lasting = [one for one in fitting if self._excess(one, item) <= 0]
            if not lasting:
                return min(fitting, key=lambda one: self._excess(one, item))
            fitting = lasting
        completed = [one for one in fitting if self._completes(one, item)]
        if completed:
            host = self._host(item)
            return max(completed, key=lambda one: self._priority.of(one, host))
        joined = [one for one in fitting if self._joins(one, item)]
        return min(joined or fitting, key=lambda one: one.idle, default=None)

    def _into_headroom(self, item: Item) -> bool:
        active = self.packing.active()
        fitting = [one for one in active if one.group.hosts(item.service) and item.size <= one.idle]
        if fitting:
            self.packing.put(item, min(fitting, key=lambda one: one.idle))
        return bool(fitting)

    def _excess(self, occupancy: Occupancy, item: Item) -> int:
        """How far a group with this request will go beyond its memory, as forecast."""
        return forecast_peak([*occupancy.items.values(), item]) - occupancy.group.capacity

    def _after_one_move(self, item: Item) -> bool:
        """Place it where the smallest request that is in its way finds room elsewhere."""
        active = self.packing.active()
        best: tuple[Item, Occupancy, Occupancy] | None = None
        for source in active:
            if not source.group.hosts(item.service):
                continue
            spare = source.group.capacity * self.headroom
            for other in source.items.values():
                if source.idle + other.size - spare < item.size or (best and best[0].size <= other.size):
                    continue
                if other.stays:
                    continue
                targets = [one for one in active if one is not source and self.fits(one, other)]
                if targets:
                    target = min(targets, key=lambda one: one.idle)
                    best = (other, source, target)
        if best is None:
            return False
        other, source, target = best
        self.packing.take_out([other])
        self.packing.put(other, target)
        self.packing.put(item, source)
        return True

    def _fits_with_spare(self, occupancy: Occupancy, item: Item, beside: Sequence[Item]) -> bool:
        coming = item.size + sum(other.size for other in beside)
        spare = occupancy.group.capacity * self._spare
        return self.fits(occupancy, item, beside) and coming <= occupancy.idle - spare


def _by_size(item: Item) -> tuple[int, str]:
    return item.size, item.id
