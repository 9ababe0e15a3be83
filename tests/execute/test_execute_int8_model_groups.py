"""Models from quantised GGUF files: their integers as the file has them, and ``dtype: auto``."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from execute_builders import HandScheduler, logits_of, make_prompt
from gguf import GGMLQuantizationType
from linear_builders import quantised_linear
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from at_hand import on_cpu
from gguf_files import write_tiny_llama
from shoal.core import ModelUnavailable, Service
from shoal.execute.linear.packed_linear import PackedLinear
from shoal.execute.linear.packed_weights import pack_int8, unpack_int8
from shoal.execute.model import choose_dtype, int8_model
from shoal.execute.model.choose_dtype import FAST_INT8
from shoal.execute.model.int8_model import use_int8
from shoal.execute.model.loading import LoadedModel
from shoal.execute.model.model_set import load_models
from shoal.models.conversion import convert
from shoal.models.folder.weights import COMPLETE, GROUPS_FILE
from shoal.native import VARIANTS

UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "int8"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model whose file has all matrices in Q8_0."""
    return convert_tiny(tmp_path_factory.mktemp("gguf"), GGMLQuantizationType.Q8_0)


@pytest.fixture(scope="module")
def in_four_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in Q4_0."""
    return convert_tiny(tmp_path_factory.mktemp("gguf"), GGMLQuantizationType.Q4_0)


def convert_tiny(root: Path, kind: GGMLQuantizationType) -> Path:
    write_tiny_llama(root / "m.gguf", hidden=64, inner=96, kv_heads=2, kind=kind)
    (root / "m").mkdir()
    assert convert.main(["gguf", str(root / "m.gguf"), str(root / "m")]) == 0
    return root / "m"


@pytest.fixture
def folder(converted: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(converted, tmp_path / "m"))


def in_int8(folder: Path) -> dict[str, PackedLinear]:
    """The int8 layers of the model by name."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    use_int8(model, folder)
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def has_groups(layer: PackedLinear, groups: dict[str, torch.Tensor], name: str) -> bool:
    values, scales = groups[f"{name}.values"], groups[f"{name}.scales"]
    packed = layer.weights.scales.transpose(1, 2).reshape(-1, scales.shape[1])[: len(scales)]
    found = unpack_int8(layer.weights)[: values.shape[0], : values.shape[1]]
    return torch.equal(found, values) and torch.equal(packed, scales)


def rewrite(folder: Path, groups: dict[str, torch.Tensor], complete: bool = True) -> None:
    save_file(groups, folder / GROUPS_FILE, metadata={COMPLETE: str(complete)})


def test_layers_have_the_integers_and_scales_of_the_file(converted: Path, cache: Path) -> None:
    groups = load_file(converted / GROUPS_FILE)
    for _ in ("quantised", "from the cache"):
        layers = in_int8(converted)
        assert len(layers) == len(groups) // 2 == 15
        assert all(has_groups(layer, groups, name) for name, layer in layers.items())
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


def test_an_omitted_layer_gets_a_scale_for_each_output(folder: Path) -> None:
    groups = load_file(folder / GROUPS_FILE)
    before = in_int8(folder)
    rewrite(folder, {name: tensor for name, tensor in groups.items() if not name.startswith(UP)})
    layers = in_int8(folder)
    assert before[UP].weights.grouped
    dense = load_file(folder / "model.safetensors")[f"{UP}.weight"]
    expected = quantised_linear(dense).weights
    assert torch.equal(layers[UP].weights.packed, expected.packed)
    assert torch.equal(layers[UP].weights.scales, expected.scales)
    assert all(has_groups(layer, groups, name) for name, layer in layers.items() if name != UP)


def test_a_file_of_another_model_is_named(folder: Path) -> None:
    groups = load_file(folder / GROUPS_FILE)
    rewrite(folder, groups | {f"{UP}.scales": groups[f"{UP}.scales"][:, :1].clone()})
    with pytest.raises(ModelUnavailable, match=rf"another shape for {UP}"):
        in_int8(folder)


@on_cpu
def test_logits_are_those_of_exact_integers(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [make_prompt(n, seed=n) for n in (1, 5, 23)]
    ours = logits_of(HandScheduler({"m": converted}, dtype="int8"), "m", prompts, 4)
    monkeypatch.setattr(int8_model, "load_native", lambda: None)
    assert logits_of(HandScheduler({"m": converted}, dtype="int8"), "m", prompts, 4) == ours


def test_layers_of_q4_0_stay_in_four_bits(in_four_bits: Path) -> None:
    groups = load_file(in_four_bits / GROUPS_FILE)
    for _ in ("quantised", "from the cache"):
        layers = in_int8(in_four_bits)
        assert len(layers) == len(groups) // 2 == 15
        assert {layer.weights.bits for layer in layers.values()} == {4}
        assert all(has_groups(layer, groups, name) for name, layer in layers.items())


@on_cpu
@pytest.mark.parametrize("wide", [(), ("v_proj", "up_proj")], ids=["all", "beside int8"])
def test_logits_in_four_bits_are_those_of_int8(
    wide: tuple[str, ...], in_four_bits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(in_four_bits, tmp_path / "m"))
    groups = load_file(folder / GROUPS_FILE)
    for name in groups:
        if name.endswith(tuple(f"{layer}.values" for layer in wide)):
            row, column = (groups[name] == 7).nonzero()[0]
            groups[name][row, column] = 8
    rewrite(folder, groups)
    prompts = [make_prompt(n, seed=n) for n in (1, 5, 23)]
    narrow = logits_of(HandScheduler({"m": folder}, dtype="int8"), "m", prompts, 4)
    others = {"down_proj", "lm_head"}  # of no input that a wide layer has
    for name, layer in in_int8(folder).items():
        assert layer.weights.bits == (8 if wide and name.rpartition(".")[2] not in others else 4), name
    bytes_narrow = load(folder, "int8")[0].weight_bytes
    monkeypatch.setattr(int8_model, "pack_integers", pack_int8)
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "other"))
    assert logits_of(HandScheduler({"m": folder}, dtype="int8"), "m", prompts, 4) == narrow
    assert load(folder, "int8")[0].weight_bytes > bytes_narrow


def load(folder: Path, dtype: str = "auto") -> tuple[LoadedModel, list[str]]:
    """The model, and what its start says."""
    lines: list[str] = []
    models = load_models([Service(name="s", model="m", dtype=dtype)], {"s": folder}, progress=lines.append)
    return models.services["s"].model, lines


@pytest.mark.parametrize("variant", [None, *VARIANTS])
def test_auto_is_int8_if_that_is_fast(
    variant: str | None, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = None if variant is None else SimpleNamespace(variant=variant)
    monkeypatch.setattr(choose_dtype, "load_native", lambda: native)
    model, lines = load(converted)
    dtype = "bfloat16" if variant in (None, "scalar") else "int8"
    assert model.dtype == getattr(torch, dtype)
    assert lines[-1] == f"loading m ({dtype}) on cpu"
    assert model.weight_bytes == load(converted, dtype)[0].weight_bytes


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """An int8 kernel that is fast, whatever this CPU is."""
    monkeypatch.setattr(choose_dtype, "load_native", lambda: SimpleNamespace(variant=FAST_INT8[0]))


@pytest.mark.usefixtures("fast")
def test_auto_is_bfloat16_if_a_layer_was_not_quantised(folder: Path) -> None:
    rewrite(folder, load_file(folder / GROUPS_FILE), complete=False)
    assert load(folder)[0].dtype == torch.bfloat16
    (folder / GROUPS_FILE).unlink()
    assert load(folder)[0].dtype == torch.bfloat16


@pytest.mark.usefixtures("fast")
def test_auto_is_bfloat16_for_a_model_that_cannot_run_in_int8(
    converted: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: plain(self, x.to(self.gate_proj.weight.dtype)))
    model, lines = load(converted)
    assert model.dtype == torch.bfloat16
    assert not any(isinstance(module, PackedLinear) for module in model.module.modules())
    assert lines[-2:] == [f"loading m ({dtype}) on cpu" for dtype in ("int8", "bfloat16")]
    assert "with int8 weights it cannot run" in caplog.text
