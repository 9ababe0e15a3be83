"""Objectives of device maps: weights of the time of a pass and of the number of devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.place.device_maps.costs import Costs


@dataclass(frozen=True, slots=True)
class Objective:
    """Weights of the time of a pass and of the number of devices.

    The paper has two weights, a1 and a2, that occur in none of its formulas; this is our reading. Time is
    relative to the fastest device with all layers, devices to the fewest that can hold them. A time of weight
    0 breaks ties.
    """

    latency: float
    """Weight of the time (a1)."""
    devices: float
    """Weight of the number of devices (a2)."""

    def weights(self, costs: Costs) -> "Weights":
        """The weights per second and per device of a problem."""
        if not self.latency:
            return Weights(per_s=1 / (2 * costs.longest_s), per_device=1.0)
        return Weights(
            per_s=self.latency / costs.ideal_s,
            per_device=self.devices / costs.fewest_devices,
        )


@dataclass(frozen=True, slots=True)
class Weights:
    """An objective in the units of a problem."""

    per_s: float
    """Per second of a pass."""
    per_device: float
    """Per device in use."""

    def score(self, cost_s: float, devices: int) -> float:
        """Less is better."""
        return self.per_s * cost_s + self.per_device * devices

    def score_of(self, costs: Costs, counts: Sequence[tuple[int, int]]) -> float:
        """Score of a map; counts: (device, layers) in order."""
        return self.score(costs.pass_s(counts), len(counts))


OBJECTIVES: Mapping[str, Objective] = {
    "helr": Objective(latency=1, devices=1),
    "he": Objective(latency=0, devices=1),
    "lr": Objective(latency=10, devices=1),
    "cost": Objective(latency=1, devices=0),
}
"""The paper's three, and the time alone."""
