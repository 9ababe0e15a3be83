"""Fused decoder layers compute what they replace; what is built otherwise keeps its own code."""

from pathlib import Path
from typing import Any

import pytest
import torch
from execute_builders import (
    COMMON,
    KINDS,
    HandScheduler,
    logits_of,
    make_model,
    make_prompt,
    needs_native,
    reference_tokens,
    tiny_config,
)
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV2Config,
    Ernie4_5Config,
    GraniteConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    SmolLM3Config,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

from shoal.core import Service
from shoal.execute.attention.native_backend import NativeAttention
from shoal.execute.attention.transformers_hook import ATTENTION_NAME
from shoal.execute.model.choose_products import choose_products
from shoal.execute.model.decoder_layer import DecoderLayer
from shoal.execute.model.fuse_decoder_layers import fuse_layers, recognise_layers
from shoal.execute.model.fused_forward import FusedForward
from shoal.execute.model.loading import LoadedModel
from shoal.execute.model.model_set import load_models
from shoal.execute.model.probe import PROMPT_LENGTHS, ProbeResult, probe
from shoal.execute.model.record_attention import RecordingStep, packed_logits
from shoal.execute.model.replacements import Replacements
from shoal.execute.model.transformers_forward import TransformersForward

pytestmark = needs_native

FUSED = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3")
SHAPE: dict[str, Any] = {
    **COMMON,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.04}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in int8 are kept in a cache of the test's own."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


def load(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype = torch.float32
) -> tuple[Any, ProbeResult]:
    make_model(folder, config, dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION_NAME)
    return model.eval().requires_grad_(False), probe(model, "m")


def fuse_found(model: nn.Module, probed: ProbeResult) -> Replacements:
    products = choose_products(torch.device("cpu"))
    assert products is not None
    return fuse_layers(recognise_layers(model, probed, products.kernels), products)


@torch.inference_mode()
def difference(model: nn.Module, probed: ProbeResult) -> float:
    """Of the logits that the model gives now, to those it gave before."""
    logits = packed_logits(TransformersForward(model), probed.prompts, RecordingStep(PROMPT_LENGTHS)).float()
    expected = probed.logits.float()
    return float((logits - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_only_llama_like_layers_are_fused(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, probed = load(tmp_path, tiny_config(kind), dtype)
    replaced = fuse_found(model, probed).done
    assert len(replaced) == (model.config.num_hidden_layers if kind in FUSED else 0)
    assert difference(model, probed) <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("config", "fused"),
    [
        (Ernie4_5Config(**SHAPE), 3),  # rotates neighbouring dimensions
        (SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 1]), 2),  # one layer without rotary embeddings
        (GraniteConfig(**SHAPE, residual_multiplier=0.5), 0),
        (CohereConfig(**SHAPE), 0),  # attention and MLP in parallel
        (Olmo2Config(**SHAPE), 0),  # norms only after them
        (Phi3Config(**SHAPE), 0),  # projections that are one already
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PretrainedConfig) else str(value),
)
def test_other_architectures(config: PretrainedConfig, fused: int, tmp_path: Path) -> None:
    model, probed = load(tmp_path, config)
    assert len(fuse_found(model, probed).done) == fused
    assert difference(model, probed) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_position_embeddings_in_one_tensor_are_supported(dtype: str, tmp_path: Path) -> None:
    config = DeepseekV2Config(
        **SHAPE | {"num_key_value_heads": 4}, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
        moe_intermediate_size=32, first_k_dense_replace=1, n_group=1, topk_group=1,
    )  # fmt: skip
    folder = make_model(tmp_path / "deepseek", config)
    scheduler = HandScheduler({"s": folder}, dtype=dtype)
    prompt = make_prompt(12)
    output = scheduler.generate("s", [prompt], 6)[0]
    if dtype == "float32":
        assert output == reference_tokens(folder, prompt, 6)


def test_a_layer_that_cannot_run_in_float32_keeps_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LlamaDecoderLayer.forward
    bias = torch.zeros(1, 1, 48, dtype=torch.bfloat16)

    def biased(self: Any, hidden_states: torch.Tensor, **keywords: Any) -> torch.Tensor:
        if hidden_states.dtype != bias.dtype:
            raise RuntimeError("expected m1 and m2 to have the same dtype")
        return plain(self, hidden_states, **keywords) + bias

    monkeypatch.setattr(LlamaDecoderLayer, "forward", biased)
    model, probed = load(tmp_path, tiny_config("llama"), torch.bfloat16)
    assert not fuse_found(model, probed).done


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_the_activation_is_found(activation: str, tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.hidden_act = activation
    model, probed = load(tmp_path, config)
    assert len(fuse_found(model, probed).done) == (0 if activation == "relu" else 3)
    assert difference(model, probed) <= TOLERANCE[torch.float32]


def test_biases_are_kept(tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.attention_bias = config.mlp_bias = True
    model, _ = load(tmp_path / "zero", config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-1, 1, generator=torch.Generator().manual_seed(len(name)))
    probed = probe(model, "m")
    assert len(fuse_found(model, probed).done) == 3
    assert difference(model, probed) <= TOLERANCE[torch.float32]


def test_a_layer_with_other_computations_keeps_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LlamaDecoderLayer.forward

    def scaled(self: Any, hidden_states: torch.Tensor, **keywords: Any) -> torch.Tensor:
        made = plain(self, hidden_states, **keywords)
        return made * 1.01 if self.self_attn.layer_idx == 1 else made

    monkeypatch.setattr(LlamaDecoderLayer, "forward", scaled)
    model, probed = load(tmp_path, tiny_config("llama"))
    fuse_found(model, probed)
    assert [type(layer) for layer in model.model.layers] == [DecoderLayer, LlamaDecoderLayer, DecoderLayer]
    assert difference(model, probed) <= TOLERANCE[torch.float32]


def load_at_once(folder: Path) -> LoadedModel:
    return load_models([Service(name="s", model="m")], {"s": folder}).services["s"].model


def test_layers_are_fused_at_load_and_restored_if_the_logits_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path, tiny_config("llama"))
    assert {type(layer) for layer in load_at_once(folder).module.model.layers} == {DecoderLayer}
    monkeypatch.setattr(ProbeResult, "gives_same_logits", lambda self, model: False)
    loaded = load_at_once(folder)
    assert {type(layer) for layer in loaded.module.model.layers} == {LlamaDecoderLayer}
    assert isinstance(loaded.forward, TransformersForward)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fully_fused_model_runs_without_the_code_of_transformers(kind: str, tmp_path: Path) -> None:
    loaded = load_at_once(make_model(tmp_path, tiny_config(kind)))
    fused = kind in FUSED and kind != "gemma2"  # which caps its logits
    assert isinstance(loaded.forward, FusedForward if fused else TransformersForward)


@pytest.mark.parametrize("layout", ["merged", "split"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("kind", [kind for kind in FUSED if kind != "gemma2"])
def test_a_layer_in_one_native_call_has_the_bits_of_separate_operations(
    kind: str, dtype: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    run_layers = NativeAttention.run_layers

    def counted(step: NativeAttention, *arguments: Any) -> None:
        calls.append(1)
        run_layers(step, *arguments)

    monkeypatch.setattr(NativeAttention, "run_layers", counted)
    config = tiny_config(kind)
    if layout == "split":
        config.hidden_size = 96  # whole groups of inputs, which AMX reads in place
    folder = make_model(tmp_path, config, torch.bfloat16)
    scheduler = HandScheduler({kind: folder}, attention="native", layout=layout, dtype=dtype)
    prompts = [make_prompt(length, seed=length) for length in (1, 5, 23, 40)]
    forward = scheduler.models.services[kind].model.forward
    assert isinstance(forward, FusedForward)
    assert len(forward.native_layers) == scheduler.models.services[kind].model.module.config.num_hidden_layers
    scheduler.poison()
    at_once = logits_of(scheduler, kind, prompts, 4, chunk=16)
    made = len(calls)
    assert made > 4
    forward.native_layers.clear()
    scheduler.poison()
    assert logits_of(scheduler, kind, prompts, 4, chunk=16) == at_once
    assert len(calls) == made


def test_float32_layers_are_computed_by_separate_operations(tmp_path: Path) -> None:
    forward = load_at_once(make_model(tmp_path, tiny_config("llama"))).forward
    assert isinstance(forward, FusedForward)
    assert not forward.native_layers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_only_requested_rows_have_logits(dtype: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path, tiny_config("gemma3"))
    loaded = load_models([Service(name="s", model="m", dtype=dtype)], {"s": folder}).services["s"].model
    assert isinstance(loaded.forward, FusedForward)
    ids, positions = torch.arange(9).unsqueeze(0), torch.arange(9).unsqueeze(0)
    every, some = torch.arange(9), torch.tensor([8, 2])
    logits, kept = (loaded.forward(ids, positions, rows, RecordingStep((9,))) for rows in (every, some))
    # Native products have the same bits for any number of rows.
    tolerance = 1e-5 if dtype == "float32" else 0.0
    torch.testing.assert_close(kept, logits[some], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_model_of_one_layer(dtype: str, tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.num_hidden_layers = 1
    scheduler = HandScheduler(
        {"llama": make_model(tmp_path, config, torch.bfloat16)}, attention="native", dtype=dtype
    )
    prompts = [make_prompt(length, seed=length) for length in (1, 5, 23)]
    whole, chunks = (logits_of(scheduler, "llama", prompts, 3, chunk=chunk) for chunk in (64, 4))
    assert whole <= chunks  # rows that do not sample have logits, too, which are not read


def test_a_model_with_other_computations_around_its_layers_keeps_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LlamaModel.forward

    def more(self: Any, *args: Any, **keywords: Any) -> Any:
        output = plain(self, *args, **keywords)
        output.last_hidden_state = output.last_hidden_state * 1.001
        return output

    monkeypatch.setattr(LlamaModel, "forward", more)
    loaded = load_at_once(make_model(tmp_path, tiny_config("llama")))
    assert {type(layer) for layer in loaded.module.model.layers} == {DecoderLayer}
    assert isinstance(loaded.forward, TransformersForward)
