"""Why a service is slow, in a sentence."""

import pytest
from msgspec.structs import replace

from shoal.serve.page.notes import note_of
from shoal.serve.page.snapshot import KV, Engine, Goals, Latency, Service, ServiceKV, ServiceOnEngine

NOTHING = Latency(0, None, None, None)
QUIET = Service(
    "chat", "m", "ready", None, True, False, {"0": ServiceOnEngine("resident", 2, 0, 0)}, 2, 0, 0, 0.0,
    0.0, 0.0, NOTHING, NOTHING, 0, 0, Goals(0, 0),
)  # fmt: skip
POOL = KV(1000, 500, 0, 0, 0, 0, 500, {})
ENGINE = Engine("0", "ready", "cpu", 0, 0.1, None, 5, 9.0, None, None, 0, POOL)
FULL = replace(ENGINE, kv=replace(POOL, live_bytes=880, external_bytes=40))


def queued(count: int = 3, running: int = 1, weights: str = "resident") -> Service:
    parts = {"0": ServiceOnEngine(weights, running, count, 0)}
    return replace(QUIET, waiting=count, running=running, engines=parts)


@pytest.mark.parametrize(
    ("service", "engine", "note"),
    [
        (QUIET, ENGINE, ""),
        (QUIET, FULL, ""),
        (replace(QUIET, state="loading"), ENGINE, "is being loaded"),
        (replace(QUIET, state="pulling"), ENGINE, "its model is being downloaded"),
        (replace(QUIET, state="unloaded"), ENGINE, "unloaded; a request loads it"),
        (replace(QUIET, state="draining"), ENGINE, "is being unloaded, when its requests have ended"),
        (replace(QUIET, state="failed", error="no room"), ENGINE, "cannot be loaded: no room"),
        (queued(), ENGINE, "3 requests waiting for a turn: the engine computes others first"),
        (queued(1), FULL, "1 request waiting for KV memory"),
        (
            replace(queued(), preemptions=1),
            ENGINE,
            "3 requests waiting for KV memory",
        ),
        (
            replace(queued(1), swapped=1),
            ENGINE,
            "1 request waiting for KV memory",
        ),
        (queued(running=0), ENGINE, "3 requests waiting for a turn: other services are served"),
        (queued(5, running=0), ENGINE, "5 requests waiting for a turn: the engine computes others first"),
        (
            queued(weights="absent"),
            FULL,
            "3 requests waiting until its weights may come: others use the memory",
        ),
        (queued(weights="coming"), ENGINE, "3 requests waiting for its weights, which are coming"),
        (
            replace(QUIET, waiting=2, engines={}),
            ENGINE,
            "2 requests without an engine: none of its engines runs",
        ),
        (replace(QUIET, refused=1), ENGINE, "1 request refused in the last minute"),
        (replace(QUIET, goals=Goals(9, 1)), ENGINE, ""),
        (replace(QUIET, goals=Goals(8, 2)), ENGINE, "2 of 10 requests missed their goals in the last minute"),
        (replace(QUIET, preemptions=1), ENGINE, "preempted once in the last minute: KV memory is short"),
        (
            replace(QUIET, preemptions=4),
            ENGINE,
            "preempted 4 times in the last minute: KV memory is short",
        ),
    ],
)
def test_what_holds_a_service_up(service, engine, note):
    assert note_of(service, [engine]) == note


@pytest.mark.parametrize(
    ("held", "note"),
    [
        ({"chat": 100, "code": 850}, "3 requests waiting for KV memory; code holds 85% of the pool"),
        ({"chat": 850, "code": 100}, "3 requests waiting for KV memory"),
        ({"chat": 460, "code": 490}, "3 requests waiting for KV memory"),
        ({}, "3 requests waiting for KV memory"),
    ],
)
def test_another_service_that_holds_most_of_the_pool_is_named(held, note):
    parts = {name: ServiceKV(live, 0, 0) for name, live in held.items()}
    engine = replace(FULL, kv=replace(FULL.kv, services=parts))
    assert note_of(queued(), [engine]) == note


def test_only_engines_that_have_the_service_count():
    other = replace(ENGINE, name="1")
    assert note_of(queued(), [FULL, other]) == "3 requests waiting for KV memory"
