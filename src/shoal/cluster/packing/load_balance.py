"""Load-balancing packer: migrates requests between groups, as in Llumnix (Sun et al., OSDI 2024)."""

from collections.abc import Sequence

from shoal.cluster.packing.draining import drain
from shoal.cluster.packing.fit_packers import WorstFit
from shoal.cluster.packing.fits import Need, present
from shoal.cluster.packing.items import Item
from shoal.cluster.packing.packer import shed_newest
from shoal.cluster.packing.packing import Occupancy, Packing


class LoadBalance(WorstFit):
    """Places as worst fit does; then moves a request from the fullest group to the emptiest, and so on in
    pairs.

    threshold: difference of loads (used share of the capacity) up to which a pair is left alone. draining:
    whether to drain the emptiest group if the other groups keep ``spare``, a share of their capacity, free.
    """

    def __init__(
        self,
        packing: Packing,
        *,
        need: Need = present,
        threshold: float = 0.2,
        draining: bool = False,
        spare: float = 0.1,
    ) -> None:
        super().__init__(packing, need=need)
        self.threshold, self.draining, self.spare = threshold, draining, spare

    def relieve(self, occupancy: Occupancy) -> None:
        """Moves requests to the emptiest group; preempts if that is not enough."""
        while occupancy.overloaded:
            target = min(self.packing.active(), key=_load)
            item = self._to_move(occupancy, target)
            if item is None:
                break
            self.packing.take_out([item])
            self.packing.put(item, target)
        shed_newest(self.packing, occupancy)

    def rearrange(self) -> None:
        """One migration per pair, and one drain if enabled."""
        ordered = sorted(self.packing.active(), key=_load)
        for emptiest, fullest in zip(ordered[: len(ordered) // 2], reversed(ordered), strict=False):
            if _load(fullest) - _load(emptiest) <= self.threshold:
                break
            item = self._to_move(fullest, emptiest)
            if item is not None:
                self.packing.take_out([item])
                self.packing.put(item, emptiest)
        if self.draining:
            for first in sorted(self.packing.active(), key=_load)[:1]:
                drain(self.packing, first, self._fits_with_spare, fullest_first=False)

    def _to_move(self, source: Occupancy, target: Occupancy) -> Item | None:
        """The request whose move balances the two best, without making the target the fuller one."""
        if source is target:
            return None
        fitting = [
            item
            for item in source.items.values()
            if self.fits(target, item) and item.size < source.used - target.used and not item.stays
        ]
        return min(fitting, key=lambda item: abs(source.used - target.used - 2 * item.size), default=None)

    def _fits_with_spare(self, occupancy: Occupancy, item: Item, incoming: Sequence[Item]) -> bool:
        needed = item.size + sum(other.size for other in incoming)
        spare = occupancy.group.capacity * self.spare
        return self.fits(occupancy, item, incoming) and needed <= occupancy.idle - spare


def _load(occupancy: Occupancy) -> float:
    return occupancy.used / occupancy.group.capacity
