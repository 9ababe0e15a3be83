"""What has changed on engines and services, in words."""

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from msgspec import Struct

from shoal.cluster.manager.actions import MigrationOutcome
from shoal.cluster.status import EngineState, EngineStatus, ServiceState, ServiceStatus
from shoal.schedule.policies.residency import Place

Level = Literal["info", "warning"]
_MAX_EVENTS = 100
_JOIN_S = 30.0


class Event(Struct, frozen=True):
    """An event on the page."""

    number: int
    time: float
    """In seconds since 1970."""
    level: Level
    text: str
    service: str | None
    """The service that it names, if it names one."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change between two views. Equal changes that follow each other are counted together."""

    level: Level
    text: str
    """Without the count."""
    count: int = 0
    """How often it happened; 0: it is not counted."""
    service: str | None = None


class View(NamedTuple):
    """The state of engines and services at one time."""

    engines: Mapping[str, EngineStatus]
    services: Mapping[str, ServiceStatus]

    @classmethod
    def of(cls, engines: Sequence[EngineStatus], services: Mapping[str, ServiceStatus]) -> "View":
        return cls({engine.name: engine for engine in engines}, dict(services))


class EventList:
    """The last events, the oldest first."""

    def __init__(self) -> None:
        self._events: deque[tuple[Change, Event]] = deque(maxlen=_MAX_EVENTS)
        self._numbers = itertools.count(1)

    def __iter__(self) -> Iterator[Event]:
        return (event for _, event in self._events)

    def add(self, change: Change, time_s: float) -> None:
        """Add a change; it is joined with the last event if that is the same one within half a minute."""
        count = change.count
        if count and self._events:
            last, event = self._events[-1]
            if last.text == change.text and time_s - event.time < _JOIN_S:
                count += last.count
                self._events.pop()
        joined = Change(change.level, change.text, count, change.service)
        text = f"{change.text}: {count}" if count else change.text
        event = Event(next(self._numbers), time_s, change.level, text, change.service)
        self._events.append((joined, event))


def changes_between(before: View, after: View) -> Iterator[Change]:
    """Everything worth telling that changed between two views."""
    for name, engine in after.engines.items():
        if (old := before.engines.get(name)) is None:
            yield Change("info", f"engine {name} was added")
        else:
            yield from _engine_changes(old, engine)
    for name in before.engines.keys() - after.engines.keys():
        yield Change("info", f"engine {name} was removed")
    for name, service in after.services.items():
        if (known := before.services.get(name)) is None:
            yield Change("info", f"service {name} was added", service=name)
        else:
            yield from _service_changes(name, known, service)
    for name in before.services.keys() - after.services.keys():
        yield Change("info", f"service {name} was removed", service=name)


def _engine_changes(old: EngineStatus, new: EngineStatus) -> Iterator[Change]:
    name = new.name
    # It waits for its restart, or has done so between the two views.
    if old.state is not EngineState.WAITING and (
        new.state is EngineState.WAITING or new.restarts > old.restarts
    ):
        yield Change("warning", f"engine {name} ended: {new.last_error or 'unknown reason'}")
    if new.state is not old.state:
        text = {
            EngineState.LOADING: "loads its models",
            EngineState.READY: "is ready",
            EngineState.DRAINING: "drains: it gets no new requests",
            EngineState.STANDBY: "is on standby",
        }.get(new.state)
        if text is not None:
            yield Change("info", f"engine {name} {text}")
    moved = _migrations(new, MigrationOutcome.DONE) - _migrations(old, MigrationOutcome.DONE)
    if moved > 0:
        yield Change("info", f"requests moved from engine {name} to another", moved)
    failed = _migrations(new, MigrationOutcome.ABORTED) - _migrations(old, MigrationOutcome.ABORTED)
    if failed > 0:
        yield Change("info", f"requests that could not move from engine {name} and stay there", failed)
    if old.stats is None or new.stats is None or new.incarnation != old.incarnation:
        return
    for service, counted in new.stats.services.items():
        if (known := old.stats.services.get(service)) is None:
            continue
        if (preempted := counted.preemptions - known.preemptions) > 0:
            text = f"engine {name} preempted requests of {service}"
            yield Change("info", text, preempted, service)
        if (steps := counted.failed_steps - known.failed_steps) > 0:
            yield Change("warning", f"steps of {service} failed on engine {name}", steps, service)
    yield from _weights_changes(old, new)


def _weights_changes(old: EngineStatus, new: EngineStatus) -> Iterator[Change]:
    """Weights that came or left; services of one model share them, and the first one names them."""
    assert new.stats is not None
    told: set[str] = set()
    for service in new.stats.services:
        now, then = new.weights(service), old.weights(service)
        if now is None or then is None or now.name in told:
            continue
        told.add(now.name)
        if now.place is Place.RESIDENT and (then.place is not now.place or now.fetches > then.fetches):
            took_s = now.fetching_s - then.fetching_s
            text = f"weights of {service} came to engine {new.name} in {took_s:.1f} s"
            yield Change("info", text, service=service)
        elif now.place is Place.ABSENT and then.place is not now.place:
            yield Change("info", f"weights of {service} left engine {new.name} for others", service=service)


def _migrations(engine: EngineStatus, outcome: MigrationOutcome) -> int:
    return sum(count for (_, ended), count in engine.migrations.items() if ended is outcome)


def _service_changes(name: str, old: ServiceStatus, new: ServiceStatus) -> Iterator[Change]:
    if new.state is not old.state:
        level: Level = "warning" if new.state is ServiceState.FAILED else "info"
        why = f": {new.error}" if new.state is ServiceState.FAILED and new.error else ""
        yield Change(level, f"service {name} is {new.state.value}{why}", service=name)
    if (resumed := new.resumed - old.resumed) > 0:
        text = f"requests of {name} that went on after the end of their engine"
        yield Change("info", text, resumed, name)
