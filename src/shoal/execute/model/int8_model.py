"""Replacing a model's linear layers by int8 layers, with packed weights kept in the user's cache."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from shoal.core import ModelUnavailable
from shoal.execute.huge_pages import HugePages
from shoal.execute.linear.packed_linear import PackedLinear, dense_weight
from shoal.execute.linear.packed_weights import (
    GROUP,
    PackedWeights,
    pack_integers,
    quantise_channels,
    widened,
)
from shoal.execute.model.replace import Place, places
from shoal.execute.quantised.int8 import kept_integers
from shoal.execute.quantised.weights import open_slices
from shoal.models import derived_folder, groups_file, open_weights, stated_quantisation
from shoal.native import load_native

LAYOUT = 3
"""Version of quantisation and packing; part of the cache key."""

_FILE = "int8.safetensors"
_log = logging.getLogger(__name__)


def use_int8(model: nn.Module, folder: Path | None) -> None:
    """Replace all linear layers of ``model``, which was loaded from ``folder``, and free their weights.

    folder: None for weights that come from no files; then the cache is not used. Layers that the conversion
    of a GGUF file or a quantised folder has as integers have its values and scales, others one scale for each
    output channel. The int8 weights come from the cache, or are stored there if it is writable. Other weights
    (embeddings, norms, experts stored as one tensor) stay as they are. Raises ModelUnavailable if the file in
    the cache or from the conversion is damaged.
    """
    if load_native() is None:
        _log.warning("the native library is not in use: int8 layers are computed by torch, many times slower")
    dense = [place for place in places(model) if dense_weight(place.module) is not None]
    memory = HugePages()
    if folder is None:
        _quantise_all(dense, None, memory)
    else:
        _use_cached(dense, folder, memory)


def _use_cached(layers: Sequence[Place], folder: Path, memory: HugePages) -> None:
    """Replace all layers with weights from the cache; quantises and stores them first if they are missing."""

    def build(target: Path) -> None:
        _quantise_all(layers, folder, memory)
        save_file(dict(_tensors(layers)), target / _FILE)

    shapes = [
        (place.path, tuple(place.module.weight.shape), place.module.bias is not None) for place in layers
    ]
    cached = None
    try:
        revision = json.dumps([LAYOUT, shapes, stated_quantisation(folder)])
        cached = derived_folder("int8", folder, revision, build) / _FILE
    except (OSError, SafetensorError) as error:
        _log.warning("int8 weights cannot be kept in the cache: %s", error)
    dense = [place for place in layers if not isinstance(place.module, PackedLinear)]
    if cached is not None and dense:
        _read(cached, dense, memory)
    if cached is None:
        _quantise_all(dense, folder, memory)


def _quantise_all(layers: Sequence[Place], folder: Path | None, memory: HugePages) -> None:
    """Replace dense layers by int8 layers; folder: of the model, None: it has no files."""
    groups = None if folder is None else groups_file(folder)
    nothing: dict[str, Any] = {}
    with nullcontext(nothing) if folder is None else open_slices(folder) as slices:
        for together in _siblings(layers):
            packed = [_quantised(place, groups, slices) for place in together]
            # They may have the same input, and only layers of one format become one product.
            mixed = len({weights.bits for weights in packed}) > 1
            for place, weights in zip(together, packed, strict=True):
                _put(place, widened(weights) if mixed else weights, memory)


def _siblings(layers: Sequence[Place]) -> Iterable[Sequence[Place]]:
    """Layers in groups of one parent module and as many inputs."""
    groups: dict[tuple[str, int], list[Place]] = {}
    for place in layers:
        weight = dense_weight(place.module)
        assert weight is not None
        groups.setdefault((place.path.rpartition(".")[0], weight.shape[1]), []).append(place)
    return groups.values()


def int8_bytes(model: nn.Module) -> int:
    return sum(module.weights.num_bytes for module in model.modules() if isinstance(module, PackedLinear))


def _put(place: Place, weights: PackedWeights, memory: HugePages) -> None:
    """Replace a layer by one with a copy of ``weights``."""
    place.put(PackedLinear(weights.copied(memory.put), load_native()))


def _quantised(place: Place, groups: Path | None, slices: Mapping[str, Any]) -> PackedWeights:
    """Weights of a layer in int8.

    groups: file with the layers that a GGUF file had quantised, or None. slices: of the model's folder, by
    name.
    """
    weight = dense_weight(place.module)
    assert weight is not None
    if groups is None:
        found = (kept_integers(part, weight) for part in _stored_as(f"{place.path}.weight", slices))
        stored = next(filter(None, found), None)
    else:
        stored = _stored(groups, place.path, weight.shape)
    return pack_integers(*(stored or quantise_channels(weight)), place.module.bias)


def _stored_as(name: str, slices: Mapping[str, Any]) -> Iterator[Any]:
    """What a checkpoint may call this weight: transformers adds or drops the names of outer modules."""
    yield slices.get(name)
    tail = name.partition(".")[2]
    for other, part in slices.items():
        if other == tail or other.endswith((f".{name}", f".{tail}")):
            yield part


def _stored(file: Path, path: str, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Values and scales of the layer at ``path``; None if ``file`` does not have them."""
    with open_weights(file, "pt") as opened:
        if f"{path}.values" not in opened.keys():  # noqa: SIM118 (no mapping)
            return None
        values, scales = (opened.get_tensor(f"{path}.{part}") for part in ("values", "scales"))
    outputs, inputs = shape
    if values.shape != shape or scales.shape != (outputs, inputs // GROUP):
        raise ModelUnavailable(f"{file} has another shape for {path} than the model, so it is of another one")
    return values, scales


def _tensors(layers: Sequence[Place]) -> Iterator[tuple[str, torch.Tensor]]:
    for place in layers:
        weights = place.module.weights
        yield f"{place.path}.packed", weights.packed
        yield f"{place.path}.scales", weights.scales
        if weights.bias is not None:
            yield f"{place.path}.bias", weights.bias


def _read(file: Path, layers: Sequence[Place], memory: HugePages) -> None:
    """Replace dense layers by int8 layers with the weights in ``file``."""
    try:
        with safe_open(file, framework="pt") as opened:
            for place in layers:
                weight = dense_weight(place.module)
                assert weight is not None
                outputs, inputs = weight.shape
                packed, scales = (opened.get_tensor(f"{place.path}.{part}") for part in ("packed", "scales"))
                bias = None if place.module.bias is None else opened.get_tensor(f"{place.path}.bias")
                _put(place, PackedWeights(inputs, outputs, packed, scales, bias), memory)
    except (OSError, SafetensorError) as error:
        raise ModelUnavailable(
            f"{file} is damaged ({error}); remove the folder {file.parent}, and it is built again"
        ) from error
