"""Input and output of a packer: operations (arrivals, growth, departures) and the resulting changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to be placed: new, or preempted before."""

    id: str
    service: str
    size: int
    expected: int
    """Expected final size."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A running request's new size."""

    size: int
    """KV that it holds, or will hold before the next operations."""
    expected: int
    """Expected final size."""
    stays: bool = False
    """Whether it must not move now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Operations since the last ones, applied in the order of the fields (Mell, section VI-C)."""

    departures: Sequence[str] = ()
    updates: Mapping[str, Growth] = field(default_factory=dict)
    arrivals: Sequence[Arrival] = ()
    """Requests to place, in this order."""

    def apart(self) -> "list[Operations]":
        """The same operations in the same order, one by one."""
        return [
            *(Operations(departures=[id]) for id in self.departures),
            *(Operations(updates={id: growth}) for id, growth in self.updates.items()),
            *(Operations(arrivals=[arrival]) for arrival in self.arrivals),
        ]


@dataclass(frozen=True, slots=True)
class Migration:
    """A request moves to another group, with its KV."""

    id: str
    source: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The changes that a packer decided on."""

    placed: Mapping[str, str]
    """Group of each arrival that found one."""
    refused: Sequence[str]
    migrations: Sequence[Migration]
    """At most one per request."""
    preempted: Sequence[str]
    """Requests that lose their KV and must be placed again: they fit nowhere, or must not move."""
    relieved: Sequence[str]
    """Groups that updates put over their memory."""
    activated: Sequence[str]
    """Groups that became active."""
    terminated: Sequence[str]
    """Groups that became idle."""
