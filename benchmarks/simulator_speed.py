"""Simulated requests per second of wall time, in one process.

    python -m benchmarks.simulator_speed [--trace ../shared/traces/azure_llm_2023/...conv.csv] [--repeat 3]

Lengths of Azure's conversation trace (of a fitted distribution without the file), Poisson arrivals of 6.45
requests/s per replica, Llama 3.1 8B on an A100 by roofline, the preset vllm with FCFS, and other schedulers.
Prints the best of ``--repeat`` runs with and without skip-ahead; ``--profile`` prints a profile of the first
case instead.
"""

import argparse
import cProfile
import gc
import pstats
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from benchmarks.interrupts import print_at_end
from shoal.config import PRESETS
from shoal.core import Request
from shoal.forecast import RooflineTimes, device_spec, kv_tokens, model_spec
from shoal.measure import RunRecord
from shoal.schedule import SchedulerOptions
from shoal.simulate import EngineSpec, OpenLoop, ServiceSpec, Simulation, Watch, token_layout
from shoal.workload import LENGTHS, Poisson, generate_rows, read_trace, to_requests, with_arrivals

HERE = Path(__file__).resolve().parent
TRACE = HERE.parent.parent / "shared/traces/azure_llm_2023/AzureLLMInferenceTrace_conv.csv"
RATE, BLOCK_SIZE, CONTEXT = 6.45, 16, 16_384


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    requests: int
    replicas: int
    scheduler: SchedulerOptions
    prefix_caching: bool = False


def cases() -> list[Case]:
    published = replace(PRESETS["vllm"].scheduler, starvation_s=1e6)
    past_future = replace(PRESETS["past-future"].scheduler, starvation_s=1e6)
    return [
        Case("one replica", 2_000, 1, published),
        Case("one replica, depth 2", 2_000, 1, replace(published, depth=2)),
        Case("16 replicas", 19_000, 16, published),
        Case("one replica, prefix caching", 2_000, 1, published, prefix_caching=True),
        Case("one replica, past-future", 2_000, 1, past_future),
        Case("one replica, shoal", 2_000, 1, SchedulerOptions()),
    ]


def make_requests(count: int, replicas: int, trace: Path) -> Sequence[Request]:
    if trace.exists():
        rows = list(read_trace(trace))[:count]
    else:
        rows = generate_rows(LENGTHS["azure-conversation"], Poisson(RATE), count)
    rows = with_arrivals(rows, Poisson(RATE * replicas), seed=0)
    return to_requests(rows, service="default", block_size=BLOCK_SIZE)


def simulate(case: Case, requests: Sequence[Request], *, skip_ahead: bool) -> tuple[RunRecord, float]:
    """The record, and its wall time in seconds."""
    model, device = model_spec("llama-3.1-8b"), device_spec("a100-80")
    layout = token_layout(kv_tokens(model, device) // BLOCK_SIZE, BLOCK_SIZE)
    spec = EngineSpec(
        services={
            "default": ServiceSpec(
                times=RooflineTimes(model, device), context_tokens=CONTEXT, execution_s=5.0
            )
        },
        layout=layout,
        scheduler=case.scheduler,
        host=layout,
        prefix_caching=case.prefix_caching,
    )
    gc.collect()
    started = time.perf_counter()
    simulation = Simulation([spec] * case.replicas, OpenLoop(requests), watch=Watch(skip_ahead=skip_ahead))
    record = simulation.run()
    return record, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    if arguments.profile:
        case = cases()[0]
        requests = make_requests(case.requests, case.replicas, arguments.trace)
        with cProfile.Profile() as profile:
            simulate(case, requests, skip_ahead=True)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return
    table = Table("", "requests", "steps", "requests/s", "every step made", "TTFT s", "TPOT s")
    with print_at_end(table, 120):
        for case in cases():
            requests = make_requests(case.requests, case.replicas, arguments.trace)
            runs = [
                [simulate(case, requests, skip_ahead=skip) for skip in (True, False)]
                for _ in range(arguments.repeat)
            ]
            record = runs[0][0][0]
            fast, slow = (min(run[which][1] for run in runs) for which in (0, 1))
            rows = record.requests
            table.add_row(
                case.name,
                str(len(rows)),
                str(sum(engine.steps for engine in record.engines)),
                f"{len(rows) / fast:,.0f}",
                f"{len(rows) / slow:,.0f}",
                f"{sum(row.ttft_s for row in rows) / len(rows):.3f}",
                f"{sum(row.tpot_s for row in rows) / len(rows):.4f}",
            )


if __name__ == "__main__":
    main()
