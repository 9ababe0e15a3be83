"""Actions that the manager decides on; the router executes them.

``engine``, ``incarnation`` and ``request`` are as in ``events``.
"""

from enum import StrEnum

import msgspec

from shoal.cluster.manager.events import MigrationMethod


class StartEngine(msgspec.Struct, frozen=True, tag=True):
    """Start an engine's process."""

    engine: str
    incarnation: int
    services: tuple[str, ...]
    """Services to load before it is ready."""


class KillEngine(msgspec.Struct, frozen=True, tag=True):
    """Kill an engine's process; ``EngineEnded`` follows."""

    engine: str
    incarnation: int
    why: str


class StopEngine(msgspec.Struct, frozen=True, tag=True):
    """End the process of an engine without requests, which goes to standby; ``EngineEnded`` follows."""

    engine: str
    incarnation: int


class FleetChanged(msgspec.Struct, frozen=True, tag=True):
    """An engine is activated, or goes to standby, since more or fewer engines are needed; for the log."""

    engine: str
    activated: bool
    wanted: int
    """Number of engines that are to run."""
    why: str


class LoadService(msgspec.Struct, frozen=True, tag=True):
    """Let a running engine load a service; ``ServiceLoaded`` or ``ServiceFailed`` follows."""

    engine: str
    incarnation: int
    service: str
    woken: bool = False
    """Whether a request caused this; for the log."""


class UnloadService(msgspec.Struct, frozen=True, tag=True):
    """Let a running engine unload a service without requests; ``ServiceUnloaded`` follows."""

    engine: str
    incarnation: int
    service: str


class Dispatch(msgspec.Struct, frozen=True, tag=True):
    """Send a request to an engine, with the output delivered so far."""

    request: str
    engine: str
    incarnation: int
    attempt: int
    """From 1; events of earlier attempts are ignored."""
    batch: int | None = None
    """Number of its batch; None: it is in none."""
    slice_tokens: int | None = None
    """Its slice ends after so many further output tokens; None: that of an earlier dispatch goes on."""


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """Cancel a request at its engine; another ``Dispatch`` follows later."""

    request: str


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Reserve room at the destination of a migration.

    ``MigrationReserved`` or ``MigrationDeclined`` follows.
    """

    migration: str
    request: str
    engine: str


class Export(msgspec.Struct, frozen=True, tag=True):
    """Let the source send the request's KV.

    The answer is ``MigrationCopied`` events and then ``MigrationStopped``, or ``MigrationNotExported``.
    """

    migration: str
    request: str
    engine: str
    to: str
    live: bool
    """Whether the request keeps running."""


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Hand the request over to the destination; ``MigrationFailed`` follows if that is impossible."""

    migration: str
    request: str
    engine: str
    attempt: int
    """As in ``Dispatch``."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop sending at the source, which resumes the request if it was stopped."""

    migration: str
    request: str
    engine: str
    attempt: int | None = None
    """As in ``Dispatch`` if the request was committed to the destination; None: the source never lost it."""


class Release(msgspec.Struct, frozen=True, tag=True):
    """Free the KV that the source keeps of a request."""

    migration: str
    engine: str


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Free what the destination keeps for a request that does not run there yet.

    ``MigrationFailed`` follows if the request was committed to it and does not run.
    """

    migration: str
    request: str
    engine: str


class MigrationOutcome(StrEnum):
    """How a migration ended."""

    DONE = "done"
    """The request runs at the destination."""
    ABORTED = "aborted"
    """The request does not run at the destination."""
    ENDED = "ended"
    """The request ended during the migration."""


class MigrationEnded(msgspec.Struct, frozen=True, tag="MoveEnded"):
    """A migration is over; for the log."""

    migration: str
    request: str
    source: str
    target: str
    method: MigrationMethod
    took_s: float
    outcome: MigrationOutcome
    why: str = ""
    """Why it was aborted."""


class RefusalKind(StrEnum):
    """Why a request is refused."""

    NO_ENGINE = "no_engine"
    """No engine of its service ran for too long."""
    POISON = "poison"
    """Engines die while they compute it."""


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """End a request with an error."""

    request: str
    kind: RefusalKind
    message: str


MigrationAction = Reserve | Export | Commit | Abort | Release | Drop | MigrationEnded
ClusterAction = (
    StartEngine
    | KillEngine
    | StopEngine
    | FleetChanged
    | LoadService
    | UnloadService
    | Dispatch
    | Withdraw
    | Refuse
    | MigrationAction
)
