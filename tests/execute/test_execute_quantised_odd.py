"""Quantised folders with other names, other layers or odd tensors: read right, or refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from execute_builders import COMMON, make_model
from safetensors.torch import load_file, save_file
from test_execute_quantised import PROJ, SIZES, dense_of, int4, int8_layers, module_of, tiny
from transformers import GPT2Config, LlamaConfig, MixtralConfig, Phi3Config, PretrainedConfig

from quantised_folders import (
    awq_config,
    compressed_config,
    gptq_config,
    pack_awq,
    pack_compressed,
    pack_gptq,
    pack_int8,
    quantise_folder,
    weights_of,
)
from shoal.core import ModelUnsupported
from shoal.execute.quantised.weights import open_slices
from shoal.models import keeps_integers

Tensors = dict[str, torch.Tensor]
WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


def change(folder: Path, edit: Callable[[Tensors], Tensors]) -> None:
    save_file(edit(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})


def in_awq(tmp_path: Path, config: PretrainedConfig) -> tuple[Path, Tensors]:
    """A folder quantised by AWQ, and its dense weights."""
    source = make_model(tmp_path / "s", config)
    quantised, dense = quantise_folder(source, tmp_path, {PROJ: pack_awq(32)}, awq_config(32))
    return quantised, load_file(dense / WEIGHTS)


def in_gptq(tmp_path: Path) -> Path:
    return quantise_folder(
        make_model(tmp_path / "s", tiny()), tmp_path, {PROJ: pack_gptq(4, 32)}, gptq_config(4, 32)
    )[0]


def assert_integers_kept(folder: Path, dense: Tensors) -> None:
    assert keeps_integers(folder)
    for name, layer in int8_layers(folder).items():
        if PROJ in name:
            assert torch.equal(dense_of(layer), dense[f"{name}.weight"]), name


def test_integers_are_kept_where_the_checkpoint_lacks_the_prefix_of_the_model(tmp_path: Path) -> None:
    quantised, dense = in_awq(tmp_path, LlamaConfig(**COMMON, **SIZES, tie_word_embeddings=True))
    change(quantised, lambda tensors: {name.removeprefix("model."): each for name, each in tensors.items()})
    assert_integers_kept(quantised, dense)


def test_fused_queries_keys_and_values(tmp_path: Path) -> None:
    quantised, dense = in_awq(tmp_path, Phi3Config(**COMMON, **SIZES))
    for name, weight in module_of(quantised, torch.float32).state_dict().items():
        assert torch.equal(weight, dense[name]), name
    assert_integers_kept(quantised, dense)


def test_a_quantised_head_beside_embeddings_that_are_said_to_be_tied(tmp_path: Path) -> None:
    config = LlamaConfig(**COMMON | {"vocab_size": 192}, **SIZES, tie_word_embeddings=False)
    packers = {PROJ: pack_gptq(4, 32), "lm_head": pack_gptq(4, 32)}
    folders = quantise_folder(make_model(tmp_path / "s", config), tmp_path, packers, gptq_config(4, 32))
    for folder in folders:
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": True}))
    found, expected = (module_of(folder, torch.float32).state_dict() for folder in folders)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def test_models_with_weights_the_other_way_round_are_refused(tmp_path: Path) -> None:
    """A square matrix would be read transposed without any error."""
    folder = make_model(tmp_path / "s", GPT2Config(**COMMON, n_embd=64, n_head=4, n_layer=2, n_positions=256))
    tensors: Tensors = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        module = name.removesuffix(".weight")
        if module.endswith("attn.c_proj") and name.endswith(".weight"):
            tensors |= {module + end: part for end, part in pack_gptq(4, 32)(tensor.float()).tensors.items()}
        else:
            tensors[name] = tensor
    change(folder, lambda _: tensors)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": gptq_config(4, 32)}))
    with pytest.raises(ModelUnsupported, match="linear layers only, and this one has Conv1D"):
        module_of(folder, torch.float32)


def test_experts_in_int8_in_one_tensor_are_refused(tmp_path: Path) -> None:
    config = MixtralConfig(**COMMON, **SIZES, num_local_experts=3, num_experts_per_tok=2)
    quantised, dense = quantise_folder(
        make_model(tmp_path / "s", config),
        tmp_path,
        {"self_attn": pack_int8()},
        compressed_config("int-quantized", weights_of(8, "channel")),
    )
    state = module_of(dense, torch.float32).state_dict()

    def stack(tensors: Tensors) -> Tensors:
        stacked = {name: each for name, each in tensors.items() if "expert" not in name}
        for name, weight in state.items():
            if ".experts." in name:
                scale = weight.abs().amax(-1, keepdim=True) / 127
                stacked[name] = (weight / scale).round().to(torch.int8)
                stacked[f"{name}_scale"] = scale.squeeze(-1)
        return stacked

    change(quantised, stack)
    with pytest.raises(ModelUnsupported, match=r"stores .*experts.* as I8, so it is quantised"):
        module_of(quantised, torch.float32)


def test_groups_beyond_those_with_scales_are_named(tmp_path: Path) -> None:
    folder, name = in_gptq(tmp_path), "model.layers.0.self_attn.q_proj.g_idx"
    change(folder, lambda tensors: tensors | {name: torch.full_like(tensors[name], 99)})
    with pytest.raises(ModelUnsupported, match="has groups beyond"):
        module_of(folder, torch.float32)


def test_a_matrix_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    folder, name = in_gptq(tmp_path), "model.layers.0.self_attn.q_proj.weight"
    change(folder, lambda tensors: tensors | {name: torch.ones(128, 128)})
    with pytest.raises(ModelUnsupported, match=r"stores .*q_proj twice: as .*qweight and as .*weight"):
        module_of(folder, torch.float32)


def test_groups_of_minus_one_are_in_order(tmp_path: Path) -> None:
    """compressed-tensors has that before it orders inputs."""
    quantised, dense = quantise_folder(
        make_model(tmp_path / "s", tiny()),
        tmp_path,
        {PROJ: pack_compressed(4, 32)},
        int4(group_size=32, actorder="group"),
    )

    def with_groups(tensors: Tensors) -> Tensors:
        return tensors | {
            name.replace("weight_packed", "weight_g_idx"): torch.full((each.shape[1] * 8,), -1)
            for name, each in tensors.items()
            if name.endswith(".weight_packed")
        }

    change(quantised, with_groups)
    found = module_of(quantised, torch.float32).state_dict()
    for name, weight in load_file(dense / WEIGHTS).items():
        assert torch.equal(found[name], weight), name


def test_an_error_of_the_system_is_not_a_damaged_file(tmp_path: Path) -> None:
    folder = in_gptq(tmp_path)
    with pytest.raises(OSError, match="No space left"), open_slices(folder):
        raise OSError(28, "No space left on device")
