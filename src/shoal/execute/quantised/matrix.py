"""QuantisedMatrix: a quantised matrix in safetensors files, which is read when it is needed."""

from collections.abc import Iterator, Mapping
from types import EllipsisType
from typing import Any

import torch

from shoal.core import ModelUnsupported
from shoal.execute.linear.packed_weights import GROUP
from shoal.execute.quantised.unpack import unpack_numbers, unpack_zeros
from shoal.models import QuantisedTensor

_CHUNK = 1 << 22
"""Numbers that are converted at a time: what is needed besides the result stays small."""


class QuantisedMatrix:
    """A matrix [outputs, inputs], whose tensors ``slices`` has by part, as safetensors gives them.

    ``matrix[...]`` reads it, so that it can take the place of such a slice.
    """

    def __init__(self, tensor: QuantisedTensor, slices: Mapping[str, Any]) -> None:
        self.tensor = tensor
        self._slices = slices

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        """(numbers - zeros) * scales, in float32; raises ModelUnsupported if its groups are out of range."""
        weights = torch.empty(self.tensor.shape)
        columns, scales = self._columns(), self._scales()
        for rows, values in self._values(columns):
            torch.mul(values.float(), self._spread(scales[self._blocks_of(rows)], columns), out=weights[rows])
        return weights

    def in_int8(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The same matrix as values int8 [outputs, inputs], and scales float32 [outputs] or [outputs, inputs
        / 32], with no rounding; None if that is not possible.

        It is not for floats, values beyond int8, and groups that are no multiples of 32 inputs in order.
        """
        columns = self._columns()
        if self.tensor.scheme.is_float or not _in_groups(columns):
            return None
        values = torch.empty(self.tensor.shape, dtype=torch.int8)
        for rows, part in self._values(columns):
            low, high = part.aminmax()
            if low < -128 or high > 127:
                return None
            values[rows] = part
        scales = self._scales()[self._blocks_of(slice(0, len(values)))]
        return values, scales[:, 0] if scales.shape[1] == 1 else scales[:, columns[::GROUP]]

    def _values(self, columns: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """numbers - zeros of some rows at a time, int16 or float8; columns: of blocks, by input."""
        outputs, inputs = self.tensor.shape
        zeros = None if self.tensor.scheme.is_float else unpack_zeros(self.tensor, self._slices)
        step = max(8, _CHUNK // inputs // 8 * 8)
        for first in range(0, outputs, step):
            rows = slice(first, min(first + step, outputs))
            numbers = unpack_numbers(self.tensor, self._slices, rows.start, rows.stop)
            if zeros is not None:
                numbers = numbers.to(torch.int16) - self._spread(zeros[self._blocks_of(rows)], columns)
            yield rows, numbers

    def _scales(self) -> torch.Tensor:
        """float32 [rows, columns] of blocks."""
        scales: torch.Tensor = self._slices["scales"][...].float()
        return scales.T if self.tensor.by_inputs else scales.view(self.tensor.blocks)

    def _blocks_of(self, rows: slice) -> torch.Tensor:
        """The rows of blocks that these outputs are in."""
        block = self.tensor.scheme.block[0] or self.tensor.shape[0]
        return torch.arange(rows.start, rows.stop) // block

    def _spread(self, blocks: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """What ``blocks`` [rows, columns of blocks] has for each input; [rows, 1] if that is one column."""
        if blocks.shape[1] == 1:
            return blocks
        if not torch.equal(columns, self._in_order()):
            return blocks.index_select(1, columns)
        return blocks.repeat_interleave(self.tensor.scheme.block[1], 1)[:, : len(columns)]  # faster

    def _in_order(self) -> torch.Tensor:
        """``_columns``, if no tensor says anything else."""
        inputs = self.tensor.shape[1]
        return torch.arange(inputs) // (self.tensor.scheme.block[1] or inputs)

    def _columns(self) -> torch.Tensor:
        """The column of blocks that each input is in, int64."""
        count = self.tensor.blocks[1]
        if "groups" not in self._slices:
            return self._in_order()
        groups: torch.Tensor = self._slices["groups"][...].long()
        if (groups == -1).all():  # as compressed-tensors has them where inputs are in order
            return self._in_order()
        if not ((groups >= 0) & (groups < count)).all():
            raise ModelUnsupported(
                f"{self.tensor.parts['groups']} has groups beyond the {count} that have scales"
            )
        return groups


def _in_groups(columns: torch.Tensor) -> bool:
    """Whether all of each 32 inputs are in one block."""
    firsts = columns[::GROUP].repeat_interleave(GROUP)[: len(columns)]
    return torch.equal(firsts, columns)
