"""Many migrations of running streams between engines: lost or changed tokens, and waits for the next token.

    python -m benchmarks.migration                   # SmolLM2 in float32, three engines, 60 streams
    python -m benchmarks.migration --methods live --moves 200

Clients read one stream after another. Every 100 ms one of the streams migrates to another engine, by a random
method. All streams are compared with those of an undisturbed run: tokens must be equal, except where the two
likeliest tokens are closer than 0.001, and log-probabilities must be within 0.001. Prints for each method the
number of migrations, and the inter-token latency over a migration, relative to the median of the same run and
of the undisturbed one; and the change of the inter-token latency of other streams.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich.console import Console
from rich.table import Table

from benchmarks.stream_comparison import SERVICE, TOLERANCE, Differences, Job, Output, make_jobs, read_job
from shoal.cluster.backends.make import make_backend
from shoal.cluster.manager.actions import ClusterAction, Commit, Dispatch, MigrationEnded
from shoal.cluster.manager.events import ClusterEvent, MigrationMethod
from shoal.cluster.options import ClusterOptions, EnginePlan
from shoal.cluster.router.router import Router
from shoal.core import EngineDied, Service
from shoal.engine import EngineOptions
from shoal.kvcache import KVCacheOptions
from shoal.models import Tokenizer, resolve_model


@dataclass
class Outcome:
    """Counts, differences and times of a run."""

    streams: int = 0
    lost: list[str] = field(default_factory=list)
    differences: Differences = field(default_factory=Differences)
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Migrations by method and outcome."""
    why: Counter[str] = field(default_factory=Counter)
    over_migration_s: dict[str, list[float]] = field(default_factory=dict)
    """By method: seconds from the last token before a migration to the first after it."""
    between_s: list[float] = field(default_factory=list)
    """All other inter-token latencies."""

    @property
    def passed(self) -> bool:
        """Whether no stream was lost, and none differs except at ties."""
        return not self.lost and self.differences.none


class MigrationRun:
    """Clients that read and compare streams, and migrations of their requests."""

    def __init__(self, router: Router, jobs: Sequence[Job], options: argparse.Namespace) -> None:
        self.router = router
        self.jobs = jobs
        self.options = options
        self.rng = random.Random(options.seed)
        self.reference: dict[Job, Output] = {}
        self.undisturbed_s: list[float] = []
        self.outcome = Outcome()
        self.handed_over_s: dict[str, list[tuple[float, str]]] = {}
        """Time of each handover of a call, and its method."""
        self.requested_method: dict[str, str] = {}
        """The last requested method, by call."""

    def on_decision(self, now_ns: int, event: ClusterEvent, decided: Sequence[ClusterAction]) -> None:
        """Record outcomes and handovers of calls."""
        for action in decided:
            if isinstance(action, MigrationEnded):
                self.outcome.ended[action.method, action.outcome] += 1
                if action.why:
                    self.outcome.why[action.why] += 1
            elif isinstance(action, Commit) or (isinstance(action, Dispatch) and action.attempt > 1):
                method = "tokens"
                if isinstance(action, Commit):
                    method = self.requested_method.get(action.request, "live or stop")
                self.handed_over_s.setdefault(action.request, []).append((now_ns / 1e9, method))

    async def read(self, job: Job) -> tuple[str, Output, list[float]]:
        """Read a stream to its end: its id, its output, and the times of its tokens."""
        times_s: list[float] = []
        calls: list[str] = []

        def note(call: str, tokens: int) -> None:
            calls[:] = [call]
            times_s.extend([time.monotonic()] * tokens)

        output = await read_job(self.router, job, note)
        return calls[0], output, times_s

    async def undisturbed(self) -> None:
        """Read all jobs once, concurrently."""
        outputs = await asyncio.gather(*(self.read(job) for job in self.jobs))
        for job, (_, output, times_s) in zip(self.jobs, outputs, strict=True):
            self.reference[job] = output
            self.undisturbed_s += _between(times_s)

    async def client(self, until_s: asyncio.Event) -> None:
        """Read streams until stopped."""
        while not until_s.is_set():
            job = self.rng.choice(self.jobs)
            try:
                call, output, times_s = await self.read(job)
            except EngineDied as error:
                self.outcome.lost.append(str(error))
                continue
            self.outcome.streams += 1
            self.outcome.differences.compare(output, self.reference[job])
            self._time(call, times_s)

    def _time(self, call: str, times_s: Sequence[float]) -> None:
        """Record a stream's inter-token latencies, with or without a migration."""
        moves = self.handed_over_s.pop(call, [])
        for before_s, after_s in pairwise(times_s):
            methods = [method for at_s, method in moves if before_s <= at_s < after_s]
            if methods:
                self.outcome.over_migration_s.setdefault(methods[-1], []).append(after_s - before_s)
            else:
                self.outcome.between_s.append(after_s - before_s)

    async def run(self) -> None:
        """All migrations, under load."""
        stopped = asyncio.Event()
        clients = [asyncio.create_task(self.client(stopped)) for _ in range(self.options.streams)]
        methods = [MigrationMethod(name) for name in self.options.methods]
        for _ in range(self.options.moves):
            await asyncio.sleep(self.options.every)
            calls = [
                call
                for call in self.router._calls.all()
                if call.engine is not None and (call.output_tokens > 2 or len(methods) > 1)
            ]
            if not calls:
                continue
            call, method = self.rng.choice(calls), self.rng.choice(methods)
            others = [engine.name for engine in self.router.engines if engine.name != call.engine]
            self.requested_method[call.id] = method
            self.router.administration.migrate_request(call.id, self.rng.choice(others), method)
        stopped.set()
        await asyncio.gather(*clients)


def _between(times_s: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times_s)]


def report(run: MigrationRun, console: Console) -> None:
    outcome = run.outcome
    differences = outcome.differences
    console.print(
        f"{outcome.streams} streams, {len(outcome.lost)} lost, {len(differences.different)} different, "
        f"{differences.ties} at ties below {TOLERANCE:g}"
    )
    console.print("moves: " + ", ".join(f"{m} {o} {n}" for (m, o), n in sorted(outcome.ended.items())))
    for why, count in outcome.why.most_common(8):
        console.print(f"  {count} x {why}")
    usual, before = statistics.median(outcome.between_s), statistics.median(run.undisturbed_s)
    table = Table("between two tokens", "n", "median ms", "p95 ms", "of this run", "of undisturbed")
    rows = {"undisturbed": run.undisturbed_s, "not moved": outcome.between_s}
    rows |= {f"moved, {method}": times for method, times in sorted(outcome.over_migration_s.items())}
    for name, times in rows.items():
        median = statistics.median(times)
        p95 = statistics.quantiles(times, n=20)[-1] if len(times) > 1 else median
        table.add_row(
            name,
            str(len(times)),
            f"{1000 * median:.0f}",
            f"{1000 * p95:.0f}",
            f"{median / usual:.2f}",
            f"{median / before:.2f}",
        )
    console.print(table)
    means = statistics.mean(outcome.between_s), statistics.mean(run.undisturbed_s)
    console.print(f"mean between tokens, not moved: {means[0] / means[1]:.2f} of undisturbed")
    for text in [*outcome.lost, *outcome.differences.different][:20]:
        console.print(f"  {text}", style="red")


async def main(options: argparse.Namespace, console: Console) -> bool:
    """Start engines, migrate their streams, print the results; whether it passed."""
    folder = resolve_model(options.model)
    tokenizer = Tokenizer.from_folder(folder)
    engine = EngineOptions(
        services=(Service(name=SERVICE, model=options.model, dtype=options.dtype),),
        threads=1,
        kv_cache=KVCacheOptions(memory_bytes=options.kv_mib << 20),
    )
    cluster = ClusterOptions(backend=options.backend, address=options.address)
    run: MigrationRun | None = None
    router = await Router.start(
        [EnginePlan(name=str(number), options=engine) for number in range(options.engines)],
        {SERVICE: folder},
        {SERVICE: tokenizer},
        make_backend(cluster),
        cluster,
        on_decision=lambda *decision: run.on_decision(*decision) if run is not None else None,
    )
    try:
        run = MigrationRun(router, make_jobs(tokenizer, options.streams, options.tokens), options)
        await run.undisturbed()
        console.print(f"{options.streams} undisturbed streams read")
        await run.run()
        for name in [engine.name for engine in router.engines]:
            stats = await router.stats(name)
            console.print(f"engine {name} holds {stats.services[SERVICE].live_blocks} blocks in the end")
    finally:
        await router.close()
    report(run, console)
    return run.outcome.passed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", choices=["local", "ray"], default="local")
    parser.add_argument("--address", default="auto", help="of a Ray cluster on this machine")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--streams", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=160, help="most tokens of an answer")
    parser.add_argument("--moves", type=int, default=300)
    parser.add_argument("--every", type=float, default=0.1, metavar="SECONDS")
    parser.add_argument("--methods", nargs="*", choices=list(MigrationMethod), default=list(MigrationMethod))
    parser.add_argument("--kv-mib", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    passed = asyncio.run(main(arguments(), Console()))
    sys.exit(0 if passed else 1)
