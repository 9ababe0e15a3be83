"""Packing and spreading dispatch policies on real engines: engines in use, migrations, latency.

    python -m benchmarks.packed_serving                 # SmolLM2 in float32, three engines
    python -m benchmarks.packed_serving --dispatch max-min mell load-balance --seed 2

Streams arrive at random, in busy and quiet periods, the same for every policy. Prints the mean number of
engines in use, migrations and withdrawals, TTFT and inter-token latency; and whether all streams equal those
of an undisturbed run (as in benchmarks/migration.py).
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.stream_comparison import SERVICE, Differences, Job, Output, make_jobs, read_job
from shoal.cluster.backends.make import make_backend
from shoal.cluster.options import ClusterOptions, EnginePlan, PackingOptions
from shoal.cluster.router.router import Router
from shoal.core import EngineDied, Service
from shoal.engine import EngineOptions
from shoal.kvcache import KVCacheOptions
from shoal.models import Tokenizer, resolve_model

_SAMPLE_S = 0.1


@dataclass
class Outcome:
    """Results of one policy."""

    in_use: list[int] = field(default_factory=list)
    """Samples of the number of engines with requests."""
    lost: list[str] = field(default_factory=list)
    differences: Differences = field(default_factory=Differences)
    moves: Counter[str] = field(default_factory=Counter)
    withdrawals: int = 0
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    """Inter-token latencies."""

    @property
    def passed(self) -> bool:
        """Whether no stream was lost, and none differs except at ties."""
        return not self.lost and self.differences.none


async def read(router: Router, job: Job, outcome: Outcome) -> Output:
    times_s = [time.monotonic()]
    output = await read_job(router, job, lambda _, tokens: times_s.extend([time.monotonic()] * tokens))
    outcome.first_s.append(times_s[1] - times_s[0])
    outcome.between_s += [after - before for before, after in pairwise(times_s[1:])]
    return output


async def watch(router: Router, outcome: Outcome) -> None:
    """Sample the number of engines in use until cancelled."""
    while True:
        await asyncio.sleep(_SAMPLE_S)
        outcome.in_use.append(sum(engine.requests > 0 for engine in router.engines))


async def load(router: Router, jobs: Sequence[Job], options: argparse.Namespace, outcome: Outcome) -> None:
    """Start streams in busy and quiet periods, and compare each with its undisturbed output."""
    reference = options.reference
    rng = random.Random(options.seed)

    async def one(job: Job) -> None:
        try:
            output = await read(router, job, outcome)
        except EngineDied as error:
            outcome.lost.append(str(error))
        else:
            outcome.differences.compare(output, reference[job])

    watching = asyncio.create_task(watch(router, outcome))
    streams = []
    for number in range(options.streams):
        busy = number % options.spell < options.spell * 3 // 4
        await asyncio.sleep(rng.expovariate(options.rate if busy else options.rate / 6))
        streams.append(asyncio.create_task(one(rng.choice(jobs))))
    await asyncio.gather(*streams)
    watching.cancel()
    for engine in router.engines:
        outcome.moves.update({f"{m} {o}": n for (m, o), n in engine.migrations.items()})
        outcome.withdrawals += engine.withdrawn


async def serve(dispatch: str, options: argparse.Namespace, console: Console) -> Outcome:
    """Run all streams with one policy."""
    folder = resolve_model(options.model)
    tokenizer = Tokenizer.from_folder(folder)
    engine = EngineOptions(
        services=(Service(name=SERVICE, model=options.model, dtype="float32"),),
        threads=1,
        kv_cache=KVCacheOptions(memory_bytes=options.kv_mib << 20),
    )
    cluster = ClusterOptions(dispatch=dispatch, packing=PackingOptions(epoch_s=options.epoch))
    router = await Router.start(
        [EnginePlan(name=str(number), options=engine) for number in range(options.engines)],
        {SERVICE: folder},
        {SERVICE: tokenizer},
        make_backend(cluster),
        cluster,
    )
    outcome = Outcome()
    try:
        jobs = make_jobs(tokenizer, options.jobs, options.tokens)
        if not options.reference:
            # Few at a time, so that nothing is preempted.
            for some in (jobs[at : at + 4] for at in range(0, len(jobs), 4)):
                outputs = await asyncio.gather(*(read(router, job, Outcome()) for job in some))
                options.reference.update(zip(some, outputs, strict=True))
            console.print(f"{len(jobs)} undisturbed streams read")
        await load(router, jobs, options, outcome)
        for name in [engine.name for engine in router.engines]:
            blocks = (await router.stats(name)).services[SERVICE].live_blocks
            if blocks:
                outcome.lost.append(f"engine {name} holds {blocks} blocks in the end")
    finally:
        await router.close()
    return outcome


def report(outcomes: dict[str, Outcome], console: Console) -> None:
    heads = ("engines in use", "moves", "withdrawals", "first token s", "between ms", "p95 ms", "different")
    table = Table("dispatch", *heads)
    for name, outcome in outcomes.items():
        between = outcome.between_s
        table.add_row(
            name,
            f"{statistics.mean(outcome.in_use):.2f}",
            ", ".join(f"{count} {what}" for what, count in sorted(outcome.moves.items())) or "-",
            str(outcome.withdrawals),
            f"{statistics.median(outcome.first_s):.2f}",
            f"{1000 * statistics.median(between):.0f}",
            f"{1000 * statistics.quantiles(between, n=20)[-1]:.0f}",
            f"{len(outcome.differences.different)} of {outcome.differences.compared}",
        )
        for text in [*outcome.lost, *outcome.differences.different][:10]:
            console.print(f"{name}: {text}", style="red")
    console.print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dispatch", nargs="*", default=["max-min", "mell"])
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--streams", type=int, default=120)
    parser.add_argument("--jobs", type=int, default=30, help="different requests")
    parser.add_argument("--tokens", type=int, default=120, help="most tokens of an answer")
    parser.add_argument("--rate", type=float, default=2.0, help="streams per second in busy spells")
    parser.add_argument("--spell", type=int, default=24, help="streams in a busy and a quiet spell together")
    parser.add_argument("--kv-mib", type=int, default=80)
    parser.add_argument("--epoch", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="a quick look with two engines")
    parser.add_argument("--json", type=Path, help="where to write the outcome")
    options = parser.parse_args()
    if options.small:
        options.engines, options.streams, options.jobs, options.tokens = 2, 24, 6, 36
        options.kv_mib, options.epoch, options.rate = 24, 0.25, 4.0
    options.reference = {}
    return options


def main() -> bool:
    """Run each policy; whether all passed."""
    options, console = arguments(), Console(width=120)
    outcomes = {name: asyncio.run(serve(name, options, console)) for name in options.dispatch}
    report(outcomes, console)
    if options.json:
        found = {
            name: {
                "passed": outcome.passed,
                "compared": outcome.differences.compared,
                "in_use": statistics.mean(outcome.in_use),
                "moves": outcome.moves,
            }
            for name, outcome in outcomes.items()
        }
        options.json.write_text(json.dumps(found))
    return all(outcome.passed for outcome in outcomes.values())


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
