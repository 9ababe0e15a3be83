"""End tokens and chat templates of GGUF files."""

from pathlib import Path

import gguf
import pytest
from models_builders import make_folder

from shoal.models.chat_template.files import read_templates
from shoal.models.folder.json_files import read_json
from shoal.models.gguf.text_metadata import keep_text_metadata


def reader_of(file: Path, **keys: object) -> gguf.GGUFReader:
    writer = gguf.GGUFWriter(file, "llama")
    for name, value in keys.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.GGUFReader(file)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"eos_token_id": 3}, [3]),
        ({"eos_token_id": 3, "eot_token_id": 7, "eom_token_id": 8}, [3, 7, 8]),
        ({"eos_token_id": 3, "eot_token_id": 3}, [3]),
        ({}, 9),
    ],
)
def test_every_end_of_a_file_ends_outputs(tmp_path: Path, keys: dict[str, int], expected: object) -> None:
    folder = make_folder(tmp_path / "made", None, generation_config={"eos_token_id": 9, "top_k": 5})
    keep_text_metadata(reader_of(tmp_path / "a.gguf", **keys), folder)
    assert read_json(folder / "generation_config.json") == {"eos_token_id": expected, "top_k": 5}


def test_templates_keep_their_names(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "made", None, tokenizer_config={"chat_template": "plain"})
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "of the file"}]
    keep_text_metadata(reader_of(tmp_path / "a.gguf", chat_template=several), folder)
    assert read_templates([folder]) == {"default": "plain", "tool_use": "tools"}
