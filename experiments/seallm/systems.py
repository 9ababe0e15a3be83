"""The systems of SeaLLM's cluster experiments: how each places services, and its engines' scheduler."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from experiments.result import Value
from experiments.seallm.services import (
    SLO_SCALE,
    Roofline,
    by_service,
    cluster,
    memory_check,
    models,
    served,
)
from experiments.seallm.sharing_group import NEVER_S
from shoal.config.presets import PRESETS
from shoal.core import Request
from shoal.measure import RunRecord, summarise
from shoal.place.analytic import AnalyticGroups
from shoal.place.baselines import even_split
from shoal.place.estimate import Estimate, Found, Objective, PlanEvaluator
from shoal.place.greedy import alpaserve, literal, muxserve
from shoal.place.groupwise import GroupwiseEvaluator
from shoal.place.placement import Placement
from shoal.place.problem import Problem, Search, run_searches
from shoal.place.search import search_screened, shortlisted
from shoal.place.traffic import ServiceLoad, load_of
from shoal.schedule import SchedulerOptions
from shoal.simulate.placed_engines import PlacedEngines
from shoal.simulate.simulated_groups import GroupTraffic, SimulatedGroups, estimates

MAX_SERVICES = 2
"""Services of a group."""
FLOOR = 0.5
"""Least attainment of every service, the first objective except in Algorithm 1 as printed."""


@dataclass(frozen=True, slots=True)
class System:
    scheduler: SchedulerOptions
    """Of each engine."""
    places: str
    """Placement algorithm: ``even``, ``alpaserve``, ``muxserve``, ``literal`` or ``search``."""
    fixed_parts: bool = False
    """Whether services that share devices have fixed parts of them."""


def _published(preset: str) -> SchedulerOptions:
    return replace(PRESETS[preset].scheduler, starvation_s=NEVER_S)


SYSTEMS: Mapping[str, System] = {
    "vllm": System(_published("vllm"), "even"),
    "alpaserve": System(_published("alpaserve"), "alpaserve"),
    "muxserve": System(_published("vllm"), "muxserve", fixed_parts=True),
    "seallm-literal": System(PRESETS["seallm"].scheduler, "literal"),
    "seallm": System(PRESETS["seallm-join"].scheduler, "search"),
    "shoal": System(PRESETS["shoal"].scheduler, "search"),
    "seallm-f": System(_published("vllm"), "search"),
    "seallm-m": System(PRESETS["fastserve"].scheduler, "search"),
    "seallm-p": System(PRESETS["seallm-join"].scheduler, "even"),
}
"""By name; the last three are the paper's variants, with another order or without placement."""


def engines_of(system: System) -> PlacedEngines:
    return PlacedEngines(
        services=served(),
        memory=memory_check(),
        times=Roofline(models()),
        scheduler=system.scheduler,
        fixed_parts=system.fixed_parts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The input of a placement, from the requests of a past window."""

    problem: Problem
    """Devices and services."""
    loads: Mapping[str, ServiceLoad]
    """By service."""
    formulas: AnalyticGroups
    """Analytic estimates of groups."""
    traffic: GroupTraffic
    """For simulations of groups."""

    @classmethod
    def of(cls, system: System, devices: int, history: Sequence[Request], window_s: float) -> "Window":
        """history: the requests of ``window_s`` seconds."""
        engines, requests = engines_of(system), by_service(history)
        loads = {
            name: load_of(requests[name], window_s, each.execution_s, SLO_SCALE * each.execution_s)
            for name, each in engines.services.items()
        }
        problem = Problem(
            cluster=cluster(devices),
            memory=engines.memory,
            rates={name: load.rate_per_s for name, load in loads.items()},
            max_services=MAX_SERVICES,
            objective=Objective() if system.places == "literal" else Objective(floor=FLOOR),
        )
        short_first = system.places in ("search", "literal")
        return cls(
            problem=problem,
            loads=loads,
            formulas=AnalyticGroups(loads, engines.times, engines.memory, short_first=short_first),
            traffic=GroupTraffic(engines=engines, requests=requests),
        )


@dataclass(frozen=True, slots=True)
class Placer:
    """Places services with a system's algorithm, for traffic like that of a past window."""

    system: System
    devices: int

    def place(self, history: Sequence[Request], window_s: float) -> Found:
        """The placement, with its estimate for the same traffic."""
        return self(history, window_s, None)[0]

    def __call__(
        self, history: Sequence[Request], window_s: float, present: Placement | None
    ) -> tuple[Found, Estimate]:
        """The placement, and the estimate of the present one; without a present one, its own estimate."""
        window = Window.of(self.system, self.devices, history, window_s)
        simulated = GroupwiseEvaluator(SimulatedGroups(window.traffic))
        found = place(self.system, window, simulated)
        if present is None:
            return found, found.estimate
        return found, simulated.evaluate([present])[0]


def place(system: System, window: Window, simulated: PlanEvaluator) -> Found:
    """The placement by the system's algorithm; simulated: chooses among the best by formulas."""
    problem, loads = window.problem, window.loads
    screen = GroupwiseEvaluator(window.formulas)
    if system.places == "search":
        return search_screened(problem, screen, simulated)
    searches: Mapping[str, list[Search]] = {
        "even": [even_split(problem)],
        "alpaserve": alpaserve(problem),
        "muxserve": muxserve(problem, _demands(loads)),
        "literal": literal(problem),
    }
    results = run_searches(searches[system.places], screen)
    if system.places == "muxserve":
        results = [[found for found in result if _shares(found)] for result in results]
    return shortlisted(problem, results, simulated)


def _shares(found: Found) -> bool:
    return any(len(group.services) > 1 for group in found.placement.groups)


def _demands(loads: Mapping[str, ServiceLoad]) -> dict[str, float]:
    """Device seconds per second, with each request alone."""
    return {name: load.rate_per_s * load.execution_s for name, load in loads.items()}


def serve(system: System, placement: Placement, requests: Sequence[Request]) -> RunRecord:
    """Simulate the whole cluster from an idle start."""
    begin_ns = min(request.arrival_ns for request in requests)
    shifted = [replace(request, arrival_ns=request.arrival_ns - begin_ns) for request in requests]
    return engines_of(system).simulate(placement, shifted)


def figures(run: RunRecord) -> dict[str, Value]:
    """The paper's metrics over all services; latencies are in units of L^.

    Requests without an engine count as missed SLOs, and have no latency.
    """
    found = summarise(run).overall
    estimate = Estimate(estimates(run, list(served())))
    latency, ttft, tpot = found.normalised_latency, found.ttft_s, found.tpot_s
    return {
        "normalised_latency": None if latency is None else latency.mean,
        "p99": None if latency is None else latency.p99,
        "slo_attainment": estimate.attainment,
        "ttft": None if ttft is None else ttft.mean,
        "tpot": None if tpot is None else tpot.mean,
        "requests": found.requests,
        "refused": found.refused,
    }
