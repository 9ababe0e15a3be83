"""Pickling a loaded model without the bytes of its tensors, and building it again over other memory.

All tensors of a model are found by pickling it. Ranges of memory that they share, as tied weights and the
parts of a merged weight do, become one extent; extents lie one after the other in the image. The model that
is unpickled has views of the image's memory, so it can be built before the memory has content.
"""

import ctypes
import io
import pickle
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

ALIGNMENT = 64
"""Alignment of extents. Within it an extent keeps its offset, on which the order of sums may depend."""


class Extent(NamedTuple):
    """A range of memory with weights, and its place in the image."""

    address: int
    num_bytes: int
    offset: int

    @property
    def content(self) -> memoryview:
        """The bytes themselves; valid while the model exists."""
        return memoryview((ctypes.c_char * self.num_bytes).from_address(self.address)).cast("B")


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A tensor in an image."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_parameter: bool


class Skeleton(NamedTuple):
    """A pickled model, and the memory that belongs to it."""

    pickled: bytes
    extents: Sequence[Extent]
    num_bytes: int
    """Size of the image."""


def take_apart(model: Any) -> Skeleton:
    """Pickle ``model``; raises PicklingError, or another error of its parts, if it cannot be pickled."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(model)
    extents = _lay_out(pickler.tensors)
    starts = [extent.address for extent in extents]
    stored = [_stored(tensor, extents, starts) for tensor in pickler.tensors]
    last = extents[-1] if extents else Extent(0, 0, 0)
    return Skeleton(pickle.dumps((stored, file.getvalue())), extents, last.offset + last.num_bytes)


def put_together(pickled: bytes, memory: memoryview) -> Any:
    """The model of a ``Skeleton``, with its tensors in ``memory``, which has the size of the image."""
    stored, body = pickle.loads(pickled)
    return _Unpickler(io.BytesIO(body), stored, memory).load()


class _Pickler(pickle.Pickler):
    """Writes numbers for tensors, in the order in which they were found."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if type(obj) not in (torch.Tensor, torch.nn.Parameter) or obj.layout != torch.strided:
            raise pickle.PicklingError(f"a tensor is a {type(obj).__name__} with layout {obj.layout}")
        if obj.device.type != "cpu":
            raise pickle.PicklingError(f"a tensor is on {obj.device}")
        number = self._numbers.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj)  # kept alive, so that its id is not used again
        return number


class _Unpickler(pickle.Unpickler):
    """Builds each tensor on its first use, as a view of the memory."""

    def __init__(self, file: io.BytesIO, stored: Sequence[_StoredTensor], memory: memoryview) -> None:
        super().__init__(file)
        self._stored = stored
        self._made: dict[int, torch.Tensor] = {}
        bytes_ = torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0)
        self._storage = bytes_.untyped_storage()

    def persistent_load(self, pid: Any) -> torch.Tensor:
        tensor = self._made.get(pid)
        if tensor is None:
            tensor = self._made[pid] = self._make(self._stored[pid])
        return tensor

    def _make(self, stored: _StoredTensor) -> torch.Tensor:
        tensor = torch.empty(0, dtype=stored.dtype)
        start = stored.offset // tensor.element_size()
        tensor.set_(self._storage, start, stored.shape, stored.strides)
        return torch.nn.Parameter(tensor, requires_grad=False) if stored.is_parameter else tensor


def _span(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.element_size()


def _lay_out(tensors: Sequence[torch.Tensor]) -> list[Extent]:
    """The ranges that ``tensors`` cover, in the order of their addresses."""
    ranges = sorted((t.data_ptr(), t.data_ptr() + _span(t)) for t in tensors if _span(t))
    merged: list[list[int]] = []
    for start, end in ranges:
        if merged and start < merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    extents = []
    end_of_last = 0
    for start, end in merged:
        offset = -(-end_of_last // ALIGNMENT) * ALIGNMENT + start % ALIGNMENT
        extents.append(Extent(start, end - start, offset))
        end_of_last = offset + end - start
    return extents


def _stored(tensor: torch.Tensor, extents: Sequence[Extent], starts: Sequence[int]) -> _StoredTensor:
    """starts: addresses of the extents."""
    offset = 0
    if tensor.numel():
        extent = extents[bisect_right(starts, tensor.data_ptr()) - 1]
        offset = extent.offset + tensor.data_ptr() - extent.address
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return _StoredTensor(offset, tensor.dtype, tuple(tensor.shape), tensor.stride(), is_parameter)
