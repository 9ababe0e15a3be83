"""Choosing the engine for a new request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.core import ConfigError, Request


@dataclass(frozen=True, slots=True)
class EngineView:
    """What a dispatch policy knows about an engine."""

    number: int
    """The engine's number."""
    unfinished: int
    """Requests that it has not finished."""


class Dispatch(Protocol):
    """Chooses among the engines that serve a request's service; a pure function."""

    def choose(self, request: Request, count: int, engines: Sequence[EngineView]) -> int:
        """The number of the chosen engine. count: requests of this service dispatched before."""
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
"""Dispatch policies by name."""


def dispatch_named(name: str) -> Dispatch:
    """The dispatch called ``name``; raises ConfigError with the possible names."""
    if name not in DISPATCHES:
        raise ConfigError(f"dispatch {name!r} is not known; possible are {', '.join(DISPATCHES)}")
    return DISPATCHES[name]
