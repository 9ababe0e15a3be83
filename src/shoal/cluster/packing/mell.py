"""Mell as published (``mell-eager``, ``mell-literal``; Fig. 10): size classes, holes filled at once."""

from collections import Counter
from collections.abc import Collection, Iterable

from shoal.cluster.packing.classes import SizeClass
from shoal.cluster.packing.items import Item
from shoal.cluster.packing.packer import Packer
from shoal.cluster.packing.packing import Occupancy, Packing
from shoal.cluster.packing.priority import EQUAL_WEIGHTS, Priority
from shoal.cluster.packing.structure import QUOTAS, Structure, bundle_of

PRINTED = frozenset({SizeClass.LARGE})
"""Group classes that accept T requests in the paper's Allocate."""
MENDED = frozenset({SizeClass.LARGE, SizeClass.MEDIUM})
"""The same, corrected so that the paper's properties 1 and 5 can hold."""
_COMPANIONS = (SizeClass.MEDIUM, SizeClass.SMALL)
_FULL_ENOUGH = 0.75
"""Used share of a T group that property 3 requires."""
_MAX_FILLS = 3
"""Limit on fills of a group after one batch, so that filling terminates."""


class ClassMell(Packer):
    """Groups have the class of their largest request; holes are filled from the group activated last.

    takes_tiny: group classes that are filled up with T requests. departs_others: all requests but the largest
    leave an overloaded L group (Update, 2 and 3, as printed). by_forecast: classes are of expected sizes.
    """

    def __init__(
        self,
        packing: Packing,
        *,
        headroom: float = 0.0,
        takes_tiny: Collection[SizeClass] = MENDED,
        departs_others: bool = False,
        by_forecast: bool = False,
        priority: Priority = EQUAL_WEIGHTS,
    ) -> None:
        super().__init__(packing, headroom=headroom)
        self.structure = Structure(by_forecast=by_forecast)
        self._takes_tiny = takes_tiny
        self._departs_others = departs_others
        self._priority = priority
        self._classes: dict[str, SizeClass] = {}
        self._holes: dict[str, None] = {}

    def place(self, item: Item) -> bool:
        """With an L request, else in the newest group of its class, else in a new group, else anywhere."""
        target = self._by_class(item)
        if target is not None:
            self._put(item, target)
        elif not self.activate_for(item):
            target = self.fullest_fitting(item)
            if target is None:
                return False
            self.packing.put(item, target)
        assert item.group is not None
        home = self.packing.groups[item.group]
        self._classes[item.id] = self.structure.class_in(home, item)
        if self._classes[item.id] is SizeClass.LARGE:
            self._holes[item.group] = None
        return True

    def relieve(self, occupancy: Occupancy) -> None:
        """T requests move first, then the smallest request that suffices."""
        if self._departs_others and self.structure.of(occupancy) is SizeClass.LARGE:
            self._depart_others(occupancy)
        while occupancy.overloaded:
            excess = -occupancy.idle
            movable = [item for item in occupancy.items.values() if not item.stays]
            if not movable:
                break
            leaving = [item for item in self.structure.tiny(occupancy) if not item.stays] or movable
            sufficient = [item for item in leaving if item.size >= excess]
            item = (
                min(sufficient, key=lambda item: item.size)
                if sufficient
                else max(leaving, key=lambda item: item.size)
            )
            self.move_away(item)

    def _depart_others(self, occupancy: Occupancy) -> None:
        """Place all requests of a group anew, except the largest."""
        largest_first = sorted(occupancy.items.values(), key=lambda item: (-item.size, item.id))
        others = [item for item in largest_first[1:] if not item.stays]
        self._holes[occupancy.group.name] = None
        self.packing.take_out(others)
        for item in others:
            self._place_or_give_up(item)

    def departed(self, occupancy: Occupancy) -> None:
        """Note a hole, to be filled after all operations: an arrival may fill it."""
        self._holes[occupancy.group.name] = None

    def updated(self, ids: list[str]) -> None:
        """Move requests whose class changed to groups of that class."""
        for id in ids:
            item = self.packing.items.get(id)
            if item is None:  # preempted
                continue
            assert item.group is not None
            occupancy = self.packing.groups[item.group]
            now = self.structure.class_in(occupancy, item)
            if now is not self._classes.get(id):
                self._classes[id] = now
                self._reclassify(item, occupancy)

    def rearrange(self) -> None:
        """Fill the holes; filling one may open another."""
        filled: Counter[str] = Counter()
        while self._holes:
            name = next(iter(self._holes))
            del self._holes[name]
            if self.packing.groups[name].items and filled[name] < _MAX_FILLS:
                filled[name] += 1
                self._fill(self.packing.groups[name])
        if len(self._classes) > 2 * len(self.packing.items) + 64:
            self._classes = {id: was for id, was in self._classes.items() if id in self.packing.items}

    def fullest_fitting(self, item: Item) -> Occupancy | None:
        """The fullest group with room."""
        fitting = [one for one in self.packing.active() if self.fits(one, item)]
        return min(fitting, key=lambda one: one.idle, default=None)

    def _by_class(self, item: Item) -> Occupancy | None:
        active = self.packing.active()
        completable = [one for one in active if self._completes(one, item)]
        if completable:
            host = self._host(item)
            return max(completable, key=lambda one: self._priority.of(one, host))
        return next((one for one in reversed(active) if self._joins(one, item)), None)

    def _host(self, item: Item) -> str | None:
        return None if item.home is None else self.packing.groups[item.home].group.host

    def _completes(self, occupancy: Occupancy, item: Item) -> bool:
        """Whether a request completes a group of larger requests."""
        if not occupancy.group.hosts(item.service):
            return False
        own, kind = self.structure.class_in(occupancy, item), self.structure.of(occupancy)
        if own <= SizeClass.TINY:
            return kind in self._takes_tiny and self.fits(occupancy, item)
        if own is SizeClass.LARGE or kind is not SizeClass.LARGE:
            return False
        return not self.structure.members(occupancy, _COMPANIONS) and self._fits_without_tiny(occupancy, item)

    def _joins(self, occupancy: Occupancy, item: Item) -> bool:
        """Whether a request can join a group of its own class."""
        if not occupancy.group.hosts(item.service):
            return False
        own, kind = self.structure.class_in(occupancy, item), self.structure.of(occupancy)
        if max(own, SizeClass.TINY) is not kind or own is SizeClass.LARGE:
            return False
        if own <= SizeClass.TINY:
            return self.fits(occupancy, item)
        same_class = self.structure.members(occupancy, (own,))
        return len(same_class) < QUOTAS[own] and self._fits_without_tiny(occupancy, item)

    def _fits_without_tiny(self, occupancy: Occupancy, item: Item) -> bool:
        tiny = {each.id for each in self.structure.tiny(occupancy)}
        staying = [each for id, each in occupancy.items.items() if id not in tiny]
        return self.need([*staying, item]) <= occupancy.group.capacity * (1 - self.headroom)

    def _put(self, item: Item, occupancy: Occupancy) -> None:
        """Place a request; T requests make room for it."""
        leaving = sorted(self.structure.tiny(occupancy), key=lambda each: (each.size, each.id))
        evicted = []
        while leaving and not self.fits(occupancy, item):
            short = item.size - occupancy.idle
            enough = next((each for each in leaving if each.size >= short), leaving[-1])
            leaving.remove(enough)
            evicted.append(enough)
            self.packing.take_out([enough])
        self.packing.put(item, occupancy)
        for each in evicted:
            self._place_or_give_up(each)

    def _move(self, items: Iterable[Item], target: Occupancy) -> None:
        """Move requests to another group, which leaves holes."""
        for item in list(items):
            assert item.group is not None
            self._holes[item.group] = None
            self.packing.take_out([item])
            self._put(item, target)
            self._classes[item.id] = self.structure.class_in(target, item)

    def move_away(self, item: Item) -> None:
        """Move a request to any other group, or give it up."""
        assert item.group is not None
        self._holes[item.group] = None
        self.packing.take_out([item])
        self._place_or_give_up(item)

    def _place_or_give_up(self, item: Item) -> None:
        if not self.place(item):
            self.packing.give_up(item)

    def _reclassify(self, item: Item, occupancy: Occupancy) -> None:
        """Move a request of a new class, unless it is in the right group, or the one L there."""
        self._holes[occupancy.group.name] = None
        others = [each for each in occupancy.items.values() if each is not item]
        largest = self._classes[item.id] is SizeClass.LARGE
        if not others or (largest and self.structure.members(occupancy, (SizeClass.LARGE,)) == [item]):
            return
        self.packing.take_out([item])
        if self._completes(occupancy, item) or self._joins(occupancy, item):
            self._put(item, occupancy)
        else:
            self._place_or_give_up(item)

    def _fill(self, occupancy: Occupancy) -> None:
        """Restore the properties of one group, from groups activated later."""
        if self.structure.of(occupancy) is not SizeClass.LARGE:
            self._promote(occupancy)
            if not occupancy.items:
                return
        kind = self.structure.of(occupancy)
        if kind is SizeClass.LARGE:
            self._fetch_companion(occupancy)
        elif kind in QUOTAS:
            self._fetch_same_class(occupancy, kind)
        if kind in self._takes_tiny:
            self._fetch_tiny(occupancy, 1.0)
        elif kind is SizeClass.TINY:
            self._fetch_tiny(occupancy, _FULL_ENOUGH)

    def _fetch_companion(self, occupancy: Occupancy) -> None:
        """Move an S or M request to an L group without one."""
        if self.structure.members(occupancy, _COMPANIONS):
            return
        sources = [one for one in self.packing.active() if self.structure.of(one) in QUOTAS]
        host = occupancy.group.host
        for source in sorted(sources, key=lambda one: -self._priority.of(one, host)):
            fitting = [
                item
                for item in self.structure.members(source, _COMPANIONS)
                if self._completes(occupancy, item)
            ]
            if fitting:
                self._move([max(fitting, key=lambda item: item.size)], occupancy)
                return

    def _fetch_same_class(self, occupancy: Occupancy, kind: SizeClass) -> None:
        """Move S or M requests from the newest group of the class until this one is full."""
        while True:
            donor = self.structure.latest(self.packing.active(), kind)
            if donor is None or donor is occupancy:
                return
            fitting = [
                item for item in self.structure.members(donor, (kind,)) if self._joins(occupancy, item)
            ]
            if not fitting:
                return
            self._move([max(fitting, key=lambda item: item.size)], occupancy)

    def _promote(self, occupancy: Occupancy) -> None:
        """Move requests to groups of larger ones that they complete."""
        own = self.structure.of(occupancy)
        movable = self.structure.tiny(occupancy)
        if own is not SizeClass.TINY:
            movable = self.structure.members(occupancy, _COMPANIONS)
        for item in movable:
            completed = [one for one in self.packing.active() if self._completes(one, item)]
            if completed:
                host = occupancy.group.host
                self._move([item], max(completed, key=lambda one: self._priority.of(one, host)))

    def _fetch_tiny(self, occupancy: Occupancy, until: float) -> None:
        """Move T requests from the newest T group while they fit, and less than ``until`` is used."""
        capacity = occupancy.group.capacity
        while occupancy.used < until * capacity:
            donor = self.structure.latest(self.packing.active(), SizeClass.TINY)
            if donor is None or donor is occupancy:
                return
            tiny = [item for item in self.structure.tiny(donor) if self.fits(occupancy, item)]
            bundle = bundle_of(tiny, capacity, int(occupancy.idle - capacity * self.headroom))
            if not bundle:
                return
            self._move(bundle, occupancy)
