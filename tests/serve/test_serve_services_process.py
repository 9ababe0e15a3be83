"""Operators' changes of services and engines, with engine processes whose executors are fakes."""

import asyncio
from pathlib import Path

import httpx
import pytest
from serve_builders import InlineWorkers, until

from inline_codecs import InlineCodec
from routers import start_router
from shoal.serve import ServerOptions, create_app
from shoal.serve.model_download import PulledService

ENGINE_TESTS = Path(__file__).parents[1] / "engine"


@pytest.fixture
def engine_builders(monkeypatch):
    monkeypatch.syspath_prepend(ENGINE_TESTS)
    import engine_builders

    return engine_builders


class Operator:
    """An operator's client of a server with a real router; it starts with the services a and b."""

    def __init__(self, client, router):
        self.client = client
        self.router = router

    async def change(self, method, path, state="done", **body):
        """Make a change and wait for it; returns its operation."""
        response = await self.client.request(method, f"/admin/{path}", json=body or None)
        assert response.status_code == 202, response.text
        async with asyncio.timeout(60):
            operation = response.json()
            while operation["state"] == "running":
                await asyncio.sleep(0.01)
                operation = (await self.client.get(response.headers["location"])).json()
        assert operation["state"] == state, operation
        return operation

    async def complete(self, service, tokens=8):
        body = {"model": service, "prompt": "hello", "max_tokens": tokens, "temperature": 0}
        response = await self.client.post("/v1/completions", json=body)
        return response.status_code, response.json()

    async def text(self, service, tokens=8):
        status, answer = await self.complete(service, tokens)
        assert status == 200, answer
        return answer["choices"][0]["text"]

    async def states(self):
        cards = (await self.client.get("/admin/services")).json()["data"]
        return {card["name"]: card["state"] for card in cards}


def run_changing(builders, scenario, model="fake?step_ms=1"):
    """Run ``scenario(operator)``; models of added services need no download."""

    class Tokenizer(builders.ByteTokenizer, InlineCodec):
        has_chat_template = False

        def least_tokens(self, text):
            return 0

        def token_bytes(self, token):
            return bytes([token]) if token < 256 else b""

    async def pull(service, progress):
        return PulledService(service, Path("/nowhere"), Tokenizer())

    async def main():
        options = builders.make_options(model, model)
        tokenizers = {service.name: Tokenizer() for service in options.services}
        router = await start_router(options, {}, tokenizers, builders.BUILDER)
        try:
            app = create_app(
                router,
                tokenizers,
                options.services,
                ServerOptions(),
                workers=InlineWorkers(),
                engine_options=options,
                pull=pull,
            )
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                await scenario(Operator(client, router))
        finally:
            await router.close()

    asyncio.run(main())


def test_services_are_added_unloaded_loaded_and_removed(engine_builders):
    async def scenario(operator):
        expected = await operator.text("a", 60)
        await operator.change("POST", "services", name="new", model="smollm2")
        assert await operator.text("new", 60) == expected
        running = [asyncio.create_task(operator.text(name, 60)) for name in ("a", "new", "new")]
        await until(lambda: operator.router.unfinished == 3)
        await operator.change("POST", "services/new/unload")
        assert [await task for task in running] == [expected] * 3
        assert await operator.states() == {"a": "ready", "b": "ready", "new": "unloaded"}
        assert await asyncio.gather(*(operator.text("new", 60) for _ in range(3))) == [expected] * 3
        assert (await operator.states())["new"] == "ready"
        await operator.change("POST", "services/new/unload")
        await operator.change("POST", "services/new/load")
        assert (await operator.states())["new"] == "ready"

        running = [asyncio.create_task(operator.text("new", 60))]
        await until(lambda: operator.router.unfinished == 1)
        await operator.change("DELETE", "services/new")
        assert [await task for task in running] == [expected]
        assert (await operator.complete("new"))[0] == 404
        await operator.change("POST", "services", name="new", model="smollm2")
        assert await operator.text("new", 60) == expected

    run_changing(engine_builders, scenario)


def test_an_idle_service_is_unloaded_until_a_request_comes(engine_builders):
    async def scenario(operator):
        await operator.change("POST", "services", name="new", model="smollm2", idle_after="100ms")
        for _ in range(2):
            await until(lambda: operator.router.services["new"].state == "unloaded")
            assert await operator.text("new") == await operator.text("a")

    run_changing(engine_builders, scenario)


def test_a_service_that_no_engine_can_load(engine_builders, tmp_path, monkeypatch):
    (tmp_path / "unsupported").mkdir()
    (tmp_path / "unsupported" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)

    async def scenario(operator):
        operation = await operator.change("POST", "services", "failed", name="new", model="unsupported")
        assert "computed wrongly" in operation["error"]
        assert await operator.states() == {"a": "ready", "b": "ready"}
        assert (await operator.complete("new"))[0] == 404
        assert await operator.text("a")

    run_changing(engine_builders, scenario)


def test_an_engine_replaces_another(engine_builders):
    async def scenario(operator):
        expected = await operator.text("a", 60)
        await operator.change("POST", "engines", device="cpu", name="next")
        running = [asyncio.create_task(operator.text(name, 60)) for name in "abab"]
        await until(lambda: operator.router.unfinished == 4)
        await operator.change("POST", "engines/0/drain")
        assert await operator.text("b", 60) == expected
        await operator.change("DELETE", "engines/0")
        assert [await task for task in running] == [expected] * 4
        assert await operator.text("a", 60) == expected
        assert [engine.name for engine in operator.router.engines] == ["next"]

    run_changing(engine_builders, scenario)
