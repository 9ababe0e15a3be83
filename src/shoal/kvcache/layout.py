"""Memory layout of the KV cache: the blocks of several models in one flat buffer, merged or split.

The merged layout is SeaLLM's unified KV cache (section on the cache of its local engine): the buffer
consists of equal merged blocks, and a merged block is divided into sub-blocks of one model at a time.

    |<------------ merged block 0 ------------>|<------------ merged block 1 ------------>| ...
    | A 0     | A 1     | A 2     | A 3     |  | as seen by model A, 4 blocks: stride_A
    | B 0       | B 1       | B 2       |      | as seen by model B, 3 blocks: stride_B

The split layout is the baseline (MuxServe, ICML 2024): the buffer consists of units, each with the keys
and values of ``block_size`` tokens for one KV head of one layer. A block is scattered over as many units
as its model has pairs of layer and KV head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import numpy as np

from shoal.core.errors import ConfigError
from shoal.kvcache.shape import KVShape, LayerShape

ALIGNMENT = 256
"""Every stride is a multiple of this many bytes, so that any kernel can address a block."""

LARGEST_MERGED = 32
"""Limit on the size of a merged block, as a multiple of the largest model's block."""

STRANDED_PER_DOUBLING = 0.04
"""Share of a full pool that is stranded, for every doubling of the sub-blocks in a merged block; measured by
``python -m benchmarks.kvcache_pool --sweep`` with 4 to 80 sub-blocks, nearly independent of the pool size."""


@dataclass(frozen=True, slots=True)
class LayerExtent:
    """Position of one layer's KV in a block.

    In the merged layout a sub-block has the layer's keys as ``[block_size, kv_heads, key_dim]``, followed by
    its values as ``[block_size, kv_heads, value_dim]``. In the split layout each unit has one KV head's keys
    ``[block_size, key_dim]`` and values ``[block_size, value_dim]``. If they are int8, the scales of keys and
    of values follow, each as ``[kv_heads, scales per key or value, block_size]``.

    Offsets are in bytes, from the start of a sub-block (merged) or of each unit (split).
    """

    key_offset: int
    value_offset: int
    kv_heads: int
    key_dim: int
    """Elements of one key."""
    value_dim: int
    """Elements of one value."""
    key_scale_offset: int = 0
    """For int8 keys."""
    value_scale_offset: int = 0
    """For int8 values."""
    first_unit: int = 0
    """Split layout: column of head 0 among the units of a block; head h is in ``first_unit + h``."""


@dataclass(frozen=True, slots=True)
class ServiceLayout:
    """One service's view of the buffer."""

    service: str
    shape: KVShape
    stride_bytes: int
    """Distance between adjacent sub-blocks (merged) or units (split)."""
    blocks_per_merged: int
    """Sub-blocks in one merged block (split: 1)."""
    layers: tuple[LayerExtent, ...]
    units_per_block: int = 1
    """Units of one block (merged: 1)."""

    @property
    def held_block_bytes(self) -> int:
        """Bytes that one block takes from the pool, including padding."""
        return self.stride_bytes * self.units_per_block


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Layout of the whole buffer, with every service's view of it.

    In a merged layout, block ``id`` of a service starts at byte ``id * stride_bytes``. In a split layout,
    the pool's ``unit_ids`` has a block's units, and a unit starts at byte ``unit * merged_bytes``.
    """

    kind: str
    """"merged" or "split"."""
    block_size: int
    """Tokens per block."""
    merged_bytes: int
    """Size of a merged block (split: of a unit)."""
    merged_blocks: int
    """Number of merged blocks (split: of units)."""
    services: Mapping[str, ServiceLayout]

    @property
    def total_bytes(self) -> int:
        """Size of the buffer."""
        return self.merged_bytes * self.merged_blocks

    def resized(self, memory_bytes: int) -> "PoolLayout":
        """The same block layout in a pool of another size, such as the host's pool for swapped KV.

        Raises:
            ConfigError: one block of some service does not fit.
        """
        merged_blocks = memory_bytes // self.merged_bytes
        largest = max(self.services.values(), key=lambda view: view.units_per_block)
        if merged_blocks < largest.units_per_block:
            raise ConfigError(
                f"a KV pool of {memory_bytes} bytes does not hold one block of service {largest.service!r}, "
                f"which takes {largest.units_per_block * self.merged_bytes} bytes in this layout; "
                f"give it (kv_cache memory, or swap for preempted requests) at least that much"
            )
        return replace(self, merged_blocks=merged_blocks)

    def padding(self, service: str) -> float:
        """Share of a block's bytes that never holds KV, in [0, 1)."""
        view = self.services[service]
        return 1 - view.shape.block_bytes(self.block_size) / view.held_block_bytes


def plan_layout(
    shapes: Mapping[str, KVShape], *, memory_bytes: int, block_size: int, kind: str = "merged"
) -> PoolLayout:
    """Lay out the blocks of ``shapes`` (by service name) in at most ``memory_bytes``.

    The result depends on the arguments alone, so ranks that share a pool layout pass the same (the
    smallest) ``memory_bytes``.

    Raises:
        ConfigError: not even one merged block (or one block of every service) fits, or an argument
            is invalid.
    """
    if kind not in ("merged", "split"):
        raise ConfigError(f"kv_cache layout {kind!r} is not known; possible are merged, split")
    if block_size < 1:
        raise ConfigError(f"kv_cache block_size must be at least 1 token, got {block_size}")
    if not shapes:
        raise ConfigError("a KV pool needs at least one service")
    plan = _plan_merged if kind == "merged" else _plan_split
    return plan(shapes, memory_bytes, block_size)


def _plan_merged(shapes: Mapping[str, KVShape], memory_bytes: int, block_size: int) -> PoolLayout:
    block_bytes = {name: shape.block_bytes(block_size) for name, shape in shapes.items()}
    largest = max(block_bytes, key=lambda name: block_bytes[name])
    _require_memory(_aligned(block_bytes[largest]), memory_bytes, f"one block of service {largest!r}")
    merged_bytes, blocks_per_merged = choose_merged_bytes(block_bytes, memory_bytes)
    services = {
        name: merged_view(name, shape, merged_bytes, blocks_per_merged[name], block_size)
        for name, shape in shapes.items()
    }
    return PoolLayout("merged", block_size, merged_bytes, memory_bytes // merged_bytes, services)


def merged_view(
    service: str, shape: KVShape, merged_bytes: int, blocks_per_merged: int, block_size: int
) -> ServiceLayout:
    """View of a service whose blocks divide a merged block into ``blocks_per_merged`` equal parts."""
    return ServiceLayout(
        service=service,
        shape=shape,
        stride_bytes=merged_bytes // blocks_per_merged,
        blocks_per_merged=blocks_per_merged,
        layers=_merged_extents(shape, block_size),
    )


def _plan_split(shapes: Mapping[str, KVShape], memory_bytes: int, block_size: int) -> PoolLayout:
    unit_bytes = _aligned(
        max(
            _extent(layer, shape, block_size, kv_heads=1)[1]
            for shape in shapes.values()
            for layer in shape.layers
        )
    )
    services = {
        name: ServiceLayout(
            service=name,
            shape=shape,
            stride_bytes=unit_bytes,
            blocks_per_merged=1,
            layers=_split_extents(shape, block_size),
            units_per_block=sum(layer.kv_heads for layer in shape.layers),
        )
        for name, shape in shapes.items()
    }
    largest = max(services.values(), key=lambda view: view.held_block_bytes)
    _require_memory(largest.held_block_bytes, memory_bytes, f"one block of service {largest.service!r}")
    return PoolLayout("split", block_size, unit_bytes, memory_bytes // unit_bytes, services)


def choose_merged_bytes(block_bytes: Mapping[str, int], memory_bytes: int) -> tuple[int, dict[str, int]]:
    """The merged block size that wastes the least memory, and the number of blocks of each service in it.

    Candidates are all multiples of 256 bytes from the largest block up to ``LARGEST_MERGED`` times that (and
    the memory). For a size B, service s has the largest n_s that divides B into strides that are multiples
    of 256 bytes and hold its block. Two kinds of waste are added, as shares of a service's memory, and
    averaged over services:

    - padding, 1 - n_s block_s / B, which larger sizes can reduce;
    - stranding, free sub-blocks inside a merged block that their service still holds:
      ``STRANDED_PER_DOUBLING`` log2 n_s, and (important in small pools) half of one merged block beyond one
      sub-block, assuming that every service uses an equal share of the pool.

    The smallest of equally good sizes is chosen.
    """
    merged_bytes, counts = _choose_merged_bytes(tuple(block_bytes.values()), memory_bytes)
    return merged_bytes, dict(zip(block_bytes, counts, strict=True))


# Large models have a million candidates, and searches simulate many engines of the same few models.
@lru_cache(maxsize=1024)
def _choose_merged_bytes(block_bytes: tuple[int, ...], memory_bytes: int) -> tuple[int, tuple[int, ...]]:
    """The merged block size, and how many blocks of each of these sizes it has."""
    smallest = max(_aligned(size) for size in block_bytes) // ALIGNMENT
    limit = min(memory_bytes // ALIGNMENT, LARGEST_MERGED * smallest)
    sizes = np.arange(limit + 1)
    sizes[0] = 1
    share = np.minimum(sizes * ALIGNMENT * len(block_bytes) / memory_bytes, 1)
    waste = np.zeros(limit + 1)
    # Many services have blocks of a few sizes.
    counts, wasted = {}, {}
    for size in set(block_bytes):
        counts[size] = _max_blocks_per_size(_aligned(size) // ALIGNMENT, limit)
        count = np.maximum(counts[size], 1)
        stranded = STRANDED_PER_DOUBLING * np.log2(count) + 0.5 * share * (1 - 1 / count)
        wasted[size] = 1 - count * (size / ALIGNMENT) / sizes * (1 - stranded)
    for size in block_bytes:
        waste += wasted[size]
    best = smallest + int(np.argmin(waste[smallest:]))
    return best * ALIGNMENT, tuple(int(counts[size][best]) for size in block_bytes)


def _max_blocks_per_size(block: int, limit: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """For each size up to ``limit``: the largest divisor n with size / n >= block, or 0."""
    most = np.zeros(limit + 1, dtype=np.int64)
    for count in range(1, limit // block + 1):
        most[count * block :: count] = count
    return most


def _merged_extents(shape: KVShape, block_size: int) -> tuple[LayerExtent, ...]:
    extents = []
    offset = 0
    for layer in shape.layers:
        extent, size = _extent(layer, shape, block_size, layer.kv_heads, offset)
        extents.append(extent)
        offset += size
    return tuple(extents)


def _split_extents(shape: KVShape, block_size: int) -> tuple[LayerExtent, ...]:
    extents = []
    first_unit = 0
    for layer in shape.layers:
        extents.append(replace(_extent(layer, shape, block_size, 1)[0], first_unit=first_unit))
        first_unit += layer.kv_heads
    return tuple(extents)


def _extent(
    layer: LayerShape, shape: KVShape, block_size: int, kv_heads: int, offset: int = 0
) -> tuple[LayerExtent, int]:
    """Extent of ``kv_heads`` heads of a layer starting at ``offset``, and its size in bytes."""
    rows = block_size * kv_heads
    ends = list(
        accumulate(
            (
                rows * layer.key_dim * shape.itemsize,
                rows * layer.value_dim * shape.itemsize,
                rows * shape.scale_bytes(layer.key_dim),
                rows * shape.scale_bytes(layer.value_dim),
            ),
            initial=offset,
        )
    )
    return LayerExtent(
        key_offset=ends[0],
        value_offset=ends[1],
        key_scale_offset=ends[2],
        value_scale_offset=ends[3],
        kv_heads=layer.kv_heads,
        key_dim=layer.key_dim,
        value_dim=layer.value_dim,
    ), ends[4] - offset


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _require_memory(needed: int, given: int, what: str) -> None:
    if given < needed:
        raise ConfigError(
            f"kv_cache memory of {given} bytes does not hold {what}, which takes {needed} bytes; "
            f"give kv_cache at least that much memory or a smaller block_size"
        )
