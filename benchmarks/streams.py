"""Largest inter-token latencies of streams that arrive one after another, by scheduler, on a real engine.

    python -m benchmarks.streams                              # 8 streams, 0.5 s apart, 2 at a time
    python -m benchmarks.streams --max-running 0              # as many at a time as the scheduler allows

One service, smollm2 by default, every scheduler in turn with the same weights. Prints for each the time until
all streams have ended, mean TTFT, the three largest inter-token latencies, and preemptions.
"""

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from rich.table import Table

from benchmarks.interrupts import print_at_end
from shoal.config.presets import PRESETS
from shoal.core import Request, SamplingParams, Service
from shoal.engine import Engine, EngineOptions
from shoal.engine.build import assemble_engine, default_threads
from shoal.execute.model.model_set import load_models
from shoal.kvcache import KVCacheOptions
from shoal.models import resolve_model
from shoal.schedule import SchedulerOptions

SERVICE = "bench"


def schedulers(max_running: int | None) -> Mapping[str, SchedulerOptions]:
    """Compared schedulers by name."""
    shoal = SchedulerOptions(max_running=max_running)
    return {
        "shoal": shoal,
        "shoal, less-urgent": replace(shoal, preempt_for_waiting="less-urgent"),
        "seallm-join": replace(PRESETS["seallm-join"].scheduler, max_running=max_running),
        "vllm": replace(PRESETS["vllm"].scheduler, max_running=max_running),
    }


def serve(engine: Engine, count: int, apart_s: float, output: int) -> dict[str, list[float]]:
    """Token times of each stream, in seconds from its arrival."""
    sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    start_ns = time.monotonic_ns()
    arrivals = {f"r{number}": start_ns + round(number * apart_s * 1e9) for number in range(count)}
    upcoming = list(arrivals)
    times: dict[str, list[float]] = {name: [] for name in arrivals}
    while upcoming or engine.busy:
        while upcoming and arrivals[upcoming[0]] <= time.monotonic_ns():
            name = upcoming.pop(0)
            prompt = [(131 * len(upcoming) + 17 * at) % 40_000 + 100 for at in range(64)]
            engine.submit(
                Request(id=name, service=SERVICE, prompt=prompt, sampling=sampling, arrival_ns=arrivals[name])
            )
        for event in engine.step():
            elapsed_s = (time.monotonic_ns() - arrivals[event.request_id]) / 1e9
            times[event.request_id] += [elapsed_s] * len(event.tokens)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--apart", type=float, default=0.5, help="seconds between two arrivals")
    parser.add_argument("--output", type=int, default=100, help="tokens of each answer")
    parser.add_argument("--max-running", type=int, default=2, help="0: the scheduler's default")
    arguments = parser.parse_args()
    service = Service(name=SERVICE, model=arguments.model, dtype="bfloat16")
    threads = default_threads()
    folders = {SERVICE: resolve_model(arguments.model)}
    models = load_models([service], folders, device=arguments.device, threads=threads)
    table = Table("scheduler", "seconds", "mean TTFT, s", "largest gaps, s", "preemptions")
    with print_at_end(table):
        for name, scheduler in schedulers(arguments.max_running or None).items():
            options = EngineOptions(
                services=(service,),
                device=arguments.device,
                kv_cache=KVCacheOptions(memory_bytes=256 << 20),
                scheduler=scheduler,
            )
            engine, _ = assemble_engine(options, models, threads=threads)
            started = time.monotonic()
            times = serve(engine, arguments.streams, arguments.apart, arguments.output)
            seconds = time.monotonic() - started
            gaps = sorted(later - sooner for row in times.values() for sooner, later in pairwise(row))
            table.add_row(
                name,
                f"{seconds:.1f}",
                f"{sum(row[0] for row in times.values()) / len(times):.2f}",
                ", ".join(f"{gap:.2f}" for gap in gaps[:-4:-1]),
                str(engine.stats().services[SERVICE].preemptions),
            )
            engine.close()


if __name__ == "__main__":
    main()
