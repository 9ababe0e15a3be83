"""The interface of a backend: start and kill engine processes, and the events that it reports.

``engine`` and ``incarnation`` are as in ``manager.events``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.engine.info import EngineInfo
from shoal.engine.process.config import EngineConfig as EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """An engine is loading."""

    engine: str
    incarnation: int
    what: str
    """What it loads now, in words."""
    waits: bool = False
    """Whether it waits for resources, without progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """An engine accepts requests."""

    engine: str
    incarnation: int
    pid: int
    endpoint: str
    """ZeroMQ address to which ``EngineConnection`` connects."""
    info: EngineInfo
    transfer: str = ""
    """ZeroMQ address that receives KV of migrating requests; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A heartbeat of an engine, also while it loads."""

    engine: str
    incarnation: int
    pid: int
    hung: str = ""
    """As in ``events.EngineHeartbeat``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUsage:
    """Resources that an engine's process has used since its start, measured from outside."""

    engine: str
    incarnation: int
    cpu_s: float
    read_bytes: int
    """Bytes read from disks; 0 where unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """An engine's process is gone, or its whole node."""

    engine: str
    incarnation: int
    reason: str
    """The error that it sent, its exit status or signal, in words."""
    failure: str | None = None
    """Class name of the error that it sent, as in ``lifeline.Failed``."""
    suspects: tuple[str, ...] = ()
    """Wire ids of the requests in the steps that it was computing."""


BackendEvent = Loading | Loaded | Heartbeat | ProcessUsage | Exited


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundEngine:
    """An engine that an earlier server left running."""

    engine: str
    incarnation: int
    pid: int
    loaded: Loaded | None
    """None: it still loads."""


class EngineBackend(Protocol):
    async def attach(
        self, on_event: Callable[[BackendEvent], None], settings: Mapping[str, str]
    ) -> Sequence[FoundEngine]:
        """Connect, and return the engines that run already.

        on_event: called from the event loop for all further events, also of found engines. settings: what the
        engines are built from, by name; ConfigError lists the differences if running ones have others.
        """

    def start_engine(self, engine: str, incarnation: int, config: EngineConfig) -> None:
        """Start a process; ``Exited`` follows if that fails."""

    def kill_engine(self, engine: str, incarnation: int) -> None:
        """Kill a process; ``Exited`` follows. Unknown ones are ignored."""

    async def close(self) -> None:
        """End all engines and their owners."""
