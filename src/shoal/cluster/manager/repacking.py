"""What a packer decides, made moves and withdrawals of running requests."""

from collections.abc import Mapping

from shoal.cluster.manager.actions import ClusterAction
from shoal.cluster.manager.assignment import Assignment
from shoal.cluster.manager.events import EpochBegan
from shoal.cluster.manager.migrations import Migrations
from shoal.cluster.manager.packer_chooser import PackedCalls, PackedMove
from shoal.cluster.manager.state import Call, Engine
from shoal.cluster.options import PackingOptions
from shoal.cluster.packing.migration_budgets import EpochSpending, WantedMove, choose_methods


class Repacking:
    """Carries out what ``packed`` wants of running requests, within the budgets of each epoch.

    calls: all that have not ended, by id.
    """

    def __init__(
        self,
        packed: PackedCalls,
        assignment: Assignment,
        migrations: Migrations,
        engines: Mapping[str, Engine],
        calls: Mapping[str, Call],
        options: PackingOptions,
    ) -> None:
        self._packed = packed
        self._assignment = assignment
        self._migrations = migrations
        self._engines = engines
        self._calls = calls
        self._budgets = options.budgets
        self._spending = EpochSpending(self._budgets)

    def begin_epoch(self, event: EpochBegan) -> None:
        """Requests have grown, and moves may take as much again."""
        self._spending = EpochSpending(self._budgets)
        self._packed.begin_epoch(event.output_tokens)

    def carry_out(self, now_ns: int) -> list[ClusterAction]:
        """Move and withdraw whom the packer wants to, but withdraw nobody for a move that is not made."""
        actions: list[ClusterAction] = []
        wanted = [self._wanted(move) for move in self._packed.take_wanted() if self._is_possible(move)]
        methods = choose_methods(wanted, self._spending)
        unreached = set()
        for move in wanted:
            method = methods.get(move.request)
            begun: list[ClusterAction] = []
            if method is not None:
                begun = self._migrations.want(self._calls[move.request], move.target, method, now_ns)
            if begun:
                self._packed.moved(move.request)
                actions += begun
            else:
                unreached.add(move.target)
        for request in self._packed.take_preempted():
            call = self._calls.get(request)
            if call is None or call.migration or call.suspected:
                continue
            engine = call.engine
            if engine is None or engine.name in unreached:
                continue
            engine.withdrawn += 1
            actions.append(self._assignment.withdraw(call, now_ns))
        return actions

    def _is_possible(self, move: PackedMove) -> bool:
        """Whether what a move is about is still there: it may have been decided on after another event."""
        return move.request in self._calls and {move.source, move.target} <= self._engines.keys()

    def _wanted(self, move: PackedMove) -> WantedMove:
        source, target = self._engines[move.source], self._engines[move.target]
        return WantedMove(
            request=move.request,
            source=move.source,
            target=move.target,
            kv_bytes=move.kv_bytes,
            tokens=move.tokens,
            relieves=move.relieves,
            moves_kv=self._migrations.carries_kv(self._calls[move.request], target),
            hosts=(source.host or source.name, target.host or target.name),
        )
