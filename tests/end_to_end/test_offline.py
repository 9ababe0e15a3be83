"""A Shoal with a bundled model: the page about it, and the server's embeddings. Slow."""

import ast
import asyncio
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from served import run_served

from at_hand import bundled_model
from shoal import Service, Shoal
from shoal.cluster.router.router import Router
from shoal.engine import EngineOptions
from shoal.kvcache import KVCacheOptions
from shoal.models import Tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
TEXTS = ["a cat", "a kitten " * 3, "Wasser kocht bei", "x" * 9000]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_page_is_a_program() -> None:
    bundled_model("smollm2")
    program = "".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert re.search(r" (length|stop)$", done.stdout, re.M)
    completions, answers = map(ast.literal_eval, re.findall(r"^\[.*\]$", done.stdout, re.M))
    assert (len(completions), len(answers)) == (3, 2)
    assert re.search(r"^(yes|no)$", done.stdout, re.M)
    assert re.search(r"0\.\d{3,}$", done.stdout, re.M)  # what a cat and a kitten have in common


def test_embeddings_are_those_of_the_server() -> None:
    folder = bundled_model("smollm2")
    options = EngineOptions(
        services=(Service(name="smollm2", model="smollm2"),), kv_cache=KVCacheOptions(memory_bytes=64 << 20)
    )
    served: list[tuple[float, ...]] = []

    async def scenario(client: httpx.AsyncClient, router: Router) -> None:
        for text in TEXTS:  # one after the other, for rounding depends on who computes beside
            body = {"model": "smollm2", "input": text, "truncate_prompt_tokens": 500}
            answer = (await client.post("/v1/embeddings", json=body)).json()
            served.append(tuple(answer["data"][0]["embedding"]))

    run_served(options, {"smollm2": folder}, {"smollm2": Tokenizer.from_folder(folder)}, scenario)
    with Shoal("smollm2", kv_memory="64MiB", progress=False) as shoal:
        own = [shoal.embed(text, truncate_prompt_tokens=500)[0] for text in TEXTS]
        together = shoal.embed(TEXTS, truncate_prompt_tokens=500)
    assert own == served
    for vector, other in zip(own, together, strict=True):
        assert vector == pytest.approx(other, abs=5e-2)


def test_threads_and_coroutines_get_what_they_get_alone() -> None:
    bundled_model("smollm2")
    prompts = [f"The number {number} is" for number in range(4)]
    fields = {"max_tokens": 12, "temperature": 0}
    # In float32, and with KV for a few of them only.
    with Shoal(
        Service(name="m", model="smollm2", dtype="float32"), kv_memory="4MiB", progress=False
    ) as shoal:
        alone = [shoal.generate(prompt, **fields)[0].text for prompt in prompts]

        async def together() -> list[str]:
            outputs = await asyncio.gather(*(shoal.agenerate(prompt, **fields) for prompt in prompts))
            return [output.text for [output] in outputs]

        with ThreadPoolExecutor(5) as pool:
            texts = pool.submit(asyncio.run, together())
            streams = [pool.submit(lambda p: "".join(shoal.stream(p, **fields)), p) for p in prompts]
            assert [stream.result() for stream in streams] == alone
            assert texts.result() == alone
