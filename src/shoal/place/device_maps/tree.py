"""Maps by the tree of nearest links: a bound for any links, exact for hosts and networks.

A path over chosen devices costs at least their minimum spanning tree, and that at least the one with every
link as fast as the slowest link on the best way between its ends (single linkage). With those links devices
form a binary tree, and a dynamic program over its nodes and numbers of layers is exact. Where links are by
host and network it is so with the links as they are, and any path that follows the tree attains it.
"""

from dataclasses import dataclass

import numpy as np

from shoal.place.device_maps.costs import Costs, Floats
from shoal.place.device_maps.objectives import Weights


@dataclass(frozen=True)
class Node:
    """A set of devices."""

    scores: Floats
    """(U + 1,): least score for that many parts of the model; 0 for none."""
    device: int = -1
    """The device of a leaf."""
    halves: "tuple[Node, Node] | None" = None
    """Both halves, if it is no leaf."""
    joining: float = 0.0
    """Score of the link that joins them, if both are in use."""

    def taken(self, parts: int) -> list[tuple[int, int]]:
        """The (device, parts) that attain the score of ``parts``, in the tree's order."""
        if self.halves is None:
            return [(self.device, parts)]
        first, second = self.halves
        ways = first.scores[parts::-1] + second.scores[: parts + 1]
        ways[1:parts] += self.joining
        of_second = int(np.argmin(ways))
        taken = first.taken(parts - of_second) if of_second < parts else []
        return taken + (second.taken(of_second) if of_second else [])


def tree_counts(costs: Costs, weights: Weights) -> tuple[float, list[tuple[int, int]]]:
    """For uniform layers, a bound on any map's score, and the (device, layers) that attain it in the tree.

    The bound is infinite, and the list empty, if the layers do not fit.
    """
    leaves = [_layer_scores(costs, weights, device) for device in range(len(costs.devices))]
    root = tree_of(costs, weights, leaves)
    bound = float(root.scores[costs.layers])
    return bound, root.taken(costs.layers) if np.isfinite(bound) else []


def tree_of(costs: Costs, weights: Weights, leaves: list[Floats]) -> Node:
    """The root of the tree; leaves: each device's scores, as in ``Node``."""
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
    # The one with fewer possible numbers of parts is gone through in Python.
    if np.isfinite(first.scores).sum() < np.isfinite(second.scores).sum():
        first, second = second, first
    scores = np.minimum(first.scores, second.scores)
    for parts in np.flatnonzero(np.isfinite(second.scores))[1:]:
        both = first.scores[1 : len(scores) - parts] + (second.scores[parts] + link)
        np.minimum(scores[parts + 1 :], both, out=scores[parts + 1 :])
    return Node(scores, halves=(first, second), joining=link)
