"""Blocks that no running request holds: KV of requests that go elsewhere, and room for those to come."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.kvcache import BlockMove, BlockPool
from shoal.schedule.request_state import RequestState


@dataclass(slots=True)
class Lease:
    """Blocks that are kept under a name."""

    service: str
    """Whose blocks they are."""
    blocks: list[int] = field(default_factory=list)
    """A block table; empty of a request whose KV had to make room for somebody."""
    held: RequestState | None = None
    """The request that it was taken from; None: it is room for one that comes."""


class Leases:
    """Owner of all leases of one engine.

    They count against the memory and the number of requests that may run. When even one running request
    lacks memory beside them, the newest goes: it cannot wait for what an engine elsewhere does.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.demand = 0
        """Merged blocks (split: units) that all of them take up; shared ones count for each."""
        self.num_ended = 0
        """How many have ended: others may have their memory since."""
        self._pool = pool
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, key: str) -> bool:
        return key in self._leases

    def of(self, service: str) -> list[Lease]:
        """Those of a service."""
        return [lease for lease in self._leases.values() if lease.service == service]

    @property
    def held(self) -> list[RequestState]:
        """Requests that were taken out, and may go on here."""
        return [lease.held for lease in self._leases.values() if lease.held is not None]

    def find(self, key: str) -> Lease | None:
        """The lease of that name."""
        return self._leases.get(key)

    def put(self, key: str, lease: Lease) -> None:
        """Enter a lease, or note that one has more blocks."""
        self._leases[key] = lease
        self._count()

    def take(self, key: str) -> Lease:
        """Forget a lease, whose blocks are the caller's from now on."""
        lease = self._leases.pop(key)
        self.num_ended += 1
        self._count()
        return lease

    def release(self, key: str) -> bool:
        """Free a lease's blocks; whether there was one."""
        if key not in self._leases:
            return False
        lease = self.take(key)
        self._pool.free(lease.service, lease.blocks)
        return True

    def revoke_newest(self) -> bool:
        """Free the blocks of the newest lease that has any; whether there was one.

        Room for a request is then forgotten. A request that was held keeps all but its KV.
        """
        for key, lease in reversed(self._leases.items()):
            if lease.blocks:
                self.release(key)
                if lease.held is not None:
                    self.put(key, Lease(lease.service, held=lease.held))
                return True
        return False

    def rename(self, moves: Sequence[BlockMove]) -> None:
        """The pool moved blocks."""
        moved = {(move.service, move.source): move.target for move in moves}
        for lease in self._leases.values():
            lease.blocks = [moved.get((lease.service, block), block) for block in lease.blocks]

    def _count(self) -> None:
        blocks: dict[str, int] = {}
        for lease in self._leases.values():
            blocks[lease.service] = blocks.get(lease.service, 0) + len(lease.blocks)
        self.demand = sum(self._pool.merged_demand(*item) for item in blocks.items())
