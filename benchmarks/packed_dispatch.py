"""Simulated comparison of packing and spreading dispatch policies: engines in use, migrations, latency.

    python -m benchmarks.packed_dispatch --traces FOLDER [--engines 8] [--rate 8] [--requests 3000] [--jobs 2]

Azure conversations (ShareGPT's lengths without --traces) on engines with Llama 2 7B and memory for 40,000 KV
tokens each (an A100). For each policy: mean and most engines in use, migrations per second by outcome,
preemptions by the engines' schedulers, mean and 99th percentile of TTFT, and the share of answers within five
times the time alone.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shoal.cluster.manager.dispatch import DISPATCH_NAMES
from shoal.config.scenario_file import load_scenario
from shoal.config.scenario_run import prepare
from shoal.config.setting_tree import parse_yaml
from shoal.measure import RunRecord, summarise

SLO_SCALE = 5
CONVERSATIONS = "azure_llm_2023/AzureLLMInferenceTrace_conv.csv"
SCENARIO = """
services: [{name: chat}]
latency: {roofline: {model: llama-2-7b, device: a100-40}}
engines: ENGINES
link: {bandwidth: 10e9, latency: 50us}
kv_cache: {tokens: KV_TOKENS}
workload: {LENGTHS, rate: RATE, requests: REQUESTS}
dispatch: DISPATCH
"""
NAMES = ["round-robin", "max-min", "best-fit", "worst-fit", "load-balance", "mell", "mell-forecast"]


@dataclass(frozen=True, slots=True)
class Point:
    """One run."""

    dispatch: str
    options: argparse.Namespace


def measure(point: Point) -> list[str]:
    """A row of the table."""
    options, text = point.options, SCENARIO
    words = {
        "KV_TOKENS": options.kv_tokens,
        "ENGINES": options.engines,
        "LENGTHS": "lengths: sharegpt"
        if options.traces is None
        else f"trace: '{options.traces / CONVERSATIONS}'",
        "RATE": options.rate,
        "REQUESTS": options.requests,
        "DISPATCH": point.dispatch,
    }
    for word, value in words.items():
        text = text.replace(word, str(value))
    run = prepare(load_scenario(flags=parse_yaml(text, point.dispatch)))
    alone_s = {name: service.execution_s or 1.0 for name, service in run.engine.services.items()}
    record = replace(run.run(spans=True), execution_s=alone_s)
    group = summarise(record).overall
    assert group.ttft_s is not None
    met = [row.answered and row.e2e_s <= SLO_SCALE * alone_s[row.service] for row in record.requests]
    in_use = engines_in_use(record, options.engines)
    seconds = record.end_ns / 1e9
    moves = [
        f"{sum(outcomes.values()) / seconds:.2f} {method} ({outcomes.get('done', 0)} done)"
        for method, outcomes in record.moves.items()
    ]
    return [
        f"{in_use.mean():.2f}",
        str(in_use.max()),
        ", ".join(moves) or "0",
        str(sum(row.preemptions for row in record.requests)),
        f"{group.ttft_s.mean:.2f}",
        f"{group.ttft_s.p99:.2f}",
        f"{sum(met) / len(met):.1%}",
    ]


def engines_in_use(record: RunRecord, engines: int) -> npt.NDArray[np.int64]:
    """Engines that computed in each second of the arrivals."""
    last_s = max(row.arrival_ns for row in record.requests) // 10**9
    busy = np.zeros((last_s + 1, engines), dtype=bool)
    for span in record.spans:
        busy[span.start_ns // 10**9 : span.end_ns // 10**9 + 1, span.engine] = True
    in_use: npt.NDArray[np.int64] = busy.sum(axis=1, dtype=np.int64)
    return in_use


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, help="folder of traces")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--kv-tokens", type=int, default=40_000, help="memory of each engine")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--dispatch", nargs="*", choices=DISPATCH_NAMES, default=NAMES)
    options = parser.parse_args()
    heads = ("engines", "most", "moves a second", "preemptions", "TTFT s", "p99", "in time")
    print("| dispatch | " + " | ".join(heads) + " |\n|---|" + "---:|" * len(heads))
    with ProcessPoolExecutor(options.jobs) as pool:
        points = [Point(name, options) for name in options.dispatch]
        for point, row in zip(points, pool.map(measure, points), strict=True):
            print(f"| `{point.dispatch}` | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
