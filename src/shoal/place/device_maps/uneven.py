"""Maps of layers of different sizes over many devices: a bound, and good maps.

A model's bytes are cut into equal parts that any device may have. A map's devices then have at least as many
parts, the last of each perhaps nearly empty; so the tree of nearest links gives a bound. The devices that
attain it for a little more than the model are tried, with the layers divided among them as well as can be.
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
"""Parts beyond the model that devices are looked for, because layers do not fill them."""


def uneven_counts(costs: Costs, weights: Weights) -> tuple[list[tuple[int, int]], float]:
    """The (device, layers) of a good map, in order, and a bound; the list is empty if none was found."""
    root = tree_of(costs, weights, [_part_scores(costs, weights, at) for at in range(len(costs.devices))])
    orders = [
        [device for device, _ in root.taken(_PARTS + more)]
        for more in _MORE_PARTS
        if np.isfinite(root.scores[_PARTS + more])
    ]
    # A map of as many layers as large as the largest is one of these, too.
    _, roomy = tree_counts(costs.with_layers_of(costs.layer_bytes.max()), weights)
    orders.append([device for device, _ in roomy])
    ways = {way for order in orders if order for way in _ways(shorter_path(costs.between_s, order))}
    # Where layers hardly fit, it matters which is where, and that is not what nearness says.
    filled = [device for device, _ in filled_counts(costs.layer_bytes, costs.room_bytes)]
    found, least = [], np.inf
    for way in sorted(ways) + [tuple(filled)] * bool(filled):
        counts = split_in_order(costs, list(way), weights)
        score = weights.score_of(costs, counts) if counts else np.inf
        if score < least:
            found, least = counts, score
    # A map of these layers is one of as many small ones, too.
    bound, _ = tree_counts(costs.with_layers_of(costs.layer_bytes.min()), weights)
    return found, max(bound, float(root.scores[_PARTS]))


def _ways(order: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(order), tuple(reversed(order))


def _part_scores(costs: Costs, weights: Weights, device: int) -> Floats:
    """(parts + 1,): no map with that many begun parts on the device has a lower score for it."""
    part_bytes = float(costs.layer_bytes.sum()) / _PARTS
    scores = np.full(_PARTS + _MORE_PARTS[-1] + 1, np.inf)
    scores[0] = 0.0
    most = min(len(scores) - 1, int(np.ceil(costs.room_bytes[device] / part_bytes)))
    full = np.arange(most)
    scores[1 : most + 1] = weights.per_device + weights.per_s * costs.byte_s[device] * part_bytes * full
    return scores
