"""Input of planning and placing: services, requests and device catalogue, and simulation of placements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from shoal.cluster.manager.dispatch import dispatch_named
from shoal.config.presets import PRESETS
from shoal.config.scenario import Scenario, ScenarioPool, ScenarioService
from shoal.config.scenario_run import in_dtype, mean_request, time_alone
from shoal.core import NO_GOALS, SLO, ConfigError, Request
from shoal.core.cluster import ClusterSpec, Device, Link
from shoal.forecast import StepTimes
from shoal.forecast.latency_sources import Latency, step_times
from shoal.forecast.model_spec import ModelSpec
from shoal.place.analytic import AnalyticGroups
from shoal.place.memory import MemoryCheck, PlacedService
from shoal.place.placement import Placement
from shoal.place.traffic import ServiceLoad, goal_of, load_of
from shoal.plan.catalog import Catalogue, DeviceKind
from shoal.plan.fleet import Fleet, Stock
from shoal.plan.outcomes import Outcomes, all_missed, outcomes
from shoal.plan.trial import Part
from shoal.schedule import SchedulerOptions
from shoal.schedule.weights_options import WeightsOptions
from shoal.simulate.placed_engines import PlacedEngines, ServedService
from shoal.simulate.simulated_groups import GroupTraffic
from shoal.workload import build_workload

WINDOW = 1000
"""Number of requests, the latest of the searched part, on which placements are compared."""
# Not used: groups are devices of one kind, whose data sheets or tables include their links.
_LINK = Link(1e9, 1e-4)


@dataclass(frozen=True, slots=True)
class Policies:
    """Scheduler of every engine, and dispatch policy between engines."""

    scheduler: SchedulerOptions
    dispatch: str


@dataclass(frozen=True, slots=True)
class PlacedTrial:
    """A placement and policies to simulate on a part of the workload."""

    placement: Placement
    policies: Policies
    part: Part


@dataclass(frozen=True, slots=True)
class CatalogueTimes:
    """Step times of services on kinds of devices."""

    models: dict[str, ModelSpec]
    """By service."""
    kinds: dict[str, DeviceKind]
    """By name."""

    def __call__(self, service: str, kind: str, tp: int) -> StepTimes:
        """Step times on ``tp`` devices; raises ConfigError if unknown."""
        return _times(service, self.kinds[kind].latency_over(tp), self.models[service])


@lru_cache(maxsize=256)
def _times(service: str, latency: Latency, model: ModelSpec) -> StepTimes:
    return step_times(service, latency, model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The common input of all simulations of a search; can be pickled for worker processes."""

    catalogue: Catalogue
    services: Sequence[ScenarioService]
    """With execution times."""
    requests: Sequence[Request]
    """The whole workload, by arrival."""
    engines: PlacedEngines
    """Builds and simulates the engines of a placement."""

    @property
    def stock(self) -> list[Stock]:
        return [Stock(kind.price, kind.most) for kind in self.catalogue.devices]

    def cluster(self, fleet: Fleet) -> ClusterSpec:
        """The fleet's devices. Of each kind, a larger fleet has the same devices and more."""
        devices = [
            Device(
                name=f"{kind.name}-{number}",
                kind=kind.name,
                host=f"{kind.name}-host-{number // kind.span}",
                memory_bytes=kind.memory,
            )
            for kind, count in zip(self.catalogue.devices, fleet, strict=True)
            for number in range(count)
        ]
        return ClusterSpec(devices=devices, host_link=_LINK, network=_LINK)

    def traffic(self, part: Part) -> GroupTraffic:
        """The latest ``WINDOW`` requests of a part, on which placements are compared."""
        window = self.requests[max(part.start, part.stop - WINDOW) : part.stop]
        names = [service.name for service in self.services]
        return GroupTraffic(
            engines=self.engines,
            requests={name: [each for each in window if each.service == name] for name in names},
        )

    def screen(self, traffic: GroupTraffic) -> AnalyticGroups:
        """Analytic estimates for the same traffic."""
        arrivals = [each.arrival_ns for own in traffic.requests.values() for each in own]
        window_s = max(1e-3, (max(arrivals) - min(arrivals)) / 1e9)
        return AnalyticGroups(
            {
                service.name: _load(service, traffic.requests[service.name], window_s)
                for service in self.services
            },
            self.engines.times,
            self.engines.memory,
            self.engines.fetch_bytes_per_s,
        )


def simulate_placed(demand: Demand, trial: PlacedTrial) -> Outcomes:
    """Simulate a placement up to the end of a part of the workload; the outcomes are of the part."""
    requests = trial.part.with_earlier(demand.requests)
    counted = requests[trial.part.start :]
    if not trial.placement.devices:
        return all_missed(counted)
    engines = replace(demand.engines, scheduler=trial.policies.scheduler)
    run = engines.simulate(trial.placement, requests, dispatch_named(trial.policies.dispatch))
    return outcomes(run, counted)


def build_demand(scenario: Scenario, catalogue: Catalogue, goals: SLO = NO_GOALS) -> Demand:
    """Build the workload, and combine it with services and catalogue.

    goals: for services without goals of their own. Raises ConfigError for services without goals or model,
    for closed loops, and for unknown step times.
    """
    if scenario.workload.clients is not None:
        raise ConfigError(
            "clients wait for answers, however few devices there are: plan for a rate or a trace"
        )
    _check_pool(scenario.kv_cache)
    if scenario.batching is not None:
        raise ConfigError(
            "batching: planning dispatches requests one by one; leave it out, and choose a preset without "
            "batches"
        )
    services = [_with_goals(service, goals) for service in scenario.services]
    names = [service.name for service in services]
    requests = build_workload(scenario.workload, names, scenario.kv_cache.block_size).requests
    if not requests:
        raise ConfigError("the workload has no requests, so there is nothing to plan for")
    models = {service.name: _model(service) for service in services}
    contexts = {
        service.name: service.context_tokens or _longest(requests, service.name) for service in services
    }
    memory = MemoryCheck(
        {
            service.name: PlacedService(
                name=service.name,
                model=models[service.name],
                weights=_weights_name(service, models[service.name]),
                kv_floor_tokens=contexts[service.name],
                pinned=service.pin,
            )
            for service in services
        },
        scenario.kv_cache.utilisation,
        scenario.weights.memory_bytes,
    )
    times = CatalogueTimes(models, {kind.name: kind for kind in catalogue.devices})
    steps = scenario.scheduler.max_batched_tokens
    timed = []
    for service in services:
        alone = service.execution_s
        if alone is None:
            mean = mean_request(requests, service.name, contexts[service.name]) or (1, 1)
            alone = time_alone(_reference_step_times(service.name, catalogue, memory, times), *mean, steps)
        timed.append(replace(service, execution_s=float(f"{alone:.4g}")))
    engines = PlacedEngines(
        services={
            service.name: ServedService(
                context_tokens=contexts[service.name],
                slo=service.slo,
                execution_s=service.execution_s or 1.0,
                quota=service.quota,
                starvation_s=service.starvation_s,
            )
            for service in timed
        },
        memory=memory,
        times=times,
        scheduler=scenario.scheduler,
        layout=scenario.kv_cache.layout or PRESETS[scenario.preset].layout,
        block_size=scenario.kv_cache.block_size,
        weights=scenario.weights,
        fetch_bytes_per_s=_fetch_rates(catalogue, scenario.weights),
        fetch_slowdown=scenario.weights.slowdown,
    )
    return Demand(catalogue=catalogue, services=timed, requests=requests, engines=engines)


def ignored_settings(scenario: Scenario) -> list[str]:
    """Settings of a scenario about engines, which planning ignores because it decides on engines itself."""
    plain = Scenario(workload=scenario.workload)
    names = ("latency", "engines", "dispatch", "packing", "link", "drains", "deaths")
    changed = [name for name in names if getattr(scenario, name) != getattr(plain, name)]
    return changed + [f"latency of {each.name}" for each in scenario.services if each.latency is not None]


def _check_pool(pool: ScenarioPool) -> None:
    """Raise ConfigError for settings of the KV pool that planning would ignore."""
    used = {name: getattr(pool, name) for name in ("utilisation", "block_size", "layout")}
    if pool != ScenarioPool(**used):
        raise ConfigError(
            "kv_cache: planning sizes pools by the devices' memory, with prefix caching; what can be written "
            "is utilisation, block_size and layout"
        )


def _with_goals(service: ScenarioService, goals: SLO) -> ScenarioService:
    if service.slo != NO_GOALS:
        return service
    if goals == NO_GOALS:
        raise ConfigError(
            f"service {service.name} has no latency goals, so nothing says what is enough; write --slo "
            "ttft=2s,tpot=100ms, or slo for the service"
        )
    return replace(service, slo=goals)


def _model(service: ScenarioService) -> ModelSpec:
    if service.model is None:
        raise ConfigError(
            f"service {service.name} has no model; write --service {service.name}=llama-3.1-8b, or model for "
            "the service"
        )
    return in_dtype(service.model, service.dtype)


def _weights_name(service: ScenarioService, model: ModelSpec) -> str:
    return f"{service.model_name or model.name} with {model.weight_bytes_each} bytes each"


def _fetch_rates(catalogue: Catalogue, weights: WeightsOptions) -> dict[str, float]:
    """Rates at which weights come to devices, by kind; with a limit on weights all are known."""
    rates = {}
    for kind in catalogue.devices:
        sheet = None if kind.device is None else kind.device.host_bytes_per_s
        if known := [rate for rate in (sheet, weights.bandwidth) if rate is not None]:
            rates[kind.name] = min(known)
        elif weights.memory_bytes is not None:
            raise ConfigError(
                f"weights.memory: nothing says how fast weights come to devices of kind {kind.name}; write "
                "weights.bandwidth, or a device for the kind"
            )
    return rates


def _longest(requests: Sequence[Request], service: str) -> int:
    """Tokens of the longest request, prompt and output."""
    lengths = (
        len(request.prompt) + min(request.true_output_tokens or 1, request.sampling.max_tokens or 1 << 31)
        for request in requests
        if request.service == service
    )
    return max(lengths, default=1)


def _reference_step_times(
    service: str, catalogue: Catalogue, memory: MemoryCheck, times: CatalogueTimes
) -> StepTimes:
    """The service's step times on the first kind with enough memory for it, on as few devices as possible."""
    for kind in catalogue.devices:
        tp = 1
        while tp <= kind.span:
            if memory.fits([service], kind.memory, tp):
                return times(service, kind.name, tp)
            tp *= 2
    raise ConfigError(
        f"no kind of device has memory for service {service} and its longest request, of "
        f"{memory.services[service].kv_floor_tokens:,} tokens{memory.limit_in_words}; write larger devices, "
        "span, or context"
    )


def _load(service: ScenarioService, requests: Sequence[Request], window_s: float) -> ServiceLoad:
    alone = service.execution_s or 1.0
    load = load_of(requests, window_s, alone, math.inf)
    return replace(load, goal_s=goal_of(service.slo, alone, load.output_tokens))
