"""Where every request is: the one owner of that, and the journal of what a batch of operations changed."""

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence

from shoal.cluster.packing.changes import Arrival, Changes, Growth, Migration
from shoal.cluster.packing.items import DeviceGroup, Item
from shoal.core import ConfigError


class Occupancy:
    """A device group and what is in it. Only ``Packing`` changes it."""

    __slots__ = ("activation", "group", "items", "used")

    def __init__(self, group: DeviceGroup) -> None:
        self.group = group
        """The group itself."""
        self.items: dict[str, Item] = {}
        """By id, in the order in which they came."""
        self.used = 0
        """Sum of their sizes."""
        self.activation = 0
        """Larger if activated later; 0 while idle. A group is idle while it holds nothing."""

    @property
    def idle(self) -> int:
        """Free memory, negative in an overload."""
        return self.group.capacity - self.used

    @property
    def overloaded(self) -> bool:
        """Whether its requests have outgrown it."""
        return self.used > self.group.capacity


class Packing:
    """Requests in device groups, between ``begin`` and ``finish`` of a batch of operations."""

    def __init__(self, groups: Sequence[DeviceGroup]) -> None:
        """Raises ConfigError where two groups have one name."""
        self.groups: dict[str, Occupancy] = {}
        """All groups by name."""
        self.items: dict[str, Item] = {}
        """All running requests by id."""
        self.used = 0
        """Sum of their sizes."""
        self._active: dict[str, Occupancy] = {}
        self._activations = 0
        self._were_active: set[str] = set()
        self._origins: dict[str, str | None] = {}
        self._preempted: list[str] = []
        self._refused: list[str] = []
        self.relieved: list[str] = []
        """Groups that the batch left over their memory, until they were relieved."""
        self._largest_first: list[Occupancy] = []
        for group in groups:
            self.open(group)

    def open(self, group: DeviceGroup) -> None:
        """Another group, which holds nothing; raises ConfigError where there is one of its name."""
        if group.name in self.groups:
            raise ConfigError("device groups must have different names")
        occupancy = self.groups[group.name] = Occupancy(group)
        insort(self._largest_first, occupancy, key=lambda one: -one.group.capacity)

    def close(self, name: str) -> None:
        """A group is gone; its requests are not known any more."""
        occupancy = self.groups.pop(name)
        self._largest_first.remove(occupancy)
        self._active.pop(name, None)
        for item in occupancy.items.values():
            self._forget(item)

    def active(self) -> list[Occupancy]:
        """Groups that hold something, by activation."""
        return list(self._active.values())

    def recent(self) -> Iterator[Occupancy]:
        """Groups that hold something, the most recently activated first."""
        return reversed(self._active.values())

    def to_activate(self, service: str, size: int) -> Occupancy | None:
        """The idle group that would be activated for a request: the largest that hosts it, or None."""
        for occupancy in self._largest_first:
            if occupancy.group.capacity < size:
                return None
            if not occupancy.items and occupancy.group.hosts(service):
                return occupancy
        return None

    def fewest_groups(self) -> int:
        """No packing of these requests has fewer groups: the largest ones, filled to the brim."""
        left, count = self.used, 0
        for occupancy in self._largest_first:
            if left <= 0:
                return count
            left -= occupancy.group.capacity
            count += 1
        return count

    def begin(self) -> None:
        """A batch of operations begins."""
        self._were_active = set(self._active)
        self._origins.clear()
        self._preempted.clear()
        self._refused.clear()
        self.relieved.clear()

    def finish(self) -> Changes:
        """What the batch changed: each request's way from where it was to where it is, without detours."""
        placed, migrations = {}, []
        for id, origin in self._origins.items():
            group = self.items[id].group
            assert group is not None, f"{id} is nowhere"
            if origin is None:
                placed[id] = group
            elif origin != group:
                migrations.append(Migration(id, origin, group))
        return Changes(
            placed=placed,
            refused=tuple(self._refused),
            migrations=migrations,
            preempted=tuple(self._preempted),
            relieved=tuple(self.relieved),
            activated=[name for name in self._active if name not in self._were_active],
            terminated=[name for name in sorted(self._were_active) if name not in self._active],
        )

    def enter(self, arrival: Arrival) -> Item:
        """A new request, which is not yet anywhere; it must be put somewhere, or given up."""
        if arrival.id in self.items:
            raise ValueError(f"request {arrival.id} is already running")
        item = Item(
            id=arrival.id,
            service=arrival.service,
            size=arrival.size,
            expected=max(arrival.size, arrival.expected),
        )
        self.items[item.id] = item
        self.used += item.size
        return item

    def leave(self, id: str) -> Occupancy:
        """A request ends; the group that it was in."""
        item = self.items[id]
        assert item.group is not None
        occupancy = self.groups[item.group]
        self.take_out([item])
        self._forget(item)
        return occupancy

    def resize(self, id: str, growth: Growth) -> Occupancy:
        """A request has another size; the group that it is in."""
        item = self.items[id]
        assert item.group is not None
        occupancy = self.groups[item.group]
        occupancy.used += growth.size - item.size
        self.used += growth.size - item.size
        item.size = growth.size
        item.expected = max(growth.size, growth.expected)
        item.stays = growth.stays
        return occupancy

    def take_out(self, items: Iterable[Item]) -> None:
        """Requests leave their groups, to be put somewhere else, or given up."""
        for item in items:
            assert item.group is not None
            occupancy = self.groups[item.group]
            del occupancy.items[item.id]
            occupancy.used -= item.size
            self._origins.setdefault(item.id, item.group)
            item.group = None
            if not occupancy.items:
                occupancy.activation = 0
                del self._active[occupancy.group.name]

    def put(self, item: Item, occupancy: Occupancy) -> None:
        """A request that is nowhere comes into a group that hosts its service."""
        assert item.group is None
        assert occupancy.group.hosts(item.service)
        if not occupancy.items:
            self._activations += 1
            occupancy.activation = self._activations
            self._active[occupancy.group.name] = occupancy
        self._origins.setdefault(item.id, None)
        occupancy.items[item.id] = item
        occupancy.used += item.size
        item.group = item.home = occupancy.group.name

    def give_up(self, item: Item) -> None:
        """A request that is nowhere loses its KV; an arrival is refused."""
        new = item.home is None or self._origins.get(item.id, item.home) is None
        (self._refused if new else self._preempted).append(item.id)
        self._forget(item)

    def check_integrity(self) -> None:
        """Raise AssertionError if the books do not agree, or a group is over its memory."""
        held = {id: name for name, occupancy in self.groups.items() for id in occupancy.items}
        assert held == {id: item.group for id, item in self.items.items()}
        assert sum(len(occupancy.items) for occupancy in self.groups.values()) == len(self.items)
        assert self.used == sum(item.size for item in self.items.values())
        for name, occupancy in self.groups.items():
            assert occupancy.used == sum(item.size for item in occupancy.items.values())
            assert occupancy.used <= occupancy.group.capacity, f"{name} is over its memory"
            assert all(occupancy.group.hosts(item.service) for item in occupancy.items.values())
            assert (occupancy.activation > 0) == bool(occupancy.items) == (name in self._active)
        activations = [occupancy.activation for occupancy in self._active.values()]
        assert activations == sorted(activations)

    def _forget(self, item: Item) -> None:
        del self.items[item.id]
        self.used -= item.size
        self._origins.pop(item.id, None)
