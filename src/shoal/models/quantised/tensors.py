"""The tensors of a folder as the model has them: each quantised matrix is one, however it is stored."""

from collections.abc import Mapping
from pathlib import Path

from shoal.models.folder.json_files import read_json, text_config
from shoal.models.folder.weights import DENSE, StoredTensor, stored_tensors
from shoal.models.quantised.assemble import QuantisedTensor, assemble
from shoal.models.quantised.config import quantisation_of
from shoal.models.quantised.scheme import WHOLE, Scheme

_GROUP = 32
"""Inputs that share a scale in int8 layers."""


def read_weight_headers(folder: Path) -> Mapping[str, StoredTensor]:
    """All tensors of the model in ``folder``, by name; reads headers only.

    A quantised matrix is one tensor with the name of its dense weight. Raises ModelUnavailable if a file is
    absent, damaged or outside the folder, ModelUnsupported if a weight is stored in a way that is not read.
    """
    stored = stored_tensors(folder)
    quantised = _quantised(folder, stored)
    return _others(stored, quantised) | {name: tensor.as_stored for name, tensor in quantised.items()}


def read_quantised(folder: Path) -> Mapping[str, QuantisedTensor]:
    """The quantised matrices of the model in ``folder``, by the name of the dense weight.

    Raises as ``read_weight_headers`` does.
    """
    return _quantised(folder, stored_tensors(folder))


def keeps_integers(folder: Path) -> bool:
    """Whether all matrices are stored as integers with which int8 layers compute as they are.

    Embeddings and the output head, which have a row for each token, may be dense. Raises as
    ``read_weight_headers`` does.
    """
    config = read_json(folder / "config.json")
    if quantisation_of(config, folder) is None:
        return False
    stored = stored_tensors(folder)
    quantised = _quantised(folder, stored)
    tokens = text_config(config).get("vocab_size")
    dense = (tensor.shape for tensor in _others(stored, quantised).values() if tensor.dtype in DENSE)
    if any(len(shape) == 2 and shape[0] != tokens for shape in dense):
        return False
    return bool(quantised) and all(_fits_int8(tensor.scheme) for tensor in quantised.values())


def _fits_int8(scheme: Scheme) -> bool:
    """Whether number - zero is an int8, and blocks are of whole groups of inputs."""
    fits = not scheme.is_float and (scheme.bits < 8 or scheme.symmetric)
    return fits and not scheme.scattered and (scheme.block[1] == WHOLE or scheme.block[1] % _GROUP == 0)


def _quantised(folder: Path, stored: Mapping[str, StoredTensor]) -> dict[str, QuantisedTensor]:
    return assemble(folder, stored, quantisation_of(read_json(folder / "config.json"), folder))


def _others(
    stored: Mapping[str, StoredTensor], quantised: Mapping[str, QuantisedTensor]
) -> dict[str, StoredTensor]:
    """The tensors that are no part of a quantised matrix."""
    parts = {part for tensor in quantised.values() for part in tensor.parts.values()}
    return {name: tensor for name, tensor in stored.items() if name not in parts}
