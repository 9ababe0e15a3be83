"""Outgoing migrations: sends the KV of a running request in rounds, then stops the request.

Between two steps, full blocks of a running request are read and sent. Each round sends the blocks that were
computed when it began. When little is left, or after some rounds, the request is stopped: it leaves the
batch, the rest is sent, and its blocks are kept until the client aborts or releases the migration.
"""

from collections.abc import Collection
from dataclasses import dataclass

import zmq

from shoal.core import InvalidRequest, Request
from shoal.engine import wire
from shoal.engine.migration.engine_access import EngineAccess
from shoal.engine.migration.transfer import Blocks
from shoal.engine.migration.wire import Abort, Copied, Export, NotExported, Stopped
from shoal.schedule import HeldRequest, KVTable, resumable_request

_LAST_BLOCKS = 2
"""With at most this many blocks left, a request is stopped: another round would leave as many again."""
_MAX_ROUNDS = 8


@dataclass(slots=True)
class _Export:
    """One outgoing migration."""

    command: Export
    seq_id: int | None = None
    """The request's sequence; None: nothing was sent yet."""
    sent: int = 0
    """Leading blocks sent so far."""
    target: int = 0
    """Leading blocks sent at the end of this round."""
    rounds: int = 0
    """Rounds begun."""
    held: HeldRequest | None = None
    """The request, once it is stopped; None: it runs."""
    finished: bool = False
    """Whether all blocks and Stopped are sent; the client then aborts or releases."""


class Exports:
    """All outgoing migrations of one engine.

    No plan may be in flight, except for properties, ``detach`` and ``clear``.
    """

    def __init__(self, engine: EngineAccess) -> None:
        self._engine = engine
        self._scheduler, self._pool, self._transfer = engine.scheduler, engine.pool, engine.transfer
        self._exports: dict[str, _Export] = {}

    @property
    def ready(self) -> bool:
        """Whether ``work`` would send blocks or a reply."""
        return bool(self._exports) and any(
            not export.finished and self._transfer.can_send(export.command.to)
            for export in self._exports.values()
        )

    @property
    def blocked(self) -> bool:
        """Whether blocks wait for the transfer, which gives no notice when it accepts more."""
        return any(not export.finished for export in self._exports.values())

    def begin(self, command: Export) -> None:
        """Begin an export; does nothing if it has begun."""
        if command.migration in self._exports:
            return
        try:
            self._transfer.can_send(command.to)
        except zmq.ZMQError as error:
            self._engine.send(NotExported(command.migration, f"KV cannot be sent to {command.to!r}: {error}"))
        else:
            self._exports[command.migration] = _Export(command)

    def abort(self, command: Abort) -> None:
        """End an export; its request continues here."""
        export = self._end(command.migration)
        if export is not None and export.held is not None:
            self._resume(export, command.request_id)

    def release(self, migration: str) -> None:
        """End an export, and drop its request if it is stopped."""
        if self._end(migration) is not None:
            self._scheduler.release(migration)

    def detach(self, request_id: str, released: Collection[str]) -> Request | None:
        """Drop a stopped request and its export, and return the request, to be resumed elsewhere.

        None: no request of this id is stopped. released: migrations to ignore, as a Release is pending.
        """
        for migration, export in self._exports.items():
            if migration in released:
                continue
            if export.held is not None and export.command.request_id == request_id:
                lease = self._scheduler.leases.find(migration)
                assert lease is not None
                assert lease.held is not None
                self.release(migration)
                return resumable_request(lease.held, self._engine.now_ns())
        return None

    def clear(self) -> None:
        """Release all exports."""
        for migration in list(self._exports):
            self.release(migration)

    def resumed_id(self, command: Abort) -> str | None:
        """The id under which a stopped request resumes after this Abort; None: it is not stopped."""
        export = self._exports.get(command.migration)
        if export is None or export.held is None:
            return None
        return command.request_id or export.command.request_id

    def work(self, max_bytes: int) -> int:
        """Send about ``max_bytes`` of what the transfer accepts; returns bytes sent."""
        done = 0
        for export in list(self._exports.values()):
            if not export.finished and done < max_bytes:
                done += self._advance(export, max_bytes - done)
        return done

    def _advance(self, export: _Export, max_bytes: int) -> int:
        table = self._table_of(export)
        if isinstance(table, str):
            self._end(export.command.migration)
            if export.held is not None:
                self._resume(export, None)
            self._engine.send(NotExported(export.command.migration, table))
            return 0
        export.seq_id = table.seq_id
        if export.held is None and export.sent == export.target:
            self._begin_round(export, table)
        done = self._send(export, table, max_bytes)
        if export.held is not None and export.sent == export.target:
            self._finish(export, export.held)
        elif done or export.sent == export.target:
            # Also within a round: a large one takes longer than the client's timeout.
            self._engine.send(Copied(export.command.migration, export.sent))
        return done

    def _table_of(self, export: _Export) -> KVTable | str:
        """The KV blocks of the request, or why there are none."""
        command, held = export.command, export.held
        if held is None:
            table = self._scheduler.table_of(command.request_id)
            if table is None:
                return "the request does not run"
            return table if export.seq_id in (None, table.seq_id) else "its KV was dropped meanwhile"
        lease = self._scheduler.leases.find(command.migration)
        assert lease is not None
        if held.computed and not lease.blocks:
            return "its KV had to make room for another request"
        return KVTable(-1, lease.service, lease.blocks, held.computed)

    def _begin_round(self, export: _Export, table: KVTable) -> None:
        """Set the target of a round; stop the request if few blocks are left."""
        command, size = export.command, self._pool.block_size
        full = table.computed // size
        last_round = full - export.sent <= _LAST_BLOCKS or export.rounds == _MAX_ROUNDS
        if last_round or not command.live:
            export.held = self._scheduler.hold(command.migration, command.request_id, self._engine.now_ns())
            export.target = -(-table.computed // size)
        else:
            export.target = full
            export.rounds += 1

    def _send(self, export: _Export, table: KVTable, max_bytes: int) -> int:
        """Send blocks up to the target while the transfer accepts them; returns bytes sent."""
        command = export.command
        block_bytes = self._pool.layout.services[table.service].shape.block_bytes(self._pool.block_size)
        at_once = max(1, self._transfer.message_bytes // block_bytes)
        done = 0
        while export.sent < export.target and done < max_bytes and self._transfer.can_send(command.to):
            blocks = table.blocks[export.sent : min(export.target, export.sent + at_once)]
            content = self._engine.executor.read_blocks(table.service, blocks)
            self._transfer.send(command.to, Blocks(command.migration, export.sent, len(blocks)), content)
            export.sent += len(blocks)
            done += len(blocks) * block_bytes
        return done

    def _finish(self, export: _Export, held: HeldRequest) -> None:
        export.finished = True
        state = held.request.resume_state
        assert state is not None
        migration, output_tokens = export.command.migration, held.request.num_output_tokens
        self._engine.send(Stopped(migration, output_tokens, held.computed, state))

    def _resume(self, export: _Export, request_id: str | None) -> None:
        migration = export.command.migration
        try:
            self._engine.run(self._scheduler.resume(migration, self._engine.now_ns(), request_id))
        except InvalidRequest as error:
            self._scheduler.release(migration)
            self._engine.send(
                wire.Refused(request_id or export.command.request_id, str(error), error.param, error.code)
            )

    def _end(self, migration: str) -> _Export | None:
        export = self._exports.pop(migration, None)
        if export is not None and all(
            other.command.to != export.command.to for other in self._exports.values()
        ):
            self._transfer.disconnect(export.command.to)
        return export
