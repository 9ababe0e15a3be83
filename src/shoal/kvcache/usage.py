"""What the pool's memory is used for, and how much of it is wasted."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceUsage:
    """Blocks of one service.

    live_blocks: with references. cached_blocks: published, without references. free_blocks: unused
    sub-blocks inside merged blocks that the service holds (split layout: none). merged_blocks: merged
    blocks (split: units) that it holds. block_bytes: what a block takes from the pool, padding included.
    token_bytes: KV of one token.
    """

    live_blocks: int
    cached_blocks: int
    free_blocks: int
    merged_blocks: int
    block_bytes: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """A snapshot of the pool: merged blocks in all and free ones, bytes in all and in live blocks."""

    capacity: int
    free_merged: int
    services: Mapping[str, ServiceUsage]
    total_bytes: int
    live_bytes: int

    def internal_bytes(self, tokens: Mapping[str, int]) -> int:
        """Bytes of live blocks that hold no KV: token slots not yet filled, and padding.

        tokens: by service, the tokens whose KV lies in live blocks, those of a shared block once.
        """
        return sum(
            used.live_blocks * used.block_bytes - tokens.get(name, 0) * used.token_bytes
            for name, used in self.services.items()
        )

    def external_bytes(self) -> int:
        """Bytes of free sub-blocks that only the service holding their merged block can use."""
        return sum(used.free_blocks * used.block_bytes for used in self.services.values())

    def internal(self, tokens: Mapping[str, int]) -> float:
        """Internal fragmentation: ``internal_bytes`` as a share of the pool, in [0, 1]."""
        return self.internal_bytes(tokens) / self.total_bytes

    def external(self) -> float:
        """External fragmentation: ``external_bytes`` as a share of the pool, in [0, 1]."""
        return self.external_bytes() / self.total_bytes
