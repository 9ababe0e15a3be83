"""Base class of packers: order of operations, handling of overloads and of arrivals that fit nowhere."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from shoal.cluster.packing.changes import Arrival, Changes, Operations
from shoal.cluster.packing.fits import Need, present
from shoal.cluster.packing.items import Item
from shoal.cluster.packing.packing import Occupancy, Packing


class Packer(ABC):
    """Decides on the group of each request; the same operations give the same changes.

    need: memory of requests for placement. headroom: share of a group's capacity that placements leave free
    for growth, except for the first request in a group.
    """

    def __init__(self, packing: Packing, *, need: Need = present, headroom: float = 0.0) -> None:
        self.packing = packing
        self.need = need
        self.headroom = headroom

    def apply(self, operations: Operations) -> Changes:
        """Apply departures, then updates, then arrivals.

        After updates no group is over its memory, unless none of its requests may move. Refused and preempted
        requests are forgotten.
        """
        packing = self.packing
        packing.begin()
        for id in operations.departures:
            self.departed(packing.leave(id))
        for id, growth in operations.updates.items():
            packing.resize(id, growth)
        self.updated(list(operations.updates))
        # Only growth and admitted requests overload a group.
        for occupancy in packing.active() if operations.updates else ():
            if occupancy.overloaded:
                packing.relieved.append(occupancy.group.name)
                self.relieve(occupancy)
        for arrival in operations.arrivals:
            item = packing.enter(arrival)
            if not self.place(item):
                packing.give_up(item)
        self.rearrange()
        return packing.finish()

    def admit(self, arrival: Arrival, group: str) -> None:
        """Record a request that is in a group already; the group may be over its memory until the next
        updates."""
        self.packing.put(self.packing.enter(arrival), self.packing.groups[group])

    @abstractmethod
    def place(self, item: Item) -> bool:
        """Put a request into a group; False if it fits in none."""

    @abstractmethod
    def relieve(self, occupancy: Occupancy) -> None:
        """Take requests out of a group until it is not overloaded."""

    def departed(self, occupancy: Occupancy) -> None:  # noqa: B027
        """Hook: a request has left this group."""

    def updated(self, ids: list[str]) -> None:  # noqa: B027
        """Hook: these requests have new sizes."""

    def rearrange(self) -> None:  # noqa: B027
        """Hook: all operations are applied."""

    def fits(self, occupancy: Occupancy, item: Item, incoming: Sequence[Item] = ()) -> bool:
        """Whether a request may be placed in an active group in addition to ``incoming`` ones."""
        group = occupancy.group
        free = occupancy.idle - sum(other.size for other in incoming)
        if item.size > free or not group.hosts(item.service):
            return False
        spare = group.capacity * self.headroom
        if self.need is present:
            return item.size <= free - spare
        return self.need([*occupancy.items.values(), *incoming, item]) <= group.capacity - spare

    def activate_for(self, item: Item) -> bool:
        """Put a request into an idle group; False if there is none for it."""
        occupancy = self.packing.to_activate(item.service, item.size)
        if occupancy is None:
            return False
        self.packing.put(item, occupancy)
        return True


def shed_newest(packing: Packing, occupancy: Occupancy) -> None:
    """Preempt the newest requests until the others have room."""
    while occupancy.overloaded:
        item = next(reversed(occupancy.items.values()))
        packing.take_out([item])
        packing.give_up(item)
