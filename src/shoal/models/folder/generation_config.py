"""A model's recommended sampling defaults, from generation_config.json or the catalog."""

from collections.abc import Mapping
from pathlib import Path

from shoal.core import InvalidRequest, ModelUnavailable, SamplingParams
from shoal.models.download.catalog import BUNDLED
from shoal.models.folder.json_files import read_json

_CHOICE = ("temperature", "top_p", "top_k", "min_p")
_SAMPLING = (*_CHOICE, "repetition_penalty")  # same names as in SamplingParams


def advised_sampling(name: str, folder: Path) -> Mapping[str, float | int]:
    """Recommended sampling values of the model ``name``, from ``folder`` or the catalog."""
    bundled = BUNDLED.get(name)
    return read_sampling_defaults(folder) or (bundled.sampling if bundled else {})


def read_sampling_defaults(folder: Path) -> dict[str, float | int]:
    """Values of SamplingParams from the model's generation_config.json; {} without that file.

    ``do_sample: false`` becomes temperature 0, and other values for choosing among tokens are ignored. Raises
    ModelUnavailable, with the file and the field, if a value is invalid.
    """
    file = folder / "generation_config.json"
    config = read_json(file)
    found = {name: config[name] for name in _SAMPLING if config.get(name) is not None}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
            raise ModelUnavailable(f"{file}: {name} must be a number, got {value!r:.40}")
    if config.get("do_sample") is False:
        found = {"temperature": 0.0, **{name: found[name] for name in found if name not in _CHOICE}}
    try:
        SamplingParams(**found)
    except (InvalidRequest, OverflowError) as error:
        raise ModelUnavailable(f"{file}: {error}") from error
    return found
