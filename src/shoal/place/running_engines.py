"""Placement on running engines: each is a group as it is, with a KV pool of fixed size beside its weights."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.core.cluster import Device
from shoal.place.memory import MemoryCheck
from shoal.place.problem import Problem


@dataclass(frozen=True, slots=True)
class PoolMemory(MemoryCheck):
    """A check where the memory of a device is the KV pool of an engine, whatever its services are.

    Weights have memory of their own, or a limit (``weights_limit_bytes``) within which they take turns.
    """

    def left_bytes(self, services: Collection[str], memory_bytes: int, tp: int) -> int:
        """The pool."""
        return memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningProblem(Problem):
    """A problem whose devices are running engines, each of which may have some services only."""

    allowed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Services that may be placed, by kind of device."""

    def fits(self, services: Sequence[str], devices: Sequence[Device]) -> bool:
        """See Problem."""
        # ``super()`` without arguments does not work in a dataclass with slots.
        return self.allowed[devices[0].kind].issuperset(services) and Problem.fits(self, services, devices)
