"""Decode speed of two services on one model, co-batched or alternating, relative to one service.

    python -m benchmarks.co_batch                         # smollm2, bfloat16, 16 + 16 requests, all cores
    python -m benchmarks.co_batch --device cuda:0 --streams 8 16 64

One engine per mode, with the same weights, in this process: all requests to one service, or half of them
to each of two services that decode together (`co_batch`), or whose steps alternate. Modes take turns within
each round, so that a slow machine affects all. All requests of a run arrive at once. Prompt lengths vary by
half around --input (attention over equal lengths needs no mask, and is faster), outputs have exactly --output
tokens (ignore_eos). Prints medians over the rounds: output tokens per second from the first arrival to the
last end, their ratio to one service in the same round, mean TTFT and TPOT, and the time of `schedule` and
`update` per step.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

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

ONE, TOGETHER, APART = "one service", "two, together", "two, apart"
SERVICES = {ONE: ("a",), TOGETHER: ("a", "b"), APART: ("a", "b")}


@dataclass(frozen=True)
class Run:
    """Figures of one run. streams: requests of each of two services."""

    mode: str
    streams: int
    tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    scheduling_us: float


def make_requests(services: tuple[str, ...], count: int, prompt: int, output: int, run: int) -> list[Request]:
    """``count`` requests, alternating between services, with prompts that differ in their first block."""
    sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    requests = []
    for number in range(count):
        length = prompt // 2 + number * prompt // max(1, count - 1)
        tokens = [(1000 + 131 * number + 17 * at + 7919 * run) % 40_000 + 100 for at in range(length)]
        requests.append(
            Request(
                id=f"{run}-{number}",
                service=services[number % len(services)],
                prompt=tokens,
                sampling=sampling,
                arrival_ns=time.monotonic_ns(),
            )
        )
    return requests


def measure(engine: Engine, mode: str, requests: list[Request]) -> Run:
    times: dict[str, list[float]] = {request.id: [] for request in requests}
    before, started = engine.stats().steps, time.perf_counter()
    engine.submit(*requests)
    while engine.busy:
        events = engine.step()
        now = time.perf_counter() - started
        for event in events:
            times[event.request_id] += [now] * len(event.tokens)
    after = engine.stats().steps
    scheduling_ns = after.schedule_ns + after.update_ns - before.schedule_ns - before.update_ns
    return Run(
        mode,
        len(requests) // 2,
        sum(map(len, times.values())) / now,
        1e3 * mean(own[0] for own in times.values()),
        1e3 * mean((own[-1] - own[0]) / (len(own) - 1) for own in times.values()),
        scheduling_ns / (after.count - before.count) / 1e3,
    )


def build_engines(args: argparse.Namespace) -> dict[str, Engine]:
    """An engine for each mode, all with both services and the same weights."""
    services = tuple(Service(name=name, model=args.model, dtype=args.dtype) for name in SERVICES[TOGETHER])
    threads = args.threads or default_threads()
    folders = dict.fromkeys(SERVICES[TOGETHER], resolve_model(args.model))
    models = load_models(services, folders, device=args.device, threads=threads)
    return {
        mode: assemble_engine(
            EngineOptions(
                services=services,
                device=args.device,
                kv_cache=KVCacheOptions(memory_bytes=args.kv_mib << 20),
                scheduler=SchedulerOptions(co_batch=mode == TOGETHER, preemption_mode="recompute"),
            ),
            models,
            threads=threads,
        )[0]
        for mode in SERVICES
    }


def show(runs: list[Run]) -> None:
    table = Table(title="medians over the rounds")
    columns = ("requests", "services", "tokens/s", "ratio", "TTFT, ms", "TPOT, ms", "scheduling, us a step")
    for column in columns:
        table.add_column(column, justify="right")
    groups: dict[tuple[int, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.streams, run.mode), []).append(run)
    for (streams, mode), group in groups.items():
        ratios = [
            run.tokens_per_s / other.tokens_per_s
            for run, other in zip(group, groups[streams, ONE], strict=False)
        ]
        table.add_row(
            f"{2 * streams}",
            mode,
            f"{median(run.tokens_per_s for run in group):.1f}",
            f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{median(run.ttft_ms for run in group):.0f}",
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
    parser.add_argument("--kv-mib", type=int, default=512, help="KV pool of each engine, MiB")
    parser.add_argument(
        "--streams", type=int, nargs="+", default=[16], help="requests of each of two services"
    )
    parser.add_argument("--input", type=int, default=32, help="prompt tokens per request")
    parser.add_argument("--output", type=int, default=65, help="output tokens per request")
    parser.add_argument("--rounds", type=int, default=5)
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
            for streams in args.streams:
                for mode, engine in engines.items():
                    number += 1
                    requests = make_requests(SERVICES[mode], 2 * streams, args.input, args.output, number)
                    run = measure(engine, mode, requests)
                    if round_number >= 0:
                        runs.append(run)
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
