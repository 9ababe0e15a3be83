"""Classes of interchangeable devices: same memory, same speed, same links to all others."""

from dataclasses import dataclass

import numpy as np

from shoal.place.device_maps.costs import Costs, Floats


@dataclass(frozen=True)
class Classes:
    """The m classes of a problem's devices."""

    members: tuple[tuple[int, ...], ...]
    within_s: Floats
    """(m,): between two devices of a class; infinite where it has only one."""
    between_s: Floats
    """(m, m): between devices of two classes; infinite on the diagonal."""

    @classmethod
    def of(cls, costs: Costs) -> "Classes":
        found: list[list[int]] = []
        for device in range(len(costs.devices)):
            members_alike = next(
                (members for members in found if _interchangeable(costs, members[0], device)), None
            )
            if members_alike is None:
                found.append([device])
            else:
                members_alike.append(device)
        # Classes with many visits go last, where the search over layers is cheapest.
        found.sort(key=len)
        first = [members[0] for members in found]
        within = [costs.between_s[m[0], m[1]] if len(m) > 1 else np.inf for m in found]
        between = costs.between_s[np.ix_(first, first)].copy()
        np.fill_diagonal(between, np.inf)
        return cls(tuple(map(tuple, found)), np.array(within), between)

    def max_visits(self, layers: int) -> list[int]:
        """Upper bound on the visits of an optimal path to each class.

        1 if returning gains nothing (two runs can be merged); m if two equal crossings can be exchanged for
        links within the classes; else the number of its devices.
        """
        m = len(self.members)
        single = [len(members) == 1 for members in self.members]
        runs = []
        for own, members in enumerate(self.members):
            others = [other for other in range(m) if other != own]
            size = min(len(members), layers)
            if single[own]:
                runs.append(1)
            elif not all(single[other] or self._exchangeable(own, other) for other in others):
                runs.append(size)
            else:
                runs.append(1 if self._is_return_useless(own, others) else min(size, m))
        return runs

    def _exchangeable(self, own: int, other: int) -> bool:
        return bool(self.within_s[own] + self.within_s[other] <= 2 * self.between_s[own, other])

    def _is_return_useless(self, own: int, others: list[int]) -> bool:
        within, to = self.within_s[own], self.between_s[own]
        if any(within > to[other] for other in others):
            return False
        return all(
            within + self.between_s[one, another] <= to[one] + to[another]
            for at, one in enumerate(others)
            for another in others[:at]
        )


def _interchangeable(costs: Costs, first: int, second: int) -> bool:
    if costs.room_bytes[first] != costs.room_bytes[second] or costs.byte_s[first] != costs.byte_s[second]:
        return False
    same = costs.between_s[first] == costs.between_s[second]
    same[[first, second]] = True
    return bool(same.all())
