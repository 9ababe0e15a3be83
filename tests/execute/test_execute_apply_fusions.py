"""Prepacked and fused parts compute what they replace, and replace nothing else."""

from pathlib import Path

import pytest
import torch
from execute_builders import make_model, make_prompt, tiny_config
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.pytorch_utils import Conv1D

from shoal.core import Service
from shoal.execute.linear import packed_linear
from shoal.execute.linear.packed_linear import OnednnLinear, PackedLinear, bf16_library, onednn_packs_bf16
from shoal.execute.model import loading
from shoal.execute.model.apply_fusions import packed_linears
from shoal.execute.model.fuse_norms_mlps import FusedRMSNorm, GatedMLP, fused_norm_or_mlp
from shoal.execute.model.int8_model import use_int8
from shoal.execute.model.model_set import load_models
from shoal.execute.model.replace import replace_modules

needs_onednn = pytest.mark.skipif(
    not onednn_packs_bf16(), reason="this CPU has no bf16 kernels for prepacked weights"
)
needs_ours = pytest.mark.skipif(bf16_library() is None, reason="our products of bfloat16 are not in use")


def parts(model: nn.Module, kind: type) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


FORMATS = [
    pytest.param(PackedLinear, id="ours", marks=needs_ours),
    pytest.param(OnednnLinear, id="oneDNN", marks=needs_onednn),
]


@pytest.mark.parametrize("linear", FORMATS)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
@torch.inference_mode()
def test_a_packed_and_fused_model_gives_the_same_logits(
    kind: str, linear: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if linear is OnednnLinear:
        monkeypatch.setattr(packed_linear, "bf16_library", lambda: None)
    folder = make_model(tmp_path / kind, tiny_config(kind), dtype=torch.bfloat16)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    packed = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert len(replace_modules(packed, packed_linears())) == parts(packed, linear) > 0
    replace_modules(packed, fused_norm_or_mlp)
    assert parts(packed, FusedRMSNorm) >= 2 * len(packed.model.layers) + 1
    assert parts(packed, GatedMLP) == len(packed.model.layers)
    ids = torch.tensor([make_prompt(20)])
    theirs, ours = plain(ids).logits.float(), packed(ids).logits.float()
    assert (theirs - ours).norm() / theirs.norm() < 0.05


@pytest.mark.parametrize("linear", FORMATS)
@torch.inference_mode()
def test_layers_with_transposed_weights_are_packed(
    linear: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if linear is OnednnLinear:
        monkeypatch.setattr(packed_linear, "bf16_library", lambda: None)
    folder = make_model(tmp_path / "gpt2", tiny_config("gpt2"), dtype=torch.bfloat16)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    packed = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    layers = parts(packed, Conv1D) + parts(packed, nn.Linear)
    replace_modules(packed, packed_linears())
    assert (parts(packed, Conv1D), parts(packed, linear)) == (0, layers)
    ids = torch.tensor([make_prompt(20)])
    theirs, ours = plain(ids).logits.float(), packed(ids).logits.float()
    assert (theirs - ours).norm() / theirs.norm() < 0.05


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
@torch.inference_mode()
def test_gated_mlps_of_int8_layers_are_fused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    folder = make_model(tmp_path / kind, tiny_config(kind), dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    use_int8(model, folder)
    ids = torch.tensor([make_prompt(20)])
    before = model(ids).logits.float()
    replace_modules(model, fused_norm_or_mlp)
    assert parts(model, GatedMLP) == len(model.model.layers)
    after = model(ids).logits.float()
    assert 0 < (after - before).norm() / before.norm() < 0.05


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_norms_are_fused_in_float32_too(kind: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_model(tmp_path / kind, tiny_config(kind)))
    replace_modules(model, fused_norm_or_mlp)
    assert parts(model, FusedRMSNorm) >= 2 * len(model.model.layers) + 1


def test_another_kind_of_norm_keeps_its_code() -> None:
    class OddRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))
            self.eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps) * self.weight

    model = nn.Sequential(OddRMSNorm())
    assert not replace_modules(model, fused_norm_or_mlp)
    assert type(model[0]) is OddRMSNorm


def test_a_norm_that_scales_by_one_plus_weight_keeps_small_weights_in_bfloat16() -> None:
    class PlusOneRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((16,), 0.0017, dtype=torch.bfloat16))
            self.eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
            return (y * (1.0 + self.weight.float())).type_as(x)

    model = nn.Sequential(PlusOneRMSNorm())
    original = model[0]
    assert len(replace_modules(model, fused_norm_or_mlp)) == 1
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    assert torch.equal(model(x), original(x))


@needs_onednn
def test_a_model_that_reads_its_layers_weights_is_left_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LlamaMLP.forward

    def reads_weights(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x.to(self.gate_proj.weight.dtype))

    monkeypatch.setattr(LlamaMLP, "forward", reads_weights)
    # Fused layers do not call their MLPs.
    monkeypatch.setattr(loading, "choose_products", lambda device, **options: None)
    folder = make_model(tmp_path / "m", tiny_config("llama"), dtype=torch.bfloat16)
    models = load_models([Service(name="s", model="m")], {"s": folder})
    module = models.services["s"].model.module
    assert parts(module, PackedLinear) == parts(module, OnednnLinear) == 0
    assert parts(module, FusedRMSNorm) > 0
