"""Tensor views of the KV pool: where a layer's keys and values are written and gathered.

The layout's numbers come from `shoal.kvcache`; this file turns them into strided views of one flat
byte buffer. An *index* names the blocks of some sequences in the form that a cache understands: block
ids [blocks] for the merged layout, unit ids [blocks, units of a block] for the split one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch

from shoal.core import BlockCopy
from shoal.kvcache import LayerExtent, PoolLayout, ServiceLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

UnitIds = Callable[[str, Sequence[int]], np.ndarray]
"""Split layout: (service, block ids) -> unit ids [blocks, units of a block]."""


class ServiceCache(ABC):
    """One service's view of the pool."""

    def __init__(self, buffer: torch.Tensor, layout: PoolLayout, view: ServiceLayout) -> None:
        self.block_size = layout.block_size
        self.layers = view.layers
        self.dtype = TORCH_DTYPES[view.shape.dtype]
        self.device = buffer.device
        self._stride = view.stride_bytes // self.dtype.itemsize
        self._count = layout.total_bytes // view.stride_bytes
        self._elements = buffer.view(self.dtype)

    def _view(self, offset_bytes: int, *shape: int) -> torch.Tensor:
        """[count, *shape] at ``offset_bytes`` of every block or unit, one stride apart."""
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        return self._elements.as_strided(
            (self._count, *shape), (self._stride, *strides), offset_bytes // self.dtype.itemsize
        )

    @abstractmethod
    def index(self, blocks: np.ndarray) -> torch.Tensor:
        """The index of ``blocks`` [blocks]."""

    @abstractmethod
    def write(
        self, layer: int, index: torch.Tensor, offsets: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store key and value [tokens, kv_heads, dim] of one layer; token i goes to row
        ``offsets[i]`` of block ``index[i]``."""

    @abstractmethod
    def gather(self, layer: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of one layer's keys and values in ``index`` order: [blocks * block_size, kv_heads, dim]."""

    @abstractmethod
    def copy(self, copy: BlockCopy) -> None:
        """Copy a whole block onto another."""


class MergedCache(ServiceCache):
    """Blocks that hold all layers, one stride apart."""

    def __init__(self, buffer: torch.Tensor, layout: PoolLayout, view: ServiceLayout) -> None:
        super().__init__(buffer, layout, view)
        self._rows = self._view(0, self._stride)
        self._keys = [self._extent(e.key_offset, e, e.key_dim) for e in view.layers]
        self._values = [self._extent(e.value_offset, e, e.value_dim) for e in view.layers]

    def _extent(self, offset_bytes: int, extent: LayerExtent, dim: int) -> torch.Tensor:
        return self._view(offset_bytes, self.block_size, extent.kv_heads, dim)

    def index(self, blocks: np.ndarray) -> torch.Tensor:
        """See ServiceCache."""
        return torch.from_numpy(blocks).to(self.device)

    def write(
        self, layer: int, index: torch.Tensor, offsets: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """See ServiceCache."""
        self._keys[layer].index_put_((index, offsets), key)
        self._values[layer].index_put_((index, offsets), value)

    def gather(self, layer: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ServiceCache."""
        keys = self._keys[layer].index_select(0, index)
        values = self._values[layer].index_select(0, index)
        return keys.flatten(0, 1), values.flatten(0, 1)

    def copy(self, copy: BlockCopy) -> None:
        """See ServiceCache."""
        self._rows[copy.target] = self._rows[copy.source]


class SplitCache(ServiceCache):
    """Units of one layer and one KV head, scattered over the pool."""

    def __init__(
        self, buffer: torch.Tensor, layout: PoolLayout, view: ServiceLayout, unit_ids: UnitIds
    ) -> None:
        super().__init__(buffer, layout, view)
        self._service = view.service
        self._unit_ids = unit_ids
        self._units = self._view(0, self._stride)
        self._keys = [self._view(e.key_offset, self.block_size, e.key_dim) for e in view.layers]
        self._values = [self._view(e.value_offset, self.block_size, e.value_dim) for e in view.layers]

    def index(self, blocks: np.ndarray) -> torch.Tensor:
        """See ServiceCache."""
        units = self._unit_ids(self._service, blocks.tolist())
        return torch.from_numpy(np.ascontiguousarray(units, dtype=np.int64)).to(self.device)

    def _columns(self, layer: int, index: torch.Tensor) -> torch.Tensor:
        extent = self.layers[layer]
        return index[:, extent.first_unit : extent.first_unit + extent.kv_heads]

    def write(
        self, layer: int, index: torch.Tensor, offsets: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """See ServiceCache."""
        units = self._columns(layer, index)
        rows = offsets.unsqueeze(1)
        self._keys[layer].index_put_((units, rows), key)
        self._values[layer].index_put_((units, rows), value)

    def gather(self, layer: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ServiceCache."""
        units = self._columns(layer, index)
        keys = self._keys[layer].index_select(0, units.flatten())
        values = self._values[layer].index_select(0, units.flatten())
        blocks, heads = units.shape
        return (
            keys.view(blocks, heads, self.block_size, -1).transpose(1, 2).flatten(0, 1),
            values.view(blocks, heads, self.block_size, -1).transpose(1, 2).flatten(0, 1),
        )

    def copy(self, copy: BlockCopy) -> None:
        """See ServiceCache."""
        pair = self.index(np.array([copy.source, copy.target]))
        self._units[pair[1]] = self._units[pair[0]]


class KVStore:
    """The pool's flat buffer and every service's view of it.

    The buffer is not initialised: nothing may rely on rows that no step has written.
    """

    def __init__(self, layout: PoolLayout, device: torch.device, unit_ids: UnitIds | None = None) -> None:
        self.buffer = torch.empty(layout.total_bytes, dtype=torch.uint8, device=device)
        self._merged_bytes = layout.merged_bytes
        self.services: dict[str, ServiceCache] = {}
        for name, view in layout.services.items():
            if layout.kind == "merged":
                self.services[name] = MergedCache(self.buffer, layout, view)
            elif unit_ids is not None:
                self.services[name] = SplitCache(self.buffer, layout, view, unit_ids)
            else:
                raise ValueError("the split layout needs the pool's unit_ids")

    def zero(self, merged_block: int) -> None:
        """Clear a merged block that changes dtype."""
        start = merged_block * self._merged_bytes
        self.buffer[start : start + self._merged_bytes] = 0

    def copy(self, copy: BlockCopy) -> None:
        """Copy one block of a service onto another."""
        self.services[copy.service].copy(copy)
