"""Two engine processes with simulated devices: streams are the same whatever becomes of the engines."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import Scenario, run_served

from shoal.cluster.manager.events import MigrationMethod
from shoal.cluster.router.router import Router
from shoal.engine.process.child_process import SIMULATED_BUILDER
from shoal.models import Tokenizer
from simulated_engines import add_tokenizer, make_folder, simulated_options

pytestmark = pytest.mark.without_native

STREAMS, OUTPUT, BEGUN = 6, 300, 20
"""Something happens to the engines when every stream has begun."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("models") / "words")
    add_tokenizer(folder)
    return folder


def serve(folder: Path, scenario: Scenario, *, engines: int = 2) -> None:
    options = simulated_options(folder, step_s=0.004)
    tokenizers = {"a": Tokenizer.from_folder(folder)}
    run_served(options, {"a": folder}, tokenizers, scenario, SIMULATED_BUILDER, engines=engines)


def body(number: int, **fields: Any) -> dict[str, Any]:
    prompt = f"prompt {number} " * (1 + number)
    return {
        "model": "a",
        "prompt": prompt,
        "max_tokens": OUTPUT,
        "temperature": number % 2,
        "seed": 3,
    } | fields


async def ask(client: httpx.AsyncClient, **fields: Any) -> Any:
    answer = await client.post("/v1/completions", json=body(0, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


class Streams:
    """Streams of texts that are read as they come."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.chunks: list[list[str]] = [[] for _ in range(STREAMS)]
        self._readers = [asyncio.create_task(self._read(number)) for number in range(STREAMS)]

    async def _read(self, number: int) -> None:
        request = body(number, stream=True)
        async with self._client.stream("POST", "/v1/completions", json=request) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    [choice] = httpx.Response(200, text=line.removeprefix("data: ")).json()["choices"]
                    self.chunks[number].append(choice["text"])

    async def until_begun(self) -> None:
        while not all(len(chunks) >= BEGUN for chunks in self.chunks):
            await asyncio.sleep(0.002)
        assert not any(reader.done() for reader in self._readers), "the streams have ended too soon"

    async def texts(self) -> list[str]:
        await asyncio.gather(*self._readers)
        return ["".join(chunks) for chunks in self.chunks]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[str]:
    """The texts of the streams on one engine, to which nothing happens."""
    texts: list[str] = []

    async def scenario(client: httpx.AsyncClient, router: Router) -> None:
        texts.extend(await Streams(client).texts())

    serve(folder, scenario, engines=1)
    assert len(set(texts)) == STREAMS
    assert {len(text.split()) for text in texts} == {OUTPUT}
    return texts


def moved(router: Router, method: MigrationMethod) -> int:
    return sum(engine.migrations.get((method, "done"), 0) for engine in router.engines)


def test_requests_migrate(folder: Path, undisturbed: list[str]) -> None:
    async def scenario(client: httpx.AsyncClient, router: Router) -> None:
        for method in MigrationMethod:
            streams = Streams(client)
            await streams.until_begun()
            for request in router.requests(STREAMS).unfinished:
                call = request.id.removesuffix("-0")
                router.administration.migrate_request(call, None, method)
            assert await streams.texts() == undisturbed
            assert moved(router, method) == STREAMS

    serve(folder, scenario)


def test_an_engine_is_drained_and_another_killed(folder: Path, undisturbed: list[str]) -> None:
    async def scenario(client: httpx.AsyncClient, router: Router) -> None:
        streams = Streams(client)
        await streams.until_begun()
        drained = router.engines[0].requests
        assert drained
        router.administration.drain_engine("0")
        assert await streams.texts() == undisturbed
        assert moved(router, MigrationMethod.LIVE) == drained
        router.administration.undrain_engine("0")
        streams = Streams(client)
        await streams.until_begun()
        lost, pid = router.engines[1].requests, router.engines[1].pid
        assert lost
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert await streams.texts() == undisturbed
        assert router.services["a"].resumed == lost

    serve(folder, scenario)


def test_what_is_above_the_engine_works_and_what_needs_a_model_is_refused(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, router: Router) -> None:
        [whole] = (await ask(client, temperature=0))["choices"]
        assert whole["finish_reason"] == "length"
        stop = whole["text"].split()[9]
        [cut] = (await ask(client, temperature=0, stop=stop))["choices"]
        assert cut["finish_reason"] == "stop"
        assert cut["text"] == whole["text"][: whole["text"].index(stop)]
        choices = (await ask(client, temperature=1, n=3))["choices"]
        assert len({choice["text"] for choice in choices}) == 3
        for name, value in REFUSED.items():
            answer = await client.post(
                "/v1/completions", json=body(0, stream=name in STREAMED, **{name: value})
            )
            assert answer.status_code == 400, name
            assert "the engines are simulated" in answer.json()["error"]["message"]
        metrics = (await client.get("/metrics")).text
        assert 'device="simulated (fit ' in metrics
        assert "shoal_engine_up" in metrics

    serve(folder, scenario, engines=1)


STREAMED = ("logprobs", "response_format")
"""Refused before the stream begins."""
REFUSED: dict[str, Any] = {
    "logprobs": 1,
    "prompt_logprobs": 1,
    "logit_bias": {"5": 1.0},
    "allowed_token_ids": [5, 6],
    "bad_words": ["aa"],
    "response_format": {"type": "json_object"},
}
