"""Simulated serving of many models on a GPU whose memory holds a few: what is on time, by residency policy.

    python -m benchmarks.many_models --traces FOLDER [--quick] [--devices a100-80 h100] [--models 10 30 100]
        [--rate 0.03] [--seconds 150] [--policies turns fcfs] [--jobs 2] [--csv FILE]
    python -m benchmarks.many_models --traces FOLDER --capacity [--requests 200] [--quick] [...]

FOLDER has ``azure_functions_sample/Azure2021_200.csv`` (invocations of functions: app, func, end_timestamp,
duration) and ``sharegpt_lengths/sharegpt_first_pair_qwen.csv`` (prompt_tokens, output_tokens). The services
take turns with models of 7 to 14 billion parameters; each has weights of its own. Requests of each come at
random, at a rate in proportion to the invocations of one function: a few models are popular, most are rarely
asked for. ``--rate`` is the mean over models, so that twice as many models are asked twice as much.

Weights come at the rate of the device's PCIe. Goals: first token after 10 s, then one every 100 ms. "on
time": share of the tokens that were due which came in time, where the tokens of an answer that was never
finished are late; "goals": share of the requests that met both goals; "wait": seconds for weights, mean over
waits. "resident" keeps all weights, where they leave memory for KV. "one-at-a-time" is fcfs with memory for
the largest model, and all that is left for KV: small models may be there in pairs.

``--capacity`` searches instead what a GPU serves with 90% of the tokens on time: how many models that are
asked 0.1 times a second each, on average, and how many requests a second for 20 models.
"""

import argparse
import csv
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np

from shoal.core import SLO, ConfigError, Request, SyntheticPrompt
from shoal.forecast.device_specs import device_spec
from shoal.forecast.model_spec import model_spec
from shoal.forecast.roofline import RooflineTimes
from shoal.kvcache import PoolLayout, plan_layout
from shoal.measure import RunRecord, summarise
from shoal.schedule import SchedulerOptions
from shoal.schedule.policies.residency import RESIDENCY_POLICIES, ResidencyPolicy
from shoal.schedule.weights_options import WeightsOptions
from shoal.simulate import EngineSpec, OpenLoop, ServiceSpec, Simulation, Watch, kv_shape

FUNCTIONS = Path("azure_functions_sample") / "Azure2021_200.csv"
LENGTHS = Path("sharegpt_lengths") / "sharegpt_first_pair_qwen.csv"
MODELS = ("llama-2-7b", "llama-3.1-8b", "qwen2.5-7b", "qwen3-8b", "mistral-7b", "qwen2.5-14b", "llama-2-13b")
GOALS = SLO(ttft_s=10.0, tpot_s=0.1)
CONTEXT = 4096
USABLE = 0.9
"""Share of the device's memory for weights and KV."""
LEAST_KV = 0.1
"""Share that KV needs where all weights stay."""
SWAP_BYTES = 128 << 30
RESIDENT = "resident"
ONE = "one-at-a-time"
ENOUGH = 0.9
"""Share of the tokens on time up to which a GPU is said to serve a load."""
MODEL_COUNTS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 25, 30, 40)
RATE_EACH = 0.1
"""Requests per second of a model, mean over models, where the number of models is searched."""
MODELS_ASKED = 20
RATES = tuple(0.005 * 1.25**step for step in range(15))
"""Requests per second of a model, mean over models, where the rate is searched."""


@dataclass(frozen=True, slots=True)
class Point:
    """One simulation."""

    device: str
    models: int
    policy: str
    rate: float
    """Requests per second, mean over models."""
    seconds: float
    """Time in which requests arrive."""
    weights_share: float
    """Share of the usable memory for weights."""
    seed: int
    traces: Path


def popularity(file: Path, models: int) -> list[float]:
    """Share of the requests that each model has: that of a function among the invocations."""
    with file.open(newline="") as rows:
        counts = sorted(Counter((row["app"], row["func"]) for row in csv.DictReader(rows)).values())
    drawn = [counts[number * len(counts) // models] for number in range(models)]
    order = np.random.default_rng(0).permutation(models).tolist()
    return [drawn[place] / sum(drawn) for place in order]


def lengths(file: Path) -> list[tuple[int, int]]:
    """Prompt and output tokens of answers that fit into the context."""
    with file.open(newline="") as rows:
        pairs = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(rows)]
    return [(prompt, output) for prompt, output in pairs if prompt and output and prompt + output <= CONTEXT]


def workload(point: Point) -> list[Request]:
    """Requests of all models by arrival, each model's at random times."""
    random = np.random.default_rng(point.seed)
    pairs = lengths(point.traces / LENGTHS)
    arrivals = []
    for number, share in enumerate(popularity(point.traces / FUNCTIONS, point.models)):
        count = random.poisson(point.rate * point.models * point.seconds * share)
        arrivals += [(time_s, number) for time_s in random.uniform(0, point.seconds, count).tolist()]
    requests = []
    for index, (time_s, number) in enumerate(sorted(arrivals)):
        prompt, output = pairs[int(random.integers(len(pairs)))]
        requests.append(
            Request(
                id=f"r{index}",
                service=f"m{number}",
                prompt=SyntheticPrompt(prompt),
                arrival_ns=round(time_s * 1e9),
                true_output_tokens=output,
                seed=index,
            )
        )
    return requests


def engine(point: Point) -> EngineSpec:
    """The engine of all models; raises ConfigError if all weights are to stay and leave too little for KV."""
    device = device_spec(point.device)
    usable = int(device.memory_bytes * USABLE)
    specs = {f"m{number}": model_spec(MODELS[number % len(MODELS)]) for number in range(point.models)}
    all_bytes = sum(spec.weight_bytes() for spec in specs.values())
    memory = min(int(usable * point.weights_share), all_bytes)
    if point.policy == ONE:
        memory = max(spec.weight_bytes() for spec in specs.values())
    if point.policy == RESIDENT:
        memory = all_bytes
        if memory > usable * (1 - LEAST_KV):
            raise ConfigError("they do not fit")
    times = {name: RooflineTimes(model_spec(name), device) for name in MODELS}
    layout: PoolLayout = plan_layout(
        {name: kv_shape(spec, 1, False) for name, spec in specs.items()},
        memory_bytes=usable - memory,
        block_size=16,
        kind="merged",
    )
    limited = point.policy != RESIDENT
    return EngineSpec(
        services={
            name: ServiceSpec(
                times=times[spec.name],
                context_tokens=CONTEXT,
                slo=GOALS,
                weights=name,
                weight_bytes=spec.weight_bytes(),
            )
            for name, spec in specs.items()
        },
        layout=layout,
        scheduler=SchedulerOptions(),
        host=layout.resized(SWAP_BYTES),
        weights=WeightsOptions(memory_bytes=memory, policy=_policy(point.policy))
        if limited
        else WeightsOptions(),
        fetch_bytes_per_s=device.host_bytes_per_s,
    )


def _policy(name: str) -> ResidencyPolicy:
    return RESIDENCY_POLICIES["fcfs" if name == ONE else name]()


def measure(point: Point) -> dict[str, float] | None:
    """Figures of one simulation; None if all weights are to stay and do not fit."""
    try:
        spec = engine(point)
    except ConfigError:
        return None
    requests = workload(point)
    began = perf_counter()
    record = Simulation([spec], OpenLoop(requests), watch=Watch(sample_s=1e3)).run()
    return {**figures(record, requests), "took_s": perf_counter() - began}


def figures(record: RunRecord, requests: Sequence[Request]) -> dict[str, float]:
    """The figures of a run, by column."""
    summary = summarise(record)
    group, weights = summary.overall, record.engines[0].weights.values()
    wanted = sum(request.true_output_tokens or 0 for request in requests)
    on_time = sum(row.tokens_on_time or 0 for row in record.requests)
    waits = sum(each.waits for each in weights)
    return {
        "requests": len(requests),
        "answered": group.answered,
        "on_time": on_time / wanted if wanted else 1.0,
        "goals": group.slo_attainment or 0.0,
        "goodput": group.goodput or 0.0,
        "tokens_per_s": group.output_tokens_per_s or 0.0,
        "ttft_s": group.ttft_s.mean if group.ttft_s else 0.0,
        "ttft_p99_s": group.ttft_s.p99 if group.ttft_s else 0.0,
        "gap_p99_s": group.largest_gap_s.p99 if group.largest_gap_s else 0.0,
        "fetches": sum(each.fetches for each in weights),
        "evictions": sum(each.evictions for each in weights),
        "fetched_gb": sum(each.fetches * each.num_bytes for each in weights) / 1e9,
        "waits": waits,
        "wait_s": sum(each.waiting_s for each in weights) / waits if waits else 0.0,
        "longest_wait_s": max((each.longest_wait_s for each in weights), default=0.0),
        "end_s": summary.duration_s,
    }


def print_row(point: Point, row: Mapping[str, float]) -> None:
    """One simulation."""
    rate = row["requests"] / row["end_s"] if row["end_s"] else 0.0
    print(
        f"| {point.device} | {point.models} | {point.policy} | {rate:.2f} | {row['on_time']:.1%} | "
        f"{row['goals']:.1%} | {row['goodput']:.2f} | {row['ttft_s']:.2f} | {row['ttft_p99_s']:.1f} | "
        f"{row['gap_p99_s']:.1f} | {row['fetches']:,.0f} | {row['wait_s']:.2f} |",
        flush=True,
    )


def on_time(point: Point) -> float:
    """Share of the tokens that came in time."""
    row = measure(point)
    assert row is not None, "weights come and go"
    return row["on_time"]


def most(share: Callable[[int], float], count: int) -> tuple[int, float, float]:
    """The last of ``count`` loads, each heavier than the one before, that is served, by bisection.

    -1: none is. Also its share, and that of the next one (0 if there is none).
    """
    low, high, found = -1, count, {-1: 1.0, count: 0.0}
    while high - low > 1:
        middle = (low + high) // 2
        found[middle] = share(middle)
        low, high = (middle, high) if found[middle] >= ENOUGH else (low, middle)
    return low, found[low], found[high]


def capacity(point: Point, requests: int) -> tuple[int, float]:
    """Models at ``RATE_EACH``, and requests per second for ``MODELS_ASKED``, that a GPU serves.

    requests: in each simulation, about. At another rate the same ones come sooner or later.
    """

    def share(models: int, rate: float) -> float:
        return on_time(replace(point, models=models, rate=rate, seconds=requests / (rate * models)))

    place, _, _ = most(lambda at: share(MODEL_COUNTS[at], RATE_EACH), len(MODEL_COUNTS))
    models = MODEL_COUNTS[place] if place >= 0 else 0
    place, enough, less = most(lambda at: share(MODELS_ASKED, RATES[at]), len(RATES))
    rate = RATES[place] if place >= 0 else 0.0
    if 0 <= place < len(RATES) - 1:
        rate += (RATES[place + 1] - rate) * (enough - ENOUGH) / (enough - less)
    return models, rate * MODELS_ASKED


def print_capacities(points: Sequence[Point], requests: int, jobs: int) -> None:
    """A row for each point: what its device serves with its policy."""
    print(f"| device | policy | models at {RATE_EACH}/s each | requests/s for {MODELS_ASKED} models |")
    print("|---|---|---:|---:|")
    with ProcessPoolExecutor(jobs) as pool:
        for point, (models, rate) in zip(
            points, pool.map(partial(capacity, requests=requests), points), strict=True
        ):
            print(f"| {point.device} | {point.policy} | {models} | {rate:.2f} |", flush=True)


def write_csv(file: Path, points: Sequence[Point], rows: Sequence[dict[str, float] | None]) -> None:
    """One line for each simulation that there was."""
    with file.open("w", newline="") as opened:
        writer = None
        for point, row in zip(points, rows, strict=True):
            if row is None:
                continue
            cells = {
                "device": point.device,
                "models": point.models,
                "policy": point.policy,
                "rate": point.rate,
            }
            if writer is None:
                writer = csv.DictWriter(opened, [*cells, *row])
                writer.writeheader()
            writer.writerow({**cells, **row})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    policies = [RESIDENT, ONE, "fcfs", "collate", "turns", "token-deadlines"]
    parser.add_argument("--traces", type=Path, required=True, help="folder of traces")
    parser.add_argument("--quick", action="store_true", help="one device, few models, a minute of requests")
    parser.add_argument("--devices", nargs="*", default=["a100-80", "h100"])
    parser.add_argument("--models", type=int, nargs="*", default=[10, 30, 100])
    parser.add_argument("--rate", type=float, default=0.03, help="requests per second of a model, on average")
    parser.add_argument("--seconds", type=float, default=150.0, help="time in which requests arrive")
    parser.add_argument("--weights-share", type=float, default=0.6, help="of the usable memory")
    parser.add_argument("--policies", nargs="*", choices=policies, default=policies)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="simulations at a time")
    parser.add_argument("--capacity", action="store_true", help="search what a GPU serves in time")
    parser.add_argument("--requests", type=int, default=200, help="of each simulation for --capacity")
    parser.add_argument("--csv", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    missing = [file for file in (FUNCTIONS, LENGTHS) if not (arguments.traces / file).is_file()]
    if missing:
        print(f"skipped: {arguments.traces} has no {' and no '.join(map(str, missing))}")
        return
    if arguments.quick:
        arguments.devices, arguments.models, arguments.seconds = ["a100-80"], [4, 10, 20], 60.0
    if arguments.capacity:
        arguments.models = [MODELS_ASKED]
        if arguments.quick:
            arguments.requests = 30
        arguments.policies = [policy for policy in arguments.policies if policy != RESIDENT]
    points = [
        Point(
            device,
            models,
            policy,
            arguments.rate,
            arguments.seconds,
            arguments.weights_share,
            arguments.seed,
            arguments.traces,
        )
        for device in arguments.devices
        for models in arguments.models
        for policy in arguments.policies
    ]
    if arguments.capacity:
        print_capacities(points, arguments.requests, arguments.jobs)
        return
    heads = (
        "device | models | policy | requests/s | on time | goals | goodput | TTFT | p99 | gap p99 | fetches"
    )
    print(f"| {heads} | wait |\n|---|---:|---|" + "---:|" * 9)
    rows = []
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for point, row in zip(points, pool.map(measure, points), strict=True):
            rows.append(row)
            if row is not None:
                print_row(point, row)
    if arguments.csv is not None:
        write_csv(arguments.csv, points, rows)


if __name__ == "__main__":
    main()
