"""Which engine a new request goes to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.core import ConfigError, Request


@dataclass(frozen=True, slots=True)
class EngineView:
    """What dispatch may know of an engine. number: its own. unfinished: requests it has not ended."""

    number: int
    unfinished: int


class Dispatch(Protocol):
    """Chooses among the engines that serve a request's service; pure."""

    def choose(self, request: Request, count: int, engines: Sequence[EngineView]) -> int:
        """The number of the engine to take. count: requests of its service dispatched before."""
        ...


@dataclass(frozen=True, slots=True)
class RoundRobinDispatch:
    """Each service's requests go to its engines in turn."""

    def choose(self, request: Request, count: int, engines: Sequence[EngineView]) -> int:
        """The next in turn."""
        return engines[count % len(engines)].number


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """The engine with the fewest unfinished requests, the first of equals."""

    def choose(self, request: Request, count: int, engines: Sequence[EngineView]) -> int:
        """The least loaded."""
        return min(engines, key=lambda engine: engine.unfinished).number


DISPATCHES: Mapping[str, Dispatch] = {"round-robin": RoundRobinDispatch(), "least-loaded": LeastLoaded()}
"""By name."""


def dispatch_named(name: str) -> Dispatch:
    """The dispatch called ``name``; raises ConfigError with the possible names."""
    if name not in DISPATCHES:
        raise ConfigError(f"dispatch {name!r} is not known; possible are {', '.join(DISPATCHES)}")
    return DISPATCHES[name]
