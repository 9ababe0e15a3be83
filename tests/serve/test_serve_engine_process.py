"""HTTP in front of real engine processes, whose executors are fakes."""

import asyncio
import json
import os
import re
import signal
from dataclasses import replace
from itertools import product
from pathlib import Path

import httpx
import pytest
from serve_builders import until

from inline_codecs import InlineCodec
from routers import QUICK, start_router
from shoal.cluster.options import RestartOptions
from shoal.serve import ServerOptions, StopSignal, serve_until_stopped

ENGINE_TESTS = Path(__file__).parents[1] / "engine"


@pytest.fixture
def engine_builders(monkeypatch):
    monkeypatch.syspath_prepend(ENGINE_TESTS)
    import engine_builders

    return engine_builders


def run_served(builders, options, scenario, **cluster):
    """Run ``scenario(client, router)`` against a server in front of engine processes."""

    class Tokenizer(builders.ByteTokenizer, InlineCodec):
        has_chat_template = True

        def least_tokens(self, text):
            return 0

        def token_bytes(self, token):
            return bytes([token]) if token < 256 else b""

    async def main():
        tokenizers = {service.name: Tokenizer() for service in options.services}
        router = await start_router(options, {}, tokenizers, builders.BUILDER, **cluster)
        stop, ready = StopSignal(), asyncio.get_running_loop().create_future()
        server = asyncio.create_task(
            serve_until_stopped(
                router, tokenizers, options.services, ServerOptions(port=0), stop, ready.set_result
            )
        )
        try:
            async with httpx.AsyncClient(base_url=await ready, timeout=60) as client:
                await scenario(client, router)
        finally:
            stop.request()
            await server
            await router.close()

    asyncio.run(main())


def ask(model, tokens, **fields):
    return {"model": model, "prompt": "hello", "max_tokens": tokens, "temperature": 0} | fields


def test_concurrent_requests_of_two_services_with_a_third_cancelled(engine_builders):
    options = engine_builders.make_options("fake?step_ms=1", "fake?step_ms=1", blocks=48)

    async def complete(client, number):
        body = ask("ab"[number % 2], 40, prompt=list(range(97, 98 + number)), stream=number % 4 < 2)
        if number % 3:
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200
            if not body["stream"]:
                return response.json()["choices"][0]["text"]
            chunks = [
                json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")
            ]
            assert response.text.endswith("data: [DONE]\n\n")
            return "".join(chunk["choices"][0]["text"] for chunk in chunks)
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            async for _ in response.aiter_raw():
                break
        return None

    async def scenario(client, router):
        texts = await asyncio.gather(*(complete(client, number) for number in range(24)))
        assert [len(text) for text in texts if text is not None] == [40] * 16
        alone = await complete(client, 1)
        assert alone == texts[1]
        await until(lambda: router.unfinished == 0)
        async with asyncio.timeout(10):
            while any(s.running or s.waiting for s in (await router.stats("0")).services.values()):
                await asyncio.sleep(0.01)
        assert (await router.stats("0")).pool.live_bytes == 0
        metrics = (await client.get("/metrics")).text
        assert 'shoal_requests_finished_total{reason="length",service="a"}' in metrics

    run_served(engine_builders, options, scenario)


def test_limits_come_from_the_engine(engine_builders):
    options = engine_builders.make_options("fake?context=64", blocks=8, max_queue=2)

    async def scenario(client, router):
        card = (await client.get("/v1/models/a")).json()
        longest = card["max_model_len"]
        assert longest == router.info.services["a"].max_total_tokens <= 64
        prompt = [97] * 5
        fits = await client.post(
            "/v1/completions", json=ask("a", longest - 5, prompt=prompt, ignore_eos=True)
        )
        assert fits.json()["usage"]["total_tokens"] == longest
        over = await client.post("/v1/completions", json=ask("a", longest - 4, prompt=prompt))
        assert over.status_code == 400
        assert over.json()["error"]["code"] == "context_length_exceeded"
        last = await client.post("/v1/completions", json={"model": "a", "prompt": [97] * (longest - 1)})
        assert last.json()["usage"]["completion_tokens"] == 1

    run_served(engine_builders, options, scenario)


def test_request_that_waits_too_long_for_its_goals_is_a_429(engine_builders):
    refusing = {"max_running": 1, "on_hopeless": "refuse"}
    options = engine_builders.make_options("fake?step_ms=20", scheduler=refusing)

    async def refuse_one(client, router, stream, n):
        running = asyncio.create_task(client.post("/v1/completions", json=ask("a", 40, ignore_eos=True)))
        await until(lambda: router.unfinished and not router.waiting)
        late = ask("a", 4, stream=stream, n=n, slo={"ttft": 0.1})
        patient = ask("a", 4, stream=stream, n=n, slo={"ttft": 100})
        refused, served = await asyncio.gather(
            *(client.post("/v1/completions", json=body) for body in (late, patient))
        )
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "goals_out_of_reach")
        assert "ttft 0.1 s" in error["message"]
        assert served.status_code == (await running).status_code == 200
        assert router.unfinished == router.waiting == 0

    async def scenario(client, router):
        choices = 0
        for stream, n in product((False, True), (1, 2)):
            await refuse_one(client, router, stream, n)
            choices += n
            metrics = (await client.get("/metrics")).text
            for line in (
                f'shoal_requests_refused_total{{reason="goals_out_of_reach",service="a"}} {choices}.0',
                f'shoal_slo_requests_total{{outcome="missed",service="a"}} {choices}.0',
                f'shoal_slo_requests_total{{outcome="met",service="a"}} {choices}.0',
            ):
                assert line in metrics
        assert 'shoal_requests_finished_total{reason="error"' not in metrics

    run_served(engine_builders, options, scenario)


def test_a_started_stream_continues_although_its_goals_are_missed(engine_builders):
    """Two requests do not fit together to their ends, and the preempted one has then missed its goals."""
    scheduler = {"on_hopeless": "refuse", "preemption_mode": "recompute", "preempt_for_waiting": "never"}
    options = engine_builders.make_options("fake?step_ms=20&context=64", blocks=20, scheduler=scheduler)

    async def scenario(client, router):
        bodies = [
            ask("a", 50, stream=True, ignore_eos=True, slo={"ttft": 100, "e2e": 0.5}, prompt=[97 + at] * 5)
            for at in range(2)
        ]
        responses = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        for response in responses:
            assert response.status_code == 200
            assert response.text.endswith("data: [DONE]\n\n")
        assert (await router.stats("0")).services["a"].preemptions

    run_served(engine_builders, options, scenario)


async def health_that(client, wanted):
    """The first response of /health with the status ``wanted``."""
    async with asyncio.timeout(60):
        while True:
            response = await client.get("/health")
            if response.json()["status"] == wanted:
                return response
            await asyncio.sleep(0.02)


async def sample(client, name):
    """A sample of /metrics."""
    page = (await client.get("/metrics")).text
    return float(re.search(rf"^{re.escape(name)} (.*)$", page, re.M)[1])


def test_a_stream_continues_when_its_engine_is_killed(engine_builders):
    options = engine_builders.make_options("fake?step_ms=20")
    body = ask("a", 80, stream=True, ignore_eos=True)
    request = engine_builders.make_request(prompt=list(b"hello"), ignore_eos=True)
    undisturbed = bytes(engine_builders.expected_tokens(request, 80)).decode()

    async def scenario(client, router):
        pieces = []
        async with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            async for line in lines:
                if line.startswith("data: {"):
                    pieces.append(json.loads(line[6:])["choices"][0]["text"])
                if len(pieces) == 5:
                    cards = (await client.get("/admin/engines")).json()["data"]
                    [busy] = [card for card in cards if card["requests"]]
                    os.kill(busy["pid"], signal.SIGKILL)
                    degraded = await health_that(client, "degraded")
                    pieces.append("")
        assert "".join(pieces) == undisturbed
        assert degraded.status_code == 200
        [gone] = [engine for engine in degraded.json()["engines"] if engine["state"] != "ready"]
        assert (gone["name"], gone["last_error"]) == (busy["name"], "killed by signal 9 (SIGKILL)")
        assert await sample(client, 'shoal_requests_resumed_total{service="a"}') == 1
        healthy = (await health_that(client, "ok")).json()
        assert {e["name"]: e["restarts"] for e in healthy["engines"]} == {"0": 0, "1": 0} | {gone["name"]: 1}

    run_served(engine_builders, options, scenario, engines=2)


@pytest.mark.slow
def test_without_an_engine_requests_wait_until_they_are_refused(engine_builders):
    options = engine_builders.make_options("fake")
    slow = replace(QUICK, restart=RestartOptions(first_s=60), wait_for_engine_s=0.2)

    async def scenario(client, router):
        os.kill(router.engines[0].pid, signal.SIGKILL)
        down = await health_that(client, "down")
        assert (down.status_code, down.headers["retry-after"]) == (503, "5")
        assert (await client.get("/health/ready")).status_code == 503
        assert (await client.get("/health/live")).status_code == 200
        refused = await client.post("/v1/completions", json=ask("a", 4))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "service_unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        assert await sample(client, 'shoal_requests_refused_total{reason="no_engine",service="a"}') == 1
        assert await sample(client, 'shoal_engine_up{engine="0"}') == 0

    run_served(engine_builders, options, scenario, cluster=slow)


@pytest.mark.slow
def test_an_engine_that_hangs_is_killed_and_its_request_answered(engine_builders):
    options = engine_builders.make_options("fake")
    watchful = replace(QUICK, heartbeat_s=0.2, hung_after_s=1)

    async def scenario(client, router):
        os.kill(router.engines[0].pid, signal.SIGSTOP)
        response = await client.post("/v1/completions", json=ask("a", 4, ignore_eos=True))
        assert response.json()["usage"]["completion_tokens"] == 4
        [engine] = (await health_that(client, "ok")).json()["engines"]
        assert engine["restarts"] == 1

    run_served(engine_builders, options, scenario, cluster=watchful)
