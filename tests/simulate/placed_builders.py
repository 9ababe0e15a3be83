"""Placement problems whose groups can be simulated."""

from dataclasses import dataclass

from shoal.core import SLO
from shoal.core.cluster import ClusterSpec, Device, Link
from shoal.forecast import ModelSpec, RooflineTimes, StepTimes, device_spec, model_spec
from shoal.place.analytic import AnalyticGroups
from shoal.place.groupwise import GroupwiseEvaluator
from shoal.place.memory import MemoryCheck, PlacedService
from shoal.place.problem import Problem
from shoal.place.traffic import alone_s, load_of
from shoal.simulate.placed_engines import PlacedEngines, ServedService
from shoal.simulate.simulated_groups import GroupTraffic
from shoal.workload import Gamma, Independent, LogNormalLength, generate_rows, to_requests

A800 = device_spec("a800")
LINK = Link(200e9, 1e-6)


@dataclass(frozen=True)
class Roofline:
    models: dict[str, ModelSpec]

    def __call__(self, service: str, kind: str, tp: int) -> StepTimes:
        return RooflineTimes(self.models[service], device_spec(kind), tp)


def cluster(devices: int) -> ClusterSpec:
    return ClusterSpec(
        devices=[
            Device(name=f"d{at}", kind="a800", host="h", memory_bytes=A800.memory_bytes)
            for at in range(devices)
        ],
        host_link=LINK,
        network=LINK,
    )


def case(devices: int, services: int, seconds: float, seed: int, rate: float = 2.0):
    """A problem, the traffic to simulate, and formulas of the same."""
    names = [f"s{at}" for at in range(services)]
    kinds = ["llama-2-7b", "llama-2-13b"]
    models = {name: model_spec(kinds[(at + seed) % 2]) for at, name in enumerate(names)}
    times = Roofline(models)
    requests, served, loads = {}, {}, {}
    for at, name in enumerate(names):
        lengths = Independent(LogNormalLength(5.5 + at % 3 / 2, 0.5), LogNormalLength(3.5 + at % 2, 0.5))
        own = rate * (1 + (at + seed) % 3)
        rows = generate_rows(lengths, Gamma(own, 2.0), round(own * seconds), seed=seed * 10 + at)
        requests[name] = to_requests(rows, name, prefix=f"{name}-", from_zero=False)
        execution_s = alone_s(times(name, "a800", 1), 300, 60)
        served[name] = ServedService(context_tokens=4096, slo=SLO(e2e_scale=5), execution_s=execution_s)
        loads[name] = load_of(requests[name], seconds, execution_s, 5 * execution_s)
    memory = MemoryCheck({name: PlacedService(name=name, model=models[name], weights=name) for name in names})
    problem = Problem(
        cluster=cluster(devices),
        memory=memory,
        rates={name: load.rate_per_s for name, load in loads.items()},
    )
    engines = PlacedEngines(services=served, memory=memory, times=times)
    traffic = GroupTraffic(engines=engines, requests=requests)
    return problem, traffic, GroupwiseEvaluator(AnalyticGroups(loads, times, memory))
