"""What is asked of a packer, and what it answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that is to be placed: a new one, or one that was preempted."""

    id: str
    """Unique among running requests."""
    service: str
    """The service that it asks."""
    size: int
    """KV that it needs at once."""
    expected: int
    """What it is expected to grow to."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A running request's new size."""

    size: int
    """KV that it holds, or will hold before the next operations."""
    expected: int
    """What it is now expected to grow to."""
    stays: bool = False
    """Whether it cannot move now; who relieves or empties its group looks for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """What happened since the last time; carried out in the order of the fields (Mell, section VI-C)."""

    departures: Sequence[str] = ()
    """Requests that ended."""
    updates: Mapping[str, Growth] = field(default_factory=dict)
    """Requests that grew."""
    arrivals: Sequence[Arrival] = ()
    """Requests to place; the first ones first."""

    def apart(self) -> "list[Operations]":
        """The same operations in the same order, each by itself."""
        return [
            *(Operations(departures=[id]) for id in self.departures),
            *(Operations(updates={id: growth}) for id, growth in self.updates.items()),
            *(Operations(arrivals=[arrival]) for arrival in self.arrivals),
        ]


@dataclass(frozen=True, slots=True)
class Migration:
    """A request moves, with what it has computed."""

    id: str
    """The request."""
    source: str
    """The group that has it."""
    target: str
    """The group that takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What is to be done."""

    placed: Mapping[str, str]
    """Group of each arrival that found one."""
    refused: Sequence[str]
    """Arrivals that found none."""
    migrations: Sequence[Migration]
    """At most one for a request."""
    preempted: Sequence[str]
    """Requests that lose their KV and must be placed again: they fit nowhere, or may not move."""
    relieved: Sequence[str]
    """Groups that updates left over their memory."""
    activated: Sequence[str]
    """Groups that were idle and no longer are."""
    terminated: Sequence[str]
    """Groups that are now idle."""
