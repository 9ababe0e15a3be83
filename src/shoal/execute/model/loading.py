"""Loading and probing the models of services (ModelLoader), and the set of loaded models (ModelSet)."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from shoal.core import ConfigError, ModelUnsupported, Service
from shoal.execute.attention.selector import check_backend, choose_backend
from shoal.execute.attention.torch_backends import PagedAttention
from shoal.execute.attention.transformers_hook import ATTENTION_NAME
from shoal.execute.cuda_graphs import empty_cuda_cache
from shoal.execute.current_device import on_device, on_own_stream
from shoal.execute.free_memory import free_memory_bytes
from shoal.execute.kv_pool_size import GATHER_COPIES, EngineMemory, graph_bytes, pool_bytes
from shoal.execute.malloc import keep_freed_memory
from shoal.execute.model.apply_fusions import apply_fusions
from shoal.execute.model.checkpoint import load_module, read_model_config, unsupported_on_error
from shoal.execute.model.choose_dtype import prefers_int8, resolve_dtype
from shoal.execute.model.choose_products import choose_products
from shoal.execute.model.fuse_decoder_layers import recognise_layers
from shoal.execute.model.int8_model import int8_bytes, use_int8
from shoal.execute.model.probe import INT8_TOLERANCE, ProbeResult, probe, refuse_by_config
from shoal.execute.model.random_weights import build_empty, count_parameters, fill, weights_name
from shoal.execute.model.record_attention import RecordingStep, packed_logits
from shoal.execute.model.transformers_forward import Forward, TransformersForward
from shoal.kvcache import KVShape
from shoal.models import (
    ModelDescription,
    context_tokens,
    describe_model,
    describe_random_model,
    in_words,
    read_facts,
    read_weight_headers,
    resolve_service,
)
from shoal.native import native_status

DEFAULT_CPU_KV_BYTES = 2 << 30

_log = logging.getLogger(__name__)


class Int8Unsupported(ModelUnsupported):
    """A model would not be computed correctly in int8."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LoadedModel:
    """One model with its weights on the device."""

    module: Any
    forward: Forward
    dtype: torch.dtype
    """Dtype of its weights; int8 if its linear layers have int8 weights."""
    kv_shape: KVShape
    context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    weight_bytes: int
    folder: Path
    weights: str
    """Identifies its weights among all with the same configuration."""
    described: ModelDescription
    """Description for users."""


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
        return f"{self.model.dtype} {self.model.weights} {self.model.folder}"


class ModelSet:
    """The models of all services of an engine; services may be added and removed."""

    def __init__(self, loader: "ModelLoader", attention: str) -> None:
        self.loader = loader
        self.device = loader.device
        self.services: dict[str, ServedModel] = {}
        """By service name."""
        self._attention = attention

    def add(self, service: Service, model: LoadedModel) -> None:
        """Add a service; raises ConfigError if its context limit is beyond the model's."""
        context_tokens = service_context_tokens(service, model)
        backend = choose_backend(self._attention, self.device, model.kv_shape)
        self.services[service.name] = ServedModel(model, backend, context_tokens)

    def remove(self, service: str) -> None:
        """Remove a service; the weights are freed with the last service on the model."""
        del self.services[service]

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
        """Size of all weights; shared weights count once."""
        return sum(model.weight_bytes for model in self.models)

    def check_kv_bytes(self, kv_bytes: int) -> None:
        """Raise ConfigError if the device has no memory for a KV pool of that size."""
        free = free_bytes(self.device)
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
            return int(min(DEFAULT_CPU_KV_BYTES, free_memory_bytes() * 0.4) * share)
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
    progress: Callable[[str], None] | None = None,
) -> ModelSet:
    """Load, probe and optimise the model of each service.

    folders: the model's Hugging Face folder by service name. threads: CPU threads of this process.
    progress: called with a line about the native library (on a CPU), and one for each model.

    Raises:
        ModelUnsupported: a model would not be computed correctly here, or lacks weights.
        ModelUnavailable: a model's files are damaged.
        ConfigError: the device, the attention backend, a dtype or an instruction set does not exist here.
    """
    target = resolve_device(device)
    check_backend(attention, target)
    if threads is not None:
        torch.set_num_threads(threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if progress is not None and target.type == "cpu":
        progress(native_status())
    models = ModelSet(ModelLoader(target), attention)
    for service in services:
        models.add(service, models.loader.load(service, folders[service.name], progress))
    if target.type == "cpu":
        keep_freed_memory()  # not before loading, so that its temporary memory is returned
    return models


class ModelLoader:
    """Loads models, one at a time; a model that is still in use is not loaded again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._loaded: WeakValueDictionary[tuple[Path, torch.dtype, int | None], LoadedModel] = (
            WeakValueDictionary()
        )

    def load(
        self, service: Service, folder: Path, progress: Callable[[str], None] | None = None
    ) -> LoadedModel:
        """The service's model in its dtype; raises as ``load_models`` and ``resolve_service`` do.

        progress: called with a line if the model has to be loaded. If the folder does not exist here (a
        manager on another host chose it), the service's model is resolved on this host.
        """
        if not folder.exists():
            folder = resolve_service(service, None if progress is None else in_words(progress))
        folder = folder.resolve()
        if prefers_int8(service, folder, self.device):
            try:
                return self._load_as(service, folder, torch.int8, progress)
            except Int8Unsupported as error:
                _log.warning("%s; another dtype is taken", error)
        dtype = resolve_dtype(service, folder)
        if dtype == torch.int8 and self.device.type != "cpu":
            raise ConfigError(
                f"service {service.name!r}: dtype int8 is computed on CPUs only, and device is "
                f"{self.device}; write dtype bfloat16 or auto"
            )
        return self._load_as(service, folder, dtype, progress)

    def _load_as(
        self, service: Service, folder: Path, dtype: torch.dtype, progress: Callable[[str], None] | None
    ) -> LoadedModel:
        seed = service.random_seed
        model = self._loaded.get((folder, dtype, seed))
        if model is None:
            if progress is not None:
                does = "loading" if seed is None else "making random weights of"
                progress(f"{does} {service.model} ({_name(dtype)}) on {self.device}")
            with on_own_stream(self.device):
                model = _load(service.model, folder, dtype, self.device, seed)
            self._loaded[folder, dtype, seed] = model
        return model


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


def _load(name: str, folder: Path, dtype: torch.dtype, device: torch.device, seed: int | None) -> LoadedModel:
    """Load a model; seed: of random weights, None for the weights in its files."""
    config = read_model_config(name, folder)
    text_config = config.get_text_config()
    dense = torch.bfloat16 if dtype == torch.int8 else dtype
    module = _dense_module(name, folder, config, dense, device, seed)
    if seed is None:
        weights, described = "files", describe_model(name, folder, _name(dtype))
    else:
        weights = weights_name(module, seed)
        size = count_parameters(module)
        described = describe_random_model(name, folder, _name(dtype), parameters=size, weights=weights)
    with unsupported_on_error("run", name):  # values of config.json may fail only in a forward pass
        probed = probe(module, name)
    products = choose_products(device)
    layers = [] if products is None else recognise_layers(module, probed, products.kernels)
    if dtype == torch.int8:
        probed = _quantise(module, probed, folder if seed is None else None, name)
    held = {p.data_ptr(): p.numel() * p.element_size() for p in module.parameters()}
    weight_bytes = sum(held.values()) + int8_bytes(module)
    forward = apply_fusions(module, probed, layers, products, device)
    facts = read_facts(folder)
    return LoadedModel(
        module=module,
        forward=forward,
        dtype=dtype,
        kv_shape=KVShape(_name(dense), probed.layers),
        context_tokens=_context_tokens(text_config, facts.context_tokens),
        vocab_size=int(text_config.vocab_size),
        eos_token_ids=facts.eos_token_ids,
        weight_bytes=weight_bytes,
        folder=folder,
        weights=weights,
        described=described,
    )


def _dense_module(
    name: str, folder: Path, config: Any, dtype: torch.dtype, device: torch.device, seed: int | None
) -> Any:
    """The `transformers` model with its weights on the device."""
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model_class is None:
        raise ModelUnsupported(
            f"{name}: transformers has no causal language model for {type(config).__name__}"
        )
    refuse_by_config(model_class, config.get_text_config(), name)
    if seed is None:
        stored = read_weight_headers(folder).values()
        _check_memory(name, sum(prod(tensor.shape) for tensor in stored), dtype, device)
        module = load_module(model_class, folder, config, name, dtype, attn_implementation=ATTENTION_NAME)
    else:
        module = build_empty(model_class, config, name, dtype, attn_implementation=ATTENTION_NAME)
        _check_memory(name, count_parameters(module), dtype, device)
        fill(module, name, device, seed)
    return module.eval().requires_grad_(False).to(device)


def _check_memory(name: str, numbers: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError if the weights do not fit into free memory, before the system kills a process."""
    needed, free = numbers * dtype.itemsize, free_bytes(device)
    if needed > free:
        raise ConfigError(
            f"{name}: its weights take {needed / 2**30:.2f} GiB in {_name(dtype)}, but"
            f" {free / 2**30:.2f} GiB of memory are free on {device}"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_memory_bytes()


def _quantise(module: Any, probed: ProbeResult, folder: Path | None, name: str) -> ProbeResult:
    """Convert all linear layers to int8; raises Int8Unsupported if the logits then differ too much."""
    use_int8(module, folder)
    result = probed.run_again(TransformersForward(module))
    if result is None or not probed.difference(result) <= INT8_TOLERANCE:
        how = "it cannot run" if result is None else f"its logits differ by {probed.difference(result):.1%}"
        raise Int8Unsupported(
            f"{name}: with int8 weights {how} ({type(module).__name__}); in bfloat16 it may be served"
        )
    return replace(result, tolerance=INT8_TOLERANCE)  # rounding differences can change quantised inputs


def _context_tokens(config: Any, stated: int) -> int:
    """The context limit; stated: from config.json alone, without the defaults of the class of ``config``."""
    try:
        return min(stated, context_tokens(config.to_dict()))
    except KeyError:
        return stated


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
