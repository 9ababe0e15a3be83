"""Images of models in the cache: the same logits as the model itself, and images that are made again."""

import errno
import gc
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from execute_builders import VOCAB, make_model, tiny_config
from weight_builders import image_of, next_arrival

from at_hand import on_cpu
from crossed import crossed
from quantised_folders import awq_config, pack_awq, quantise_folder
from shoal.core import ConfigError, ModelUnavailable, ModelUnsupported, ShoalError
from shoal.execute.linear import packed_linear
from shoal.execute.model import images, make_image
from shoal.execute.model.images import load_image
from shoal.execute.model.loading import Int8Unsupported, LoadedModel, load_model
from shoal.execute.model.record_attention import RecordingStep, packed_logits
from shoal.execute.model.transformers_forward import Forward, TransformersForward
from shoal.execute.weights.image import SKELETON_FILE, WEIGHTS_FILE, Place, read_weights
from shoal.execute.weights.loader import WeightLoader
from shoal.models import FACTS_FILE, list_images

pytestmark = on_cpu
KINDS = ("llama", "qwen3", "gemma3", "gpt2", "opt", "mixtral")
LENGTHS = (9, 4)
CPU = torch.device("cpu")


def fetched(folder: Path, dtype: torch.dtype = torch.float32, seed: int | None = None) -> LoadedModel:
    model = load_image("tiny", folder, dtype, CPU, seed)
    read_weights(image_of(model), check=True)
    return model


@torch.inference_mode()
def logits(forward: Forward) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(VOCAB, (1, length), generator=generator) for length in LENGTHS]
    return packed_logits(forward, prompts, RecordingStep(LENGTHS))


@torch.inference_mode()
def logits_in_halves(forward: Forward) -> torch.Tensor:
    """As for log-probabilities of a prompt."""
    ids = torch.arange(sum(LENGTHS))[None] % VOCAB
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return forward.logits(forward.hidden(ids, positions, torch.arange(ids.shape[1]), RecordingStep(LENGTHS)))


@pytest.mark.parametrize(("kind", "dtype"), crossed(KINDS, [torch.float32, torch.bfloat16, torch.int8]))
@pytest.mark.usefixtures("image_cache")
def test_a_model_from_an_image_computes_the_same_bits(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_model(tmp_path / kind, tiny_config(kind), torch.float32)
    expected, model = load_model("tiny", folder, dtype, CPU, None, onednn=False), fetched(folder, dtype)
    assert torch.equal(logits(model.forward), logits(expected.forward))
    assert torch.equal(logits_in_halves(model.forward), logits_in_halves(expected.forward))
    plain = [TransformersForward(each.module) for each in (model, expected)]
    assert torch.equal(logits(plain[0]), logits(plain[1]))
    facts = ("dtype", "kv_shape", "context_tokens", "vocab_size", "eos_token_ids", "weights", "described")
    for name in (*facts, "folder", "weights_name"):
        assert getattr(model, name) == getattr(expected, name), name
    assert type(model.forward) is type(expected.forward)


@pytest.mark.usefixtures("image_cache")
def test_an_image_of_a_quantised_folder_has_its_integers(tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", tiny_config("qwen2"))
    folder, _ = quantise_folder(source, tmp_path, {"_proj": pack_awq(-1)}, awq_config(-1))
    expected = load_model("tiny", folder, torch.int8, CPU, None, onednn=False)
    assert torch.equal(logits(fetched(folder, torch.int8).forward), logits(expected.forward))


@pytest.mark.usefixtures("image_cache")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_weights_that_onednn_would_pack_are_stored_as_they_are(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "bf16_library", lambda: None)
    monkeypatch.setattr(packed_linear, "onednn_packs_bf16", lambda: True)
    folder = make_model(tmp_path / kind, tiny_config(kind), torch.float32)
    expected = load_model("tiny", folder, torch.bfloat16, CPU, None, onednn=False)
    assert torch.equal(logits(fetched(folder, torch.bfloat16).forward), logits(expected.forward))


@pytest.mark.usefixtures("image_cache")
def test_random_weights_have_an_image_for_each_seed(tmp_path: Path) -> None:
    make_model(tmp_path / "m", tiny_config("llama"))
    (tmp_path / "m" / "model.safetensors").unlink()
    models = [fetched(tmp_path / "m", seed=seed) for seed in (1, 2, 1)]
    for model, seed in zip(models, (1, 2, 1), strict=True):
        expected = load_model("tiny", tmp_path / "m", torch.float32, CPU, seed)
        assert torch.equal(logits(model.forward), logits(expected.forward))
    assert [model.weights_name == models[0].weights_name for model in models] == [True, False, True]


@pytest.mark.usefixtures("image_cache")
def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    sizes = []
    for tied in (False, True):
        config = tiny_config("llama")
        config.tie_word_embeddings = tied
        sizes.append(image_of(fetched(make_model(tmp_path / str(tied), config))).num_bytes)
    assert sizes[0] - sizes[1] == pytest.approx(VOCAB * 48 * 4, abs=200)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, image_cache: Path) -> list[Path]:
    """The images that were made."""
    made: list[Path] = []
    make = images._make_in_child

    def count(order: images._Order, target: Path) -> None:
        made.append(target)
        make(order, target)

    monkeypatch.setattr(images, "_make_in_child", count)
    return made


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_model(tmp_path / "llama", tiny_config("llama"))


def test_an_image_is_made_again_only_if_it_would_be_another(
    made: list[Path], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for _ in range(2):
            fetched(llama, dtype)
    assert len(made) == 2
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        os.utime(llama / name, (5, 5))
        fetched(llama)
        fetched(llama)
    assert len(made) == 5
    monkeypatch.setattr(images, "transformers_version", "0.1")
    fetched(llama)
    monkeypatch.setattr(images, "native_status", lambda: "native kernels (other)")
    fetched(llama)
    monkeypatch.setattr(images, "_code_digest", lambda: "other")
    fetched(llama)
    assert len(made) == 8


def change_weights(folder: Path) -> torch.Tensor:
    """Other weights in a model's files; returns their logits."""
    make_model(folder, tiny_config("llama"), seed=5)
    return logits(load_model("tiny", folder, torch.float32, CPU, None, onednn=False).forward)


def test_a_new_image_takes_the_place_of_the_one_of_other_files_or_versions(
    made: list[Path], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        fetched(llama, dtype)
    fetched(make_model(tmp_path / "another", tiny_config("gpt2")))
    before = list_images()
    expected = change_weights(llama)
    assert torch.equal(logits(fetched(llama).forward), expected)
    monkeypatch.setattr(images, "_code_digest", lambda: "other")
    assert torch.equal(logits(fetched(llama).forward), expected)
    assert len(made) == 5
    assert [image.path for image in list_images()] == [image.path for image in before]
    assert sorted(image.source for image in before if image.source) == [tmp_path / "another", llama, llama]


def test_an_image_in_use_is_read_after_another_took_its_place(made: list[Path], llama: Path) -> None:
    model = load_image("tiny", llama, torch.float32, CPU, None)
    expected = logits(load_model("tiny", llama, torch.float32, CPU, None, onednn=False).forward)
    change_weights(llama)
    fetched(llama)
    assert len(made) == 2
    loader = WeightLoader()
    for _ in range(2):
        loader.fetch("a", image_of(model))
        assert next_arrival(loader).error is None
        assert torch.equal(logits(model.forward), expected)
        image_of(model).memory.release()
        image_of(model).place = Place.ABSENT
    loader.close()


def test_the_image_of_a_model_that_is_gone_goes_when_another_is_made(
    made: list[Path], llama: Path, tmp_path: Path
) -> None:
    fetched(llama)
    llama.rename(tmp_path / "moved")
    fetched(tmp_path / "moved")
    assert [image.source for image in list_images()] == [tmp_path / "moved"]


def test_an_image_holds_a_file_open_only_while_it_is_used(made: list[Path], llama: Path) -> None:
    fetched(llama)
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    model = load_image("tiny", llama, torch.float32, CPU, None)
    assert len(os.listdir("/proc/self/fd")) == files + 1
    del model
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files


def test_too_many_open_files_are_named_and_no_damage(
    made: list[Path], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched(llama)
    open_file = os.open

    def refuse(path: object, *arguments: object, **keywords: object) -> int:
        if path == WEIGHTS_FILE:
            raise OSError(errno.EMFILE, "Too many open files")
        return open_file(path, *arguments, **keywords)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match=r"Too many open files.*ulimit -n"):
        load_image("tiny", llama, torch.float32, CPU, None)
    assert len(made) == 1


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (WEIGHTS_FILE, Path.unlink),
        (WEIGHTS_FILE, _truncate),
        (SKELETON_FILE, _truncate),
        (SKELETON_FILE, Path.unlink),
        (FACTS_FILE, _truncate),
        (FACTS_FILE, lambda path: path.write_text(json.dumps({"num_bytes": 3}))),
        (FACTS_FILE, Path.unlink),
    ],
)
def test_an_image_whose_files_are_damaged_is_made_again(
    made: list[Path], llama: Path, name: str, damage
) -> None:
    expected = logits(fetched(llama).forward)
    damage(images.image_folder(llama, torch.float32, None) / name)
    assert torch.equal(logits(fetched(llama).forward), expected)
    assert len(made) == 2


@pytest.mark.parametrize("name", ["", WEIGHTS_FILE, SKELETON_FILE, FACTS_FILE])
def test_an_image_that_others_can_write_is_not_loaded(made: list[Path], llama: Path, name: str) -> None:
    fetched(llama)
    path = images.image_folder(llama, torch.float32, None) / name
    assert path.stat().st_mode & 0o077 == 0
    path.chmod(0o722)
    with pytest.raises(ModelUnavailable, match=r"others may write it.*remove it, or set SHOAL_CACHE"):
        fetched(llama)
    path.chmod(0o700)
    monkey = path.with_name("moved")
    path.rename(monkey)
    path.symlink_to(monkey)
    with pytest.raises(ModelUnavailable, match="others may write it"):
        fetched(llama)


def test_an_image_of_another_user_is_not_loaded(
    made: list[Path], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched(llama)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(ModelUnavailable, match="belongs to another user"):
        fetched(llama)


def test_two_that_start_at_once_make_one_image(
    made: list[Path], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, waiting = threading.Event(), threading.Event()
    make = images._make_in_child

    def wait_for_the_other(order: images._Order, target: Path) -> None:
        started.set()
        assert waiting.wait(60)
        make(order, target)

    def report(line: str) -> None:
        if "waiting for another process" in line:
            waiting.set()

    monkeypatch.setattr(images, "_make_in_child", wait_for_the_other)
    opened: list[LoadedModel] = []
    first, second = (
        threading.Thread(
            target=lambda: opened.append(load_image("tiny", llama, torch.float32, CPU, None, report))
        )
        for _ in range(2)
    )
    first.start()
    assert started.wait(60)
    second.start()
    first.join()
    second.join()
    assert (len(opened), len(made)) == (2, 1)


class Lambda(torch.nn.Module):
    """A module that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.function = lambda x: x


@pytest.mark.usefixtures("image_cache")
def test_a_model_that_cannot_be_pickled_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: object, **keywords: object) -> LoadedModel:
        model = load_model(*arguments, **keywords)  # type: ignore[arg-type]
        model.module.extra = Lambda()
        return model

    monkeypatch.setattr(make_image, "load_model", load)
    with pytest.raises(ModelUnsupported, match=r"tiny: Llama.*cannot be moved.*leave out weights\.memory"):
        fetched(llama)
    assert not images.image_folder(llama, torch.float32, None).exists()


@pytest.mark.usefixtures("image_cache")
def test_a_model_whose_copy_computes_something_else_is_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_apart = make_image.take_apart

    def forgetful(model: LoadedModel) -> object:
        model.module.lm_head.weight = torch.nn.Parameter(model.module.lm_head.weight + 1, requires_grad=False)
        return take_apart(model)

    monkeypatch.setattr(make_image, "take_apart", forgetful)
    with pytest.raises(ModelUnsupported, match="its copy has other logits"):
        fetched(llama)


@pytest.mark.parametrize(
    ("kind", "raised"),
    [
        ("Int8Unsupported", Int8Unsupported),
        ("ModelUnsupported", ModelUnsupported),
        ("ModelUnavailable", ModelUnavailable),
        ("ConfigError", ConfigError),
    ],
)
def test_errors_of_the_child_come_back_as_they_were(
    kind: str, raised: type[ShoalError], tmp_path: Path
) -> None:
    order = images._Order("tiny", tmp_path, torch.float32, None, "1")
    lines = ["a warning", json.dumps({"error": [kind, "why"]}), "{}"]
    error = images._error_of(order, tmp_path, lines, 1)
    assert (type(error), str(error)) == (raised, "why")


@pytest.mark.parametrize(("status", "how"), [(3, "exit status 3"), (-9, "signal 9")])
def test_a_child_that_ends_without_an_error_is_reported(status: int, how: str, tmp_path: Path) -> None:
    order = images._Order("tiny", tmp_path, torch.float32, None, "1")
    error = images._error_of(order, tmp_path, ["last words"], status)
    assert isinstance(error, ModelUnavailable)
    assert str(error).endswith(f"ended with {how} (last words)")


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    order = images._Order("tiny", tmp_path, torch.float32, None, "1")
    line = json.dumps({"error": ["ModelUnavailable", "[Errno 28] No space left on device"]})
    assert "SHOAL_CACHE" in str(images._error_of(order, tmp_path, [line], 1))


@pytest.mark.slow
def test_a_child_process_makes_an_image(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    lines: list[str] = []
    model = load_image("tiny", llama, torch.float32, CPU, None, lines.append)
    read_weights(image_of(model), check=True)
    expected = load_model("tiny", llama, torch.float32, CPU, None)
    assert torch.equal(logits(model.forward), logits(expected.forward))
    assert lines == ["making the weight image of tiny (float32), for this and later starts"]


@pytest.mark.slow
def test_a_child_process_reports_its_error(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    (llama / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ShoalError) as expected:
        load_model("tiny", llama, torch.float32, CPU, None)
    with pytest.raises(type(expected.value)) as raised:
        load_image("tiny", llama, torch.float32, CPU, None)
    assert str(raised.value) == str(expected.value)


def test_images_are_made_again_if_the_reading_of_checkpoints_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(images.__file__).parents[2]
    for room in ("execute", "models"):
        shutil.copytree(source / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(images, "_EXECUTE", tmp_path / "execute")
    digest = images._code_digest.__wrapped__
    before = digest()
    assert digest() == before
    for changed in ("execute/linear/packed_weights.py", "models/quantised/awq_gptq.py"):
        file = tmp_path / changed
        file.write_text(file.read_text() + "\n")
        assert digest() != before
        before = digest()
