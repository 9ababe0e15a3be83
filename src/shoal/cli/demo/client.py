"""The demo's client: sends a burst of prompts by the client of ``shoal bench``, and may kill an engine."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx

from shoal.bench import Answer, Call, Target
from shoal.bench.results import answer_row
from shoal.cli.admin_client import AdminClient
from shoal.cli.demo.metrics import MetricsSummary
from shoal.cli.demo.prompts import DemoPrompt, demo_goals
from shoal.core import SLO, EngineDied, has_goal
from shoal.core.service import NO_GOALS
from shoal.measure import RequestRow

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
    """A request of the demo, and its answer so far."""

    number: int
    prompt: DemoPrompt
    slo: SLO = NO_GOALS
    """Latency goals in seconds."""
    answer: Answer = field(init=False)

    def __post_init__(self) -> None:
        prompt = self.prompt
        self.answer = Answer(
            Call(
                id=str(self.number),
                service=prompt.service,
                text=prompt.text,
                output_tokens=prompt.max_tokens,
                slo=self.slo,
            )
        )

    @property
    def status(self) -> str:
        """waiting, streaming, done or failed."""
        if self.answer.finish:
            return "done" if self.finished else "failed"
        return "streaming" if self.answer.chunks_ns else "waiting"

    @property
    def finished(self) -> bool:
        return self.answer.finish in ("stop", "length")

    @property
    def text(self) -> str:
        return "".join(self.answer.pieces)

    @property
    def error(self) -> str:
        """Why it failed; "": it has not."""
        return "" if self.finished else self.answer.error or ""

    def record(self) -> RequestRow:
        """The times of the request, as the client measured them."""
        return answer_row(self.answer, 0)


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
    for number, prompt in enumerate(prompts, 1):
        request = DemoRequest(number, prompt)
        await _send(url, [request], _ignore)
        if request.finished:
            alone_s[prompt.service] = request.record().e2e_s
    return alone_s


async def run_burst(url: str, burst: Burst, on_end: Watcher | None = None, kill: bool = False) -> None:
    """Send all requests of a new burst at once to the server at ``url``, and fill in their answers.

    on_end: called with every request that has ended. kill: whether to kill an engine during the burst; raises
    EngineDied if the burst ends before that.
    """
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT, trust_env=False) as client:
        poller = asyncio.create_task(_poll_metrics(client, burst.metrics))
        killing = asyncio.create_task(kill_engine_during(url, burst.is_underway)) if kill else None
        start_ns = time.monotonic_ns()
        try:
            await _send(url, burst.requests, on_end or _ignore)
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


def make_burst(prompts: Sequence[DemoPrompt], alone_s: Mapping[str, float] | None = None) -> Burst:
    """A new burst. alone_s: result of ``time_alone``; the goals of the requests follow from it."""
    goals = demo_goals(alone_s or {})
    requests = [
        DemoRequest(number, prompt, goals.get(prompt.service, NO_GOALS))
        for number, prompt in enumerate(prompts, 1)
    ]
    return Burst(requests, alone_s or {})


async def _send(url: str, requests: Sequence[DemoRequest], on_end: Watcher) -> None:
    """Send requests at once; chats and completions, and goals, have a target each."""
    async with AsyncExitStack() as stack:
        targets: dict[tuple[bool, SLO], Target] = {}
        for request in requests:
            key = request.prompt.chat, request.slo
            if key not in targets:
                opened = Target.open(url, headers={}, chat=request.prompt.chat, extra=_extra(request.slo))
                targets[key] = await stack.enter_async_context(opened)

        async def send(request: DemoRequest) -> None:
            await targets[request.prompt.chat, request.slo].send(request.answer)
            on_end(request)

        await asyncio.gather(*map(send, requests))


def _extra(slo: SLO) -> dict[str, Any]:
    """Further fields of requests with these goals."""
    goals = {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "mtpot": slo.mtpot_s, "e2e": slo.e2e_s}
    return {"seed": 1} | ({"slo": goals} if has_goal(slo) else {})


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
