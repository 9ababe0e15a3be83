"""Builds the task of a search from what is known of a running cluster; pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal.cluster.manager.events import ServiceSpeed
from shoal.cluster.options import EnginePlan
from shoal.cluster.placing.search_task import SearchedEngine, SearchedService, SearchTask
from shoal.cluster.placing.traffic import IntervalFacts
from shoal.cluster.status import EngineState, EngineStatus
from shoal.core import Service
from shoal.engine.info import EngineInfo, ServiceInfo
from shoal.engine.step_samples import StepSample
from shoal.schedule.weights_options import WeightsOptions

_UNMEASURED = ServiceSpeed(1e-3, 1e-2)
"""The speed of a small model on a CPU."""

StepsByEngine = Mapping[str, Mapping[str, Sequence[StepSample]]]
"""Samples of steps by engine and service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """What is known of a running cluster at the end of an interval."""

    engines: Sequence[EngineStatus]
    """All of them; only those that are ready take part in a search."""
    plans: Mapping[str, EnginePlan]
    """By engine."""
    services: Mapping[str, Service]
    """Services that may be placed, by name."""
    declared: Mapping[str, Collection[str]]
    """Services that each engine may have."""
    traffic: IntervalFacts
    steps: StepsByEngine = field(default_factory=dict)


def build_task(facts: ClusterFacts, limit_s: float) -> SearchTask | None:
    """The task of a search; None where there is nothing to choose.

    A service that no engine has had loaded keeps the engines that it has: its sizes are not known.
    """
    ready = [
        (engine, engine.info)
        for engine in facts.engines
        if engine.state is EngineState.READY and engine.info is not None
    ]
    infos = [engine.info for engine in facts.engines if engine.info is not None]
    services = {
        name: found
        for name, service in facts.services.items()
        if (found := _searched(service, infos)) is not None
    }
    allowed = {
        engine.name: frozenset(services).intersection(facts.declared.get(engine.name, ()))
        for engine, _ in ready
    }
    placeable = frozenset[str]().union(*allowed.values())
    services = {name: found for name, found in services.items() if name in placeable}
    if len(ready) < 2 or not services:
        return None
    kinds = _kinds(ready, allowed)
    plan = facts.plans[ready[0][0].name].options
    return SearchTask(
        engines=[
            SearchedEngine(
                name=engine.name,
                kind=kinds[engine.name],
                kv_bytes=info.kv_bytes,
                services=allowed[engine.name],
            )
            for engine, info in ready
        ],
        services=services,
        present={engine.name: frozenset(engine.placed).intersection(services) for engine, _ in ready},
        requests=[each for each in facts.traffic.requests if each.service in services],
        window_s=facts.traffic.window_s,
        steps=_steps(facts.steps, kinds, services),
        speeds=_speeds(ready, infos, kinds, services),
        scheduler=plan.scheduler,
        layout=plan.kv_cache.layout,
        block_size=plan.kv_cache.block_size,
        weights=replace(plan.weights, memory_bytes=_weights_limit(ready)),
        fetch_bytes_per_s=_fetch_rate([engine for engine, _ in ready], plan.weights),
        limit_s=limit_s,
    )


_Ready = Sequence[tuple[EngineStatus, EngineInfo]]


def _searched(service: Service, engines: Sequence[EngineInfo]) -> SearchedService | None:
    """A service with the sizes that its engines report; None: none has it."""
    found = [(engine, engine.services[service.name]) for engine in engines if service.name in engine.services]
    if not found:
        return None
    engine, info = max(found, key=lambda each: each[1].context_tokens)
    return SearchedService(
        weights=f"{info.model} in {info.dtype}",
        weight_bytes=max(1, info.weight_bytes),
        kv_token_bytes=max(1, round(engine.kv_bytes / max(1, info.kv_tokens))),
        context_tokens=info.context_tokens,
        slo=service.slo,
        execution_s=service.execution_s,
        quota=service.quota,
        starvation_s=service.starvation_s,
        pinned=info.pinned,
    )


def _kinds(ready: _Ready, allowed: Mapping[str, frozenset[str]]) -> dict[str, str]:
    """Kind of each engine: those of one kind have equal devices, kernels and memory, and may have equal
    services."""
    shapes: dict[str, list[object]] = {}
    kinds = {}
    for engine, info in ready:
        label = f"{info.device.partition(':')[0]} with {info.threads} threads"
        shape = (info.kernels, info.kv_bytes, engine.weights_memory_bytes, allowed[engine.name])
        known = shapes.setdefault(label, [])
        if shape not in known:
            known.append(shape)
        kinds[engine.name] = f"{label} ({known.index(shape)})"
    return kinds


def _steps(
    steps: StepsByEngine, kinds: Mapping[str, str], services: Collection[str]
) -> dict[tuple[str, str], list[StepSample]]:
    """Samples by service and kind, of all engines of a kind together."""
    found: dict[tuple[str, str], list[StepSample]] = {}
    for engine, own in steps.items():
        for service, samples in own.items():
            if engine in kinds and service in services:
                found.setdefault((service, kinds[engine]), []).extend(samples)
    return found


def _speeds(
    ready: _Ready, infos: Sequence[EngineInfo], kinds: Mapping[str, str], services: Collection[str]
) -> dict[tuple[str, str], ServiceSpeed]:
    """Measured speeds by service and kind: the best of the kind's engines, else of any.

    An engine that starts while others compute measures itself as too slow.
    """
    found = {}
    for service in services:
        everywhere = _best([info.services.get(service) for info in infos]) or _UNMEASURED
        for kind in set(kinds.values()):
            own = _best([info.services.get(service) for engine, info in ready if kinds[engine.name] == kind])
            found[service, kind] = own or everywhere
    return found


def _best(infos: Sequence[ServiceInfo | None]) -> ServiceSpeed | None:
    measured = [info for info in infos if info is not None and info.prefill_s > 0 and info.decode_s > 0]
    if not measured:
        return None
    return ServiceSpeed(min(info.prefill_s for info in measured), min(info.decode_s for info in measured))


def _weights_limit(ready: _Ready) -> int | None:
    """The least limit on weights; None where an engine has none."""
    limits = [engine.weights_memory_bytes for engine, _ in ready]
    known = [limit for limit in limits if limit is not None]
    return min(known) if len(known) == len(limits) else None


def _fetch_rate(engines: Sequence[EngineStatus], options: WeightsOptions) -> float:
    """Bytes per second of the fetches of weights so far."""
    num_bytes, seconds = 0, 0.0
    for engine in engines:
        weights = [] if engine.stats is None else [each.weights for each in engine.stats.services.values()]
        for each in {each.name: each for each in weights if each is not None}.values():
            num_bytes += each.num_bytes * each.fetches
            seconds += each.fetching_s
    return num_bytes / seconds if num_bytes and seconds > 0 else options.assumed_bandwidth
