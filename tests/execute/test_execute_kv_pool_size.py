"""The size of an engine's KV pool on a GPU, beside its other memory; with a fake GPU."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.core import ConfigError
from shoal.execute.attention.torch_backends import BatchedAttention, PagedAttention
from shoal.execute.kv_pool_size import EngineMemory, graph_bytes, pool_bytes
from shoal.execute.model import model_set
from shoal.execute.model.loading import ModelLoader
from shoal.execute.model.model_set import ModelSet, ServedModel
from shoal.kvcache import KVShape, LayerShape

pytestmark = pytest.mark.without_native

GIB = 1 << 30
TOTAL, CONTEXT = 80 * GIB, GIB // 2
ENGINE = EngineMemory(weight_bytes=8 * GIB, step_bytes=GIB, graph_bytes=GIB // 4, gather_share=0.0)


def free_beside(*taken: int) -> int:
    """What is free on a GPU where other engines have their weights and pools, and this one its weights."""
    return TOTAL - sum(taken) - len(taken) * CONTEXT - ENGINE.weight_bytes - CONTEXT


def test_a_pool_gets_nine_tenths_of_a_gpu_minus_other_memory_of_the_engine() -> None:
    size = pool_bytes(ENGINE, share=1, total=TOTAL, free=free_beside())
    assert size == pytest.approx(0.9 * TOTAL - CONTEXT - 8 * GIB - GIB - GIB // 4, abs=2)


@pytest.mark.parametrize("engines", [2, 3, 5])
def test_engines_that_start_one_after_another_get_the_same(engines: int) -> None:
    pools: list[int] = []
    for _ in range(engines):
        free = free_beside(*(ENGINE.weight_bytes + pool for pool in pools))
        pools.append(pool_bytes(ENGINE, share=1 / engines, total=TOTAL, free=free))
    assert len(set(pools)) == 1
    assert pools[0] == pytest.approx(0.9 * TOTAL / engines - 8 * GIB - GIB - GIB // 4, abs=2)


def test_weights_are_taken_from_the_share_of_the_engine_that_has_them() -> None:
    large = replace(ENGINE, weight_bytes=30 * GIB)
    assert pool_bytes(ENGINE, share=0.5, total=TOTAL, free=free_beside()) - pool_bytes(
        large, share=0.5, total=TOTAL, free=free_beside() - 22 * GIB
    ) == pytest.approx(22 * GIB, abs=2)


def test_a_pool_fits_in_what_other_programs_leave() -> None:
    free = 20 * GIB
    size = pool_bytes(ENGINE, share=0.5, total=TOTAL, free=free)
    assert size == pytest.approx(free - 0.05 * TOTAL - GIB - GIB // 4, abs=2)
    assert pool_bytes(ENGINE, share=0.5, total=TOTAL, free=4 * GIB) < 0


def test_gathered_kv_is_subtracted_from_the_pool() -> None:
    free = free_beside()
    alone = pool_bytes(ENGINE, share=1, total=TOTAL, free=free)
    gathering = pool_bytes(replace(ENGINE, gather_share=0.25), share=1, total=TOTAL, free=free)
    assert gathering * 1.25 == pytest.approx(alone, abs=2)


class RecordingBackend(BatchedAttention):
    """Stands for that of Triton, which may not be installed."""

    captures_decodes = True


def models_on_a_gpu(monkeypatch: pytest.MonkeyPatch, **backends: type[PagedAttention]) -> ModelSet:
    """Services with models of 1 GiB, 8 layers and a vocabulary of 100,000 tokens; a step takes 1 GiB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (TOTAL - len(backends) * GIB, TOTAL))
    monkeypatch.setattr(model_set, "_activation_peak", lambda model, device, tokens: tokens << 20)
    models = ModelSet(ModelLoader(torch.device("cuda:0")), "auto")
    for name, backend in backends.items():
        shape = KVShape("bfloat16", (LayerShape(2, 16, 16),) * 8)
        model: Any = SimpleNamespace(
            weight_bytes=GIB, dtype=torch.bfloat16, kv_shape=shape, vocab_size=100_000, image=None
        )
        models.services[name] = ServedModel(model, backend, context_tokens=1024)
    return models


def test_graphs_of_many_services_take_no_more_than_those_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = models_on_a_gpu(monkeypatch, a=RecordingBackend).default_kv_bytes(1024)
    assert one == pytest.approx(0.9 * TOTAL - 2 * GIB - graph_bytes(200_000), abs=2)
    three = models_on_a_gpu(monkeypatch, a=RecordingBackend, b=RecordingBackend, c=RecordingBackend)
    assert one - three.default_kv_bytes(1024) == pytest.approx(2 * GIB, abs=2)


def test_memory_for_gathered_kv_is_reserved_only_if_it_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    gathering = models_on_a_gpu(monkeypatch, a=BatchedAttention).default_kv_bytes(1024)
    assert gathering == pytest.approx((0.9 * TOTAL - 2 * GIB) / (1 + 4 / 8), abs=2)
    mixed = models_on_a_gpu(monkeypatch, a=BatchedAttention, b=RecordingBackend).default_kv_bytes(1024)
    assert mixed == pytest.approx((0.9 * TOTAL - 3 * GIB - graph_bytes(200_000)) / (1 + 4 / 8), abs=2)


def test_an_engine_without_room_for_a_pool_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    models = models_on_a_gpu(monkeypatch, a=RecordingBackend)
    with pytest.raises(ConfigError, match=r"cuda:0: nothing is left for KV in 1% of 80\.0 GiB"):
        models.default_kv_bytes(1024, share=0.01)
