"""Moves running requests to engines that were added, came back, or take requests again."""

from collections.abc import Iterator, Mapping

from shoal.cluster.manager.actions import ClusterAction
from shoal.cluster.manager.engine_load import UnassignedRequest
from shoal.cluster.manager.events import MigrationMethod
from shoal.cluster.manager.migrations import MAX_CONCURRENT_MIGRATIONS, Migrations
from shoal.cluster.manager.state import Engine, ManagedCall

LIMIT_NS = 60_000_000_000
"""An engine that is not filled by then is left to new requests."""


class Rebalancing:
    """Fills new engines with running requests of busier ones, a few at a time.

    engines: all, by name. A request moves, live and with its KV, if the new engine then has less estimated
    work than the request's own engine had before. New requests go to the new engine anyway, as dispatch
    decides; a packer moves requests by itself.
    """

    def __init__(self, engines: Mapping[str, Engine], migrations: Migrations) -> None:
        self._engines = engines
        self._migrations = migrations
        self._filling: dict[str, int] = {}
        """Until when each new engine is filled."""

    @property
    def active(self) -> bool:
        """Whether engines are being filled."""
        return bool(self._filling)

    def engine_opened(self, engine: Engine, now_ns: int) -> None:
        """An engine takes requests from now on."""
        if any(other.calls for other in self._engines.values() if other is not engine):
            self._filling[engine.name] = now_ns + LIMIT_NS

    def tick(self, now_ns: int) -> list[ClusterAction]:
        """Start migrations; an engine to which none is worthwhile any more is filled."""
        actions: list[ClusterAction] = []
        for name, until_ns in list(self._filling.items()):
            engine = self._engines.get(name)
            if engine is None or not engine.accepts_requests or now_ns >= until_ns:
                del self._filling[name]
                continue
            arriving = engine.leases.total()
            while arriving < MAX_CONCURRENT_MIGRATIONS and (begun := self._move_one(engine, now_ns)):
                arriving += 1
                actions += begun
            if not arriving:
                del self._filling[name]
        return actions

    def _move_one(self, engine: Engine, now_ns: int) -> list[ClusterAction]:
        """Start the migration of one request to an engine, from the busiest that has one to give."""
        donors = [
            (other, self._staying_ns(other))
            for other in self._engines.values()
            if other is not engine and other.accepts_requests
        ]
        for donor, work_ns in sorted(donors, key=lambda each: -each[1]):
            for call in self._movable(donor, work_ns, engine, now_ns):
                begun = self._migrations.start(call, engine.name, MigrationMethod.LIVE, now_ns)
                if begun:
                    return begun
        return []

    def _staying_ns(self, engine: Engine) -> int:
        """Estimated work of an engine, without the requests that migrate away from it."""
        assigned = engine.load.assigned
        return engine.load.remaining_ns - sum(
            assigned[call.id].cost_ns for call in self._migrations.leaving(engine)
        )

    def _movable(self, donor: Engine, work_ns: int, engine: Engine, now_ns: int) -> Iterator[ManagedCall]:
        """Requests that are worth moving; the last ones first, which have most of their work before them.

        work_ns: of the donor.
        """
        for call in reversed(list(donor.calls.values())):
            if call.migration or now_ns < call.no_migration_until_ns or not engine.serves(call.service):
                continue
            cost_ns = engine.load.cost_ns(UnassignedRequest(call.submitted, call.tokens, 0, now_ns))
            if engine.load.remaining_ns + cost_ns >= work_ns:
                continue
            if self._migrations.can_transfer_kv(call, engine):
                yield call
