"""Resolving a model's name (folder, GGUF file, alias or hub id) to the folder with its files."""

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.core import ModelUnavailable
from shoal.models.cache import OTHER_DISK_HINT, cache_dir
from shoal.models.conversion.run_conversion import converted_gguf, has_tokenizer, tokenizer_folder
from shoal.models.download import hub
from shoal.models.download.catalog import BUNDLED
from shoal.models.download.disk_full import disk_full, is_disk_full
from shoal.models.download.pull import pull_bundled
from shoal.models.folder.checks import check_config, check_model_folder
from shoal.models.progress import Progress, silent


def check_model(name: str) -> None:
    """Raise ModelUnavailable if ``name`` cannot be a model; quick, as it does not use the network."""
    path = Path(name).expanduser()
    try:
        path.exists()
    except OSError as error:  # an impossible file name
        raise ModelUnavailable(f"there is no model {name!r:.80}: {error.strerror}") from None
    if path.is_file() and path.suffix.lower() != ".gguf":
        raise ModelUnavailable(f"{name} is a file, but neither a folder nor a .gguf file: name its folder")
    if path.is_file() or (path / "config.json").is_file() or name in BUNDLED:
        return
    if path.is_dir():
        raise ModelUnavailable(f"the folder {name} has no config.json, so it is no model{_gguf_inside(path)}")
    if not _looks_like_hub_id(name):
        raise ModelUnavailable(f"there is no model {name!r}. {_hint(name)}")


def resolve_model(name: str, progress: Progress | None = None) -> Path:
    """Folder with config.json and safetensors of the model ``name``; pulls or converts on first use.

    In this order: an existing folder with config.json or ``.gguf`` file; an alias; an id ``owner/model`` on
    the hub. For a folder without tokenizer.json, a converted tokenizer is put into the cache, where
    ``Tokenizer.from_folder`` finds it. Raises ModelUnavailable if the model cannot be found or downloaded or
    its files are damaged, ModelUnsupported if it cannot be converted or its files show that it cannot be
    served.
    """
    with _file_errors(name):
        report = progress or silent
        return _check_folder(_find_folder(name, report, weights=True), report)


def resolve_config(name: str, progress: Progress | None = None) -> Path:
    """Folder with config.json of the model ``name``; weights are neither downloaded from a hub nor checked.

    A tokenizer is converted if the folder has one. Raises as ``resolve_model`` does, but not for missing
    weights or tokenizers.
    """
    with _file_errors(name):
        report = progress or silent
        folder = _find_folder(name, report, weights=False)
        check_config(folder)
        if has_tokenizer(folder):
            tokenizer_folder(folder, report)
        return folder


def _find_folder(name: str, report: Progress, *, weights: bool) -> Path:
    """weights: whether to download weights from a hub."""
    check_model(name)
    path = Path(name).expanduser()
    if path.is_file():
        return converted_gguf(path, report)
    if (path / "config.json").is_file():
        return path
    if name in BUNDLED:
        return pull_bundled(BUNDLED[name], report)
    return hub.snapshot(name, report, hint=_hint(name), weights=weights)


def pull_model(name: str, progress: Progress | None = None) -> Path:
    """Download and convert the alias or hub id ``name`` unless it is cached; returns its folder.

    Raises as ``resolve_model`` does.
    """
    if name in BUNDLED:
        with _file_errors(name):
            report = progress or silent
            return _check_folder(pull_bundled(BUNDLED[name], report), report)
    return resolve_model(name, progress)


@contextmanager
def _file_errors(name: str) -> Iterator[None]:
    """Turn OSError, such as a full disk or an unwritable cache, into ModelUnavailable."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(f"storing the files of {name} failed", cache_dir(), OTHER_DISK_HINT) from error
        raise ModelUnavailable(
            f"reading or storing the files of {name} failed: {error}. Models are kept in {cache_dir()}; "
            "set SHOAL_CACHE to keep them elsewhere"
        ) from error


def _check_folder(folder: Path, progress: Progress) -> Path:
    check_model_folder(folder)
    tokenizer_folder(folder, progress)
    return folder


def _looks_like_hub_id(name: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) is not None


def _gguf_inside(folder: Path) -> str:
    files = sorted(folder.glob("*.gguf"))
    return f"; name the file {files[0]}" if files else ""


def _hint(name: str) -> str:
    close = difflib.get_close_matches(name.rpartition("/")[2].lower(), BUNDLED, n=1, cutoff=0.4)
    nearest = f"Did you mean the alias {close[0]!r}? " if close else ""
    return (
        f"{nearest}A model is an alias ({', '.join(BUNDLED)}), a folder, a .gguf file,"
        " or an id owner/model on the hub"
    )
