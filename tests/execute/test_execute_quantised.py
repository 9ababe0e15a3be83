"""Folders quantised in other ways than GGUF are computed as the dense weights that they stand for."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from execute_builders import COMMON, HandScheduler, logits_of, make_model, make_prompt
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from at_hand import on_cpu
from quantised_folders import (
    Packed,
    Packer,
    awq_config,
    compressed_config,
    gptq_config,
    pack_awq,
    pack_compressed,
    pack_fp8,
    pack_gptq,
    pack_int8,
    quantise_folder,
    weights_of,
)
from shoal.core import Service
from shoal.execute.linear.packed_linear import PackedLinear
from shoal.execute.linear.packed_weights import GROUP, quantise_channels, unpack_int8
from shoal.execute.model import choose_dtype
from shoal.execute.model.checkpoint import load_module, read_model_config
from shoal.execute.model.choose_dtype import FAST_INT8
from shoal.execute.model.int8_model import use_int8
from shoal.execute.model.loading import LoadedModel
from shoal.execute.model.model_set import load_models
from shoal.execute.model.probe import INT8_TOLERANCE
from shoal.execute.model.record_attention import RecordingStep, packed_logits

PROJ = "_proj"
"""In the names of all linear layers but the output head."""
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


def int4(strategy: str = "group", **fields: object) -> dict[str, Any]:
    return compressed_config("pack-quantized", weights_of(4, strategy, **fields))


def channel_fp8(form: str = "float-quantized", strategy: str = "channel", **fields: object) -> dict[str, Any]:
    return compressed_config(form, weights_of(8, strategy, type="float", **fields))


CASES: dict[str, tuple[Packer, dict[str, Any]]] = {
    "awq-128": (pack_awq(128), awq_config(128)),
    "awq-64": (pack_awq(64), awq_config(64)),
    "awq-32-old-names": (
        pack_awq(32),
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"},
    ),
    "gptq-4": (pack_gptq(4, 128), gptq_config(4, 128)),
    "gptq-4-without-g-idx": (pack_gptq(4, 32, g_idx=False), gptq_config(4, 32)),
    "gptq-4-asymmetric": (pack_gptq(4, 64, symmetric=False), gptq_config(4, 64, sym=False)),
    "gptq-4-channel": (pack_gptq(4, -1), gptq_config(4, -1)),
    "gptq-4-act-order": (pack_gptq(4, 32, act_order=True), gptq_config(4, 32, desc_act=True)),
    "gptq-4-v2": (pack_gptq(4, 64, symmetric=False, v2=True), gptq_config(4, 64, v2=True, sym=False)),
    "gptq-8": (pack_gptq(8, 128), gptq_config(8, 128)),
    "gptq-8-asymmetric-v2": (
        pack_gptq(8, 32, symmetric=False, v2=True),
        gptq_config(8, 32, v2=True, sym=False),
    ),
    "packed-4": (pack_compressed(4, 128), int4(group_size=128)),
    "packed-4-channel": (pack_compressed(4, -1), int4("channel")),
    "packed-4-asymmetric": (
        pack_compressed(4, 32, symmetric=False),
        int4(group_size=32, symmetric=False),
    ),
    "packed-4-act-order": (pack_compressed(4, 32, act_order=True), int4(group_size=32, actorder="group")),
    "packed-8": (
        pack_compressed(8, 64),
        compressed_config("pack-quantized", weights_of(8, "group", group_size=64)),
    ),
    "packed-8-asymmetric": (
        pack_compressed(8, -1, symmetric=False),
        compressed_config("pack-quantized", weights_of(8, "channel", symmetric=False)),
    ),
    "int8": (pack_int8(), compressed_config("int-quantized", weights_of(8, "channel"))),
    "int8-asymmetric": (
        pack_int8(symmetric=False),
        compressed_config("int-quantized", weights_of(8, "channel", symmetric=False)),
    ),
    "fp8-channel": (pack_fp8(1, -1, dtype=torch.bfloat16), channel_fp8()),
    "fp8-tensor": (pack_fp8(-1, -1), channel_fp8(strategy="tensor")),
    "fp8-naive-block": (
        pack_fp8(128, 128),
        channel_fp8("naive-quantized", "block", block_structure=[128, 128]),
    ),
    "fp8-blocks": (pack_fp8(128, 128, scale=".weight_scale_inv"), {**FP8, "weight_block_size": [128, 128]}),
    "fp8-one-scale": (pack_fp8(-1, -1), FP8),
}
INTEGERS = [name for name in CASES if "fp8" not in name]


def tiny(kind: str = "llama") -> Any:
    kinds = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    return kinds[kind](**COMMON, **SIZES, **({"head_dim": 32} if kind == "qwen3" else {}))


Folders = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A quantised folder of a case, and the dense one; not to be changed."""

    @cache
    def make(case: str, kind: str = "llama") -> tuple[Path, Path]:
        packer, config = CASES[case]
        root = tmp_path_factory.mktemp(case)
        return quantise_folder(make_model(root / "source", tiny(kind)), root, {PROJ: packer}, config)

    return make


def load(folder: Path, dtype: str) -> LoadedModel:
    models = load_models([Service(name="s", model="m", dtype=dtype)], {"s": folder})
    return models.services["s"].model


def rows(folder: Path, dtype: str) -> set[bytes]:
    """Bits of logits."""
    prompts = [make_prompt(n, seed=n) for n in (1, 7, 19)]
    return logits_of(HandScheduler({"m": folder}, dtype=dtype), "m", prompts, 3)


def module_of(folder: Path, dtype: torch.dtype) -> Any:
    config = read_model_config("m", folder)
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    return load_module(kind, folder, config, "m", dtype)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_dense_ones_rounded_once(made: Folders, case: str) -> None:
    quantised, dense = made(case)
    expected = load_file(dense / "model.safetensors")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = module_of(quantised, dtype).state_dict()
        assert found.keys() == expected.keys()
        for name, weight in found.items():
            assert torch.equal(weight, expected[name].to(dtype))


@pytest.mark.parametrize("case", ["awq-128", "gptq-4-act-order", "packed-4-asymmetric", "fp8-blocks"])
def test_logits_are_those_of_the_dense_weights(made: Folders, case: str) -> None:
    quantised, dense = made(case, "qwen2" if case.startswith("awq") else "llama")
    for dtype in ("float32", "bfloat16"):
        assert rows(quantised, dtype) == rows(dense, dtype)


def int8_layers(folder: Path) -> dict[str, PackedLinear]:
    """The int8 layers of the model by name, made from the folder or read from the cache."""
    model = module_of(folder, torch.bfloat16)
    use_int8(model, folder)
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, PackedLinear)}


def dense_of(layer: PackedLinear) -> torch.Tensor:
    """float32 [outputs, inputs]."""
    weights = layer.weights
    values = unpack_int8(weights).float()
    scales = weights.scales
    if scales.ndim == 3:
        spread = scales.transpose(1, 2).reshape(len(values), -1).repeat_interleave(GROUP, 1)
    else:
        spread = scales.reshape(-1, 1)
    return (values * spread)[: weights.out_features, : weights.in_features]


@pytest.fixture
def int8_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "int8"


ROUNDED = (
    "gptq-4-act-order",
    "gptq-8-asymmetric-v2",
    "packed-4-act-order",
    "packed-8-asymmetric",
    "int8-asymmetric",
)
"""Formats of integers that int8 layers cannot have as they are."""


@on_cpu
@pytest.mark.parametrize("case", CASES)
def test_int8_has_the_integers_and_scales_of_the_folder(made: Folders, case: str, int8_cache: Path) -> None:
    quantised, dense = made(case)
    expected = load_file(dense / "model.safetensors")
    for _ in ("from the folder", "from the cache"):
        layers = int8_layers(quantised)
        assert len(layers) == 2 * 7 + 1
        for name, layer in layers.items():
            weight = expected[f"{name}.weight"]
            if case in INTEGERS and case not in ROUNDED and PROJ in name:
                assert torch.equal(dense_of(layer), weight)
            else:
                values, scales = quantise_channels(weight.bfloat16())
                assert torch.equal(dense_of(layer), values * scales[:, None])
    assert len([path for path in int8_cache.iterdir() if path.is_dir()]) == 1


@on_cpu
@pytest.mark.parametrize("case", ["awq-64", "packed-4-channel"])
def test_int8_logits_are_near_those_of_the_dense_weights(made: Folders, case: str, int8_cache: Path) -> None:
    quantised, dense = made(case)
    ours, theirs = (load(folder, dtype) for folder, dtype in ((quantised, "int8"), (dense, "float32")))
    prompts = [torch.tensor([make_prompt(12, seed=1)])]
    found, expected = (
        packed_logits(model.forward, prompts, RecordingStep((12,))).float() for model in (ours, theirs)
    )
    assert float((found - expected).norm() / expected.norm()) < INT8_TOLERANCE


@on_cpu
@pytest.mark.parametrize(
    "case", ["awq-128", "gptq-4-act-order", "gptq-8-asymmetric-v2", "packed-8", "int8", "fp8-channel"]
)
def test_auto_is_int8_for_integers_that_int8_layers_can_have(
    made: Folders, case: str, int8_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised, _ = made(case)
    monkeypatch.setattr(choose_dtype, "load_native", lambda: SimpleNamespace(variant=FAST_INT8[0]))
    dtype = torch.int8 if case in ("awq-128", "packed-8", "int8") else torch.float32
    assert load(quantised, "auto").dtype == dtype
    monkeypatch.setattr(choose_dtype, "load_native", lambda: None)
    assert load(quantised, "auto").dtype == torch.float32


@on_cpu
def test_auto_keeps_layers_dense_that_the_folder_has_dense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_model(tmp_path / "source", tiny())
    quantised, _ = quantise_folder(source, tmp_path, {"self_attn": pack_awq(128)}, awq_config(128))
    monkeypatch.setattr(choose_dtype, "load_native", lambda: SimpleNamespace(variant=FAST_INT8[0]))
    assert load(quantised, "auto").dtype == torch.float32


def test_each_layer_may_be_quantised_in_another_way(tmp_path: Path) -> None:
    group = compressed_config("x", weights_of(4, "group", group_size=64))["config_groups"]["group_0"]
    groups = {
        "a": {**group, "targets": ["re:.*mlp"], "format": "pack-quantized"},
        "b": {
            "targets": ["Linear"],
            "weights": weights_of(8, "channel", type="float"),
            "format": "float-quantized",
        },
        "c": {
            "targets": ["model.layers.1.self_attn.q_proj"],
            "weights": weights_of(8, "channel"),
            "format": "int-quantized",
        },
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": groups,
        "ignore": ["model.layers.0.mlp.down_proj", "re:.*v_proj"],
    }
    packers = {
        "layers.0.mlp.up": pack_compressed(4, 64),
        "layers.0.mlp.gate": pack_compressed(4, 64),
        "layers.1.mlp": pack_compressed(4, 64),
        "layers.1.self_attn.q": pack_int8(),
        "q_proj": pack_fp8(1, -1),
        "k_proj": pack_fp8(1, -1),
        "o_proj": pack_fp8(1, -1),
        "lm_head": pack_fp8(1, -1),
    }
    source = make_model(tmp_path / "source", tiny("qwen3"))
    quantised, dense = quantise_folder(source, tmp_path, packers, config)
    assert rows(quantised, "float32") == rows(dense, "float32")
    assert rows(quantised, "bfloat16") == rows(dense, "bfloat16")


def test_gptq_may_have_other_bits_in_some_modules(tmp_path: Path) -> None:
    config = gptq_config(4, 64, dynamic={"+:.*mlp": {"bits": 8, "group_size": 128}, "-:.*o_proj": {}})
    packers = {"o_proj": lambda weight: Packed({".weight": weight}, weight), "mlp": pack_gptq(8, 128)}
    source = make_model(tmp_path / "source", tiny("qwen2"))
    quantised, dense = quantise_folder(source, tmp_path, {**packers, PROJ: pack_gptq(4, 64)}, config)
    assert rows(quantised, "float32") == rows(dense, "float32")


@pytest.mark.parametrize("case", ["gptq-4", "fp8-blocks"])
def test_experts_that_transformers_stacks(tmp_path: Path, case: str) -> None:
    source = make_model(
        tmp_path / "source", MixtralConfig(**COMMON, **SIZES, num_local_experts=3, num_experts_per_tok=2)
    )
    packer, config = CASES[case]
    quantised, dense = quantise_folder(source, tmp_path, {PROJ: packer, "experts": packer}, config)
    stored = load_file(quantised / "model.safetensors")
    names = {name.rpartition(".")[2] for name in stored if ".experts." in name}
    assert names == {end[1:] for end in packer(torch.ones(128, 256)).tensors}
    assert rows(quantised, "float32") == rows(dense, "float32")


def test_tensors_of_a_matrix_may_be_in_several_files(made: Folders, tmp_path: Path) -> None:
    whole, dense = made("gptq-4")
    quantised = Path(shutil.copytree(whole, tmp_path / "m"))
    stored = load_file(quantised / "model.safetensors")
    (quantised / "model.safetensors").unlink()
    weight_map = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(stored)}
    for file in set(weight_map.values()):
        save_file({name: stored[name] for name in stored if weight_map[name] == file}, quantised / file)
    (quantised / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert rows(quantised, "float32") == rows(dense, "float32")


def test_weights_count_in_the_dtype_of_the_service(
    made: Folders,
) -> None:
    quantised, dense = made("awq-128")
    for dtype in ("float32", "bfloat16"):
        found, expected = (load(folder, dtype) for folder in (quantised, dense))
        assert found.weight_bytes == expected.weight_bytes
        assert found.described.parameters == expected.described.parameters
        assert found.described.quantisation == "AWQ-INT4"
