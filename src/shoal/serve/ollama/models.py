"""Services as models of Ollama's API: /api/tags, /api/ps and /api/show."""

import hashlib
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import Request

from shoal.cluster.status import ServiceState
from shoal.engine.info import ServiceInfo
from shoal.models import ModelDescription
from shoal.schedule.policies.residency import Place
from shoal.serve.absent_weights import weights_are_absent
from shoal.serve.api import Api
from shoal.serve.ollama.durations import FOREVER_S
from shoal.serve.openai.reasoning_parser import reasoning_tags
from shoal.serve.openai.response_bodies import ModelCard

LATEST = ":latest"
"""Ollama's default tag."""
_UNKNOWN = {"format": "", "family": "", "families": [], "parameter_size": "", "quantization_level": ""}
_ARCHITECTURE = "shoal"
# Ollama's names of sampling parameters, by ours.
_PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}


class OllamaModels:
    """Describes the services that a client's API key may use."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def list_all(self, request: Request) -> list[dict[str, Any]]:
        """All services, loaded or not."""
        return [self._model_entry(card) for card in self._api.visible_cards(request).values()]

    def list_loaded(self, request: Request) -> list[dict[str, Any]]:
        """The services with weights in the memory of an engine."""
        cards, backend = self._api.visible_cards(request), self._api.backend
        loaded = (ServiceState.READY, ServiceState.DRAINING)
        return [
            self._loaded_entry(cards[name])
            for name, status in backend.services.items()
            if name in cards and status.state in loaded and not weights_are_absent(backend, name)
        ]

    def show(self, card: ModelCard) -> dict[str, Any]:
        """Details of one service."""
        tokenizer, stored = self._api.tokenizer(card.id), self._model_entry(card)
        capabilities = ["completion"]
        optional = {}
        if tokenizer.has_chat_template:
            template = tokenizer.chat_template.source
            capabilities += ["tools", *(["thinking"] if reasoning_tags(template) else [])]
            optional["template"] = template
        return {
            **stored,
            "modelfile": f"FROM {stored['details']['parent_model']}\n",
            "parameters": _parameters(card),
            # Copilot displays this name.
            "model_info": {"general.basename": card.id}
            | _model_info(self._info(card).described, card.max_model_len),
            "capabilities": capabilities,
            **optional,
        }

    def _info(self, card: ModelCard) -> ServiceInfo:
        return self._api.backend.info.services[card.id]

    def _model_entry(self, card: ModelCard) -> dict[str, Any]:
        described = self._info(card).described
        modified_s = card.created if described is None else described.modified_s
        return {
            **self._identity(card),
            "modified_at": _format_time(datetime.fromtimestamp(modified_s, UTC)),
            "size": 0 if described is None else described.size_bytes,
        }

    def _loaded_entry(self, card: ModelCard) -> dict[str, Any]:
        status = self._api.backend.services[card.id]
        since_ns = time.monotonic_ns() if status.idle_since_ns is None else status.idle_since_ns
        keep_alive_s = FOREVER_S if status.idle_after_s is None else status.idle_after_s
        remaining = timedelta(seconds=keep_alive_s - (time.monotonic_ns() - since_ns) / 1e9)
        weights = list(self._weights(card.id))
        return {
            **self._identity(card),
            "size": sum(size for _, size in weights),
            "size_vram": sum(size for device, size in weights if device != "cpu"),
            "expires_at": _format_time(datetime.now(UTC) + remaining),
            "context_length": card.max_model_len,
        }

    def _weights(self, service: str) -> Iterator[tuple[str, int]]:
        """Device and size in bytes of each copy of a service's weights."""
        for engine in self._api.backend.engines:
            if engine.info is not None and engine.place(service) is Place.RESIDENT:
                yield engine.device, engine.info.services[service].weight_bytes

    def _identity(self, card: ModelCard) -> dict[str, Any]:
        info, latest = self._info(card), card.id + LATEST
        name = card.id if ":" in card.id or latest in self._api.services else latest
        described = info.described
        digest = hashlib.sha256(info.model.encode()).hexdigest() if described is None else described.digest
        return {
            "name": name,
            "model": name,
            "digest": digest,
            "details": {"parent_model": info.model, **_details(described)},
        }


def _details(described: ModelDescription | None) -> Mapping[str, Any]:
    if described is None:
        return _UNKNOWN
    return {
        "format": described.format,
        "family": described.family,
        "families": [described.family],
        "parameter_size": _format_count(described.parameters),
        "quantization_level": described.quantisation,
    }


def _model_info(described: ModelDescription | None, context_tokens: int) -> dict[str, Any]:
    """Sizes of a model, under the names of GGUF files."""
    if described is None:
        return {"general.architecture": _ARCHITECTURE, f"{_ARCHITECTURE}.context_length": context_tokens}
    sizes = {
        "context_length": context_tokens,
        "block_count": described.layers,
        "embedding_length": described.hidden,
        "attention.head_count": described.heads,
        "attention.head_count_kv": described.kv_heads,
        "vocab_size": described.vocab_size,
    }
    return {
        "general.architecture": described.family,
        "general.parameter_count": described.parameters,
        **{f"{described.family}.{name}": size for name, size in sizes.items() if size is not None},
    }


def _parameters(card: ModelCard) -> str:
    """The default options of requests, one a line."""
    defaults = {name: getattr(card.sampling_defaults, our_name) for our_name, name in _PARAMETERS.items()}
    options = {"num_ctx": card.max_model_len} | defaults
    return "\n".join(f"{name:<30} {value}" for name, value in options.items() if value is not None)


def _format_count(parameters: int) -> str:
    """A number of parameters, such as 134.52M or 1.2B."""
    for unit, digits, letter in ((10**9, 1, "B"), (10**6, 2, "M"), (10**3, 0, "K")):
        if parameters >= unit:
            return f"{parameters / unit:.{0 if parameters % unit == 0 else digits}f}{letter}"
    return str(parameters)


def _format_time(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")
