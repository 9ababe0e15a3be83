"""Tensor views of the KV pool for each service: writing and gathering the keys and values of a layer.

`shoal.kvcache` computes offsets and strides; here they become strided views of one flat byte buffer. An
*index* identifies blocks in the form that a layout needs: block ids [blocks] for the merged layout, unit ids
[blocks, units of a block] for the split layout.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from shoal.execute.attention.int8_kv import as_bytes, dequantise, quantise
from shoal.execute.attention.native_structs import DTYPES, STORED_INT8, LayerAddresses
from shoal.kvcache import SCALE_BYTES, LayerExtent, PoolLayout, ServiceLayout, scales_of

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class UnitIds(Protocol):
    """Looks up the units of blocks in the split layout (``BlockPool.unit_ids``)."""

    def __call__(self, service: str, blocks: Sequence[int], *, before: bool = False) -> np.ndarray:
        """Unit ids [blocks, units of a block]; before: as they were before the plan just scheduled."""


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Location of one layer's keys and values, for kernels that read them in place."""

    keys: torch.Tensor
    """[entries, tokens of a block, ..., dim], with the strides of the pool; so are values."""
    values: torch.Tensor
    kv_heads: int
    key_head: int
    """Stride between KV heads inside an entry, in elements; 0 if each head has its own entries. So is
    value_head."""
    value_head: int
    first_entry: int
    """Index of the layer's first entry in a block."""
    head_entry: int
    """Stride between KV heads in entries."""


class ServiceCache(ABC):
    """One service's view of the pool."""

    def __init__(self, buffer: torch.Tensor, layout: PoolLayout, view: ServiceLayout) -> None:
        self.block_size = layout.block_size
        self.layers = view.layers
        """Offsets of each layer's keys and values in a block."""
        self.dtype = TORCH_DTYPES[view.shape.dtype]
        self.int8 = view.shape.int8
        """Whether keys and values are stored as int8, so that what is read differs from what was written."""
        self.device = buffer.device
        self._elements = buffer.view(torch.int8 if self.int8 else self.dtype)
        self._itemsize = self._elements.element_size()
        self._stride = view.stride_bytes // self._itemsize
        self._count = layout.total_bytes // view.stride_bytes
        held = view.stride_bytes if layout.kind == "split" else view.shape.block_bytes(self.block_size)
        self.rows = self._view(0, (held // self._itemsize,), (1,))
        """All blocks or units [blocks or units, elements], without the padding between blocks."""
        self.addresses = [self._layer_addresses(view.shape.dtype, extent) for extent in view.layers]
        """Addresses and strides of each layer, for native kernels."""
        self._keys = [self._values_view(e.key_offset, e, e.key_dim) for e in view.layers]
        self._values = [self._values_view(e.value_offset, e, e.value_dim) for e in view.layers]
        if self.int8:
            self._key_scales = [self._scales_view(e.key_scale_offset, e, e.key_dim) for e in view.layers]
            self._value_scales = [
                self._scales_view(e.value_scale_offset, e, e.value_dim) for e in view.layers
            ]

    @property
    def view(self) -> tuple[object, ...]:
        """Equal for views that locate all keys and values alike, such as those of services on one model."""
        return (self._elements.data_ptr(), self.dtype, self.block_size, self._stride, self.layers)

    def _layer_addresses(self, name: str, extent: LayerExtent) -> LayerAddresses:
        base = self._elements.data_ptr()
        dtype = DTYPES.index(name) if name in DTYPES else -1
        addresses = LayerAddresses(
            dtype=dtype,
            stored=STORED_INT8 if self.int8 else dtype,
            kv_heads=extent.kv_heads,
            key_dim=extent.key_dim,
            value_dim=extent.value_dim,
            keys=base + extent.key_offset,
            values=base + extent.value_offset,
            key_scales=base + extent.key_scale_offset,
            value_scales=base + extent.value_scale_offset,
            entry=self._stride * self._itemsize,
        )
        self._set_strides(
            addresses, extent, extent.key_dim * self._itemsize, extent.value_dim * self._itemsize
        )
        return addresses

    @abstractmethod
    def _set_strides(self, addresses: LayerAddresses, extent: LayerExtent, key: int, value: int) -> None:
        """Fill in the strides between tokens and heads; key, value: size of one in bytes."""

    @abstractmethod
    def entries(self, tables: np.ndarray) -> np.ndarray:
        """Block tables [rows, blocks] in the form that kernels read: [rows, blocks, entries of a block]."""

    def _view(self, offset_bytes: int, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        """[count, *shape] at ``offset_bytes`` of every block or unit; strides: inside one, in elements."""
        first = self._elements.storage_offset() + offset_bytes // self._itemsize
        return self._elements.as_strided((self._count, *shape), (self._stride, *strides), first)

    @abstractmethod
    def _values_view(self, offset_bytes: int, extent: LayerExtent, dim: int) -> torch.Tensor:
        """Keys or values of one layer: [blocks, block_size, kv_heads, dim], or units without kv_heads."""

    @abstractmethod
    def _scales_view(self, offset_bytes: int, extent: LayerExtent, dim: int) -> torch.Tensor:
        """Scales as bytes, which need no alignment: [blocks, block_size, kv_heads, scales, 2], or units
        without kv_heads."""

    @abstractmethod
    def layer(self, layer: int) -> LayerKV:
        """Location of the keys and values of a layer."""

    @abstractmethod
    def index(self, blocks: np.ndarray) -> torch.Tensor:
        """The index of ``blocks`` [blocks]."""

    def write(
        self, layer: int, index: torch.Tensor, offsets: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store key and value [tokens, kv_heads, dim] of one layer; token i goes to row
        ``offsets[i]`` of block ``index[i]``."""
        slots = self._slots(layer, index, offsets)
        if not self.int8:
            self._keys[layer].index_put_(slots, key)
            self._values[layer].index_put_(slots, value)
            return
        for x, numbers, scales in (
            (key, self._keys[layer], self._key_scales[layer]),
            (value, self._values[layer], self._value_scales[layer]),
        ):
            rounded, scale = quantise(x)
            numbers.index_put_(slots, rounded)
            scales.index_put_(slots, as_bytes(scale))

    @abstractmethod
    def _slots(
        self, layer: int, index: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Leading indices that select [tokens, kv_heads, dim] of a layer's keys or values."""

    def gather(self, layer: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of one layer's keys and values in ``index`` order: [blocks * block_size, kv_heads, dim].

        They have the model's dtype, or float32 if they are stored as int8, so that they are not rounded
        again.
        """
        keys = self._gather(self._keys[layer], layer, index)
        values = self._gather(self._values[layer], layer, index)
        if not self.int8:
            return keys, values
        key_scales = self._gather(self._key_scales[layer], layer, index)
        value_scales = self._gather(self._value_scales[layer], layer, index)
        return dequantise(keys, key_scales), dequantise(values, value_scales)

    @abstractmethod
    def _gather(self, view: torch.Tensor, layer: int, index: torch.Tensor) -> torch.Tensor:
        """A copy of ``view`` of the layer in ``index`` order: [blocks * block_size, kv_heads, ...]."""

    def read_blocks(self, blocks: Sequence[int]) -> memoryview:
        found = self.rows.index_select(0, self._rows_of(blocks))
        return found.view(torch.uint8).cpu().numpy().data.cast("B")

    def write_blocks(self, blocks: Sequence[int], content: memoryview) -> None:
        rows = self._rows_of(blocks)
        wanted = len(rows) * self.rows.shape[1] * self._itemsize
        if content.nbytes != wanted:
            raise ValueError(f"{len(blocks)} blocks have {wanted} bytes, not {content.nbytes}")
        numbers = torch.from_numpy(np.array(np.frombuffer(content, dtype=np.uint8)))
        self.rows[rows] = numbers.view(self.rows.dtype).view(len(rows), -1).to(self.device)

    def _rows_of(self, blocks: Sequence[int]) -> torch.Tensor:
        """Indices in ``rows`` of some blocks, block by block."""
        return self.index(np.array(blocks, dtype=np.int64)).flatten()

    @abstractmethod
    def row_indices(self, blocks: Sequence[int], *, before: bool = False) -> Sequence[int | torch.Tensor]:
        """The index of each block in ``rows``.

        before: as it was before the plan just scheduled, which may have freed the block.
        """


class MergedCache(ServiceCache):
    """The merged layout: blocks that hold all layers, one stride apart."""

    def _set_strides(self, addresses: LayerAddresses, extent: LayerExtent, key: int, value: int) -> None:
        addresses.key_token, addresses.value_token = extent.kv_heads * key, extent.kv_heads * value
        addresses.key_head, addresses.value_head = key, value
        size = self.block_size * SCALE_BYTES
        addresses.key_scale_head = scales_of(extent.key_dim) * size
        addresses.value_scale_head = scales_of(extent.value_dim) * size

    def entries(self, tables: np.ndarray) -> np.ndarray:
        return tables[:, :, None]

    def layer(self, layer: int) -> LayerKV:
        keys, values = self._keys[layer], self._values[layer]
        return LayerKV(keys, values, keys.shape[2], keys.stride(2), values.stride(2), 0, 0)

    def _values_view(self, offset_bytes: int, extent: LayerExtent, dim: int) -> torch.Tensor:
        heads = extent.kv_heads
        return self._view(offset_bytes, (self.block_size, heads, dim), (heads * dim, dim, 1))

    def _scales_view(self, offset_bytes: int, extent: LayerExtent, dim: int) -> torch.Tensor:
        count, size = scales_of(dim), self.block_size * SCALE_BYTES
        shape = (self.block_size, extent.kv_heads, count, SCALE_BYTES)
        return self._view(offset_bytes, shape, (SCALE_BYTES, count * size, size, 1))

    def index(self, blocks: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(blocks).to(self.device)

    def _slots(
        self, layer: int, index: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return index, offsets

    def _gather(self, view: torch.Tensor, layer: int, index: torch.Tensor) -> torch.Tensor:
        return view.index_select(0, index).flatten(0, 1)

    def row_indices(self, blocks: Sequence[int], *, before: bool = False) -> Sequence[int]:
        return blocks


class SplitCache(ServiceCache):
    """The split layout: units of one layer and one KV head, scattered over the pool."""

    def __init__(
        self, buffer: torch.Tensor, layout: PoolLayout, view: ServiceLayout, unit_ids: UnitIds
    ) -> None:
        super().__init__(buffer, layout, view)
        self._service = view.service
        self._unit_ids = unit_ids

    def _set_strides(self, addresses: LayerAddresses, extent: LayerExtent, key: int, value: int) -> None:
        addresses.key_token, addresses.value_token = key, value
        addresses.table_first, addresses.table_head = extent.first_unit, 1

    def entries(self, tables: np.ndarray) -> np.ndarray:
        units = self._unit_ids(self._service, tables.ravel().tolist())
        return np.asarray(units, dtype=np.int64).reshape(*tables.shape, -1)

    def layer(self, layer: int) -> LayerKV:
        extent = self.layers[layer]
        return LayerKV(self._keys[layer], self._values[layer], extent.kv_heads, 0, 0, extent.first_unit, 1)

    def _values_view(self, offset_bytes: int, extent: LayerExtent, dim: int) -> torch.Tensor:
        return self._view(offset_bytes, (self.block_size, dim), (dim, 1))

    def _scales_view(self, offset_bytes: int, extent: LayerExtent, dim: int) -> torch.Tensor:
        shape = (self.block_size, scales_of(dim), SCALE_BYTES)
        return self._view(offset_bytes, shape, (SCALE_BYTES, self.block_size * SCALE_BYTES, 1))

    def index(self, blocks: np.ndarray) -> torch.Tensor:
        return self._located(blocks.tolist(), before=False)

    def _located(self, blocks: Sequence[int], *, before: bool) -> torch.Tensor:
        units = self._unit_ids(self._service, blocks, before=before)
        return torch.from_numpy(np.ascontiguousarray(units, dtype=np.int64)).to(self.device)

    def _columns(self, layer: int, index: torch.Tensor) -> torch.Tensor:
        extent = self.layers[layer]
        return index[:, extent.first_unit : extent.first_unit + extent.kv_heads]

    def _slots(
        self, layer: int, index: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._columns(layer, index), offsets.unsqueeze(1)

    def _gather(self, view: torch.Tensor, layer: int, index: torch.Tensor) -> torch.Tensor:
        units = self._columns(layer, index)
        blocks, heads = units.shape
        rows = view.index_select(0, units.flatten())
        return rows.view(blocks, heads, *rows.shape[1:]).transpose(1, 2).flatten(0, 1)

    def row_indices(self, blocks: Sequence[int], *, before: bool = False) -> Sequence[torch.Tensor]:
        return self._located(blocks, before=before).unbind()
