"""Recognised decoder layers compute what they replace; what is built otherwise keeps its own code."""

from pathlib import Path
from typing import Any

import pytest
import torch
from execute_builders import (
    COMMON,
    FUSED_KINDS,
    KINDS,
    HandScheduler,
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
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from shoal.execute.attention.transformers_hook import ATTENTION_NAME
from shoal.execute.linear.merged_products import choose_products
from shoal.execute.model.decoder_layer import DecoderLayer
from shoal.execute.model.probe import PROMPT_LENGTHS, ProbeResult, probe
from shoal.execute.model.recognise_layers import fused_layers, recognise_layers
from shoal.execute.model.record_attention import RecordingStep, packed_logits
from shoal.execute.model.replace import Place, replace_modules
from shoal.execute.model.transformers_forward import TransformersForward

pytestmark = needs_native

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


def fuse_found(model: nn.Module, probed: ProbeResult) -> dict[Place, nn.Module]:
    """Replace what is recognised; returns the originals."""
    products = choose_products(torch.device("cpu"))
    assert products is not None
    layers = recognise_layers(model, probed, products.kernels)
    return replace_modules(model, fused_layers(layers, products))


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
    replaced = fuse_found(model, probed)
    assert len(replaced) == (model.config.num_hidden_layers if kind in FUSED_KINDS else 0)
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
    assert len(fuse_found(model, probed)) == fused
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
    assert not fuse_found(model, probed)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_the_activation_is_found(activation: str, tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.hidden_act = activation
    model, probed = load(tmp_path, config)
    assert len(fuse_found(model, probed)) == (0 if activation == "relu" else 3)
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
    assert len(fuse_found(model, probed)) == 3
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
