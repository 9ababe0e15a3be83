"""Simulated comparison of schedulers for the choice of the default: latency, throughput and stalled streams.

    python -m benchmarks.default_policy [--jobs 2] [--requests 1000] [--only skewed] [--traces FOLDER]

One and several services, from light load to overload, with much and with little memory. For every scheduler:
answers per second, mean TTFT, mean and 99th percentile of end-to-end latency, of latency relative to the
service's mean request alone ("x alone"), and of the largest inter-token latency (MTPOT); preemptions. A star
marks schedulers that no other beats in both mean x alone and p99 gap.
"""

import argparse
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shoal.config.presets import PRESETS
from shoal.config.scenario_file import load_scenario
from shoal.config.scenario_run import prepare
from shoal.config.setting_tree import parse_yaml
from shoal.core import Request, SyntheticPrompt
from shoal.core.units import LONGEST_S
from shoal.forecast import StepRows
from shoal.forecast.device_specs import device_spec
from shoal.forecast.model_spec import model_spec
from shoal.forecast.roofline import RooflineTimes
from shoal.kvcache import KVShape, LayerShape, plan_layout
from shoal.measure import Panel, RunRecord, Series, save_plot, summarise
from shoal.schedule import Aggressive, PastFuture, SchedulerOptions
from shoal.simulate import EngineSpec, OpenLoop, ServiceSpec, Simulation

ONE = """
latency: {{roofline: {{model: llama-3.1-8b, device: a100-80}}}}
services: [{{name: chat, context: 8192}}]
workload: {{lengths: sharegpt, rate: {rate}, requests: {requests}, seed: 1}}
"""
SMALL = """
latency: {{roofline: {{model: llama-3.1-8b, device: a100-80}}}}
kv_cache: {{tokens: 40000}}
services: [{{name: chat, context: 8192}}]
workload: {{lengths: sharegpt, rate: {rate}, requests: {requests}, seed: 1}}
"""
TWO = """
latency: {{roofline: {{device: a100-80}}}}
services:
  - {{name: chat, model: llama-2-7b, context: 4096}}
  - {{name: long, model: llama-2-13b, context: 4096}}
workload:
  {{lengths: sharegpt, arrivals: {{process: gamma, rate: {rate}, cv: 3}}, requests: {requests}, seed: 1,
   services: {{chat: 1, long: 1}}}}
"""
TRACED = """
latency: {{{{roofline: {{{{model: llama-3.1-8b, device: a100-80}}}}}}}}
services: [{{{{name: chat}}}}]
workload: {{{{trace: '{{traces}}/{file}', rate: {{rate}}, requests: {{requests}}}}}}
"""
ARENA = """
latency: {{roofline: {{device: a100-80}}}}
kv_cache: {{memory: 20GiB}}
services:
  - {{name: chat, model: llama-2-7b, context: 4096}}
  - {{name: code, model: llama-3.1-8b}}
  - {{name: long, model: llama-2-13b, context: 4096}}
workload: {{trace: '{traces}/vtc_arena/arena_multiclient_trace.csv', rate: {rate}, requests: {requests}}}
"""
"""The trace's clients are distributed over the services."""
TRACED_LOADS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "azure conversation": (
        TRACED.format(file="azure_llm_2023/AzureLLMInferenceTrace_conv.csv"),
        (4, 12),
    ),
    "azure code": (TRACED.format(file="azure_llm_2023/AzureLLMInferenceTrace_code.csv"), (1, 3)),
    "mooncake": (TRACED.format(file="mooncake/conversation_trace.jsonl"), (0.2, 0.5)),
    "arena, three services": (ARENA, (3, 6, 10)),
}
"""Scenario and rates of the loads that need ``--traces``."""
SKEWED_MODELS = {"short": "llama-3.1-8b", "long": "llama-2-13b"}
SKEWED_MEANS = {"short": (70, 14), "long": (800, 650)}
"""Prompt and output tokens of the mean request."""


def schedulers() -> dict[str, SchedulerOptions]:
    """Compared schedulers by name."""
    shoal = SchedulerOptions()
    unbounded = replace(shoal, max_token_gap_s=LONGEST_S)
    return {
        "vllm": PRESETS["vllm"].scheduler,
        "alpaserve": PRESETS["alpaserve"].scheduler,
        "seallm-join": PRESETS["seallm-join"].scheduler,
        "less-urgent": replace(unbounded, preempt_for_waiting="less-urgent"),
        "never": replace(unbounded, preempt_for_waiting="never"),
        "gain": unbounded,
        "gain, 1 s (shoal)": shoal,
        "gain, 0.3 s": replace(shoal, max_token_gap_s=0.3),
        "watermark 80%": replace(shoal, admission=Aggressive(watermark=0.8)),
        "past-future": replace(shoal, admission=PastFuture()),
    }


@dataclass(frozen=True, slots=True)
class Point:
    """One run."""

    load: str
    rate: float
    """Requests per second."""
    requests: int
    scheduler: str
    traces: Path | None = None


def from_text(text: str) -> Callable[[Point], RunRecord]:
    """A function that runs a scenario."""

    def run(point: Point) -> RunRecord:
        written = text.format(rate=point.rate, requests=point.requests, traces=point.traces)
        scenario = load_scenario(flags=parse_yaml(written, point.load))
        return prepare(replace(scenario, scheduler=schedulers()[point.scheduler])).run()

    return run


def skewed(memory_gib: float, share: float) -> Callable[[Point], RunRecord]:
    """A function that runs two services whose lengths differ eightyfold; share: of short requests."""

    def run(point: Point) -> RunRecord:
        device = device_spec("a100-80")
        models = {name: model_spec(model) for name, model in SKEWED_MODELS.items()}
        times = {name: RooflineTimes(model, device) for name, model in models.items()}
        alone_s = {}
        for name, (prompt, output) in SKEWED_MEANS.items():
            prefill_s = times[name].step_time(StepRows(0, 0, ((prompt, 0),), 1))
            alone_s[name] = prefill_s + float(times[name].decode_times(1, prompt + 1, output - 1).sum())
        shapes = {
            name: KVShape(
                "float16", (LayerShape(model.kv_heads, model.head_dim, model.head_dim),) * model.layers
            )
            for name, model in models.items()
        }
        layout = plan_layout(shapes, memory_bytes=int(memory_gib * 2**30), block_size=16)
        services = {
            name: ServiceSpec(times=times[name], context_tokens=4096, execution_s=alone_s[name])
            for name in models
        }
        scheduler = schedulers()[point.scheduler]
        engine = EngineSpec(services=services, layout=layout, scheduler=scheduler, host=layout)
        requests = skewed_requests(point, share)
        return replace(Simulation([engine], OpenLoop(requests)).run(), execution_s=alone_s)

    return run


def skewed_requests(point: Point, share: float) -> list[Request]:
    """Poisson arrivals; short requests are uniform, long ones lognormal."""
    random = np.random.default_rng(1)
    arrivals_s = np.cumsum(random.exponential(1 / point.rate, point.requests))
    requests = []
    for number, arrival_s in enumerate(arrivals_s.tolist()):
        if random.random() < share:
            service, prompt, output = "short", random.integers(20, 120), random.integers(4, 24)
        else:
            service, prompt = "long", random.integers(100, 1500)
            output = np.clip(random.lognormal(6.3, 0.7), 50, 2000)
        requests.append(
            Request(
                id=f"r{number}",
                service=service,
                prompt=SyntheticPrompt(int(prompt)),
                true_output_tokens=int(output),
                arrival_ns=round(arrival_s * 1e9),
            )
        )
    return requests


LOADS: Mapping[str, tuple[Callable[[Point], RunRecord], tuple[float, ...]]] = {
    "one": (from_text(ONE), (10, 25, 60)),
    "one, 40,000 tokens": (from_text(SMALL), (4, 8, 16)),
    "two chats": (from_text(TWO), (2, 6, 12)),
    "skewed": (skewed(20, 0.95), (20, 60)),
    "skewed, long": (skewed(20, 0.9), (8, 20)),
    "skewed, 4 GiB": (skewed(4, 0.95), (10, 40)),
}
LOADS = {**LOADS, **{name: (from_text(text), rates) for name, (text, rates) in TRACED_LOADS.items()}}


def measure(point: Point) -> dict[str, float]:
    group = summarise(LOADS[point.load][0](point)).overall
    spreads = (group.ttft_s, group.e2e_s, group.normalised_latency, group.largest_gap_s)
    ttft, e2e, alone, gap = (spread for spread in spreads if spread is not None)
    return {
        "req/s": group.throughput or 0.0,
        "TTFT s": ttft.mean,
        "E2E s": e2e.mean,
        "p99 E2E": e2e.p99,
        "x alone": alone.mean,
        "p99 x": alone.p99,
        "gap s": gap.mean,
        "p99 gap": gap.p99,
        "preempted": float(group.preemptions),
    }


def is_best(row: Mapping[str, float], rows: Mapping[str, Mapping[str, float]]) -> bool:
    """Whether no row has both a lower mean latency and a lower p99 gap (by more than 1%)."""
    return not any(
        other["x alone"] < 0.99 * row["x alone"] and other["p99 gap"] < 0.99 * row["p99 gap"]
        for other in rows.values()
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000, help="requests of each run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--traces", type=Path, help="folder of traces, for the loads that replay one")
    parser.add_argument("--only", nargs="*", choices=list(LOADS), help="which loads")
    parser.add_argument("--picture", help="where to draw latency against gaps (.svg or .png)")
    arguments = parser.parse_args()
    names = list(schedulers())
    loads = arguments.only or [load for load in LOADS if arguments.traces or load not in TRACED_LOADS]
    panels = []
    for load in loads:
        for rate in LOADS[load][1]:
            points = [Point(load, rate, arguments.requests, name, arguments.traces) for name in names]
            with ProcessPoolExecutor(arguments.jobs) as pool:
                rows = dict(zip(names, pool.map(measure, points), strict=True))
            heads = list(rows["vllm"])
            print(f"\n| {load}, {rate:g}/s | " + " | ".join(heads) + " | |")
            print("|---|" + "---:|" * len(heads) + "---|")
            for name, row in rows.items():
                cells = " | ".join(f"{value:.3g}" for value in row.values())
                print(f"| {name} | {cells} | {'*' if is_best(row, rows) else ''} |", flush=True)
        series = [
            Series(name, [row["x alone"]], [row["p99 gap"]], colour=number)
            for number, (name, row) in enumerate(rows.items())
        ]
        title = f"{load}, {rate:g} requests/s"
        panels.append(
            Panel(
                title=title, series=series, log=True, x_label="x alone", y_label="p99 of the largest gap, s"
            )
        )
    if arguments.picture:
        save_plot(Path(arguments.picture), [panels[at : at + 3] for at in range(0, len(panels), 3)])


if __name__ == "__main__":
    main()
