"""CORS, request ids, hints about routes, the index and the docs page."""

import asyncio
import re
from html.parser import HTMLParser

import httpx
import pytest
from serve_builders import FakeEngine, chat, completion, make_app, make_client, serving_in_thread

from shoal.core import ConfigError
from shoal.serve.http.docs_page import docs_page
from shoal.serve.http.route_hints import route_hint
from shoal.serve.options import ServerOptions

ORIGIN = "https://chat.example.org"


def ask(method, path, headers=None, body=None, engine=None, **options):
    async def main():
        async with make_client(make_app(engine, **options)) as client:
            return await client.request(method, path, headers=headers, json=body)

    return asyncio.run(main())


def preflight(path, origin=ORIGIN, **options):
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
    }
    return ask("OPTIONS", path, headers, **options)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/health", "/api/nowhere"])
@pytest.mark.parametrize("origins", [(ORIGIN,), ("*",), ("https://other.org", ORIGIN)])
def test_listed_origins_are_allowed(path, origins):
    response = preflight(path, cors_origins=origins)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] in (ORIGIN, "*")
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "authorization" in response.headers["access-control-allow-headers"].lower()


def test_other_origins_are_not_allowed():
    assert preflight("/v1/models", "https://evil.org", cors_origins=(ORIGIN,)).status_code == 400
    assert "access-control-allow-origin" not in preflight("/v1/models").headers
    asked = ask("GET", "/v1/models", {"Origin": "https://evil.org"}, cors_origins=(ORIGIN,))
    assert "access-control-allow-origin" not in asked.headers


def test_pages_can_read_responses_and_errors():
    for body, status in ((completion(), 200), (completion(stream=True), 200), (completion(n=-1), 400)):
        response = ask("POST", "/v1/completions", {"Origin": ORIGIN}, body, cors_origins=(ORIGIN,))
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in response.headers["access-control-expose-headers"].lower()


def test_invalid_origins_are_refused():
    for origin in ("example.org", "https://example.org/", "", "https://a b"):
        with pytest.raises(ConfigError, match="cors_origins"):
            ServerOptions(cors_origins=(origin,))


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/completions", completion(), 200),
        ("POST", "/v1/chat/completions", chat(stream=True), 200),
        ("POST", "/v1/completions", completion(n=-1), 400),
        ("POST", "/v1/completions", None, 415),
        ("GET", "/v1/completions", None, 405),
        ("GET", "/nowhere", None, 404),
        ("HEAD", "/health", None, 200),
        ("OPTIONS", "/health", None, 204),
    ],
)
def test_every_response_has_the_id_of_its_request(method, path, body, status):
    response = ask(method, path, {"X-Request-Id": "trace:42/a"}, body)
    assert response.status_code == status
    assert response.headers.get_list("x-request-id") == ["trace:42/a"]


def test_a_response_is_named_after_the_id_of_its_request():
    headers = {"x-request-id": "abc"}
    assert ask("POST", "/v1/completions", headers, completion()).json()["id"] == "cmpl-abc"
    assert '"id":"chatcmpl-abc"' in ask("POST", "/v1/chat/completions", headers, chat(stream=True)).text


@pytest.mark.parametrize(
    "sent", [b"", b"a b", b'a"b', b"a\x1bb", b"\xe9", b"x" * 129, b"a\nb", b"a;b", b"<a>"]
)
def test_an_id_that_cannot_go_into_a_log_is_replaced(sent):
    response = ask("GET", "/health", {b"x-request-id": sent})
    assert re.fullmatch("[0-9a-f]{24}", response.headers["x-request-id"])


def test_ids_of_our_own_are_unique():
    assert len({ask("GET", "/health").headers["x-request-id"] for _ in range(5)}) == 5


def test_engine_logs_can_use_the_id_of_the_response():
    async def main():
        engine = FakeEngine()
        async with make_client(make_app(engine)) as client:
            response = await client.post(
                "/v1/completions", json=completion(), headers={"x-request-id": "r-7"}
            )
        return engine.log_names, response.json()["id"]

    assert asyncio.run(main()) == (["cmpl-r-7"], "cmpl-r-7")


def test_a_bug_has_its_id_too(monkeypatch):
    engine = FakeEngine()
    monkeypatch.setattr(FakeEngine, "engines", None)
    response = ask("GET", "/metrics", {"x-request-id": "bug-1"}, engine=engine)
    assert (response.status_code, response.headers["x-request-id"]) == (500, "bug-1")


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("POST", "/chat/completions", "did you mean /v1/chat/completions? The client's base URL"),
        ("POST", "/completions", "did you mean /v1/completions?"),
        ("GET", "/models", "did you mean /v1/models?"),
        ("GET", "/models/", "did you mean /v1/models?"),
        ("POST", "/v1/v1/chat/completions", "must not end with /v1"),
        ("POST", "/v1/chat/completions/", "did you mean /v1/chat/completions, without the slash"),
        ("GET", "/v1/models/", "did you mean /v1/models, without the slash"),
        ("GET", "/health/", "did you mean /health, without the slash"),
        ("POST", "/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("GET", "/admin", "GET / lists them"),
    ],
)
def test_an_unknown_route_gets_a_hint(method, path, hint):
    response = ask(method, path, body={} if method == "POST" else None)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "unknown_url"
    assert hint in response.json()["error"]["message"]


def test_a_hint_for_a_long_path_takes_no_time():
    assert route_hint("/v1/" + "a" * 10**6, ["/v1/models"] * 50) == "GET / lists them"


def test_the_index_lists_the_routes():
    index = ask("GET", "/").json()
    assert "POST /v1/chat/completions" in index["routes"]
    assert index["server"] == "shoal"


class Page(HTMLParser):
    """Collects links, ids, texts, and what a browser would load."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.links, self.ids, self.open = [], set(), set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.loads += [tag] if tag in ("script", "link", "img", "iframe") or "src" in values else []
        self.links.add(values.get("href"))
        self.ids.add(values.get("id"))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_shows_every_route_and_loads_nothing():
    app = make_app()
    response = ask("GET", "/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    page = Page(response.text)
    assert (page.loads, page.open) == ([], [])
    assert "http" not in re.sub("HTTP interface|max_http", "", response.text.split("</style>")[0])
    for path in app.openapi()["paths"]:
        assert path in response.text
    assert {link.removeprefix("#") for link in page.links if link and link.startswith("#")} <= page.ids
    for field in ("temperature", "messages", "stream_options", "Retry-After"):
        assert field in response.text


def test_the_page_escapes_the_document():
    document = make_app().openapi()
    document["paths"]["/health"]["get"]["description"] = "<script>`x<y`</script>"
    text = docs_page(document)
    assert "<script>" not in text
    assert "&lt;script&gt;<code>x&lt;y</code>" in text


def test_a_real_server_returns_ids_once():

    with serving_in_thread(FakeEngine(), cors_origins=("*",)) as url:
        response = httpx.get(f"{url}/health", headers={"x-request-id": "r-1", "Origin": ORIGIN})
        assert response.headers.get_list("x-request-id") == ["r-1"]
        refused = httpx.get(f"{url}/health", headers={"Host": "evil.org"})
        assert (refused.status_code, len(refused.headers.get_list("x-request-id"))) == (403, 1)
