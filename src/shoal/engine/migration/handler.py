"""Requests that move between engines with their KV, as one engine sees it.

All of it is done between two steps while no plan is in flight, as services come and go; there is no thread.
What is sent and written there is bounded, as requests that run wait meanwhile.
"""

from collections import deque

from shoal.core import Request
from shoal.engine.migration import wire as migration_wire
from shoal.engine.migration.engine_access import EngineAccess
from shoal.engine.migration.exports import Exports
from shoal.engine.migration.imports import Imports
from shoal.engine.migration.wire import Abort, Commit, Drop, Export, Release, Reserve


class Migrations:
    """What the client has ordered, carried out in its order."""

    def __init__(self, engine: EngineAccess) -> None:
        self._engine = engine
        self._orders: deque[migration_wire.ToEngine] = deque()
        self._exports = Exports(engine)
        self._imports = Imports(engine)

    @property
    def ready(self) -> bool:
        """Whether ``work`` would do something."""
        return bool(self._orders) or self._engine.transfer.has_news() or self._exports.ready

    @property
    def expecting(self) -> bool:
        """Whether somebody is about to come, and should not have to wait for more than a plan."""
        return self._imports.expecting

    @property
    def blocked(self) -> bool:
        """Whether there is something to send that nobody takes now; ``ready`` has to be asked again."""
        return self._exports.blocked

    def order(self, order: migration_wire.ToEngine) -> None:
        """Carry out an order of the client's with the next ``work``."""
        self._orders.append(order)

    def cancel(self, request_id: str) -> None:
        """The client wants a request no more that may be about to run."""
        self._imports.cancel(request_id)
        for at, order in enumerate(self._orders):
            if isinstance(order, Commit) and order.request.id == request_id:
                self._orders[at] = Drop(order.migration)
            elif isinstance(order, Abort) and self._exports.renamed(order) == request_id:
                self._orders[at] = Release(order.migration)

    def detach(self, request_id: str) -> Request | None:
        """Take out a request that was stopped here, with its output; None: there is none of that id.

        No order about it counts any more.
        """
        released = {order.migration for order in self._orders if isinstance(order, Release)}
        return self._exports.detach(request_id, released)

    def clear(self) -> None:
        """The client is gone: nothing is kept for it."""
        self._orders.clear()
        self._exports.clear()
        self._imports.clear()

    def work(self) -> None:
        """Carry out orders, and move KV; no plan is in flight."""
        self._engine.run(self._engine.scheduler.pending_plan())
        while self._orders:
            self._carry_out(self._orders.popleft())
        self._imports.work(self._engine.transfer.turn_bytes)
        self._exports.work(self._engine.transfer.turn_bytes)

    def _carry_out(self, order: migration_wire.ToEngine) -> None:
        match order:
            case Reserve():
                self._imports.reserve(order)
            case Commit():
                self._imports.commit(order)
            case Drop():
                self._imports.drop(order)
            case Export():
                self._exports.begin(order)
            case Abort():
                self._exports.abort(order)
            case Release():
                self._exports.release(order.migration)
