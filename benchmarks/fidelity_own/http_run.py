"""HTTP runs of `benchmarks.fidelity_own`: `shoal serve` on loopback, one stream for each request."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

from benchmarks.fidelity_own.run import Setting
from shoal.core import Request, RequestRecord, SyntheticPrompt


def run_http(setting: Setting, preset: str, requests: Sequence[Request]) -> list[RequestRecord]:
    """Records as seen by a client; `max_tokens` ends every request at its true length."""
    with _serving(setting, preset, sorted({one.service for one in requests})) as url:
        asyncio.run(_drive(url, requests[:2], at_once=True))
        return asyncio.run(_drive(url, requests, at_once=False))


@contextmanager
def _serving(setting: Setting, preset: str, services: Sequence[str]) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "shoal.cli", "serve", "--port", str(port), "--preset", preset]
    command += ["--kv-memory", str(setting.kv_bytes), "--threads", str(setting.threads)]
    for name in services:
        command += ["--service", f"{name}={setting.model},dtype={setting.dtype}"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not _is_ready(url):
            if server.poll() is not None:
                raise SystemExit(
                    f"`{' '.join(command)}` ended before it was ready; run it by hand to see why"
                )
            time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=1).status_code == 200
    except httpx.TransportError:
        return False


async def _drive(url: str, requests: Sequence[Request], *, at_once: bool) -> list[RequestRecord]:
    limits = httpx.Limits(max_connections=len(requests))
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        start_ns = time.monotonic_ns()

        async def one(request: Request) -> RequestRecord:
            arrival_ns = 0 if at_once else request.arrival_ns
            await asyncio.sleep(max(0, start_ns + arrival_ns - time.monotonic_ns()) / 1e9)
            times = [at - start_ns async for at in _tokens(client, request)]
            if not times:
                raise SystemExit(f"request {request.id} was answered without a token")
            return RequestRecord(
                request_id=request.id,
                service=request.service,
                arrival_ns=arrival_ns,
                first_token_ns=times[0],
                finish_ns=times[-1],
                prompt_tokens=len(request.prompt),
                output_tokens=request.true_output_tokens or len(times),
            )

        return list(await asyncio.gather(*(one(request) for request in requests)))


async def _tokens(client: httpx.AsyncClient, request: Request):  # type: ignore[no-untyped-def]
    """Arrival times of the answer's chunks with text, in nanoseconds."""
    prompt = request.prompt
    assert not isinstance(prompt, SyntheticPrompt)
    body = {
        "model": request.service, "prompt": list(prompt), "max_tokens": request.true_output_tokens,
        "temperature": 0, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield time.monotonic_ns()
