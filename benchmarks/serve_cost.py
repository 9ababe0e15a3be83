"""CPU time of the API server process per token: this checkout compared with another, in turns.

    git worktree add --detach ../before COMMIT
    python -m benchmarks.serve_cost ../before

Both serve the same model with the same settings, and idle while the other is measured. In each pair both
answer the same streams, in alternating order. Prints CPU time of the HTTP process per token, and tokens per
second: medians, and the median ratio of pairs with its 95% interval (from order statistics).
"""

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

HERE = Path(__file__).parent.parent
WORDS = "river stone light market winter garden engine letter window bridge copper music story harbour"


@dataclass
class Server:
    """One of the two servers, with its measurements."""

    name: str
    checkout: Path
    port: int
    cpu_us: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)

    def start(self, model: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {"PYTHONPATH": str(self.checkout.resolve() / "src")}
        command = [sys.executable, "-m", "shoal.cli", "serve", model, "--port", str(self.port)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


async def wait_for(server: Server) -> None:
    """Wait until the server is ready."""
    async with httpx.AsyncClient() as client:
        while True:
            try:
                if (await client.get(f"http://127.0.0.1:{server.port}/health")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)


async def stream(client: httpx.AsyncClient, server: Server, model: str, prompt: str, tokens: int) -> int:
    """Read one answer to its end; its number of tokens."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
    async with client.stream("POST", url, json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if '"completion_tokens":' in line:
                return int(line.split('"completion_tokens":')[1].split(",")[0].split("}")[0])
    raise RuntimeError("an answer had no usage")


async def load(server: Server, process: psutil.Process, options: argparse.Namespace, seed: int) -> None:
    """Run all streams at once, and record CPU time and throughput."""
    rng = random.Random(seed)
    prompts = [" ".join(rng.choice(WORDS.split()) for _ in range(12)) for _ in range(options.streams)]
    limits = httpx.Limits(max_connections=options.streams)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        began, before = time.perf_counter(), process.cpu_times()
        counts = await asyncio.gather(
            *(stream(client, server, options.model, prompt, options.tokens) for prompt in prompts)
        )
        took, after = time.perf_counter() - began, process.cpu_times()
    used_s = after.user + after.system - before.user - before.system
    server.cpu_us.append(1e6 * used_s / sum(counts))
    server.tokens_per_s.append(sum(counts) / took)


def interval(ratios: Sequence[float]) -> str:
    """The median with its 95% interval of order statistics."""
    ordered = sorted(ratios)
    count = len(ordered)
    # The largest k with P(Binomial(count, 1/2) < k) below 2.5%.
    total, k, probability = 0.0, 0, 0.5**count
    while k < count // 2 and total + probability < 0.025:
        total += probability
        probability *= (count - k) / (k + 1)
        k += 1
    low, high = ordered[max(0, k - 1)], ordered[min(count - 1, count - k)]
    return f"{statistics.median(ordered):.3f} ({low:.3f} to {high:.3f})"


async def main(options: argparse.Namespace) -> None:
    servers = [Server("before", options.before, 18101), Server("now", HERE, 18102)]
    processes = [server.start(options.model) for server in servers]
    try:
        for server in servers:
            await wait_for(server)
        watched = [psutil.Process(process.pid) for process in processes]
        for pair in range(-1, options.pairs):
            for index in (0, 1) if pair % 2 else (1, 0):
                await load(servers[index], watched[index], options, pair)
            if pair < 0:
                for server in servers:
                    server.cpu_us.clear()
                    server.tokens_per_s.clear()
    finally:
        for process in processes:
            process.terminate()
            process.wait()
    before, now = servers
    for server in servers:
        print(
            f"{server.name:6} {statistics.median(server.cpu_us):6.1f} us of CPU a token, "
            f"{statistics.median(server.tokens_per_s):6.0f} tokens/s"
        )
    cpu = [new / old for new, old in zip(now.cpu_us, before.cpu_us, strict=True)]
    rate = [new / old for new, old in zip(now.tokens_per_s, before.tokens_per_s, strict=True)]
    print(f"now / before, {options.pairs} pairs: CPU a token {interval(cpu)}, tokens/s {interval(rate)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="another checkout")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=10)
    asyncio.run(main(parser.parse_args()))
