"""One request on its way between engines: the states of that, and which leads to which."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from shoal.cluster.manager.actions import MoveOutcome
from shoal.cluster.manager.events import MoveMethod
from shoal.cluster.manager.state import Call, Engine


class MoveState(StrEnum):
    """How far a migration is."""

    RESERVING = "reserving"
    """The destination was asked for room. The source runs the request."""
    COPYING = "copying"
    """The source sends KV. It runs the request, or has just stopped it."""
    COMMITTING = "committing"
    """The destination has the request, and no token of it came yet. The source keeps the KV."""
    RESUMING = "resuming"
    """The destination computes the KV anew; the source has nothing of it."""


TRANSITIONS: Mapping[MoveState | None, frozenset[MoveState | MoveOutcome]] = {
    None: frozenset({MoveState.RESERVING, MoveState.RESUMING}),
    MoveState.RESERVING: frozenset({MoveState.COPYING, MoveOutcome.ABORTED, MoveOutcome.ENDED}),
    MoveState.COPYING: frozenset({MoveState.COMMITTING, MoveOutcome.ABORTED, MoveOutcome.ENDED}),
    MoveState.COMMITTING: frozenset({MoveOutcome.DONE, MoveOutcome.ABORTED, MoveOutcome.ENDED}),
    MoveState.RESUMING: frozenset({MoveOutcome.DONE, MoveOutcome.ABORTED, MoveOutcome.ENDED}),
}
"""Where a migration may go from each state; None: it begins."""


@dataclass(slots=True, eq=False)
class Move:
    """One migration that is not over."""

    id: str
    """Never used twice."""
    call: Call
    """The request."""
    source: Engine
    """The engine that had the request when it began."""
    target: Engine
    """The engine that is to have it."""
    method: MoveMethod
    """How."""
    began_ns: int
    """When it began."""
    since_ns: int
    """When it last made progress."""
    state: MoveState | None = None
    """How far it is."""
    asked: bool = False
    """Whether the destination was asked if it has the request."""
    keeper: Engine | None = None
    """Who keeps blocks for the request beside the engine that has it: the target, or after it the source."""

    def go(self, state: MoveState | MoveOutcome) -> None:
        """Go to another state, or end; RuntimeError where that is not allowed."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"migration {self.id} cannot go from {self.state} to {state}")
        if isinstance(state, MoveState):
            self.state = state

    def keep(self, engine: Engine | None) -> None:
        """Another engine keeps blocks for the request from now on."""
        if self.keeper is not None:
            self.keeper.leases -= 1
        self.keeper = engine
        if engine is not None:
            engine.leases += 1
