"""Decoder layers fused with Triton's kernels compute what they replace, and hold no weight twice."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from execute_builders import (
    HandScheduler,
    make_model,
    make_prompt,
    needs_triton,
    reference_tokens,
    tiny_config,
)
from strict_interpreter import strict_interpreter
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from at_hand import DEVICE
from shoal.core import Service
from shoal.execute.attention.transformers_hook import ATTENTION_NAME
from shoal.execute.linear import merged_products
from shoal.execute.linear.merged_products import DenseLinear, DenseProductBuilder, ProductBuilder
from shoal.execute.model import loading
from shoal.execute.model.apply_fusions import apply_fusions
from shoal.execute.model.decoder_layer import DecoderLayer
from shoal.execute.model.fused_forward import FusedForward
from shoal.execute.model.model_set import load_models
from shoal.execute.model.probe import ProbeResult, probe
from shoal.execute.model.recognise_layers import fused_layers, recognise_layers
from shoal.execute.model.replace import put_back, replace_modules
from shoal.execute.model.transformers_forward import TransformersForward

pytestmark = needs_triton

FUSED = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
"""With biases, norms of heads, and four norms among them."""


@pytest.fixture(scope="module")
def products() -> Iterator[DenseProductBuilder]:
    from shoal.execute.gpu.kernels.layer import TritonLayerKernels

    if DEVICE != "cpu":
        yield DenseProductBuilder(TritonLayerKernels())
        return
    with strict_interpreter():
        yield DenseProductBuilder(TritonLayerKernels())


@pytest.fixture
def _loads_fused(products: ProductBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are loaded on a CPU as they are on a GPU."""
    monkeypatch.setattr(loading, "choose_products", lambda device, **options: products)


def probed_model(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> tuple[Any, ProbeResult]:
    make_model(folder, tiny_config(kind), dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION_NAME)
    model = model.eval().requires_grad_(False).to(DEVICE)
    return model, probe(model, "m")


def bytes_of(model: nn.Module) -> int:
    """Memory of all weights that modules of the model, or those that they replaced, refer to."""
    tensors = [
        tensor
        for module in model.modules()
        for tensor in vars(module).values()
        if isinstance(tensor, torch.Tensor)
    ]
    storages = [tensor.untyped_storage() for tensor in [*model.parameters(), *tensors]]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("kind", [*FUSED, "mixtral"])
def test_layers_are_fused_and_can_be_restored(kind: str, products: ProductBuilder, tmp_path: Path) -> None:
    model, probed = probed_model(tmp_path, kind)
    matrices = {name: p.clone() for name, p in model.named_parameters() if p.ndim == 2}
    before = bytes_of(model)
    layers = recognise_layers(model, probed, products.kernels)
    originals = replace_modules(model, fused_layers(layers, products))
    assert len(originals) == (model.config.num_hidden_layers if kind in FUSED else 0)
    fused = probed.run_again(TransformersForward(model))
    assert fused is not None
    assert probed.difference(fused) <= 1e-5
    # Without the scales of norms, which are copied to float32.
    merged = [part for part in model.modules() if isinstance(part, DenseLinear)]
    held = {part.weight.untyped_storage().data_ptr() for part in merged}
    projections = [
        part.weight for layer in originals.values() for part in layer.modules() if hasattr(part, "bias")
    ]
    assert {weight.untyped_storage().data_ptr() for weight in projections} == held
    put_back(originals)
    assert bytes_of(model) == before
    restored = probed.run_again(TransformersForward(model))
    assert restored is not None
    assert torch.equal(restored.logits, probed.logits)
    assert all(torch.equal(p, matrices[name]) for name, p in model.named_parameters() if p.ndim == 2)


def test_layers_are_fused_in_float16(products: ProductBuilder, tmp_path: Path) -> None:
    model, probed = probed_model(tmp_path, "llama", torch.float16)
    layers = recognise_layers(model, probed, products.kernels)
    device = torch.device(DEVICE)
    assert isinstance(apply_fusions(model, probed, layers, products, device), FusedForward)
    fused = probed.run_again(TransformersForward(model))
    assert fused is not None
    assert 0 < probed.difference(fused) <= 0.005


@pytest.mark.usefixtures("_loads_fused")
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_a_fused_model_generates_the_tokens_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", tiny_config(kind))
    prompts = [make_prompt(length, seed=length) for length in (1, 5, 23)]
    scheduler = HandScheduler({"m": folder}, attention="batched")
    assert isinstance(scheduler.models.services["m"].model.forward, FusedForward)
    assert scheduler.generate("m", prompts, 4) == [reference_tokens(folder, p, 4) for p in prompts]


@pytest.mark.usefixtures("_loads_fused")
def test_what_changes_the_logits_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "m", tiny_config("llama"))

    def layers() -> set[type]:
        loaded = load_models([Service(name="s", model="m")], {"s": folder}, device=DEVICE).services["s"].model
        return {type(layer) for layer in loaded.module.model.layers}

    assert layers() == {DecoderLayer}
    monkeypatch.setattr(ProbeResult, "gives_same_logits", lambda self, model: False)
    assert layers() == {LlamaDecoderLayer}


@pytest.mark.usefixtures("products")
def test_products_are_chosen_for_a_gpu_if_the_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.execute.gpu.kernels import layer

    gpu = torch.device("cuda")
    monkeypatch.setattr(layer, "smoke_test", lambda device: None)
    assert isinstance(merged_products.choose_products(gpu), DenseProductBuilder)
    monkeypatch.setattr(layer, "smoke_test", lambda device: "no C compiler")
    assert merged_products.choose_products(gpu) is None


def test_nothing_is_chosen_for_a_gpu_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged_products, "find_spec", lambda name: None)
    assert merged_products.choose_products(torch.device("cuda")) is None
