"""Lazy Mell (policy ``mell``): places by size class, and moves requests only to save a device group."""

from collections.abc import Sequence

from shoal.cluster.packing.draining import drain
from shoal.cluster.packing.fits import forecast_peak
from shoal.cluster.packing.items import Item
from shoal.cluster.packing.mell import ClassMell
from shoal.cluster.packing.packing import Occupancy, Packing
from shoal.cluster.packing.priority import EQUAL_WEIGHTS, Priority

_RATIO, _MARGIN = 4 / 3, 2
"""The paper's competitive ratio, and the groups allowed beyond it before holes are filled by class."""
_DRAIN_CANDIDATES = 2
"""Number of the emptiest groups that are tried."""


class LazyMell(ClassMell):
    """Leaves holes to arrivals, and moves requests only where that saves a group.

    It drains a group when the other groups can hold all of its requests. Before it activates a group for a
    request, it tries to make room by moving one other request. If more than 4/3 of the lower bound of groups,
    plus 2, are active, holes are filled as by ``ClassMell``.

    by_forecast: classes are of expected sizes, and groups with room for a request until its end come first.
    headroom, relief, spare: shares of a group's memory that stay free after a placement, after an overload,
    and in the targets of a drain, so that growth does not undo the change at once. Smaller shares save
    devices and cost migrations.
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
        """Without a move; else with one move; else in a new group; else in the headroom of one."""
        target = self._without_moves(item)
        if target is not None:
            self.packing.put(item, target)
            return True
        return self._after_one_move(item) or self.activate_for(item) or self._into_headroom(item)

    def relieve(self, occupancy: Occupancy) -> None:
        """Moves the smallest request that makes enough room, or else the largest."""
        relief = int(self._relief * occupancy.group.capacity)
        while occupancy.overloaded:
            items = [item for item in occupancy.items.values() if not item.stays]
            if not items:
                break
            enough = [item for item in items if item.size >= relief - occupancy.idle]
            self.move_away(min(enough, key=_by_size) if enough else max(items, key=_by_size))

    def updated(self, ids: list[str]) -> None:
        """A change of class moves nothing."""

    def rearrange(self) -> None:
        """Drain groups while there are more than needed."""
        self._holes.clear()
        packing = self.packing
        while len(packing.active()) > packing.fewest_groups():
            emptiest = sorted(packing.active(), key=lambda one: one.used / one.group.capacity)[
                :_DRAIN_CANDIDATES
            ]
            if not any(drain(packing, one, self._fits_with_spare, fullest_first=True) for one in emptiest):
                break
        if len(packing.active()) > _RATIO * self._min_groups() + _MARGIN:
            self._holes.update(dict.fromkeys(one.group.name for one in packing.active()))
            super().rearrange()

    def _min_groups(self) -> int:
        """Lower bound of groups: two requests over half of the largest group never share one."""
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
        """Forecast excess of a group with this request over its memory."""
        return forecast_peak([*occupancy.items.values(), item]) - occupancy.group.capacity

    def _after_one_move(self, item: Item) -> bool:
        """Place a request by moving the smallest other one that makes room."""
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

    def _fits_with_spare(self, occupancy: Occupancy, item: Item, incoming: Sequence[Item]) -> bool:
        needed = item.size + sum(other.size for other in incoming)
        spare = occupancy.group.capacity * self._spare
        return self.fits(occupancy, item, incoming) and needed <= occupancy.idle - spare


def _by_size(item: Item) -> tuple[int, str]:
    return item.size, item.id
