"""Time until a server restarted after kill -9 has reattached to its engines, and the KV that they still hold.

    python -m benchmarks.reattach

In each round eight streams run, the server's process is killed, and a new one is started with the same
settings. Prints the time from its start until /health answers, that of its imports alone, whether the
engine's process is the same, and the KV that the engine holds one second later.
"""

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import time

import httpx

IMPORTS = "import shoal.cli.serve, shoal.serve.launch"


def start(options: argparse.Namespace) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "shoal.cli", "serve", options.model, "--port", str(options.port)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def ready(client: httpx.AsyncClient) -> str:
    """Wait until the server is ready; returns the engine's pid."""
    while True:
        try:
            health = (await client.get("/health")).json()
            if health["status"] == "ok":
                return str(health["engines"][0]["pid"])
        except (httpx.TransportError, KeyError, ValueError):
            pass
        await asyncio.sleep(0.01)


async def read(client: httpx.AsyncClient, model: str) -> None:
    """Read a stream until the server is killed."""
    body = {
        "model": model,
        "prompt": "Once upon a time",
        "max_tokens": 2000,
        "stream": True,
        "ignore_eos": True,
    }
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                pass
    except httpx.TransportError:
        pass


async def live_blocks(client: httpx.AsyncClient) -> float:
    """KV blocks of running requests, from /metrics."""
    text = (await client.get("/metrics")).text
    values = [
        line for line in text.splitlines() if line.startswith("shoal_kv_blocks{") and 'use="live"' in line
    ]
    return sum(float(line.rsplit(" ", 1)[1]) for line in values)


async def main(options: argparse.Namespace) -> None:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    imports_s = time.perf_counter() - began
    server = start(options)
    times_s = []
    base = f"http://127.0.0.1:{options.port}"
    try:
        async with httpx.AsyncClient(base_url=base, timeout=120) as client:
            pid = await ready(client)
            for _ in range(options.rounds):
                streams = [asyncio.create_task(read(client, options.model)) for _ in range(8)]
                await asyncio.sleep(2)
                held = await live_blocks(client)
                os.kill(server.pid, signal.SIGKILL)
                server.wait()
                await asyncio.gather(*streams)
                began = time.perf_counter()
                server = start(options)
                same = await ready(client) == pid
                times_s.append(time.perf_counter() - began)
                await asyncio.sleep(1)
                left = await live_blocks(client)
                print(f"{times_s[-1]:.2f} s; same engine: {same}; blocks held {held:.0f}, then {left:.0f}")
    finally:
        server.terminate()
        server.wait()
    print(f"median {statistics.median(times_s):.2f} s from the start; imports alone {imports_s:.2f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--port", type=int, default=18103)
    parser.add_argument("--rounds", type=int, default=5)
    asyncio.run(main(parser.parse_args()))
