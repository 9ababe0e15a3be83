"""API keys: authentication, allowed services, and rate limits."""

import asyncio
import hmac
import logging

import httpx
import openai
import pytest
from serve_builders import FakeEngine, chat, completion, make_app, make_client, serving_in_thread

from shoal.config.api_keys import ApiKey
from shoal.core import ConfigError
from shoal.serve.http import api_keys
from shoal.serve.options import ServerOptions

ALICE = ApiKey(name="alice", key="sk-alice", services=("chat",))
BOB = ApiKey(name="bob", key="sk-bob")


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def ask(method, path, headers=None, body=None, engine=None, api_keys=(ALICE, BOB), **options):
    async def main():
        async with make_client(make_app(engine, api_keys=api_keys, **options)) as client:
            return await client.request(method, path, headers=headers, json=body)

    return asyncio.run(main())


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("sk-carol"),
        bearer(""),
        bearer("sk-alice2"),
        bearer("sk-alic"),
        {"Authorization": "sk-alice"},
        {"Authorization": "Basic sk-alice"},
        {"Authorization": b"Bearer \xff\xfe"},
        {"x-api-key": "sk-alice"},
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/chat"), ("GET", "/nowhere")],
)
def test_requests_without_a_known_key_are_rejected(method, path, headers):
    engine = FakeEngine()
    response = ask(method, path, headers, completion() if method == "POST" else None, engine)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert not engine.submitted


@pytest.mark.parametrize("path", ["/health", "/version", "/metrics", "/openapi.json"])
def test_probes_need_no_key(path):
    assert ask("GET", path).status_code == 200


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER   "])
def test_a_known_key_is_accepted(scheme):
    response = ask("POST", "/v1/completions", {"Authorization": f"{scheme}sk-bob"}, completion())
    assert response.status_code == 200


def test_a_key_may_use_its_services_only():
    assert ask("POST", "/v1/chat/completions", bearer("sk-alice"), chat()).status_code == 200
    refused = ask("POST", "/v1/completions", bearer("sk-alice"), completion())
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "model_not_allowed"
    assert ask("GET", "/v1/models/base", bearer("sk-alice")).status_code == 403
    unknown = ask("POST", "/v1/completions", bearer("sk-alice"), completion(model="gpt"))
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"].endswith("available: chat")


def test_the_list_of_models_has_only_those_of_the_key():
    for key, names in (("sk-alice", ["chat"]), ("sk-bob", ["chat", "base"])):
        listed = ask("GET", "/v1/models", bearer(key)).json()["data"]
        assert [card["id"] for card in listed] == names


def rates(monkeypatch, key, steps):
    """Statuses and Retry-After of completions sent at these times."""
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    answers = []

    async def main():
        async with make_client(make_app(api_keys=(key,))) as client:
            for clock[0], body in steps:
                response = await client.post("/v1/completions", json=body, headers=bearer(key.key))
                answers.append((response.status_code, response.headers.get("retry-after")))
                if response.status_code == 429:
                    assert response.json()["error"]["code"] == "rate_limit_exceeded"

    asyncio.run(main())
    return answers


def test_requests_are_limited(monkeypatch):
    steps = [(at_s, completion()) for at_s in (0, 0, 0, 20, 30, 31)]
    key = ApiKey(key="k", requests_per_minute=2)
    assert rates(monkeypatch, key, steps) == [
        (200, None), (200, None), (429, "30"), (429, "10"), (200, None), (429, "29"),
    ]  # fmt: skip


def test_tokens_of_prompt_and_output_are_limited(monkeypatch):
    # "hello world" is 12 tokens with the begin token, and its answer as many with the end token.
    steps = [(at_s, completion(max_tokens=20)) for at_s in (0, 0, 30, 51)]
    key = ApiKey(key="k", tokens_per_minute=10)
    assert rates(monkeypatch, key, steps) == [(200, None), (429, "90"), (429, "60"), (429, "39")]
    key = ApiKey(key="k", tokens_per_minute=48)
    assert rates(monkeypatch, key, [steps[0]] * 3) == [(200, None), (200, None), (429, "2")]


def test_a_request_that_fails_counts_as_a_request(monkeypatch):
    key = ApiKey(key="k", requests_per_minute=1)
    assert rates(monkeypatch, key, [(0, completion(max_tokens=-1)), (0, completion())]) == [
        (400, None), (429, "60"),
    ]  # fmt: skip


def test_every_key_is_compared_in_constant_time(monkeypatch):
    compared, really_compare = [], hmac.compare_digest

    def compare(known, sent):
        compared.append((len(known), len(sent)))
        return really_compare(known, sent)

    monkeypatch.setattr(api_keys.hmac, "compare_digest", compare)
    for key in ("sk-alice", "sk-bob", "x", "x" * 5000):
        ask("GET", "/v1/models", bearer(key))
    assert compared == [(32, 32)] * 8


def test_names_are_given_and_mistakes_found():
    options = ServerOptions(api_keys=(ApiKey(key="a"), ALICE), api_key_file=(ApiKey(key="b"),))
    assert [key.name for key in options.named_api_keys()] == ["key-1", "alice", "key-3"]
    for wrong in ((ApiKey(key="a", name="x"), ApiKey(key="b", name="x")), (ApiKey(key="a"),) * 2):
        with pytest.raises(ConfigError, match=r"two keys are called|are the same key"):
            ServerOptions(api_keys=wrong)
    with pytest.raises(ConfigError, match="'gpt'"):
        make_app(api_keys=(ApiKey(key="a", services=("gpt",)),))


def test_a_key_is_never_shown(caplog):
    caplog.set_level(logging.DEBUG)
    response = ask("POST", "/v1/completions", bearer("sk-alice"), completion(), access_log=True)
    assert "sk-alice" not in response.text + caplog.text + repr(ServerOptions(api_keys=(ALICE,)))


def test_the_document_says_that_a_key_is_needed():
    document = make_app(api_keys=(ALICE,)).openapi()
    completions = document["paths"]["/v1/completions"]["post"]
    assert completions["security"]
    assert {"401", "403"} <= set(completions["responses"])
    assert "security" not in document["paths"]["/health"]["get"]
    assert "securitySchemes" not in make_app().openapi()["components"]


def test_the_official_client_sends_its_key():
    with serving_in_thread(FakeEngine(), api_keys=(ALICE, BOB)) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="sk-bob", max_retries=0) as client:
            assert len(list(client.models.list())) == 2
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
        assert httpx.get(f"{url}/health").status_code == 200
