"""Dispatch policies on two real engines, with the lengths of a trace.

    python -m benchmarks.dispatch_real --traces FOLDER [--rate 2] [--requests 80] [--rounds 2]

Two engines of one thread each serve SmolLM2, with Poisson arrivals and an eighth of the lengths of Azure's
conversation trace. All policies get the same requests, in turns. Prints medians over the rounds of mean and
99th percentile of latency, relative to the mean request alone, and of mean TTFT.
"""

import argparse
import asyncio
import csv
import random
import statistics
import time
from pathlib import Path

import numpy as np

from shoal.cluster.backends.local import LocalBackend
from shoal.cluster.manager.dispatch import DISPATCHES
from shoal.cluster.options import ClusterOptions, EnginePlan
from shoal.cluster.router.router import Router
from shoal.core import SamplingParams, Service
from shoal.engine import EngineOptions
from shoal.kvcache import KVCacheOptions
from shoal.models import Tokenizer, resolve_model

NAMES = [name for name in DISPATCHES if name != "least-loaded"]
TRACE = "azure_llm_2023/AzureLLMInferenceTrace_conv.csv"
MODEL = "smollm2"
SCALE = 8


def make_requests(folder: Path, count: int, rate: float) -> list[tuple[float, list[int], int]]:
    """Arrival in seconds, prompt, and output tokens of each request."""
    with (folder / TRACE).open() as file:
        rows = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    rng = random.Random(5)
    arrival, requests = 0.0, []
    for prompt, output in rng.sample(rows, count):
        arrival += rng.expovariate(rate)
        tokens = [rng.randrange(1000, 20000) for _ in range(max(4, prompt // SCALE))]
        requests.append((arrival, tokens, max(4, output // SCALE)))
    return requests


async def play(
    router: Router, requests: list[tuple[float, list[int], int]]
) -> tuple[list[float], list[float]]:
    """Latencies and TTFTs, in seconds."""
    latencies, firsts = [], []
    began = time.perf_counter()

    async def request(arrival: float, prompt: list[int], tokens: int) -> None:
        await asyncio.sleep(began + arrival - time.perf_counter())
        sent = time.perf_counter()
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        first = None
        async with await router.submit(MODEL, prompt, sampling) as stream:
            async for delta in stream:
                if delta.tokens and first is None:
                    first = time.perf_counter() - sent
        assert first is not None
        firsts.append(first)
        latencies.append(time.perf_counter() - sent)

    await asyncio.gather(*(request(*each) for each in requests))
    return latencies, firsts


async def main(options: argparse.Namespace) -> None:
    folder = resolve_model(MODEL)
    engine = EngineOptions(
        services=(Service(name=MODEL, model=MODEL),),
        threads=1,
        kv_cache=KVCacheOptions(memory_bytes=256 << 20),
    )
    requests = make_requests(options.traces, options.requests, options.rate)
    mean_tokens = round(statistics.mean(tokens for _, _, tokens in requests))
    mean_prompt = round(statistics.mean(len(prompt) for _, prompt, _ in requests))
    typical = [(0.0, list(range(1000, 1000 + mean_prompt)), mean_tokens)]
    alone_s = 0.0
    figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in NAMES}
    for _ in range(options.rounds):
        for name in NAMES:
            router = await Router.start(
                [EnginePlan(name=str(number), options=engine) for number in range(2)],
                {MODEL: folder},
                {MODEL: Tokenizer.from_folder(folder)},
                LocalBackend(None, 0),
                ClusterOptions(dispatch=name),
            )
            try:
                if not alone_s:
                    alone_s = statistics.median([(await play(router, typical))[0][0] for _ in range(5)])
                latencies, firsts = await play(router, requests)
            finally:
                await router.close()
            figures[name].append(
                (
                    statistics.mean(latencies) / alone_s,
                    float(np.percentile(latencies, 99)) / alone_s,
                    statistics.mean(firsts),
                )
            )
            print(f"{name:15} " + " ".join(f"{figure:7.2f}" for figure in figures[name][-1]), flush=True)
    print(f"\nalone {alone_s:.2f} s ({mean_prompt} + {mean_tokens} tokens), {options.rate:g} requests/s")
    print("| dispatch | x alone | p99 x | TTFT s |\n|---|---:|---:|---:|")
    for name, rows in figures.items():
        columns = [statistics.median(column) for column in zip(*rows, strict=True)]
        print(f"| `{name}` | " + " | ".join(f"{column:.2f}" for column in columns) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True, help="folder of traces")
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second, to both engines")
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=2)
    asyncio.run(main(parser.parse_args()))
