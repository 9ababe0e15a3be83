"""What a manager decides: whoever holds the engines and the streams carries it out."""

from enum import StrEnum

import msgspec


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


ClusterAction = StartEngine | KillEngine | LoadService | UnloadService | Dispatch | Withdraw | Refuse
