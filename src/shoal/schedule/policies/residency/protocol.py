"""Interface of residency policies: which weights are brought to the device, and which leave for them.

A policy is a pure function of its view. It names weights to fetch, and weights that may leave for them in the
order in which they should. The scheduler evicts as many as the fetch needs, and only where that suffices. It
keeps the rules that hold for all policies (see ``schedule.residency``): pinned weights, those with a step in
flight and those that owe a step to a request stay; and requests that have waited too long come first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from shoal.schedule.running_batch import RequestTable


class Place(Enum):
    """Where weights are."""

    RESIDENT = "resident"
    """In the device's memory: their services can step."""
    COMING = "coming"
    """Being copied there."""
    ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsView:
    """Weights, with the requests of all services on them."""

    name: str
    num_bytes: int
    place: Place
    since_ns: int
    """When they came to this place."""
    evictable: bool
    """Resident, and may leave now."""
    evictable_ns: int | None
    """When they may leave, at the latest, if nothing happens and no lost KV is computed again; None:
    never, or they are not resident."""
    fetch_s: float
    """Expected duration of a fetch, also of one that is under way, from its begin."""
    num_waiting: int
    """Requests without KV on the device, preempted ones too."""
    num_running: int
    """Requests with KV on the device."""
    oldest_ns: int | None
    """Arrival of the oldest waiting request; None: none waits."""
    last_step_ns: int
    """Time of their last step; before the first, when they were declared."""
    execution_s: float
    """Mean duration of the steps of one of their requests; an assumption before the first has ended."""
    requests: Callable[[], RequestTable]
    """All unfinished requests; created on use."""

    @property
    def num_requests(self) -> int:
        """Unfinished requests."""
        return self.num_waiting + self.num_running


class ResidencyView(NamedTuple):
    """Input of a residency policy."""

    weights: Mapping[str, WeightsView]
    free_bytes: int
    """Of the budget."""


class Swap(NamedTuple):
    """A proposal to fetch weights."""

    fetch: str
    evict: Sequence[str]
    """Weights that may leave for them, in this order; only as many do as are needed."""


class ResidencyDecision(NamedTuple):
    """What a policy proposes."""

    swaps: Sequence[Swap] = ()
    """By preference: the first for which there is room, is carried out."""
    until_ns: int | None = None
    """When to decide again, if nothing happens before; None: not before something happens."""


class ResidencyPolicy(Protocol):
    """Chooses which weights are resident; has options, no state.

    It is asked when requests arrive or end, when weights have come or may leave again, and at ``until_ns``,
    if requests want absent weights. It is not asked while weights are coming, as there is at most one fetch
    at a time.
    """

    def decide(self, view: ResidencyView, now_ns: int) -> ResidencyDecision:
        """The swaps to make now; without side effects."""
        ...
