"""What a manager decides: whoever holds the engines and the streams carries it out."""

from enum import StrEnum

import msgspec

from shoal.cluster.manager.events import MoveMethod


class StartEngine(msgspec.Struct, frozen=True, tag=True):
    """Start an engine's process."""

    engine: str
    """Its name."""
    incarnation: int
    """How often it will have been started."""
    services: tuple[str, ...]
    """What it is to load before it is ready."""


class KillEngine(msgspec.Struct, frozen=True, tag=True):
    """Kill an engine's process; ``EngineEnded`` tells when it is gone."""

    engine: str
    """Its name."""
    incarnation: int
    """Which start of it."""
    why: str
    """For the log."""


class LoadService(msgspec.Struct, frozen=True, tag=True):
    """Let a running engine load a service; ``ServiceLoaded`` or ``ServiceFailed`` tells what came of it."""

    engine: str
    """Its name."""
    incarnation: int
    """Which start of it."""
    service: str
    """The service."""
    woken: bool = False
    """Whether a request asks for it, for the log."""


class UnloadService(msgspec.Struct, frozen=True, tag=True):
    """Let a running engine give up a service of which it has no request; ``ServiceUnloaded`` tells when."""

    engine: str
    """Its name."""
    incarnation: int
    """Which start of it."""
    service: str
    """The service."""


class Dispatch(msgspec.Struct, frozen=True, tag=True):
    """Send a request to an engine, with the output that was delivered."""

    request: str
    """Its id."""
    engine: str
    """Which engine."""
    incarnation: int
    """Which start of it."""
    attempt: int
    """From 1; events of earlier attempts do not count any more."""


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """Cancel a request at its engine; another ``Dispatch`` follows, now or later."""

    request: str
    """Its id."""


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Ask the destination of a migration for room; ``MoveReserved`` or ``MoveDeclined`` tells."""

    migration: str
    """Its id."""
    request: str
    """The request that is to move."""
    engine: str
    """The destination."""


class Export(msgspec.Struct, frozen=True, tag=True):
    """Let the source send the request's KV: ``MoveCopied``, then ``MoveStopped``; or ``MoveNotExported``."""

    migration: str
    """The migration's id."""
    request: str
    """The request."""
    engine: str
    """The source."""
    to: str
    """The destination."""
    live: bool
    """Whether the request runs meanwhile."""


class Commit(msgspec.Struct, frozen=True, tag=True):
    """The destination has the request from now on; ``MoveFailed`` tells if it cannot be."""

    migration: str
    """The migration's id."""
    request: str
    """The request."""
    engine: str
    """The destination."""
    attempt: int
    """As in ``Dispatch``."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Let the source send no more; if it has stopped the request, that runs there again."""

    migration: str
    """The migration's id."""
    request: str
    """The request."""
    engine: str
    """The source."""
    attempt: int | None = None
    """As in ``Dispatch``, where the destination had it meanwhile; None: the source never lost it."""


class Release(msgspec.Struct, frozen=True, tag=True):
    """Let the source give up what it keeps of a request."""

    migration: str
    """The migration's id."""
    engine: str
    """The source."""


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Let the destination give up what it keeps for a request that does not run there yet.

    ``MoveFailed`` tells, if the request was committed to it and does not run.
    """

    migration: str
    """The migration's id."""
    request: str
    """The request."""
    engine: str
    """The destination."""


class MoveOutcome(StrEnum):
    """How a migration ended."""

    DONE = "done"
    """The request runs at the destination."""
    ABORTED = "aborted"
    """It does not."""
    ENDED = "ended"
    """The request ended before."""


class MoveEnded(msgspec.Struct, frozen=True, tag=True):
    """A migration is over: for the log."""

    migration: str
    """Its id."""
    request: str
    """The request."""
    source: str
    """The engine that had it."""
    target: str
    """The engine that was to have it."""
    method: MoveMethod
    """How."""
    took_s: float
    """For how long."""
    outcome: MoveOutcome
    """How it ended."""
    why: str = ""
    """Why it was given up."""


class RefusalKind(StrEnum):
    """Why a request gets no answer."""

    NO_ENGINE = "no_engine"
    """No engine of its service ran for too long."""
    POISON = "poison"
    """Engines die of it."""


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """End a request with an error."""

    request: str
    """Its id."""
    kind: RefusalKind
    """Why."""
    message: str
    """The same in words."""


MoveAction = Reserve | Export | Commit | Abort | Release | Drop | MoveEnded
ClusterAction = (
    StartEngine | KillEngine | LoadService | UnloadService | Dispatch | Withdraw | Refuse | MoveAction
)
