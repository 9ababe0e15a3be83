"""Replacing a model's linear layers by int8 layers, with packed weights kept in the user's cache."""

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
from shoal.models import derived_folder, groups_file, open_weights
from shoal.native import load_native

LAYOUT = 2
"""Version of quantisation and packing; part of the cache key."""

_FILE = "int8.safetensors"
_log = logging.getLogger(__name__)


def use_int8(model: nn.Module, folder: Path | None) -> None:
    """Replace all linear layers of ``model``, which was loaded from ``folder``, and free their weights.

    folder: None for weights that come from no files; then the cache is not used. Layers that the conversion
    of a GGUF file kept in int8 have scales of groups, others one for each output channel. The int8 weights
    come from the cache, or are stored there if it is writable. Other weights (embeddings, norms, experts
    stored as one tensor) stay as they are. Raises ModelUnavailable if the file in the cache or from the
    conversion is damaged.
    """
    if load_native() is None:
        _log.warning("the native library is not in use: int8 layers are computed by torch, many times slower")
    slots = list(_linear_slots(model))
    memory = HugePages()
    if folder is None:
        for slot in slots:
            slot.put(_quantised(slot, None), memory)
    else:
        _use_cached(slots, folder, memory)


def _use_cached(slots: Sequence["_LinearSlot"], folder: Path, memory: HugePages) -> None:
    """Replace all layers with weights from the cache; quantises and stores them first if they are missing."""
    groups = groups_file(folder)

    def build(target: Path) -> None:
        for slot in slots:
            slot.put(_quantised(slot, groups), memory)
        save_file(dict(_tensors(slots)), target / _FILE)

    layers = [(slot.path, tuple(slot.module.weight.shape), slot.module.bias is not None) for slot in slots]
    cached = None
    try:
        cached = derived_folder("int8", folder, json.dumps([LAYOUT, layers]), build) / _FILE
    except (OSError, SafetensorError) as error:
        _log.warning("int8 weights cannot be kept in the cache: %s", error)
    dense = [slot for slot in slots if not isinstance(slot.module, Int8Linear)]
    if cached is not None and dense:
        _read(cached, dense, memory)
    for slot in dense:
        if cached is None:
            slot.put(_quantised(slot, groups), memory)


def int8_bytes(model: nn.Module) -> int:
    return sum(module.weights.num_bytes for module in model.modules() if isinstance(module, Int8Linear))


@dataclass(frozen=True, slots=True)
class _LinearSlot:
    """A linear layer's position in a model."""

    path: str
    """Path of the module in the model."""
    parent: nn.Module
    name: str
    """Attribute of ``parent``."""

    @property
    def module(self) -> Any:
        return getattr(self.parent, self.name)

    def put(self, weights: Int8Weights, memory: HugePages) -> None:
        """Replace the layer by one with a copy of ``weights``."""
        setattr(self.parent, self.name, Int8Linear(weights.copied(memory.put), load_native()))


def _linear_slots(model: nn.Module) -> Iterator[_LinearSlot]:
    for path, parent in model.named_modules():
        for name, child in parent.named_children():
            if type(child) in (nn.Linear, Conv1D):
                yield _LinearSlot(f"{path}.{name}".removeprefix("."), parent, name)


def _quantised(slot: _LinearSlot, groups: Path | None) -> Int8Weights:
    """Weights of a layer in int8; groups: file with the layers that a GGUF file had quantised, or None."""
    layer = slot.module
    weight = layer.weight.detach() if isinstance(layer, nn.Linear) else layer.weight.detach().T
    stored = None if groups is None else _stored(groups, slot.path, weight.shape)
    return pack(*(stored or quantise_channels(weight)), layer.bias)


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


def _tensors(slots: Sequence[_LinearSlot]) -> Iterator[tuple[str, torch.Tensor]]:
    for slot in slots:
        weights = slot.module.weights
        yield f"{slot.path}.packed", weights.packed
        yield f"{slot.path}.scales", weights.scales
        if weights.bias is not None:
            yield f"{slot.path}.bias", weights.bias


def _read(file: Path, slots: Sequence[_LinearSlot], memory: HugePages) -> None:
    """Replace dense layers by int8 layers with the weights in ``file``."""
    try:
        with safe_open(file, framework="pt") as opened:
            for slot in slots:
                dense = slot.module
                outputs, inputs = dense.weight.shape if isinstance(dense, nn.Linear) else dense.weight.T.shape
                packed, scales = (opened.get_tensor(f"{slot.path}.{part}") for part in ("packed", "scales"))
                bias = None if dense.bias is None else opened.get_tensor(f"{slot.path}.bias")
                slot.put(Int8Weights(inputs, outputs, packed, scales, bias), memory)
    except (OSError, SafetensorError) as error:
        raise ModelUnavailable(
            f"{file} is damaged ({error}); remove the folder {file.parent}, and it is built again"
        ) from error
