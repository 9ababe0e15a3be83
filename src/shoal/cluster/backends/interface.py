"""The interface of a backend: start and kill engine processes, and report what nodes say about them.

``engine`` and ``incarnation`` are as in ``manager.events``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.cluster.node import EngineUsage, NodeEvent, RunningEngine
from shoal.engine.process.config import EngineConfig as EngineConfig


@dataclass(frozen=True, slots=True)
class EngineWaiting:
    """An engine has no node yet: it waits for resources."""

    engine: str
    incarnation: int
    what: str
    """What it waits for, in words."""


BackendEvent = NodeEvent | EngineUsage | EngineWaiting


class EngineBackend(Protocol):
    async def attach(
        self, on_event: Callable[[BackendEvent], None], settings: Mapping[str, str]
    ) -> Sequence[RunningEngine]:
        """Connect, and return the engines that an earlier server left running.

        on_event: called from the event loop for all further events, also of found engines. settings: what the
        engines are built from, by name; ConfigError lists the differences if running ones have others.
        """

    def start_engine(self, engine: str, incarnation: int, config: EngineConfig) -> None:
        """Start a process; ``EngineExited`` follows if that fails."""

    def kill_engine(self, engine: str, incarnation: int) -> None:
        """Kill a process; ``EngineExited`` follows. Unknown ones are ignored."""

    def stop_engine(self, engine: str, incarnation: int) -> None:
        """End a process that has no requests, and free all that was held for it; ``EngineExited`` follows."""

    async def close(self) -> None:
        """End all engines and their owners."""
