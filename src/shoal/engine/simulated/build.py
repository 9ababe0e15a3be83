"""Builds an engine with a simulated executor from ``EngineOptions``, without torch and without weights."""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shoal.core import ConfigError, ModelUnavailable, Service
from shoal.engine.build import describe_service
from shoal.engine.core import Engine
from shoal.engine.info import EngineInfo, ServiceInfo
from shoal.engine.migration.kv_format import kv_format
from shoal.engine.options import EngineOptions
from shoal.engine.service_changes import ServiceChanges
from shoal.engine.simulated.models import ModelOutline, SimulatedModelLoader
from shoal.engine.simulated.services import SimulatedServices
from shoal.execute.protocol import Executor
from shoal.kvcache.layout import PoolLayout, plan_layout
from shoal.kvcache.pool import BlockPool
from shoal.schedule import Scheduler, ServiceLimits

MEMORY_SHARE = 0.9
"""Share of the device's memory for weights and KV, if the size of the pool is not given."""
_DEFAULT_KV_BYTES = 2 << 30
"""Size of the pool where the device's memory is not known either."""
_SWAP_POOLS = 4
"""Default swap space, as a multiple of the KV pool."""


def build_engine(
    options: EngineOptions,
    folders: Mapping[str, Path],
    *,
    progress: Callable[[str], None] | None = None,
    wrap: Callable[[Executor], Executor] = lambda executor: executor,
) -> tuple[Engine, EngineInfo]:
    """Build a simulated engine; arguments and errors are those of ``engine.build.build_engine``."""
    if options.latency is None:
        raise ConfigError("this engine is not simulated: nothing says how long its steps take")
    if missing := [service.name for service in options.services if service.name not in folders]:
        raise ModelUnavailable(f"no model folder was given for {', '.join(missing)}")
    loader = SimulatedModelLoader(options.latency)
    models = {each.name: loader.load(each, folders[each.name], progress) for each in options.services}
    pool, host = _pools(options, models)
    limits = {each.name: _limits(each, models[each.name]) for each in options.services}
    scheduler_options = options.scheduler.with_depth_for(options.device)
    scheduler = Scheduler(pool, limits, scheduler_options, host, weights=options.weights)
    services = SimulatedServices(loader, models, pool.layout, options.weights)

    def describe(service: Service) -> ServiceInfo:
        return _describe(service, services.models[service.name], scheduler, pool, options)

    executor = wrap(services.executor)
    changes = ServiceChanges(
        scheduler,
        pool,
        executor,
        services,
        host_pool=host,
        int8=options.kv_cache.dtype == "int8",
        limits_of=_limits,
        describe=describe,
    )
    engine = Engine(scheduler, pool, executor, depth=scheduler_options.max_in_flight, changes=changes)
    described = {service.name: describe(service) for service in options.services}
    return engine, _engine_info(options, described, services, scheduler, pool.layout)


def _engine_info(
    options: EngineOptions,
    described: Mapping[str, ServiceInfo],
    services: SimulatedServices,
    scheduler: Scheduler,
    layout: PoolLayout,
) -> EngineInfo:
    # Part of the device's name, by which speeds that were measured are kept.
    sources = ", ".join(dict.fromkeys(model.source for model in services.models.values()))
    return EngineInfo(
        services=described,
        device=f"{options.device} ({sources})",
        threads=1,
        block_size=layout.block_size,
        merged_blocks=layout.merged_blocks,
        kv_bytes=layout.total_bytes,
        weight_bytes=services.weight_bytes,
        max_running=scheduler.max_running,
        takes_priorities=options.scheduler.order.reads_priorities,
        kernels=f"simulated: nothing is computed, and steps take the time of the {sources}",
        host=socket.gethostname(),
    )


def _describe(
    service: Service,
    model: ModelOutline,
    scheduler: Scheduler,
    pool: BlockPool,
    options: EngineOptions,
) -> ServiceInfo:
    name = service.name
    described = replace(
        describe_service(service.model, scheduler, pool, name, _limits(service, model), model.vocab_size),
        dtype=model.dtype,
        weight_bytes=model.weight_bytes,
        described=model.described,
        simulated=True,
    )
    if options.scheduler.admission.slice_tokens is not None:
        return described  # a slice is granted with its blocks, so no KV can be imported
    return replace(described, kv_format=kv_format(pool.layout, name, model.folder, model.kind_of_weights))


def _limits(service: Service, model: ModelOutline) -> ServiceLimits:
    return ServiceLimits(
        model.context_tokens,
        model.eos_token_ids,
        slo=service.slo,
        execution_s=service.execution_s,
        quota=service.quota,
        starvation_s=service.starvation_s,
        weights=model.weights_name,
        weight_bytes=model.weight_bytes,
        pinned=service.pin,
    )


def _pools(options: EngineOptions, models: Mapping[str, ModelOutline]) -> tuple[BlockPool, BlockPool | None]:
    """The KV pool, of the configured size or of what the weights leave of the device; and that of swapped KV.

    The latter is None if preempted requests are recomputed. Neither takes memory for KV.
    """
    cache = options.kv_cache
    layout = plan_layout(
        {name: replace(model.kv_shape, int8=cache.dtype == "int8") for name, model in models.items()},
        memory_bytes=cache.memory_bytes or _default_kv_bytes(options, list(models.values())),
        block_size=cache.block_size,
        kind=cache.layout,
    )
    pool = BlockPool(layout, prefix_caching=cache.prefix_caching)
    if options.scheduler.preemption_mode != "swap":
        return pool, None
    swap_bytes = _SWAP_POOLS * layout.total_bytes if cache.swap_bytes is None else cache.swap_bytes
    return pool, BlockPool(layout.resized(swap_bytes), prefix_caching=False)


def _default_kv_bytes(options: EngineOptions, models: Sequence[ModelOutline]) -> int:
    """The size of the pool: a share of the devices' memory without the weights, as on a GPU.

    All devices of an engine count together. Raises ConfigError if the weights leave nothing.
    """
    places = {(model.device.name, model.tp): model.device for model in models if model.device is not None}
    if len(places) != 1:
        return _DEFAULT_KV_BYTES
    [((_, count), device)] = places.items()
    usable = int(MEMORY_SHARE * device.memory_bytes) * count
    weights = sum({model.weights_name: model.weight_bytes for model in models}.values())
    if options.weights.memory_bytes is not None:
        weights = min(weights, options.weights.memory_bytes)
    if weights >= usable:
        raise ConfigError(
            f"the weights take {weights / 2**30:.1f} GiB, and {usable / 2**30:.1f} GiB of the simulated "
            f"{device.name} may be used; write another latency, or weights.memory: less of them"
        )
    return usable - weights
