"""Chaos test: engines or servers under load are killed; no token may be lost, doubled or changed.

    python -m benchmarks.chaos                        # SmolLM2 in float32, two engines on this machine
    python -m benchmarks.chaos --small                # as in the slow tests: a few kills, under 90 s
    PYTHONPATH=$PWD ray start --head --num-cpus 2
    python -m benchmarks.chaos --backend ray --kills 5 --hangs 1 --raises 0 --poisons 0
    python -m benchmarks.chaos --configs              # servers under all configurations, int8
    python -m benchmarks.chaos --configs default mell-moves --seconds 20 --seed 7

Clients read one stream after another. A kill takes an engine with at least five streams in decode, and with
prompts being computed. A hang stops a process (SIGSTOP) until it is detected and killed; a raise makes an
executor fail once; a poison request makes it fail always, and must be the only one that fails. Streams are
compared with those of an undisturbed run: tokens must be equal, except where the two likeliest tokens are
closer than 0.001, and log-probabilities must be within 0.001. Prints the number of resumed streams, the time
until their next token, and the part of it after the dispatch to another engine, with KV recomputation.

With --configs, servers (`shoal serve` on loopback) are disturbed under many configurations, one after the
other, while clients send valid requests of every kind, and cancel some. Engines and the processes of grammars
and tokenizers are killed and stopped, engines are drained, and services are added, removed and unloaded.
Every answer must equal, to the last digit, that of a quiet server to the same request alone: both run in
int8, where the native kernels compute the same bits for any batch. A request without an answer within
--deadline hangs; errors that docs/http.md does not document for ends of processes are wrong.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.chaos import server_runs
from benchmarks.chaos.configurations import named
from benchmarks.chaos.failing_engine import FAILS_ONCE, MARKS, POISON
from benchmarks.interrupts import show_at_end
from benchmarks.stream_comparison import SERVICE, TOLERANCE, Differences, Job, Output, make_jobs, read_job
from shoal.cluster.backends.make import make_backend
from shoal.cluster.manager.actions import ClusterAction, Dispatch
from shoal.cluster.manager.events import ClusterEvent
from shoal.cluster.options import ClusterOptions, EnginePlan, RestartOptions
from shoal.cluster.router.router import Router
from shoal.cluster.status import EngineState
from shoal.core import EngineDied, SamplingParams, Service
from shoal.engine import EngineOptions
from shoal.kvcache import KVCacheOptions
from shoal.models import Tokenizer, resolve_model

BUILDER = "benchmarks.chaos.failing_engine:build_chaos_engine"
LEAST_STREAMS = 5


@dataclass
class Outcome:
    """Counts and differences of a run."""

    kills: int = 0
    hangs: int = 0
    raises: int = 0
    poisons: int = 0
    streams: int = 0
    resumed: int = 0
    lost: list[str] = field(default_factory=list)
    differences: Differences = field(default_factory=Differences)
    waits_s: list[float] = field(default_factory=list)
    hang_waits_s: list[float] = field(default_factory=list)
    after_dispatch_s: list[float] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether no stream was lost, and none differs except at ties."""
        return not self.lost and self.differences.none


class Chaos:
    """Clients that read and compare streams, and strikes against their engines."""

    def __init__(self, router: Router, jobs: Sequence[Job], clients: int, rng: random.Random) -> None:
        self.router = router
        self.jobs = jobs
        self.clients = clients
        self.rng = rng
        self.reference: dict[Job, Output] = {}
        self.outcome = Outcome()
        self.stopped = asyncio.Event()
        self.extra: list[asyncio.Task[None]] = []
        self.waiting: dict[
            str, tuple[float, list[float]]
        ] = {}  # call: (start of the wait, list for its length)
        self.dispatched: dict[str, float] = {}

    def on_decision(self, now_ns: int, event: ClusterEvent, decided: Sequence[ClusterAction]) -> None:
        """Record when a call is dispatched again."""
        for action in decided:
            if isinstance(action, Dispatch) and action.attempt > 1:
                self.dispatched[action.request] = now_ns / 1e9

    async def read(self, job: Job) -> Output:
        return await read_job(self.router, job, lambda call, _: self._note(call))

    def _note(self, call: str) -> None:
        """A call got tokens: end its wait, if any."""
        if call in self.waiting and call in self.dispatched:
            since, waits = self.waiting.pop(call)
            now = time.monotonic()
            waits.append(now - since)
            self.outcome.after_dispatch_s.append(now - self.dispatched.pop(call))

    async def undisturbed(self) -> None:
        """Read every job once, with the later concurrency."""
        gate = asyncio.Semaphore(self.clients)

        async def one(job: Job) -> None:
            async with gate:
                self.reference[job] = await self.read(job)

        await asyncio.gather(*(one(job) for job in self.jobs))

    async def client(self) -> None:
        """Read streams until stopped."""
        while not self.stopped.is_set():
            await self.checked(self.rng.choice(self.jobs))

    async def checked(self, job: Job) -> None:
        try:
            output = await self.read(job)
        except EngineDied as error:
            self.outcome.lost.append(str(error))
            return
        self.outcome.streams += 1
        self.outcome.differences.compare(output, self.reference[job])

    async def victim(self) -> tuple[str, int]:
        """Name and pid of an engine with enough streams in decode, and prompts being computed."""
        while True:
            ready = [engine for engine in self.router.engines if engine.state is EngineState.READY]
            busy = [engine for engine in ready if self.streams_in_decode(engine.name) >= LEAST_STREAMS]
            if busy and len(ready) == len(self.router.engines):
                prompts = [self.rng.choice(self.jobs[:8]) for _ in range(4)]
                self.extra += [asyncio.create_task(self.checked(job)) for job in prompts]
                await asyncio.sleep(0.05)
                engine = self.rng.choice(busy)
                if engine.pid is not None and self.streams_in_decode(engine.name) >= LEAST_STREAMS:
                    return engine.name, engine.pid
            await asyncio.sleep(0.05)

    def streams_in_decode(self, engine: str) -> int:
        """Number of an engine's streams in decode."""
        calls = self.router._calls.all()
        return sum(call.engine == engine and call.output_tokens > 0 for call in calls)

    def strike(self, engine: str, waits: list[float]) -> None:
        """Record the start of the wait of the engine's streams."""
        now = time.monotonic()
        for call in self.router._calls.all():
            if call.engine == engine and call.output_tokens > 0:
                self.waiting[call.id] = now, waits

    async def signal(self, number: signal.Signals, waits: list[float]) -> None:
        """Signal an engine, and wait until all of its streams continue."""
        engine, pid = await self.victim()
        self.strike(engine, waits)
        os.kill(pid, number)
        await self.all_resumed()

    async def all_resumed(self) -> None:
        """Wait until all waiting streams continue."""
        while any(self.router._calls.get(call) is not None for call in self.waiting):
            await asyncio.sleep(0.02)
        self.waiting.clear()

    async def fail_once(self, number: int) -> None:
        """Send a request that kills its first engine, and is answered by the second."""
        await self.victim()
        stream = await self.router.submit(
            SERVICE, [*FAILS_ONCE, number], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        )
        tokens = [token async for delta in stream for token in delta.tokens]
        if len(tokens) != 8:
            self.outcome.lost.append("the request that failed once")

    async def poison(self, number: int) -> None:
        """Send a request that kills every engine."""
        await self.victim()
        stream = await self.router.submit(SERVICE, [*POISON, number], SamplingParams(max_tokens=8))
        try:
            async for _ in stream:
                pass
        except EngineDied:
            return
        self.outcome.differences.different.append("a poison request was answered")

    async def run(self, options: argparse.Namespace, console: Console) -> None:
        """All strikes in random order, under load."""
        await self.undisturbed()
        console.print(f"{len(self.jobs)} undisturbed streams read")
        clients = [asyncio.create_task(self.client()) for _ in range(self.clients)]
        strikes = ["kill"] * options.kills + ["hang"] * options.hangs
        strikes += ["raise"] * options.raises + ["poison"] * options.poisons
        self.rng.shuffle(strikes)
        outcome = self.outcome
        for number, strike in enumerate(strikes):
            began = time.monotonic()
            match strike:
                case "kill":
                    await self.signal(signal.SIGKILL, outcome.waits_s)
                    outcome.kills += 1
                case "hang":
                    await self.signal(signal.SIGSTOP, outcome.hang_waits_s)
                    outcome.hangs += 1
                case "raise":
                    await self.fail_once(number)
                    outcome.raises += 1
                case "poison":
                    await self.poison(number)
                    outcome.poisons += 1
            console.print(
                f"{number + 1:3}/{len(strikes)} {strike:6} {time.monotonic() - began:5.1f} s; "
                f"{self.router.services[SERVICE].resumed} resumed, {len(outcome.lost)} lost, "
                f"{len(outcome.differences.different)} different"
            )
        self.stopped.set()
        await asyncio.gather(*clients, *self.extra)
        outcome.resumed = self.router.services[SERVICE].resumed


def report(outcome: Outcome, console: Console) -> None:
    table = Table("", "")
    strikes = (
        f"{outcome.kills} kills, {outcome.hangs} hangs, {outcome.raises} raises, {outcome.poisons} poisons"
    )
    table.add_row("strikes", strikes)
    table.add_row("streams read", f"{outcome.streams}, of which resumed {outcome.resumed} times")
    table.add_row("lost", str(len(outcome.lost)))
    table.add_row(
        "different",
        f"{len(outcome.differences.different)}; {outcome.differences.ties} at ties below {TOLERANCE:g}",
    )
    for name, waits in (("kill", outcome.waits_s), ("hang", outcome.hang_waits_s)):
        if waits:
            text = f"median {1000 * statistics.median(waits):.0f} ms, worst {1000 * max(waits):.0f} ms"
            table.add_row(f"from {name} to the next token", text)
    if outcome.waits_s:
        share = sum(outcome.after_dispatch_s) / sum([*outcome.waits_s, *outcome.hang_waits_s])
        table.add_row("of that after the new dispatch", f"{share:.0%}")
    console.print(table)
    for text in [*outcome.lost, *outcome.differences.different][:20]:
        console.print(f"  {text}", style="red")


async def main(options: argparse.Namespace, console: Console) -> Outcome:
    """Start engines, run the strikes, and return the outcome."""
    folder = resolve_model(options.model)
    tokenizer = Tokenizer.from_folder(folder)
    engine = EngineOptions(
        services=(Service(name=SERVICE, model=options.model, dtype="float32"),),
        threads=1,
        kv_cache=KVCacheOptions(memory_bytes=options.kv_mib << 20),
    )
    cluster = ClusterOptions(
        backend=options.backend,
        address=options.address,
        heartbeat_s=0.25,
        hung_after_s=options.hung_after,
        restart=RestartOptions(first_s=0.1, max_s=1.0),
    )
    chaos: Chaos | None = None
    router = Router(
        [EnginePlan(name=str(number), options=engine) for number in range(options.engines)],
        {SERVICE: folder},
        {SERVICE: tokenizer},
        make_backend(cluster),
        cluster,
        max_queue=engine.max_queue,
        builder=BUILDER,
        on_decision=lambda *decision: chaos.on_decision(*decision) if chaos is not None else None,
    )
    await router.run()
    console.print(f"{options.engines} engines are ready")
    chaos = Chaos(
        router, make_jobs(tokenizer, options.jobs, 120), options.clients, random.Random(options.seed)
    )
    try:
        await chaos.run(options, console)
    finally:
        await router.close()
    return chaos.outcome


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend", choices=["local", "ray"], default="local")
    parser.add_argument("--address", default="auto", help="of a Ray cluster on this machine")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--clients", type=int, help="at once; 16, with --configs 8")
    parser.add_argument("--jobs", type=int, default=40, help="different requests")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--hangs", type=int, default=5)
    parser.add_argument("--raises", type=int, default=5)
    parser.add_argument("--poisons", type=int, default=1)
    parser.add_argument("--hung-after", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--kv-mib", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="a few strikes, under 90 s")
    parser.add_argument("--json", type=Path)
    servers = parser.add_argument_group("servers under many configurations")
    servers.add_argument("--configs", nargs="*", metavar="NAME", help="these, or all if none is named")
    servers.add_argument("--seconds", type=float, default=30.0, help="for each configuration")
    servers.add_argument("--requests", type=int, default=84, help="different requests")
    servers.add_argument("--deadline", type=float, default=180.0, metavar="SECONDS", help="of each request")
    servers.add_argument(
        "--between", type=float, default=2.0, metavar="SECONDS", help="mean time between strikes"
    )
    options = parser.parse_args()
    options.clients = options.clients or (16 if options.configs is None else 8)
    if options.small:
        options.jobs, options.kills, options.hangs, options.raises, options.poisons = 6, 1, 1, 1, 0
        options.hung_after, options.clients = 2.0, 12
    return options


def write(document: dict[str, Any], file: Path | None) -> None:
    """Write the document to ``file``; "-" is standard output."""
    if file is not None:
        text = json.dumps(document)
        sys.stdout.write(text) if file == Path("-") else file.write_text(text)


def streams(options: argparse.Namespace, console: Console) -> bool:
    """Run the test of engines; whether it passed."""
    with tempfile.TemporaryDirectory() as marks:
        os.environ[MARKS] = marks
        found = asyncio.run(main(options, console))
    report(found, console)
    write(asdict(found) | {"passed": found.passed}, options.json)
    return found.passed


def servers(options: argparse.Namespace, console: Console) -> bool:
    """Run the test of servers; whether it passed."""
    try:
        configurations = named(options.configs)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    results: list[server_runs.ConfigurationResult] = []

    def show() -> None:
        server_runs.show(results, console)
        write(server_runs.as_json(results), options.json)

    with show_at_end(show):
        asyncio.run(server_runs.run_all(configurations, options, console, results))
    return bool(server_runs.as_json(results)["passed"])


if __name__ == "__main__":
    chosen = arguments()
    screen = Console(stderr=chosen.json == Path("-"))
    passed = streams(chosen, screen) if chosen.configs is None else servers(chosen, screen)
    sys.exit(0 if passed else 1)
