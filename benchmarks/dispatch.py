"""Simulated comparison of dispatch policies over several engines, for the choice of the default.

    python -m benchmarks.dispatch --traces FOLDER [--engines 2 4 8] [--requests 200] [--jobs 2] [--only code]

Equal and unequal engines, one and two services, traces with and without shared prefixes; moderate and heavy
load. For every policy: mean and 99th percentile of latency relative to the service's mean request alone ("x
alone"), mean and 99th percentile of TTFT, and the share of answers within five times the time alone (SLO).
The last table has geometric means over all runs, relative to round-robin.
"""

import argparse
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shoal.cluster.manager.dispatch import DISPATCHES
from shoal.config.scenario_file import load_scenario
from shoal.config.scenario_run import PreparedRun, prepare
from shoal.config.setting_tree import parse_yaml
from shoal.measure import summarise
from shoal.simulate import OpenLoop, Simulation

NAMES = [name for name in DISPATCHES if name != "least-loaded"]
SLO_SCALE = 5
ONE = "services: [{name: chat}]\nlatency: {roofline: {model: llama-3.1-8b, device: DEVICE}}\n"
TWO = """
latency: {roofline: {device: DEVICE}}
services:
  - {name: chat, model: llama-3.1-8b}
  - {name: long, model: llama-2-13b, context: 4096}
"""
TRACED = "workload: {trace: 'TRACES/FILE', rate: RATE, requests: REQUESTS}\n"
DRAWN = """
workload:
  {lengths: sharegpt, arrivals: {process: gamma, rate: RATE, cv: 2}, requests: REQUESTS, seed: 1,
   max_tokens: 2048, services: {chat: 3, long: 1}}
"""
CONVERSATION = TRACED.replace("FILE", "azure_llm_2023/AzureLLMInferenceTrace_conv.csv")
CODE = TRACED.replace("FILE", "azure_llm_2023/AzureLLMInferenceTrace_code.csv")
MOONCAKE = TRACED.replace("FILE", "mooncake/conversation_trace.jsonl")
EQUAL, UNEQUAL = ("a100-80",), ("h100", "l40s")


@dataclass(frozen=True, slots=True)
class Load:
    """A workload and its engines."""

    text: str
    """A scenario; words in capitals are replaced."""
    devices: tuple[str, ...]
    """Of the engines in turn."""
    rates: tuple[float, ...]
    """Requests per second and engine."""


LOADS: Mapping[str, Load] = {
    "conversation": Load(ONE + CONVERSATION, EQUAL, (4, 8)),
    "code": Load(ONE + CODE, EQUAL, (1, 2)),
    "mooncake": Load(ONE + MOONCAKE, EQUAL, (0.15, 0.3)),
    "two services": Load(TWO + DRAWN, EQUAL, (2, 4)),
    "conversation, unequal": Load(ONE + CONVERSATION, UNEQUAL, (3, 6)),
    "two services, unequal": Load(TWO + DRAWN, UNEQUAL, (1, 2)),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One run."""

    load: str
    rate: float
    engines: int
    requests: int
    dispatch: str
    traces: Path


def prepared(point: Point, device: str) -> PreparedRun:
    """The scenario on one kind of device."""
    text = LOADS[point.load].text
    words = {
        "DEVICE": device,
        "TRACES": str(point.traces),
        "RATE": f"{point.rate * point.engines:g}",
        "REQUESTS": str(point.requests * point.engines),
    }
    for word, value in words.items():
        text = text.replace(word, value)
    return prepare(load_scenario(flags=parse_yaml(text, point.load)))


def measure(point: Point) -> dict[str, float]:
    runs = [prepared(point, device) for device in LOADS[point.load].devices]
    engines = [runs[number % len(runs)].engine for number in range(point.engines)]
    simulation = Simulation(engines, OpenLoop(runs[0].requests), dispatch=DISPATCHES[point.dispatch])
    alone_s = {name: service.execution_s or 1.0 for name, service in engines[0].services.items()}
    record = replace(simulation.run(), execution_s=alone_s)
    group = summarise(record).overall
    assert group.normalised_latency is not None
    assert group.ttft_s is not None
    met = [row.answered and row.e2e_s <= SLO_SCALE * alone_s[row.service] for row in record.requests]
    return {
        "x alone": group.normalised_latency.mean,
        "p99 x": group.normalised_latency.p99,
        "TTFT s": group.ttft_s.mean,
        "p99 TTFT": group.ttft_s.p99,
        "SLO": sum(met) / len(met),
    }


def print_table(title: str, rows: Mapping[str, Mapping[str, float]]) -> None:
    heads = list(next(iter(rows.values())))
    print(f"\n| {title} | " + " | ".join(heads) + " |")
    print("|---|" + "---:|" * len(heads))
    for name, row in rows.items():
        print(f"| {name} | " + " | ".join(f"{value:.3g}" for value in row.values()) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True, help="folder of traces")
    parser.add_argument("--engines", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--requests", type=int, default=200, help="requests for each engine")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--only", nargs="*", choices=list(LOADS), default=list(LOADS), help="which loads")
    parser.add_argument("--dispatch", nargs="*", choices=NAMES, default=NAMES, help="which policies")
    arguments = parser.parse_args()
    names = list(dict.fromkeys(["round-robin", *arguments.dispatch]))
    ratios: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for load in arguments.only:
        for rate in LOADS[load].rates:
            for engines in arguments.engines:
                points = [
                    Point(load, rate, engines, arguments.requests, name, arguments.traces) for name in names
                ]
                with ProcessPoolExecutor(arguments.jobs) as pool:
                    rows = dict(zip(names, pool.map(measure, points), strict=True))
                print_table(f"{load}, {engines} engines, {rate:g}/s each", rows)
                for name, row in rows.items():
                    base = rows["round-robin"]
                    ratios[name].append(
                        {head: value / base[head] for head, value in row.items() if base[head]}
                    )
    means = {
        name: {
            head: float(np.exp(np.mean([np.log(max(each.get(head, 1.0), 1e-9)) for each in own])))
            for head in ("x alone", "p99 x", "TTFT s", "p99 TTFT", "SLO")
        }
        for name, own in ratios.items()
    }
    print_table("all, relative to round-robin", means)


if __name__ == "__main__":
    main()
