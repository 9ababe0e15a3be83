"""Exact maps of layers of any sizes: a dynamic program over used devices, the last one, and placed layers."""

from dataclasses import dataclass

import numpy as np

from shoal.place.device_maps.classes import Classes
from shoal.place.device_maps.costs import Costs, Floats, Integers
from shoal.place.device_maps.objectives import Weights


def layers_work(costs: Costs, classes: Classes) -> float:
    """Approximate number of additions of ``layers_counts``."""
    sizes = [min(len(members), costs.layers) + 1 for members in classes.members]
    m = len(sizes)
    return float(np.prod([float(size) for size in sizes])) * m * costs.layers * (m + costs.layers)


def layers_counts(costs: Costs, classes: Classes, weights: Weights) -> list[tuple[int, int]]:
    """(device, layers) of an optimal map, in order; empty if the layers do not fit."""
    search = _Search(costs, classes, weights)
    search.fill()
    return search.best()


def split_in_order(costs: Costs, order: list[int], weights: Weights) -> list[tuple[int, int]]:
    """Optimal (device, layers) for devices in a given order, all in use; empty if there is none."""
    reached = np.full((len(order) + 1, costs.layers + 1), np.inf)
    reached[0, 0] = 0.0
    blocks = [_block_scores(costs, device, weights) for device in order]
    for at, block in enumerate(blocks):
        reached[at + 1] = (reached[at][:, None] + block).min(axis=0)
    end, counts = costs.layers, []
    if not np.isfinite(reached[-1, end]):
        return []
    for at in reversed(range(len(order))):
        begin = int(np.argmin(reached[at] + blocks[at][:, end]))
        counts.append((order[at], end - begin))
        end = begin
    return counts[::-1]


def _block_scores(costs: Costs, device: int, weights: Weights) -> Floats:
    """(L + 1, L + 1): score of layers [i, j) on a device."""
    until = np.concatenate([[0], np.cumsum(costs.layer_bytes)])
    needed = until[None, :] - until[:, None]
    scores = weights.per_device + weights.per_s * costs.byte_s[device] * needed
    return np.where((needed > 0) & (needed <= costs.room_bytes[device]), scores, np.inf)


@dataclass
class _Search:
    """The tables; a state is the number of used devices of each class."""

    costs: Costs
    classes: Classes
    weights: Weights

    def __post_init__(self) -> None:
        layers, members = self.costs.layers, self.classes.members
        self.most = [min(len(devices), layers) for devices in members]
        sizes = [count + 1 for count in self.most]
        m = len(sizes)
        self.used: Integers = np.indices(sizes).reshape(m, -1).T
        self.strides = [int(np.prod(sizes[at + 1 :])) for at in range(m)]
        self.blocks = [_block_scores(self.costs, devices[0], self.weights) for devices in members]
        steps = self.classes.between_s.copy()
        np.fill_diagonal(steps, self.classes.within_s)
        self.steps: Floats = self.weights.per_s * steps
        self.scores: Floats = np.full((len(self.used), m, layers + 1), np.inf)

    def fill(self) -> None:
        """Compute the minimum score of every state, last class and number of layers."""
        for at, stride in enumerate(self.strides):
            self.scores[stride, at] = self.blocks[at][0]
        total = self.used.sum(axis=1)
        for devices in range(1, min(sum(self.most), self.costs.layers)):
            states = np.flatnonzero(total == devices)
            for at, stride in enumerate(self.strides):
                source = states[self.used[states, at] < self.most[at]]
                entering = (self.scores[source] + self.steps[None, :, at, None]).min(axis=1)
                target = np.full_like(entering, np.inf)
                for begin in range(devices, self.costs.layers):
                    np.minimum(target, entering[:, begin, None] + self.blocks[at][begin], out=target)
                self.scores[source + stride, at] = target

    def best(self) -> list[tuple[int, int]]:
        """Trace back the best map."""
        end = self.costs.layers
        state, last = np.unravel_index(int(np.argmin(self.scores[:, :, end])), self.scores.shape[:2])
        if not np.isfinite(self.scores[state, last, end]):
            return []
        steps = [(int(last), end)]
        at, entry = int(last), int(state)
        while entry := entry - self.strides[at]:
            ways = self.scores[entry] + self.steps[:, at, None] + self.blocks[at][None, :, end]
            before, begin = np.unravel_index(int(np.argmin(ways)), ways.shape)
            at, end = int(before), int(begin)
            steps.append((at, end))
        free = [iter(members) for members in self.classes.members]
        begins = [0, *(end for _, end in reversed(steps))]
        return [
            (next(free[at]), end - begin) for (at, end), begin in zip(reversed(steps), begins, strict=False)
        ]
