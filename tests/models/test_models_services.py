"""What a service needs of its model's files, with weights of files and with random ones."""

import json
from pathlib import Path

import huggingface_hub
import pytest
from models_builders import byte_level_backend, make_folder

from shoal.core import ConfigError, InvalidRequest, ModelUnavailable, ModelUnsupported, Service
from shoal.models import (
    NoTokenizer,
    check_service,
    describe_random_model,
    resolve,
    resolve_service,
)
from shoal.models.conversion import run_conversion

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "max_position_embeddings": 512,
    "vocab_size": 100,
    "eos_token_id": [2, 7],
}


def config_folder(folder: Path, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


def random_service(model: object) -> Service:
    return Service(name="s", model=str(model), weights="random")


def test_config_json_is_enough_for_random_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        run_conversion, "start_child", lambda *_, **__: pytest.fail("a tokenizer was converted")
    )
    folder = config_folder(tmp_path / "m")
    check_service(random_service(folder))
    assert resolve_service(random_service(folder)) == folder
    with pytest.raises(ModelUnavailable, match=r"holds no \*\.safetensors weights"):
        resolve_service(Service(name="s", model=str(folder)))


def test_config_json_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="is quantised"):
        resolve_service(random_service(config_folder(tmp_path, quantization_config={"quant_method": "hqq"})))
    with pytest.raises(ModelUnavailable, match=r"has no config\.json"):
        resolve_service(random_service(make_folder(tmp_path / "none", byte_level_backend())))


@pytest.mark.parametrize("file", ["tokenizer.json", "vocab.txt", "tokenizer.model", "merges.txt"])
def test_a_tokenizer_is_converted_if_there_is_one(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready: list[Path] = []
    monkeypatch.setattr(resolve, "tokenizer_folder", lambda folder, progress: ready.append(folder))
    folder = config_folder(tmp_path / "m")
    resolve_service(random_service(folder))
    assert not ready
    (folder / file).touch()
    resolve_service(random_service(folder))
    assert ready == [folder]


def test_weights_are_not_downloaded_from_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["config.json", "model.safetensors", "tokenizer.model"]
    options_used: dict[str, object] = {}

    def download(repo: str, **options: object) -> str:
        options_used.update(options)
        return str(config_folder(tmp_path / "snapshot"))

    def kept() -> list[str]:
        return list(
            huggingface_hub.utils.filter_repo_objects(
                names,
                allow_patterns=options_used["allow_patterns"],
                ignore_patterns=options_used["ignore_patterns"],
            )
        )

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_service(random_service("owner/model")) == tmp_path / "snapshot"
    assert kept() == ["config.json", "tokenizer.model"]
    with pytest.raises(ModelUnavailable):
        resolve_service(Service(name="s", model="owner/model"))
    assert kept() == names


def test_a_gguf_file_has_no_random_weights(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    check_service(Service(name="s", model=str(file)))
    for refuse in (check_service, resolve_service):
        with pytest.raises(ConfigError, match=r"service 's': weights: random are made from a config\.json"):
            refuse(random_service(file))


def test_no_tokenizer_takes_token_ids_only(tmp_path: Path) -> None:
    tokenizer = NoTokenizer(config_folder(tmp_path / "m"))
    assert tokenizer.decode([5, 6, 99]) == ""
    assert tokenizer.token_bytes(5) == b""
    assert tokenizer.eos_token_ids == (2, 7)
    with pytest.raises(InvalidRequest, match=r"m has no tokenizer files .* lists of token ids"):
        tokenizer.encode("text")
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_random_weights_are_described_as_such(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "m")
    described = describe_random_model("m", folder, "bfloat16", parameters=123, weights="random 1")
    assert (described.family, described.format, described.quantisation) == ("llama", "random", "BF16")
    assert (described.parameters, described.size_bytes) == (123, 0)
    assert described.modified_s == (folder / "config.json").stat().st_mtime
    assert (
        described.layers,
        described.hidden,
        described.heads,
        described.kv_heads,
        described.vocab_size,
    ) == (3, 64, 8, 2, 100)
    other = describe_random_model("m", folder, "bfloat16", parameters=123, weights="random 2")
    assert len(bytes.fromhex(described.digest)) == 32
    assert other.digest != described.digest
