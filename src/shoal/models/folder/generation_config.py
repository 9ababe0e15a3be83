"""Sampling defaults that a model's makers advise, from generation_config.json."""

from collections.abc import Mapping
from pathlib import Path

from shoal.core import InvalidRequest, ModelUnavailable, SamplingParams
from shoal.models.download.catalog import BUNDLED
from shoal.models.folder.json_files import read_json

_CHOICE = ("temperature", "top_p", "top_k", "min_p")
_SAMPLING = (*_CHOICE, "repetition_penalty")  # what SamplingParams has under the same name


def advised_sampling(name: str, folder: Path) -> Mapping[str, float | int]:
    """Advised sampling values of the model ``name`` in ``folder``, from its folder or the catalog."""
    bundled = BUNDLED.get(name)
    return read_sampling_defaults(folder) or (bundled.sampling if bundled else {})


def read_sampling_defaults(folder: Path) -> dict[str, float | int]:
    """The parameters of SamplingParams that the model's generation_config.json sets; {} without that file.

    ``do_sample: false`` is temperature 0, whatever else the file says of choosing among tokens. Raises
    ModelUnavailable, naming the file and the field, where a value has no meaning.
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
