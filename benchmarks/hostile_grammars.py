"""Hostile grammars against a server: gaps in another client's stream, and the answers to the grammars.

    python -m benchmarks.hostile_grammars                     # smollm2, rounds without and with attack
    python -m benchmarks.hostile_grammars --model gemma3-270m

A client reads one stream after another. In every second round other clients send grammars that take too much
time, memory or stack, to compile or at a later token: each client one grammar, 0.2 s after its last answer.
Server, reader and attackers are separate processes, the attackers with the lowest priority. Prints the
largest gaps between two events of the stream in each round, and the answers to each grammar in the last
round.
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

PAUSE_S = 0.2


def nested(depth: int) -> str:
    """A schema of this depth, too deep for Python's JSON writer."""
    return '{"properties": {"a": ' * depth + "{}" + "}}" * depth


def hostile_grammars() -> Mapping[str, str]:
    """Fields of a request's body as JSON, by attack."""
    doubled = {
        f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}, "y": {"$ref": f"#/$defs/a{i + 1}"}}}
        for i in range(100)
    }
    multiples = [{"type": "integer", "multipleOf": prime} for prime in (9973, 9967, 9949, 9941)]
    fields: dict[str, dict[str, Any]] = {
        "regex of exponential size": {"guided_regex": "(((((x{1000}){1000}){1000}){1000}){1000})"},
        "regex of exponential states": {"guided_regex": "(.*a.{200})|(.*b.{201})"},
        "regex of many letters": {"guided_regex": r"(\p{L}|\p{N}){1,500}(\p{L}){1,500}"},
        "regex of many options": {"guided_regex": "a?" * 5000 + "a" * 5000},
        "regex nested 10,000 deep": {"guided_regex": "(" * 10_000 + "a" + ")" * 10_000},
        "regex of 1 MB": {"guided_regex": "|".join(f"word{i}" for i in range(110_000))},
        "schema of 1 MB": {"guided_json": {"enum": [f"value number {i}" for i in range(45_000)]}},
        "schema of 120 KB": {"guided_json": {"enum": [f"value number {i}" for i in range(4_800)]}},
        "schema of multiples": {"guided_json": {"allOf": multiples}},
        "schema of doubled references": {
            "guided_json": {"$defs": {**doubled, "a100": {}}, "$ref": "#/$defs/a0"}
        },
        "grammar of and and not": {
            "guided_grammar": "start: X\nX: /(.*a.{100})/ & ~/(.*b.{101})/ & /(.*c.{99})/\n"
        },
        "grammar of 5,000 rules": {
            "guided_grammar": "start: r0\n"
            + "".join(f'r{i}: r{i + 1} | "x{i}"\n' for i in range(5_000))
            + 'r5000: "a"\n'
        },
        "grammar of ambiguity": {"guided_grammar": 'start: s\ns: s s | s s s | "a"\n'},
        "grammar of nothings": {"guided_grammar": f'start: {"a " * 17}\na: b*\nb: c*\nc: "x"?\n'},
        "grammar of many regexes": {
            "guided_grammar": f"start: ({' | '.join(f'/[a-z]{{{i}}}[0-9]*x{i}/' for i in range(1, 500))})*\n"
        },
    }
    written = {name: json.dumps(field)[1:-1] for name, field in fields.items()}
    return written | {"schema nested 10,000 deep": f'"guided_json": {nested(10_000)}'}


async def attack(url: str, model: str, seconds: float) -> Counter[str]:
    """Send all grammars for ``seconds``; counts the answers."""
    answers: Counter[str] = Counter()

    async def repeat(client: httpx.AsyncClient, name: str, fields: str) -> None:
        body = f'{{"model": "{model}", "prompt": "x", "max_tokens": 300, {fields}}}'
        while True:
            begun = time.monotonic()
            headers = {"Content-Type": "application/json"}
            response = await client.post("/v1/completions", content=body, headers=headers)
            took_ms = round(1000 * (time.monotonic() - begun))
            message = response.json().get("error", {}).get("message", "")
            answers[f"{name}|{response.status_code}"] += 1
            answers[f"{name}|slowest"] = max(answers[f"{name}|slowest"], took_ms)
            answers[f"{name}|{message[-60:]}"] += 0
            await asyncio.sleep(PAUSE_S)

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        tasks = [asyncio.create_task(repeat(client, *one)) for one in hostile_grammars().items()]
        await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return answers


async def read_stream(client: httpx.AsyncClient, model: str, until_s: float) -> list[float]:
    """Seconds between events of consecutive streams."""
    gaps: list[float] = []
    body = {
        "model": model,
        "prompt": "Once upon a time",
        "max_tokens": 200,
        "ignore_eos": True,
        "stream": True,
    }
    while time.monotonic() < until_s:
        last = None
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line:
                    now = time.monotonic()
                    if last is not None:
                        gaps.append(now - last)
                    last = now
                if time.monotonic() >= until_s:
                    break
    return gaps


async def measure(url: str, model: str, rounds: int, seconds: float) -> None:
    """Rounds, alternately without and with attack."""
    answers: Counter[str] = Counter()
    table = Table("round", "attack", "events", "median gap, ms", "99%", "largest gaps, ms")
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        warm = {"model": model, "prompt": "x", "max_tokens": 5, "guided_regex": "a+"}
        await client.post("/v1/completions", json=warm)
        for number in range(rounds):
            attacker = None
            if number % 2 == 1:
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.hostile_grammars",
                    "--model",
                    model,
                    "--seconds",
                    str(seconds),
                    "--attack",
                    url,
                ]
                attacker = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
                await asyncio.sleep(2)  # it starts
            gaps = sorted(await read_stream(client, model, time.monotonic() + seconds))
            if attacker is not None:
                answers = Counter(json.loads((await attacker.communicate())[0]))
            at = [f"{1000 * gaps[int(len(gaps) * share)]:.1f}" for share in (0.5, 0.99)]
            largest = " ".join(f"{1000 * gap:.0f}" for gap in gaps[-5:])
            table.add_row(str(number), "yes" if attacker else "", str(len(gaps)), *at, largest)
    Console().print(table)
    answered = Table("grammar", "answers", "slowest, ms", "message")
    for name in hostile_grammars():
        own = {key.split("|", 1)[1]: count for key, count in answers.items() if key.startswith(f"{name}|")}
        counts = ", ".join(f"{count} x {status}" for status, count in own.items() if status.isdigit())
        message = [text for text, count in own.items() if not count and text]
        answered.add_row(name, counts, str(own.get("slowest", "")), message[0] if message else "")
    Console(width=160).print(answered)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.attack:
        os.nice(19)
        print(json.dumps(asyncio.run(attack(arguments.attack, arguments.model, arguments.seconds))))
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "shoal.cli", "serve", arguments.model, "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                httpx.get(f"{url}/health").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.5)
        asyncio.run(measure(url, arguments.model, arguments.rounds, arguments.seconds))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
