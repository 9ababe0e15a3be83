"""Batches over HTTP on real engines: UELLM's and S3's, SCLS's ladder, and the default, on one workload.

    python -m benchmarks.batches [--model smollm2] [--requests 200] [--rate 2] [--presets sls s3 odbs uellm
        shoal] [--engines 1] [--interval 500ms] [--slice 32] [--max-tokens 96] [--json FILE]

Each preset is a ``shoal serve`` of its own on CPUs, one after the other, and is given the same chats over
HTTP at the same times: short questions with a goal of ``--short`` seconds for the whole answer, and requests
for long texts with ``--long`` seconds. Answers end where the model ends them, at ``--max-tokens`` at the
latest. Decoding is greedy. "same": answers equal to those of the first preset. Give the computer nothing else
to do.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.serving import serving

PORT = 18_191
SUBJECTS = "rivers bridges clocks gardens trains violins markets deserts islands kites mirrors".split()  # noqa: SIM905
SHORT = "In one word: what colour are {}?"
LONG = "Write a long story about {} and what happened to them over a hundred years."


@dataclass(frozen=True)
class Chat:
    text: str
    at_s: float
    goal_s: float


@dataclass(frozen=True)
class Answer:
    text: str
    tokens: int
    ttft_s: float
    e2e_s: float


def workload(options: argparse.Namespace) -> list[Chat]:
    """Chats in order of arrival; a third asks for a long answer."""
    rng = random.Random(options.seed)
    at_s, chats = 0.0, []
    for number in range(options.requests):
        at_s += rng.expovariate(options.rate)
        subject = f"{rng.choice(SUBJECTS)} {number}"
        is_long = rng.random() < 1 / 3
        text, goal_s = (LONG, options.long) if is_long else (SHORT, options.short)
        chats.append(Chat(text.format(subject), at_s, goal_s))
    return chats


def server(options: argparse.Namespace, preset: str) -> AbstractContextManager[str]:
    """A server with a preset; its address."""
    config: dict[str, Any] = {
        "services": [{"name": "m", "model": options.model}],
        "devices": ["cpu"] * options.engines,
        "kv_cache": {"memory": options.kv_memory},
        "scheduler": {"preset": preset},
    }
    if preset in ("pm", "ab", "lb", "scls"):
        config["cluster"] = {"batching": {"interval": options.interval}}
    if preset in ("so", "pm", "ab", "lb", "scls"):
        config.setdefault("cluster", {}).setdefault("batching", {})["slice"] = options.slice
    return serving(config, PORT, verbose=options.verbose)


async def wait_until_ready(client: httpx.AsyncClient, url: str) -> None:
    for _ in range(600):
        try:
            if (await client.get(f"{url}/health")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.2)
    raise RuntimeError("the server did not get ready in two minutes")


async def ask(client: httpx.AsyncClient, url: str, chat: Chat, options: argparse.Namespace) -> Answer:
    """One streamed chat."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": chat.text}],
        "temperature": 0,
        "max_tokens": options.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "slo": {"e2e": chat.goal_s},
    }
    sent, first_s, pieces, tokens = time.perf_counter(), 0.0, [], 0
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                if piece and not first_s:
                    first_s = time.perf_counter() - sent
                pieces.append(piece)
    return Answer("".join(pieces), tokens, first_s, time.perf_counter() - sent)


async def play(url: str, chats: Sequence[Chat], options: argparse.Namespace) -> tuple[list[Answer], float]:
    """The answers, and the seconds from the first arrival to the last answer."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=httpx.Timeout(600), limits=limits) as client:
        await wait_until_ready(client, url)
        await ask(client, url, chats[0], options)  # warm
        began = time.perf_counter()

        async def arrive(chat: Chat) -> Answer:
            await asyncio.sleep(began + chat.at_s - time.perf_counter())
            return await ask(client, url, chat, options)

        answers = await asyncio.gather(*map(arrive, chats))
        return list(answers), time.perf_counter() - began


def figures(chats: Sequence[Chat], answers: Sequence[Answer], total_s: float) -> dict[str, float]:
    times_s = [answer.e2e_s for answer in answers]
    kept = [answer.e2e_s <= chat.goal_s for chat, answer in zip(chats, answers, strict=True)]
    tokens = sum(answer.tokens for answer in answers)
    return {
        "mean_s": statistics.mean(times_s),
        "p95_s": float(np.percentile(times_s, 95)),
        "ttft_s": statistics.mean(answer.ttft_s for answer in answers),
        "goals_kept": sum(kept) / len(kept),
        "sum_s": sum(times_s),
        "total_s": total_s,
        "requests_per_s": len(answers) / total_s,
        "tokens_per_s": tokens / total_s,
    }


def main(options: argparse.Namespace) -> None:
    chats = workload(options)
    found: dict[str, dict[str, float]] = {}
    texts: list[str] = []
    print("| preset | mean s | p95 s | TTFT s | goals kept | requests/s | tokens/s | same |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for preset in options.presets:
        with server(options, preset) as url:
            answers, total_s = asyncio.run(play(url, chats, options))
        row = found[preset] = figures(chats, answers, total_s)
        texts = texts or [answer.text for answer in answers]
        same = sum(answer.text == text for answer, text in zip(answers, texts, strict=True))
        print(
            f"| `{preset}` | {row['mean_s']:.2f} | {row['p95_s']:.2f} | {row['ttft_s']:.2f} | "
            f"{row['goals_kept']:.0%} | {row['requests_per_s']:.2f} | {row['tokens_per_s']:.0f} | "
            f"{same}/{len(answers)} |",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--presets", nargs="+", default=["sls", "s3", "odbs", "uellm", "shoal"])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=2.0, help="chats per second")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--interval", default="500ms", help="of pm, ab, lb and scls")
    parser.add_argument("--slice", type=int, default=32, help="of so, pm, ab, lb and scls")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--short", type=float, default=5.0, help="goal of short questions in seconds")
    parser.add_argument("--long", type=float, default=60.0, help="goal of long answers in seconds")
    parser.add_argument("--kv-memory", default="512MiB")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--verbose", action="store_true")
    main(parser.parse_args())
