"""Builds an engine from ``EngineOptions``: loads models, sizes KV pool and swap space, assembles parts."""

import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core import ConfigError, ModelUnavailable, Service
from shoal.engine.core import Engine
from shoal.engine.info import EngineInfo, ServiceInfo
from shoal.engine.migration.kv_format import kv_format
from shoal.engine.options import SIMULATED, EngineOptions
from shoal.engine.service_changes import ServiceChanges
from shoal.engine.speed import KeptSpeeds, measure_absent
from shoal.execute.free_memory import free_memory_bytes
from shoal.execute.protocol import Executor
from shoal.kvcache.layout import PoolLayout, plan_layout
from shoal.kvcache.pool import BlockPool
from shoal.native import native_status
from shoal.schedule import Scheduler, ServiceLimits

if TYPE_CHECKING:
    from shoal.execute.model.loading import LoadedModel
    from shoal.execute.model.model_set import ModelSet, ServedModel
    from shoal.execute.weights.image import WeightImage

_SWAP_POOLS = 4
"""Default swap space in host memory, as a multiple of the KV pool; untouched pages take no memory."""

_PINNED_SWAP_BYTES = 4 << 30
"""Maximum of that default with CUDA, where all of it is pinned at the start."""


def build_engine(
    options: EngineOptions,
    folders: Mapping[str, Path],
    *,
    progress: Callable[[str], None] | None = None,
    wrap: Callable[[Executor], Executor] = lambda executor: executor,
) -> tuple[Engine, EngineInfo]:
    """Load the models of ``options`` and build an engine for them. Imports torch.

    folders: each service's model folder. wrap: wraps the executor, for instance to record its plans.
    Raises ConfigError, ModelUnavailable or ModelUnsupported.
    """
    if options.device == SIMULATED:
        raise ConfigError(f"device {SIMULATED}: only `shoal serve` runs such engines")
    from shoal.execute.model.model_set import load_models

    missing = [service.name for service in options.services if service.name not in folders]
    if missing:
        raise ModelUnavailable(f"no model folder was given for {', '.join(missing)}")
    threads = options.threads or default_threads()
    models = load_models(
        options.services,
        folders,
        device=options.device,
        threads=threads,
        attention=options.attention,
        weights_bytes=options.weights.memory_bytes,
        weights_bandwidth=options.weights.bandwidth,
        progress=progress,
    )
    return assemble_engine(options, models, threads=threads, wrap=wrap)


def assemble_engine(
    options: EngineOptions,
    models: "ModelSet",
    *,
    threads: int,
    wrap: Callable[[Executor], Executor] = lambda executor: executor,
) -> tuple[Engine, EngineInfo]:
    """Build an engine with its own KV pool for ``models``, loaded for the services of ``options``.

    threads: the CPU threads that the models were loaded with. wrap: as in ``build_engine``. Raises
    ConfigError.
    """
    from shoal.execute.executors import make_executor
    from shoal.execute.model.model_set import weight_bytes
    from shoal.execute.torch_services import TorchServices

    layout = _plan_pool(options, models)
    pool = BlockPool(layout, prefix_caching=options.kv_cache.prefix_caching)
    host = _host_pool(options, layout, max(0, free_memory_bytes() - models.reserved_bytes))
    served = models.services
    limits = {service.name: _limits(service, served[service.name].model) for service in options.services}
    scheduler_options = options.scheduler.with_depth_for(options.device)
    depth = scheduler_options.max_in_flight
    scheduler = Scheduler(pool, limits, scheduler_options, host, weights=options.weights)
    executor = make_executor(
        models,
        layout,
        depth=depth,
        unit_ids=pool.unit_ids,
        host_layout=None if host is None else host.layout,
        host_unit_ids=None if host is None else host.unit_ids,
    )

    executor.warm_up(scheduler.max_running, scheduler_options.max_batched_tokens)

    settings = json.dumps([threads, options.attention, options.kv_cache.dtype])  # on which speeds depend

    def describe(service: Service) -> ServiceInfo:
        name = service.name
        model = models.services[name].model
        described = replace(
            describe_service(service.model, scheduler, pool, name, _limits(service, model), model.vocab_size),
            dtype=str(model.dtype).removeprefix("torch."),
            weight_bytes=weight_bytes(model),
            described=model.described,
        )
        if model.image is not None and (speed := _kept_speeds(model.image).find(settings)) is not None:
            described = replace(described, **speed._asdict())
        if options.scheduler.admission.slice_tokens is not None:
            return described  # a slice is granted with its blocks, so no KV can be imported
        weights = f"{model.dtype} {model.weights}"
        return replace(described, kv_format=kv_format(pool.layout, name, model.folder, weights))

    for service in options.services if models.weights is not None else ():
        _keep_speed(models.services[service.name], service.name, describe(service), executor, pool, settings)
    wrapped = wrap(executor)
    changes = ServiceChanges(
        scheduler,
        pool,
        wrapped,
        TorchServices(models, executor),
        host_pool=host,
        int8=options.kv_cache.dtype == "int8",
        limits_of=_limits,
        describe=describe,
    )
    engine = Engine(scheduler, pool, wrapped, depth=depth, grammars=executor.grammars, changes=changes)
    info = EngineInfo(
        services={service.name: describe(service) for service in options.services},
        device=options.device,
        threads=threads,
        block_size=layout.block_size,
        merged_blocks=layout.merged_blocks,
        kv_bytes=layout.total_bytes,
        weight_bytes=models.weight_bytes,
        max_running=scheduler.max_running,
        takes_priorities=options.scheduler.order.reads_priorities,
        kernels=native_status() if models.device.type == "cpu" else _kernels_of(models),
        host=socket.gethostname(),
    )
    return engine, info


def _kept_speeds(image: "WeightImage") -> KeptSpeeds:
    return KeptSpeeds(image.folder / "speeds.json")


def _keep_speed(
    served: "ServedModel",
    name: str,
    described: ServiceInfo,
    executor: Executor,
    pool: BlockPool,
    settings: str,
) -> None:
    """Measure the speed of a service whose weights are absent, unless that was done at an earlier start."""
    if served.model.image is None or described.decode_s:
        return
    limit, vocab_size = described.max_total_tokens, described.vocab_size
    speed = measure_absent(executor, pool, name, served.weights, limit, vocab_size)
    if speed is not None:
        _kept_speeds(served.model.image).keep(settings, speed)


def _kernels_of(models: "ModelSet") -> str:
    """What computes on a GPU, as ``native_status`` says it of CPUs."""
    if any(served.backend.captures_decodes for served in models.services.values()):
        return "Triton kernels and CUDA graphs for decodes"
    return "torch only"


def _limits(service: Service, model: "LoadedModel") -> ServiceLimits:
    from shoal.execute.model.model_set import service_context_tokens, weight_bytes

    return ServiceLimits(
        service_context_tokens(service, model),
        model.eos_token_ids,
        slo=service.slo,
        execution_s=service.execution_s,
        quota=service.quota,
        starvation_s=service.starvation_s,
        weights=model.weights_name,
        weight_bytes=weight_bytes(model),
        pinned=service.pin,
    )


def _plan_pool(options: EngineOptions, models: "ModelSet") -> PoolLayout:
    """The layout of the KV pool: of the configured size, or of what is left of the device memory."""
    memory_bytes = options.kv_cache.memory_bytes
    if memory_bytes is None:
        memory_bytes = models.default_kv_bytes(options.scheduler.max_batched_tokens, options.memory_share)
    else:
        models.check_kv_bytes(memory_bytes)
    int8 = options.kv_cache.dtype == "int8"
    return plan_layout(
        {name: replace(shape, int8=int8) for name, shape in models.kv_shapes.items()},
        memory_bytes=memory_bytes,
        block_size=options.kv_cache.block_size,
        kind=options.kv_cache.layout,
    )


def _host_pool(options: EngineOptions, layout: PoolLayout, free: int) -> BlockPool | None:
    """The pool for swapped KV in host memory; None if preempted requests are recomputed. free: bytes."""
    if options.scheduler.preemption_mode != "swap":
        return None
    swap_bytes = options.kv_cache.swap_bytes
    if swap_bytes is None:
        default = default_swap_bytes(options.device, layout.total_bytes, free, options.memory_share)
        swap_bytes = max(layout.merged_bytes, default)
    elif swap_bytes > free:
        raise ConfigError(
            f"kv_cache.swap: {swap_bytes / 2**30:.1f} GiB are asked for, but {free / 2**30:.1f} GiB of host"
            " memory are free"
        )
    return BlockPool(layout.resized(swap_bytes), prefix_caching=False)


def default_swap_bytes(device: str, pool_bytes: int, free: int, share: float = 1.0) -> int:
    """Default bytes of host memory for swapped KV.

    free: bytes of host memory that are left. share: as in ``EngineOptions.memory_share``.
    """
    swap_bytes = min(_SWAP_POOLS * pool_bytes, int(free * share / 4))
    return min(swap_bytes, _PINNED_SWAP_BYTES) if device.startswith("cuda") else swap_bytes


def describe_service(
    model: str, scheduler: Scheduler, pool: BlockPool, name: str, limits: ServiceLimits, vocab_size: int
) -> ServiceInfo:
    """Limits of a service for clients. The longest request follows the scheduler's own rule."""
    return ServiceInfo(
        model=model,
        context_tokens=limits.context_tokens,
        max_total_tokens=scheduler.max_output_tokens(name, 1) + 1,
        kv_tokens=pool.max_blocks(name) * pool.block_size,
        vocab_size=vocab_size,
        eos_token_ids=tuple(limits.eos_token_ids),
        execution_s=limits.execution_s,
        pinned=limits.pinned,
    )


def default_threads() -> int:
    """Every core that this process may use.

    None is left for the API process, which needs a few hundredths of a core.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
