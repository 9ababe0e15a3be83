"""Which scheduler should be the default: latency, throughput and frozen streams of many, in simulation.

    python benchmarks/default_policy.py [--quick] [--jobs 2] [--traces FOLDER] [--picture FILE] [--only NAME]

One and several services, from light load to overload. For every scheduler: requests per second, mean
time to the first token, mean and 99th percentile of end-to-end latency, of latency in units of what the mean request
takes alone, and of the largest gap between two tokens of an answer (MTPOT). Preemptions, and answers with a gap
above the bound.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.config.nodes import parse_yaml
from shoal.config.presets import PRESETS
from shoal.config.scenario_file import load_scenario
from shoal.config.scenario_run import prepare
from shoal.config.units import LONGEST_S
from shoal.measure import summarise
from shoal.schedule import Aggressive, Conservative, PastFuture, SchedulerOptions

ONE = """
latency: {{roofline: {{model: llama-3.1-8b, device: a100-80}}}}
services: [{{name: chat, context: 8192}}]
workload: {{lengths: sharegpt, rate: {rate}, requests: {requests}, seed: 1}}
"""
"""One service on a large device."""
SMALL = """
latency: {{roofline: {{model: llama-3.1-8b, device: a100-80}}}}
kv_cache: {{tokens: 40000}}
services: [{{name: chat, context: 8192}}]
workload: {{lengths: sharegpt, rate: {rate}, requests: {requests}, seed: 1}}
"""
"""The same with little memory."""
TWO = """
latency: {{roofline: {{device: a100-80}}}}
services: [{{name: chat, model: llama-2-7b, context: 4096}}, {{name: long, model: llama-2-13b, context: 4096}}]
workload: {{lengths: sharegpt, arrivals: {{process: gamma, rate: {rate}, cv: 3}}, requests: {requests}, seed: 1,
  services: {{chat: 1, long: 1}}}}
"""
FOUR = """
latency: {{roofline: {{device: h100}}}}
kv_cache: {{memory: 16GiB}}
services: [{{name: small, model: qwen2.5-7b}}, {{name: chat, model: llama-3.1-8b}}, {{name: code, model: llama-2-13b}}]
workload: {{lengths: sharegpt, rate: {rate}, requests: {requests}, seed: 1, services: {{small: 6, chat: 3, code: 1}}}}
"""
LOADS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "one": (ONE, (25, 60)),
    "small": (SMALL, (8, 16)),
    "two": (TWO, (2, 6, 12)),
    "three": (FOUR, (10, 30, 60)),
}


def schedulers() -> dict[str, SchedulerOptions]:
    """What is compared, by name."""
    shoal = SchedulerOptions()
    never = replace(shoal, preempt_for_waiting="never", max_token_gap_s=LONGEST_S)
    past_future = PastFuture()
    return {
        "vllm": PRESETS["vllm"].scheduler,
        "seallm-join": PRESETS["seallm-join"].scheduler,
        "less-urgent": replace(never, preempt_for_waiting="less-urgent"),
        "gain": replace(never, preempt_for_waiting="gain"),
        "never": never,
        "never 5s": replace(never, max_token_gap_s=5.0),
        "never 2s": replace(never, max_token_gap_s=2.0),
        "never 1s": replace(never, max_token_gap_s=1.0),
        "never 0.5s": replace(never, max_token_gap_s=0.5),
        "gain 1s": replace(shoal, max_token_gap_s=1.0),
        "gain 1s past-future": replace(shoal, admission=past_future),
        "pf": replace(shoal, admission=PastFuture(reserved=0.0)),
        "pf newest": replace(shoal, admission=PastFuture(reserved=0.0), victim="newest"),
        "newest": replace(shoal, victim="newest"),
        "fewest": replace(shoal, victim="fewest-tokens"),
        "w90": replace(shoal, admission=Aggressive(watermark=0.9)),
        "w80": replace(shoal, admission=Aggressive(watermark=0.8)),
        "w80 newest": replace(shoal, admission=Aggressive(watermark=0.8), victim="newest"),
        "conservative": replace(shoal, admission=Conservative()),
        "never 1s past-future": replace(never, max_token_gap_s=1.0, admission=past_future),
    }


@dataclass(frozen=True, slots=True)
class Point:
    """One run."""

    load: str
    text: str
    rate: float
    name: str


def measure(point: Point) -> dict[str, float]:
    scenario = load_scenario(flags=parse_yaml(point.text, point.load))
    scenario = replace(scenario, scheduler=schedulers()[point.name])
    summary = summarise(prepare(scenario).run())
    group = summary.overall
    assert group.ttft_s and group.e2e_s and group.normalised_latency and group.largest_gap_s
    return {
        "req/s": group.throughput or 0.0,
        "TTFT": group.ttft_s.mean,
        "E2E": group.e2e_s.mean,
        "E2E p99": group.e2e_s.p99,
        "x alone": group.normalised_latency.mean,
        "x p99": group.normalised_latency.p99,
        "gap": group.largest_gap_s.mean,
        "gap p99": group.largest_gap_s.p99,
        "preempted": group.evictions,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--systems", nargs="*")
    arguments = parser.parse_args()
    names = arguments.systems or list(schedulers())
    for load, (text, rates) in LOADS.items():
        if arguments.only and load not in arguments.only:
            continue
        for rate in rates:
            points = [Point(load, text.format(rate=rate, requests=arguments.requests), rate, name) for name in names]
            with ProcessPoolExecutor(arguments.jobs) as pool:
                rows = list(pool.map(measure, points))
            print(f"\n{load} at {rate}/s", flush=True)
            for name, row in zip(names, rows, strict=True):
                print(f"{name:22}", "  ".join(f"{key} {value:8.3f}" for key, value in row.items()), flush=True)
