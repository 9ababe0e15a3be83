"""Maps of uniform layers by single linkage: a lower bound for any links, exact for links by host and network.

A path over chosen devices costs at least their minimum spanning tree. That costs at least as much as with
every link replaced by the slowest link on the best way between its ends (single linkage). Those links form a
binary tree of devices, over which a dynamic program is exact. If links depend only on host and network, the
replacement changes nothing, and any path in the order of the tree attains the bound.
"""

from dataclasses import dataclass

import numpy as np

from shoal.place.device_maps.costs import Costs, Floats
from shoal.place.device_maps.objectives import Weights


@dataclass(frozen=True)
class Node:
    """A set of devices in the tree."""

    scores: Floats
    """(U + 1,): minimum score for each number of parts of the model; 0 for none."""
    device: int = -1
    """Of a leaf."""
    halves: "tuple[Node, Node] | None" = None
    """Of an inner node."""
    joining: float = 0.0
    """Score of the link between the halves, if both are in use."""

    def allocation(self, parts: int) -> list[tuple[int, int]]:
        """(device, parts) that attain the score of ``parts``, in the order of the tree."""
        if self.halves is None:
            return [(self.device, parts)]
        first, second = self.halves
        ways = first.scores[parts::-1] + second.scores[: parts + 1]
        ways[1:parts] += self.joining
        second_parts = int(np.argmin(ways))
        allocation = first.allocation(parts - second_parts) if second_parts < parts else []
        return allocation + (second.allocation(second_parts) if second_parts else [])


def tree_counts(costs: Costs, weights: Weights) -> tuple[float, list[tuple[int, int]]]:
    """For uniform layers, a lower bound on the score, and the (device, layers) that attain it in the tree.

    If the layers do not fit, the bound is infinite and the list empty.
    """
    leaves = [_layer_scores(costs, weights, device) for device in range(len(costs.devices))]
    root = tree_of(costs, weights, leaves)
    bound = float(root.scores[costs.layers])
    return bound, root.allocation(costs.layers) if np.isfinite(bound) else []


def tree_of(costs: Costs, weights: Weights, leaves: list[Floats]) -> Node:
    """Build the tree; leaves: each device's scores, as in ``Node``. Returns the root."""
    nodes = [Node(scores, device) for device, scores in enumerate(leaves)]
    owner = list(range(len(nodes)))
    rows, columns = np.triu_indices(len(nodes), 1)
    root = nodes[0]
    for edge in np.argsort(costs.between_s[rows, columns], kind="stable"):
        first, second = _find(owner, int(rows[edge])), _find(owner, int(columns[edge]))
        if first != second:
            link = weights.per_s * float(costs.between_s[rows[edge], columns[edge]])
            root = nodes[first] = _joined(nodes[first], nodes[second], link)
            owner[second] = first
    return root


def _find(owner: list[int], member: int) -> int:
    while owner[member] != member:
        owner[member] = owner[owner[member]]
        member = owner[member]
    return member


def _layer_scores(costs: Costs, weights: Weights, device: int) -> Floats:
    scores = np.full(costs.layers + 1, np.inf)
    scores[0] = 0.0
    layers = np.arange(1, int(costs.room_layers[device]) + 1)
    scores[layers] = weights.per_device + weights.per_s * costs.layer_s[device] * layers
    return scores


def _joined(first: Node, second: Node, link: float) -> Node:
    # The Python loop runs over the node with fewer possible numbers of parts.
    if np.isfinite(first.scores).sum() < np.isfinite(second.scores).sum():
        first, second = second, first
    scores = np.minimum(first.scores, second.scores)
    for parts in np.flatnonzero(np.isfinite(second.scores))[1:]:
        both = first.scores[1 : len(scores) - parts] + (second.scores[parts] + link)
        np.minimum(scores[parts + 1 :], both, out=scores[parts + 1 :])
    return Node(scores, halves=(first, second), joining=link)
