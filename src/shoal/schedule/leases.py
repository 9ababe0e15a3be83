"""Leases: blocks reserved for migration, for the KV of leaving requests and as room for arriving ones."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.kvcache import BlockMove, BlockPool
from shoal.schedule.request_state import RequestState


@dataclass(slots=True)
class Lease:
    service: str
    blocks: list[int] = field(default_factory=list)
    """A block table; empty if the KV of a held request was revoked."""
    held: RequestState | None = None
    """The request that was taken out of the running batch; None: room for one that arrives."""


class Leases:
    """All leases of one engine, by key.

    They count against the memory and the number of running requests. If a single running request lacks memory
    because of them, the newest lease is revoked: the request cannot wait for another engine.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.demand = 0
        """Merged blocks (split: units) of all leases; shared ones are counted for each."""
        self.num_ended = 0
        self._pool = pool
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, key: str) -> bool:
        return key in self._leases

    def of_service(self, service: str) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.service == service]

    @property
    def held(self) -> list[RequestState]:
        """Requests that were taken out of the running batch, and may be resumed here."""
        return [lease.held for lease in self._leases.values() if lease.held is not None]

    def find(self, key: str) -> Lease | None:
        return self._leases.get(key)

    def put(self, key: str, lease: Lease) -> None:
        """Add a lease, or update one whose blocks have changed."""
        self._leases[key] = lease
        self._update_demand()

    def take(self, key: str) -> Lease:
        """Remove a lease; its blocks now belong to the caller."""
        lease = self._leases.pop(key)
        self.num_ended += 1
        self._update_demand()
        return lease

    def release(self, key: str) -> bool:
        """Free a lease's blocks; returns whether the lease existed."""
        if key not in self._leases:
            return False
        lease = self.take(key)
        self._pool.free(lease.service, lease.blocks)
        return True

    def revoke_newest(self) -> bool:
        """Free the blocks of the newest lease that has any; returns whether there was one.

        A held request stays held without its KV; a lease without one is removed.
        """
        for key, lease in reversed(self._leases.items()):
            if lease.blocks:
                self.release(key)
                if lease.held is not None:
                    self.put(key, Lease(lease.service, held=lease.held))
                return True
        return False

    def rename(self, moves: Sequence[BlockMove]) -> None:
        """Follow a compaction."""
        moved = {(move.service, move.source): move.target for move in moves}
        for lease in self._leases.values():
            lease.blocks = [moved.get((lease.service, block), block) for block in lease.blocks]

    def _update_demand(self) -> None:
        blocks: dict[str, int] = {}
        for lease in self._leases.values():
            blocks[lease.service] = blocks.get(lease.service, 0) + len(lease.blocks)
        self.demand = sum(self._pool.merged_demand(*item) for item in blocks.items())
