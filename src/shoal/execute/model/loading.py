"""ModelLoader: loads, probes, quantises and optimises the models of services."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from transformers import AutoModelForCausalLM

from shoal.core import ConfigError, ModelUnsupported, Service
from shoal.execute.attention.transformers_hook import ATTENTION_NAME
from shoal.execute.current_device import on_own_stream
from shoal.execute.free_memory import free_memory_bytes
from shoal.execute.linear.merged_products import choose_products
from shoal.execute.model.apply_fusions import apply_fusions
from shoal.execute.model.checkpoint import load_module, read_model_config, unsupported_on_error
from shoal.execute.model.choose_dtype import prefers_int8, resolve_dtype
from shoal.execute.model.int8_model import int8_bytes, use_int8
from shoal.execute.model.probe import INT8_TOLERANCE, ProbeResult, probe, refuse_by_config
from shoal.execute.model.random_weights import build_empty, count_parameters, fill, weights_name
from shoal.execute.model.recognise_layers import recognise_layers
from shoal.execute.model.transformers_forward import Forward, TransformersForward
from shoal.execute.weights.image import WeightImage
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
    image: WeightImage | None = None
    """Where its weights are, which come and go; None: they are always there."""

    @property
    def weights_name(self) -> str:
        """Identifier of the weights, equal for models with the same weights."""
        return f"{self.dtype} {self.weights} {self.folder}"


class LoadFunction(Protocol):
    """Loads a model: ``load_model``, or its image."""

    def __call__(
        self,
        name: str,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        seed: int | None,
        progress: Callable[[str], None] | None,
    ) -> LoadedModel:
        """seed: of random weights; None for the weights in the files of ``folder``. progress: called with a
        line if that takes long."""


class ModelLoader:
    """Loads models, one at a time; a model that is still in use is not loaded again."""

    def __init__(self, device: torch.device, load: LoadFunction | None = None) -> None:
        """load: loads a model that is not in use; ``load_model`` by default."""
        self.device = device
        self._load = load
        self._loaded: WeakValueDictionary[tuple[Path, torch.dtype, int | None], LoadedModel] = (
            WeakValueDictionary()
        )

    def load(
        self, service: Service, folder: Path, progress: Callable[[str], None] | None = None
    ) -> LoadedModel:
        """The service's model in its dtype; raises as ``model_set.load_models`` and ``resolve_service`` do.

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
            load = self._load or load_model
            with on_own_stream(self.device):
                model = load(service.model, folder, dtype, self.device, seed, progress)
            self._loaded[folder, dtype, seed] = model
        return model


def load_model(
    name: str,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    seed: int | None,
    progress: Callable[[str], None] | None = None,
    *,
    onednn: bool = True,
) -> LoadedModel:
    """Load, probe and optimise a model; arguments as in LoadFunction.

    onednn: whether oneDNN may pack weights, into tensors without addresses. Raises as
    ``model_set.load_models`` does.
    """
    if progress is not None:
        does = "loading" if seed is None else "making random weights of"
        progress(f"{does} {name} ({_name(dtype)}) on {device}")
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
    products = choose_products(device, onednn=onednn)
    layers = [] if products is None else recognise_layers(module, probed, products.kernels)
    if dtype == torch.int8:
        probed = _quantise(module, probed, folder if seed is None else None, name)
    held = {p.data_ptr(): p.numel() * p.element_size() for p in module.parameters()}
    weight_bytes = sum(held.values()) + int8_bytes(module)
    forward = apply_fusions(module, probed, layers, products, device, onednn=onednn)
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
