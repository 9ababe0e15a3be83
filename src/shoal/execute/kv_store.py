"""Tensor views of the KV pool: where a layer's keys and values are written and gathered.

The numbers of the layout come from `shoal.kvcache`; here they become strided views of one flat byte
buffer. An *index* names blocks in the form that a cache needs: block ids [blocks] for the merged layout, unit
ids [blocks, units of a block] for the split one.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
import torch

from shoal.core import BlockCopy
from shoal.execute.attention_structs import DTYPES, LayerAddresses
from shoal.execute.huge_pages import huge_empty
from shoal.kvcache import LayerExtent, PoolLayout, ServiceLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class UnitIds(Protocol):
    """Where a pool's blocks lie in the split layout (``BlockPool.unit_ids``)."""

    def __call__(self, service: str, blocks: Sequence[int], *, before: bool = False) -> np.ndarray:
        """Unit ids [blocks, units of a block]; ``before``: as they were before the step just scheduled."""


class ServiceCache(ABC):
    """One service's view of the pool."""

    def __init__(self, buffer: torch.Tensor, layout: PoolLayout, view: ServiceLayout) -> None:
        self.block_size = layout.block_size
        """Tokens in a block."""
        self.layers = view.layers
        """Where each layer's keys and values lie in a block."""
        self._dtype_name = view.shape.dtype
        self.dtype = TORCH_DTYPES[view.shape.dtype]
        """Of keys and values."""
        self.device = buffer.device
        """Where the buffer lies."""
        self._stride = view.stride_bytes // self.dtype.itemsize
        self._count = layout.total_bytes // view.stride_bytes
        self._elements = buffer.view(self.dtype)
        self.rows = self._view(0, self._stride)
        """All blocks or units [blocks or units, elements of a stride]."""
        self.addresses = [self._layer_addresses(extent) for extent in view.layers]
        """The same of each layer in numbers, for native kernels."""

    def _layer_addresses(self, extent: LayerExtent) -> LayerAddresses:
        size = self.dtype.itemsize
        key, value = extent.key_dim * size, extent.value_dim * size
        base = self._elements.data_ptr()
        addresses = LayerAddresses(
            dtype=DTYPES.index(self._dtype_name) if self._dtype_name in DTYPES else -1,
            kv_heads=extent.kv_heads,
            key_dim=extent.key_dim,
            value_dim=extent.value_dim,
            keys=base + extent.key_offset,
            values=base + extent.value_offset,
            entry=self._stride * size,
        )
        self._place_heads(addresses, extent, key, value)
        return addresses

    @abstractmethod
    def _place_heads(self, addresses: LayerAddresses, extent: LayerExtent, key: int, value: int) -> None:
        """Fill in the steps between tokens and heads; key, value: bytes of one."""

    @abstractmethod
    def entries(self, tables: np.ndarray) -> np.ndarray:
        """Block tables [rows, blocks] as native kernels read them: [rows, blocks, entries of a block]."""

    def _view(self, offset_bytes: int, *shape: int) -> torch.Tensor:
        """[count, *shape] at ``offset_bytes`` of every block or unit, one stride apart."""
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        first = self._elements.storage_offset() + offset_bytes // self.dtype.itemsize
        return self._elements.as_strided((self._count, *shape), (self._stride, *strides), first)

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
    def places(self, blocks: Sequence[int], *, before: bool = False) -> Sequence[int | torch.Tensor]:
        """The index of each block in ``rows``.

        before: where it was before the step just scheduled, which may have freed it.
        """


class MergedCache(ServiceCache):
    """Blocks that hold all layers, one stride apart."""

    def __init__(self, buffer: torch.Tensor, layout: PoolLayout, view: ServiceLayout) -> None:
        super().__init__(buffer, layout, view)
        self._keys = [self._extent(e.key_offset, e, e.key_dim) for e in view.layers]
        self._values = [self._extent(e.value_offset, e, e.value_dim) for e in view.layers]

    def _place_heads(self, addresses: LayerAddresses, extent: LayerExtent, key: int, value: int) -> None:
        addresses.key_token, addresses.value_token = extent.kv_heads * key, extent.kv_heads * value
        addresses.key_head, addresses.value_head = key, value

    def entries(self, tables: np.ndarray) -> np.ndarray:
        """See ServiceCache."""
        return tables[:, :, None]

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

    def places(self, blocks: Sequence[int], *, before: bool = False) -> Sequence[int]:
        """See ServiceCache; a block's id is its index."""
        return blocks


class SplitCache(ServiceCache):
    """Units of one layer and one KV head, scattered over the pool."""

    def __init__(
        self, buffer: torch.Tensor, layout: PoolLayout, view: ServiceLayout, unit_ids: UnitIds
    ) -> None:
        super().__init__(buffer, layout, view)
        self._service = view.service
        self._unit_ids = unit_ids
        self._keys = [self._view(e.key_offset, self.block_size, e.key_dim) for e in view.layers]
        self._values = [self._view(e.value_offset, self.block_size, e.value_dim) for e in view.layers]

    def _place_heads(self, addresses: LayerAddresses, extent: LayerExtent, key: int, value: int) -> None:
        addresses.key_token, addresses.value_token = key, value
        addresses.table_first, addresses.table_head = extent.first_unit, 1

    def entries(self, tables: np.ndarray) -> np.ndarray:
        """See ServiceCache."""
        return self.index(tables.ravel()).numpy().reshape(*tables.shape, -1)

    def index(self, blocks: np.ndarray) -> torch.Tensor:
        """See ServiceCache."""
        return self._located(blocks.tolist(), before=False)

    def _located(self, blocks: Sequence[int], *, before: bool) -> torch.Tensor:
        units = self._unit_ids(self._service, blocks, before=before)
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

    def places(self, blocks: Sequence[int], *, before: bool = False) -> Sequence[torch.Tensor]:
        """See ServiceCache; a block's index is its units."""
        return self._located(blocks, before=before).unbind()


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy with fixed addresses, which stay valid whatever the pool does with the blocks afterwards."""

    source: ServiceCache
    """The cache to read from."""
    source_place: int | torch.Tensor
    """Index of the block in the source's ``rows``."""
    target: ServiceCache
    """The cache to write to."""
    target_place: int | torch.Tensor
    """Index of the block in the target's ``rows``."""

    def carry_out(self) -> None:
        """Copy the whole block; between host and device as one transfer, ordered with the device's work."""
        content = self.source.rows[self.source_place]
        if isinstance(self.target_place, int):
            self.target.rows[self.target_place].copy_(content, non_blocking=True)
        else:
            self.target.rows[self.target_place] = content.to(self.target.device)


class KVStore:
    """The pool's flat buffer, the buffer for swapped KV in host memory, and every service's views of them.

    The buffers are not initialised: rows that no step has written may contain anything.

    unit_ids, host_unit_ids: needed for the split layout. host_layout: None if nothing is swapped.
    """

    def __init__(
        self,
        layout: PoolLayout,
        device: torch.device,
        unit_ids: UnitIds | None = None,
        host_layout: PoolLayout | None = None,
        host_unit_ids: UnitIds | None = None,
    ) -> None:
        self.buffer = _empty(layout.total_bytes, device)
        """The pool's bytes."""
        self._merged_bytes = layout.merged_bytes
        self.services = _views(self.buffer, layout, unit_ids)
        """Each service's view of them."""
        self.host_buffer: torch.Tensor | None = None
        """Bytes of swapped KV."""
        self.host_services: dict[str, ServiceCache] = {}
        """Each service's view of those."""
        if host_layout is not None:
            self.host_buffer = torch.empty(
                host_layout.total_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda"
            )
            self.host_services = _views(self.host_buffer, host_layout, host_unit_ids)

    def zero(self, merged_block: int) -> None:
        """Clear a merged block that changes dtype."""
        start = merged_block * self._merged_bytes
        self.buffer[start : start + self._merged_bytes] = 0

    def locate(self, copies: Iterable[BlockCopy]) -> list[Transfer]:
        """Look up the addresses of a plan's copies; must be called before the next plan is scheduled.

        A source in the pool is the block as it was before the plan's step, which may have freed it.
        """
        transfers: list[Transfer] = []
        for (name, from_host, to_host), same in groupby(
            copies, key=lambda copy: (copy.service, copy.source_host, copy.target_host)
        ):
            run = list(same)
            source = self._cache(name, from_host)
            target = self._cache(name, to_host)
            sources = source.places([copy.source for copy in run], before=not from_host)
            targets = target.places([copy.target for copy in run])
            transfers += [
                Transfer(source, source_place, target, target_place)
                for source_place, target_place in zip(sources, targets, strict=True)
            ]
        return transfers

    def _cache(self, service: str, host: bool) -> ServiceCache:
        if not host:
            return self.services[service]
        if self.host_buffer is None:
            raise ValueError("a plan swaps KV, but the executor was given no host_layout")
        return self.host_services[service]

    def copy(self, copy: BlockCopy) -> None:
        """Copy one block of a service onto another."""
        self.copy_all((copy,))

    def copy_all(self, copies: Iterable[BlockCopy]) -> None:
        """Make copies one after the other: a later one may read what an earlier one wrote."""
        for transfer in self.locate(copies):
            transfer.carry_out()


def _empty(num_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":  # attention reads blocks from all over it
        return huge_empty(num_bytes)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _views(buffer: torch.Tensor, layout: PoolLayout, unit_ids: UnitIds | None) -> dict[str, ServiceCache]:
    if layout.kind == "merged":
        return {name: MergedCache(buffer, layout, view) for name, view in layout.services.items()}
    if unit_ids is None:
        raise ValueError("the split layout needs the pool's unit_ids")
    return {name: SplitCache(buffer, layout, view, unit_ids) for name, view in layout.services.items()}
