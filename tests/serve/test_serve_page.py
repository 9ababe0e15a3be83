"""The page: its files, and the feed of what it shows, by who may see it."""

import asyncio
import json
import re
from contextlib import aclosing
from dataclasses import replace

import httpx
import pytest
from serve_builders import FakeEngine, completion, make_app, make_client, serving
from test_page_events import DIED, ENGINE

from shoal.cluster.status import RequestStatus, RequestTable
from shoal.config.api_keys import ApiKey
from shoal.frontend.timeline import Phase, PhaseBegin
from shoal.serve.api import Api

BROWSER = {"Accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"}
KEYS = (ApiKey(key="k-all", name="all"), ApiKey(key="k-chat", name="chatty", services=("chat",)))
SECOND_NS = 10**9


def request(id: str, service: str, ended_ns: int | None = None) -> RequestStatus:
    phases = (PhaseBegin(SECOND_NS, Phase.WAITING, None), PhaseBegin(3 * SECOND_NS, Phase.PREFILL, "0"))
    return RequestStatus(
        id=id,
        name=None,
        service=service,
        prompt_tokens=5,
        cached_tokens=1,
        output_tokens=2,
        phases=phases,
        ended_ns=ended_ns,
        finish=None if ended_ns is None else "stop",
    )


TABLE = RequestTable(
    [request("a", "chat"), request("b", "base")],
    [request("c", "base", 9 * SECOND_NS), request("d", "base", 10 * SECOND_NS)],
    7,
)


def get(path, engine=None, headers=None, **options):
    async def main():
        async with make_client(make_app(engine, **options)) as client:
            return await client.get(path, headers=headers or {})

    return asyncio.run(main())


def test_browsers_get_the_page_and_programs_the_routes():
    page = get("/", headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "GET /live" not in page.text
    for headers in ({}, {"Accept": "application/json"}, {"Accept": "*/*"}):
        assert "GET /live" in get("/", headers=headers).json()["routes"]


def test_every_file_that_the_page_names_is_there_and_needs_no_key():
    page = get("/", headers=BROWSER, api_keys=KEYS)
    named = re.findall(r'(?:src|href)="/?page/([^"]+)"', page.text)
    assert len(named) > 1
    kinds = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "svg": "image/svg+xml"}
    for name in named:
        response = get(f"/page/{name}", api_keys=KEYS)
        assert (response.status_code, response.headers["x-content-type-options"]) == (200, "nosniff")
        assert response.headers["content-type"] == kinds[name.rpartition(".")[2]]


@pytest.mark.parametrize("name", ["none.js", "..%2Fendpoints.py", "%2e%2e/feed.py", ""])
def test_other_files_are_not_there(name):
    assert get(f"/page/{name}").status_code == 404


def test_the_page_asks_no_other_host():
    api: Api = make_app().state.feed._api
    assert api is not None
    page = get("/", headers=BROWSER).text
    assert "http://" not in page.replace("http://www.w3.org/", "")
    assert "https://" not in page


async def snapshots(url, count, headers=None):
    """The first snapshots of the feed."""
    async with httpx.AsyncClient() as client, client.stream("GET", f"{url}/live", headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        found = []
        async for line in answer.aiter_lines():
            if line:
                found.append(json.loads(line.removeprefix("data: ")))
            if len(found) == count:
                return found
        raise AssertionError("the feed ended")


def test_the_feed_tells_the_state_every_second():
    engine = FakeEngine(table=TABLE)

    async def main():
        async with serving(engine) as (url, _, _):
            first, second = await snapshots(url, 2)
        assert 0 < second["time"] - first["time"] < 30
        [shown] = first["engines"]
        assert (shown["name"], shown["state"], shown["kv"]["total_bytes"]) == ("0", "ready", 1000)
        assert shown["kv"]["free_bytes"] == 400
        assert [(service["name"], service["chat"]) for service in first["services"]] == [
            ("chat", True),
            ("base", False),
        ]
        assert [request["id"] for request in first["requests"]] == ["a", "b", "d", "c"]
        assert first["requests_left_out"] == 7
        waiting, prefill = first["requests"][0]["phases"]
        assert (waiting[1:], prefill[1:]) == (["waiting", None], ["prefill", "0"])
        assert prefill[0] - waiting[0] == pytest.approx(2)
        ended = first["requests"][3]
        assert ended["ended"] - waiting[0] == pytest.approx(8)

    asyncio.run(main())


def test_the_headers_of_the_feed_can_be_asked_for_alone():
    async def main():
        async with make_client(make_app(api_keys=KEYS)) as client:
            assert (await client.head("/live")).status_code == 401
            answer = await client.head("/live", headers={"Authorization": "Bearer k-chat"})
            assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
            assert answer.headers["content-type"].startswith("text/event-stream")

    asyncio.run(main())


def test_the_feed_counts_answers_and_tells_of_changes():
    engine = FakeEngine()

    async def main():
        async with serving(engine) as (url, _, _), httpx.AsyncClient() as client:
            await snapshots(url, 1)
            answer = await client.post(f"{url}/v1/completions", json=completion())
            assert answer.status_code == 200
            engine.others = (replace(ENGINE, name="b"),)
            [*_, latest] = await snapshots(url, 3)
            assert latest["services"][1]["ttft_s"]["count"] == 1
            assert [event["text"] for event in latest["events"]] == ["engine b was added"]

    asyncio.run(main())


def test_the_pool_is_that_of_the_metrics():
    """Bytes of a service are its blocks of ``shoal_kv_blocks``, each of which has as many bytes."""
    blocks = {"live": 3, "cached": 2, "free": 1}
    stats = ENGINE.stats
    counted = {f"{use}_blocks": count for use, count in blocks.items()}
    services = {"chat": replace(stats.services["chat"], **counted, block_bytes=64)}
    engine = replace(ENGINE, name="b", stats=replace(stats, services=services))
    app = make_app(FakeEngine(others=(engine,)))

    async def main():
        async with make_client(app) as client:
            return (await client.get("/metrics")).text

    page = asyncio.run(main())
    shown = app.state.feed.snapshot().engines[1].kv
    for use in ("total", "live", "cached", "padding", "unfilled", "external"):
        assert f'shoal_kv_bytes{{engine="b",use="{use}"}} {getattr(shown, f"{use}_bytes")}.0' in page
    for use, count in blocks.items():
        assert f'shoal_kv_blocks{{engine="b",service="chat",use="{use}"}} {count}.0' in page
        assert getattr(shown.services["chat"], f"{use}_bytes") == 64 * count


def test_a_key_sees_only_its_services():
    engine = FakeEngine(table=TABLE)

    async def main():
        async with serving(engine, api_keys=KEYS, admin_key="k-admin") as (url, _, _):
            async with httpx.AsyncClient() as client:
                for headers in ({}, {"Authorization": "Bearer other"}):
                    assert (await client.get(f"{url}/live", headers=headers)).status_code == 401
            for key, services in (("all", 2), ("admin", 2), ("chat", 1)):
                [shown] = await snapshots(url, 1, {"Authorization": f"Bearer k-{key}"})
                assert len(shown["services"]) == services
                assert len(shown["engines"][0]["kv"]["services"]) == services
                assert len(shown["requests"]) == (4 if services == 2 else 1)
                assert shown["requests_left_out"] == (7 if services == 2 else 0)

    asyncio.run(main())


def test_events_of_hidden_services_are_hidden():
    engine = FakeEngine(others=(replace(ENGINE, name="b"),))
    feed = make_app(engine).state.feed
    feed.look(100.0)
    engine.others = (replace(DIED, name="b"),)
    engine.services = {"chat": engine.services["chat"]}
    feed.look(101.0)
    snapshot = feed.snapshot()
    assert [event.text for event in snapshot.events] == [
        "engine b ended: killed by signal 9",
        "service base was removed",
    ]
    visible = feed.snapshot({"chat"})
    assert [event.text for event in visible.events] == ["engine b ended: killed by signal 9"]


def test_requests_have_the_time_of_day_also_after_the_clock_was_set(monkeypatch):
    feed = make_app(FakeEngine(table=TABLE)).state.feed
    monkeypatch.setattr("time.time_ns", lambda: 1000 * SECOND_NS)
    monkeypatch.setattr("time.monotonic_ns", lambda: 4 * SECOND_NS)
    snapshot = feed.snapshot()
    assert snapshot.time == 1000
    assert [begin for begin, _, _ in snapshot.requests[0].phases] == [997, 999]


def test_the_feed_ends_with_the_server():
    async def main():
        async with (
            serving(FakeEngine(), drain_s=0) as (url, stop, task),
            httpx.AsyncClient(timeout=60) as client,
            client.stream("GET", f"{url}/live") as answer,
            aclosing(answer.aiter_lines()) as lines,
        ):
            await anext(lines)
            stop.request()
            async for line in lines:
                assert not line or line.startswith("data: ")
            await task

    asyncio.run(main())
