"""Models of simulated engines: what is known of a model without its weights, and how long its steps take."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.core import ConfigError, Service
from shoal.forecast import DeviceSpec, ModelSpec, StepTimes
from shoal.forecast.latency_sources import EngineLatency, in_words, step_times, timed_device, timed_model
from shoal.kvcache import KVShape, LayerShape
from shoal.models import (
    ModelDescription,
    ModelFacts,
    describe_model,
    describe_random_model,
    read_facts,
    resolve_service,
    word_tokens,
)
from shoal.models import in_words as progress_in_words
from shoal.models.folder.json_files import read_json

_WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0}
_KV_DTYPES = {4.0: "float32", 2.0: "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutline:
    """What is known of a model without its weights."""

    folder: Path
    spec: ModelSpec
    """The simulated model: that of the folder, or another that the step times are of."""
    kv_shape: KVShape
    dtype: str
    times: StepTimes
    device: DeviceSpec | None
    """None: not known."""
    tp: int
    """Devices that share the model."""
    source: str
    """Where the step times come from, in words."""
    context_tokens: int
    """Limit of the service."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    words: "array[int]"
    """Tokens that outputs are made of."""
    described: ModelDescription

    @property
    def weight_bytes(self) -> int:
        """On all of its devices together."""
        return self.spec.weight_bytes()

    @property
    def weights_name(self) -> str:
        """Equal for services with the same weights."""
        return f"{self.kind_of_weights} {self.folder}"

    @property
    def kind_of_weights(self) -> str:
        """The weights' name, without the folder that they are in on this host."""
        return f"simulated {self.dtype} {self.spec.name}"


class SimulatedModelLoader:
    """Reads the models of services; latency: of the engine."""

    def __init__(self, latency: EngineLatency) -> None:
        self._latency = latency
        self._words: dict[Path, array[int]] = {}

    def load(
        self, service: Service, folder: Path, progress: Callable[[str], None] | None = None
    ) -> ModelOutline:
        """The model of a service; raises ConfigError, ModelUnavailable or ModelUnsupported.

        progress: called with a line. If the folder does not exist here (a manager on another host chose it),
        the service's model is resolved on this host.
        """
        if not folder.exists():
            folder = resolve_service(service, None if progress is None else progress_in_words(progress))
        folder = folder.resolve()
        if progress is not None:
            progress(f"reading {service.model} for a simulated device")
        facts, latency = read_facts(folder), self._latency.of(service.name)
        own = _in_dtype(ModelSpec.from_config(read_json(folder / "config.json"), folder.name), service.dtype)
        timed = timed_model(latency)
        spec = own if timed is None else timed
        device, tp = timed_device(latency)
        dtype = _KV_DTYPES.get(own.kv_bytes_each, "bfloat16") if service.dtype == "auto" else service.dtype
        return ModelOutline(
            folder=folder,
            spec=spec,
            kv_shape=_own_shape(facts, own) if timed is None else _shape_of(timed),
            dtype=dtype,
            times=step_times(service.name, latency, spec),
            device=device,
            tp=tp,
            source=in_words(latency),
            context_tokens=_context_tokens(service, facts),
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            words=self._words_of(folder, facts),
            described=_describe(service, folder, spec, dtype),
        )

    def _words_of(self, folder: Path, facts: ModelFacts) -> "array[int]":
        if folder not in self._words:
            self._words[folder] = word_tokens(folder, facts.vocab_size, facts.eos_token_ids)
        return self._words[folder]


def _in_dtype(model: ModelSpec, dtype: str) -> ModelSpec:
    """The model with weights in ``dtype``, and its KV, which is never int8; "auto": as it is."""
    if dtype == "auto":
        return model
    size = _WEIGHT_BYTES[dtype]
    return replace(model, weight_bytes_each=size, kv_bytes_each=max(2.0, size))


def _own_shape(facts: ModelFacts, model: ModelSpec) -> KVShape:
    layers = tuple(LayerShape(layer.kv_heads, layer.key_dim, layer.value_dim) for layer in facts.layers)
    return KVShape(_KV_DTYPES.get(model.kv_bytes_each, "bfloat16"), layers)


def _shape_of(model: ModelSpec) -> KVShape:
    """The KV of a model that is known by its dimensions alone."""
    layer = LayerShape(model.kv_heads, model.head_dim, model.head_dim)
    return KVShape(_KV_DTYPES.get(model.kv_bytes_each, "bfloat16"), (layer,) * model.layers)


def _context_tokens(service: Service, facts: ModelFacts) -> int:
    longest = service.max_model_len
    if longest is not None and longest > facts.context_tokens:
        raise ConfigError(
            f"service {service.name!r}: max_model_len {longest} is beyond the model's context of "
            f"{facts.context_tokens} tokens"
        )
    return longest or facts.context_tokens


def _describe(service: Service, folder: Path, spec: ModelSpec, dtype: str) -> ModelDescription:
    if service.random_seed is None:
        return describe_model(service.model, folder, dtype)
    return describe_random_model(
        service.model, folder, dtype, parameters=spec.parameters, weights="simulated"
    )
