"""How long a server stands still for others while it gets much work at once.

    python -m benchmarks.stalls                       # SmolLM2 and Gemma 3 270M, every kind of work
    python -m benchmarks.stalls --only schemas tokenize --rounds 5

Two clients are watched: one asks for /health every 20 ms, and one reads streams of SmolLM2, one after the
other. In turns nothing else happens, and one kind of work comes: 122 requests with a schema each; the service
with Gemma's tokenizer (262,144 tokens) goes and comes again; ten /tokenize and ten /detokenize of 900 KB; a
prompt of 7,000 tokens for Gemma with log-probabilities. Printed are, for each turn, the longest times between
two answers and between two tokens, and how late the watching process was woken, which is the machine's part.
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
from benchmarks.interrupted import printed_at_end

POLL_S = 0.02
SETTLE_S = 1.0
QUIET_S = 5.0
TEXT = "The river ran past the stone bridge into the winter light. "


@dataclass
class Watch:
    """What the clients saw that are watched."""

    health_s: list[float] = field(default_factory=list)
    stream_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)

    async def health(self, client: httpx.AsyncClient) -> None:
        """Ask again and again, until cancelled."""
        while True:
            began = time.monotonic()
            (await client.get("/health")).raise_for_status()
            self.health_s.append(time.monotonic() - began)
            await asyncio.sleep(POLL_S)

    async def stream(self, client: httpx.AsyncClient) -> None:
        """Read one stream after the other, until cancelled."""
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
        """How much later than asked for this process goes on, until cancelled."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.005)
            self.late_s.append(time.monotonic() - began - 0.005)


async def schemas(client: httpx.AsyncClient) -> Counter[str]:
    """122 of them, all different, at once."""

    async def ask(number: int) -> int:
        properties = {f"field_{number}_{each}": {"type": "integer"} for each in range(20)}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        body = {"model": "chat", "prompt": "JSON:", "max_tokens": 8, "guided_json": schema}
        return (await client.post("/v1/completions", json=body)).status_code

    return Counter(map(str, await asyncio.gather(*map(ask, range(122)))))


async def tokenizer(client: httpx.AsyncClient) -> Counter[str]:
    """The service with it goes, and comes again."""
    answer = await client.delete("/admin/services/complete")
    statuses = [answer.status_code]
    await _end(client, answer)
    body = {"name": "complete", "model": "gemma3-270m", "dtype": "int8"}
    answer = await client.post("/admin/services", json=body)
    statuses.append(answer.status_code)
    await _end(client, answer)
    asked = {"model": "complete", "prompt": "Hi", "max_tokens": 2}
    statuses.append((await client.post("/v1/completions", json=asked)).status_code)
    return Counter(map(str, statuses))


async def _end(client: httpx.AsyncClient, answer: httpx.Response) -> None:
    """Wait for the operation that was started."""
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
    """A prompt of 7,000 tokens whose log-probabilities are wanted."""
    body = {"model": "complete", "prompt": [1_000] * 7_000, "max_tokens": 1, "prompt_logprobs": 1}
    return Counter([str((await client.post("/v1/completions", json=body)).status_code)])


WORK: dict[str, Callable[[httpx.AsyncClient], Awaitable[Counter[str]]]] = {
    work.__name__: work for work in (schemas, tokenizer, tokenize, detokenize, scored)
}


async def attack(url: str, name: str) -> None:
    """Do the work, in a process of its own; prints how many answers had which status."""
    async with httpx.AsyncClient(
        base_url=url, timeout=None, limits=httpx.Limits(max_connections=None)
    ) as client:
        print(json.dumps(await WORK[name](client)))


async def turn(server: Server, name: str | None) -> tuple[Watch, str]:
    """Watch the server for the time of one kind of work."""
    watch = Watch()
    assert server.client is not None
    watching = [
        asyncio.create_task(each)
        for each in (watch.health(server.client), watch.stream(server.client), watch.lateness())
    ]
    said = ""
    try:
        await asyncio.sleep(SETTLE_S)
        if name is None:
            await asyncio.sleep(QUIET_S)
        else:
            command = [sys.executable, "-m", "benchmarks.stalls", "--attack", server.url, "--only", name]
            worker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            answers: dict[str, Any] = json.loads((await worker.communicate())[0])
            said = ", ".join(f"{count} x {status}" for status, count in sorted(answers.items()))
        await asyncio.sleep(SETTLE_S)
        for task in watching:
            if task.done():
                task.result()
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
    return watch, said


async def measure(names: list[str], rounds: int, table: Table) -> None:
    """Every kind of work in each round, and none."""
    configuration = Configuration("stalls", kv_memory="512MiB")
    with tempfile.TemporaryDirectory() as folder:
        async with Server(configuration, Path(folder)) as server:
            for _ in range(rounds):
                for name in [None, *names]:
                    watch, said = await turn(server, name)
                    longest = [max(times) for times in (watch.health_s, watch.stream_s, watch.late_s)]
                    median = statistics.median(watch.stream_s)
                    table.add_row(name or "none", *[f"{each:.2f}" for each in longest], f"{median:.3f}", said)


def main() -> None:
    """Start a server, and watch it."""
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
    with printed_at_end(table):
        asyncio.run(measure(arguments.only, arguments.rounds, table))


if __name__ == "__main__":
    main()
