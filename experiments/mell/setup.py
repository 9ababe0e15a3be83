"""What all of Mell's experiments share: devices, speeds, policies, and a run's figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

import numpy as np

from experiments.mell.workload import AZURE, WORKLOADS, azure_arrivals, lengths, mell_requests
from experiments.result import Effort, Value
from shoal.cluster.packing import (
    NEEDS,
    PACKERS,
    BestFit,
    DeviceGroup,
    LazyMell,
    LoadBalance,
    Packer,
    Packing,
    WorstFit,
)
from shoal.forecast import LengthHistory, RooflineTimes, StepRows
from shoal.forecast.device_specs import device_spec
from shoal.forecast.model_spec import model_spec
from shoal.simulate.packed_cluster import EngineSpeed, GrowingRequest, PackedCluster, PackedRun

PAPER = "Mell (Liu et al., 2025: Memory-Efficient LLM Serving via Multi-GPU KV Cache Management)"
SECONDS, QUICK_SECONDS = 600.0, 60.0
SEEDS = 10
WARM_UP_S = 100.0
MEMORY_SHARE = 0.9
MANY_GROUPS = 200
THRESHOLD = 0.2
SLO_SCALE = 2.0
_HISTORY_SEED = 1_000_003
_STRIDE = 64


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model on one kind of device."""

    capacity: int
    """Tokens of KV in its memory."""
    token_bytes: int
    """KV of a token."""
    weight_bytes: int
    """The model."""
    memory_bytes: int
    """Of the device."""
    speed: EngineSpeed
    """Step times."""


DEVICES: Mapping[str, tuple[str, str]] = {
    "llama2-7b": ("llama-2-7b", "rtx-4090"),
    "llama2-13b": ("llama-2-13b", "a100-40"),
}


@cache
def deployment(model: str) -> Deployment:
    """The paper's: LLaMA2 7B on 24 GB, 13B on 40 GB."""
    name, on = DEVICES[model]
    spec, device = model_spec(name), device_spec(on)
    times = RooflineTimes(spec, device)
    step_s, longer_s = times.step_time(StepRows(5, 0)), times.step_time(StepRows(5, 10_000))
    prefill_s = times.step_time(StepRows(0, 0, ((2048, 0),))) / 2048
    weights = spec.weight_bytes()
    capacity = int(MEMORY_SHARE * device.memory_bytes - weights) // spec.kv_bytes_per_token()
    speed = EngineSpeed(step_s, (longer_s - step_s) / 10_000, prefill_s)
    return Deployment(capacity, spec.kv_bytes_per_token(), weights, device.memory_bytes, speed)


@dataclass(frozen=True, slots=True)
class Policy:
    """A packer in one of its readings."""

    policy: str
    """Name of the packer."""
    fits: str = "present"
    """What a request takes up where it is placed."""
    draining: bool = False
    """Load balancing empties groups."""
    threshold: float = THRESHOLD
    """Loads that load balancing takes as alike."""
    headroom: float | None = None
    """Share that our Mell leaves free; None for its default."""

    def packer(self, packing: Packing) -> Packer:
        """It, on these groups."""
        need = NEEDS[self.fits]
        if self.policy == "load-balance":
            return LoadBalance(packing, need=need, threshold=self.threshold, draining=self.draining)
        if self.policy in _FITS:
            return _FITS[self.policy](packing, need=need)
        if self.headroom is not None:
            return LazyMell(packing, headroom=self.headroom, by_forecast=self.policy == "mell-forecast")
        return PACKERS[self.policy](packing)

    @property
    def config(self) -> dict[str, Value]:
        """As it is listed."""
        return {"policy": self.policy, "fits": self.fits, "draining": self.draining}


_FITS: Mapping[str, Callable[..., Packer]] = {"best-fit": BestFit, "worst-fit": WorstFit}
BASELINES = ("load-balance", "best-fit", "worst-fit")
MELLS = ("mell", "mell-forecast", "mell-eager", "mell-literal")
POLICIES = (
    *(Policy(name, fits) for name in ("best-fit", "worst-fit", "load-balance") for fits in NEEDS),
    Policy("load-balance", draining=True),
    *(Policy(name) for name in MELLS),
)


@dataclass(frozen=True, slots=True)
class Point:
    """A run, but for its seed."""

    workload: str
    """One of ``WORKLOADS``."""
    model: str
    """One of ``DEVICES``."""
    policy: Policy
    """What packs."""
    seconds: float
    """How long requests come."""
    seeds: int
    """How many runs are averaged."""
    epoch_s: float = 1.0
    """How often it packs."""
    batched: bool = True
    """Operations of an epoch are given together."""
    groups: int = MANY_GROUPS
    """Devices there are."""
    waits: bool = True
    """What fits nowhere waits."""


class Expectations:
    """Response lengths as a service would expect them that has answered 1,000 requests before."""

    def __init__(self, capacity: int) -> None:
        _, outputs = lengths(1000, _HISTORY_SEED)
        history = LengthHistory(capacity)
        for length in np.minimum(outputs, capacity):
            history.record(int(length))
        self.mean = round(history.mean or 0)
        """Mean response."""
        generated = np.arange(0, capacity + _STRIDE, _STRIDE, dtype=np.int64)
        most = np.maximum(capacity, generated + 1)
        beyond = history.distribution(np.zeros(0, dtype=np.int64)).mean_beyond(generated, most)
        self._beyond = [round(float(length)) for length in beyond]

    def mean_growth(self, request: GrowingRequest, generated: int) -> int:
        """The mean, whatever was generated."""
        return max(self.mean, generated)

    def forecast(self, request: GrowingRequest, generated: int) -> int:
        """The mean of the lengths beyond what was generated."""
        return max(self._beyond[generated // _STRIDE], generated + 1)


def simulate(point: Point, seed: int) -> PackedRun:
    """One run."""
    on = deployment(point.model)
    requests = mell_requests(point.workload, point.seconds, seed, on.capacity)
    groups = [DeviceGroup(name=f"g{number:03}", capacity=on.capacity) for number in range(point.groups)]
    expectations = _expectations(on.capacity)
    reserving = point.policy.fits == "reserve-mean"
    cluster = PackedCluster(
        point.policy.packer(Packing(groups)),
        on.speed,
        epoch_s=point.epoch_s,
        expected=expectations.mean_growth if reserving else expectations.forecast,
        batched=point.batched,
        waits=point.waits,
    )
    return cluster.run(requests)


_expectations = cache(Expectations)


def figures(point: Point, run: PackedRun) -> dict[str, float]:
    """A run's metrics; means are over the time in which requests come, without the first ``WARM_UP_S``."""
    on = deployment(point.model)
    first, last = (round(at / point.epoch_s) for at in (min(WARM_UP_S, point.seconds / 4), point.seconds))
    window = slice(first, last)
    used, capacity, active = (sum(series[window]) for series in (run.used, run.capacity, run.active))
    in_use = used * on.token_bytes + active * on.weight_bytes
    seconds = point.epoch_s * len(run.active[window])
    latencies = run.latencies
    return {
        "peak_devices": max(run.active),
        "mean_devices": active / len(run.active[window]),
        "lower_bound_peak": max(run.fewest),
        "migrations_per_s": sum(run.migrations[window]) / seconds,
        "kv_utilisation": used / max(capacity, 1),
        "memory_in_use": in_use / max(active * on.memory_bytes, 1),
        "preemptions_per_request": run.preemptions / max(run.requests, 1),
        "slo_attainment": sum(latency <= SLO_SCALE for latency in latencies) / max(len(latencies), 1),
        "served": run.finished / max(run.requests, 1),
    }


def measure(point: Point) -> dict[str, float]:
    """Means over the seeds."""
    runs = [figures(point, simulate(point, seed)) for seed in range(point.seeds)]
    return {name: fmean(run[name] for run in runs) for name in runs[0]}


def workloads(effort: Effort) -> Sequence[str]:
    """Those that can be run: Azure's needs its trace."""
    here = WORKLOADS if azure_arrivals() is not None else tuple(name for name in WORKLOADS if name != AZURE)
    return effort.choose(here, here[2:3])


def models(effort: Effort) -> Sequence[str]:
    """Of the experiment."""
    return effort.choose(tuple(DEVICES), ("llama2-7b",))


def size_of(effort: Effort) -> tuple[float, int]:
    """Seconds of arrivals, and how many seeds."""
    return effort.choose((SECONDS, SEEDS), (QUICK_SECONDS, 1))


def assumptions() -> list[str]:
    """What the paper does not print."""
    lines = [
        "From the paper: LLaMA2-7B on 24 GB (RTX 4090) and 13B on 40 GB (A100), conversations ten times as "
        "long, Poisson arrivals of 0.5, 0.8 and 1.1 per second, a device activated when an arrival fits "
        "nowhere and ended when empty.",
        f"Memory for KV: {MEMORY_SHARE:.0%} of the device less the weights: "
        + ", ".join(f"{deployment(model).capacity:,} tokens ({model})" for model in DEVICES)
        + ". Step times: the roofline model; a step reads the weights and the KV.",
        "Lengths: neither data set is at hand. Lognormal with the means that their papers print "
        "(LMSYS-Chat-1M 69.5 and 214.5 tokens, WildChat 295.6 and 441.3), half of each; the spreads are "
        "guesses. Cut so that a request fits on a device: prompts at half of its KV, prompt and response "
        "at 7/8.",
        f"{SECONDS:.0f} s of arrivals, means over {SEEDS} seeds and over the time after the first "
        f"{WARM_UP_S:.0f} s; peaks over everything. Packing every second, at the sizes of a second later.",
        "Without migration, growth that finds no room preempts whoever came last, who is dispatched again"
        " in the next epoch and computed anew.",
        "fits: a request takes up its present size, or (reserve-mean) at least its prompt and the mean "
        "response.",
        f"Load balancing takes loads as alike that differ by up to {THRESHOLD} of a device. slo_attainment: "
        f"answered within {SLO_SCALE:g} times the time alone on a device.",
        "kv_utilisation is of the memory for KV; memory_in_use is KV and weights, of all of the device's.",
    ]
    if azure_arrivals() is None:
        return [*lines, "Skipped: azure, whose trace was not found; SHOAL_TRACES names the folder of traces."]
    return [
        *lines,
        "azure: arrival times of the conversation trace of 2023, thinned to 1.1 per second, a random part"
        " for each seed; lengths as above.",
    ]
