"""Checks of a model folder's files, without torch or transformers: own code, quantisation, layer counts."""

import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.core import ModelUnsupported
from shoal.models.folder.json_files import read_json
from shoal.models.folder.weights import StoredTensor
from shoal.models.quantised.config import quantisation_of
from shoal.models.quantised.tensors import read_weight_headers

_BUILT = re.compile(r"(num|n)_(\w+_)?(layers?|experts)")
"""Names in config.json of counts of modules that are built before the weights are read."""

_LISTED = re.compile(rf"{_BUILT.pattern}|num_labels")
"""Names in config.json of lengths of lists that transformers creates when it reads the file."""

_MAX_LIST = 100_000


def check_model_folder(folder: Path) -> None:
    """Raise ModelUnsupported or ModelUnavailable if the files in ``folder`` show that it cannot be served.

    Takes milliseconds.
    """
    check_config(folder)
    check_weights(folder)


def check_config(folder: Path) -> None:
    """Raise ModelUnsupported if the model needs code from its folder, or is stored in an unsupported
    format."""
    config = read_json(folder / "config.json")
    if config.get("auto_map") and not _known_to_transformers(config.get("model_type")):
        raise ModelUnsupported(
            f"{folder} brings its own code (auto_map in config.json), which is never run here, and"
            f" transformers has no model_type {config.get('model_type')!r:.80} of its own"
        )
    for part in _sections(config):
        if part.get("attribute_map"):
            raise ModelUnsupported(
                f"{folder / 'config.json'} has an attribute_map, which would make its names mean others"
            )
        _refuse_counts(folder, part, _LISTED, _MAX_LIST, "are read here")
    quantisation_of(config, folder)
    if (folder / "adapter_config.json").exists():
        raise ModelUnsupported(
            f"{folder} holds an adapter (adapter_config.json), which is not read here: merge it into the"
            " model and save that, or remove the file where that is done"
        )


def check_weights(folder: Path) -> None:
    """Raise ModelUnavailable or ModelUnsupported if the weight files cannot belong to config.json."""
    most = _max_modules(read_weight_headers(folder))
    for section in _sections(read_json(folder / "config.json")):
        _refuse_counts(folder, section, _BUILT, most, "could be in its weight files")


def _refuse_counts(
    folder: Path, section: Mapping[str, Any], names: re.Pattern[str], most: int, what: str
) -> None:
    for name, value in section.items():
        if names.fullmatch(name) and isinstance(value, int) and value > most:
            raise ModelUnsupported(
                f"{folder / 'config.json'} says {name}: {value!s:.20}, but no more than {most} {what}"
            )


def _max_modules(tensors: Mapping[str, StoredTensor]) -> int:
    """An upper bound on layers or experts: each has its own tensor, or an index in a stacked tensor."""
    stacks = (tensor.shape[0] for tensor in tensors.values() if len(tensor.shape) > 2)
    return max((len(tensors), *stacks))


def _sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The object and all nested objects; multimodal models have one for each part."""
    waiting = [config]
    while waiting:
        section = waiting.pop()
        yield section
        waiting += [value for value in section.values() if isinstance(value, Mapping)]


def _known_to_transformers(model_type: Any) -> bool:
    """Whether transformers supports ``model_type``, from its source files; importing it takes seconds."""
    found = importlib.util.find_spec("transformers")
    if found is None or not found.submodule_search_locations or not isinstance(model_type, str):
        return False
    declared = re.compile(rf'^    model_type\b.*= "{re.escape(model_type)}"$', re.MULTILINE)
    sources = Path(found.submodule_search_locations[0]).glob("models/*/configuration_*.py")
    return any(declared.search(source.read_text(encoding="utf-8")) for source in sources)
