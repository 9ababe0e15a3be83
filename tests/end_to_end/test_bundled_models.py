"""The two bundled models, for real: equality with `transformers`, and a crowd over HTTP.

Slow. Where neither the cache nor the network has the models, they are skipped; with ``CI`` set they fail.
"""

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from end_to_end_builders import OVERCOMMIT, greedy_references, make_request, run_engine
from served import Scenario, run_served
from transformers import AutoModelForCausalLM

from at_hand import bundled_model
from shoal.cluster.router.router import Router
from shoal.config import PRESETS
from shoal.core import Service
from shoal.engine import EngineOptions
from shoal.kvcache import KVCacheOptions
from shoal.models import Tokenizer
from shoal.schedule import SchedulerOptions, Slice

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MODELS = ("smollm2", "gemma3-270m")
TEXTS = (
    "A",
    "The capital of France is",
    "To make a good cup of tea, first",
    "In the year 1969, the first people landed on the moon. " * 4 + "Their names were",
    "In the year 1969, the first people landed on the moon. " * 4 + "They returned",
)
OUTPUT = 24
SHORT = 12

CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "with the other model": {},
    "preemptions": {"preset": "vllm", "memory_bytes": 24 << 20, **OVERCOMMIT},
    "no prefix caching, chunks of 7": {"prefix_caching": False, "max_batched_tokens": 7},
}


@pytest.fixture(scope="module")
def folders() -> dict[str, Path]:
    return {name: bundled_model(name) for name in MODELS}


@pytest.fixture(scope="module")
def prompts(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    tokenizers = {name: Tokenizer.from_folder(folders[name]) for name in MODELS}
    made = {name: [tokenizers[name].encode(text) for text in TEXTS] for name in MODELS}
    return {name: [*some, (some[-1] * 20)[:580]] for name, some in made.items()}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path], prompts: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    found = {}
    for name in MODELS:
        *texts, long = prompts[name]
        found[name] = [
            *greedy_references(folders[name], texts, OUTPUT),
            *greedy_references(folders[name], [long], OUTPUT),
        ]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_greedy_output_alone_equals_transformers(
    name: str, folders: dict[str, Path], prompts: dict[str, Any], expected: dict[str, Any]
) -> None:
    rounds = [[make_request(str(i), name, prompt, OUTPUT)] for i, prompt in enumerate(prompts[name])]
    outcome = run_engine({name: folders[name]}, rounds, memory_bytes=256 << 20)
    assert [outcome.tokens[str(i)] for i in range(len(rounds))] == expected[name]


@pytest.mark.parametrize("circumstance", CIRCUMSTANCES)
def test_greedy_output_together_equals_transformers(
    circumstance: str, folders: dict[str, Path], prompts: dict[str, Any], expected: dict[str, Any]
) -> None:
    short = circumstance != "with the other model"  # the long prompt would fill the pool, or take minutes
    numbers = range(len(TEXTS) if short else len(TEXTS) + 1)
    requests = [make_request(f"{n}-{i}", n, prompts[n][i], OUTPUT) for i in numbers for n in MODELS]
    settings = {"memory_bytes": 256 << 20, **CIRCUMSTANCES[circumstance]}
    outcome = run_engine(folders, [requests], **settings)
    for name in MODELS:
        assert [outcome.tokens[f"{name}-{i}"] for i in numbers] == expected[name][: len(numbers)]
    assert (outcome.preemptions > 0) == (circumstance == "preemptions")


TUNED: dict[str, dict[str, Any]] = {
    "muxserve": {"memory_bytes": 16 << 20, "every": 2},  # units as large as the largest head of both
    "scls-cb": {"admission": Slice(tokens=4)},
}
KINDS = ("shoal", "vllm", "fastserve", "muxserve", "past-future", "scls-cb")
"""One preset of each kind of memory: computed again, swapped, split, forecast, slices. All of them with small
models are in test_equality_presets.py."""
# The others wait for memory, at least for so few requests.
PREEMPTING = ("shoal", "vllm", "fastserve", "muxserve")


@pytest.mark.parametrize("preset", KINDS)
def test_greedy_output_equals_transformers_under_presets_of_every_kind(
    preset: str, folders: dict[str, Path], prompts: dict[str, Any], expected: dict[str, Any]
) -> None:
    numbers = range(len(TEXTS))
    requests = [make_request(f"{n}-{i}", n, prompts[n][i], SHORT) for i in numbers for n in MODELS]
    settings = {"memory_bytes": 7 << 20, "block_size": 8, "every": 1, "step_s": 0.1, **TUNED.get(preset, {})}
    execution_s = {"smollm2": 1.0, "gemma3-270m": 0.5}
    outcome = run_engine(folders, [requests], preset=preset, execution_s=execution_s, **settings)
    for name in MODELS:
        assert [outcome.tokens[f"{name}-{i}"] for i in numbers] == [
            tokens[:SHORT] for tokens in expected[name][: len(numbers)]
        ]
    assert (outcome.preemptions > 0) == (preset in PREEMPTING)
    if PRESETS[preset].scheduler.preemption_mode == "swap":
        assert (outcome.swapped_tokens > 0) == (preset in PREEMPTING)


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_bfloat16_believes_what_transformers_believes_in_bfloat16(
    name: str, folders: dict[str, Path], prompts: dict[str, Any]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.bfloat16)
    requests = [make_request(str(i), name, prompt, 1, logprobs=10) for i, prompt in enumerate(prompts[name])]
    outcome = run_engine({name: folders[name]}, [requests], memory_bytes=256 << 20, dtype="bfloat16")
    for i, prompt in enumerate(prompts[name]):
        theirs = model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
        (entry,) = outcome.logprobs[str(i)]
        for token, logprob in entry.top[:3]:
            assert logprob == pytest.approx(float(theirs[token]), abs=0.35)


def serve_bundled(folders: dict[str, Path], scenario: Scenario) -> None:
    """Run ``scenario`` against a server of both models with a pool that is too small for everybody."""
    services = tuple(Service(name=name, model=name) for name in MODELS)
    options = EngineOptions(
        services=services,
        kv_cache=KVCacheOptions(memory_bytes=32 << 20),
        scheduler=SchedulerOptions(max_batched_tokens=256, **OVERCOMMIT),
    )
    tokenizers = {name: Tokenizer.from_folder(folders[name]) for name in MODELS}
    run_served(options, folders, tokenizers, scenario)


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any], stop_after: int | None) -> str:
    """How a streamed request ended: its finish reason, or "cancelled" by us after some chunks."""
    ends: list[str] = []
    chunks = 0
    async with client.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunks += 1
            payload = json.loads(line[6:])
            assert "error" not in payload, payload
            ends += [c["finish_reason"] for c in payload["choices"] if c["finish_reason"]]
            if stop_after is not None and chunks >= stop_after:
                return "cancelled"
    assert len(ends) == 1, ends
    return ends[0]


def test_sixty_four_streams_of_both_models_with_a_third_cancelled(folders: dict[str, Path]) -> None:
    rng = random.Random(0)
    # The longest are computed in several chunks, and two of them fill the pool.
    lengths = [1, 2, 600, 599, 16, 17, *(int(300 ** rng.random()) for _ in range(58))]

    async def one(client: httpx.AsyncClient, number: int) -> str:
        stop_after = rng.randint(1, 8) if number % 3 == 0 else None
        common = {"max_tokens": 12, "ignore_eos": True, "temperature": 1.0, "seed": number}
        if number % 3 == 1:
            text = " ".join(rng.choice(TEXTS) for _ in range(1 + lengths[number] // 60))
            body = {"model": "smollm2", "messages": [{"role": "user", "content": text}]} | common
            return await stream(client, "/v1/chat/completions", body, stop_after)
        prompt = [rng.randrange(100, 40_000) for _ in range(lengths[number])]
        body = {"model": MODELS[number % 2], "prompt": prompt} | common
        return await stream(client, "/v1/completions", body, stop_after)

    async def scenario(client: httpx.AsyncClient, router: Router) -> None:
        ends = Counter(await asyncio.gather(*(one(client, number) for number in range(64))))
        assert ends == {"length": 42, "cancelled": 22}
        async with asyncio.timeout(60):
            while router.unfinished:
                await asyncio.sleep(0.05)
        stats = await router.stats("0")
        async with asyncio.timeout(60):
            while any(s.running or s.waiting for s in stats.services.values()):
                await asyncio.sleep(0.05)
                stats = await router.stats("0")
        assert stats.pool.live_bytes == 0
        assert sum(s.finished + s.cancelled for s in stats.services.values()) == 64
        health = await client.get("/health")
        assert health.status_code == 200

    serve_bundled(folders, scenario)
