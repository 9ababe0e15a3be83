"""Models with random weights and engines around them, for the parts of `benchmarks/gpu_check`."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_check.cases import LeftOut
from benchmarks.gpu_check.shapes import BLOCK, Llama
from benchmarks.gpu_check.timing import free_bytes
from shoal.core import Service
from shoal.engine import Engine, EngineOptions
from shoal.engine.build import assemble_engine, default_threads
from shoal.execute.model.loading import ModelSet, load_models
from shoal.kvcache import KVCacheOptions
from shoal.schedule import SchedulerOptions

_SPARE_BYTES = 2 << 30
"""For activations, recorded steps, and what libraries take."""


def require_memory(device: str, models: Sequence[Llama], kv_bytes: int) -> None:
    """Raise LeftOut where the device has too little memory for models and KV."""
    needed = sum(model.weight_bytes for model in models) + kv_bytes + _SPARE_BYTES
    free = free_bytes(device)
    if device != "cpu" and needed > free:
        raise LeftOut(f"it takes {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free")


def service_of(model: Llama, folder: Path, name: str | None = None) -> Service:
    """A service on random weights, called as its model unless ``name`` says otherwise.

    folder: where its configuration goes.
    """
    where = str(model.write(folder))
    return Service(name=name or model.name, model=where, dtype="bfloat16", weights="random")


def load(device: str, services: Sequence[Service]) -> ModelSet:
    """The models of services."""
    folders = {service.name: Path(service.model) for service in services}
    return load_models(services, folders, device=device, threads=threads_of(device))


def threads_of(device: str) -> int:
    """On a CPU, tiny models take longer with more than one."""
    return 1 if device == "cpu" else default_threads()


def engine_of(models: ModelSet, services: Sequence[Service], kv_bytes: int, depth: int = 1) -> Engine:
    """An engine around loaded models, with a KV pool of its own."""
    options = EngineOptions(
        services=tuple(services),
        device=str(models.device),
        kv_cache=KVCacheOptions(memory_bytes=kv_bytes, block_size=BLOCK),
        scheduler=SchedulerOptions(depth=depth, preemption_mode="recompute"),
    )
    engine, _ = assemble_engine(options, models, threads=threads_of(options.device))
    return engine
