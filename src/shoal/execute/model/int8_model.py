"""Models whose linear layers have int8 weights, which are kept in the cache beside the model."""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from shoal.core import ModelUnavailable
from shoal.execute.huge_pages import HugePages
from shoal.execute.linear.int8_linear import Int8Linear
from shoal.execute.linear.int8_weights import GROUP, Int8Weights, pack, quantise_channels
from shoal.models import derived_folder, groups_file, opened_weights
from shoal.native import load_native

LAYOUT = 2
"""Counts up when weights are quantised or laid out differently; part of the cache's key."""

_FILE = "int8.safetensors"
_log = logging.getLogger(__name__)


def use_int8(model: nn.Module, folder: Path | None) -> None:
    """Replace all linear layers of ``model``, which was loaded from ``folder``, and free their weights.

    folder: None for weights that come from no files; then nothing is read from the cache or put there.
    Layers that the conversion of a GGUF file kept in int8 have scales of groups, others one for each output
    channel. The int8 weights come from the cache, or are put there where it can be written. Weights that are
    no linear layers (embeddings, norms, the experts of a mixture that are stored as one tensor) stay as they
    are.
    Raises ModelUnavailable where the cached file or that of the conversion is damaged.
    """
    if load_native() is None:
        _log.warning("the native library is not in use: int8 layers are computed by torch, many times slower")
    places = list(_linear_places(model))
    memory = HugePages()
    if folder is None:
        for place in places:
            place.put(_quantised(place, None), memory)
    else:
        _use_cached(places, folder, memory)


def _use_cached(places: Sequence["_Place"], folder: Path, memory: HugePages) -> None:
    """Put layers in all places, from the cache of the weights in ``folder``; what it lacks is put there."""
    groups = groups_file(folder)

    def build(target: Path) -> None:
        for place in places:
            place.put(_quantised(place, groups), memory)
        save_file(dict(_tensors(places)), target / _FILE)

    layers = [
        (place.path, tuple(place.module.weight.shape), place.module.bias is not None) for place in places
    ]
    cached = None
    try:
        cached = derived_folder("int8", folder, json.dumps([LAYOUT, layers]), build) / _FILE
    except (OSError, SafetensorError) as error:
        _log.warning("int8 weights cannot be kept in the cache: %s", error)
    dense = [place for place in places if not isinstance(place.module, Int8Linear)]
    if cached is not None and dense:
        _read(cached, dense, memory)
    for place in dense:
        if cached is None:
            place.put(_quantised(place, groups), memory)


def int8_bytes(model: nn.Module) -> int:
    """Size of all int8 weights in ``model``."""
    return sum(module.weights.num_bytes for module in model.modules() if isinstance(module, Int8Linear))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a model has a linear layer."""

    path: str
    """Unique in the model."""
    parent: nn.Module
    name: str
    """Attribute of ``parent``."""

    @property
    def module(self) -> Any:
        """The layer that is there now."""
        return getattr(self.parent, self.name)

    def put(self, weights: Int8Weights, memory: HugePages) -> None:
        """Put a layer with a copy of ``weights`` there."""
        setattr(self.parent, self.name, Int8Linear(weights.moved(memory.put), load_native()))


def _linear_places(model: nn.Module) -> Iterator[_Place]:
    for path, parent in model.named_modules():
        for name, child in parent.named_children():
            if type(child) in (nn.Linear, Conv1D):
                yield _Place(f"{path}.{name}".removeprefix("."), parent, name)


def _quantised(place: _Place, groups: Path | None) -> Int8Weights:
    """groups: the file with what a GGUF file had quantised, if there is one."""
    layer = place.module
    weight = layer.weight.detach() if isinstance(layer, nn.Linear) else layer.weight.detach().T
    stored = None if groups is None else _stored(groups, place.path, weight.shape)
    return pack(*(stored or quantise_channels(weight)), layer.bias)


def _stored(file: Path, path: str, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Values and scales of the layer at ``path``, if ``file`` has them."""
    with opened_weights(file, "pt") as opened:
        if f"{path}.values" not in opened.keys():  # noqa: SIM118 (no mapping)
            return None
        values, scales = (opened.get_tensor(f"{path}.{part}") for part in ("values", "scales"))
    outputs, inputs = shape
    if values.shape != shape or scales.shape != (outputs, inputs // GROUP):
        raise ModelUnavailable(f"{file} has another shape for {path} than the model, so it is of another one")
    return values, scales


def _tensors(places: Sequence[_Place]) -> Iterator[tuple[str, torch.Tensor]]:
    for place in places:
        weights = place.module.weights
        yield f"{place.path}.packed", weights.packed
        yield f"{place.path}.scales", weights.scales
        if weights.bias is not None:
            yield f"{place.path}.bias", weights.bias


def _read(file: Path, places: Sequence[_Place], memory: HugePages) -> None:
    """Put layers with the weights of ``file`` in all places, where dense layers of the same shapes are."""
    try:
        with safe_open(file, framework="pt") as opened:
            for place in places:
                dense = place.module
                outputs, inputs = dense.weight.shape if isinstance(dense, nn.Linear) else dense.weight.T.shape
                packed, scales = (opened.get_tensor(f"{place.path}.{part}") for part in ("packed", "scales"))
                bias = None if dense.bias is None else opened.get_tensor(f"{place.path}.bias")
                place.put(Int8Weights(inputs, outputs, packed, scales, bias), memory)
    except (OSError, SafetensorError) as error:
        raise ModelUnavailable(
            f"{file} is damaged ({error}); remove the folder {file.parent}, and it is made anew"
        ) from error
