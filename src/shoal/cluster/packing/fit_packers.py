"""Best-fit and worst-fit packers, which never move requests."""

from shoal.cluster.packing.items import Item
from shoal.cluster.packing.packer import Packer, shed_newest
from shoal.cluster.packing.packing import Occupancy


class BestFit(Packer):
    """Places a request in the fullest group that it fits in, else in a new one."""

    def place(self, item: Item) -> bool:
        fitting = [one for one in self.packing.active() if self.fits(one, item)]
        if fitting:
            self.packing.put(item, min(fitting, key=lambda one: one.idle))
            return True
        return self.activate_for(item)

    def relieve(self, occupancy: Occupancy) -> None:
        shed_newest(self.packing, occupancy)


class WorstFit(Packer):
    """Places a request in the emptiest active group, else in a new one."""

    def place(self, item: Item) -> bool:
        fitting = [one for one in self.packing.active() if self.fits(one, item)]
        if fitting:
            self.packing.put(item, max(fitting, key=lambda one: one.idle))
            return True
        return self.activate_for(item)

    def relieve(self, occupancy: Occupancy) -> None:
        shed_newest(self.packing, occupancy)
