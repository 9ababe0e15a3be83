"""Unpacking of every quantised format, against loops that read single bits of the definition."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import ModelUnsupported
from shoal.execute.quantised import matrix
from shoal.execute.quantised.matrix import QuantisedMatrix
from shoal.models import QuantisedTensor, Scheme, Storage

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The columns of a word, the lowest bits first."""


def read_bits(words: torch.Tensor, bits: int, at: int) -> int:
    """The number ``at`` of a row of int32 words."""
    word = int(words[at * bits // 32]) & 0xFFFFFFFF
    return word >> (at * bits % 32) & (2**bits - 1)


def read_awq(words: torch.Tensor, at: int) -> int:
    return read_bits(words[at // 8 :], 4, AWQ_COLUMNS.index(at % 8))


def number_at(tensor: QuantisedTensor, slices: dict[str, torch.Tensor], output: int, input_: int) -> float:
    numbers, bits = slices["numbers"], tensor.scheme.bits
    match tensor.scheme.storage:
        case Storage.AWQ:
            return read_awq(numbers[input_], output)
        case Storage.GPTQ:
            return read_bits(numbers[:, output], bits, input_)
        case Storage.PACKED:
            return read_bits(numbers[output], bits, input_) - 2 ** (bits - 1)
    return float(numbers[output, input_].float())


def zero_at(tensor: QuantisedTensor, slices: dict[str, torch.Tensor], row: int, column: int) -> int:
    """The zero of a block, of which ``number_at`` is the number."""
    scheme, zeros = tensor.scheme, slices.get("zeros")
    if zeros is None:
        return 0
    if scheme.storage is Storage.AWQ:
        return read_awq(zeros[column], row)
    if scheme.storage is Storage.GPTQ:
        words = zeros[column].long()
        if scheme.zeros_less_one:
            words = words + sum(1 << at for at in range(0, 32, scheme.bits))
        return read_bits(words, scheme.bits, row)
    if zeros.dtype == torch.int32:
        return read_bits(zeros[:, column], scheme.bits, row) - 2 ** (scheme.bits - 1)
    return int(zeros.view(tensor.blocks)[row, column])


def slow(tensor: QuantisedTensor, slices: dict[str, torch.Tensor]) -> torch.Tensor:
    """The dense matrix."""
    outputs, inputs = tensor.shape
    height, width = (block or side for block, side in zip(tensor.scheme.block, tensor.shape, strict=True))
    dense = torch.empty(outputs, inputs)
    for output in range(outputs):
        for input_ in range(inputs):
            row = output // height
            column = int(slices["groups"][input_]) if "groups" in slices else input_ // width
            at = (column, row) if tensor.by_inputs else (row, column)
            scale = slices["scales"].float().view(tensor.blocks[:: -1 if tensor.by_inputs else 1])[at]
            difference = number_at(tensor, slices, output, input_) - zero_at(tensor, slices, row, column)
            dense[output, input_] = torch.tensor(difference) * scale
    return dense


def random_words(draw: Callable[..., Any], *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int32)


@st.composite
def matrices(draw: Callable[..., Any], storage: Storage) -> tuple[QuantisedTensor, dict[str, torch.Tensor]]:
    bits = 4 if storage is Storage.AWQ else 8 if storage is Storage.PLAIN else draw(st.sampled_from([4, 8]))
    outputs, inputs = 8 * draw(st.integers(1, 4)), 8 * draw(st.integers(1, 9))
    if storage is Storage.PLAIN or (storage is Storage.PACKED and draw(st.booleans())):
        outputs -= draw(st.integers(0, 7))
    scattered = storage in (Storage.GPTQ, Storage.PACKED) and draw(st.booleans())
    width = draw(st.sampled_from([0, 8, 24, 32, 64]))
    height = draw(st.sampled_from([1, 0, 5])) if storage is Storage.PLAIN else 1
    is_float = storage is Storage.PLAIN and draw(st.booleans())
    symmetric = is_float or draw(st.booleans())
    less = storage is Storage.GPTQ and draw(st.booleans())
    scheme = Scheme(storage, bits, (height, width), symmetric, is_float, scattered, less)
    tensor = QuantisedTensor((outputs, inputs), scheme, {"groups": "g"})
    rows, columns = tensor.blocks
    in_word = 32 // bits
    shapes = {
        Storage.AWQ: (inputs, outputs // 8),
        Storage.GPTQ: (inputs // in_word, outputs),
        Storage.PACKED: (outputs, inputs // in_word),
        Storage.PLAIN: (outputs, -(-inputs // 4)),
    }
    numbers = random_words(draw, *shapes[storage])
    zeros = random_words(draw, columns, -(-outputs // in_word))
    if storage is Storage.PACKED:
        zeros = zeros.T.contiguous()
    if storage is Storage.PLAIN:
        numbers = numbers.view(torch.int8)[:, :inputs]
        zeros = random_words(draw, rows, columns).to(torch.int8)
    if is_float:
        numbers = numbers.clamp_max(126).to(torch.float32).to(torch.float8_e4m3fn)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scales = torch.rand((columns, rows) if tensor.by_inputs else (rows, columns), generator=generator)
    scales = scales.to(draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32])))
    slices = {"numbers": numbers, "scales": scales}
    if tensor.by_inputs or not symmetric:
        slices["zeros"] = zeros
    if scattered:
        slices["groups"] = torch.randint(0, columns, (inputs,), generator=generator, dtype=torch.int32)
    return tensor, slices


@pytest.mark.parametrize("storage", Storage)
@given(data=st.data(), chunk=st.sampled_from([1, 300, 1 << 22]))
def test_a_matrix_is_what_its_bits_say(data: st.DataObject, storage: Storage, chunk: int) -> None:
    tensor, slices = data.draw(matrices(storage))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix, "_CHUNK", chunk)
        assert torch.equal(QuantisedMatrix(tensor, slices)[...], slow(tensor, slices))


@pytest.mark.parametrize("storage", Storage)
@given(data=st.data())
def test_int8_is_the_same_matrix_or_none(data: st.DataObject, storage: Storage) -> None:
    tensor, slices = data.draw(matrices(storage))
    made = QuantisedMatrix(tensor, slices)
    found, dense = made.in_int8(), made[...]
    columns = slices.get("groups", torch.arange(dense.shape[1]) // (tensor.scheme.block[1] or dense.shape[1]))
    in_groups = all(len(set(part.tolist())) == 1 for part in columns.split(32))
    if found is not None:
        values, scales = found
        assert values.dtype == torch.int8
        spread = scales[:, None] if scales.ndim == 1 else scales.repeat_interleave(32, 1)
        assert torch.equal(values * spread[:, : dense.shape[1]], dense)
        assert in_groups
    else:
        assert tensor.scheme.is_float or not in_groups or tensor.scheme.bits == 8


@pytest.mark.parametrize("group", [-1, 2])
def test_a_group_without_a_scale_is_named(group: int) -> None:
    tensor = QuantisedTensor((8, 64), Scheme(Storage.GPTQ, 4, (1, 32)), {"groups": "m.up.g_idx"})
    numbers, zeros = torch.zeros(8, 8, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    groups = torch.zeros(64, dtype=torch.int32)
    groups[5] = group
    slices = {"numbers": numbers, "scales": torch.ones(2, 8), "zeros": zeros, "groups": groups}
    with pytest.raises(ModelUnsupported, match=r"m\.up\.g_idx has groups beyond the 2"):
        QuantisedMatrix(tensor, slices)[...]
