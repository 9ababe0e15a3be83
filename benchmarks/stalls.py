"""Stalls of a server under bursts of expensive work: /health and another client's stream.

    python -m benchmarks.stalls                       # SmolLM2 and Gemma 3 270M, every kind of work
    python -m benchmarks.stalls --only schemas tokenize --rounds 5

Two clients are measured: one requests /health every 20 ms, and one reads streams of SmolLM2. Turns without
other work alternate with one kind of work each: 122 requests with a schema each; removing and adding the
service with Gemma's tokenizer (262,144 tokens); ten /tokenize and ten /detokenize of 900 KB; a prompt of
7,000 tokens for Gemma with log-probabilities. Prints for each turn the longest /health answer and inter-token
latency, and the largest wake-up delay of the measuring process, which is due to the machine.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.table import Table

from benchmarks.chaos.configurations import Configuration
from benchmarks.chaos.server import Server
from benchmarks.interrupts import print_at_end

POLL_S = 0.02
SETTLE_S = 1.0
QUIET_S = 5.0
TEXT = "The river ran past the stone bridge into the winter light. "


@dataclass
class Watch:
    """Measurements of the watching clients, in seconds."""

    health_s: list[float] = field(default_factory=list)
    stream_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)

    async def health(self, client: httpx.AsyncClient) -> None:
        """Request /health repeatedly until cancelled."""
        while True:
            began = time.monotonic()
            (await client.get("/health")).raise_for_status()
            self.health_s.append(time.monotonic() - began)
            await asyncio.sleep(POLL_S)

    async def stream(self, client: httpx.AsyncClient) -> None:
        """Read one stream after another until cancelled."""
        body = {
            "model": "chat",
            "prompt": "Once upon a time",
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": True,
        }
        while True:
            last = None
            async with client.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.monotonic()
                        if last is not None:
                            self.stream_s.append(now - last)
                        last = now

    async def lateness(self) -> None:
        """Record wake-up delays of this process until cancelled."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.005)
            self.late_s.append(time.monotonic() - began - 0.005)


async def schemas(client: httpx.AsyncClient) -> Counter[str]:
    """122 requests with different schemas, at once."""

    async def ask(number: int) -> int:
        properties = {f"field_{number}_{each}": {"type": "integer"} for each in range(20)}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        body = {"model": "chat", "prompt": "JSON:", "max_tokens": 8, "guided_json": schema}
        return (await client.post("/v1/completions", json=body)).status_code

    return Counter(map(str, await asyncio.gather(*map(ask, range(122)))))


async def tokenizer(client: httpx.AsyncClient) -> Counter[str]:
    """Remove and add the service with the large tokenizer."""
    answer = await client.delete("/admin/services/complete")
    statuses = [answer.status_code]
    await _end(client, answer)
    body = {"name": "complete", "model": "gemma3-270m", "dtype": "int8"}
    answer = await client.post("/admin/services", json=body)
    statuses.append(answer.status_code)
    await _end(client, answer)
    request = {"model": "complete", "prompt": "Hi", "max_tokens": 2}
    statuses.append((await client.post("/v1/completions", json=request)).status_code)
    return Counter(map(str, statuses))


async def _end(client: httpx.AsyncClient, answer: httpx.Response) -> None:
    """Wait until the started operation ends."""
    number = answer.raise_for_status().json()["id"]
    while (await client.get(f"/admin/operations/{number}")).json()["state"] == "running":
        await asyncio.sleep(0.05)


async def tokenize(client: httpx.AsyncClient) -> Counter[str]:
    """Ten texts of 900 KB, with the tokens' strings."""
    body = {"model": "complete", "prompt": TEXT * (900_000 // len(TEXT)), "return_token_strs": True}
    answers = await asyncio.gather(*[client.post("/tokenize", json=body) for _ in range(10)])
    return Counter(str(answer.status_code) for answer in answers)


async def detokenize(client: httpx.AsyncClient) -> Counter[str]:
    """Ten lists of 150,000 tokens."""
    body = {"model": "complete", "tokens": [1_000 + number % 40_000 for number in range(150_000)]}
    answers = await asyncio.gather(*[client.post("/detokenize", json=body) for _ in range(10)])
    return Counter(str(answer.status_code) for answer in answers)


async def scored(client: httpx.AsyncClient) -> Counter[str]:
    """A prompt of 7,000 tokens with log-probabilities."""
    body = {"model": "complete", "prompt": [1_000] * 7_000, "max_tokens": 1, "prompt_logprobs": 1}
    return Counter([str((await client.post("/v1/completions", json=body)).status_code)])


WORK: dict[str, Callable[[httpx.AsyncClient], Awaitable[Counter[str]]]] = {
    work.__name__: work for work in (schemas, tokenizer, tokenize, detokenize, scored)
}


async def attack(url: str, name: str) -> None:
    """Run the work in this process; prints the number of answers by status."""
    async with httpx.AsyncClient(
        base_url=url, timeout=None, limits=httpx.Limits(max_connections=None)
    ) as client:
        print(json.dumps(await WORK[name](client)))


async def turn(server: Server, name: str | None) -> tuple[Watch, str]:
    """Measure during one kind of work; None: without work."""
    watch = Watch()
    assert server.client is not None
    watching = [
        asyncio.create_task(each)
        for each in (watch.health(server.client), watch.stream(server.client), watch.lateness())
    ]
    answer_counts = ""
    try:
        await asyncio.sleep(SETTLE_S)
        if name is None:
            await asyncio.sleep(QUIET_S)
        else:
            command = [sys.executable, "-m", "benchmarks.stalls", "--attack", server.url, "--only", name]
            worker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            answers: dict[str, Any] = json.loads((await worker.communicate())[0])
            answer_counts = ", ".join(f"{count} x {status}" for status, count in sorted(answers.items()))
        await asyncio.sleep(SETTLE_S)
        for task in watching:
            if task.done():
                task.result()
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
    return watch, answer_counts


async def measure(names: list[str], rounds: int, table: Table) -> None:
    """In each round a turn without work, and one for each kind of work."""
    configuration = Configuration("stalls", kv_memory="512MiB")
    with tempfile.TemporaryDirectory() as folder:
        async with Server(configuration, Path(folder)) as server:
            for _ in range(rounds):
                for name in [None, *names]:
                    watch, answers = await turn(server, name)
                    longest = [max(times) for times in (watch.health_s, watch.stream_s, watch.late_s)]
                    median = statistics.median(watch.stream_s)
                    cells = [f"{each:.2f}" for each in longest]
                    table.add_row(name or "none", *cells, f"{median:.3f}", answers)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=sorted(WORK), default=list(WORK), metavar="WORK")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.attack:
        asyncio.run(attack(arguments.attack, arguments.only[0]))
        return
    table = Table("work", "/health, s", "stream, s", "watcher late, s", "median token, s", "answers")
    with print_at_end(table):
        asyncio.run(measure(arguments.only, arguments.rounds, table))


if __name__ == "__main__":
    main()
