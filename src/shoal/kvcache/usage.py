"""KV memory usage: live, cached and free blocks by service; internal and external fragmentation."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceUsage:
    """KV memory of one service."""

    live_blocks: int
    """Blocks with references."""
    cached_blocks: int
    """Published blocks without references."""
    free_blocks: int
    """Free sub-blocks inside merged blocks that the service holds (split: none)."""
    merged_blocks: int
    """Merged blocks (split: units) that the service holds."""
    block_bytes: int
    """Bytes that a block takes from the pool, including padding."""
    token_bytes: int
    """Bytes of one token's KV."""


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Snapshot of the pool's memory usage."""

    capacity: int
    """Total merged blocks (split: units)."""
    free_merged: int
    """Merged blocks (split: units) that no service holds."""
    services: Mapping[str, ServiceUsage]
    total_bytes: int
    """Size of the pool."""
    live_bytes: int
    """Bytes of live blocks, including padding."""

    def internal_bytes(self, tokens: Mapping[str, int]) -> int:
        """Bytes of live blocks that hold no KV: empty token slots and padding.

        tokens: by service, tokens with KV in live blocks, counting shared blocks once.
        """
        return sum(
            used.live_blocks * used.block_bytes - tokens.get(name, 0) * used.token_bytes
            for name, used in self.services.items()
        )

    def external_bytes(self) -> int:
        """Bytes of free sub-blocks that only the service with their merged block can use."""
        return sum(used.free_blocks * used.block_bytes for used in self.services.values())

    def internal(self, tokens: Mapping[str, int]) -> float:
        """Internal fragmentation: ``internal_bytes`` as a share of the pool, in [0, 1]."""
        return self.internal_bytes(tokens) / self.total_bytes

    def external(self) -> float:
        """External fragmentation: ``external_bytes`` as a share of the pool, in [0, 1]."""
        return self.external_bytes() / self.total_bytes
