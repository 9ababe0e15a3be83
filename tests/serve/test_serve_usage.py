"""Use of services by API key: /admin/usage, and the same as metrics."""

import asyncio

from serve_builders import FakeEngine, chat, completion, make_app, make_client

from shoal.config.api_keys import ApiKey
from shoal.core import Client

ALICE, BOB = ApiKey(key="sk-alice", name="alice"), ApiKey(key="sk-bob", name="bob", services=("base",))


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def used_after(*calls, **options):
    """(usage, metrics) after calls (path, body, headers); the first two without times."""

    async def scenario():
        app = make_app(FakeEngine(says="Hello."), admin_key="operator", **options)
        async with make_client(app) as client:
            for path, body, headers in calls:
                await client.post(path, json=body, headers=headers)
            usage = await client.get("/admin/usage", headers=bearer("operator"))
            assert usage.status_code == 200, usage.text
            return usage.json(), (await client.get("/metrics")).text

    report, metrics = asyncio.run(scenario())
    assert report["since"] > 1_700_000_000
    lines = {line for line in metrics.splitlines() if line.startswith("shoal_key_")}
    return report["data"], {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_requests_and_tokens_are_counted_by_key_and_service():
    asked = completion(prompt="hello", max_tokens=4)
    used, metrics = used_after(
        ("/v1/completions", asked, bearer("sk-alice")),
        ("/v1/completions", asked | {"n": 2}, bearer("sk-alice")),
        ("/v1/chat/completions", chat(max_tokens=3), bearer("sk-alice")),
        ("/v1/completions", asked | {"max_tokens": 10**6}, bearer("sk-alice")),
        ("/v1/completions", asked, bearer("sk-bob")),
        ("/v1/chat/completions", chat(max_tokens=3), bearer("sk-bob")),
        ("/v1/completions", asked | {"model": "none"}, bearer("sk-bob")),
        ("/v1/completions", asked, bearer("sk-carol")),
        api_keys=(ALICE, BOB),
    )
    counts = {(one["key"], one["service"]): one for one in used}
    assert set(counts) >= {("alice", "base"), ("alice", "chat"), ("bob", "base")}
    base = counts["alice", "base"]
    assert (base["requests"], base["failed"]) == (3, 1)
    assert (base["prompt_tokens"], base["output_tokens"]) == (2 * len("^hello"), 3 * 4)
    assert counts["alice", "chat"]["output_tokens"] == 3
    assert (counts["bob", "base"]["requests"], counts["bob", "base"]["failed"]) == (1, 0)
    assert counts["bob", "base"]["output_tokens"] == 4
    for (key, service), one in counts.items():
        labels = f'key="{key}",service="{service}"'
        assert metrics[f"shoal_key_requests_total{{{labels}}}"] == one["requests"]
        for kind in ("prompt", "output"):
            name = f'shoal_key_tokens_total{{key="{key}",kind="{kind}",service="{service}"}}'
            assert metrics[name] == one[f"{kind}_tokens"]


def test_without_keys_services_alone_are_told_apart():
    used, metrics = used_after(("/v1/completions", completion(max_tokens=2), {}))
    assert [(one["key"], one["service"], one["requests"]) for one in used] == [(None, "base", 1)]
    assert metrics['shoal_key_requests_total{key="",service="base"}'] == 1


def test_nothing_is_told_before_anything_was_used():
    assert used_after() == ([], {})


def test_requests_count_against_the_share_of_their_key():
    engine = FakeEngine(says="Hello.")
    keys = (ApiKey(key="sk-alice", name="alice", share=2.0), BOB)

    async def scenario():
        async with make_client(make_app(engine, api_keys=keys)) as client:
            for path, body, key in (
                ("/v1/completions", completion(max_tokens=2), "sk-alice"),
                ("/v1/chat/completions", chat(max_tokens=2), "sk-alice"),
                ("/v1/responses", {"model": "chat", "input": "hi"}, "sk-alice"),
                ("/v1/messages", chat(max_tokens=2), "sk-alice"),
                ("/v1/embeddings", {"model": "base", "input": "hi"}, "sk-bob"),
            ):
                response = await client.post(path, json=body, headers=bearer(key))
                assert response.status_code == 200, response.text
        async with make_client(make_app(engine)) as client:
            await client.post("/v1/completions", json=completion(max_tokens=2))

    asyncio.run(scenario())
    assert engine.clients == [Client("alice", 2.0)] * 4 + [Client("bob", 1.0), None]
