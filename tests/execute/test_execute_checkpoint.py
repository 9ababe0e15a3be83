"""Weights that a folder lacks are refused by name, never made up."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from execute_builders import make_model, tiny_config
from safetensors.torch import load_file, save_file

from experiments.padded.torch_executor import load_static_model
from shoal.core import ModelUnavailable, ModelUnsupported, Service
from shoal.execute.model.model_set import load_models

Weights = dict[str, torch.Tensor]


def load(folder: Path) -> object:
    return load_models([Service(name="s", model="tiny")], {"s": folder})


def load_static(folder: Path) -> object:
    return load_static_model(Service(name="s", model="tiny"), folder)


def altered(folder: Path, alter: Callable[[Weights], object]) -> Path:
    """A tiny model whose embedding is also its head, and whose weights were altered."""
    config = tiny_config("llama")
    config.tie_word_embeddings = True
    file = make_model(folder, config) / "model.safetensors"
    weights = load_file(file)
    alter(weights)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def alter_config(folder: Path, **fields: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return folder


@pytest.mark.parametrize("loader", [load, load_static])
def test_missing_weights_are_refused_by_name(tmp_path: Path, loader: Callable[[Path], object]) -> None:
    folder = altered(tmp_path / "m", lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelUnsupported, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight"):
        loader(folder)


def test_a_missing_embedding_is_not_taken_for_tied(tmp_path: Path) -> None:
    folder = altered(tmp_path / "m", lambda weights: weights.pop("model.embed_tokens.weight"))
    with pytest.raises(
        ModelUnsupported, match=r"no weights for lm_head\.weight, model\.embed_tokens\.weight"
    ):
        load(folder)


def test_weights_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    folder = altered(tmp_path / "m", lambda weights: weights.update({"model.norm.weight": torch.ones(7)}))
    with pytest.raises(ModelUnsupported, match=r"model\.norm\.weight is \[7\], not \[48\]"):
        load(folder)


def test_tied_weights_are_not_missing_and_unused_ones_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = altered(tmp_path / "m", lambda weights: weights.update({"vision.weight": torch.ones(3)}))
    with caplog.at_level(logging.WARNING, "shoal"):
        load(folder)
    assert [record.getMessage() for record in caplog.records] == [
        "tiny: not used of its files: vision.weight"
    ]


def test_a_size_far_beyond_the_files_takes_no_memory(tmp_path: Path) -> None:
    folder = alter_config(altered(tmp_path / "m", len), hidden_size=6 * 10**8, intermediate_size=10**9)
    with pytest.raises(
        ModelUnsupported, match=r"config\.json describes .* parameters, but the weight files hold"
    ):
        load(folder)


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    folder = altered(tmp_path / "m", len)
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelUnavailable, match="other formats are not read"):
        load(folder)


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    folder = altered(tmp_path / "m", len)
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    code = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    load(alter_config(folder, auto_map=code))  # transformers knows llama
    with pytest.raises(ModelUnsupported, match="brings its own code"):
        load(alter_config(folder, model_type="mine"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "odd",
    [
        {"num_attention_heads": 0},
        {"hidden_act": "odd"},
        {"auto_map": 5},
        {"rope_parameters": []},
        {"vocab_size": "x"},
    ],
)
def test_odd_configs_are_no_tracebacks(tmp_path: Path, odd: dict[str, object]) -> None:
    folder = alter_config(altered(tmp_path / "m", len), **odd)
    with pytest.raises(ModelUnsupported, match="tiny: "):
        load(folder)


@pytest.mark.parametrize(("loader", "window"), [(load, 2**70), (load_static, -1)])
def test_bad_config_values_that_fail_in_a_forward_pass_are_refused(
    tmp_path: Path, loader: Callable[[Path], object], window: int
) -> None:
    config = tiny_config("mistral")
    config.sliding_window = window
    with pytest.raises(ModelUnsupported, match=r"tiny: transformers .* cannot run it: "):
        loader(make_model(tmp_path / "m", config))


def test_a_config_cannot_fetch_a_kernel_from_a_hub(tmp_path: Path) -> None:
    load_static(alter_config(altered(tmp_path / "m", len), attn_implementation="somebody/kernel"))
