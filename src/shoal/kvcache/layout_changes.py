"""Adding and removing services of a layout in use, without moving the blocks of the remaining services."""

from dataclasses import replace

from shoal.kvcache.layout import ALIGNMENT, PoolLayout, merged_view
from shoal.kvcache.shape import KVShape

MAX_PADDING = 0.15
"""Limit on the share of padding in a merged block of an added service."""


def extend_layout(layout: PoolLayout, service: str, shape: KVShape) -> PoolLayout | None:
    """A merged layout with one more service, with as many of its blocks per merged block as possible.

    None if its block does not fit, or if more than ``MAX_PADDING`` of the merged block would be padding.
    """
    size, block = layout.merged_bytes // ALIGNMENT, shape.block_bytes(layout.block_size)
    most = layout.merged_bytes // block
    count = next((n for n in range(most, 0, -1) if size % n == 0 and layout.merged_bytes // n >= block), None)
    if count is None or count * block < (1 - MAX_PADDING) * layout.merged_bytes:
        return None
    view = merged_view(service, shape, layout.merged_bytes, count, layout.block_size)
    return replace(layout, services={**layout.services, service: view})


def reduce_layout(layout: PoolLayout, service: str) -> PoolLayout:
    services = {name: view for name, view in layout.services.items() if name != service}
    return replace(layout, services=services)


def keeps_blocks(old: PoolLayout, new: PoolLayout) -> bool:
    """Whether services in both layouts have their blocks at the same addresses."""
    same_blocks = (old.merged_bytes, old.merged_blocks) == (new.merged_bytes, new.merged_blocks)
    return same_blocks and all(new.services.get(name, view) == view for name, view in old.services.items())
