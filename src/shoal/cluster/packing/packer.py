"""What all packers have in common: the order of operations, overloads, arrivals that fit nowhere."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from shoal.cluster.packing.changes import Arrival, Changes, Operations
from shoal.cluster.packing.fits import Need, present
from shoal.cluster.packing.items import Item
from shoal.cluster.packing.packing import Occupancy, Packing


class Packer(ABC):
    """Decides in which group each request is. The same operations give the same changes.

    need: what requests take up where they are placed. headroom: share of a group's capacity that stays free
    when something is placed beside others; growth may use it.
    """

    def __init__(self, packing: Packing, *, need: Need = present, headroom: float = 0.0) -> None:
        self.packing = packing
        """What it decides about."""
        self.need = need
        """What requests take up."""
        self.headroom = headroom
        """Share of the capacity."""

    def apply(self, operations: Operations) -> Changes:
        """Carry the operations out; departures, then updates, then arrivals.

        After updates no group is over its memory, unless all that it has must stay. Requests that are refused
        or preempted are no longer known.
        """
        packing = self.packing
        packing.begin()
        for id in operations.departures:
            self.departed(packing.leave(id))
        for id, growth in operations.updates.items():
            packing.resize(id, growth)
        self.updated(list(operations.updates))
        # Only what grows or was admitted overloads a group; arrivals need not wait for what comes of that.
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
        """Take notice of a request that is in a group already, which may be over its memory until updates."""
        self.packing.put(self.packing.enter(arrival), self.packing.groups[group])

    @abstractmethod
    def place(self, item: Item) -> bool:
        """Put a request that is nowhere into a group; False where it fits in none."""

    @abstractmethod
    def relieve(self, occupancy: Occupancy) -> None:
        """Take requests out of a group until it is no longer overloaded."""

    def departed(self, occupancy: Occupancy) -> None:  # noqa: B027
        """A request has left this group."""

    def updated(self, ids: list[str]) -> None:  # noqa: B027
        """These requests have new sizes."""

    def rearrange(self) -> None:  # noqa: B027
        """All operations are carried out."""

    def fits(self, occupancy: Occupancy, item: Item, beside: Sequence[Item] = ()) -> bool:
        """Whether a request may be placed in an active group, when those ``beside`` have come into it."""
        group = occupancy.group
        free = occupancy.idle - sum(other.size for other in beside)
        if item.size > free or not group.hosts(item.service):
            return False
        spare = group.capacity * self.headroom
        if self.need is present:
            return item.size <= free - spare
        return self.need([*occupancy.items.values(), *beside, item]) <= group.capacity - spare

    def activate_for(self, item: Item) -> bool:
        """Put a request into an idle group; False where there is none for it."""
        occupancy = self.packing.to_activate(item.service, item.size)
        if occupancy is None:
            return False
        self.packing.put(item, occupancy)
        return True


def shed_newest(packing: Packing, occupancy: Occupancy) -> None:
    """Preempt the requests that came last until the others have room."""
    while occupancy.overloaded:
        item = next(reversed(occupancy.items.values()))
        packing.take_out([item])
        packing.give_up(item)
