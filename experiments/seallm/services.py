"""SeaLLM's 16 services on a cluster of A800: models, length clusters, popularity and traffic phases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from experiments.seallm.workload import CONTEXT, CV, Lengths, k_means, longbench, sharegpt
from shoal.core import SLO, Request, derive_seed
from shoal.core.cluster import ClusterSpec, Device, Link
from shoal.forecast import ModelSpec, RooflineTimes, StepTimes, device_spec, model_spec
from shoal.place.memory import MemoryCheck, PlacedService
from shoal.place.traffic import alone_s
from shoal.simulate.placed_engines import ServedService
from shoal.workload import Empirical, Gamma, TraceRow, to_requests

KIND = "a800"
HOST_DEVICES = 8
SERVICES = 16
MODELS = ("llama-2-7b", "llama-2-13b", "llama-2-70b", "opt-6.7b")
SLO_SCALE = 5.0
KV_FLOOR_TOKENS = 4 * CONTEXT
"""Least KV tokens of each service in a group."""
_CLUSTERS = {"sharegpt": 10, "longbench": 6}
_SPREAD = 1.0
"""Standard deviation of the logarithms of the services' rates."""

_NVLINK = Link(400e9, 5e-6)
_INFINIBAND = Link(4 * 25e9, 1e-5)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of all services, in phases with different popularities of services."""

    rate: float
    """Mean requests per second of all services together."""
    phase_s: float
    phases: int = 2
    memory: float = 0.9
    """Correlation of a service's popularity (its logarithm) with that of the phase before."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Roofline:
    """Step times of a service on a kind of device with tensor parallelism."""

    models: Mapping[str, ModelSpec]
    """By service."""

    def __call__(self, service: str, kind: str, tp: int) -> StepTimes:
        return RooflineTimes(self.models[service], device_spec(kind), tp)


def cluster(devices: int) -> ClusterSpec:
    """Nodes of eight A800 each."""
    memory = device_spec(KIND).memory_bytes
    return ClusterSpec(
        devices=[
            Device(name=f"gpu{at:02}", kind=KIND, host=f"node{at // HOST_DEVICES}", memory_bytes=memory)
            for at in range(devices)
        ],
        host_link=_NVLINK,
        network=_INFINIBAND,
    )


@cache
def _lengths() -> tuple[tuple[str, str, Lengths], ...]:
    """(name, model, lengths) of each service: a cluster of similar lengths with a random model."""
    draw = np.random.default_rng(derive_seed(0, 16))
    clusters = [
        *k_means(sharegpt(), _CLUSTERS["sharegpt"]),
        *k_means(longbench(), _CLUSTERS["longbench"]),
    ]
    models = [MODELS[at] for at in draw.permutation(np.arange(SERVICES) % len(MODELS))]
    return tuple(
        (f"s{at:02}", model, lengths)
        for at, (model, lengths) in enumerate(zip(models, clusters, strict=True))
    )


def models() -> dict[str, ModelSpec]:
    return {name: model_spec(model) for name, model, _ in _lengths()}


def memory_check() -> MemoryCheck:
    """Services do not share weights: each is fine-tuned."""
    return MemoryCheck(
        {
            name: PlacedService(name=name, model=model, weights=name, kv_floor_tokens=KV_FLOOR_TOKENS)
            for name, model in models().items()
        }
    )


def served() -> dict[str, ServedService]:
    """Context, SLO and execution time L^ (on one device, Eq. 7) of each service."""
    times = Roofline(models())
    found = {}
    for name, _, lengths in _lengths():
        prompt, output = (round(float(side)) for side in lengths.mean(axis=0))
        execution_s = alone_s(times(name, KIND, 1), max(2, prompt), output)
        found[name] = ServedService(
            context_tokens=CONTEXT, slo=SLO(e2e_scale=SLO_SCALE), execution_s=execution_s
        )
    return found


def popularity(traffic: Traffic) -> list[dict[str, float]]:
    """For each phase, each service's share of the requests."""
    draw = np.random.default_rng(derive_seed(traffic.seed, 17))
    level = draw.standard_normal(SERVICES)
    found = []
    for _ in range(traffic.phases):
        weights = np.exp(_SPREAD * level)
        names = [name for name, _, _ in _lengths()]
        found.append(dict(zip(names, (weights / weights.sum()).tolist(), strict=True)))
        fresh = draw.standard_normal(SERVICES)
        level = traffic.memory * level + np.sqrt(1 - traffic.memory**2) * fresh
    return found


def phases(traffic: Traffic) -> list[list[Request]]:
    """Requests of each phase by arrival; time 0 is the start of the first phase."""
    shares = popularity(traffic)
    return [_phase(traffic, number, shares[number]) for number in range(traffic.phases)]


def _phase(traffic: Traffic, number: int, shares: Mapping[str, float]) -> list[Request]:
    rows: list[TraceRow] = []
    begin_ns = round(number * traffic.phase_s * 1e9)
    for at, (name, _, lengths) in enumerate(_lengths()):
        rate = traffic.rate * shares[name]
        seed = derive_seed(traffic.seed, 18, number, at)
        times = Gamma(rate, CV).times_ns(round(rate * traffic.phase_s * 2) + 200, seed)
        arrivals = [time for time in times if time < traffic.phase_s * 1e9]
        pairs = Empirical(tuple((prompt, output) for prompt, output in lengths.tolist()))
        sizes = zip(*pairs.sample(len(arrivals), derive_seed(seed, 1)), strict=True)
        rows += [
            TraceRow(begin_ns + time, int(prompt), int(output), name)
            for time, (prompt, output) in zip(arrivals, sizes, strict=True)
        ]
    return to_requests(rows, lambda _, row: row.client or "", prefix=f"p{number}-", from_zero=False)


def by_service(requests: Sequence[Request]) -> dict[str, list[Request]]:
    """Requests grouped by service, including services without requests."""
    found: dict[str, list[Request]] = {name: [] for name, _, _ in _lengths()}
    for request in requests:
        found[request.service].append(request)
    return found
