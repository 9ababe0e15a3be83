"""Repacking: executes what a packer wants, as migrations and withdrawals of running requests."""

from collections.abc import Mapping

from shoal.cluster.manager.actions import ClusterAction
from shoal.cluster.manager.assignment import Assignment
from shoal.cluster.manager.events import EpochBegan
from shoal.cluster.manager.migrations import Migrations
from shoal.cluster.manager.packer_chooser import PackerChooser, PlannedMigration
from shoal.cluster.manager.state import Engine, ManagedCall
from shoal.cluster.options import PackingOptions
from shoal.cluster.packing.migration_budgets import EpochSpending, MigrationCandidate, choose_methods


class Repacking:
    """Migrates and withdraws running requests as the packer wants, within the budgets of each epoch.

    calls: all unfinished requests, by id.
    """

    def __init__(
        self,
        packer: PackerChooser,
        assignment: Assignment,
        migrations: Migrations,
        engines: Mapping[str, Engine],
        calls: Mapping[str, ManagedCall],
        options: PackingOptions,
    ) -> None:
        self._packer = packer
        self._assignment = assignment
        self._migrations = migrations
        self._engines = engines
        self._calls = calls
        self._budgets = options.budgets
        self._spending = EpochSpending(self._budgets)

    def begin_epoch(self, event: EpochBegan) -> None:
        """Requests have grown, and the migration budgets are full again."""
        self._spending = EpochSpending(self._budgets)
        self._packer.begin_epoch(event.output_tokens)

    def execute(self, now_ns: int) -> list[ClusterAction]:
        """Start migrations and withdrawals; nothing is withdrawn for a migration that did not start."""
        actions: list[ClusterAction] = []
        wanted = [
            self._candidate(migration)
            for migration in self._packer.take_wanted()
            if self._is_possible(migration)
        ]
        methods = choose_methods(wanted, self._spending)
        unreached = set()
        for migration in wanted:
            method = methods.get(migration.request)
            started: list[ClusterAction] = []
            if method is not None:
                started = self._migrations.start(
                    self._calls[migration.request], migration.target, method, now_ns
                )
            if started:
                self._packer.migration_started(migration.request)
                actions += started
            else:
                unreached.add(migration.target)
        for request in self._packer.take_preempted():
            call = self._calls.get(request)
            if call is None or call.migration or call.suspected:
                continue
            engine = call.engine
            if engine is None or engine.name in unreached:
                continue
            engine.withdrawn += 1
            actions.append(self._assignment.withdraw(call, now_ns))
        return actions

    def _is_possible(self, migration: PlannedMigration) -> bool:
        """Whether the request and both engines still exist."""
        return (
            migration.request in self._calls and {migration.source, migration.target} <= self._engines.keys()
        )

    def _candidate(self, migration: PlannedMigration) -> MigrationCandidate:
        source, target = self._engines[migration.source], self._engines[migration.target]
        return MigrationCandidate(
            request=migration.request,
            source=migration.source,
            target=migration.target,
            kv_bytes=migration.kv_bytes,
            tokens=migration.tokens,
            relieves=migration.relieves,
            kv_transferable=self._migrations.can_transfer_kv(self._calls[migration.request], target),
            hosts=(source.host or source.name, target.host or target.name),
        )
