"""What the page costs the API process: CPU time of a server's API process with and without watchers.

    python -m benchmarks.page_cost            # SmolLM2 and Gemma 3 270M, 60 streams, 0 and 1 watchers
    python -m benchmarks.page_cost --watchers 0 1 10 --rounds 5

Two hundred requests have ended before, so that the page's table is full; then streams run all the time. Each
round measures every number of watchers in turn; the last line is the middle of the differences to none.
"""

import argparse
import asyncio
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import psutil

SERVICES = ("smollm2", "gemma3-270m")


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[str, int]]:
    """A server on a free port, ready: its URL and the process id of its API process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "shoal.cli", "serve", *arguments, "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while server.poll() is None:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health").status_code == httpx.codes.OK:
                    break
            time.sleep(0.2)
        yield url, server.pid
    finally:
        server.terminate()
        server.wait()


async def complete(client: httpx.AsyncClient, model: str, tokens: int) -> None:
    body = {"model": model, "prompt": "Water", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for _ in answer.aiter_bytes():
            pass


async def stream_for_ever(client: httpx.AsyncClient, model: str, tokens: int) -> None:
    while True:
        await complete(client, model, tokens)


async def watch(client: httpx.AsyncClient) -> None:
    async with client.stream("GET", "/live") as feed:
        async for _ in feed.aiter_bytes():
            pass


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def share_of_core(
    process: psutil.Process, client: httpx.AsyncClient, watchers: int, span_s: float
) -> float:
    """CPU time of the process per second, while that many watch."""
    watching = [asyncio.create_task(watch(client)) for _ in range(watchers)]
    await asyncio.sleep(2)
    before_s, began_s = cpu_s(process), time.monotonic()
    await asyncio.sleep(span_s)
    used_s = cpu_s(process) - before_s
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    return used_s / (time.monotonic() - began_s)


async def measure(url: str, process: psutil.Process, options: argparse.Namespace) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        await asyncio.gather(*(complete(client, SERVICES[n % 2], 1) for n in range(200)))
        streams = [
            asyncio.create_task(stream_for_ever(client, SERVICES[n % 2], 200)) for n in range(options.streams)
        ]
        await asyncio.sleep(5)
        found: dict[int, list[float]] = {watchers: [] for watchers in options.watchers}
        for _ in range(options.rounds):
            for watchers in options.watchers:
                share = await share_of_core(process, client, watchers, options.seconds)
                found[watchers].append(share)
                print(f"{watchers} watchers: {share:.1%} of a core")
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    first, *others = options.watchers
    for watchers in others:
        more = [now - without for now, without in zip(found[watchers], found[first], strict=True)]
        print(f"{watchers} watchers take {statistics.median(more):.2%} of a core more than {first}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=60)
    parser.add_argument("--watchers", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    options = parser.parse_args()
    with serving(*SERVICES, "--max-queue", "1000") as (url, pid):
        asyncio.run(measure(url, psutil.Process(pid), options))


if __name__ == "__main__":
    main()
