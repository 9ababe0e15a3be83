"""Unpacking numbers and zeros of quantised matrices from the tensors of a checkpoint.

Formats as in AutoAWQ (``awq/modules/linear/gemm.py``), GPTQModel (``gptqmodel/nn_modules/qlinear``) and
compressed-tensors (``compressors/pack_quantized``).
"""

from collections.abc import Mapping
from typing import Any

import torch

from shoal.models import QuantisedTensor, Storage

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word AWQ has each of eight outputs: a word begins with outputs 0, 2, 4, 6, 1, 3, 5, 7."""
_ONES = {4: 0x11111111, 8: 0x01010101}
"""A word with 1 for each number, by bits."""


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The numbers in int32 words, of 4 or 8 bits, the lowest first: uint8 [..., words * 32 / bits]."""
    # A column may have any stride and still count as contiguous.
    words = words.clone(memory_format=torch.contiguous_format)
    found = words.view(torch.uint8)  # the lowest byte first, on all machines that we run on
    return found if bits == 8 else torch.stack((found & 15, found >> 4), dim=-1).flatten(-2)


def unpack_numbers(tensor: QuantisedTensor, slices: Mapping[str, Any], first: int, last: int) -> torch.Tensor:
    """Numbers of the outputs from ``first`` to before ``last``, both multiples of 8: [outputs, inputs].

    slices: of safetensors files, by part. Unsigned integers (uint8) if packed, else as they are stored.
    """
    bits, numbers = tensor.scheme.bits, slices["numbers"]
    match tensor.scheme.storage:
        case Storage.AWQ:
            return _unpack_awq(numbers[:, first // 8 : last // 8])
        case Storage.GPTQ:
            return unpack_words(numbers[:, first:last].T, bits)
        case Storage.PACKED:
            return unpack_words(numbers[first:last], bits)
    rows: torch.Tensor = numbers[first:last]
    return rows


def unpack_zeros(tensor: QuantisedTensor, slices: Mapping[str, Any]) -> torch.Tensor:
    """The zero of each block, int16 [rows, columns] of blocks, on the scale of ``unpack_numbers``."""
    scheme, outputs = tensor.scheme, tensor.shape[0]
    middle = 1 << (scheme.bits - 1) if scheme.storage is Storage.PACKED else 0
    if "zeros" not in slices:
        return torch.full(tensor.blocks, middle, dtype=torch.int16)
    stored: torch.Tensor = slices["zeros"][...]
    if stored.dtype == torch.int8:
        return stored.view(tensor.blocks).to(torch.int16) + middle
    match scheme.storage:
        case Storage.AWQ:
            return _unpack_awq(stored).to(torch.int16)
        case Storage.GPTQ:
            # One is added to whole words, with carries, as GPTQModel subtracts it also from zeros that are 0.
            zeros = unpack_words(
                stored + _ONES[scheme.bits] if scheme.zeros_less_one else stored, scheme.bits
            )
        case _:
            zeros = unpack_words(stored.T, scheme.bits)
    return zeros[:, :outputs].T.to(torch.int16)


def _unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """uint8 [outputs, rows] from int32 [rows, outputs / 8]."""
    words = words.T.contiguous()
    found = torch.empty(len(words), 8, words.shape[1], dtype=torch.uint8)
    for column, place in enumerate(_AWQ_PLACES):
        found[:, column] = words >> 4 * place & 15
    return found.flatten(0, 1)
