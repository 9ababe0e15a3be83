"""Shortest walks that visit each class a given number of times (Held-Karp, with multiplicities)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.place.device_maps.costs import Floats, Integers


@dataclass(frozen=True)
class Walks:
    """Shortest walks over m classes, for S combinations of visits."""

    visits: Integers
    """(S, m): visits to each class."""
    strides: Integers
    """(m,): increment of the entry number for one more visit."""
    lengths: Floats
    """(S, m): length of the shortest walk that ends in a class; infinite if there is none."""
    before: NDArray[np.int8]
    """(S, m): the class before the last."""

    def order(self, entry: int) -> list[int]:
        """Classes along the shortest walk of an entry."""
        last = int(np.argmin(self.lengths[entry]))
        order = []
        while last >= 0:
            order.append(last)
            entry, last = entry - int(self.strides[last]), int(self.before[entry, last])
        return order[::-1]


def shortest_walks(between: Floats, most: list[int]) -> Walks:
    """For all visits up to ``most``; between: (m, m), infinite where no step is allowed."""
    m = len(most)
    sizes = [count + 1 for count in most]
    visits = np.indices(sizes).reshape(m, -1).T
    strides = np.array([int(np.prod(sizes[at + 1 :])) for at in range(m)], dtype=np.int64)
    lengths = np.full((len(visits), m), np.inf)
    before = np.full((len(visits), m), -1, dtype=np.int8)
    lengths[strides, np.arange(m)] = 0.0
    total = visits.sum(axis=1)
    for steps in range(1, sum(most)):
        entries = np.flatnonzero(total == steps)
        for following in range(m):
            source = entries[visits[entries, following] < most[following]]
            ways = lengths[source] + between[:, following]
            target = source + strides[following]
            before[target, following] = ways.argmin(axis=1)
            lengths[target, following] = ways.min(axis=1)
    return Walks(visits, strides, lengths, before)
