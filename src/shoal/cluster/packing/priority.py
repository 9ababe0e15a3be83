"""Priority among suitable groups: idle memory, number of requests, distance (Mell, section VI-C)."""

from dataclasses import dataclass

from shoal.cluster.packing.packing import Occupancy

_MANY = 8
"""Number of requests that weighs as much as a whole group's idle memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priority:
    """Weights of the priority; the highest sum comes first."""

    idle: float = 1.0
    """Of its idle share of memory."""
    requests: float = 1.0
    """Of the number of its requests, negative."""
    distance: float = 1.0
    """Of being on another machine than the request; 0 for new requests."""

    def of(self, occupancy: Occupancy, host: str | None) -> float:
        far = host is not None and host != occupancy.group.host
        return (
            self.idle * occupancy.idle / occupancy.group.capacity
            - self.requests * len(occupancy.items) / _MANY
            - self.distance * far
        )


EQUAL_WEIGHTS = Priority()
