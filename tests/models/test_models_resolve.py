import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from models_builders import byte_level_backend, make_folder, make_weights, whole_folder

from shoal.core import ModelUnavailable, ModelUnsupported
from shoal.models import Tokenizer, list_models, pull_model, resolve_model
from shoal.models.download.catalog import BUNDLED
from shoal.models.download.pull import bundled_folder


def test_importing_models_imports_neither_torch_nor_transformers() -> None:
    check = "import sys, shoal.models; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_model_folder_resolves_to_itself(tmp_path: Path) -> None:
    folder = whole_folder(tmp_path / "mine")
    assert resolve_model(str(folder)) == folder


def test_a_cached_alias_needs_nothing_else(empty_cache: Path) -> None:
    folder = whole_folder(bundled_folder(BUNDLED["smollm2"]))
    assert resolve_model("smollm2") == pull_model("smollm2") == folder


def test_an_existing_folder_comes_before_an_alias(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = whole_folder(bundled_folder(BUNDLED["smollm2"]))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert resolve_model("smollm2") == cached  # the folder here is no model
    whole_folder(tmp_path / "smollm2")
    assert resolve_model("smollm2") == Path("smollm2")


@pytest.mark.parametrize("name", ["smolm2", "gemma-270m"])
def test_an_unknown_name_gets_the_nearest_alias(name: str) -> None:
    nearest = {"smolm2": "smollm2", "gemma-270m": "gemma3-270m"}[name]
    with pytest.raises(ModelUnavailable, match=f"Did you mean the alias '{nearest}'"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["", "no", "/absolute/nothing/here", "./missing", "a/b/c"])
def test_an_impossible_name_lists_what_is_possible(name: str) -> None:
    with pytest.raises(ModelUnavailable):
        resolve_model(name)


def test_wrong_files_and_folders_are_explained(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelUnavailable, match=r"neither a folder nor a \.gguf file"):
        resolve_model(str(tmp_path / "weights.bin"))
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(ModelUnavailable, match=r"no config\.json.*name the file .*m\.gguf"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelUnavailable, match=r"no \*\.safetensors"):
        resolve_model(str(tmp_path))


def test_a_hub_id_is_downloaded_without_superfluous_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = whole_folder(tmp_path / "snapshot")
    options_used: dict[str, object] = {}
    reports: list[tuple[str, int, int | None]] = []

    def download(repo: str, **options: object) -> str:
        options_used.update(options, repo=repo)
        bar = options["tqdm_class"](total=10, unit="B", disable=False)  # type: ignore[operator]
        bar.update(10)
        bar.refresh()
        bar.close()
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("owner/model", lambda *report: reports.append(report)) == folder
    assert options_used["repo"] == "owner/model"
    names = [
        *("model-00001-of-2.safetensors", "tokenizer.model", "additional_chat_templates/tool_use.jinja"),
        *("pytorch_model.bin", "onnx/config.json", "assets/a.json", "adapter/adapter.safetensors"),
    ]
    kept = huggingface_hub.utils.filter_repo_objects(
        names, allow_patterns=options_used["allow_patterns"], ignore_patterns=options_used["ignore_patterns"]
    )
    assert list(kept) == names[:3]
    assert reports[-1] == ("downloading owner/model", 10, 10)


def test_an_unreachable_hub_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    # In a subprocess, as huggingface_hub reads its settings when imported.
    code = "import sys; from shoal.models import resolve_model; resolve_model('someone/smollm2')"
    environment = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "SHOAL_CACHE": str(tmp_path),
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "ModelUnavailable: cannot get 'someone/smollm2': the hub cannot be reached" in done.stderr
    assert "Did you mean the alias 'smollm2'?" in done.stderr


@pytest.mark.slow
def test_a_tokenizer_without_tokenizer_json_is_converted_once_into_the_cache(
    empty_cache: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "old"
    backend = json.loads(byte_level_backend().to_str())["model"]
    vocab = {**backend["vocab"], "<|endoftext|>": len(backend["vocab"])}
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    make_folder(folder, None, config={"model_type": "gpt2"}, vocab=vocab, tokenizer_config=config)
    (folder / "merges.txt").write_text("".join(f"{left} {right}\n" for left, right in backend["merges"]))
    make_weights(folder / "model.safetensors", "wte.weight")
    reports: list[str] = []

    assert resolve_model(str(folder), lambda what, done, total: reports.append(what)) == folder

    assert reports == ["converting the tokenizer (old)", "converted (old)"]
    assert not (folder / "tokenizer.json").exists()
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("the the") == [*tokenizer.encode("t"), vocab["he"], vocab["Ġthe"]]
    assert tokenizer.eos_token_ids == (vocab["<|endoftext|>"],)
    resolve_model(str(folder), lambda what, done, total: reports.append(what))
    assert len(reports) == 2


@pytest.mark.slow
def test_a_tokenizer_with_own_code_is_not_run(empty_cache: Path, tmp_path: Path) -> None:
    folder = whole_folder(
        tmp_path / "coded", tokenizer_config={"auto_map": {"AutoTokenizer": ["mine.T", None]}}
    )
    (folder / "tokenizer.json").unlink()
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(
        ModelUnsupported, match=r"the tokenizer of .*coded: .*is code in the folder \(auto_map\)"
    ):
        resolve_model(str(folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_folder_without_any_tokenizer_is_explained(empty_cache: Path, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "bare", None, config={"model_type": "llama"})
    make_weights(folder / "model.safetensors", "wte.weight")
    with pytest.raises(ModelUnsupported, match=r"could not convert the tokenizer of .*bare"):
        resolve_model(str(folder))
    assert list((empty_cache / "tokenizers").iterdir()) == list((empty_cache / "tokenizers").glob(".*.lock"))


def test_default_cache_follows_the_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert not any(info.cached for info in list_models())
    bundled_folder(BUNDLED["smollm2"]).mkdir(parents=True)
    assert (tmp_path / "shoal" / "models").is_dir()


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", "/dev/null/cache")
    for fetch in (resolve_model, pull_model):
        with pytest.raises(ModelUnavailable, match="SHOAL_CACHE"):
            fetch("smollm2")
