"""Descriptions of models."""

import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
from models_builders import make_folder
from safetensors.numpy import save_file

from shoal.models import describe_model
from shoal.models.conversion.run_conversion import SOURCE_FILE
from shoal.models.gguf.header import gguf_quantisation

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "max_position_embeddings": 512,
    "vocab_size": 100,
}


def folder_with_weights(tmp_path: Path, **config: object) -> Path:
    folder = make_folder(tmp_path, None, config=CONFIG | config)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    weights = {"embed.weight": np.zeros((100, 64), np.float16), "norm.weight": np.zeros(64, np.float16)}
    save_file(weights, folder / "model.safetensors")
    return folder


def write_gguf(file: Path, file_type: int | None, behind_vocabulary: bool = False) -> Path:
    writer = gguf.GGUFWriter(file, "llama")
    if file_type is not None and not behind_vocabulary:
        writer.add_file_type(file_type)
    writer.add_rope_freq_base(5000.0)
    writer.add_token_list(["a", "bc", "def"])
    writer.add_token_types([1, 1, 3])
    writer.add_array("some.nested", [[1, 2], [3]])
    writer.add_add_bos_token(True)
    if file_type is not None and behind_vocabulary:
        writer.add_file_type(file_type)
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_folder_of_safetensors(tmp_path: Path) -> None:
    folder = folder_with_weights(tmp_path)
    os.utime(folder / "model.safetensors", (1_700_000_000, 1_700_000_000))
    described = describe_model("m", folder, "float16")
    assert (described.family, described.format, described.quantisation) == ("qwen3", "safetensors", "F16")
    assert described.parameters == 100 * 64 + 64
    assert described.size_bytes == (folder / "model.safetensors").stat().st_size
    assert described.modified_s == 1_700_000_000
    assert (
        described.layers,
        described.hidden,
        described.heads,
        described.kv_heads,
        described.vocab_size,
    ) == (3, 64, 8, 2, 100)
    assert describe_model("m", folder, "int8").quantisation == "Q8_0"


def test_the_family_of_the_language_model_of_several(tmp_path: Path) -> None:
    assert (
        describe_model("m", folder_with_weights(tmp_path, model_type="gemma3_text"), "x").family == "gemma3"
    )


def test_the_digest_changes_with_the_files(tmp_path: Path) -> None:
    folder = folder_with_weights(tmp_path)
    first = describe_model("m", folder, "float16").digest
    assert len(bytes.fromhex(first)) == 32
    assert describe_model("m", folder, "int8").digest == first
    assert describe_model("other", folder, "float16").digest != first
    os.utime(folder / "model.safetensors", (1, 1))
    assert describe_model("m", folder, "float16").digest != first


@pytest.mark.parametrize("behind_vocabulary", [False, True])
def test_a_gguf_file_says_how_it_is_quantised(tmp_path: Path, behind_vocabulary: bool) -> None:
    file = write_gguf(tmp_path / "m.gguf", int(gguf.LlamaFileType.MOSTLY_Q4_K_M), behind_vocabulary)
    folder = folder_with_weights(tmp_path)
    (folder / SOURCE_FILE).write_text(json.dumps({"gguf": str(file)}))
    described = describe_model(str(file), folder, "bfloat16")
    assert (described.format, described.quantisation) == ("gguf", "Q4_K_M")
    file.unlink()
    described = describe_model(str(file), folder, "bfloat16")
    assert (described.format, described.quantisation) == ("gguf", "BF16")


@pytest.mark.parametrize(
    ("kind", "name"), [("ALL_F32", "F32"), ("MOSTLY_BF16", "BF16"), ("MOSTLY_IQ4_NL", "IQ4_NL")]
)
def test_kinds_of_gguf_files(tmp_path: Path, kind: str, name: str) -> None:
    assert gguf_quantisation(write_gguf(tmp_path / "m.gguf", int(gguf.LlamaFileType[kind]))) == name


def test_gguf_files_that_do_not_say_it(tmp_path: Path) -> None:
    assert gguf_quantisation(write_gguf(tmp_path / "m.gguf", None)) is None
    assert gguf_quantisation(write_gguf(tmp_path / "m.gguf", 999)) is None
    whole = write_gguf(tmp_path / "m.gguf", 15, behind_vocabulary=True).read_bytes()
    for size in range(0, 200, 7):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        assert gguf_quantisation(tmp_path / "cut.gguf") is None
    (tmp_path / "cut.gguf").write_bytes(b"no GGUF file, but long enough for a header")
    assert gguf_quantisation(tmp_path / "cut.gguf") is None
