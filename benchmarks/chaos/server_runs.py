"""Runs servers under many configurations with random requests and strikes, and compares all answers."""

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.chaos.answers import Refused, ask, first_difference
from benchmarks.chaos.configurations import QUIET, Configuration
from benchmarks.chaos.requests import Request, make_requests
from benchmarks.chaos.server import NotStarted, Server
from benchmarks.chaos.strikes import GUEST, Strikes
from shoal.native import native_status

DOCUMENTED = {"service_unavailable", "engine_died"}
"""Error codes documented for ended processes; Ollama's API has only a status."""
OLLAMA_ERRORS = {200: "engine", 500: "engine", 503: ""}
"""Such statuses of Ollama's API (200: within a stream), and a word of the message."""
HEADS = (
    "configuration",
    "compared",
    "streams",
    "cancelled",
    "refused",
    "resumed",
    "moved",
    "strikes",
    "wrong",
)


@dataclass
class ConfigurationResult:
    """Results of one configuration."""

    name: str
    compared: int = 0
    streams: int = 0
    """Streamed answers among those compared."""
    cancelled: int = 0
    refused: list[str] = field(default_factory=list)
    """Documented errors."""
    resumed: int = 0
    moved: int = 0
    strikes: Counter[str] = field(default_factory=Counter)
    different: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """Undocumented and other errors."""

    @property
    def wrong(self) -> list[str]:
        """Everything that must not happen."""
        return [*self.different, *self.hung, *self.errors]

    def row(self) -> list[str]:
        counts = [
            self.compared, self.streams, self.cancelled, len(self.refused), self.resumed, self.moved,
        ]  # fmt: skip
        return [self.name, *map(str, counts), str(self.strikes.total()), str(len(self.wrong))]


class Oracle:
    """Reference answers of a quiet server, one request at a time."""

    def __init__(self) -> None:
        self._answers: dict[str, list[Any]] = {}

    async def learn(self, requests: list[Request], kv_cache_dtype: str, folder: Path) -> list[Any]:
        """Reference answers to ``requests``, which must be the same in each call."""
        if kv_cache_dtype not in self._answers:
            quiet = Configuration(f"quiet-{kv_cache_dtype}", QUIET.settings, kv_cache_dtype=kv_cache_dtype)
            async with Server(quiet, folder) as server:
                self._answers[kv_cache_dtype] = [
                    await ask(server.client, request, request.body["model"], stream=False)
                    for request in requests
                ]
        return self._answers[kv_cache_dtype]


class FuzzClients:
    """The clients of one server."""

    def __init__(
        self, server: Server, strikes: Strikes, requests: list[Request], right: list[Any],
        configuration: Configuration, rng: random.Random, deadline_s: float,
        found: ConfigurationResult,
    ) -> None:  # fmt: skip
        self._server, self._strikes = server, strikes
        self._requests, self._right = requests, right
        self._configuration, self._rng, self._deadline_s = configuration, rng, deadline_s
        self.found = found

    async def client(self, end: float) -> None:
        """Send one request after another until ``end``."""
        while time.monotonic() < end:
            await self._one(self._rng.randrange(len(self._requests)))

    async def _one(self, number: int) -> None:
        request, rng = self._requests[number], self._rng
        model = request.body["model"]
        if model == "chat":
            model = rng.choice(["chat", "chat", "twin", GUEST] if self._strikes.guest else ["chat", "twin"])
        stream = request.streams and rng.random() < 0.6
        cancel_after_s = rng.uniform(0, 1.5) if rng.random() < 0.15 else None
        label = f"request {number} ({request.path}, {model}, {'stream' if stream else 'whole'})"
        try:
            answering = ask(self._server.client, request, model, stream=stream)
            answer = await self._in_time(answering, cancel_after_s, label)
        except Refused as error:
            self._refused(error, model, label)
        except httpx.TransportError as error:
            self.found.errors.append(f"{label}: {error!r}")
        else:
            if answer is not None:
                self.found.compared += 1
                self.found.streams += stream
                if difference := first_difference(answer, self._right[number]):
                    self.found.different.append(f"{label}: {difference}")

    async def _in_time(self, answering: Awaitable[Any], cancel_after_s: float | None, label: str) -> Any:
        """The answer; None if cancelled or too late."""
        try:
            async with asyncio.timeout(self._deadline_s if cancel_after_s is None else cancel_after_s):
                return await answering
        except TimeoutError:
            if cancel_after_s is None:
                self.found.hung.append(f"{label}: no answer within {self._deadline_s:g} s")
            else:
                self.found.cancelled += 1
            return None

    def _refused(self, error: Refused, model: str, label: str) -> None:
        gone = model == GUEST and error.status == 404
        if error.code:
            documented = error.code in DOCUMENTED or error.code in self._configuration.codes
        else:
            documented = OLLAMA_ERRORS.get(error.status, "\0") in str(error)
            documented |= error.status == 429 and "goals_out_of_reach" in self._configuration.codes
        if gone or documented:
            self.found.refused.append(f"{label}: {error}")
        else:
            self.found.errors.append(f"{label}: {error}")

    async def settle(self) -> None:
        """Check that engines hold no requests or blocks after all requests have ended."""
        for name, label in (("shoal_requests_running", ""), ("shoal_kv_blocks", 'use="live"')):
            end = time.monotonic() + 60
            while left := await self._server.metric(name, label):
                if time.monotonic() > end:
                    self.found.errors.append(f"{name} {label} is still {left}")
                    break
                await asyncio.sleep(0.2)
        self.found.resumed = await self._server.metric("shoal_requests_resumed_total")
        self.found.moved = await self._server.metric("shoal_migrations_total", 'outcome="done"')


async def try_one(
    configuration: Configuration, requests: list[Request], right: list[Any],
    options: argparse.Namespace, folder: Path, found: ConfigurationResult,
) -> None:  # fmt: skip
    """Run one configuration for ``options.seconds``; fills ``found``."""
    rng = random.Random(f"{options.seed} {configuration.name}")
    server = Server(configuration, folder)
    try:
        async with server:
            strikes = Strikes(server, rng, configuration.engines, options.between, lambda: found.compared)
            found.strikes, found.errors = strikes.done, strikes.failed
            clients = FuzzClients(
                server, strikes, requests, right, configuration, rng, options.deadline, found
            )
            end = time.monotonic() + options.seconds
            striking = asyncio.create_task(strikes.run(end))
            try:
                await asyncio.gather(*(clients.client(end) for _ in range(options.clients)))
                await striking
            finally:
                striking.cancel()
                await asyncio.wait([striking])
            await clients.settle()
    except (NotStarted, httpx.TransportError) as error:  # of an admin route, for example
        found.errors.append(f"the server: {error!r}")
    found.errors += server.wrong


async def run_all(
    configurations: list[Configuration],
    options: argparse.Namespace,
    console: Console,
    results: list[ConfigurationResult],
) -> None:
    """Run all configurations; fills ``results``."""
    if not native_status().startswith("native"):
        raise SystemExit(f"only native kernels give the same bits for any batch; here: {native_status()}")
    requests = make_requests(options.seed, options.requests)
    oracle = Oracle()
    folder = Path(tempfile.mkdtemp(prefix="shoal-chaos-"))
    console.print(f"{len(requests)} requests; configurations and logs of servers: {folder}")
    for configuration in configurations:
        right = await oracle.learn(requests, configuration.kv_cache_dtype, folder)
        found = ConfigurationResult(configuration.name)
        results.append(found)
        await try_one(configuration, requests, right, options, folder, found)
        strikes = ", ".join(f"{count} {kind}" for kind, count in sorted(found.strikes.items()))
        cells = [f"{cell} {head}" for head, cell in zip(HEADS[1:-2], found.row()[1:-2], strict=True)]
        wrong = f"{len(found.different)} different, {len(found.hung)} hung, {len(found.errors)} other errors"
        console.print(f"{found.name}: {', '.join(cells)}; {strikes}; {wrong}", soft_wrap=True)
        for text in found.refused[:5]:
            console.print(f"  refused: {text}", soft_wrap=True, markup=False)
        for text in found.wrong[:10]:
            console.print(f"  {text}", style="red", soft_wrap=True, markup=False)


def show(results: list[ConfigurationResult], console: Console) -> None:
    table = Table(*HEADS)
    for found in results:
        table.add_row(*found.row())
    console.print(table)


def as_json(results: list[ConfigurationResult]) -> dict[str, Any]:
    passed = bool(results) and not any(found.wrong for found in results)
    return {"passed": passed, "configurations": [vars(found) for found in results]}
