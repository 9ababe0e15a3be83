"""The endpoints of probes: of the process, of engines and services, of one service."""

import asyncio
from dataclasses import replace

import httpx
import pytest
from serve_builders import FakeEngine, completion, make_app, make_client, serving, until
from weights_status import engine_with_weights

from shoal.cluster.status import EngineState, EngineStatus, ServiceState, ServiceStatus
from shoal.schedule.policies.residency import Place

OTHER = EngineStatus(
    name="b",
    state=EngineState.WAITING,
    services=("chat",),
    device="cpu",
    restarts=3,
    last_error="killed by signal 9",
)


def ask(path, engine=None, **options):
    async def main():
        async with make_client(make_app(engine, **options)) as client:
            return await client.get(path)

    return asyncio.run(main())


def cluster(ready_chat, ready_base, *others):
    """A fake cluster with this many ready engines for its services, and more engines."""
    services = {
        "chat": ServiceStatus(ready=ready_chat, wanted=2, waiting=7),
        "base": ServiceStatus(ready=ready_base, wanted=1, waiting=0),
    }
    return FakeEngine(services=services, others=others)


def test_health_shows_every_engine_and_service():
    response = ask("/health", cluster(1, 1, OTHER))
    assert response.status_code == 200
    assert response.json() == {
        "status": "degraded",
        "engines": [
            {
                "name": "0",
                "state": "ready",
                "pid": 4321,
                "restarts": 2,
                "heartbeat_age_s": 0.25,
                "last_error": None,
            },
            {
                "name": "b",
                "state": "waiting",
                "pid": None,
                "restarts": 3,
                "heartbeat_age_s": None,
                "last_error": "killed by signal 9",
            },
        ],
        "services": {
            "chat": {"state": "ready", "ready": 1, "wanted": 2, "waiting": 7, "weights": {}},
            "base": {"state": "ready", "ready": 1, "wanted": 1, "waiting": 0, "weights": {}},
        },
    }


def test_health_shows_where_weights_are():
    a = engine_with_weights("a", {"chat": Place.RESIDENT, "base": Place.ABSENT})
    b = engine_with_weights("b", {"chat": Place.COMING})
    all_stay = engine_with_weights("c", {"base": Place.RESIDENT}, budget=None)
    gone = engine_with_weights("d", {"chat": Place.RESIDENT}, state=EngineState.WAITING)
    services = ask("/health", cluster(1, 1, a, b, all_stay, gone)).json()["services"]
    assert services["chat"]["weights"] == {"a": "resident", "b": "coming"}
    assert services["base"]["weights"] == {"a": "absent", "c": "resident"}


@pytest.mark.parametrize(
    ("ready", "other", "status", "code"),
    [
        ((1, 1), None, "ok", 200),
        ((1, 1), EngineState.READY, "ok", 200),
        ((1, 1), EngineState.LOADING, "degraded", 200),
        ((1, 1), EngineState.DRAINING, "degraded", 200),
        ((0, 1), EngineState.WAITING, "degraded", 200),
        ((0, 0), EngineState.LOADING, "down", 503),
        ((0, 0), EngineState.READY, "down", 503),
    ],
)
def test_health_is_200_while_any_service_can_answer(ready, other, status, code):
    others = () if other is None else (replace(OTHER, state=other),)
    response = ask("/health", cluster(*ready, *others))
    assert (response.status_code, response.json()["status"]) == (code, status)
    assert ("retry-after" in response.headers) == (code == 503)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/health/live", 200),
        ("/health/ready", 200),
        ("/health/ready?service=chat", 200),
        ("/health/ready?service=base", 503),
        ("/health/ready?service=bas", 404),
        ("/health/ready?service=", 404),
    ],
)
def test_a_service_alone_may_be_ready(path, code):
    response = ask(path, cluster(1, 0))
    assert response.status_code == code
    if code == 200:
        assert response.json() == {"status": "ok"}
        return
    error = response.json()["error"]
    assert error["code"] == {503: "service_unavailable", 404: "model_not_found"}[code]
    assert (
        error["message"]
        == {
            503: "service 'base' has no engine that is ready",
            404: f"service {path.partition('=')[2]!r} is not served here; available: chat, base",
        }[code]
    )
    assert ("retry-after" in response.headers) == (code == 503)


@pytest.mark.parametrize(
    ("state", "loading", "alive", "code"),
    [
        (ServiceState.UNLOADED, 0, True, 200),
        (ServiceState.LOADING, 1, True, 200),
        (ServiceState.DRAINING, 0, True, 200),
        (ServiceState.LOADING, 0, True, 503),  # by an engine that is started again
        (ServiceState.FAILED, 0, True, 503),
        (ServiceState.UNLOADED, 0, False, 503),
    ],
)
def test_a_service_that_a_request_loads_is_healthy(state, loading, alive, code):
    service = ServiceStatus(ready=0, wanted=loading, waiting=0, loading=loading, state=state)
    engine = FakeEngine(services={"chat": service}, alive=alive)
    response = ask("/health", engine)
    assert (response.status_code, response.json()["status"]) == (code, "ok" if code == 200 else "down")
    assert response.json()["services"]["chat"]["state"] == state.value
    assert ask("/health/ready", engine).status_code == code
    assert ask("/health/ready?service=chat", engine).status_code == code


def test_a_service_whose_requests_are_refused_is_not_ready():
    """Without a service's limits, as while it is being removed."""
    gone = ServiceStatus(ready=0, wanted=0, waiting=0, state=ServiceState.DRAINING)
    engine = FakeEngine(services={"chat": ServiceStatus(ready=1, wanted=1, waiting=0), "gone": gone})
    assert ask("/health/ready?service=gone", engine).status_code == 503


def test_without_any_engine_the_process_is_live_but_not_ready():
    engine = cluster(0, 0)
    assert ask("/health/live", engine).status_code == 200
    assert ask("/health/ready", engine).json()["error"]["message"] == "no service has an engine that is ready"


def test_a_draining_server_is_live_but_not_ready():
    async def main():
        engine = FakeEngine(hold=asyncio.Event())
        async with serving(engine) as (url, stop, _), httpx.AsyncClient(base_url=url) as client:
            asking = asyncio.create_task(client.post("/v1/completions", json=completion()))
            await until(lambda: engine.paused)
            stop.request()
            await asyncio.sleep(0)
            async with asyncio.timeout(30):
                while (health := await client.get("/health")).status_code == 200:
                    await asyncio.sleep(0.01)
            assert (health.status_code, health.json()["status"]) == (503, "draining")
            assert (await client.get("/health/live")).status_code == 200
            ready = await client.get("/health/ready?service=chat")
            assert (ready.status_code, ready.json()["error"]["code"]) == (503, "shutting_down")
            engine.hold.set()
            assert (await asking).status_code == 200

    asyncio.run(main())
