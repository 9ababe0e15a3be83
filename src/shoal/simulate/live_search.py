"""Search of a placement for a running cluster, on its last requests and with its own step times."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.cluster.placing.search_task import SearchedService, SearchResult, SearchTask, ServicesByEngine
from shoal.cluster.placing.traffic import ReplayedRequest
from shoal.core import ConfigError, Request, SamplingParams, SyntheticPrompt
from shoal.core.cluster import ClusterSpec, Device, Link
from shoal.forecast import ModelSpec, StepTimes, serving_times, times_from_speed
from shoal.place.analytic import AnalyticGroups
from shoal.place.estimate import Estimate, Found, PlanEvaluator, best
from shoal.place.groupwise import GroupwiseEvaluator
from shoal.place.memory import PlacedService
from shoal.place.placement import Placement
from shoal.place.re_placement import difference
from shoal.place.running_engines import PoolMemory, RunningProblem
from shoal.place.search import search_screened
from shoal.place.traffic import ServiceLoad, alone_s, goal_of, load_of
from shoal.simulate.placed_engines import PlacedEngines, ServedService
from shoal.simulate.simulated_groups import GroupTraffic, SimulatedGroups

# Not used: every group is one engine.
_LINK = Link(1e9, 1e-4)


class TimeIsUp(Exception):
    """The search has taken as long as it may."""


@dataclass(slots=True)
class LearnedTimes:
    """Step times by service and kind of engine, fitted at their first use."""

    task: SearchTask
    learned: set[tuple[str, str]] = field(default_factory=set)
    """Those that were fitted to steps as they ran."""
    _known: dict[tuple[str, str], StepTimes] = field(default_factory=dict)

    def __call__(self, service: str, kind: str, tp: int) -> StepTimes:
        """See ``StepTimesOf``; an engine counts as one device, however many it has."""
        key = service, kind
        if key not in self._known:
            speed, steps = self.task.speeds[key], self.task.steps.get(key, ())
            measured = times_from_speed(speed.prefill_s, speed.decode_s)
            times = serving_times([step.rows for step in steps], [step.seconds for step in steps], measured)
            if times is not measured:
                self.learned.add(key)
            self._known[key] = times
        return self._known[key]


@dataclass(slots=True)
class LimitedEvaluator:
    """A ``PlanEvaluator`` that remembers what it estimated, and raises TimeIsUp once the time is over."""

    evaluator: PlanEvaluator
    is_over: Callable[[], bool]
    found: list[Found] = field(default_factory=list)

    @property
    def services(self) -> Sequence[str]:
        return self.evaluator.services

    def evaluate(self, placements: Sequence[Placement]) -> list[Estimate]:
        """See ``PlanEvaluator``."""
        estimates = []
        for placement in placements:
            if self.is_over():
                raise TimeIsUp
            [estimate] = self.evaluator.evaluate([placement])
            self.found.append(Found(placement, estimate))
            estimates.append(estimate)
        return estimates


def search(task: SearchTask, clock: Callable[[], float] = time.monotonic) -> SearchResult:
    """The best placement found within the task's time, and the present one.

    Raises ConfigError if a service fits on no engine.
    """
    began_s = clock()
    case = _Case.of(task)
    present = _placement(task, case.devices)
    evaluator = LimitedEvaluator(case.simulated, lambda: clock() - began_s > task.limit_s)
    screen = LimitedEvaluator(case.screen, evaluator.is_over)
    now = Found(present, case.simulated.evaluate([present])[0])
    ended_early = False
    try:
        search_screened(case.problem, screen, evaluator)
    except TimeIsUp:
        ended_early = True
    objective = case.problem.objective
    complete = [each for each in evaluator.found if each.placement.services == set(task.services)]
    found = best([now, *complete], objective)
    change = difference(present, found.placement, case.problem.memory)
    return SearchResult(
        placement=_by_engine(change.after, case.devices),
        estimate=found.estimate,
        present=now.estimate,
        execution_s=case.execution_s,
        load_bytes=change.load_bytes,
        learned=frozenset(case.times.learned),
        took_s=clock() - began_s,
        ended_early=ended_early,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What is searched, and two evaluators: by simulation, and by formulas."""

    devices: Sequence[Device]
    problem: RunningProblem
    simulated: PlanEvaluator
    screen: PlanEvaluator
    execution_s: Mapping[str, float]
    times: LearnedTimes

    @classmethod
    def of(cls, task: SearchTask) -> "_Case":
        devices = [
            Device(name=engine.name, kind=engine.kind, host=engine.name, memory_bytes=engine.kv_bytes)
            for engine in task.engines
        ]
        requests = _by_service(task)
        memory = PoolMemory(
            {
                name: _placed(name, service, requests[name], task.block_size)
                for name, service in task.services.items()
            },
            weights_limit_bytes=task.weights.memory_bytes,
        )
        times = LearnedTimes(task)
        loads = {name: _load(task, name, own, times) for name, own in requests.items()}
        execution_s = {name: load.execution_s for name, load in loads.items()}
        rates = dict.fromkeys((engine.kind for engine in task.engines), task.fetch_bytes_per_s)
        engines = PlacedEngines(
            services={
                name: ServedService(
                    context_tokens=service.context_tokens,
                    slo=service.slo,
                    execution_s=service.execution_s or execution_s[name],
                    quota=service.quota,
                    starvation_s=service.starvation_s,
                )
                for name, service in task.services.items()
            },
            memory=memory,
            times=times,
            scheduler=task.scheduler,
            layout=task.layout,
            block_size=task.block_size,
            weights=task.weights,
            fetch_bytes_per_s=rates,
        )
        problem = RunningProblem(
            cluster=ClusterSpec(devices=devices, host_link=_LINK, network=_LINK),
            memory=memory,
            rates={name: load.rate_per_s for name, load in loads.items()},
            max_services=len(task.services),
            allowed={engine.kind: engine.services for engine in task.engines},
        )
        return cls(
            devices=devices,
            problem=problem,
            simulated=GroupwiseEvaluator(SimulatedGroups(GroupTraffic(engines=engines, requests=requests))),
            screen=GroupwiseEvaluator(
                AnalyticGroups(loads, times, memory, rates, max_running=task.scheduler.max_running)
            ),
            execution_s=execution_s,
            times=times,
        )


def _by_service(task: SearchTask) -> dict[str, list[Request]]:
    """The requests to simulate, from time 0."""
    requests: dict[str, list[Request]] = {name: [] for name in task.services}
    begin_ns = min((each.arrival_ns for each in task.requests), default=0)
    for number, each in enumerate(sorted(task.requests, key=lambda each: each.arrival_ns)):
        if each.service in requests:
            requests[each.service].append(_request(number, each, begin_ns))
    return requests


def _request(number: int, replayed: ReplayedRequest, begin_ns: int) -> Request:
    return Request(
        id=str(number),
        service=replayed.service,
        prompt=SyntheticPrompt(replayed.prompt_tokens),
        sampling=SamplingParams(max_tokens=replayed.most_tokens),
        arrival_ns=replayed.arrival_ns - begin_ns,
        seed=number,
        true_output_tokens=replayed.output_tokens,
        slo=replayed.slo,
    )


def _placed(
    name: str, service: SearchedService, requests: Sequence[Request], block_size: int
) -> PlacedService:
    """Its minimum KV is that of its longest request."""
    longest = max((len(each.prompt) + (each.true_output_tokens or 1) for each in requests), default=1)
    return PlacedService(
        name=name,
        model=model_of_sizes(name, service.weight_bytes, service.kv_token_bytes),
        weights=service.weights,
        kv_floor_tokens=max(block_size, min(longest, service.context_tokens)),
        pinned=service.pinned,
    )


def model_of_sizes(name: str, weight_bytes: int, kv_token_bytes: int) -> ModelSpec:
    """A model of which only sizes are known, as one layer with one head; its KV is whole 64 bytes a token."""
    head_dim = 16 * max(1, round(kv_token_bytes / 64))
    model = ModelSpec(
        name=name, layers=1, hidden=1, heads=1, kv_heads=1, head_dim=head_dim, intermediate=1, vocab=1
    )
    each = max(1, weight_bytes) / model.parameters
    return ModelSpec(
        name=name,
        layers=1,
        hidden=1,
        heads=1,
        kv_heads=1,
        head_dim=head_dim,
        intermediate=1,
        vocab=1,
        weight_bytes_each=each,
    )


def _load(task: SearchTask, name: str, requests: Sequence[Request], times: LearnedTimes) -> ServiceLoad:
    """Its traffic; L^ is the time of a mean request alone, on the first engine that may have it."""
    kinds = [engine.kind for engine in task.engines if name in engine.services]
    if not kinds:
        raise ConfigError(f"no running engine may have service {name!r}")
    load = load_of(requests, task.window_s, 1.0, 1.0)
    prompt, output = max(2, round(load.prompt_tokens)), max(1, round(load.output_tokens))
    service = task.services[name]
    alone = alone_s(times(name, kinds[0], 1), prompt, output)
    goal_s = goal_of(service.slo, service.execution_s or alone, load.output_tokens)
    return load_of(requests, task.window_s, alone, goal_s)


def _placement(task: SearchTask, devices: Sequence[Device]) -> Placement:
    """The present placement; services that this search does not know are left out."""
    known = frozenset(task.services)
    return Placement.sharing(
        ((device,), task.present.get(device.name, frozenset()) & known) for device in devices
    )


def _by_engine(placement: Placement, devices: Sequence[Device]) -> ServicesByEngine:
    services = {device.name: frozenset[str]() for device in devices}
    for group in placement.groups:
        services[group.devices[0].name] = frozenset(group.services)
    return services
