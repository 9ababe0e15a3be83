"""Heuristic maps of layers of different sizes over many devices, with a lower bound.

The model's bytes are cut into equal parts. The devices of a map have at least as many parts, the last of each
perhaps nearly empty, so ``tree`` gives a bound. Candidates are the devices that attain it for slightly more
parts than the model has; the layers are then split optimally among them.
"""

import numpy as np

from shoal.place.device_maps.costs import Costs, Floats
from shoal.place.device_maps.greedy import filled_counts
from shoal.place.device_maps.layers import split_in_order
from shoal.place.device_maps.objectives import Weights
from shoal.place.device_maps.shorten_path import shorter_path
from shoal.place.device_maps.tree import tree_counts, tree_of

_PARTS = 500
_MORE_PARTS = tuple(range(0, 151, 10))
"""Extra parts for which devices are selected, because whole layers do not fill devices."""


def uneven_counts(costs: Costs, weights: Weights) -> tuple[list[tuple[int, int]], float]:
    """(device, layers) of a good map, in order, and a lower bound; the list is empty if none was found."""
    root = tree_of(costs, weights, [_part_scores(costs, weights, at) for at in range(len(costs.devices))])
    orders = [
        [device for device, _ in root.allocation(_PARTS + more)]
        for more in _MORE_PARTS
        if np.isfinite(root.scores[_PARTS + more])
    ]
    # A map of equal layers of the largest size is valid for these layers.
    _, roomy = tree_counts(costs.with_layers_of(costs.layer_bytes.max()), weights)
    orders.append([device for device, _ in roomy])
    ways = {way for order in orders if order for way in _ways(shorter_path(costs.between_s, order))}
    # For a tight fit, sizes matter more than distances.
    filled = [device for device, _ in filled_counts(costs.layer_bytes, costs.room_bytes)]
    found, least = [], np.inf
    for way in sorted(ways) + [tuple(filled)] * bool(filled):
        counts = split_in_order(costs, list(way), weights)
        score = weights.score_of(costs, counts) if counts else np.inf
        if score < least:
            found, least = counts, score
    # A map of these layers is valid for equal layers of the smallest size.
    bound, _ = tree_counts(costs.with_layers_of(costs.layer_bytes.min()), weights)
    return found, max(bound, float(root.scores[_PARTS]))


def _ways(order: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(order), tuple(reversed(order))


def _part_scores(costs: Costs, weights: Weights, device: int) -> Floats:
    """(parts + 1,): lower bound of the score of a device with that many parts begun."""
    part_bytes = float(costs.layer_bytes.sum()) / _PARTS
    scores = np.full(_PARTS + _MORE_PARTS[-1] + 1, np.inf)
    scores[0] = 0.0
    most = min(len(scores) - 1, int(np.ceil(costs.room_bytes[device] / part_bytes)))
    full = np.arange(most)
    scores[1 : most + 1] = weights.per_device + weights.per_s * costs.byte_s[device] * part_bytes * full
    return scores
