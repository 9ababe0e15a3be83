"""The safetensors files of a model folder: which are read, their headers, and folders derived from them."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from shoal.core import ModelUnavailable, ModelUnsupported
from shoal.models.cache import build_once, cache_dir, fingerprint
from shoal.models.folder.json_files import read_json
from shoal.models.progress import silent

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
GROUPS_FILE = "int8_groups.st"
"""Linear layers in int8, in a folder converted from a GGUF file; see ``gguf.int8_groups``. A safetensors file
with another suffix, since other programs load all *.safetensors as weights of the model."""
COMPLETE = "complete"
"""Metadata key of GROUPS_FILE: whether it has all linear layers of the model, "True" or "False"."""
_MAX_NAMES = 4
DENSE = ("F64", "F32", "F16", "BF16")
"""Element types of weights that are not quantised."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file's header."""

    shape: tuple[int, ...]
    dtype: str
    """Element type as safetensors names it, such as ``BF16``."""


def stored_tensors(folder: Path) -> Mapping[str, StoredTensor]:
    """All tensors in the weight files of the model in ``folder``, by name; reads headers only.

    Raises ModelUnavailable if a file is absent, damaged or outside the folder.
    """
    return {name: tensor for file in weight_files(folder) for name, tensor in _tensors(file)}


def derived_folder(kind: str, folder: Path, revision: str, build: Callable[[Path], None]) -> Path:
    """Cached folder that ``build`` made from the weights in ``folder``; built again when they change.

    kind: subfolder of the cache. revision: part of the cache key.
    """
    source = folder.resolve()
    groups = groups_file(source)
    files = (*weight_files(source), *([] if groups is None else [groups]))
    target = cache_dir() / kind / f"{source.name}-{fingerprint(revision, source, files)}"
    return build_once(target, build, silent)


def groups_file(folder: Path) -> Path | None:
    """Path of GROUPS_FILE in ``folder``; None if it does not exist."""
    file = folder / GROUPS_FILE
    return file if file.is_file() else None


def is_quantised(folder: Path) -> bool:
    """Whether the model in ``folder`` comes from a GGUF file in which all linear layers were quantised.

    Raises ModelUnavailable if GROUPS_FILE is damaged.
    """
    file = groups_file(folder)
    if file is None:
        return False
    with open_weights(file) as opened:
        return (opened.metadata() or {}).get(COMPLETE) == "True"


def refuse_incomplete(info: Mapping[str, Any], name: str) -> None:
    """Raise ModelUnsupported if weights are missing or have wrong shapes; info: ``output_loading_info``."""
    if info["missing_keys"]:
        raise ModelUnsupported(
            f"{name}: its files have no weights for {summarize_names(info['missing_keys'])}"
        )
    if info["mismatched_keys"]:
        mismatched = info["mismatched_keys"]
        shapes = (f"{key} is {list(stored)}, not {list(wanted)}" for key, stored, wanted in mismatched)
        raise ModelUnsupported(f"{name}: its files have weights of other shapes: {summarize_names(shapes)}")


def summarize_names(names: Iterable[str]) -> str:
    """The first few of ``names``, and the number of others."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _MAX_NAMES} more" if len(ordered) > _MAX_NAMES else ""
    return ", ".join(ordered[:_MAX_NAMES]) + more


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that transformers reads the weights from.

    Raises ModelUnavailable if there are none, or config.json or an index names other files.
    """
    if any(folder.glob("shard-[0-9]*.safetensors")):
        raise ModelUnavailable(
            f"{folder} is a checkpoint of distributed training; save the model with save_pretrained"
        )
    chosen = read_json(folder / "config.json").get("transformers_weights")
    if chosen is not None:
        first = _inside(folder, chosen, folder / "config.json")
    else:
        first = folder / _SINGLE if (folder / _SINGLE).exists() else folder / _INDEX
    if not first.exists():
        raise ModelUnavailable(
            f"{folder} holds no *.safetensors weights that could be loaded ({_SINGLE}, or several with"
            f" {_INDEX}); other formats are not read: save it with save_pretrained, or name a .gguf file"
        )
    return (first,) if first.suffix == ".safetensors" else _indexed(folder, first)


def _indexed(folder: Path, index: Path) -> tuple[Path, ...]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelUnavailable(f"{index} has no weight_map that says which file holds which weight")
    different = dict.fromkeys(json.dumps(name) for name in names.values())
    files = tuple(_inside(folder, json.loads(name), index) for name in different)
    for file in files:
        if file.suffix != ".safetensors" or not file.is_file():
            raise ModelUnavailable(f"{index} names {file.name}, which is no safetensors file in {folder}")
    return files


def _inside(folder: Path, name: Any, named_by: Path) -> Path:
    """The file ``name`` in ``folder``. Only plain names are allowed: transformers would follow paths and
    unpickle."""
    known = (".safetensors", ".safetensors.index.json")
    if isinstance(name, str) and name.endswith(known) and not set(name) & set("/\\\0"):
        return folder / name
    raise ModelUnavailable(
        f"{named_by} names the weight file {name!r:.80}; possible are safetensors files in {folder}"
    )


def _tensors(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    if not file.is_file():  # reading a pipe would block
        raise ModelUnavailable(f"{file} is no file")
    with open_weights(file) as opened:
        for name in opened.keys():  # noqa: SIM118 (no mapping)
            tensor = opened.get_slice(name)
            yield name, StoredTensor(tuple(tensor.get_shape()), tensor.get_dtype())


@contextmanager
def open_weights(file: Path, framework: str = "numpy") -> Iterator[Any]:
    """Open a safetensors file; raises ModelUnavailable if it is damaged."""
    try:
        opening = safe_open(file, framework=framework)
    except (SafetensorError, OSError) as error:
        raise _damaged(file, error) from error
    with opening as opened:
        try:
            yield opened
        except SafetensorError as error:
            raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> ModelUnavailable:
    return ModelUnavailable(f"{file} is damaged or was not copied whole ({error}); {_repair(file)}")


def _repair(file: Path) -> str:
    if file.is_relative_to(cache_dir()):
        return f"remove the folder {file.parent}, and the model is fetched again (`shoal models pull NAME`)"
    return "copy or download it again"
