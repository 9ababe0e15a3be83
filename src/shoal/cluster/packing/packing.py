"""Packing state: the group of every request, and a journal of the changes of one batch."""

from bisect import insort
from collections.abc import Iterable, Sequence

from shoal.cluster.packing.changes import Arrival, Changes, Growth, Migration
from shoal.cluster.packing.items import DeviceGroup, Item
from shoal.core import ConfigError


class Occupancy:
    """A device group and its requests. Only ``Packing`` changes it."""

    __slots__ = ("activation", "group", "items", "used")

    def __init__(self, group: DeviceGroup) -> None:
        self.group = group
        self.items: dict[str, Item] = {}
        """By id, in order of arrival."""
        self.used = 0
        """Sum of the sizes."""
        self.activation = 0
        """Order of activation; 0 while idle, that is, empty."""

    @property
    def idle(self) -> int:
        """Free memory; negative in an overload."""
        return self.group.capacity - self.used

    @property
    def overloaded(self) -> bool:
        return self.used > self.group.capacity


class Packing:
    """Requests in device groups, between ``begin`` and ``finish`` of a batch of operations."""

    def __init__(self, groups: Sequence[DeviceGroup]) -> None:
        """Raises ConfigError for duplicate names."""
        self.groups: dict[str, Occupancy] = {}
        self.items: dict[str, Item] = {}
        self.used = 0
        """Sum of the sizes."""
        self._active: dict[str, Occupancy] = {}
        self._activations = 0
        self._were_active: set[str] = set()
        self._origins: dict[str, str | None] = {}
        self._preempted: list[str] = []
        self._refused: list[str] = []
        self.relieved: list[str] = []
        """Groups that were over their memory in this batch."""
        self._largest_first: list[Occupancy] = []
        for group in groups:
            self.open(group)

    def open(self, group: DeviceGroup) -> None:
        """Add an empty group; raises ConfigError for a duplicate name."""
        if group.name in self.groups:
            raise ConfigError("device groups must have different names")
        occupancy = self.groups[group.name] = Occupancy(group)
        insort(self._largest_first, occupancy, key=lambda one: -one.group.capacity)

    def close(self, name: str) -> None:
        """Remove a group with its requests."""
        occupancy = self.groups.pop(name)
        self._largest_first.remove(occupancy)
        self._active.pop(name, None)
        for item in occupancy.items.values():
            self._forget(item)

    def active(self) -> list[Occupancy]:
        """Non-empty groups, by activation."""
        return list(self._active.values())

    def to_activate(self, service: str, size: int) -> Occupancy | None:
        """The idle group to activate for a request: the largest that hosts it, or None."""
        for occupancy in self._largest_first:
            if occupancy.group.capacity < size:
                return None
            if not occupancy.items and occupancy.group.hosts(service):
                return occupancy
        return None

    def fewest_groups(self) -> int:
        """Lower bound of groups for these requests: the largest ones, completely filled."""
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
        """The changes of the batch: of each request only its first and last group."""
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
        """Add a request, which must then be put into a group or given up."""
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
        """Remove a request; returns its group."""
        item = self.items[id]
        assert item.group is not None
        occupancy = self.groups[item.group]
        self.take_out([item])
        self._forget(item)
        return occupancy

    def resize(self, id: str, growth: Growth) -> Occupancy:
        """Set the size of a request; returns its group."""
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
        """Take requests out of their groups; they must then be put into a group or given up."""
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
        """Put a request without a group into one that hosts its service."""
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
        """Give up a request without a group: an arrival is refused, another preempted."""
        new = item.home is None or self._origins.get(item.id, item.home) is None
        (self._refused if new else self._preempted).append(item.id)
        self._forget(item)

    def check_integrity(self) -> None:
        """Raise AssertionError if the state is inconsistent, or a group is over its memory."""
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
