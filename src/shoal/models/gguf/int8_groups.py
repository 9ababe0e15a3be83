"""Quantised matrices of a GGUF file in int8, with a scale for every 32 inputs of an output channel.

Used only in the conversion's subprocess, since it imports torch and transformers.
"""

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

GROUP = 32
"""Number of inputs that share a scale."""

_DENSE = frozenset(GGMLQuantizationType[name] for name in ("F16", "BF16", "F32", "F64"))
_SYMMETRIC = frozenset(GGMLQuantizationType[name] for name in ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL"))
"""Types whose blocks are a float16 scale and 32 integers."""
_ROWS = 1024
"""Rows that are converted to float32 at a time."""


def int8_groups(file: gguf.GGUFReader, model: PreTrainedModel) -> tuple[dict[str, np.ndarray], bool]:
    """The quantised layers of ``file``, from which ``model`` was converted, and whether that is all.

    By module name, ``NAME.values`` int8 [outputs, inputs] and ``NAME.scales`` float32 [outputs, inputs /
    32]. A layer is omitted if its matrix is dense in the file, or if the integers do not give transformers'
    matrix, whose rows may be permuted.
    """
    matrices = _matrices(file, model)
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 1)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kept: dict[str, np.ndarray] = {}
    layers = [(name, module) for name, module in model.named_modules() if type(module) in (nn.Linear, Conv1D)]
    for name, layer in layers:
        matrix = matrices.get(id(layer.weight))
        if matrix is None:
            continue
        weight = layer.weight.detach() if isinstance(layer, nn.Linear) else layer.weight.detach().T
        found = _in_order_of(weight, *quantise(matrix.data, matrix.tensor_type), head_dim)
        if found is not None:
            kept[f"{name}.values"], kept[f"{name}.scales"] = found
    return kept, 0 < 2 * len(layers) == len(kept)


def quantise(data: np.ndarray, kind: GGMLQuantizationType) -> tuple[np.ndarray, np.ndarray]:
    """Values and scales (see ``int8_groups``) of a matrix, uint8 [outputs, bytes] as in the file.

    Exact if the type is a scale times integers in blocks of 32. Other types are dequantised and rounded to
    255 steps, from minus to plus the largest magnitude of a group.
    """
    parts = [_quantise_rows(data[at : at + _ROWS], kind) for at in range(0, len(data), _ROWS)]
    return np.concatenate([values for values, _ in parts]), np.concatenate([scales for _, scales in parts])


def _quantise_rows(data: np.ndarray, kind: GGMLQuantizationType) -> tuple[np.ndarray, np.ndarray]:
    weights = gguf.dequantize(data, kind).reshape(len(data), -1, GROUP)
    if kind in _SYMMETRIC:
        block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
        firsts = np.ascontiguousarray(data.reshape(len(data), -1, block_bytes)[..., :2])
        scales = firsts.view(np.float16)[..., 0].astype(np.float32)
    else:
        scales = np.abs(weights).max(axis=2) / np.float32(127)
    with np.errstate(
        invalid="ignore", divide="ignore"
    ):  # values that are not finite fail the comparison later
        values = np.where(scales[..., None] == 0, 0, weights / scales[..., None])
        values = np.rint(values).clip(-128, 127).astype(np.int8)
    return values.reshape(len(data), -1), scales


def _matrices(file: gguf.GGUFReader, model: nn.Module) -> dict[int, Any]:
    """The quantised matrices of ``file``, by id of the model's parameter."""
    architecture = file.fields["general.architecture"].contents()
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    blocks = file.fields.get(f"{architecture}.block_count")
    if architecture not in numbers or blocks is None:
        return {}
    usable = {t.name: t for t in file.tensors if t.tensor_type not in _DENSE and not t.shape[0] % GROUP}
    names = gguf.get_tensor_name_map(numbers[architecture], blocks.contents())
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stored = names.get_name(name, try_suffixes=(".weight",))
        if stored in usable and parameter.ndim == 2:
            found[id(parameter)] = usable[stored]
    return found


def _in_order_of(
    weight: torch.Tensor, values: np.ndarray, scales: np.ndarray, head_dim: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """values and scales with rows in the order of ``weight``; None if no known order gives it."""
    if values.shape != tuple(weight.shape):
        return None
    for order in _orders(len(values), head_dim):
        if _same(weight, values, scales, order):
            return values[order], scales[order]
    return None


def _orders(rows: int, head_dim: int) -> Iterator[np.ndarray]:
    """Known permutations of a file's rows: none, or, for llama's queries and keys, the even before the odd
    rows of each head."""
    plain = np.arange(rows)
    yield plain
    if rows % head_dim == 0 and head_dim % 2 == 0:
        yield plain.reshape(-1, head_dim // 2, 2).swapaxes(1, 2).ravel()


def _same(weight: torch.Tensor, values: np.ndarray, scales: np.ndarray, order: np.ndarray) -> bool:
    """Whether values * scales equals ``weight``, up to bfloat16 rounding and half a step."""
    for at in range(0, len(order), _ROWS):
        rows = order[at : at + _ROWS]
        steps = np.abs(scales[rows, :, None])
        ours = values[rows].reshape(*scales[rows].shape, GROUP) * scales[rows, :, None]
        theirs = weight[at : at + _ROWS].float().numpy().reshape(ours.shape)
        if not (np.abs(ours - theirs) <= np.abs(theirs) * 2.0**-8 + steps * 0.51).all():
            return False
    return True
