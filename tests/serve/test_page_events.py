"""Changes between two states of a cluster, in words, and the list of the last ones."""

from dataclasses import replace

import pytest
from weights_status import engine_with_weights

from shoal.cluster.manager.actions import MigrationOutcome
from shoal.cluster.manager.events import MigrationMethod
from shoal.cluster.status import EngineState, EngineStatus, ServiceState, ServiceStatus
from shoal.schedule.policies.residency import Place
from shoal.serve.page.events import Change, EventList, View, changes_between

ENGINE = engine_with_weights("0", {"chat": Place.RESIDENT, "base": Place.ABSENT})
SERVICE = ServiceStatus(ready=1, wanted=1, waiting=0)
DIED = replace(ENGINE, state=EngineState.WAITING, last_error="killed by signal 9")


def texts(before: EngineStatus | None, after: EngineStatus | None) -> list[str]:
    views = [View.of([engine] if engine is not None else [], {}) for engine in (before, after)]
    return [f"{change.text} {change.count or ''}".strip() for change in changes_between(*views)]


def service_texts(before: ServiceStatus | None, after: ServiceStatus | None) -> list[str]:
    views = [View.of([], {"chat": status} if status is not None else {}) for status in (before, after)]
    return [f"{change.text} {change.count or ''}".strip() for change in changes_between(*views)]


def counted(engine: EngineStatus, service: str, **counts: object) -> EngineStatus:
    assert engine.stats is not None
    services = {**engine.stats.services, service: replace(engine.stats.services[service], **counts)}
    return replace(engine, stats=replace(engine.stats, services=services))


def weights(engine: EngineStatus, service: str, **changes: object) -> EngineStatus:
    known = engine.weights(service)
    assert known is not None
    return counted(engine, service, weights=replace(known, **changes))


def migrated(outcome: MigrationOutcome, count: int) -> EngineStatus:
    return replace(ENGINE, migrations={(MigrationMethod.LIVE, outcome): count})


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (ENGINE, ENGINE, []),
        (None, ENGINE, ["engine 0 was added"]),
        (ENGINE, None, ["engine 0 was removed"]),
        (ENGINE, DIED, ["engine 0 ended: killed by signal 9"]),
        (DIED, replace(DIED, heartbeat_age_s=3.0), []),
        (DIED, replace(DIED, state=EngineState.LOADING, restarts=1), ["engine 0 loads its models"]),
        (
            ENGINE,  # it died and came back within a second
            replace(ENGINE, restarts=1, incarnation=1, last_error="exit code 1"),
            ["engine 0 ended: exit code 1"],
        ),
        (replace(ENGINE, state=EngineState.LOADING), ENGINE, ["engine 0 is ready"]),
        (
            ENGINE,
            replace(ENGINE, state=EngineState.DRAINING),
            ["engine 0 drains: it gets no new requests"],
        ),
        (ENGINE, counted(ENGINE, "chat", preemptions=3), ["engine 0 preempted requests of chat 3"]),
        (ENGINE, counted(ENGINE, "base", failed_steps=1), ["steps of base failed on engine 0 1"]),
        (
            ENGINE,
            migrated(MigrationOutcome.DONE, 2),
            ["requests moved from engine 0 to another 2"],
        ),
        (
            ENGINE,
            migrated(MigrationOutcome.ABORTED, 1),
            ["requests that could not move from engine 0 and stay there 1"],
        ),
        (ENGINE, migrated(MigrationOutcome.ENDED, 1), []),
        (
            ENGINE,
            weights(ENGINE, "base", place=Place.RESIDENT, fetching_s=2.0),
            ["weights of base came to engine 0 in 0.5 s"],
        ),
        (ENGINE, weights(ENGINE, "base", place=Place.COMING), []),
        (ENGINE, weights(ENGINE, "chat", place=Place.ABSENT), ["weights of chat left engine 0 for others"]),
        (replace(ENGINE, stats=None), ENGINE, []),
    ],
)
def test_changes_of_an_engine(before, after, expected):
    assert texts(before, after) == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (SERVICE, replace(SERVICE, waiting=4), []),
        (None, SERVICE, ["service chat was added"]),
        (SERVICE, None, ["service chat was removed"]),
        (SERVICE, replace(SERVICE, state=ServiceState.UNLOADED), ["service chat is unloaded"]),
        (
            SERVICE,
            replace(SERVICE, state=ServiceState.FAILED, error="{no} memory"),
            ["service chat is failed: {no} memory"],
        ),
        (
            SERVICE,
            replace(SERVICE, resumed=2),
            ["requests of chat that went on after the end of their engine 2"],
        ),
    ],
)
def test_changes_of_a_service(before, after, expected):
    assert service_texts(before, after) == expected


def test_weights_that_services_share_are_named_once():
    shared = engine_with_weights("0", {"chat": Place.ABSENT, "base": Place.ABSENT})
    both = weights(weights(shared, "chat", name="w"), "base", name="w")
    here = weights(weights(both, "chat", place=Place.RESIDENT), "base", place=Place.RESIDENT)
    assert texts(both, here) == ["weights of chat came to engine 0 in 0.0 s"]


def test_equal_changes_are_counted_together_for_half_a_minute():
    events = EventList()
    events.add(Change("info", "engine 0 preempted requests of {a}", 2, "a"), 100.0)
    events.add(Change("info", "engine 0 preempted requests of {a}", 1, "a"), 120.0)
    [event] = events
    assert (event.number, event.time, event.text) == (2, 120.0, "engine 0 preempted requests of {a}: 3")
    events.add(Change("info", "engine 0 is ready"), 121.0)
    events.add(Change("info", "engine 0 is ready"), 122.0)  # what is not counted is not joined
    events.add(Change("info", "x", 1), 123.0)
    events.add(Change("info", "x", 1), 160.0)
    assert [event.text.rpartition(" ")[2] for event in events] == ["3", "ready", "ready", "1", "1"]


def test_only_the_last_hundred_are_kept():
    events = EventList()
    for number in range(150):
        events.add(Change("info", f"event {number}"), float(number))
    assert [event.text for event in events] == [f"event {number}" for number in range(50, 150)]
