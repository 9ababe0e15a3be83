"""Best fit and worst fit: requests stay where they were placed."""

from shoal.cluster.packing.items import Item
from shoal.cluster.packing.packer import Packer, shed_newest
from shoal.cluster.packing.packing import Occupancy


class BestFit(Packer):
    """Into the group with the least idle memory that suffices; a new one where none does."""

    def place(self, item: Item) -> bool:
        """Least idle memory first, equal ones by activation."""
        fitting = [one for one in self.packing.active() if self.fits(one, item)]
        if fitting:
            self.packing.put(item, min(fitting, key=lambda one: one.idle))
            return True
        return self.activate_for(item)

    def relieve(self, occupancy: Occupancy) -> None:
        """Growth without room ends in a preemption."""
        shed_newest(self.packing, occupancy)


class WorstFit(Packer):
    """Into the group with the most idle memory; a new one where none suffices."""

    def place(self, item: Item) -> bool:
        """Most idle memory first, equal ones by activation."""
        fitting = [one for one in self.packing.active() if self.fits(one, item)]
        if fitting:
            self.packing.put(item, max(fitting, key=lambda one: one.idle))
            return True
        return self.activate_for(item)

    def relieve(self, occupancy: Occupancy) -> None:
        """Growth without room ends in a preemption."""
        shed_newest(self.packing, occupancy)
