"""What is refused for a model folder's files alone, before torch or an engine starts."""

import os
from pathlib import Path

import numpy as np
import pytest
from models_builders import byte_level_backend, make_folder, make_weights, whole_folder
from safetensors.numpy import save_file

from shoal.core import ModelUnavailable, ModelUnsupported
from shoal.models import pull_model, read_facts, resolve_model
from shoal.models.download.catalog import BUNDLED
from shoal.models.download.pull import bundled_folder
from shoal.models.folder.json_files import read_json

CODE = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.Mine"}
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}
SIZES = {"vocab_size": 9, "num_attention_heads": 2, "hidden_size": 8, "max_position_embeddings": 16}


def with_config(folder: Path, **config: object) -> Path:
    return whole_folder(folder, config={"model_type": "llama", **config})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mine", "auto_map": CODE}, "brings its own code .*auto_map.* no model_type 'mine'"),
        ({"quantization_config": BITSANDBYTES}, r"quantised \(bitsandbytes\).* possible are .*awq, gptq"),
        ({"text_config": {"quantization_config": BITSANDBYTES}}, r"quantised \(bitsandbytes\)"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers: 1000000000, but no more than 100000"),
        ({"num_hidden_layers": 3}, r"num_hidden_layers: 3, but no more than 2 could be in its weight files"),
        ({"num_labels": 10**400}, r"num_labels: 10{19}, but no more than 100000"),
        ({"text_config": {"num_local_experts": 10**9}}, r"num_local_experts: 1000000000"),
        ({"attribute_map": {"num_hidden_layers": "z"}, "z": 10**9}, "has an attribute_map"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_at_once(
    tmp_path: Path, config: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelUnsupported, match=message):
        resolve_model(str(with_config(tmp_path / "m", **config)))


def test_code_in_a_folder_is_ignored_if_transformers_has_the_model(tmp_path: Path) -> None:
    folder = with_config(tmp_path / "m", model_type="phi3", auto_map=CODE)
    assert resolve_model(str(folder)) == folder


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    folder = whole_folder(tmp_path / "m", adapter_config={"base_model_name_or_path": "x"})
    with pytest.raises(ModelUnsupported, match="adapter_config"):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    "name", ["../../../../etc/passwd", "/etc/passwd", "sub/model.safetensors", "pytorch_model.bin", 7, {}]
)
@pytest.mark.parametrize("named_by", ["model.safetensors.index", "config"])
def test_only_safetensors_files_in_the_folder_are_read(tmp_path: Path, name: object, named_by: str) -> None:
    folder = whole_folder(tmp_path / "m")
    (folder / "pytorch_model.bin").write_bytes(b"")
    if named_by == "config":
        make_folder(folder, None, config={"model_type": "llama", "transformers_weights": name})
    else:
        (folder / "model.safetensors").unlink()
        make_folder(folder, None, **{named_by: {"weight_map": {"model.norm.weight": name}}})
    with pytest.raises(ModelUnavailable, match=rf"{named_by}\.json names the weight file"):
        resolve_model(str(folder))


def test_shards_are_read_and_an_absent_one_is_named(tmp_path: Path) -> None:
    folder = whole_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    make_weights(folder / "one.safetensors", "model.norm.weight")
    weight_map = {"model.norm.weight": "one.safetensors"}
    make_folder(folder, None, **{"model.safetensors.index": {"weight_map": weight_map}})
    assert resolve_model(str(folder)) == folder
    weight_map["lm_head.weight"] = "two.safetensors"
    make_folder(folder, None, **{"model.safetensors.index": {"weight_map": weight_map}})
    with pytest.raises(ModelUnavailable, match=r"two\.safetensors"):
        resolve_model(str(folder))


def test_weights_in_bytes_count_as_quantised(tmp_path: Path) -> None:
    folder = whole_folder(tmp_path / "m")
    save_file({"model.norm.weight": np.ones((2, 3), np.int8)}, folder / "model.safetensors")
    with pytest.raises(ModelUnsupported, match=r"model\.norm\.weight as I8"):
        resolve_model(str(folder))


@pytest.mark.parametrize("in_cache", [False, True])
def test_a_file_cut_short_says_how_to_repair_it(tmp_path: Path, empty_cache: Path, in_cache: bool) -> None:
    folder = whole_folder(bundled_folder(BUNDLED["smollm2"]) if in_cache else tmp_path / "m")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    hint = rf"remove the folder {folder}.*shoal models pull" if in_cache else "copy or download it again"
    with pytest.raises(ModelUnavailable, match=rf"model\.safetensors is damaged .*{hint}"):
        pull_model("smollm2") if in_cache else resolve_model(str(folder))


def test_a_deeply_nested_config_is_no_traceback(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", byte_level_backend())
    (folder / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(ModelUnavailable, match=r"config\.json nests its values too deeply"):
        resolve_model(str(folder))


@pytest.mark.parametrize("ids", [["x"], "x", True, 2.5, {"a": 1}, [[2]], -1, 2**40])
def test_odd_ends_of_sequence_are_named(tmp_path: Path, ids: object) -> None:
    config = {**SIZES, "num_hidden_layers": 1, "eos_token_id": ids}
    with pytest.raises(ModelUnavailable, match=r"config\.json: eos_token_id must be"):
        read_facts(make_folder(tmp_path, None, config=config))


@pytest.mark.parametrize(
    "odd",
    [{"hidden_size": 0}, {"num_attention_heads": -1}, {"vocab_size": True}, {"max_position_embeddings": "x"}],
)
def test_odd_sizes_are_named(tmp_path: Path, odd: dict[str, object]) -> None:
    config = {**SIZES, "num_hidden_layers": 1, "architectures": "Odd", "rope_scaling": "odd", **odd}
    with pytest.raises(ModelUnsupported, match=rf"does not say .*{next(iter(odd))}"):
        read_facts(make_folder(tmp_path, None, config=config))


def test_a_small_file_that_is_no_regular_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    for name in ("folder.json", "pipe.json"):
        with pytest.raises(ModelUnavailable, match=f"{name} is no file"):
            read_json(tmp_path / name)
    assert read_json(tmp_path / "absent.json") == {}
    folder = whole_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(ModelUnavailable, match=r"model\.safetensors is no file"):
        resolve_model(str(folder))
