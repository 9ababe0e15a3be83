"""A placement that follows the load, live: six services whose popularity changes every minute.

    python -m benchmarks.live_placement [--engines 4] [--minutes 5] [--rate 12] [--interval 20s]
        [--variants even all search] [--json FILE]

Engine processes sleep through the steps of Llama-3.1-8B on ``--device`` and run ``--max-running`` requests at
most. Of six services another one gets ``--hot`` of all requests in each minute. Each variant is a ``shoal
serve`` of its own, one after the other, and gets the same requests at the same times: ``even``, each service
on one engine; ``all``, all on all; ``search``, which is placed as ``even`` at the start, may place all on all
and has ``cluster.placement: {policy: search}``. "late": seconds from a change of popularity until the hot
service is on another engine, where that happened. "same": answers equal to those of the first variant.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.fleet import PORT, SHAPE, TOKEN_BYTES, Server, wait_until_ready

SERVICES = [f"s{number}" for number in range(6)]
MINUTE_S = 60.0
GOAL_S = 4.0
"""For the whole answer."""


@dataclass(frozen=True)
class Call:
    at_s: float
    service: str
    prompt: list[int]
    output: int


@dataclass
class Seen:
    text: str
    tokens: int
    e2e_s: float


def hot(minute: int) -> str:
    """The popular service of a minute."""
    return SERVICES[(minute * 5) % len(SERVICES)]


def workload(options: argparse.Namespace) -> list[Call]:
    rng, at_s, calls = random.Random(options.seed), 0.0, []
    while (at_s := at_s + rng.expovariate(options.rate)) < options.minutes * MINUTE_S:
        popular = hot(int(at_s // MINUTE_S))
        service = popular if rng.random() < options.hot else rng.choice(SERVICES)
        prompt = [rng.randrange(1000, 40_000) for _ in range(rng.randrange(20, 400))]
        calls.append(Call(at_s, service, prompt, rng.randrange(20, 180)))
    return calls


def even(engines: int) -> dict[str, list[str]]:
    """Each service on one engine."""
    return {name: [str(number % engines)] for number, name in enumerate(SERVICES)}


def config(options: argparse.Namespace, variant: str) -> dict[str, Any]:
    names = [str(number) for number in range(options.engines)]
    whole: dict[str, Any] = {
        "services": [{"name": name, "model": "smollm2", "slo": {"e2e": GOAL_S}} for name in SERVICES],
        "devices": [{"name": name, "device": "simulated"} for name in names],
        "latency": {"roofline": {"device": options.device, "model": SHAPE}},
        "kv_cache": {"memory": 20_000 * TOKEN_BYTES},
        "scheduler": {"max_running": options.max_running},
        "cluster": {"name": f"placement-{variant}"},
        "server": {"host": "127.0.0.1", "port": PORT},
    }
    if variant == "even":
        whole["placement"] = even(options.engines)
    if variant == "search":
        whole["cluster"]["placement"] = {
            "policy": "search",
            "interval": options.interval,
            "min_interval": options.interval,
            "search_time": "10s",
        }
    return whole


async def place_evenly(client: httpx.AsyncClient, engines: int) -> None:
    """Begin as ``even``, on engines that may have all services."""
    for service, names in even(engines).items():
        body = {"service": service, "engines": names}
        started = await client.post("/admin/placement", json=body)
        path = started.headers["location"]
        while (operation := (await client.get(path)).json())["state"] == "running":
            await asyncio.sleep(0.1)
        assert operation["state"] == "done", operation


async def ask(client: httpx.AsyncClient, call: Call) -> Seen:
    """One answer; the whole of it, since only its end has a goal."""
    body = {
        "model": call.service,
        "prompt": call.prompt,
        "max_tokens": call.output,
        "ignore_eos": True,
        "temperature": 0,
    }
    sent = time.perf_counter()
    response = await client.post("/v1/completions", json=body)
    if response.status_code != 200:
        raise RuntimeError(response.text)
    answer = response.json()
    tokens = answer["usage"]["completion_tokens"]
    return Seen(answer["choices"][0]["text"], tokens, time.perf_counter() - sent)


async def watch(client: httpx.AsyncClient, began: float, late: dict[int, float]) -> None:
    """Note when the hot service of each minute is first on other engines than at its begin."""
    before: dict[int, set[str]] = {}
    while True:
        await asyncio.sleep(0.5)
        at_s = time.perf_counter() - began
        minute = int(at_s // MINUTE_S)
        placed = (await client.get("/admin/placement")).json()["placement"]
        engines = set(placed[hot(minute)])
        if engines - before.setdefault(minute, engines):
            late.setdefault(minute, at_s - minute * MINUTE_S)


async def play(
    calls: Sequence[Call], place: Callable[[httpx.AsyncClient], Awaitable[None]]
) -> tuple[list[Seen], dict[int, float]]:
    limits, late = httpx.Limits(max_connections=None), dict[int, float]()
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{PORT}", timeout=httpx.Timeout(600), limits=limits
    ) as client:
        await wait_until_ready(client)
        await place(client)
        began = time.perf_counter()
        watching = asyncio.create_task(watch(client, began, late))

        async def arrive(call: Call) -> Seen:
            await asyncio.sleep(max(0.0, began + call.at_s - time.perf_counter()))
            return await ask(client, call)

        seen = await asyncio.gather(*map(arrive, calls))
        watching.cancel()
        return list(seen), late


async def _stay(client: httpx.AsyncClient) -> None:
    """The placement is that of the configuration."""


def main(options: argparse.Namespace) -> None:
    calls = workload(options)
    print(
        f"{len(calls)} requests in {options.minutes} minutes, goal {GOAL_S:g} s, "
        f"{options.hot:.0%} of one service"
    )
    print("| variant | goals met | mean s | p99 s | late s | same |")
    print("|---|---:|---:|---:|---|---:|")
    found, texts = {}, list[str]()
    for variant in options.variants:
        server = Server(config(options, variant))
        try:
            place = partial(place_evenly, engines=options.engines) if variant == "search" else _stay
            seen, late = asyncio.run(play(calls, place))
        finally:
            server.stop()
        assert all(each.tokens == call.output for each, call in zip(seen, calls, strict=True))
        texts = texts or [each.text for each in seen]
        times_s = [each.e2e_s for each in seen]
        row = found[variant] = {
            "goals_met": float(np.mean([time_s <= GOAL_S for time_s in times_s])),
            "mean_s": float(np.mean(times_s)),
            "p99_s": float(np.percentile(times_s, 99)),
            "late_s": sorted(late.values()),
            "same": sum(each.text == text for each, text in zip(seen, texts, strict=True)),
        }
        when = ", ".join(f"{each:.0f}" for each in late.values()) or "-"
        print(
            f"| {variant} | {row['goals_met']:.1%} | {row['mean_s']:.2f} | {row['p99_s']:.2f} | {when} | "
            f"{row['same']}/{len(seen)} |",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", nargs="+", default=["even", "all", "search"])
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--minutes", type=int, default=5)
    parser.add_argument("--rate", type=float, default=12.0, help="requests per second")
    parser.add_argument("--hot", type=float, default=0.6, help="share of the popular service")
    parser.add_argument("--max-running", type=int, default=8, help="requests of an engine at a time")
    parser.add_argument("--interval", default="20s", help="of the search")
    parser.add_argument("--device", default="a100-80")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    main(parser.parse_args())
