"""The manager's part of a migration: when a running request migrates, and the order of the protocol's steps.

The source runs the request until ``Commit``, then the destination does. Until the destination's first token
the source keeps the KV, so that it can resume the request if the destination fails. docs/cluster.md covers
late, duplicate and lost messages.
"""

from collections.abc import Mapping

from shoal.cluster.manager.actions import (
    Abort,
    ClusterAction,
    Commit,
    Dispatch,
    Drop,
    Export,
    MigrationEnded,
    MigrationOutcome,
    Release,
    Reserve,
    Withdraw,
)
from shoal.cluster.manager.assignment import Assignment
from shoal.cluster.manager.events import (
    MigrationCopied,
    MigrationDeclined,
    MigrationEvent,
    MigrationFailed,
    MigrationMethod,
    MigrationNotExported,
    MigrationReserved,
    MigrationStopped,
)
from shoal.cluster.manager.migration_state import ActiveMigration, MigrationState
from shoal.cluster.manager.state import Engine, ManagedCall
from shoal.cluster.status import EngineState

MAX_CONCURRENT_MIGRATIONS = 4
"""Limit for each draining engine."""
PROGRESS_TIMEOUT_NS = 10_000_000_000
"""A migration without progress for this time is aborted."""
COMMIT_TIMEOUT_NS = 5_000_000_000
"""After this time without a token the destination is asked whether it has the request.

If it has not denied that after the same time again, the source frees the KV.
"""
RETRY_NS = 1_000_000_000
"""Delay before a draining engine tries again to migrate requests."""


class Migrations:
    """All migrations that are not over; methods return actions.

    Events about finished migrations, or in the wrong state, are ignored.
    """

    def __init__(self, assignment: Assignment, engines: Mapping[str, Engine]) -> None:
        self._assignment = assignment
        self._engines = engines
        self._active: dict[str, ActiveMigration] = {}
        self._begun = 0

    def start(
        self, call: ManagedCall, engine: str | None, method: MigrationMethod, now_ns: int
    ) -> list[ClusterAction]:
        """Begin a migration to an engine (None: the dispatch policy chooses one), if that is possible.

        The request must have an engine and not be suspected. The destination must accept requests of its
        service, and have room for its largest length if the source has.
        """
        source = call.engine
        if source is None or not source.alive or call.migration or call.suspected:
            return []
        candidates = [
            load
            for load in self._assignment.open_engines(call)
            if load.name != source.name
            and engine in (None, load.name)
            and (self._engines[load.name].has_room(call.submitted) or not source.has_room(call.submitted))
        ]
        if method is not MigrationMethod.TOKENS:
            compatible = [load for load in candidates if self.can_transfer_kv(call, self._engines[load.name])]
            method, candidates = (method, compatible) if compatible else (MigrationMethod.TOKENS, candidates)
        target = self._assignment.choose_target(call, candidates, now_ns) if candidates else None
        if target is None:
            return []
        self._begun += 1
        request = call.id
        self._assignment.reserve(call, target, now_ns)
        migration = ActiveMigration(f"{request}m{self._begun}", call, source, target, method, now_ns, now_ns)
        self._active[migration.id] = migration
        call.migration = migration.id
        if method is MigrationMethod.TOKENS:
            return self._resume(migration)
        migration.transition_to(MigrationState.RESERVING)
        migration.set_keeper(target)
        return [Reserve(migration.id, request, target.name)]

    def can_transfer_kv(self, call: ManagedCall, target: Engine) -> bool:
        """Whether a request can migrate to an engine with its KV."""
        service, source = call.service, call.engine
        kv_format = None if source is None else source.kv_formats.get(service)
        return call.kv_transferable and bool(kv_format) and target.kv_formats.get(service) == kv_format

    def leaving(self, engine: Engine) -> list[ManagedCall]:
        """Requests of an engine that migrate away, and that it still has."""
        return [
            migration.call
            for migration in self._active.values()
            if migration.source is engine and migration.call.engine is engine
        ]

    @property
    def draining(self) -> bool:
        """Whether requests are to migrate away from their engines."""
        return any(
            any(map(engine.leaves, engine.calls.values()))
            for engine in self._engines.values()
            if engine.state is EngineState.DRAINING or engine.unplaced
        )

    def drain(self, now_ns: int) -> list[ClusterAction]:
        """Migrate requests away from draining engines, and from those that lose their service: a few at a
        time."""
        actions: list[ClusterAction] = []
        for engine in self._engines.values():
            drains = engine.state is EngineState.DRAINING or engine.unplaced
            if not drains or now_ns < engine.next_drain_ns:
                continue
            leaving = sum(migration.source is engine for migration in self._active.values())
            for call in list(engine.calls.values()):
                if leaving >= MAX_CONCURRENT_MIGRATIONS:
                    break
                if now_ns >= call.no_migration_until_ns and engine.leaves(call):
                    started = self.start(call, None, MigrationMethod.LIVE, now_ns)
                    leaving += bool(started)
                    actions += started
        return actions

    def handle(self, event: MigrationEvent, now_ns: int) -> list[ClusterAction]:
        """Handle an engine's answer about a migration."""
        migration = self._active.get(event.migration)
        if migration is None:
            return []
        match event, migration.state:
            case MigrationReserved(), MigrationState.RESERVING:
                return self._reserved(migration, now_ns)
            case MigrationDeclined(), MigrationState.RESERVING:
                migration.source.next_drain_ns = now_ns + RETRY_NS
                return self._end(migration, now_ns, MigrationOutcome.ABORTED, event.why)
            case MigrationCopied(), MigrationState.COPYING:
                migration.since_ns = now_ns
            case MigrationStopped(), MigrationState.COPYING:
                return self._stopped(migration, now_ns)
            case MigrationNotExported(), MigrationState.COPYING:
                # It is waiting for KV there, and can wait anywhere.
                actions = self._abort(migration, event.why, now_ns)
                return actions + self.start(
                    migration.call, migration.target.name, MigrationMethod.TOKENS, now_ns
                )
            case MigrationFailed(), MigrationState.COMMITTING:
                return self._failed(migration, event.why, now_ns)
        return []

    def progressed(self, call: ManagedCall, now_ns: int) -> list[ClusterAction]:
        migration = self._of(call)
        if migration is None or migration.state not in (MigrationState.COMMITTING, MigrationState.RESUMING):
            return []
        return self._settle(migration, now_ns, MigrationOutcome.DONE)

    def ended(self, call: ManagedCall, now_ns: int) -> list[ClusterAction]:
        migration = self._of(call)
        if migration is None:
            return []
        actions: list[ClusterAction] = []
        if migration.state is not MigrationState.RESUMING:
            actions.append(Drop(migration.id, call.id, migration.target.name))
        if migration.state is MigrationState.COPYING:
            actions.append(Release(migration.id, migration.source.name))
        return actions + self._settle(migration, now_ns, MigrationOutcome.ENDED)

    def lost(self, call: ManagedCall, now_ns: int) -> list[ClusterAction]:
        """The engine of a request is gone; the request may return to the source."""
        migration = self._of(call)
        if migration is None:
            return []
        if migration.state in (MigrationState.RESERVING, MigrationState.COPYING):
            drop = Drop(migration.id, call.id, migration.target.name)
            return [drop, *self._end(migration, now_ns, MigrationOutcome.ABORTED, "the source is gone")]
        why = "the destination is gone"
        if call.quarantined_ns is None and self._can_return_to_source(migration):
            return self._return_to_source(migration, why, now_ns)
        return self._settle(migration, now_ns, MigrationOutcome.ABORTED, why)

    def engine_ended(self, engine: Engine, now_ns: int) -> list[ClusterAction]:
        """An engine is gone, with all KV kept for migrating requests; its own requests are released."""
        actions: list[ClusterAction] = []
        for migration in [migration for migration in self._active.values() if migration.keeper is engine]:
            if migration.state is MigrationState.COMMITTING:
                # The request runs at the destination if all of its KV was sent.
                migration.set_keeper(None)
                actions.append(Drop(migration.id, migration.call.id, migration.target.name))
                continue
            if migration.state is MigrationState.COPYING:
                actions.append(Abort(migration.id, migration.call.id, migration.source.name))
            actions += self._end(migration, now_ns, MigrationOutcome.ABORTED, "the destination is gone")
        return actions

    def ticked(self, now_ns: int) -> list[ClusterAction]:
        actions: list[ClusterAction] = []
        for migration in list(self._active.values()):
            passed_ns = now_ns - migration.since_ns
            if migration.state is MigrationState.COMMITTING and passed_ns >= COMMIT_TIMEOUT_NS:
                migration.since_ns = now_ns
                if migration.asked and migration.keeper is migration.source:
                    # The request waits at the target. Two engines could wait for each other to free copies.
                    migration.set_keeper(None)
                    actions.append(Release(migration.id, migration.source.name))
                migration.asked = True
                actions.append(Drop(migration.id, migration.call.id, migration.target.name))
            elif migration.keeper is migration.target and passed_ns >= PROGRESS_TIMEOUT_NS:
                migration.call.kv_transferable = False
                actions += self._abort(migration, f"{migration.state} for {passed_ns / 1e9:.0f} s", now_ns)
        return actions

    # Transitions

    def _of(self, call: ManagedCall) -> ActiveMigration | None:
        return None if call.migration is None else self._active[call.migration]

    def _reserved(self, migration: ActiveMigration, now_ns: int) -> list[ClusterAction]:
        if not _is_open(migration):
            return self._abort(migration, _CLOSED, now_ns)
        migration.transition_to(MigrationState.COPYING)
        migration.since_ns = now_ns
        live = migration.method is MigrationMethod.LIVE
        return [
            Export(
                migration.id,
                migration.call.id,
                migration.source.name,
                migration.target.name,
                live,
            )
        ]

    def _stopped(self, migration: ActiveMigration, now_ns: int) -> list[ClusterAction]:
        """The source has sent everything: commit the request to the destination."""
        call, target = migration.call, migration.target
        if not _is_open(migration):
            return self._abort(migration, _CLOSED, now_ns)
        migration.transition_to(MigrationState.COMMITTING)
        migration.since_ns = now_ns
        migration.set_keeper(migration.source)
        self._assignment.reassign(call, target)
        return [Commit(migration.id, call.id, target.name, call.attempt)]

    def _failed(self, migration: ActiveMigration, why: str, now_ns: int) -> list[ClusterAction]:
        migration.call.kv_transferable = False
        if self._can_return_to_source(migration):
            return self._return_to_source(migration, why, now_ns)
        withdrawn = self._assignment.withdraw(migration.call, now_ns)
        return [withdrawn, *self._end(migration, now_ns, MigrationOutcome.ABORTED, why)]

    def _resume(self, migration: ActiveMigration) -> list[ClusterAction]:
        """Dispatch the request to the destination, which recomputes its KV."""
        migration.transition_to(MigrationState.RESUMING)
        call, target = migration.call, migration.target
        self._assignment.reassign(call, target)
        request = call.id
        return [
            Withdraw(request),
            Dispatch(request, target.name, target.incarnation, call.attempt, call.batch),
        ]

    def _abort(self, migration: ActiveMigration, why: str, now_ns: int) -> list[ClusterAction]:
        """The request stays at the source."""
        request = migration.call.id
        actions: list[ClusterAction] = [Drop(migration.id, request, migration.target.name)]
        if migration.state is MigrationState.COPYING:
            actions.append(Abort(migration.id, request, migration.source.name))
        migration.call.no_migration_until_ns = now_ns + RETRY_NS
        return actions + self._end(migration, now_ns, MigrationOutcome.ABORTED, why)

    def _can_return_to_source(self, migration: ActiveMigration) -> bool:
        return migration.keeper is migration.source and migration.source.alive

    def _return_to_source(self, migration: ActiveMigration, why: str, now_ns: int) -> list[ClusterAction]:
        """The source, which kept the KV, resumes the request."""
        call, source = migration.call, migration.source
        self._assignment.reserve(call, source, now_ns)
        self._assignment.reassign(call, source)
        call.no_migration_until_ns = now_ns + RETRY_NS
        abort = Abort(migration.id, call.id, source.name, call.attempt)
        return [abort, *self._end(migration, now_ns, MigrationOutcome.ABORTED, why)]

    def _settle(
        self, migration: ActiveMigration, now_ns: int, outcome: MigrationOutcome, why: str = ""
    ) -> list[ClusterAction]:
        """End a migration and free what the source keeps."""
        actions: list[ClusterAction] = []
        if migration.keeper is migration.source:
            actions.append(Release(migration.id, migration.source.name))
        return actions + self._end(migration, now_ns, outcome, why)

    def _end(
        self, migration: ActiveMigration, now_ns: int, outcome: MigrationOutcome, why: str = ""
    ) -> list[ClusterAction]:
        if migration.keeper is migration.target:
            self._assignment.unreserve(migration.call, migration.target)
        migration.transition_to(outcome)
        migration.set_keeper(None)
        migration.call.migration = None
        migration.source.migrations[migration.method, outcome] += 1
        del self._active[migration.id]
        request, source, target = (
            migration.call.id,
            migration.source.name,
            migration.target.name,
        )
        took_s = (now_ns - migration.began_ns) / 1e9
        return [MigrationEnded(migration.id, request, source, target, migration.method, took_s, outcome, why)]


_CLOSED = "the destination takes no requests any more"


def _is_open(migration: ActiveMigration) -> bool:
    target = migration.target
    return target.accepts_requests and target.reserved is None and target.serves(migration.call.service)
