"""Local search on device order: shortens a path by reversals and moves of single nodes."""

import numpy as np

from shoal.place.device_maps.costs import Floats


def shorter_path(between: Floats, path: list[int]) -> list[int]:
    """Apply the best reversal of a part, or move of a node, while that shortens the path.

    between: (n, n) symmetric lengths; path: some of the n nodes.
    """
    n = len(between)
    # A node at distance 0 from all others at both ends, so that ends are not special.
    lengths = np.zeros((n + 1, n + 1))
    lengths[:n, :n] = between
    tour = np.array([n, *path, n])
    while True:
        reversal, move = _best_reversal(lengths, tour), _best_move(lengths, tour)
        gain, tour_then = min(reversal, move, key=lambda way: way[0])
        if gain >= -1e-12 * max(1e-12, float(lengths.max())):
            return [int(node) for node in tour[1:-1]]
        tour = tour_then


def _best_reversal(lengths: Floats, tour: np.ndarray) -> tuple[float, np.ndarray]:
    own = lengths[tour[:-1], tour[1:]]
    # Reversing the part between steps i and j (i < j) replaces both steps.
    gains = lengths[np.ix_(tour[:-1], tour[:-1])] + lengths[np.ix_(tour[1:], tour[1:])]
    gains = gains - own[:, None] - own[None, :]
    gains[np.tril_indices(len(own))] = 0.0
    i, j = divmod(int(np.argmin(gains)), len(own))
    turned = tour.copy()
    turned[i + 1 : j + 1] = turned[i + 1 : j + 1][::-1]
    return float(gains[i, j]), turned


def _best_move(lengths: Floats, tour: np.ndarray) -> tuple[float, np.ndarray]:
    own = lengths[tour[:-1], tour[1:]]
    nodes = tour[1:-1]
    closed = lengths[tour[:-2], tour[2:]] - own[:-1] - own[1:]
    opened = lengths[np.ix_(nodes, tour[:-1])] + lengths[np.ix_(nodes, tour[1:])] - own[None, :]
    gains = closed[:, None] + opened
    at = np.arange(len(nodes))
    gains[at, at] = gains[at, at + 1] = 0.0
    node, step = divmod(int(np.argmin(gains)), len(own))
    rest = np.delete(tour, node + 1)
    place = step + 1 if step < node else step
    return float(gains[node, step]), np.insert(rest, place, tour[node + 1])
