"""Models with random weights, and engines of them, for the parts of `benchmarks.gpu_check`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu_check.cases import SkipCase
from benchmarks.gpu_check.shapes import BLOCK, Llama
from benchmarks.gpu_check.timing import free_bytes
from shoal.core import Service
from shoal.engine import Engine, EngineOptions
from shoal.engine.build import assemble_engine, default_threads
from shoal.execute.model.model_set import ModelSet, load_models
from shoal.kvcache import KVCacheOptions
from shoal.schedule import SchedulerOptions

_SPARE_BYTES = 2 << 30
"""For activations, recorded steps and libraries."""


WAYS = {"recorded": True, "launched one by one": False}
"""Ways of computing steps of prompts: whether they are recorded."""


def require_memory(device: str, models: Sequence[Llama], kv_bytes: int) -> None:
    """Raises SkipCase if the device has too little memory for models and KV."""
    needed = sum(model.weight_bytes for model in models) + kv_bytes + _SPARE_BYTES
    free = free_bytes(device)
    if device != "cpu" and needed > free:
        raise SkipCase(f"it takes {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free")


def service_of(model: Llama, folder: Path, name: str | None = None) -> Service:
    """A service with random weights; name: by default the model's. folder: for its configuration."""
    where = str(model.write(folder))
    return Service(name=name or model.name, model=where, dtype="bfloat16", weights="random")


def load(device: str, services: Sequence[Service]) -> ModelSet:
    folders = {service.name: Path(service.model) for service in services}
    return load_models(services, folders, device=device, threads=threads_of(device))


def threads_of(device: str) -> int:
    """One on a CPU, where tiny models are slower with more."""
    return 1 if device == "cpu" else default_threads()


def engine_of(models: ModelSet, services: Sequence[Service], kv_bytes: int, depth: int = 1) -> Engine:
    """An engine of loaded models with its own KV pool."""
    options = EngineOptions(
        services=tuple(services),
        device=str(models.device),
        kv_cache=KVCacheOptions(memory_bytes=kv_bytes, block_size=BLOCK),
        scheduler=SchedulerOptions(depth=depth, preemption_mode="recompute"),
    )
    engine, _ = assemble_engine(options, models, threads=threads_of(options.device))
    return engine


@contextmanager
def steps_of_prompts(recorded: bool) -> Iterator[None]:
    """Inside, steps of prompts are recorded or not."""
    if recorded or find_spec("triton") is None:
        yield
        return
    from shoal.execute.gpu import graphs

    shapes = graphs.PROMPT_SHAPES
    graphs.PROMPT_SHAPES = ()
    try:
        yield
    finally:
        graphs.PROMPT_SHAPES = shapes
