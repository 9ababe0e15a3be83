"""Builders for the status of engines whose weights come and go."""

from collections.abc import Mapping
from dataclasses import fields

from serve_builders import FakeEngine

from shoal.cluster.status import EngineState, EngineStatus
from shoal.engine.info import EngineInfo, ServiceInfo
from shoal.engine.stats import EngineStats, PoolStats, ServiceStats, StepTotals
from shoal.schedule.policies.residency import Place
from shoal.schedule.stats import WeightsStats


def weights_stats(place: Place, name: str = "w", num_bytes: int = 600) -> WeightsStats:
    """Statistics of weights at a place."""
    return WeightsStats(
        name=name,
        place=place,
        num_bytes=num_bytes,
        pinned=False,
        fetches=3,
        evictions=2,
        fetching_s=1.5,
        waits=4,
        waiting_s=6.0,
        longest_wait_s=2.5,
    )


def engine_with_weights(
    name: str,
    places: Mapping[str, Place],
    *,
    budget: int | None = 1000,
    infos: Mapping[str, ServiceInfo] | None = None,
    device: str = "cpu",
    state: EngineState = EngineState.READY,
) -> EngineStatus:
    """An engine that has loaded services, whose weights of 600 bytes each are at these places.

    budget: memory for weights; None: no limit, so it says nothing about places. infos: of the services.
    """
    infos = FakeEngine().info.services if infos is None else infos
    services = {
        service: ServiceStats(weights=None if budget is None else weights_stats(place, service))
        for service, place in places.items()
    }
    pool = PoolStats(**dict.fromkeys((field.name for field in fields(PoolStats)), 1))
    facts = dict.fromkeys(("threads", "block_size", "merged_blocks", "kv_bytes"), 1)
    return EngineStatus(
        name=name,
        state=state,
        services=tuple(places),
        device=device,
        info=EngineInfo(
            services={service: infos[service] for service in places},
            device=device,
            weight_bytes=5000,
            **facts,
        ),
        stats=EngineStats(services=services, pool=pool, steps=StepTotals()),
        weights_memory_bytes=budget,
    )
