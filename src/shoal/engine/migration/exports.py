"""Requests that leave an engine with their KV.

Between two steps, full blocks of a running request are read and sent, in rounds: each sends what was
computed when it began. When little is left, or after some rounds, the request is stopped: it leaves the
batch, the rest is sent, and its blocks are kept until the client says what becomes of it.
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
"""With no more than so many left, a request is stopped: another round would send as many again."""
_MOST_ROUNDS = 8


@dataclass(slots=True)
class _Export:
    """One request that is to leave."""

    order: Export
    """As it was asked for."""
    seq_id: int | None = None
    """Its stay in the batch; None: not begun."""
    sent: int = 0
    """Leading blocks sent."""
    target: int = 0
    """Leading blocks sent when this round ends."""
    rounds: int = 0
    """How many have begun."""
    held: HeldRequest | None = None
    """The request, once it is stopped."""
    told: bool = False
    """All is sent and Stopped told: it is the client's turn."""


class Exports:
    """All exports of one engine; called while no plan is in flight, but for questions and ``clear``."""

    def __init__(self, engine: EngineAccess) -> None:
        self._engine = engine
        self._scheduler, self._pool, self._transfer = engine.scheduler, engine.pool, engine.transfer
        self._exports: dict[str, _Export] = {}

    @property
    def ready(self) -> bool:
        """Whether something could be sent, or has to be told."""
        return bool(self._exports) and any(
            not export.told and self._transfer.can_send(export.order.to) for export in self._exports.values()
        )

    @property
    def blocked(self) -> bool:
        """Whether something could not be sent; nobody tells when it can be."""
        return any(not export.told for export in self._exports.values())

    def begin(self, order: Export) -> None:
        """Let a request leave; one that is under way goes on."""
        if order.migration in self._exports:
            return
        try:
            self._transfer.can_send(order.to)
        except zmq.ZMQError as error:
            self._engine.tell(NotExported(order.migration, f"KV cannot be sent to {order.to!r}: {error}"))
        else:
            self._exports[order.migration] = _Export(order)

    def abort(self, order: Abort) -> None:
        """Stop an export; its request goes on here."""
        export = self._forget(order.migration)
        if export is not None and export.held is not None:
            self._resume(export, order.request_id)

    def release(self, migration: str) -> None:
        """Stop an export; a request that was stopped is forgotten."""
        if self._forget(migration) is not None:
            self._scheduler.release(migration)

    def detach(self, request_id: str, released: Collection[str]) -> Request | None:
        """Forget a request that was stopped, and its export; it is returned as it is now.

        released: migrations to be forgotten as well.
        """
        for migration, export in self._exports.items():
            if migration in released:
                continue
            if export.held is not None and export.order.request_id == request_id:
                lease = self._scheduler.leases.find(migration)
                assert lease is not None
                assert lease.held is not None
                self.release(migration)
                return resumable_request(lease.held, self._engine.now_ns())
        return None

    def clear(self) -> None:
        """The same for all."""
        for migration in list(self._exports):
            self.release(migration)

    def renamed(self, order: Abort) -> str | None:
        """The id under which a request will go on when an export is aborted; None: it was not stopped."""
        export = self._exports.get(order.migration)
        if export is None or export.held is None:
            return None
        return order.request_id or export.order.request_id

    def work(self, most_bytes: int) -> int:
        """Send what can be sent, at most so many bytes or the least that there is; returns how many."""
        done = 0
        for export in list(self._exports.values()):
            if not export.told and done < most_bytes:
                done += self._advance(export, most_bytes - done)
        return done

    def _advance(self, export: _Export, most_bytes: int) -> int:
        table = self._table_of(export)
        if isinstance(table, str):
            self._forget(export.order.migration)
            if export.held is not None:
                self._resume(export, None)
            self._engine.tell(NotExported(export.order.migration, table))
            return 0
        export.seq_id = table.seq_id
        if export.held is None and export.sent == export.target:
            self._begin_round(export, table)
        done = self._send(export, table, most_bytes)
        if export.held is not None and export.sent == export.target:
            self._tell_stopped(export, export.held)
        elif done or export.sent == export.target:
            # Also amid a round: one of much KV takes longer than the client waits for news.
            self._engine.tell(Copied(export.order.migration, export.sent))
        return done

    def _table_of(self, export: _Export) -> KVTable | str:
        """Where the KV lies; or why there is none."""
        order, held = export.order, export.held
        if held is None:
            table = self._scheduler.table_of(order.request_id)
            if table is None:
                return "the request does not run"
            return table if export.seq_id in (None, table.seq_id) else "its KV was dropped meanwhile"
        lease = self._scheduler.leases.find(order.migration)
        assert lease is not None
        if held.computed and not lease.blocks:
            return "its KV had to make room for another request"
        return KVTable(-1, lease.service, lease.blocks, held.computed)

    def _begin_round(self, export: _Export, table: KVTable) -> None:
        """Send what is computed by now; if that is little, all of it, and then no more is to come."""
        order, size = export.order, self._pool.block_size
        full = table.computed // size
        little = full - export.sent <= _LAST_BLOCKS or export.rounds == _MOST_ROUNDS
        if little or not order.live:
            export.held = self._scheduler.hold(order.migration, order.request_id, self._engine.now_ns())
            export.target = -(-table.computed // size)
        else:
            export.target = full
            export.rounds += 1

    def _send(self, export: _Export, table: KVTable, most_bytes: int) -> int:
        """Send up to the target, as long as the queue takes it; returns how many bytes."""
        order = export.order
        block_bytes = self._pool.layout.services[table.service].shape.block_bytes(self._pool.block_size)
        at_once = max(1, self._transfer.message_bytes // block_bytes)
        done = 0
        while export.sent < export.target and done < most_bytes and self._transfer.can_send(order.to):
            some = table.blocks[export.sent : min(export.target, export.sent + at_once)]
            content = self._engine.executor.read_blocks(table.service, some)
            self._transfer.send(order.to, Blocks(order.migration, export.sent, len(some)), content)
            export.sent += len(some)
            done += len(some) * block_bytes
        return done

    def _tell_stopped(self, export: _Export, held: HeldRequest) -> None:
        export.told = True
        state = held.request.resume_state
        assert state is not None
        migration, made = export.order.migration, held.request.num_output_tokens
        self._engine.tell(Stopped(migration, made, held.computed, state))

    def _resume(self, export: _Export, request_id: str | None) -> None:
        migration = export.order.migration
        try:
            self._engine.run(self._scheduler.resume(migration, self._engine.now_ns(), request_id))
        except InvalidRequest as error:
            self._scheduler.release(migration)
            self._engine.tell(
                wire.Refused(request_id or export.order.request_id, str(error), error.param, error.code)
            )

    def _forget(self, migration: str) -> _Export | None:
        export = self._exports.pop(migration, None)
        if export is not None and all(other.order.to != export.order.to for other in self._exports.values()):
            self._transfer.disconnect(export.order.to)
        return export
