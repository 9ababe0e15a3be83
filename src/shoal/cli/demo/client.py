"""The demo's HTTP client: sends a burst of prompts, measures streamed responses, and may kill an engine."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from shoal.cli.admin_client import AdminClient
from shoal.cli.demo.metrics import MetricsSummary
from shoal.cli.demo.prompts import DemoPrompt, demo_goals
from shoal.cli.http_client import error_message
from shoal.core import SLO, EngineDied, RequestRecord, has_goal
from shoal.core.service import NO_GOALS

_TIMEOUT = httpx.Timeout(300.0, connect=10.0)
_POLL_S, _KILL_POLL_S = 0.2, 0.05
_KILL_STREAMING = 6
"""Streaming responses at which an engine is killed; in small bursts, a quarter of all."""


@dataclass(frozen=True, slots=True)
class Kill:
    """An engine that was killed."""

    engine: str
    pid: int
    requests: int
    """Its unfinished requests."""


async def kill_engine_during(url: str, is_underway: Callable[[], bool]) -> Kill:
    """Wait until ``is_underway``, then kill the engine with the most requests on the server at ``url``.

    Raises EngineDied if no engine has a request.
    """
    while not is_underway():
        await asyncio.sleep(_KILL_POLL_S)
    client = AdminClient(url, os.environ.get("SHOAL_ADMIN_KEY"))
    answer = await asyncio.to_thread(client.list, "engines")
    engine = max(answer["data"], key=lambda engine: engine["requests"])
    if engine["pid"] is None or not engine["requests"]:
        raise EngineDied("no engine has a request that it could lose")
    os.kill(engine["pid"], signal.SIGKILL)
    return Kill(engine["name"], engine["pid"], engine["requests"])


@dataclass(slots=True)
class DemoRequest:
    """A request of the demo and its response so far; changed only by the task that sends it."""

    number: int
    prompt: DemoPrompt
    slo: SLO = NO_GOALS
    """Latency goals in seconds."""
    status: str = "waiting"
    """waiting, streaming, done or failed."""
    text: str = ""
    error: str = ""
    finish_reason: str | None = None
    sent_ns: int = 0
    first_token_ns: int = 0
    end_ns: int = 0
    largest_gap_ns: int = 0
    """Longest time between two chunks with text."""
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def finished(self) -> bool:
        return self.status == "done"

    def record(self) -> RequestRecord:
        """The times of the request, as the client measured them."""
        return RequestRecord(
            request_id=str(self.number),
            service=self.prompt.service,
            arrival_ns=self.sent_ns,
            first_token_ns=self.first_token_ns,
            finish_ns=self.end_ns,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
        )


@dataclass(slots=True)
class Burst:
    """All requests of the demo, and the server's metrics during the burst."""

    requests: list[DemoRequest]
    alone_s: Mapping[str, float] = field(default_factory=dict)
    """Time of a request when nothing else runs, by service."""
    metrics: MetricsSummary = field(default_factory=MetricsSummary)
    duration_s: float = 0.0
    kill: Kill | None = None
    """The engine that was killed, if any."""

    def is_underway(self) -> bool:
        """Whether enough responses are streaming for a kill to matter."""
        streaming = sum(request.status == "streaming" for request in self.requests)
        return streaming >= min(_KILL_STREAMING, max(1, len(self.requests) // 4))


Watcher = Callable[[DemoRequest], None]


async def time_alone(url: str, prompts: Sequence[DemoPrompt]) -> dict[str, float]:
    """Send the prompts one after the other; returns their end-to-end latencies in seconds, by service.

    Failed requests are left out: the burst will report the error.
    """
    alone_s = {}
    async with _client(url) as client:
        for number, prompt in enumerate(prompts, 1):
            request = DemoRequest(number, prompt)
            await _send_request(client, request, _ignore)
            if request.finished:
                alone_s[prompt.service] = request.record().e2e_s
    return alone_s


async def run_burst(
    url: str,
    prompts: Sequence[DemoPrompt],
    watch: Watcher | None = None,
    alone_s: Mapping[str, float] | None = None,
    kill: bool = False,
) -> Burst:
    """Send all prompts at once to the server at ``url``; ``watch`` is called when a request changes.

    alone_s: result of ``time_alone``; the goals of the requests follow from it. kill: whether to kill an
    engine during the burst; raises EngineDied if the burst ends before that.
    """
    goals = demo_goals(alone_s or {})
    requests = [
        DemoRequest(number, prompt, goals.get(prompt.service, NO_GOALS))
        for number, prompt in enumerate(prompts, 1)
    ]
    burst = Burst(requests, alone_s or {})
    async with _client(url) as client:
        poller = asyncio.create_task(_poll_metrics(client, burst.metrics))
        killing = asyncio.create_task(kill_engine_during(url, burst.is_underway)) if kill else None
        start_ns = time.monotonic_ns()
        try:
            await asyncio.gather(*(_send_request(client, request, watch or _ignore) for request in requests))
        finally:
            tasks = [task for task in (poller, killing) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if killing is not None:
            if killing.cancelled():
                raise EngineDied("the burst was over before an engine was killed; send more --requests")
            burst.kill = killing.result()
        end_ns = time.monotonic_ns()
        burst.duration_s = (end_ns - start_ns) / 1e9
        # The metrics page shows the engine's last report, which may be older than the end of the burst.
        while True:
            burst.metrics.add((await client.get("/metrics")).raise_for_status().text)
            if burst.metrics.age_s < (time.monotonic_ns() - end_ns) / 1e9:
                break
            await asyncio.sleep(_POLL_S)
    return burst


def _client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=_TIMEOUT, limits=limits, trust_env=False)


async def _send_request(client: httpx.AsyncClient, request: DemoRequest, watch: Watcher) -> None:
    request.sent_ns = time.monotonic_ns()
    try:
        path, body = _request_body(request.prompt, request.slo)
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                raise RuntimeError(f"status {response.status_code}: {error_message(response)}")
            async for chunk in stream_chunks(response):
                _add_chunk(request, chunk)
                watch(request)
        if request.finish_reason is None:
            raise RuntimeError("the stream ended before the answer did")
        request.status = "done"
    except (httpx.HTTPError, RuntimeError) as error:
        request.status, request.error = "failed", str(error) or type(error).__name__
    watch(request)


def _request_body(prompt: DemoPrompt, slo: SLO) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "model": prompt.service,
        "max_tokens": prompt.max_tokens,
        "seed": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if has_goal(slo):
        body["slo"] = {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "e2e": slo.e2e_s}
    if prompt.chat:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt.text}]}
    return "/v1/completions", body | {"prompt": prompt.text}


async def stream_chunks(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to ``[DONE]``.

    Raises RuntimeError with the server's message if an event is an error.
    """
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise RuntimeError(str(chunk["error"].get("message", chunk["error"])))
        yield chunk


def chunk_text(chunk: dict[str, Any]) -> str:
    """The new text in a streamed chunk of either endpoint."""
    pieces = []
    for choice in chunk.get("choices", ()):
        pieces.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
    return "".join(pieces)


def _add_chunk(request: DemoRequest, chunk: dict[str, Any]) -> None:
    now_ns = time.monotonic_ns()
    text = chunk_text(chunk)
    reasons = [choice.get("finish_reason") for choice in chunk.get("choices", ())]
    if text or any(reasons):
        if request.first_token_ns:
            request.largest_gap_ns = max(request.largest_gap_ns, now_ns - request.end_ns)
        request.first_token_ns = request.first_token_ns or now_ns
        request.end_ns = now_ns
        request.status = "streaming"
    request.text += text
    request.finish_reason = next(filter(None, reasons), request.finish_reason)
    if usage := chunk.get("usage"):
        request.prompt_tokens = usage["prompt_tokens"]
        request.output_tokens = usage["completion_tokens"]


async def _poll_metrics(client: httpx.AsyncClient, summary: MetricsSummary) -> None:
    while True:
        try:
            response = await client.get("/metrics")
            if response.status_code == httpx.codes.OK:
                summary.add(response.text)
        except httpx.HTTPError:
            pass
        await asyncio.sleep(_POLL_S)


def _ignore(_: DemoRequest) -> None:
    pass
