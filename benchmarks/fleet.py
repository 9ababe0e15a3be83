"""A fleet that follows the load, live: simulated engines in real time, requests of a trace over HTTP.

    python -m benchmarks.fleet [--engines 4] [--seconds 240] [--speed 1] [--idle 15s] [--kv-tokens 20000]
        [--variants all mell max-min] [--restart-at SECONDS] [--trace FILE] [--json FILE]

Each variant is a ``shoal serve`` of its own, one after the other, whose engine processes sleep through the
steps of Llama-3.1-8B on ``--device``: ``all`` runs all engines all the time (dispatch max-min), the others
have ``cluster.fleet`` with that dispatch. All are given the same requests at the same times: arrivals and
lengths are those of the trace (the Azure LLM inference trace of 2023, conversations). "engines": mean number
that ran or loaded; "bound": the fewest that could hold the KV of the requests of each moment. "same": answers
equal to those of the first variant. With ``--restart-at`` the server is killed (SIGKILL) then, and started
again: requests that were cut are sent again, and counted.
"""

import argparse
import asyncio
import csv
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np

PORT = 18_193
TRACE = Path(__file__).parents[2] / "shared/traces/azure_llm_2023/AzureLLMInferenceTrace_conv.csv"
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2
"""Of the KV of Llama-3.1-8B in bfloat16: two for each of 32 layers, of 8 heads of width 128."""
LONGEST = 8000
SHAPE = "llama-3.1-8b"


@dataclass(frozen=True)
class Arrival:
    at_s: float
    prompt: list[int]
    output: int


@dataclass
class Answer:
    text: str = ""
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    tokens: int = 0
    cut: int = 0
    """How often the server was gone."""


@dataclass
class Watched:
    """What was seen of a run, in samples."""

    up: list[float] = field(default_factory=list)
    """Engines that ran or loaded."""
    bound: list[float] = field(default_factory=list)
    tokens: dict[int, int] = field(default_factory=dict)
    """KV of unfinished requests, by number."""


class Server:
    """A ``shoal serve`` with a configuration, which can be killed and started again."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._file = Path(self._folder.name) / "shoal.yaml"
        self._file.write_text(json.dumps(config))
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "shoal.cli", "serve", "--config", str(self._file)]
        environment = os.environ | {"SHOAL_STATE": self._folder.name}
        return subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        )

    def restart(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process = self._start()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=60)
        self._folder.cleanup()


def workload(options: argparse.Namespace) -> list[Arrival]:
    """The first requests of the trace, sped up; prompts are random words."""
    rng, arrivals = random.Random(options.seed), []
    with options.trace.open(newline="") as file:
        first = None
        for row in csv.DictReader(file):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            first = first or at
            at_s = (at - first).total_seconds() / options.speed
            if at_s > options.seconds:
                break
            output = min(int(row["GeneratedTokens"]), LONGEST // 2)
            length = min(int(row["ContextTokens"]), LONGEST - output)
            arrivals.append(Arrival(at_s, [rng.randrange(1000, 40000) for _ in range(length)], output))
    return arrivals


def config(options: argparse.Namespace, variant: str) -> dict[str, Any]:
    dispatch = "max-min" if variant == "all" else variant
    cluster: dict[str, Any] = {"name": f"fleet-{variant}", "dispatch": dispatch}
    if variant != "all":
        cluster["fleet"] = {"min": 1, "idle": options.idle}
    return {
        "services": [{"name": "m", "model": "smollm2", "slo": {"ttft": "1s", "tpot": "40ms"}}],
        "devices": ["simulated"] * options.engines,
        "latency": {"roofline": {"device": options.device, "model": SHAPE}},
        "kv_cache": {"memory": options.kv_tokens * TOKEN_BYTES},
        "cluster": cluster,
        "server": {"host": "127.0.0.1", "port": PORT},
    }


async def wait_until_ready(client: httpx.AsyncClient) -> None:
    for _ in range(600):
        try:
            if (await client.get("/health")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.1)
    raise RuntimeError("the server did not get ready in a minute")


async def ask(client: httpx.AsyncClient, number: int, arrival: Arrival, watched: Watched) -> Answer:
    """One streamed completion; it is sent again if the server goes away."""
    answer, sent = Answer(), time.perf_counter()
    while True:
        pieces: list[str] = []
        try:
            await _stream(client, number, arrival, watched, answer, pieces, sent)
            break
        except httpx.TransportError:
            answer.cut += 1
            await wait_until_ready(client)
    watched.tokens.pop(number, None)
    answer.text, answer.e2e_s = "".join(pieces), time.perf_counter() - sent
    return answer


async def _stream(
    client: httpx.AsyncClient,
    number: int,
    arrival: Arrival,
    watched: Watched,
    answer: Answer,
    pieces: list[str],
    sent: float,
) -> None:
    body = {
        "model": "m",
        "prompt": arrival.prompt,
        "max_tokens": arrival.output,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError((await response.aread()).decode())
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            if not pieces and not answer.ttft_s:
                answer.ttft_s = time.perf_counter() - sent
            pieces += [choice["text"] for choice in event["choices"]]
            watched.tokens[number] = len(arrival.prompt) + len(pieces)


async def watch(client: httpx.AsyncClient, options: argparse.Namespace, watched: Watched) -> None:
    """Sample the engines that are up, and the fewest that could hold the KV of now."""
    while True:
        await asyncio.sleep(0.25)
        try:
            engines = (await client.get("/admin/engines")).json()["data"]
        except httpx.TransportError:
            continue
        watched.up.append(sum(engine["state"] != "standby" for engine in engines))
        watched.bound.append(max(1, math.ceil(sum(watched.tokens.values()) / options.kv_tokens)))


async def play(
    server: Server, arrivals: Sequence[Arrival], options: argparse.Namespace
) -> tuple[list[Answer], Watched]:
    limits, watched = httpx.Limits(max_connections=None), Watched()
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{PORT}", timeout=httpx.Timeout(600), limits=limits
    ) as client:
        await wait_until_ready(client)
        watching = asyncio.create_task(watch(client, options, watched))
        began = time.perf_counter()

        async def arrive(number: int, arrival: Arrival) -> Answer:
            await asyncio.sleep(max(0.0, began + arrival.at_s - time.perf_counter()))
            return await ask(client, number, arrival, watched)

        if options.restart_at is not None:
            asyncio.get_running_loop().call_later(options.restart_at, server.restart)
        answers = await asyncio.gather(*(arrive(*each) for each in enumerate(arrivals)))
        watching.cancel()
        return list(answers), watched


def figures(arrivals: Sequence[Arrival], answers: Sequence[Answer], watched: Watched) -> dict[str, float]:
    ttft_s = [answer.ttft_s for answer in answers]
    tpot_s = [
        (answer.e2e_s - answer.ttft_s) / (arrival.output - 1)
        for arrival, answer in zip(arrivals, answers, strict=True)
        if arrival.output > 1 and not answer.cut
    ]
    return {
        "engines": float(np.mean(watched.up)),
        "bound": float(np.mean(watched.bound)),
        "ttft_p50_s": float(np.median(ttft_s)),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "tpot_p50_s": float(np.median(tpot_s)),
        "tpot_p99_s": float(np.percentile(tpot_s, 99)),
        "cut": sum(answer.cut for answer in answers),
        "answers": len(answers),
    }


def main(options: argparse.Namespace) -> None:
    if not options.trace.exists():
        print(f"skipped: there is no {options.trace}")
        return
    arrivals = workload(options)
    kind = f"{options.engines} engines, {SHAPE} on {options.device}"
    print(f"{len(arrivals)} requests in {options.seconds:g} s, {kind}")
    print("| variant | engines | bound | TTFT p50 / p99 s | TPOT p50 / p99 ms | cut | same |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    found: dict[str, dict[str, float]] = {}
    texts: list[str] = []
    for variant in options.variants:
        server = Server(config(options, variant))
        try:
            answers, watched = asyncio.run(play(server, arrivals, options))
        finally:
            server.stop()
        row = found[variant] = figures(arrivals, answers, watched)
        texts = texts or [answer.text for answer in answers]
        same = sum(answer.text == text for answer, text in zip(answers, texts, strict=True))
        print(
            f"| {variant} | {row['engines']:.2f} | {row['bound']:.2f} | {row['ttft_p50_s']:.2f} / "
            f"{row['ttft_p99_s']:.2f} | {row['tpot_p50_s'] * 1e3:.1f} / {row['tpot_p99_s'] * 1e3:.1f} | "
            f"{row['cut']:.0f} | {same}/{len(answers)} |",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", nargs="+", default=["all", "mell", "max-min"])
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=240.0, help="of arrivals")
    parser.add_argument("--speed", type=float, default=1.0, help="of the trace's clock")
    parser.add_argument("--idle", default="15s", help="cluster.fleet.idle")
    parser.add_argument("--kv-tokens", type=int, default=20_000, help="of each engine")
    parser.add_argument("--device", default="a100-80")
    parser.add_argument("--restart-at", type=float, help="kill the server then, and start it again")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    main(parser.parse_args())
