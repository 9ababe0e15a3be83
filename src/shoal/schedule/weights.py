"""Weights: where the weights of each service are, the budget of the device's memory for them, and fetches.

Weights are memory that a step needs, as KV is. Services with the same weights share one entry. With no limit
on their memory all weights are resident for ever.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from shoal.core import Arrival, ConfigError
from shoal.schedule.policies.residency import Place
from shoal.schedule.service_limits import ServiceLimits
from shoal.schedule.service_state import ServiceState
from shoal.schedule.stats import WeightsStats
from shoal.schedule.weights_options import WeightsOptions

MAX_FAILURES = 3
"""Failed fetches in a row from which on requests for the weights end with an error."""
_RETRY_NS = 500_000_000
"""Delay after the first failed fetch; it doubles with each further one, up to 8 seconds."""
_MAX_DOUBLINGS = 4
_SMOOTHING = 0.3
"""Share of the newest fetch in the estimate of the bandwidth."""


@dataclass(slots=True)
class WeightsEntry:
    """Some weights, and their services."""

    name: str
    num_bytes: int
    place: Place = Place.ABSENT
    since_ns: int = 0
    """When they came to this place."""
    last_step_ns: int = 0
    """Time of the newest result of a step."""
    may_owe_step: bool = False
    """False: they have stayed long enough, and may leave. True: ``Weights.owes_step`` says it."""
    states: dict[str, ServiceState] = field(default_factory=dict)
    """Their services, by name."""
    pinned_by: set[str] = field(default_factory=set)
    """Services that pin them."""
    num_failures: int = 0
    """Failed fetches since the last one that worked."""
    retry_ns: int = 0
    """They are not fetched before this time."""
    num_fetches: int = 0
    num_evictions: int = 0
    fetching_s: float = 0.0
    """Total duration of the fetches."""
    left_ns: int = 0
    """When they were last evicted."""
    num_waits: int = 0
    """How often a request waited for them, until they came."""
    waiting_ns: int = 0
    """Total duration of these waits."""
    longest_wait_ns: int = 0

    @property
    def pinned(self) -> bool:
        """Whether they never leave."""
        return bool(self.pinned_by)


class Weights:
    """Owner of the place of all weights of one engine.

    The scheduler calls ``evict`` and ``fetch``, and the next plan takes these changes to the executor.
    """

    def __init__(self, options: WeightsOptions) -> None:
        self.options = options
        self.entries: dict[str, WeightsEntry] = {}
        """By name of the weights, in the order of their declaration."""
        self.steppable: dict[str, ServiceState] = {}
        """Services whose weights are resident, in the order of their declaration; others only read it."""
        self.changes = 0
        """Number of changes of any place, and of weights that owe no step any more."""
        self.bandwidth = options.assumed_bandwidth
        """Bytes per second of a fetch, learned."""
        self._entry_of: dict[str, WeightsEntry] = {}
        self._leaving: list[str] = []
        self._coming: list[str] = []

    @property
    def limited(self) -> bool:
        """Whether weights come and go."""
        return self.options.memory_bytes is not None

    def add(self, state: ServiceState, limits: ServiceLimits) -> None:
        """Add a service; raises ConfigError, without effect, where its weights cannot fit into the budget."""
        self.check(state.service, limits)
        name = limits.weights or state.service
        entry = self.entries.setdefault(name, WeightsEntry(name, limits.weight_bytes))
        self._entry_of[state.service] = entry
        entry.states[state.service] = state
        if limits.pinned:
            entry.pinned_by.add(state.service)
        if not self.limited:
            entry.place = Place.RESIDENT
        self._refresh()

    def check(self, service: str, limits: ServiceLimits) -> None:
        """Raise ConfigError if a service cannot be added, because its weights do not fit into the budget."""
        name = limits.weights or service
        shares = self._shares()
        share = shares.setdefault(name, _Share([], limits.weight_bytes, False))
        share.services.append(service)
        share.pinned |= limits.pinned
        _check_budget(self.options.memory_bytes, shares.values())

    def pin(self, service: str, pinned: bool) -> None:
        """Pin the weights of a service, or end that; raises ConfigError, without effect, where the others
        would have too little memory.
        """
        entry = self._entry_of[service]
        pinned_by = entry.pinned_by | {service} if pinned else entry.pinned_by - {service}
        shares = self._shares()
        shares[entry.name].pinned = bool(pinned_by)
        _check_budget(self.options.memory_bytes, shares.values())
        entry.pinned_by = pinned_by
        self.changes += 1

    def is_pinned(self, service: str) -> bool:
        """Whether this service itself pins its weights."""
        return service in self._entry_of[service].pinned_by

    def _shares(self) -> dict[str, "_Share"]:
        """What all weights need of the budget, by name."""
        return {
            name: _Share(list(entry.states), entry.num_bytes, entry.pinned)
            for name, entry in self.entries.items()
        }

    def remove(self, service: str) -> None:
        """Remove a service; its weights leave with their last service."""
        entry = self._entry_of.pop(service)
        del entry.states[service]
        entry.pinned_by.discard(service)
        if not entry.states:
            del self.entries[entry.name]
        self._refresh()

    @property
    def free_bytes(self) -> int:
        """Of the budget."""
        assert self.options.memory_bytes is not None
        used = [entry.num_bytes for entry in self.entries.values() if entry.place is not Place.ABSENT]
        return self.options.memory_bytes - sum(used)

    @property
    def coming(self) -> WeightsEntry | None:
        """The weights that are being fetched."""
        return next((each for each in self.entries.values() if each.place is Place.COMING), None)

    @property
    def absent(self) -> list[ServiceState]:
        """Services that cannot step."""
        if len(self.steppable) == len(self._entry_of):
            return []
        return [entry.states[name] for name, entry in self._entry_of.items() if name not in self.steppable]

    def fetch_s(self, entry: WeightsEntry) -> float:
        """Expected duration of a fetch."""
        return entry.num_bytes / self.bandwidth

    def evict(self, entry: WeightsEntry, now_ns: int) -> None:
        """Let weights leave with the next plan; no plan in flight may have rows of their services."""
        assert entry.place is Place.RESIDENT, entry
        assert not entry.pinned, entry
        entry.num_evictions += 1
        entry.left_ns = now_ns
        self._leaving.append(entry.name)
        self._move(entry, Place.ABSENT, now_ns)

    def fetch(self, entry: WeightsEntry, now_ns: int) -> None:
        """Fetch weights with the next plan, into memory that is free."""
        assert entry.place is Place.ABSENT, entry
        assert self.coming is None, self.coming
        assert entry.num_bytes <= self.free_bytes, entry
        entry.num_fetches += 1
        self._coming.append(entry.name)
        self._move(entry, Place.COMING, now_ns)

    def arrived(self, arrival: Arrival, now_ns: int) -> WeightsEntry | None:
        """A fetch has ended; None: the weights were removed meanwhile.

        Streams of the weights had no step meanwhile; their times for starvation begin now.
        """
        entry = self.entries.get(arrival.weights)
        if entry is None or entry.place is not Place.COMING:
            return None
        entry.fetching_s += arrival.seconds
        if arrival.error is not None:
            entry.retry_ns = now_ns + (_RETRY_NS << min(entry.num_failures, _MAX_DOUBLINGS))
            entry.num_failures += 1
            self._move(entry, Place.ABSENT, now_ns)
            return entry
        entry.num_failures = 0
        if arrival.seconds > 0:
            measured = entry.num_bytes / arrival.seconds
            first = sum(each.num_fetches for each in self.entries.values()) == 1
            self.bandwidth += (1.0 if first else _SMOOTHING) * (measured - self.bandwidth)
        for state in entry.states.values():
            state.starved_served_ns = now_ns
            self._count_waits(entry, state, now_ns)
        self._move(entry, Place.RESIDENT, now_ns)
        entry.may_owe_step = True
        return entry

    def _count_waits(self, entry: WeightsEntry, state: ServiceState, now_ns: int) -> None:
        """Count the waits of the requests of a service, whose weights have come."""
        since = [request.last_scheduled_ns for request in state.waiting]
        since += state.running.last_scheduled_ns.tolist()
        waits_ns = [now_ns - max(time_ns, entry.left_ns) for time_ns in since]
        entry.num_waits += len(waits_ns)
        entry.waiting_ns += sum(waits_ns)
        entry.longest_wait_ns = max(entry.longest_wait_ns, max(waits_ns, default=0))

    def stats(self) -> dict[str, WeightsStats]:
        """By service; empty if all weights stay."""
        if not self.limited:
            return {}
        return {
            service: WeightsStats(
                name=entry.name,
                place=entry.place,
                num_bytes=entry.num_bytes,
                pinned=entry.pinned,
                fetches=entry.num_fetches,
                evictions=entry.num_evictions,
                fetching_s=entry.fetching_s,
                waits=entry.num_waits,
                waiting_s=entry.waiting_ns / 1e9,
                longest_wait_s=entry.longest_wait_ns / 1e9,
            )
            for service, entry in self._entry_of.items()
        }

    def stepped(self, service: str, now_ns: int) -> None:
        """A step of a service has ended."""
        entry = self._entry_of[service]
        entry.last_step_ns = now_ns
        if entry.may_owe_step and not self.owes_step(entry, now_ns):
            entry.may_owe_step = False
            self.changes += 1

    def may_owe_step(self, service: str) -> bool:
        """Whether the next step may be the last one that the weights of a service owe."""
        return self._entry_of[service].may_owe_step

    def owes_step(self, entry: WeightsEntry, now_ns: int) -> bool:
        """Whether resident weights stay for a step that they owe to a request, at most for a quantum.

        Beyond it they stay while KV that a request lost is computed again.
        """
        if not entry.may_owe_step:
            return False
        within_quantum = now_ns < entry.since_ns + round(self.options.quantum_s * 1e9)
        return (within_quantum and _has_unserved(entry)) or _is_recomputing(entry)

    @property
    def changed(self) -> bool:
        """Whether there are changes for the next plan."""
        return bool(self._leaving or self._coming)

    def take_changes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """``evict`` and ``fetch`` of the next plan."""
        leaving, coming = tuple(self._leaving), tuple(self._coming)
        self._leaving.clear()
        self._coming.clear()
        return leaving, coming

    def _move(self, entry: WeightsEntry, place: Place, now_ns: int) -> None:
        entry.place, entry.since_ns = place, now_ns
        self._refresh()

    def _refresh(self) -> None:
        self.changes += 1
        self.steppable.clear()
        for name, entry in self._entry_of.items():
            if entry.place is Place.RESIDENT:
                self.steppable[name] = entry.states[name]


def _has_unserved(entry: WeightsEntry) -> bool:
    """Whether a request that was there when the weights came had no step since, or a stream no token."""
    since_ns = entry.since_ns
    for state in entry.states.values():
        running = state.running
        if len(running) and (running.last_scheduled_ns <= since_ns).any():
            return True
        if len(running) and ((running.last_token_ns > 0) & (running.last_token_ns <= since_ns)).any():
            return True
        for request in state.waiting:
            if request.last_scheduled_ns <= since_ns or 0 < request.last_token_ns <= since_ns:
                return True
    return False


def _is_recomputing(entry: WeightsEntry) -> bool:
    """Whether lost KV of a running request is computed again, which had no token since the weights came."""
    since_ns = entry.since_ns
    for state in entry.states.values():
        running = state.running
        if len(running):
            behind = (running.prefilling != 0) & (running.last_token_ns <= since_ns)
            behind &= running.arrival_ns <= since_ns
            if any(running.requests[row].num_recomputed_tokens for row in behind.nonzero()[0].tolist()):
                return True
    return False


@dataclass(slots=True)
class _Share:
    """What some weights need of the budget."""

    services: list[str]
    num_bytes: int
    pinned: bool

    def __str__(self) -> str:
        names = " and ".join(map(repr, self.services))
        return f"{names} ({_mib(self.num_bytes)}{', pinned' if self.pinned else ''})"


def _check_budget(memory_bytes: int | None, shares: Collection[_Share]) -> None:
    """Raise ConfigError unless all pinned weights, and any one besides, fit into the budget."""
    if memory_bytes is None:
        return
    together = [share for share in shares if share.pinned]
    others = [share for share in shares if not share.pinned]
    together += sorted(others, key=lambda share: -share.num_bytes)[:1]
    needed = sum(share.num_bytes for share in together)
    if needed > memory_bytes:
        raise ConfigError(
            f"weights.memory: {_mib(memory_bytes)} are less than the {_mib(needed)} of"
            f" {', '.join(map(str, together))}, which must be in memory at once; raise it, or pin fewer"
            " services"
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
