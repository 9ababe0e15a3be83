"""Requests that move between engines with their KV, as one engine sees it.

All of it is done between two steps while no plan is in flight, as services come and go; there is no thread.
What is sent and written there is bounded, as requests that run wait meanwhile.
"""

from collections import deque
from collections.abc import Callable

from shoal.core import StepPlan
from shoal.engine import migration_wire, wire
from shoal.engine.exports import Exports
from shoal.engine.imports import Imports
from shoal.engine.migration_wire import Abort, Commit, Drop, Export, Release, Reserve
from shoal.engine.transfer import Transfer
from shoal.execute.protocol import Executor
from shoal.kvcache import BlockPool
from shoal.schedule import Scheduler

_MOST_BYTES = 16 << 20
"""Read, and written, between two steps."""


class Migrations:
    """What the client has ordered, carried out in its order.

    tell: sends to the client; what is told is behind the events of all steps that have ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pool: BlockPool,
        executor: Executor,
        transfer: Transfer,
        tell: Callable[[wire.FromEngine], None],
        clock: Callable[[], int],
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._transfer = transfer
        self._orders: deque[migration_wire.ToEngine] = deque()
        self._exports = Exports(scheduler, pool, executor, transfer, self._run, tell, clock)
        self._imports = Imports(scheduler, pool, executor, transfer, self._run, tell, clock)

    @property
    def ready(self) -> bool:
        """Whether ``work`` would do something."""
        return bool(self._orders) or self._transfer.has_news() or self._exports.ready

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

    def clear(self) -> None:
        """The client is gone: nothing is kept for it."""
        self._orders.clear()
        self._exports.clear()
        self._imports.clear()

    def work(self) -> None:
        """Carry out orders, and move KV; no plan is in flight."""
        self._run(self._scheduler.pending_plan())
        while self._orders:
            self._carry_out(self._orders.popleft())
        self._imports.work(_MOST_BYTES)
        self._exports.work(_MOST_BYTES)

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

    def _run(self, plan: StepPlan) -> None:
        """Have a plan without rows carried out."""
        self._executor.submit(plan)
        self._executor.collect()
