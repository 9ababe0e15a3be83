"""What the pool's memory is used for, and how much of it is wasted."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceUsage:
    """The pool's memory that one service uses."""

    live_blocks: int
    """Blocks with references."""
    cached_blocks: int
    """Published blocks without references."""
    free_blocks: int
    """Unused sub-blocks inside merged blocks that the service holds (split: none)."""
    merged_blocks: int
    """Merged blocks (split: units) that the service holds."""
    block_bytes: int
    """Bytes that a block takes from the pool, padding included."""
    token_bytes: int
    """Bytes of one token's KV."""


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """A snapshot of the pool."""

    capacity: int
    """All merged blocks (split: units)."""
    free_merged: int
    """Merged blocks (split: units) that no service holds."""
    services: Mapping[str, ServiceUsage]
    """What each service uses, by name."""
    total_bytes: int
    """Size of the pool."""
    live_bytes: int
    """Bytes of live blocks, padding included."""

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
