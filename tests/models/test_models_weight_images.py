"""What the cache holds of weight images, and folders in it that are replaced."""

import json
import shutil
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from shoal.models import FACTS_FILE, images_dir, list_images, remove_orphans
from shoal.models.cache import build_once
from shoal.models.progress import silent


def make_image(name: str, source: Path | None, size: int = 0) -> Path:
    folder = images_dir() / name
    folder.mkdir(parents=True)
    facts = {} if source is None else {"source": str(source)}
    (folder / FACTS_FILE).write_text(json.dumps(facts))
    (folder / "weights.bin").write_bytes(b"x" * size)
    return folder


def content(folder: Path) -> str:
    return (folder / "content").read_text()


def fill(text: str):
    return lambda folder: (folder / "content").write_text(text)


def of_version(wanted: str):
    return lambda folder: content(folder) == wanted


@pytest.mark.usefixtures("empty_cache")
def test_images_are_listed_with_their_models_and_sizes(tmp_path: Path) -> None:
    assert list_images() == []
    first = make_image("b-int8-1", tmp_path / "b", 100)
    second = make_image("a-int8-2", None, 50)
    (images_dir() / ".a-int8-2.lock").touch()
    (images_dir() / ".c-int8-3.partial-12").mkdir()
    found = [(image.path, image.source, image.size_bytes) for image in list_images()]
    facts = [(folder / FACTS_FILE).stat().st_size for folder in (second, first)]
    assert found == [(second, None, 50 + facts[0]), (first, tmp_path / "b", 100 + facts[1])]


@pytest.mark.usefixtures("empty_cache")
def test_images_of_folders_that_are_gone_are_removed(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    kept = make_image("here-int8-1", tmp_path / "here")
    built = make_image("gone-int8-3", tmp_path / "gone")
    make_image("gone-int8-2", tmp_path / "gone")
    make_image("old-int8-4", None)
    with FileLock(images_dir() / f".{built.name}.lock"):
        remove_orphans()
    assert [image.path for image in list_images()] == [built, kept]
    remove_orphans()
    assert [image.path for image in list_images()] == [kept]
    assert [path for path in images_dir().iterdir() if path.is_dir()] == [kept]


def test_a_folder_that_is_not_usable_is_built_again_in_its_place(tmp_path: Path) -> None:
    target = tmp_path / "made"
    for version in ("1", "1", "2", "2"):
        built: list[Path] = []

        def build(folder: Path, version: str = version, built: list[Path] = built) -> None:
            built.append(folder)
            fill(version)(folder)

        before = content(target) if target.exists() else ""
        assert build_once(target, build, silent, of_version(version)) == target
        assert (content(target), len(built)) == (version, before != version)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [target]


def test_a_folder_stays_where_its_replacement_fails(tmp_path: Path) -> None:
    target = build_once(tmp_path / "made", fill("1"), silent)

    def fail(folder: Path) -> None:
        fill("2")(folder)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        build_once(target, fail, silent, of_version("2"))
    assert content(target) == "1"
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [target]


def test_several_that_find_an_unusable_folder_replace_it_once(tmp_path: Path) -> None:
    target = build_once(tmp_path / "made", fill("1"), silent)
    looked = threading.Barrier(3)
    first = threading.local()
    built: list[Path] = []

    def usable(folder: Path) -> bool:
        found = content(folder) == "2"
        if not getattr(first, "looked", False):
            first.looked = True
            looked.wait(60)  # all have seen the old one
        return found

    def build(folder: Path) -> None:
        built.append(folder)
        fill("2")(folder)

    threads = [threading.Thread(target=build_once, args=(target, build, silent, usable)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(built), content(target)) == (1, "2")


def test_no_part_of_a_folder_is_seen_while_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = build_once(tmp_path / "made", fill("1"), silent)
    seen: list[Path] = []
    remove = shutil.rmtree

    def watch(folder: Path, **options: bool) -> None:
        seen.append(folder)
        remove(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", watch)
    build_once(target, fill("2"), silent, of_version("2"))
    assert seen
    assert target not in seen
