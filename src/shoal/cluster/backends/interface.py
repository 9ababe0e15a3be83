"""What runs the engines of a cluster, as the router sees it."""

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
    """What it does now."""
    waits: bool = False
    """Whether it waits for something, and gets nowhere meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """An engine takes requests."""

    engine: str
    incarnation: int
    pid: int
    """Its process."""
    endpoint: str
    """ZeroMQ address to which ``EngineConnection`` connects."""
    info: EngineInfo
    """Limits of its services."""
    transfer: str = ""
    """ZeroMQ address where it takes KV of requests that move to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A sign of life of an engine, loading or not."""

    engine: str
    incarnation: int
    pid: int
    """Its process."""
    hung: str = ""
    """As in ``events.EngineBeat``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worked:
    """What an engine's process has used since its start, as others see it, whatever it does."""

    engine: str
    incarnation: int
    cpu_s: float
    """CPU time."""
    read_bytes: int
    """What was read from disks, where that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """An engine's process is gone, or its whole node."""

    engine: str
    incarnation: int
    reason: str
    """Why, in words: an error that it told of, an exit status, a signal."""
    failure: str | None = None
    """Name of the class of the error that it told of, as in ``lifeline.Failed``."""
    suspects: tuple[str, ...] = ()
    """Ids of the engine's requests (of their present attempt) whose steps were being computed."""


BackendEvent = Loading | Loaded | Beat | Worked | Exited


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundEngine:
    """An engine that an earlier server left running."""

    engine: str
    incarnation: int
    pid: int
    loaded: Loaded | None
    """As it was told when it was ready; None: it still loads."""


class EngineBackend(Protocol):
    """Starts, watches and kills engine processes."""

    async def attach(
        self, on_event: Callable[[BackendEvent], None], settings: Mapping[str, str]
    ) -> Sequence[FoundEngine]:
        """Begin; returns the engines that run already.

        on_event: called from the event loop for everything that happens from now on, also to engines that
        were found. settings: what the engines are built from, by name; where running ones were built from
        others, ConfigError says what differs.
        """

    def start_engine(self, engine: str, incarnation: int, config: EngineConfig) -> None:
        """Start a process; ``Exited`` tells if that fails."""

    def kill_engine(self, engine: str, incarnation: int) -> None:
        """Kill a process; ``Exited`` tells when it is gone. Unknown ones are ignored."""

    async def close(self) -> None:
        """End all engines, and whatever owns them."""
