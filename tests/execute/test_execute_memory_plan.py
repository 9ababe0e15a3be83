"""The pool of an engine on a GPU gets what is the engine's, without what it has beside; with a fake GPU."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from shoal.execute import loading
from shoal.execute.loading import ModelLoader, ModelSet
from shoal.execute.memory_plan import recorded_bytes
from shoal.execute.paged import BatchedStep, PagedStep
from shoal.kvcache import KVShape, LayerShape

GIB = 1 << 30
TOTAL = 80 * GIB


class RecordingBackend(BatchedStep):
    """Stands for that of Triton, which may not be installed."""

    records_decodes = True


def models_on_a_gpu(monkeypatch: pytest.MonkeyPatch, **backends: type[PagedStep]) -> ModelSet:
    """Services with models of 1 GiB, 8 layers and a vocabulary of 100,000 tokens; a step takes 1 GiB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (TOTAL - len(backends) * GIB, TOTAL))
    monkeypatch.setattr(loading, "_activation_peak", lambda model, device, tokens: tokens << 20)
    models = ModelSet(ModelLoader(torch.device("cuda:0")), "auto")
    for name, backend in backends.items():
        model: Any = SimpleNamespace(weight_bytes=GIB, dtype=torch.bfloat16, folder=Path(name))
        models.models[name] = cast(loading.LoadedModel, model)
        models.kv_shapes[name] = KVShape("bfloat16", (LayerShape(2, 16, 16),) * 8)
        models.vocab_sizes[name] = 100_000
        models.backends[name] = backend
    return models


def test_recorded_decodes_of_many_services_take_no_more_than_those_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = models_on_a_gpu(monkeypatch, a=RecordingBackend).default_kv_bytes(1024)
    assert one == pytest.approx(0.9 * TOTAL - 2 * GIB - recorded_bytes(200_000), abs=2)
    three = models_on_a_gpu(monkeypatch, a=RecordingBackend, b=RecordingBackend, c=RecordingBackend)
    assert one - three.default_kv_bytes(1024) == pytest.approx(2 * GIB, abs=2)


def test_room_for_gathered_keys_is_kept_where_they_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    gathering = models_on_a_gpu(monkeypatch, a=BatchedStep).default_kv_bytes(1024)
    assert gathering == pytest.approx((0.9 * TOTAL - 2 * GIB) / (1 + 4 / 8), abs=2)
    mixed = models_on_a_gpu(monkeypatch, a=BatchedStep, b=RecordingBackend).default_kv_bytes(1024)
    assert mixed == pytest.approx((0.9 * TOTAL - 3 * GIB - recorded_bytes(200_000)) / (1 + 4 / 8), abs=2)
