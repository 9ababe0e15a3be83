"""Loading models from weight images in the user's cache, which a child process makes on first use."""

import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from transformers import __version__ as transformers_version

from shoal.core import ConfigError, ModelUnavailable, ModelUnsupported, ShoalError
from shoal.execute.model.loading import Int8Unsupported, LoadedModel
from shoal.execute.weights.image import ImageDamaged, ImageOutdated, WeightImage, open_image
from shoal.models import images_dir, remove_orphans
from shoal.models.cache import OTHER_DISK_HINT, build_once, fingerprint
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
    order = _Order(name, folder, dtype, seed, _revision(folder, dtype, seed))
    model, image = _Opening(order, image_folder(folder, dtype, seed), progress).open()
    return replace(cast(LoadedModel, model), folder=folder, image=image)


class _Order(NamedTuple):
    """A model to be loaded; as in LoadFunction."""

    name: str
    folder: Path
    dtype: torch.dtype
    seed: int | None
    revision: str
    """Of its image."""


class _Opening:
    """Opens an image, or makes it if it is missing, damaged or outdated.

    It is opened before another process can replace it, or while none may.
    """

    def __init__(self, order: _Order, target: Path, progress: Callable[[str], None] | None) -> None:
        self._order = order
        self._target = target
        self._progress = progress
        self._opened: tuple[Any, WeightImage] | None = None
        self._damage: ImageDamaged | None = None

    def open(self) -> tuple[Any, WeightImage]:
        """The model and its image."""
        name, target = self._order.name, self._target
        progress = silent if self._progress is None else in_words(self._progress)
        try:
            build_once(target, self._make, progress, self._is_usable)
        except ImageDamaged as error:
            raise ModelUnavailable(f"{name}: its weights cannot be kept in the cache: {error}") from error
        except OSError as error:
            if is_disk_full(error):
                raise _disk_full(self._order, target) from error
            raise ModelUnavailable(
                f"{name}: its weights cannot be stored in {target.parent}: {error}; set SHOAL_CACHE to"
                " store them elsewhere"
            ) from error
        assert self._opened is not None
        return self._opened

    def _is_usable(self, folder: Path) -> bool:
        try:
            self._opened = open_image(folder, self._order.revision)
        except ImageOutdated:
            return False
        except ImageDamaged as error:
            self._damage = error
            return False
        return True

    def _make(self, folder: Path) -> None:
        name = self._order.name
        if self._damage is not None:
            _log.warning("the image of %s is made again: %s", name, self._damage)
        if self._progress is not None:
            self._progress(
                f"making the weight image of {name} ({_short(self._order.dtype)}), for this and later starts"
            )
        remove_orphans()
        _make_in_child(self._order, folder)
        self._opened = open_image(folder, self._order.revision)
        self._opened[1].folder = self._target


def image_folder(folder: Path, dtype: torch.dtype, seed: int | None) -> Path:
    """Folder in the cache of the image of a model."""
    identity = json.dumps([str(folder), str(dtype), seed])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return images_dir() / f"{folder.name}-{_short(dtype)}-{digest}"


def _revision(folder: Path, dtype: torch.dtype, seed: int | None) -> str:
    """Another one whenever the image of a model would be another."""
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
    return fingerprint(json.dumps([*versions, str(dtype), seed]), folder, files)


@cache
def _code_digest() -> str:
    """Hash of the modules whose classes, packing and reading of checkpoints images contain."""
    total = hashlib.sha256()
    rooms = [_EXECUTE / room for room in ("attention", "linear", "model", "quantised", "weights")]
    for room in (*rooms, _EXECUTE.parent / "models" / "quantised"):
        for file in sorted(room.glob("*.py")):
            content = file.read_bytes()
            total.update(f"{room.parent.name}/{room.name}/{file.name} {len(content)}\n".encode())
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
