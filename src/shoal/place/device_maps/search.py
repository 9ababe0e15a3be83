"""Search for the best device map: exact where feasible, else the best found with a lower bound."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from shoal.place.device_maps.classes import Classes
from shoal.place.device_maps.costs import Costs, no_room
from shoal.place.device_maps.greedy import greedy_map
from shoal.place.device_maps.layers import layers_counts, layers_work
from shoal.place.device_maps.objectives import OBJECTIVES, Objective, Weights
from shoal.place.device_maps.problem import DeviceMap, MapProblem, evaluate, stages_of
from shoal.place.device_maps.shorten_path import shorter_path
from shoal.place.device_maps.tree import tree_counts
from shoal.place.device_maps.uneven import uneven_counts
from shoal.place.device_maps.visits import MOST_WORK, visits_counts, visits_work

_NEARBY = 12
"""Number of nearby devices for an exact search among a subset."""

Counts = list[tuple[int, int]]
"""(device, layers), in order."""


@dataclass(frozen=True, slots=True)
class FoundMap:
    """A device map with its score and a lower bound."""

    device_map: DeviceMap
    score: float
    """Less is better."""
    bound: float
    """Lower bound on the score of any map."""

    @property
    def exact(self) -> bool:
        """Whether the map is optimal, up to rounding."""
        return self.score <= self.bound * (1 + 1e-9)


def find_map(problem: MapProblem, objective: Objective) -> FoundMap:
    """The best map for an objective (UELLM, Algorithm 2).

    Exact for uniform layers if links depend only on host and network, for any number of devices; otherwise up
    to about 14 devices, or a few classes of devices. Exact for other layers up to about 10 devices. Raises
    ConfigError if the model does not fit, or if no map was found for a tight fit.
    """
    costs = Costs.of(problem)
    weights = objective.weights(costs)
    search = _uniform if costs.uniform else _uneven
    counts, bound = search(costs, weights)
    if not counts:
        raise no_room(problem, certain=not np.isfinite(bound))
    found = evaluate(problem, stages_of([(costs.devices[device].name, n) for device, n in counts]))
    score = weights.score(found.cost_s, len(found.stages))
    return FoundMap(found, score, min(bound, score))


def _uniform(costs: Costs, weights: Weights) -> tuple[Counts, float]:
    bound, counts = tree_counts(costs, weights)
    if not counts or weights.score_of(costs, counts) <= bound * (1 + 1e-12):
        return counts, bound
    classes = Classes.of(costs)
    if visits_work(classes, costs.layers) <= MOST_WORK:
        counts = visits_counts(costs, classes, weights)
        return counts, weights.score_of(costs, counts)
    return _improved(costs, weights, counts), bound


def _improved(costs: Costs, weights: Weights, counts: Counts) -> Counts:
    """Improve a map: exactly among nearby devices if it has few, else by a better order."""
    used = [device for device, _ in counts]
    if len(used) > _NEARBY:
        layers = dict(counts)
        return [(device, layers[device]) for device in shorter_path(costs.between_s, used)]
    nearness = costs.between_s[used].min(axis=0)
    nearness[used] = -1.0
    chosen = np.sort(np.argsort(nearness, kind="stable")[:_NEARBY])
    few = costs.among(chosen)
    best = visits_counts(few, Classes.of(few), weights)
    return [(int(chosen[device]), layers) for device, layers in best]


def _uneven(costs: Costs, weights: Weights) -> tuple[Counts, float]:
    classes = Classes.of(costs)
    if layers_work(costs, classes) <= MOST_WORK:
        counts = layers_counts(costs, classes, weights)
        return counts, weights.score_of(costs, counts) if counts else np.inf
    return uneven_counts(costs, weights)


def _best_for(problem: MapProblem, objective: Objective) -> DeviceMap:
    return find_map(problem, objective).device_map


DEVICE_MAPS: Mapping[str, Callable[[MapProblem], DeviceMap]] = {
    **{name: partial(_best_for, objective=objective) for name, objective in OBJECTIVES.items()},
    "greedy": greedy_map,
}
"""By name: UELLM's HELR, HE and LR, the time alone, and the greedy baseline."""
