"""Two engines of one core each compared with one engine of two cores, with the same memory in all.

    python -m benchmarks.two_engines                      # smollm2 and gemma3-270m on every engine
    python -m benchmarks.two_engines --clients 4 --rounds 5

Clients read one stream after another, alternating between services. Both set-ups run in turns, each in its
own process tree. Prints medians over the rounds of tokens per second, and of mean normalised latency:
relative to a request of the same service alone on the engine of two cores.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.cluster.backends.local import LocalBackend
from shoal.cluster.options import ClusterOptions, EnginePlan
from shoal.cluster.router.router import Router
from shoal.core import SamplingParams, Service
from shoal.engine import EngineOptions
from shoal.kvcache import KVCacheOptions
from shoal.models import Tokenizer, resolve_model

MODELS = ("smollm2", "gemma3-270m")
OUTPUT_TOKENS = 48
WORDS = "river stone light market winter garden engine letter window bridge copper music story harbour"


@dataclass
class Round:
    """Figures of one set-up in one round."""

    tokens: int = 0
    seconds: float = 0.0
    normalised: list[float] = field(default_factory=list)


def plans(engines: int, kv_mib: int) -> list[EnginePlan]:
    """Engines that share two cores and the memory for KV."""
    services = tuple(Service(name=model, model=model) for model in MODELS)
    options = EngineOptions(
        services=services,
        threads=2 // engines,
        kv_cache=KVCacheOptions(memory_bytes=(kv_mib << 20) // engines),
    )
    return [EnginePlan(name=str(number), options=options) for number in range(engines)]


async def request(router: Router, service: str, prompt: list[int]) -> float:
    """Read a stream to its end; its seconds."""
    began = time.perf_counter()
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    async with await router.submit(service, prompt, sampling) as stream:
        async for _ in stream:
            pass
    return time.perf_counter() - began


async def load(
    router: Router,
    prompts: Mapping[str, list[list[int]]],
    alone_s: Mapping[str, float],
    options: argparse.Namespace,
) -> Round:
    result = Round()
    until = time.perf_counter() + options.seconds
    began = time.perf_counter()

    async def client(number: int) -> None:
        rng = random.Random(number)
        turn = number
        while time.perf_counter() < until:
            service = MODELS[turn % len(MODELS)]
            turn += 1
            took_s = await request(router, service, rng.choice(prompts[service]))
            result.tokens += OUTPUT_TOKENS
            result.normalised.append(took_s / alone_s[service])

    await asyncio.gather(*(client(number) for number in range(options.clients)))
    result.seconds = time.perf_counter() - began
    return result


async def main(options: argparse.Namespace) -> dict[int, list[Round]]:
    folders = {model: resolve_model(model) for model in MODELS}
    tokenizers = {model: Tokenizer.from_folder(folders[model]) for model in MODELS}
    rng = random.Random(3)
    words = WORDS.split()
    prompts = {
        model: [
            tokenizers[model].encode(" ".join(rng.choice(words) for _ in range(rng.choice([10, 40, 120]))))
            for _ in range(24)
        ]
        for model in MODELS
    }
    rounds: dict[int, list[Round]] = {1: [], 2: []}
    alone_s: dict[str, float] = {}
    for _ in range(options.rounds):
        for engines in rounds:
            router = await Router.start(
                plans(engines, options.kv_mib), folders, tokenizers, LocalBackend(None, 0), ClusterOptions()
            )
            try:
                if not alone_s:
                    for model in MODELS:
                        times = [await request(router, model, prompt) for prompt in prompts[model][:8]]
                        alone_s[model] = statistics.mean(times[2:])
                rounds[engines].append(await load(router, prompts, alone_s, options))
            finally:
                await router.close()
    return rounds


def cpu_name() -> str:
    """The CPU's name in /proc/cpuinfo."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown CPU"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=15.0, help="length of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-mib", type=int, default=512, help="memory for KV of all engines together")
    chosen = parser.parse_args()
    found = asyncio.run(main(chosen))
    table = Table(
        "engines", "tokens/s", "normalised latency", title=f"{chosen.clients} clients, {cpu_name()}"
    )
    for engines, done in found.items():
        table.add_row(
            "one of two cores" if engines == 1 else "two of one core",
            f"{statistics.median(round.tokens / round.seconds for round in done):.0f}",
            f"{statistics.median(statistics.mean(round.normalised) for round in done):.2f}",
        )
    Console().print(table)
