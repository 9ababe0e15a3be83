"""Small shapes, layouts and pools, and a buffer that records the content of each byte."""

from collections.abc import Mapping, Sequence

import numpy as np

from shoal.kvcache import (
    BlockPool,
    KVShape,
    LayerExtent,
    LayerShape,
    PoolLayout,
    ServiceLayout,
    plan_layout,
)

SMOLLM2 = KVShape("bfloat16", tuple(LayerShape(3, 64, 64) for _ in range(30)))
GEMMA3 = KVShape("bfloat16", tuple(LayerShape(1, 256, 256) for _ in range(18)))


def make_shape(layers: int = 1, kv_heads: int = 1, dim: int = 32, dtype: str = "float32") -> KVShape:
    return KVShape(dtype, tuple(LayerShape(kv_heads, dim, dim) for _ in range(layers)))


def make_merged_layout(
    per_merged: Mapping[str, int], merged_blocks: int, dtypes: Mapping[str, str] | None = None
) -> PoolLayout:
    """A merged layout with ``per_merged`` sub-blocks of 2 tokens in a merged block, by service."""
    merged_bytes = 256 * int(np.lcm.reduce(list(per_merged.values())))
    services = {}
    for name, count in per_merged.items():
        dtype = (dtypes or {}).get(name, "float32")
        stride = merged_bytes // count
        dim = stride // 4 // (4 if dtype == "float32" else 2)
        shape = make_shape(dim=dim, dtype=dtype)
        extents = (LayerExtent(0, stride // 2, 1, dim, dim),)
        services[name] = ServiceLayout(name, shape, stride, count, extents)
    return PoolLayout("merged", 2, merged_bytes, merged_blocks, services)


def make_pool(per_merged: Mapping[str, int], merged_blocks: int, prefix_caching: bool = True) -> BlockPool:
    return BlockPool(make_merged_layout(per_merged, merged_blocks), prefix_caching)


def make_split_pool(units: int, prefix_caching: bool = True) -> BlockPool:
    """Services "a" (2 units per block) and "b" (3 units per block)."""
    shapes = {"a": make_shape(layers=2), "b": make_shape(layers=1, kv_heads=3)}
    layout = plan_layout(shapes, memory_bytes=units * 512, block_size=2, kind="split")
    assert layout.merged_blocks == units
    return BlockPool(layout, prefix_caching)


def make_hash(number: int) -> bytes:
    return number.to_bytes(16, "big")


def block_extents(pool: BlockPool, service: str, block: int) -> list[tuple[int, int]]:
    """The byte ranges [start, end) of a block, without padding."""
    layout = pool.layout
    view = layout.services[service]
    if layout.kind == "merged":
        start = block * view.stride_bytes
        return [(start, start + view.shape.block_bytes(layout.block_size))]
    ranges = []
    units = pool.unit_ids(service, [block])[0]
    for extent in view.layers:
        size = extent.value_offset + layout.block_size * extent.value_dim * view.shape.itemsize
        for head in range(extent.kv_heads):
            start = int(units[extent.first_unit + head]) * layout.merged_bytes
            ranges.append((start, start + size))
    return ranges


class StampedBuffer:
    """A fake buffer: each byte records the content last written to it."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._stamps = np.zeros(pool.layout.total_bytes, dtype=np.int64)
        self._contents: dict[object, int] = {}
        self.size = len(self._stamps)

    def write(self, service: str, block: int, content: object) -> None:
        stamp = self._contents.setdefault(content, len(self._contents) + 1)
        for start, end in block_extents(self._pool, service, block):
            assert 0 <= start < end <= len(self._stamps)
            self._stamps[start:end] = stamp

    def holds(self, service: str, block: int, content: object) -> bool:
        stamp = self._contents.get(content, -1)
        ranges = block_extents(self._pool, service, block)
        return all(bool((self._stamps[start:end] == stamp).all()) for start, end in ranges)


def cached_hashes(pool: BlockPool, service: str, hashes: Sequence[bytes]) -> set[bytes]:
    """The hashes that have a block; changes only the order of last use."""
    found = set()
    for block_hash in hashes:
        blocks = pool.match_prefix(service, [block_hash])
        if blocks:
            found.add(block_hash)
            pool.free(service, blocks)
    return found
