"""Decode speed with one and with several decode steps per scheduling decision (``max_iterations``).

    python -m benchmarks.iterations                      # smollm2, bfloat16, 1 and 4, all cores
    python -m benchmarks.iterations --device cuda:0 --iterations 1 4 16 --concurrency 1 16 64

One engine per setting, with the same weights, in this process. Settings take turns within each round, so that
a slow machine affects all. All requests of a run arrive at once, with --input and --output tokens
(ignore_eos). Prints medians over the rounds: tokens per second after the first tokens, their ratio to the
first setting in the same round, TPOT in the engine, and the time of `schedule` and `update` per decode step.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.interrupts import show_at_end
from shoal.core import Request, SamplingParams, Service
from shoal.engine import Engine, EngineOptions
from shoal.engine.build import assemble_engine, default_threads
from shoal.execute.model.model_set import load_models
from shoal.kvcache import KVCacheOptions
from shoal.models import resolve_model
from shoal.schedule import SchedulerOptions

SERVICE = "bench"


@dataclass(frozen=True)
class Run:
    """Figures of one run."""

    max_iterations: int
    concurrency: int
    tokens_per_s: float
    tpot_ms: float
    scheduling_us: float


def make_requests(count: int, prompt: int, output: int, run: int) -> list[Request]:
    """Requests without common prefixes: prompts differ in their first block."""
    sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    return [
        Request(
            id=f"{run}-{number}",
            service=SERVICE,
            prompt=[(1000 + 131 * number + 17 * at + 7919 * run) % 40_000 + 100 for at in range(prompt)],
            sampling=sampling,
            arrival_ns=time.monotonic_ns(),
        )
        for number in range(count)
    ]


def measure(engine: Engine, max_iterations: int, requests: list[Request]) -> Run:
    """Answer the requests; times count from the step with the last first token."""
    engine.submit(*requests)
    decoding: set[str] = set()
    while len(decoding) < len(requests):
        decoding.update(event.request_id for event in engine.step())
    started, before, tokens = time.perf_counter(), engine.stats().steps, 0
    while engine.busy:
        tokens += sum(len(event.tokens) for event in engine.step())
    seconds, after = time.perf_counter() - started, engine.stats().steps
    steps = after.count - before.count
    scheduling_ns = after.schedule_ns + after.update_ns - before.schedule_ns - before.update_ns
    return Run(
        max_iterations,
        len(requests),
        tokens / seconds,
        1e3 * seconds / steps,
        scheduling_ns / steps / 1e3,
    )


def build_engines(args: argparse.Namespace) -> dict[int, Engine]:
    """An engine for each setting, all with the same weights."""
    service = Service(name=SERVICE, model=args.model, dtype=args.dtype)
    threads = args.threads or default_threads()
    models = load_models([service], {SERVICE: resolve_model(args.model)}, device=args.device, threads=threads)
    return {
        max_iterations: assemble_engine(
            EngineOptions(
                services=(service,),
                device=args.device,
                kv_cache=KVCacheOptions(memory_bytes=args.kv_mib << 20),
                scheduler=SchedulerOptions(max_iterations=max_iterations, preemption_mode="recompute"),
            ),
            models,
            threads=threads,
        )[0]
        for max_iterations in args.iterations
    }


def show(runs: list[Run]) -> None:
    table = Table(title="medians over the rounds")
    columns = (
        "concurrent",
        "max_iterations",
        "decode tokens/s",
        "ratio",
        "TPOT, ms",
        "scheduling, us a step",
    )
    for column in columns:
        table.add_column(column, justify="right")
    groups: dict[tuple[int, int], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.concurrency, run.max_iterations), []).append(run)
    for (concurrency, max_iterations), group in groups.items():
        first = groups[concurrency, runs[0].max_iterations]
        ratios = [run.tokens_per_s / other.tokens_per_s for run, other in zip(group, first, strict=False)]
        table.add_row(
            str(concurrency),
            str(max_iterations),
            f"{median(run.tokens_per_s for run in group):.1f}",
            f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{median(run.tpot_ms for run in group):.2f}",
            f"{median(run.scheduling_us for run in group):.0f}",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv-mib", type=int, default=1024, help="KV pool of each engine, MiB")
    parser.add_argument("--iterations", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--input", type=int, default=32, help="prompt tokens per request")
    parser.add_argument("--output", type=int, default=65, help="output tokens per request")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write every run here, too")
    args = parser.parse_args()
    engines = build_engines(args)
    runs: list[Run] = []
    number = 0

    def finish() -> None:
        show(runs)
        if args.json:
            args.json.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")

    with show_at_end(finish):
        for round_number in range(-1, args.rounds):  # the first round only warms up
            for concurrency in args.concurrency:
                for max_iterations, engine in engines.items():
                    number += 1
                    requests = make_requests(concurrency, args.input, args.output, number)
                    run = measure(engine, max_iterations, requests)
                    if round_number >= 0:
                        runs.append(run)


if __name__ == "__main__":
    main()
