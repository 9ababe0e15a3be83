"""A served engine does not grow over a thousand requests, neither its process nor the HTTP server's."""

import asyncio
from pathlib import Path

import httpx
import psutil
import pytest
from execute_builders import VOCAB, make_model, make_prompt, tiny_config
from served import run_served

from shoal.cluster.router.router import Router
from shoal.core import Service
from shoal.engine import EngineOptions
from shoal.kvcache import KVCacheOptions

GROWTH_LIMIT_BYTES = 12 << 20


class IdTokenizer:
    """Token ids as text."""

    vocab_size = VOCAB
    eos_token_ids = (2,)
    has_chat_template = False

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f" {token}" for token in tokens)


async def one(client: httpx.AsyncClient, number: int) -> None:
    """A streamed completion, every third of them abandoned after its first chunk."""
    prompt = make_prompt(1 + number % 60, seed=number)
    body = {"model": "m", "prompt": prompt, "max_tokens": 8, "seed": number, "ignore_eos": True}
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        assert answer.status_code == 200
        async for _ in answer.aiter_lines():
            if number % 3 == 0:
                break


async def burst(client: httpx.AsyncClient, numbers: range) -> None:
    for start in numbers[::50]:
        await asyncio.gather(*(one(client, number) for number in range(start, start + 50)))


@pytest.mark.slow
def test_a_thousand_requests_leave_no_memory_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    folder = make_model(tmp_path / "m", tiny_config("llama"))

    async def scenario(client: httpx.AsyncClient, router: Router) -> None:
        processes = [psutil.Process(), psutil.Process(router.engines[0].pid)]
        await burst(client, range(300))
        before = [process.memory_info().rss for process in processes]
        await burst(client, range(300, 1300))
        after = [process.memory_info().rss for process in processes]
        assert max(now - then for now, then in zip(after, before, strict=True)) < GROWTH_LIMIT_BYTES
        async with asyncio.timeout(30):
            while router.unfinished:
                await asyncio.sleep(0.01)
        ended = 0
        async with asyncio.timeout(30):
            while ended < 1300:
                stats = await router.stats("0")
                ended = sum(service.finished + service.cancelled for service in stats.services.values())
        assert ended == 1300
        assert stats.pool.live_bytes == 0

    services = (Service(name="m", model="m"),)
    options = EngineOptions(services=services, kv_cache=KVCacheOptions(memory_bytes=1 << 20))
    run_served(options, {"m": folder}, {"m": IdTokenizer()}, scenario)
