"""The operators' routes: responses, and access control."""

import asyncio

import httpx
import pytest
from serve_builders import FakeEngine, make_app, serving
from weights_status import engine_with_weights

from shoal.cluster.placing.change import Step
from shoal.cluster.placing.controller import Decision
from shoal.cluster.placing.status import PlacingStatus
from shoal.cluster.placing.traffic import IntervalFacts, ServiceFacts
from shoal.cluster.status import EngineState, EngineStatus, ServiceStatus
from shoal.config.api_keys import ApiKey
from shoal.core import ConfigError
from shoal.engine.info import EngineInfo
from shoal.place.estimate import Estimate, ServiceEstimate
from shoal.schedule.policies.residency import Place
from shoal.serve import ServerOptions

INFO = EngineInfo(
    services={}, device="cpu", threads=3, block_size=16, merged_blocks=8, kv_bytes=2**20, weight_bytes=5000
)
OTHER = EngineStatus(
    name="b",
    state=EngineState.LOADING,
    services=("chat",),
    device="cuda:0",
    pid=77,
    requests=5,
    leases=2,
    info=INFO,
)
ROUTES = ("engines", "services", "placement", "operations")


def ask(path, headers=None, peer="127.0.0.1", host="localhost:8000", engine=None, **options):
    async def main():
        transport = httpx.ASGITransport(make_app(engine, **options), client=(peer, 40_000))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path, headers={"Host": host, **(headers or {})})

    return asyncio.run(main())


def two_engines():
    services = {
        "chat": ServiceStatus(ready=1, wanted=2, waiting=3, resumed=9),
        "base": ServiceStatus(ready=1, wanted=1, waiting=0),
    }
    return FakeEngine(others=(OTHER,), services=services)


def test_engines():
    first, second = ask("/admin/engines", engine=two_engines()).json()["data"]
    assert (first["name"], first["state"], first["pid"], first["threads"]) == ("0", "ready", 4321, None)
    assert second == {
        "name": "b",
        "state": "loading",
        "device": "cuda:0",
        "services": ["chat"],
        "requests": 5,
        "leases": 2,
        "pid": 77,
        "restarts": 0,
        "heartbeat_age_s": None,
        "last_error": None,
        "threads": 3,
        "kv_bytes": 2**20,
        "weight_bytes": 5000,
        "weights_memory_bytes": None,
    }


def test_services_and_their_engines():
    chat, base = ask("/admin/services", engine=two_engines()).json()["data"]
    assert chat == {
        "name": "chat",
        "model": "fake-chat",
        "state": "ready",
        "error": None,
        "engines": ["0", "b"],
        "ready": 1,
        "wanted": 2,
        "waiting": 3,
        "resumed": 9,
        "idle_after_s": None,
        "weight_bytes": 0,
        "weights": {},
        "pinned": False,
    }
    assert base["engines"] == ["0"]
    placement = ask("/admin/placement", engine=two_engines()).json()
    assert placement == {
        "placement": {"chat": ["0", "b"], "base": ["0"]},
        "policy": "fixed",
        "interval_s": None,
        "last": None,
        "proposal": None,
        "change": None,
    }
    assert ask("/admin/operations").json() == {"data": [], "object": "list"}


def test_a_placement_that_follows_the_load_says_what_it_did():
    estimated, achieved, present, found = [
        Estimate({"chat": ServiceEstimate(10, missed, 10, latency)})
        for missed, latency in ((1, 20.0), (2, 30.0), (4, 50.0), (1, 25.0))
    ]
    chat = ServiceFacts(arrived=12, ended=10, unserved=2, answered=9, latency_s=18.0)
    status = PlacingStatus(
        "search",
        54.0,
        facts=IntervalFacts(length_s=60.0, services={"chat": chat, "base": ServiceFacts()}),
        decision=Decision(
            changes=True,
            why="it is better",
            interval_s=54.0,
            estimated=estimated,
            achieved=achieved,
            present=present,
            found=found,
        ),
        decided_s=1e9,
        search_s=2.5,
        learned=2,
        steps=[Step("chat", "b", True), Step("base", "0", False)],
        outcome="done",
    )
    answer = ask("/admin/placement", engine=FakeEngine(placing=status)).json()
    del answer["placement"]
    assert answer == {
        "policy": "search",
        "interval_s": 54.0,
        "last": {
            "decided": 1e9,
            "length_s": 60.0,
            "services": {
                "chat": {"arrived": 12, "ended": 10, "attainment": 0.8, "mean_latency_s": 2.0},
                "base": {"arrived": 0, "ended": 0, "attainment": 1.0, "mean_latency_s": None},
            },
            "changes": True,
            "why": "it is better",
            "estimated": {"attainment": 0.9, "normalised_latency": 2.0},
            "achieved": {"attainment": 0.8, "normalised_latency": 3.0},
            "present": {"attainment": 0.6, "normalised_latency": 5.0},
            "found": {"attainment": 0.9, "normalised_latency": 2.5},
            "search_s": 2.5,
            "learned": 2,
        },
        "proposal": None,
        "change": {"steps": ["+chat on b", "-base on 0"], "outcome": "done"},
    }


def test_engines_and_services_say_where_weights_are():
    limited = engine_with_weights("a", {"chat": Place.RESIDENT, "base": Place.ABSENT})
    cluster = FakeEngine(others=(limited,))
    chat, base = ask("/admin/services", engine=cluster).json()["data"]
    assert (chat["weights"], base["weights"]) == ({"a": "resident"}, {"a": "absent"})
    _, engine = ask("/admin/engines", engine=cluster).json()["data"]
    assert (engine["weight_bytes"], engine["weights_memory_bytes"]) == (600, 1000)


@pytest.mark.parametrize("route", ROUTES)
def test_without_an_admin_key_only_this_machine_is_allowed(route):
    path = f"/admin/{route}"
    for peer in ("127.0.0.1", "127.8.0.9", "::1", "::ffff:127.0.0.1"):
        assert ask(path, peer=peer).status_code == 200
    for peer in ("10.0.0.7", "::ffff:10.0.0.7", "fe80::1", "not an address"):
        response = ask(path, peer=peer)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "admin_only")
        assert "server.admin_key" in response.json()["error"]["message"]


OF_PROXIES = (
    "X-Forwarded-For",
    "X-Forwarded-Host",
    "X-Forwarded-Proto",
    "X-Forwarded",
    "Forwarded",
    "Via",
    "X-Real-IP",
    "X-Original-Forwarded-For",
    "X-Original-Host",
    "X-Client-IP",
    "X-Cluster-Client-IP",
    "X-Envoy-External-Address",
    "X-Amzn-Trace-Id",
    "X-Azure-ClientIP",
    "X-ProxyUser-IP",
    "True-Client-IP",
    "CF-Connecting-IP",
    "CF-Ray",
    "Fly-Client-IP",
    "Fastly-Client-IP",
    "Cdn-Loop",
    "Max-Forwards",
    "Proxy-Connection",
    "Early-Data",
    "Remote-Addr",
    "X-A-Proxy-Of-Which-Nobody-Has-Heard",
)


def test_any_unusual_header_is_taken_as_a_proxys():
    async def main():
        transport = httpx.ASGITransport(make_app(), client=("127.0.0.1", 40_000))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/admin/engines")).status_code == 200
            for name in OF_PROXIES:
                for value in ("127.0.0.1", ""):
                    response = await client.get("/admin/engines", headers={name: value})
                    assert response.status_code == 403, name
                    error = response.json()["error"]
                    assert error["code"] == "admin_only"
                    assert name.lower() in error["message"]
                    assert "server.admin_key" in error["message"]

    asyncio.run(main())


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "shoal.example.org"},
        {"Host": "evil.org:8000"},
        {"Host": "10.0.0.7"},
        {"Host": "localhost.evil.org"},
        {"Host": ""},
        {"Origin": "http://localhost:3000"},
        {"Referer": "http://evil.org/"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "same-origin"},
        # Pages of this server's origin by only one of the headers, or by a prefix of it.
        {"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost:80000"},
        {"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost:8000", "Referer": "http://evil.org/"},
        {"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost"},
        {"Sec-Fetch-Site": "same-origin", "Referer": "https://shoal.example.org/"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:8000"},
        {"Sec-Fetch-Site": "cross-site", "Referer": "http://localhost:8000/"},
        {"Origin": "null"},
        *({name: "10.0.0.7"} for name in ("X-Forwarded-For", "CF-Connecting-IP")),
    ],
)
def test_proxies_and_web_pages_on_this_machine_are_denied(headers):
    assert ask("/admin/engines", headers).status_code == 403
    key = {"Authorization": "Bearer sk-admin"}
    assert ask("/admin/engines", headers | key, admin_key="sk-admin").status_code == 200


BROWSER = {
    "Accept-Language": "de",
    "Cache-Control": "no-cache",
    "Cookie": "a=b",
    "DNT": "1",
    "Priority": "u=0, i",
    "Sec-CH-UA": "x",
    "Sec-Fetch-Site": "none",
    "Sec-GPC": "1",
    "Upgrade-Insecure-Requests": "1",
}


OWN_PAGE = BROWSER | {"Sec-Fetch-Site": "same-origin", "Referer": "http://localhost:8000/"}
HTTP2_CURL = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABk"}


@pytest.mark.parametrize(
    "headers",
    [
        BROWSER,
        HTTP2_CURL,
        {"X-Request-Id": "a"},
        {"Authorization": "Bearer anything"},
        OWN_PAGE,
        OWN_PAGE | {"Origin": "http://localhost:8000"},
        {"Origin": "http://localhost:8000"},  # a browser without Sec-Fetch-Site
    ],
)
def test_programs_and_browsers_on_this_machine_are_allowed(headers):
    assert ask("/admin/engines", headers).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "127.0.0.9", "[::1]:8000", "LOCALHOST.:1"])
def test_all_loopback_names_are_allowed(host):
    assert ask("/admin/engines", host=host).status_code == 200


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /admin/engines HTTP/1.1\r\nHost: localhost\r\n", 200),
        ("GET /%61dmin/engines HTTP/1.1\r\nHost: localhost\r\nVia: 1.1 x\r\n", 403),
        ("GET /admin/engines HTTP/1.1\r\nHost: localhost\r\nX_Forwarded_For: x\r\n", 403),
        ("GET /admin/engines HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n", 200),
        (
            "GET /admin/engines HTTP/1.1\r\nHost: localhost\r\n"
            "Origin: http://evil.org\r\nOrigin: http://localhost\r\n",
            403,
        ),
        (
            "GET /admin/engines HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n"
            "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Site: same-origin\r\n",
            403,
        ),
        ("GET /admin/engines HTTP/1.0\r\nHost: localhost\r\n", 403),
        ("GET /admin/engines HTTP/1.0\r\n", 403),
        ("GET /admin/engines HTTP/1.1\r\nHost: localhost\r\nHost: evil.org\r\n", 403),
        ("GET /admin/engines HTTP/1.1\r\nHost: evil.org\r\nHost: localhost\r\n", 403),
    ],
)
def test_over_a_socket(head, status):
    async def main():
        async with serving(FakeEngine(), allowed_hosts=("*",)) as (url, _, _):
            host, _, port = url.removeprefix("http://").rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head.encode() + b"Connection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            return int(answer.split()[1])

    assert asyncio.run(main()) == status


@pytest.mark.parametrize("peer", ["127.0.0.1", "10.0.0.7"])
@pytest.mark.parametrize("sent", [None, "Bearer sk-alice", "Bearer sk-other"])
def test_with_api_keys_and_no_admin_key_every_request_is_denied(peer, sent):
    keys = (ApiKey(key="sk-alice", name="alice"),)
    headers = {} if sent is None else {"Authorization": sent}
    response = ask("/admin/engines", headers, peer, api_keys=keys)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "admin_only")
    assert "set server.admin_key (or SHOAL_ADMIN_KEY)" in response.json()["error"]["message"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("peer", ["127.0.0.1", "10.0.0.7"])
@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        ("Bearer sk-admin", 200, None),
        ("bearer  sk-admin", 200, None),
        (None, 401, "invalid_admin_key"),
        ("Bearer sk-admi", 401, "invalid_admin_key"),
        ("Basic sk-admin", 401, "invalid_admin_key"),
        ("sk-admin", 401, "invalid_admin_key"),
        ("Bearer sk-alice", 403, "admin_only"),
    ],
)
def test_an_admin_key_is_needed_where_there_is_one(route, peer, sent, status, code):
    headers = {} if sent is None else {"Authorization": sent}
    keys = (ApiKey(key="sk-alice", name="alice"),)
    response = ask(f"/admin/{route}", headers, peer, admin_key="sk-admin", api_keys=keys)
    assert response.status_code == status
    if code is not None:
        assert response.json()["error"]["code"] == code
        assert "sk-" not in response.json()["error"]["message"]
    if status == 401:
        assert response.headers["www-authenticate"] == "Bearer"


def test_the_admin_key_is_no_api_key():
    keys = (ApiKey(key="sk-alice", name="alice"),)
    headers = {"Authorization": "Bearer sk-admin"}
    assert ask("/v1/models", headers, admin_key="sk-admin", api_keys=keys).status_code == 401


def test_the_routes_are_for_operators_and_not_in_the_document_for_clients():
    assert not any(path.startswith("/admin") for path in ask("/openapi.json").json()["paths"])
    assert {f"GET /admin/{route}" for route in ROUTES} <= set(ask("/").json()["routes"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"admin_key": ""}, "visible ASCII"),
        ({"admin_key": "two words"}, "visible ASCII"),
        ({"admin_key_file": "sk-\u00e4"}, "visible ASCII"),
        ({"admin_key": "${ADMIN_KEY}"}, "not expanded"),
        ({"admin_key": "sk-a", "admin_key_file": "sk-b"}, "not both"),
        ({"admin_key": "sk-a", "api_keys": (ApiKey(key="sk-a", name="alice"),)}, "also the API key 'alice'"),
    ],
)
def test_invalid_admin_keys(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        ServerOptions(**options)
    assert "sk-" not in str(error.value)


def test_options_do_not_show_the_key():
    assert "sk-hidden" not in repr(ServerOptions(admin_key="sk-hidden"))
