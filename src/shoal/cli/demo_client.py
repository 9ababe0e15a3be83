"""Sends a burst of prompts to a running server and times what streams back."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from shoal.cli.demo_goals import demo_goals
from shoal.cli.demo_metrics import MetricsSummary
from shoal.cli.demo_prompts import DemoPrompt
from shoal.core import SLO, RequestRecord, has_goal
from shoal.core.service import NO_GOALS

_TIMEOUT = httpx.Timeout(300.0, connect=10.0)
_POLL_S = 0.2


@dataclass(slots=True)
class Exchange:
    """One request and what has come back so far; written only by the task that sends it.

    slo: its goals, as times.
    """

    number: int
    prompt: DemoPrompt
    slo: SLO = NO_GOALS
    status: str = "waiting"
    text: str = ""
    error: str = ""
    finish_reason: str | None = None
    sent_ns: int = 0
    first_ns: int = 0
    end_ns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def finished(self) -> bool:
        """Whether an answer came to its proper end."""
        return self.status == "done"

    def record(self) -> RequestRecord:
        """What the request experienced, seen from this side of the wire."""
        return RequestRecord(
            request_id=str(self.number),
            service=self.prompt.service,
            arrival_ns=self.sent_ns,
            first_token_ns=self.first_ns,
            finish_ns=self.end_ns,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
        )


@dataclass(slots=True)
class Burst:
    """All requests of one demo, and what the server said about itself meanwhile.

    alone: seconds that a request of a service takes when nothing else runs.
    """

    exchanges: list[Exchange]
    alone: Mapping[str, float] = field(default_factory=dict)
    metrics: MetricsSummary = field(default_factory=MetricsSummary)
    duration_s: float = 0.0


Watcher = Callable[[Exchange], None]


async def time_alone(url: str, prompts: Sequence[DemoPrompt]) -> dict[str, float]:
    """Seconds from sending to the last token of each prompt, one after the other, by service.

    What does not finish is left out: the burst will tell why.
    """
    seconds = {}
    async with _client(url) as client:
        for number, prompt in enumerate(prompts, 1):
            exchange = Exchange(number, prompt)
            await _exchange(client, exchange, _ignore)
            if exchange.finished:
                seconds[prompt.service] = exchange.record().e2e_s
    return seconds


async def run_burst(
    url: str,
    prompts: Sequence[DemoPrompt],
    watch: Watcher | None = None,
    alone: Mapping[str, float] | None = None,
) -> Burst:
    """Send all prompts at once to the server at ``url``; ``watch`` is called whenever one changes.

    alone: what ``time_alone`` found; the goals of the requests follow from it.
    """
    goals = demo_goals(alone or {})
    exchanges = [
        Exchange(number, prompt, goals.get(prompt.service, NO_GOALS))
        for number, prompt in enumerate(prompts, 1)
    ]
    burst = Burst(exchanges, alone or {})
    async with _client(url) as client:
        poller = asyncio.create_task(_poll_metrics(client, burst.metrics))
        start = time.monotonic_ns()
        try:
            await asyncio.gather(*(_exchange(client, e, watch or _ignore) for e in burst.exchanges))
        finally:
            poller.cancel()
            await asyncio.gather(poller, return_exceptions=True)
        end = time.monotonic_ns()
        burst.duration_s = (end - start) / 1e9
        while True:
            burst.metrics.add((await client.get("/metrics")).raise_for_status().text)
            if burst.metrics.age_s < (time.monotonic_ns() - end) / 1e9:
                break
            await asyncio.sleep(_POLL_S)
    return burst


def _client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=_TIMEOUT, limits=limits, trust_env=False)


async def _exchange(client: httpx.AsyncClient, exchange: Exchange, watch: Watcher) -> None:
    exchange.sent_ns = time.monotonic_ns()
    try:
        path, body = _request(exchange.prompt, exchange.slo)
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                raise RuntimeError(f"status {response.status_code}: {error_message(response)}")
            async for chunk in stream_chunks(response):
                _take(exchange, chunk)
                watch(exchange)
        if exchange.finish_reason is None:
            raise RuntimeError("the stream ended before the answer did")
        exchange.status = "done"
    except (httpx.HTTPError, RuntimeError) as error:
        exchange.status, exchange.error = "failed", str(error) or type(error).__name__
    watch(exchange)


def _request(prompt: DemoPrompt, slo: SLO) -> tuple[str, dict[str, Any]]:
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

    Raises RuntimeError with the server's message where an event is an error.
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


def error_message(response: httpx.Response) -> str:
    """The message in an OpenAI-shaped error, or the body as it is."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def error_code(response: httpx.Response) -> str | None:
    """The code in an OpenAI-shaped error."""
    try:
        return response.json()["error"].get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def chunk_text(chunk: dict[str, Any]) -> str:
    """The new text in one streamed chunk of either endpoint."""
    pieces = []
    for choice in chunk.get("choices", ()):
        pieces.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
    return "".join(pieces)


def _take(exchange: Exchange, chunk: dict[str, Any]) -> None:
    now = time.monotonic_ns()
    text = chunk_text(chunk)
    reasons = [choice.get("finish_reason") for choice in chunk.get("choices", ())]
    if text or any(reasons):
        exchange.first_ns = exchange.first_ns or now
        exchange.end_ns = now
        exchange.status = "streaming"
    exchange.text += text
    exchange.finish_reason = next(filter(None, reasons), exchange.finish_reason)
    if usage := chunk.get("usage"):
        exchange.prompt_tokens = usage["prompt_tokens"]
        exchange.output_tokens = usage["completion_tokens"]


async def _poll_metrics(client: httpx.AsyncClient, summary: MetricsSummary) -> None:
    while True:
        try:
            response = await client.get("/metrics")
            if response.status_code == httpx.codes.OK:
                summary.add(response.text)
        except httpx.HTTPError:
            pass
        await asyncio.sleep(_POLL_S)


def _ignore(_: Exchange) -> None:
    pass
