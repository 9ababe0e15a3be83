"""The systems that SeaLLM compares: how each places services, and how its engines serve."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from experiments.result import Value
from experiments.seallm.cluster import NEVER_S
from experiments.seallm.services import (
    SLO_SCALE,
    Roofline,
    by_service,
    cluster,
    memory_check,
    models,
    served,
)
from shoal.config.presets import PRESETS
from shoal.core import Request
from shoal.measure import RunRecord, summarise
from shoal.place.analytic import AnalyticGroups
from shoal.place.baselines import even_split
from shoal.place.estimate import Estimate, Found, Objective, PlanEvaluator
from shoal.place.greedy import alpaserve, literal, muxserve
from shoal.place.groupwise import GroupwiseEvaluator
from shoal.place.placement import Placement
from shoal.place.problem import Problem, Search, together
from shoal.place.search import search_screened, shortlisted
from shoal.place.traffic import ServiceLoad, load_of
from shoal.schedule import SchedulerOptions
from shoal.simulate.placed_engines import PlacedEngines
from shoal.simulate.simulated_groups import GroupTraffic, SimulatedGroups, estimates

MOST_SHARING = 2
"""Services of a group."""
FLOOR = 0.5
"""Attainment that every service is to have before all else, but in Algorithm 1 as printed."""


@dataclass(frozen=True, slots=True)
class System:
    """One of the compared systems."""

    scheduler: SchedulerOptions
    """Of its engines."""
    places: str
    """How it places services: ``even``, ``alpaserve``, ``muxserve``, ``literal`` or ``search``."""
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
"""By name; the last three are the paper's variants: another order, or no placement of their own."""


def engines_of(system: System) -> PlacedEngines:
    """How its engines are made."""
    return PlacedEngines(
        services=served(),
        memory=memory_check(),
        times=Roofline(models()),
        scheduler=system.scheduler,
        fixed_parts=system.fixed_parts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a system knows when it places services: the requests of some time before."""

    problem: Problem
    """Its devices and services."""
    loads: Mapping[str, ServiceLoad]
    """Of each service."""
    formulas: AnalyticGroups
    """What they say of groups."""
    traffic: GroupTraffic
    """What groups are simulated with."""

    @classmethod
    def of(cls, system: System, devices: int, history: Sequence[Request], window_s: float) -> "Window":
        """The requests of ``window_s`` seconds."""
        engines, requests = engines_of(system), by_service(history)
        loads = {
            name: load_of(requests[name], window_s, each.execution_s, SLO_SCALE * each.execution_s)
            for name, each in engines.services.items()
        }
        problem = Problem(
            cluster=cluster(devices),
            memory=engines.memory,
            rates={name: load.rate_per_s for name, load in loads.items()},
            max_services=MOST_SHARING,
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
    """Places services as a system does, for traffic like that of a window before."""

    system: System
    """Which."""
    devices: int
    """Of the cluster."""

    def place(self, history: Sequence[Request], window_s: float) -> Found:
        """Its placement, and what it expects of that for the same traffic again."""
        return self(history, window_s, None)[0]

    def __call__(
        self, history: Sequence[Request], window_s: float, present: Placement | None
    ) -> tuple[Found, Estimate]:
        """Its placement, and the estimate of the present one, if there is one, else of its own."""
        window = Window.of(self.system, self.devices, history, window_s)
        simulated = GroupwiseEvaluator(SimulatedGroups(window.traffic))
        found = place(self.system, window, simulated)
        if present is None:
            return found, found.estimate
        return found, simulated.evaluate([present])[0]


def place(system: System, window: Window, simulated: PlanEvaluator) -> Found:
    """What the system's search finds; simulated: chooses among what formulas find."""
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
    results = together(searches[system.places], screen)
    if system.places == "muxserve":
        results = [[found for found in result if _shares(found)] for result in results]
    return shortlisted(problem, results, simulated)


def _shares(found: Found) -> bool:
    return any(len(group.services) > 1 for group in found.placement.groups)


def _demands(loads: Mapping[str, ServiceLoad]) -> dict[str, float]:
    """Device seconds of a second's requests, each alone."""
    return {name: load.rate_per_s * load.execution_s for name, load in loads.items()}


def serve(system: System, placement: Placement, requests: Sequence[Request]) -> RunRecord:
    """The whole cluster under these requests, from an idle start."""
    begin_ns = min(request.arrival_ns for request in requests)
    moved = [replace(request, arrival_ns=request.arrival_ns - begin_ns) for request in requests]
    return engines_of(system).simulate(placement, moved)


def figures(run: RunRecord) -> dict[str, Value]:
    """The paper's metrics of a run, of all services; latencies are in units of L^.

    What no engine served has missed its goal, and has no latency.
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
