"""Exact maps of uniform layers: how often each class is visited, and how many layers it has.

With the visits given, the walk between classes and the layers in them are apart: of a class's layers each
costs the same, and a device more costs a link within the class. So the best walk and the best layers are
found for all numbers of visits, and added.
"""

import numpy as np

from shoal.place.device_maps.classes import Classes
from shoal.place.device_maps.costs import Costs, Floats
from shoal.place.device_maps.objectives import Weights
from shoal.place.device_maps.walks import shortest_walks

MOST_WORK = 3e8
"""Additions that an exact search may take: some seconds."""


def visits_work(classes: Classes, layers: int) -> float:
    """About how many additions ``visits_counts`` takes."""
    sizes = [float(count + 1) for count in classes.most_runs(layers)]
    entries, m = float(np.prod(sizes)), len(sizes)
    return entries * m * m + entries / sizes[-1] * layers * layers


def visits_counts(costs: Costs, classes: Classes, weights: Weights) -> list[tuple[int, int]]:
    """The (device, layers) of a best map, in order; empty if the layers do not fit."""
    most = classes.most_runs(costs.layers)
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
    """(most + 1, L + 1): least score of that many layers on a class that is visited that often."""
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
    """For each number of first classes: (their visits, L + 1) least scores; the last has only L."""
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
    """Layers of each class at these visits."""
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
    """Devices along the walk; what a class has beyond one device for each visit comes in its first run."""
    free = [list(members) for members in classes.members]
    begun = [False] * len(free)
    shares: list[list[int]] = []
    for members, count, total in zip(classes.members, visits, layers, strict=True):
        used = max(count, -(-total // int(costs.room_layers[members[0]])))
        shares.append([total // used + (at < total % used) for at in range(used)] if used else [])
    counts = []
    for at in order:
        here = 1 if begun[at] else len(shares[at]) - visits[at] + 1
        begun[at] = True
        counts += [(free[at].pop(0), shares[at].pop(0)) for _ in range(here)]
    return counts
