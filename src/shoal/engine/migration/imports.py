"""Incoming migrations: reserves blocks, writes the KV that arrives, then runs the request.

Arrived blocks are written between two steps. The request joins the batch when the client has committed it and
all of its KV is here.
"""

from dataclasses import dataclass, field

from shoal.core import InvalidRequest
from shoal.engine.migration.engine_access import EngineAccess
from shoal.engine.migration.transfer import Arrived
from shoal.engine.migration.wire import Commit, Declined, Drop, Failed, Reserve, Reserved

_GROWTH_BLOCKS = 2
"""Blocks reserved for tokens computed during the copy; more are allocated when they arrive."""
_PREEMPTED = "its room was needed for another request"


@dataclass(slots=True)
class _Import:
    """One incoming migration."""

    service: str
    arrived: set[int] = field(default_factory=set)
    """Indexes in the block table of the blocks that have arrived."""
    commit: Commit | None = None
    """The request; None: not committed yet."""
    committed_ns: int = 0
    """When ``commit`` came: ages in its request are of that time."""


class Imports:
    """All incoming migrations of one engine.

    No plan may be in flight, except for properties, ``cancel`` and ``clear``.
    """

    def __init__(self, engine: EngineAccess) -> None:
        self._engine = engine
        self._scheduler, self._pool, self._transfer = engine.scheduler, engine.pool, engine.transfer
        self._imports: dict[str, _Import] = {}

    @property
    def expecting(self) -> bool:
        """Whether KV has arrived for a request that may be committed at any time."""
        return any(pending.arrived for pending in self._imports.values())

    def reserve(self, command: Reserve) -> None:
        """Reserve blocks for a request."""
        migration, size = command.migration, self._pool.block_size
        if migration not in self._imports:
            blocks = -(-command.tokens // size) + _GROWTH_BLOCKS
            if not self._extend(migration, command.service, blocks):
                self._engine.send(Declined(migration, f"there is no room for {command.tokens} more tokens"))
                return
            self._imports[migration] = _Import(command.service)
        self._engine.send(Reserved(migration))

    def commit(self, command: Commit) -> None:
        """Set the request of an import; it runs once all of its KV is here."""
        pending = self._imports.get(command.migration)
        if pending is None:
            if not self._scheduler.has_request(command.request.id):
                self._engine.send(Failed(command.migration, "no room is kept for it, or not any more"))
        elif pending.commit is None:
            pending.commit, pending.committed_ns = command, self._engine.now_ns()
            if command.migration in self._scheduler.leases:
                self._join_if_complete(command.migration, pending)
            else:
                self._fail(command.migration, pending, _PREEMPTED)

    def drop(self, command: Drop) -> None:
        """End an import, and free its blocks."""
        if command.migration in self._imports:
            self._end(command.migration)
        if command.request_id is not None and not self._scheduler.has_request(command.request_id):
            self._engine.send(Failed(command.migration, "it was dropped"))

    def cancel(self, request_id: str) -> None:
        """End the import of a committed request."""
        for migration, pending in list(self._imports.items()):
            if pending.commit is not None and pending.commit.request.id == request_id:
                self._end(migration)

    def clear(self) -> None:
        """End all imports."""
        for migration in list(self._imports):
            self._end(migration)

    def work(self, max_bytes: int) -> None:
        """Write arrived blocks, about ``max_bytes`` of them."""
        done = 0
        while done < max_bytes:
            arrived = self._transfer.receive()
            if arrived is None:
                return
            done += arrived.content.nbytes
            migration = arrived.blocks.migration
            pending = self._imports.get(migration)
            if pending is None:
                continue
            why = self._write(pending, arrived)
            if why is None:
                self._join_if_complete(migration, pending)
            else:
                self._fail(migration, pending, why)

    def _extend(self, migration: str, service: str, blocks: int) -> bool:
        if service not in self._pool.layout.services or not self._scheduler.lease(migration, service, blocks):
            return False
        # Before KV is written, the blocks' old content may have to be swapped out or cleared.
        self._engine.run(self._scheduler.pending_plan())
        return True

    def _write(self, pending: _Import, arrived: Arrived) -> str | None:
        """Write blocks into the pool; returns why they cannot be written, else None."""
        migration, first, count = arrived.blocks.migration, arrived.blocks.first, arrived.blocks.count
        lease = self._scheduler.leases.find(migration)
        if lease is None:
            return _PREEMPTED
        end = first + count
        if first < 0 or count < 1 or end > self._pool.max_blocks(pending.service):
            return f"blocks {first} to {end} cannot be a request's"
        if end > len(lease.blocks) and not self._extend(migration, pending.service, end - len(lease.blocks)):
            return "there is no room for what was computed meanwhile"
        try:
            self._engine.executor.write_blocks(pending.service, lease.blocks[first:end], arrived.content)
        except ValueError as error:
            return str(error)
        pending.arrived.update(range(first, end))
        return None

    def _join_if_complete(self, migration: str, pending: _Import) -> None:
        """Run the request if it is committed and all of its computed KV is here."""
        command = pending.commit
        if command is None:
            return
        if not pending.arrived.issuperset(range(-(-command.computed // self._pool.block_size))):
            return
        now_ns = self._engine.now_ns()
        request = command.request.aged(now_ns - pending.committed_ns)
        try:
            plan = self._scheduler.join(migration, request, command.computed, now_ns)
        except InvalidRequest as error:
            self._fail(migration, pending, str(error))
            return
        del self._imports[migration]
        self._engine.run(plan)

    def _fail(self, migration: str, pending: _Import, why: str) -> None:
        self._end(migration)
        if pending.commit is not None:
            self._engine.send(Failed(migration, why))

    def _end(self, migration: str) -> None:
        del self._imports[migration]
        self._scheduler.release(migration)
