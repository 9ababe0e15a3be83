"""Loading models from weight images in the user's cache, which a child process makes on first use."""

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast

import torch
from transformers import __version__ as transformers_version

from shoal.core import ConfigError, ModelUnavailable, ModelUnsupported, ShoalError
from shoal.execute.model.loading import Int8Unsupported, LoadedModel
from shoal.execute.weights.image import ImageDamaged, open_image
from shoal.models.cache import OTHER_DISK_HINT, build_once, cache_dir, fingerprint
from shoal.models.child_process import end_child, start_child
from shoal.models.download.disk_full import disk_full, is_disk_full
from shoal.models.folder.weights import groups_file, weight_files
from shoal.models.progress import in_words, silent
from shoal.native import native_status

ERRORS: dict[str, type[ShoalError]] = {
    kind.__name__: kind for kind in (Int8Unsupported, ModelUnsupported, ModelUnavailable, ConfigError)
}
"""Errors of loading, which the child names."""
_EXECUTE = Path(__file__).parents[1]
_log = logging.getLogger(__name__)


def load_image(
    name: str,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    seed: int | None,
    progress: Callable[[str], None] | None = None,
) -> LoadedModel:
    """A LoadFunction of models whose weights come and go: opens a model's image, which is made on first use.

    The weights are absent when it returns. Raises as ``load_model`` does, and ModelUnsupported for a model
    that cannot be stored as an image.
    """
    target = image_folder(folder, dtype, seed)
    order = _Order(name, folder, dtype, seed)
    try:
        return _open(target, order, progress)
    except ImageDamaged as error:
        _log.warning("the image of %s is made again: %s", name, error)
        shutil.rmtree(target, ignore_errors=True)
    try:
        return _open(target, order, progress)
    except ImageDamaged as error:
        raise ModelUnavailable(f"{name}: its weights cannot be kept in the cache: {error}") from error


class _Order(NamedTuple):
    """A model to be loaded; as in LoadFunction."""

    name: str
    folder: Path
    dtype: torch.dtype
    seed: int | None


def _open(target: Path, order: _Order, progress: Callable[[str], None] | None) -> LoadedModel:
    """Open the image in ``target``, or make it; raises ImageDamaged."""

    def build(partial: Path) -> None:
        if progress is not None:
            progress(
                f"making the weight image of {order.name} ({_short(order.dtype)}), for this and later starts"
            )
        _make_in_child(order, partial)

    try:
        build_once(target, build, silent if progress is None else in_words(progress))
    except OSError as error:
        if is_disk_full(error):
            raise _disk_full(order, target) from error
        raise ModelUnavailable(
            f"{order.name}: its weights cannot be stored in {target.parent}: {error}; set SHOAL_CACHE to"
            " store them elsewhere"
        ) from error
    model, image = open_image(target)
    return replace(cast(LoadedModel, model), folder=order.folder, image=image)


def image_folder(folder: Path, dtype: torch.dtype, seed: int | None) -> Path:
    """Folder in the cache of the image of a model; another one whenever the image would be another."""
    files = [file for name in ("config.json", "generation_config.json") if (file := folder / name).is_file()]
    if seed is None:
        groups = groups_file(folder)
        files += [*weight_files(folder), *([] if groups is None else [groups])]
    versions = (
        torch.__version__,
        transformers_version,
        sys.version_info[:2],
        native_status(),
        _code_digest(),
    )
    revision = json.dumps([*versions, str(dtype), seed])
    return cache_dir() / "images" / f"{folder.name}-{_short(dtype)}-{fingerprint(revision, folder, files)}"


@cache
def _code_digest() -> str:
    """Hash of the modules whose classes and packing images contain."""
    total = hashlib.sha256()
    for room in ("attention", "linear", "model", "weights"):
        for file in sorted((_EXECUTE / room).glob("*.py")):
            content = file.read_bytes()
            total.update(f"{room}/{file.name} {len(content)}\n".encode())
            total.update(content)
    return total.hexdigest()[:16]


def _make_in_child(order: _Order, target: Path) -> None:
    """Load a model as usual, and write its image into ``target``, in a process of its own.

    So all memory of loading is free afterwards, and steps of this process go on.
    """
    sent = {
        **order._asdict(),
        "folder": str(order.folder),
        "dtype": _short(order.dtype),
        "target": str(target),
        "threads": torch.get_num_threads(),
    }
    child = start_child(
        "shoal.execute.model.make_image",
        [json.dumps(sent)],
        os.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        assert child.stdout is not None
        lines = child.stdout.read().decode(errors="replace").strip().splitlines()
        status = child.wait()
    finally:
        end_child(child)
    if status:
        raise _error_of(order, target, lines, status)


def _error_of(order: _Order, target: Path, lines: Sequence[str], status: int) -> ShoalError:
    """The error of a child with this output and exit status."""
    for line in lines:
        try:
            kind, message = json.loads(line)["error"]
        except (ValueError, KeyError, TypeError):  # output of a library
            continue
        return _disk_full(order, target) if is_disk_full(message) else ERRORS[kind](message)
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    last = f" ({lines[-1]:.300})" if lines else ""
    return ModelUnavailable(
        f"{order.name}: the process that stores its weights as they are read ended with {how}{last}"
    )


def _disk_full(order: _Order, target: Path) -> ModelUnavailable:
    return disk_full(f"storing the weights of {order.name} as they are read failed", target, OTHER_DISK_HINT)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
