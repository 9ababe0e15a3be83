"""Which of several suitable groups is taken (Mell, section VI-C)."""

from dataclasses import dataclass

from shoal.cluster.packing.packing import Occupancy

_MANY = 8
"""Requests that count as much as a whole group's idle memory, with equal weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priority:
    """Weights of a group's workload, and of the way to it. The highest sum goes first."""

    idle: float = 1.0
    """Of its idle share of memory."""
    requests: float = 1.0
    """Of how few requests it has."""
    distance: float = 1.0
    """Of being on the machine that a request comes from; new requests come from nowhere."""

    def of(self, occupancy: Occupancy, host: str | None) -> float:
        """Priority of a group for a request from ``host``."""
        far = host is not None and host != occupancy.group.host
        return (
            self.idle * occupancy.idle / occupancy.group.capacity
            - self.requests * len(occupancy.items) / _MANY
            - self.distance * far
        )


EQUAL_WEIGHTS = Priority()
"""All factors count alike."""
