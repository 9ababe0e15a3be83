"""Output tokens per second of one model, offline and over HTTP, and where a step's time goes.

    python benchmarks/throughput.py                      # smollm2, bfloat16, all cores
    python benchmarks/throughput.py --device cuda:0 --concurrency 1 16 64 256
    python benchmarks/throughput.py --peer-python /path/to/venv/bin/python   # vLLM beside it, in one run

Every request has as many prompt tokens and output tokens as asked (ignore_eos); all requests of a
round start together. The median of the rounds is printed. vLLM runs from a virtual environment of
its own, on the same model folder and the same token ids, through `benchmarks/throughput_vllm.py`.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from shoal import SamplingParams, Service, Shoal
from shoal.kvcache import KVCacheOptions
from shoal.models import resolve_model

PARTS = ("schedule", "prepare", "forward", "sample", "update", "reply")


@dataclass(frozen=True)
class Row:
    """One concurrency of one way to serve; times per step in milliseconds."""

    how: str
    concurrency: int
    tokens_per_s: float
    steps: int = 0
    parts_ms: dict[str, float] | None = None


def make_prompts(count: int, length: int, round_number: int) -> list[list[int]]:
    """Token ids that differ in their first block, so that no prefix is shared."""
    return [
        [(1000 + 131 * i + 17 * j + 7919 * round_number) % 40_000 + 100 for j in range(length)]
        for i in range(count)
    ]


def offline(args: argparse.Namespace) -> list[Row]:
    rows = []
    service = Service(name="bench", model=args.model, dtype=args.dtype)
    memory = KVCacheOptions(memory_bytes=args.kv_gib << 30, layout=args.layout)
    with Shoal(service, device=args.device, kv_cache=memory, progress=False) as shoal:
        sampling = SamplingParams(temperature=0.0, max_tokens=args.output, ignore_eos=True)
        shoal.generate(make_prompts(2, args.input, 99), sampling, progress=False)
        for concurrency in args.concurrency:
            before, rates = shoal.stats().steps, []
            for round_number in range(args.rounds):
                prompts = make_prompts(concurrency, args.input, round_number)
                started = time.perf_counter()
                outputs = shoal.generate(prompts, sampling, progress=False)
                seconds = time.perf_counter() - started
                rates.append(sum(len(o.outputs[0].tokens) for o in outputs) / seconds)
            after = shoal.stats().steps
            steps = after.count - before.count
            parts = {p: (getattr(after, f"{p}_ns") - getattr(before, f"{p}_ns")) / steps / 1e6 for p in PARTS}
            rows.append(Row("offline", concurrency, statistics.median(rates), steps // args.rounds, parts))
    return rows


async def _burst(url: str, prompts: list[list[int]], output: int) -> float:
    """Send all prompts at once; output tokens per second."""
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:

        async def one(prompt: list[int]) -> int:
            body = {
                "model": "bench", "prompt": prompt, "max_tokens": output, "temperature": 0,
                "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
            }  # fmt: skip
            used = 0
            async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {") and '"usage":{' in line.replace(" ", ""):
                        used = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", used)
            return used

        started = time.perf_counter()
        tokens = sum(await asyncio.gather(*(one(p) for p in prompts)))
        return tokens / (time.perf_counter() - started)


def over_http(args: argparse.Namespace) -> tuple[list[Row], float]:
    """Rows, and seconds from the start of `shoal serve` to the first token."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    started = time.perf_counter()
    command = [sys.executable, "-m", "shoal.cli", "serve", "--port", str(port), "--device", args.device]
    command += ["--kv-memory", f"{args.kv_gib}GiB"]
    command += ["--service", f"bench={args.model},dtype={args.dtype}"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while True:
            try:
                if httpx.get(f"{url}/health", timeout=1).status_code == 200:
                    break
            except httpx.TransportError:
                if server.poll() is not None:
                    raise SystemExit("the server ended before it was ready") from None
                time.sleep(0.05)
        asyncio.run(_burst(url, make_prompts(1, 8, 98), 1))
        first_token_s = time.perf_counter() - started
        asyncio.run(_burst(url, make_prompts(2, args.input, 99), 16))
        rows = []
        for concurrency in args.concurrency:
            rates = [
                asyncio.run(_burst(url, make_prompts(concurrency, args.input, r), args.output))
                for r in range(args.rounds)
            ]
            rows.append(Row("HTTP", concurrency, statistics.median(rates)))
        return rows, first_token_s
    finally:
        server.terminate()
        server.wait(60)


def peer(args: argparse.Namespace) -> list[Row]:
    """The same through vLLM's offline interface, in its own environment."""
    script = Path(__file__).with_name("throughput_vllm.py")
    command = [
        args.peer_python,
        str(script),
        str(resolve_model(args.model)),
        str(args.input),
        str(args.output),
    ]
    command += [str(args.rounds), *(str(c) for c in args.concurrency)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"vLLM failed:\n{done.stderr[-3000:]}")
    rates = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    return [Row("vLLM", c, statistics.median(rates[str(c)])) for c in args.concurrency]


def show(rows: list[Row]) -> None:
    table = Table(title="output tokens per second, and milliseconds per step")
    for column in ("how", "concurrent", "tokens/s", "steps", *PARTS):
        table.add_column(column, justify="right")
    for row in rows:
        parts = [f"{row.parts_ms[p]:.2f}" if row.parts_ms else "" for p in PARTS]
        table.add_row(row.how, str(row.concurrency), f"{row.tokens_per_s:.1f}", str(row.steps or ""), *parts)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layout", default="merged", choices=["merged", "split"])
    parser.add_argument("--kv-gib", type=int, default=1, help="KV pool, GiB")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--input", type=int, default=128, help="prompt tokens per request")
    parser.add_argument("--output", type=int, default=128, help="output tokens per request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-http", action="store_true")
    parser.add_argument("--peer-python", help="python of a virtual environment with vLLM")
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    args = parser.parse_args()
    rows = offline(args)
    if args.peer_python:
        rows += peer(args)
    if not args.no_http:
        served, first_token_s = over_http(args)
        rows += served
        print(f"start of `shoal serve` to first token: {first_token_s:.1f} s")
    show(rows)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
