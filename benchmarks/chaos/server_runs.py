"""Servers under many configurations, with requests of every kind, whose processes are killed and stopped."""

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
"""Codes of errors that ends of processes may bring; Ollama's API has the status only."""
OLLAMAS = {200: "engine", 500: "engine", 503: ""}
"""Those statuses of Ollama's API, 200 amid a stream, and a word that their message has."""
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
class Found:
    """What a configuration showed."""

    name: str
    compared: int = 0
    streams: int = 0
    """Of those compared."""
    cancelled: int = 0
    refused: list[str] = field(default_factory=list)
    """Documented errors."""
    resumed: int = 0
    moved: int = 0
    strikes: Counter[str] = field(default_factory=Counter)
    different: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """Errors that are none of the documented ones, and what else was wrong."""

    @property
    def wrong(self) -> list[str]:
        """All that must not be."""
        return [*self.different, *self.hung, *self.errors]

    def row(self) -> list[str]:
        """A row of the table."""
        counts = [
            self.compared, self.streams, self.cancelled, len(self.refused), self.resumed, self.moved,
        ]  # fmt: skip
        return [self.name, *map(str, counts), str(self.strikes.total()), str(len(self.wrong))]


class Oracle:
    """Answers of a quiet server, each request alone."""

    def __init__(self) -> None:
        self._answers: dict[str, list[Any]] = {}

    async def learn(self, requests: list[Request], kv_cache_dtype: str, folder: Path) -> list[Any]:
        """The right answers to ``requests``, which are the same at each call."""
        if kv_cache_dtype not in self._answers:
            quiet = Configuration(f"quiet-{kv_cache_dtype}", QUIET.settings, kv_cache_dtype=kv_cache_dtype)
            async with Server(quiet, folder) as server:
                self._answers[kv_cache_dtype] = [
                    await ask(server.client, request, request.body["model"], stream=False)
                    for request in requests
                ]
        return self._answers[kv_cache_dtype]


class Fuzz:
    """The clients of one server."""

    def __init__(
        self, server: Server, strikes: Strikes, requests: list[Request], right: list[Any],
        configuration: Configuration, rng: random.Random, deadline_s: float,
        found: Found,
    ) -> None:  # fmt: skip
        self._server, self._strikes = server, strikes
        self._requests, self._right = requests, right
        self._configuration, self._rng, self._deadline_s = configuration, rng, deadline_s
        self.found = found

    async def client(self, end: float) -> None:
        """One request after the other until that time."""
        while time.monotonic() < end:
            await self._one(self._rng.randrange(len(self._requests)))

    async def _one(self, number: int) -> None:
        request, rng = self._requests[number], self._rng
        model = request.body["model"]
        if model == "chat":
            model = rng.choice(["chat", "chat", "twin", GUEST] if self._strikes.guest else ["chat", "twin"])
        stream = request.streams and rng.random() < 0.6
        leaves_s = rng.uniform(0, 1.5) if rng.random() < 0.15 else None
        what = f"request {number} ({request.path}, {model}, {'stream' if stream else 'whole'})"
        try:
            answering = ask(self._server.client, request, model, stream=stream)
            answer = await self._in_time(answering, leaves_s, what)
        except Refused as error:
            self._refused(error, model, what)
        except httpx.TransportError as error:
            self.found.errors.append(f"{what}: {error!r}")
        else:
            if answer is not None:
                self.found.compared += 1
                self.found.streams += stream
                if difference := first_difference(answer, self._right[number]):
                    self.found.different.append(f"{what}: {difference}")

    async def _in_time(self, answering: Awaitable[Any], leaves_s: float | None, what: str) -> Any:
        """The answer, or None if the client left before, or waited too long."""
        try:
            async with asyncio.timeout(self._deadline_s if leaves_s is None else leaves_s):
                return await answering
        except TimeoutError:
            if leaves_s is None:
                self.found.hung.append(f"{what}: no answer within {self._deadline_s:g} s")
            else:
                self.found.cancelled += 1
            return None

    def _refused(self, error: Refused, model: str, what: str) -> None:
        gone = model == GUEST and error.status == 404
        if error.code:
            documented = error.code in DOCUMENTED or error.code in self._configuration.codes
        else:
            documented = OLLAMAS.get(error.status, "\0") in str(error)
            documented |= error.status == 429 and "goals_out_of_reach" in self._configuration.codes
        if gone or documented:
            self.found.refused.append(f"{what}: {error}")
        else:
            self.found.errors.append(f"{what}: {error}")

    async def settle(self) -> None:
        """Once nothing is asked any more, nothing is left in the engines."""
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
    options: argparse.Namespace, folder: Path, found: Found,
) -> None:  # fmt: skip
    """Run one configuration for the time that the options say; ``found`` gets what it shows."""
    rng = random.Random(f"{options.seed} {configuration.name}")
    server = Server(configuration, folder)
    try:
        async with server:
            strikes = Strikes(server, rng, configuration.engines, options.between, lambda: found.compared)
            found.strikes, found.errors = strikes.done, strikes.failed
            fuzz = Fuzz(server, strikes, requests, right, configuration, rng, options.deadline, found)
            end = time.monotonic() + options.seconds
            striking = asyncio.create_task(strikes.run(end))
            try:
                await asyncio.gather(*(fuzz.client(end) for _ in range(options.clients)))
                await striking
            finally:
                striking.cancel()
                await asyncio.wait([striking])
            await fuzz.settle()
    except (NotStarted, httpx.TransportError) as error:  # of an operators' route, for example
        found.errors.append(f"the server: {error!r}")
    found.errors += server.wrong


async def run_all(
    configurations: list[Configuration], options: argparse.Namespace, console: Console, results: list[Found]
) -> None:
    """All of them, one after the other; ``results`` gets what each showed."""
    if not native_status().startswith("native"):
        raise SystemExit(f"only native kernels give the same bits for any batch; here: {native_status()}")
    requests = make_requests(options.seed, options.requests)
    oracle = Oracle()
    folder = Path(tempfile.mkdtemp(prefix="shoal-chaos-"))
    console.print(f"{len(requests)} requests; configurations and logs of servers: {folder}")
    for configuration in configurations:
        right = await oracle.learn(requests, configuration.kv_cache_dtype, folder)
        found = Found(configuration.name)
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


def show(results: list[Found], console: Console) -> None:
    """Print all results as a table."""
    table = Table(*HEADS)
    for found in results:
        table.add_row(*found.row())
    console.print(table)


def as_json(results: list[Found]) -> dict[str, Any]:
    """All results, for ``--json``."""
    passed = bool(results) and not any(found.wrong for found in results)
    return {"passed": passed, "configurations": [vars(found) for found in results]}
