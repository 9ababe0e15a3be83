"""Shared set-up of Mell's experiments: devices, speeds, packing policies, and a run's figures."""

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
    PRINTED,
    BestFit,
    ClassMell,
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
class ModelOnDevice:
    capacity: int
    """KV tokens."""
    token_bytes: int
    """KV of a token."""
    weight_bytes: int
    memory_bytes: int
    """Of the device."""
    speed: EngineSpeed


DEVICES: Mapping[str, tuple[str, str]] = {
    "llama2-7b": ("llama-2-7b", "rtx-4090"),
    "llama2-13b": ("llama-2-13b", "a100-40"),
}


@cache
def model_on_device(model: str) -> ModelOnDevice:
    """LLaMA2 7B on 24 GB, or 13B on 40 GB, as in the paper."""
    name, device_name = DEVICES[model]
    spec, device = model_spec(name), device_spec(device_name)
    times = RooflineTimes(spec, device)
    step_s, longer_s = times.step_time(StepRows(5, 0)), times.step_time(StepRows(5, 10_000))
    prefill_s = times.step_time(StepRows(0, 0, ((2048, 0),))) / 2048
    weights = spec.weight_bytes()
    capacity = int(MEMORY_SHARE * device.memory_bytes - weights) // spec.kv_bytes_per_token()
    speed = EngineSpeed(step_s, (longer_s - step_s) / 10_000, prefill_s)
    return ModelOnDevice(capacity, spec.kv_bytes_per_token(), weights, device.memory_bytes, speed)


@dataclass(frozen=True, slots=True)
class Policy:
    """A packer with its options."""

    policy: str
    """Name of the packer."""
    fits: str = "present"
    """The size that a request is placed by, one of ``NEEDS``."""
    draining: bool = False
    """Whether load balancing empties groups."""
    threshold: float = THRESHOLD
    """Difference of loads that load balancing tolerates."""
    headroom: float | None = None
    """Share that our Mell leaves free; None: its default."""

    def packer(self, packing: Packing) -> Packer:
        need = NEEDS[self.fits]
        if self.policy == "load-balance":
            return LoadBalance(packing, need=need, threshold=self.threshold, draining=self.draining)
        if self.policy in _FITS:
            return _FITS[self.policy](packing, need=need)
        if self.headroom is not None:
            return LazyMell(packing, headroom=self.headroom, by_forecast=self.policy == "mell-forecast")
        if self.policy == DEPARTING:
            return ClassMell(packing, takes_tiny=PRINTED, departs_others=True)
        return PACKERS[self.policy](packing)

    @property
    def config(self) -> dict[str, Value]:
        return {"policy": self.policy, "fits": self.fits, "draining": self.draining}


_FITS: Mapping[str, Callable[..., Packer]] = {"best-fit": BestFit, "worst-fit": WorstFit}
BASELINES = ("load-balance", "best-fit", "worst-fit")
DEPARTING = "mell-departing"
"""``mell-literal``, where all requests but the largest leave an overloaded L group."""
MELLS = ("mell", "mell-forecast", "mell-eager", "mell-literal", DEPARTING)
POLICIES = (
    *(Policy(name, fits) for name in ("best-fit", "worst-fit", "load-balance") for fits in NEEDS),
    Policy("load-balance", draining=True),
    *(Policy(name) for name in MELLS),
)


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration, averaged over seeds."""

    workload: str
    """One of ``WORKLOADS``."""
    model: str
    """One of ``DEVICES``."""
    policy: Policy
    seconds: float
    """Length of the arrivals."""
    seeds: int
    epoch_s: float = 1.0
    """Time between two packings."""
    batched: bool = True
    """Operations of an epoch are handled together."""
    groups: int = MANY_GROUPS
    """Number of devices."""
    waits: bool = True
    """Requests that fit nowhere are queued; else rejected."""


class Expectations:
    """Response lengths forecast from a history of 1,000 requests."""

    def __init__(self, capacity: int) -> None:
        _, outputs = lengths(1000, _HISTORY_SEED)
        history = LengthHistory(capacity)
        for length in np.minimum(outputs, capacity):
            history.record(int(length))
        self.mean = round(history.mean or 0)
        generated = np.arange(0, capacity + _STRIDE, _STRIDE, dtype=np.int64)
        most = np.maximum(capacity, generated + 1)
        beyond = history.distribution(np.zeros(0, dtype=np.int64)).mean_beyond(generated, most)
        self._beyond = [round(float(length)) for length in beyond]

    def mean_growth(self, request: GrowingRequest, generated: int) -> int:
        """The mean response, at least what was generated."""
        return max(self.mean, generated)

    def forecast(self, request: GrowingRequest, generated: int) -> int:
        """The mean of the lengths above what was generated."""
        return max(self._beyond[generated // _STRIDE], generated + 1)


def simulate(point: Point, seed: int) -> PackedRun:
    deployed = model_on_device(point.model)
    requests = mell_requests(point.workload, point.seconds, seed, deployed.capacity)
    groups = [DeviceGroup(name=f"g{number:03}", capacity=deployed.capacity) for number in range(point.groups)]
    expectations = _expectations(deployed.capacity)
    reserving = point.policy.fits == "reserve-mean"
    cluster = PackedCluster(
        point.policy.packer(Packing(groups)),
        deployed.speed,
        epoch_s=point.epoch_s,
        expected=expectations.mean_growth if reserving else expectations.forecast,
        batched=point.batched,
        waits=point.waits,
    )
    return cluster.run(requests)


_expectations = cache(Expectations)


def figures(point: Point, run: PackedRun) -> dict[str, float]:
    """A run's metrics; means are over the arrivals after the first ``WARM_UP_S``."""
    deployed = model_on_device(point.model)
    first, last = (round(at / point.epoch_s) for at in (min(WARM_UP_S, point.seconds / 4), point.seconds))
    window = slice(first, last)
    used, capacity, active = (sum(series[window]) for series in (run.used, run.capacity, run.active))
    in_use = used * deployed.token_bytes + active * deployed.weight_bytes
    seconds = point.epoch_s * len(run.active[window])
    latencies = run.latencies
    return {
        "peak_devices": max(run.active),
        "mean_devices": active / len(run.active[window]),
        "lower_bound_peak": max(run.fewest),
        "migrations_per_s": sum(run.migrations[window]) / seconds,
        "kv_utilisation": used / max(capacity, 1),
        "memory_in_use": in_use / max(active * deployed.memory_bytes, 1),
        "preemptions_per_request": run.preemptions / max(run.requests, 1),
        "slo_attainment": sum(latency <= SLO_SCALE for latency in latencies) / max(len(latencies), 1),
        "served": run.finished / max(run.requests, 1),
    }


def measure(point: Point) -> dict[str, float]:
    """Mean metrics over the seeds."""
    runs = [figures(point, simulate(point, seed)) for seed in range(point.seeds)]
    return {name: fmean(run[name] for run in runs) for name in runs[0]}


def workloads(effort: Effort) -> Sequence[str]:
    """Workloads that can be run: Azure's needs its trace."""
    here = WORKLOADS if azure_arrivals() is not None else tuple(name for name in WORKLOADS if name != AZURE)
    return effort.choose(here, here[2:3])


def models(effort: Effort) -> Sequence[str]:
    return effort.choose(tuple(DEVICES), ("llama2-7b",))


def size_of(effort: Effort) -> tuple[float, int]:
    """Seconds of arrivals, and number of seeds."""
    return effort.choose((SECONDS, SEEDS), (QUICK_SECONDS, 1))


def assumptions() -> list[str]:
    lines = [
        "From the paper: LLaMA2-7B on 24 GB (RTX 4090) and 13B on 40 GB (A100), conversations ten times as "
        "long, Poisson arrivals of 0.5, 0.8 and 1.1 per second, a device activated when an arrival fits "
        "nowhere and released when empty.",
        f"Memory for KV: {MEMORY_SHARE:.0%} of the device less the weights: "
        + ", ".join(f"{model_on_device(model).capacity:,} tokens ({model})" for model in DEVICES)
        + ". Step times: the roofline model; a step reads the weights and the KV.",
        "Lengths: the data sets are not included. Lognormal with the means that their papers print "
        "(LMSYS-Chat-1M 69.5 and 214.5 tokens, WildChat 295.6 and 441.3), half of each; the spreads are "
        "guesses. Cut so that a request fits on a device: prompts at half of its KV, prompt and response "
        "together at 7/8.",
        f"{SECONDS:.0f} s of arrivals, means over {SEEDS} seeds and over the time after the first "
        f"{WARM_UP_S:.0f} s; peaks over everything. Packing every second, at the sizes of a second later.",
        "Without migration, growth that does not fit preempts the newest request, which is dispatched again"
        " in the next epoch and recomputed.",
        "fits: requests are placed by their present size, or (reserve-mean) by at least their prompt and the "
        "mean response.",
        f"Load balancing tolerates loads that differ by up to {THRESHOLD} of a device. slo_attainment: "
        f"answered within {SLO_SCALE:g} times the time alone on a device.",
        "kv_utilisation is of the memory for KV; memory_in_use is KV and weights, of the whole device.",
    ]
    if azure_arrivals() is None:
        return [*lines, "Skipped: azure, whose trace was not found; SHOAL_TRACES names the folder of traces."]
    return [
        *lines,
        "azure: arrival times of the conversation trace of 2023, thinned to 1.1 per second, a random part"
        " for each seed; lengths as above.",
    ]
