"""ModelSet: the models of all services of an engine, their context limits, and the memory left for KV."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from shoal.core import ConfigError, Service
from shoal.execute.attention.selector import check_backend, choose_backend
from shoal.execute.attention.torch_backends import PagedAttention
from shoal.execute.cuda_graphs import empty_cuda_cache
from shoal.execute.current_device import on_device
from shoal.execute.kv_pool_size import GATHER_COPIES, EngineMemory, graph_bytes, pool_bytes
from shoal.execute.malloc import keep_freed_memory
from shoal.execute.model.images import load_image
from shoal.execute.model.loading import LoadedModel, ModelLoader, free_bytes
from shoal.execute.model.record_attention import RecordingStep, packed_logits
from shoal.execute.model.weight_set import WeightSet
from shoal.kvcache import KVShape
from shoal.native import native_status

DEFAULT_CPU_KV_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A service's model, and how it is served."""

    model: LoadedModel
    """Shared by services with the same folder, dtype and weights."""
    backend: type[PagedAttention]
    context_tokens: int
    """Context limit of the service, at most that of its model."""

    @property
    def weights(self) -> str:
        """Identifier of the weights, equal for services with the same weights."""
        return self.model.weights_name


class ModelSet:
    """The models of all services of an engine; services may be added and removed.

    weights: those that come and go; None if all weights are always in memory.
    """

    def __init__(self, loader: ModelLoader, attention: str, weights: WeightSet | None = None) -> None:
        self.loader = loader
        self.device = loader.device
        self.services: dict[str, ServedModel] = {}
        """By service name."""
        self.weights = weights
        self._attention = attention

    def add(self, service: Service, model: LoadedModel) -> None:
        """Add a service; raises ConfigError if its context limit is beyond the model's."""
        context_tokens = service_context_tokens(service, model)
        backend = choose_backend(self._attention, self.device, model.kv_shape)
        if self.weights is not None:
            self.weights.add(service, model)
        self.services[service.name] = ServedModel(model, backend, context_tokens)

    def remove(self, service: str) -> None:
        """Remove a service; the weights are freed with the last service on the model."""
        del self.services[service]
        if self.weights is not None:
            self.weights.remove(service)

    @property
    def models(self) -> list[LoadedModel]:
        """The models of all services, each once."""
        return list({id(served.model): served.model for served in self.services.values()}.values())

    @property
    def kv_shapes(self) -> dict[str, KVShape]:
        """By service name."""
        return {name: served.model.kv_shape for name, served in self.services.items()}

    @property
    def weight_bytes(self) -> int:
        """Size of all weights, also of those that are away; shared weights count once."""
        return sum(weight_bytes(model) for model in self.models)

    @property
    def reserved_bytes(self) -> int:
        """Free memory that is kept for weights which come and go; counted in full, wherever they are now."""
        return 0 if self.weights is None else min(self.weights.budget_bytes, self.weight_bytes)

    def check_weights_fit(self) -> None:
        """Raise ConfigError if the device has no memory for the weights that may be there at once."""
        free = free_bytes(self.device)
        if self.reserved_bytes > free:
            raise ConfigError(
                f"weights.memory: weights would take {self.reserved_bytes / 2**30:.2f} GiB, but"
                f" {free / 2**30:.2f} GiB of memory are free on {self.device}"
            )

    def check_kv_bytes(self, kv_bytes: int) -> None:
        """Raise ConfigError if the device has no memory for a KV pool of that size."""
        free = self._free_bytes()
        if kv_bytes > free:
            raise ConfigError(
                f"kv_cache.memory: {kv_bytes / 2**30:.1f} GiB are asked for, but {free / 2**30:.1f} GiB are"
                f" free on {self.device} beside the weights"
            )

    def default_kv_bytes(self, max_batched_tokens: int = 2048, share: float = 1.0) -> int:
        """Size of the KV pool if the user gives none; share: the engine's share of the device.

        On a CPU 2 GiB, or 40% of the available memory if that is less. On CUDA the engine's share of 90% of
        the device, minus its weights, the measured peak of a step of ``max_batched_tokens``, CUDA graphs,
        and the copies of one layer's KV that a decode gathers; at most what is free.
        """
        if self.device.type != "cuda":
            return int(min(DEFAULT_CPU_KV_BYTES, self._free_bytes() * 0.4) * share)
        engine = self._engine_memory(max_batched_tokens)
        free, total = torch.cuda.mem_get_info(self.device)
        size = pool_bytes(engine, share=share, total=total, free=free)
        if size <= 0:
            weights, step = engine.weight_bytes / 2**30, engine.step_bytes / 2**30
            raise ConfigError(
                f"{self.device}: nothing is left for KV in {share:.0%} of {total / 2**30:.1f} GiB, of which "
                f"{free / 2**30:.1f} are free, beside {weights:.1f} GiB of weights and a step's {step:.1f}; "
                "lower scheduler.max_batched_tokens or serve fewer models"
            )
        return size

    def _free_bytes(self) -> int:
        """Bytes of the device that can be allocated beside the weights."""
        return max(0, free_bytes(self.device) - self.reserved_bytes)

    def _engine_memory(self, max_batched_tokens: int) -> EngineMemory:
        peak = max(_activation_peak(model, self.device, max_batched_tokens) for model in self.models)
        logits, layers = [], []
        for served in self.services.values():
            # Backends that capture decodes read KV in place; all others gather it.
            if served.backend.captures_decodes:
                logits.append(served.model.vocab_size * served.model.dtype.itemsize)
            else:
                layers.append(len(served.model.kv_shape.layers))
        return EngineMemory(
            weight_bytes=self.weight_bytes,
            step_bytes=peak,
            graph_bytes=graph_bytes(max(logits)) if logits else 0,
            gather_share=GATHER_COPIES / min(layers) if layers else 0.0,
        )


def load_models(
    services: Sequence[Service],
    folders: Mapping[str, Path],
    *,
    device: str = "cpu",
    threads: int | None = None,
    attention: str = "auto",
    weights_bytes: int | None = None,
    weights_bandwidth: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> ModelSet:
    """Load, probe and optimise the model of each service.

    folders: the model's Hugging Face folder by service name. threads: CPU threads of this process.
    weights_bytes: memory for weights, which then come and go; models are loaded from images, which are made
    on first use, and no weights are in memory when this returns. None: all weights are always in memory.
    weights_bandwidth: limit on the bytes per second at which weights come. progress: called with a line about
    the native library (on a CPU), and one for each model.

    Raises:
        ModelUnsupported: a model would not be computed correctly here, lacks weights, or has no image.
        ModelUnavailable: a model's files are damaged.
        ConfigError: the device, the attention backend, a dtype or an instruction set does not exist here, or
        the
            memory for weights is too small.
    """
    target = resolve_device(device)
    check_backend(attention, target)
    weights = None
    if weights_bytes is not None:
        check_movable(target)
        weights = WeightSet(weights_bytes, weights_bandwidth)
    if threads is not None:
        torch.set_num_threads(threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if progress is not None and target.type == "cpu":
        progress(native_status())
    loader = ModelLoader(target, None if weights is None else load_image)
    models = ModelSet(loader, attention, weights)
    for service in services:
        models.add(service, models.loader.load(service, folders[service.name], progress))
    if weights is not None:
        models.check_weights_fit()
    if target.type == "cpu":
        keep_freed_memory()  # not before loading, so that its temporary memory is returned
    return models


def resolve_device(device: str) -> torch.device:
    """The device called ``device``; raises ConfigError if it does not exist here or is not supported."""
    try:
        target = torch.device(device)
    except RuntimeError:
        target = torch.device(
            "meta"
        )  # rejected below; torch's own error lists devices that we do not support
    if target.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r} is not supported; possible are cpu and cuda:N")
    if target.type == "cuda":
        present = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (target.index or 0) >= present:
            possible = ", ".join(["cpu", *(f"cuda:{number}" for number in range(present))])
            raise ConfigError(f"device {device!r}: this torch sees no such CUDA device; possible: {possible}")
    return target


def check_movable(device: torch.device) -> None:
    """Raise ConfigError if weights cannot come and go on ``device``."""
    if device.type != "cpu":
        raise ConfigError(
            f"weights.memory: on GPUs weights cannot come and go yet, and device is {device}; leave it out,"
            " and serve models that fit together"
        )
    if sys.platform != "linux":
        raise ConfigError(
            f"weights.memory: weights can come and go on Linux only, and this is {sys.platform}"
        )


def weight_bytes(model: LoadedModel) -> int:
    """Bytes of a model's weights in memory, which a plan fetches and evicts."""
    return model.weight_bytes if model.image is None else model.image.num_bytes


def service_context_tokens(service: Service, model: LoadedModel) -> int:
    """The service's context limit; raises ConfigError if it is beyond the model's."""
    if service.max_model_len is None:
        return model.context_tokens
    if service.max_model_len > model.context_tokens:
        raise ConfigError(
            f"service {service.name!r}: max_model_len {service.max_model_len} is beyond the model's context "
            f"of {model.context_tokens} tokens"
        )
    return service.max_model_len


def _activation_peak(model: LoadedModel, device: torch.device, tokens: int) -> int:
    """Peak memory of one step of ``tokens`` prompt tokens beyond the weights, in bytes."""
    empty_cuda_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    length = min(tokens, model.context_tokens)
    step = RecordingStep((length,))
    with on_device(device), torch.inference_mode():
        ids = torch.zeros((1, length), dtype=torch.int64, device=device)
        packed_logits(model.forward, [ids], step)
    peak = torch.cuda.max_memory_allocated(device) - before
    empty_cuda_cache()
    return int(peak)
