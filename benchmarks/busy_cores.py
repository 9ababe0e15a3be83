"""Decode step times of a real engine while other processes keep cores busy.

    python -m benchmarks.busy_cores                     # smollm2, bfloat16, with 0, 1 and 2 busy processes
    python -m benchmarks.busy_cores --dtype int8 --rows 1 16 --busy 0 2

Busy processes loop, on any core. Prints median, 99th percentile and longest step in milliseconds.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from rich.table import Table

from benchmarks.interrupts import print_at_end
from shoal.core import Request, SamplingParams, Service
from shoal.engine import Engine, EngineOptions
from shoal.engine.build import assemble_engine, default_threads
from shoal.execute.model.model_set import load_models
from shoal.kvcache import KVCacheOptions
from shoal.models import resolve_model

SERVICE = "bench"


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run processes that never sleep."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    time.sleep(0.5)
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def decode_ms(engine: Engine, rows: int, steps: int, limit_s: float) -> list[float]:
    """Milliseconds of steps with ``rows`` decodes; fewer than ``steps`` after ``limit_s``."""
    sampling = SamplingParams(temperature=0.0, max_tokens=steps + 8, ignore_eos=True)
    now_ns = time.monotonic_ns()
    for row in range(rows):
        prompt = [(131 * row + 17 * at) % 40_000 + 100 for at in range(32)]
        engine.submit(
            Request(id=f"r{row}", service=SERVICE, prompt=prompt, sampling=sampling, arrival_ns=now_ns)
        )
    for _ in range(4):
        engine.step()
    times: list[float] = []
    while len(times) < steps and sum(times) < limit_s * 1e3:
        start_s = time.perf_counter()
        engine.step()
        times.append(1e3 * (time.perf_counter() - start_s))
    for row in range(rows):
        engine.cancel(f"r{row}")
    while engine.busy:
        engine.step()
    return times


def build(model: str, dtype: str) -> Engine:
    """An engine as `shoal serve` would start it."""
    service = Service(name=SERVICE, model=model, dtype=dtype)
    threads = default_threads()
    models = load_models([service], {SERVICE: resolve_model(model)}, device="cpu", threads=threads)
    options = EngineOptions(
        services=(service,), device="cpu", kv_cache=KVCacheOptions(memory_bytes=256 << 20)
    )
    return assemble_engine(options, models, threads=threads)[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--limit-s", type=float, default=20.0, help="of each measurement")
    arguments = parser.parse_args()
    engine = build(arguments.model, arguments.dtype)
    table = Table("rows", "busy processes", "steps", "median", "p99", "longest")
    with print_at_end(table):
        for rows in arguments.rows:
            for processes in arguments.busy:
                with busy(processes):
                    times = sorted(decode_ms(engine, rows, arguments.steps, arguments.limit_s))
                p99 = times[min(len(times) - 1, len(times) * 99 // 100)]
                table.add_row(
                    str(rows),
                    str(processes),
                    str(len(times)),
                    *[f"{ms:.1f}" for ms in (median(times), p99, times[-1])],
                )
        engine.close()


if __name__ == "__main__":
    main()
