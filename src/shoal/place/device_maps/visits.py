"""Exact maps of uniform layers: a search over the numbers of visits to each class of devices.

For given visits, the walk between classes and the layers per class are independent: each layer of a class
costs the same, and each additional device costs a link within the class. So the best walk and the best layers
are computed for all numbers of visits, and added.
"""

import numpy as np

from shoal.place.device_maps.classes import Classes
from shoal.place.device_maps.costs import Costs, Floats
from shoal.place.device_maps.objectives import Weights
from shoal.place.device_maps.walks import shortest_walks

MOST_WORK = 3e8
"""Limit on additions of an exact search: a few seconds."""


def visits_work(classes: Classes, layers: int) -> float:
    """Approximate number of additions of ``visits_counts``."""
    sizes = [float(count + 1) for count in classes.max_visits(layers)]
    entries, m = float(np.prod(sizes)), len(sizes)
    return entries * m * m + entries / sizes[-1] * layers * layers


def visits_counts(costs: Costs, classes: Classes, weights: Weights) -> list[tuple[int, int]]:
    """(device, layers) of an optimal map, in order; empty if the layers do not fit."""
    most = classes.max_visits(costs.layers)
    walks = shortest_walks(classes.between_s, most)
    tables = [_class_scores(costs, classes, weights, at, most[at]) for at in range(len(most))]
    sums = _sums(tables, costs.layers)
    scores = weights.per_s * walks.lengths.min(axis=1) + sums[-1][:, -1]
    best = int(np.argmin(scores))
    if not np.isfinite(scores[best]):
        return []
    visits = walks.visits[best]
    layers = _layers_of(tables, sums, visits.tolist(), costs.layers)
    return _devices(costs, classes, walks.order(best), visits.tolist(), layers)


def _class_scores(costs: Costs, classes: Classes, weights: Weights, at: int, most: int) -> Floats:
    """(most + 1, L + 1): minimum score by visits and layers of a class."""
    device, size = classes.members[at][0], len(classes.members[at])
    room = int(costs.room_layers[device])
    table = np.full((most + 1, costs.layers + 1), np.inf)
    table[0, 0] = 0.0
    for visits in range(1, most + 1):
        layers = np.arange(visits, min(size * room, costs.layers) + 1)
        used = np.maximum(visits, -(-layers // room))
        again = np.where(used > visits, used - visits, 0)
        link = weights.per_s * classes.within_s[at] if size > 1 else 0.0
        scores = weights.per_s * costs.layer_s[device] * layers + weights.per_device * used + link * again
        table[visits, layers] = scores
    return table


def _sums(tables: list[Floats], layers: int) -> list[Floats]:
    """For each prefix of the classes: (visits, L + 1) minimum scores; the last only for L layers."""
    sums = [np.full((1, layers + 1), np.inf)]
    sums[0][0, 0] = 0.0
    for table in tables[:-1]:
        before = sums[-1]
        joined = np.full((len(before), len(table), layers + 1), np.inf)
        for visits, row in enumerate(table):
            for taken in np.flatnonzero(np.isfinite(row)):
                ways = before[:, : layers + 1 - taken] + row[taken]
                np.minimum(joined[:, visits, taken:], ways, out=joined[:, visits, taken:])
        sums.append(joined.reshape(-1, layers + 1))
    last = (sums[-1][:, None, ::-1] + tables[-1][None]).min(axis=2)
    return [*sums, last.reshape(-1, 1)]


def _layers_of(tables: list[Floats], sums: list[Floats], visits: list[int], layers: int) -> list[int]:
    """Optimal layers of each class at these visits."""
    found = []
    for at in reversed(range(len(tables))):
        entry = 0
        for table, count in zip(tables[:at], visits, strict=False):
            entry = entry * len(table) + count
        ways = sums[at][entry, layers::-1] + tables[at][visits[at], : layers + 1]
        found.append(int(np.argmin(ways)))
        layers -= found[-1]
    return found[::-1]


def _devices(
    costs: Costs, classes: Classes, order: list[int], visits: list[int], layers: list[int]
) -> list[tuple[int, int]]:
    """Devices along the walk; extra devices of a class go to its first visit."""
    free = [list(members) for members in classes.members]
    visited = [False] * len(free)
    shares: list[list[int]] = []
    for members, count, total in zip(classes.members, visits, layers, strict=True):
        used = max(count, -(-total // int(costs.room_layers[members[0]])))
        shares.append([total // used + (at < total % used) for at in range(used)] if used else [])
    counts = []
    for at in order:
        here = 1 if visited[at] else len(shares[at]) - visits[at] + 1
        visited[at] = True
        counts += [(free[at].pop(0), shares[at].pop(0)) for _ in range(here)]
    return counts
