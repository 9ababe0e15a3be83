"""State machine of one migration: its states and the allowed transitions."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from shoal.cluster.manager.actions import MigrationOutcome
from shoal.cluster.manager.events import MigrationMethod
from shoal.cluster.manager.state import Engine, ManagedCall


class MigrationState(StrEnum):
    RESERVING = "reserving"
    """The destination reserves room. The source runs the request."""
    COPYING = "copying"
    """The source sends KV. It runs the request, or has just stopped it."""
    COMMITTING = "committing"
    """The destination has the request, which has no token there yet. The source keeps the KV."""
    RESUMING = "resuming"
    """The destination recomputes the KV; the source has nothing of it."""


TRANSITIONS: Mapping[MigrationState | None, frozenset[MigrationState | MigrationOutcome]] = {
    None: frozenset({MigrationState.RESERVING, MigrationState.RESUMING}),
    MigrationState.RESERVING: frozenset(
        {MigrationState.COPYING, MigrationOutcome.ABORTED, MigrationOutcome.ENDED}
    ),
    MigrationState.COPYING: frozenset(
        {MigrationState.COMMITTING, MigrationOutcome.ABORTED, MigrationOutcome.ENDED}
    ),
    MigrationState.COMMITTING: frozenset(
        {MigrationOutcome.DONE, MigrationOutcome.ABORTED, MigrationOutcome.ENDED}
    ),
    MigrationState.RESUMING: frozenset(
        {MigrationOutcome.DONE, MigrationOutcome.ABORTED, MigrationOutcome.ENDED}
    ),
}
"""Allowed transitions; None: before the first state."""


@dataclass(slots=True, eq=False)
class ActiveMigration:
    """A migration that is not over."""

    id: str
    """Never used twice."""
    call: ManagedCall
    source: Engine
    target: Engine
    method: MigrationMethod
    began_ns: int
    since_ns: int
    """Time of its last progress."""
    state: MigrationState | None = None
    asked: bool = False
    """Whether the destination has been sent ``Drop``, which asks whether it has the request."""
    keeper: Engine | None = None
    """The engine that keeps KV blocks without having the request: the target, after the commit the source."""

    def transition_to(self, state: MigrationState | MigrationOutcome) -> None:
        """Change the state, or end; raises RuntimeError if that is not allowed."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"migration {self.id} cannot go from {self.state} to {state}")
        if isinstance(state, MigrationState):
            self.state = state

    def set_keeper(self, engine: Engine | None) -> None:
        """Set ``keeper``."""
        if self.keeper is not None:
            self.keeper.leases -= Counter([self.call.service])
        self.keeper = engine
        if engine is not None:
            engine.leases[self.call.service] += 1
