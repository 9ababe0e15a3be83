"""Random clusters and services for tests of placement."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from shoal.core.cluster import ClusterSpec, Device, Link
from shoal.forecast import RooflineTimes, StepTimes, device_spec, model_spec
from shoal.place.analytic import AnalyticGroups
from shoal.place.estimate import ServiceEstimate
from shoal.place.groupwise import GroupwiseEvaluator
from shoal.place.memory import MemoryCheck, PlacedService
from shoal.place.placement import GroupShape
from shoal.place.problem import Problem
from shoal.place.traffic import ServiceLoad, alone_s

MODELS = ("llama-2-7b", "llama-2-13b", "opt-6.7b", "llama-2-70b")
_LINK = Link(200e9, 1e-6)


def cluster(devices: int, per_host: int = 8) -> ClusterSpec:
    memory = device_spec("a800").memory_bytes
    return ClusterSpec(
        devices=[
            Device(name=f"d{at:02}", kind="a800", host=f"h{at // per_host}", memory_bytes=memory)
            for at in range(devices)
        ],
        host_link=_LINK,
        network=_LINK,
    )


def problem_of(models: Mapping[str, str], devices: int, rate: float = 1.0, per_host: int = 8) -> Problem:
    services = {
        name: PlacedService(name=name, model=model_spec(model), weights=name)
        for name, model in models.items()
    }
    return Problem(
        cluster=cluster(devices, per_host),
        memory=MemoryCheck(services),
        rates=dict.fromkeys(services, rate),
    )


def random_case(devices: int, services: int, seed: int) -> tuple[Problem, GroupwiseEvaluator]:
    """Services of random models, lengths and rates, from a light load to an overload."""
    draw = np.random.default_rng(seed)
    models = MODELS if devices > 1 else MODELS[:3]
    placed = {
        f"s{at}": PlacedService(name=f"s{at}", model=model_spec(str(draw.choice(models))), weights=f"s{at}")
        for at in range(services)
    }

    @cache
    def times(name: str, kind: str, tp: int) -> StepTimes:
        return RooflineTimes(placed[name].model, device_spec(kind), tp)

    pressure = float(draw.choice([0.3, 1, 3])) * devices / services
    loads = {}
    for name in placed:
        prompt, output = int(draw.choice([70, 300, 1500, 3000])), int(draw.choice([20, 100, 250, 500]))
        seconds = alone_s(times(name, "a800", 1), prompt, output)
        rate = float(draw.choice([0.2, 1, 3, 8])) * pressure
        loads[name] = ServiceLoad(
            requests=round(rate * 100) + 1,
            rate_per_s=rate,
            prompt_tokens=prompt,
            output_tokens=output,
            execution_s=seconds,
            goal_s=5 * seconds,
            arrival_cv=3,
        )
    memory = MemoryCheck(placed)
    rates = {name: load.rate_per_s for name, load in loads.items()}
    problem = Problem(cluster=cluster(devices), memory=memory, rates=rates)
    return problem, GroupwiseEvaluator(AnalyticGroups(loads, times, memory))


def evaluator_of(problem: Problem) -> GroupwiseEvaluator:
    """Formulas for services that are all alike and have a light load."""
    services = problem.memory.services
    loads = {
        name: ServiceLoad(
            requests=100, rate_per_s=1, prompt_tokens=500, output_tokens=200, execution_s=5, goal_s=25
        )
        for name in services
    }

    def times(name: str, kind: str, tp: int) -> StepTimes:
        return RooflineTimes(services[name].model, device_spec(kind), tp)

    return GroupwiseEvaluator(AnalyticGroups(loads, times, problem.memory))


class RandomGroups:
    """A group model without sense: how many requests a group serves is drawn from its shape."""

    def __init__(self, services: Sequence[str], seed: int) -> None:
        self.requests = dict.fromkeys(services, 100)
        self._seed = seed

    def serve(self, shapes: Sequence[GroupShape]) -> list[Mapping[str, ServiceEstimate]]:
        found = []
        for shape in shapes:
            key = hashlib.sha256(f"{self._seed} {shape}".encode()).digest()
            found.append(
                {
                    name: ServiceEstimate(
                        100 * share, share * (byte % 101), 100 * share, 100 * share * (1 + byte)
                    )
                    for (name, share), byte in zip(shape.shares, key, strict=False)
                }
            )
        return found
