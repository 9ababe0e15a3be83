"""Requests that come to an engine with their KV.

Room is kept for them, and what arrives is written there between two steps. When the client has said which
request it is, and all of its KV has come, the request runs.
"""

from dataclasses import dataclass, field

from shoal.core import InvalidRequest
from shoal.engine.migration.engine_access import EngineAccess
from shoal.engine.migration.transfer import Arrived
from shoal.engine.migration.wire import Commit, Declined, Drop, Failed, Reserve, Reserved

_GROWTH_BLOCKS = 2
"""Room for what is computed while it is copied; more is taken when it comes."""
_ROOM_NEEDED = "its room was needed for another request"


@dataclass(slots=True)
class _Import:
    """One request that is to come."""

    service: str
    """Its service."""
    arrived: set[int] = field(default_factory=set)
    """Blocks that have come, by their places in the table."""
    commit: Commit | None = None
    """Which request it is, once that is known."""
    committed_ns: int = 0
    """When that was told: the request's ages are those of then."""


class Imports:
    """All imports of one engine; called while no plan is in flight, but for questions and ``clear``."""

    def __init__(self, engine: EngineAccess) -> None:
        self._engine = engine
        self._scheduler, self._pool, self._transfer = engine.scheduler, engine.pool, engine.transfer
        self._imports: dict[str, _Import] = {}

    @property
    def expecting(self) -> bool:
        """Whether the KV of somebody comes, who may be committed any time."""
        return any(coming.arrived for coming in self._imports.values())

    def reserve(self, order: Reserve) -> None:
        """Keep room for a request."""
        migration, size = order.migration, self._pool.block_size
        if migration not in self._imports:
            blocks = -(-order.tokens // size) + _GROWTH_BLOCKS
            if not self._extend(migration, order.service, blocks):
                self._engine.tell(Declined(migration, f"there is no room for {order.tokens} more tokens"))
                return
            self._imports[migration] = _Import(order.service)
        self._engine.tell(Reserved(migration))

    def commit(self, order: Commit) -> None:
        """The request whose KV comes; it runs now or when all of it has come."""
        coming = self._imports.get(order.migration)
        if coming is None:
            if not self._scheduler.has_request(order.request.id):
                self._engine.tell(Failed(order.migration, "no room is kept for it, or not any more"))
        elif coming.commit is None:
            coming.commit, coming.committed_ns = order, self._engine.now_ns()
            if order.migration in self._scheduler.leases:
                self._join_if_complete(order.migration, coming)
            else:
                self._fail(order.migration, coming, _ROOM_NEEDED)

    def drop(self, order: Drop) -> None:
        """Keep no room any more."""
        if order.migration in self._imports:
            self._forget(order.migration)
        if order.request_id is not None and not self._scheduler.has_request(order.request_id):
            self._engine.tell(Failed(order.migration, "it was dropped"))

    def cancel(self, request_id: str) -> None:
        """The client wants a request no more whose KV has not come."""
        for migration, coming in list(self._imports.items()):
            if coming.commit is not None and coming.commit.request.id == request_id:
                self._forget(migration)

    def clear(self) -> None:
        """Keep no room for anybody."""
        for migration in list(self._imports):
            self._forget(migration)

    def work(self, most_bytes: int) -> None:
        """Write what has come, until that are so many bytes."""
        done = 0
        while done < most_bytes:
            arrived = self._transfer.receive()
            if arrived is None:
                return
            done += arrived.content.nbytes
            migration = arrived.blocks.migration
            coming = self._imports.get(migration)
            if coming is None:
                continue
            why = self._write(coming, arrived)
            if why is None:
                self._join_if_complete(migration, coming)
            else:
                self._fail(migration, coming, why)

    def _extend(self, migration: str, service: str, blocks: int) -> bool:
        if service not in self._pool.layout.services or not self._scheduler.lease(migration, service, blocks):
            return False
        # Other requests' KV may move away, and what was of another type is cleared, before KV is written.
        self._engine.run(self._scheduler.pending_plan())
        return True

    def _write(self, coming: _Import, arrived: Arrived) -> str | None:
        """Write some blocks; or why they cannot be written."""
        migration, first, count = arrived.blocks.migration, arrived.blocks.first, arrived.blocks.count
        lease = self._scheduler.leases.find(migration)
        if lease is None:
            return _ROOM_NEEDED
        end = first + count
        if first < 0 or count < 1 or end > self._pool.max_blocks(coming.service):
            return f"blocks {first} to {end} cannot be a request's"
        if end > len(lease.blocks) and not self._extend(migration, coming.service, end - len(lease.blocks)):
            return "there is no room for what was computed meanwhile"
        try:
            self._engine.executor.write_blocks(coming.service, lease.blocks[first:end], arrived.content)
        except ValueError as error:
            return str(error)
        coming.arrived.update(range(first, end))
        return None

    def _join_if_complete(self, migration: str, coming: _Import) -> None:
        """Let the request run, if it is known, and all that is computed has come."""
        order = coming.commit
        if order is None or not coming.arrived.issuperset(range(-(-order.computed // self._pool.block_size))):
            return
        now_ns = self._engine.now_ns()
        request = order.request.aged(now_ns - coming.committed_ns)
        try:
            plan = self._scheduler.join(migration, request, order.computed, now_ns)
        except InvalidRequest as error:
            self._fail(migration, coming, str(error))
            return
        del self._imports[migration]
        self._engine.run(plan)

    def _fail(self, migration: str, coming: _Import, why: str) -> None:
        self._forget(migration)
        if coming.commit is not None:
            self._engine.tell(Failed(migration, why))

    def _forget(self, migration: str) -> None:
        del self._imports[migration]
        self._scheduler.release(migration)
