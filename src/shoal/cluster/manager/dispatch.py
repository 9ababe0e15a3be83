"""Choosing the engine for a request: policies, which are pure functions of the engines' loads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from shoal.cluster.manager.engine_load import EngineLoad, Newcomer
from shoal.cluster.packing import PACKERS, Packer, Packing
from shoal.core import ConfigError


class DispatchPolicy(Protocol):
    """Chooses among the engines that serve a request's service and take requests; a pure function."""

    @property
    def reads_prefixes(self) -> bool:
        """Whether ``Submitted.prefix`` is to be filled in."""
        ...

    def choose(self, newcomer: Newcomer, engines: Sequence[EngineLoad]) -> EngineLoad:
        """One of ``engines``, of which there is at least one; the first of equals."""
        ...


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Each service's requests go to its engines in turn."""

    reads_prefixes: bool = False

    def choose(self, newcomer: Newcomer, engines: Sequence[EngineLoad]) -> EngineLoad:
        """The next in turn."""
        return engines[newcomer.turn % len(engines)]


_unfinished = attrgetter("unfinished")


@dataclass(frozen=True, slots=True)
class LeastRequests:
    """The engine with the fewest unfinished requests, each choice counted."""

    reads_prefixes: bool = False

    def choose(self, newcomer: Newcomer, engines: Sequence[EngineLoad]) -> EngineLoad:
        """The least loaded."""
        return min(engines, key=_unfinished)


@dataclass(frozen=True, slots=True)
class MaxMin:
    """The engine whose requests' estimated times have the least sum, the new one's included.

    SCLS (section 4.5): an engine's load grows by a request's estimated time when it gets the request, and
    falls by the same when the request has ended. The time is that of a request alone: an engine that runs
    many at once is less loaded than the sum says. Ours: engines whose memory would be too small for all of
    theirs come last, and of these that first which is the least too small.
    """

    reads_prefixes: bool = False

    def choose(self, newcomer: Newcomer, engines: Sequence[EngineLoad]) -> EngineLoad:
        """Of those with memory the one that would be done first if it ran one request after the other."""
        return min(engines, key=lambda engine: engine.pressure(newcomer))


@dataclass(frozen=True, slots=True)
class LeastForecast:
    """The engine whose KV will be the least at its peak, the new request's included.

    Past-Future scheduler (sections 3.3 and 7), as a share of the engine's memory: engines may be unequal. The
    cost of a choice grows with the requests of all engines.
    """

    reads_prefixes: bool = False

    def choose(self, newcomer: Newcomer, engines: Sequence[EngineLoad]) -> EngineLoad:
        """The one with the lowest peak; fewer requests where that is equal."""
        return min(engines, key=lambda engine: (engine.peak_share(newcomer), engine.unfinished))


@dataclass(frozen=True, slots=True)
class LongestPrefix:
    """The engine that has probably computed most of the prompt's beginning, unless it has too many requests.

    Too many for its time, or for its memory.

    What is cached is not asked: blocks of prompts that were sent to an engine count as cached there.
    """

    requests: float = 1.0
    """An engine may have work for as long as so many requests like the new one take,"""
    share: float = 0.25
    """and this share of the work of the engine with the least, more than that one. Its memory may be short by
    this share more than that of others."""
    reads_prefixes: bool = True

    def choose(self, newcomer: Newcomer, engines: Sequence[EngineLoad]) -> EngineLoad:
        """The one with most blocks; the choice of ``MaxMin`` where that is equal."""
        found = [(engine, *engine.pressure(newcomer)) for engine in engines]
        least = min(too_small for _, too_small, _ in found)
        found = [each for each in found if each[1] <= least * (1 + self.share)]
        one_ns = min(engine.cost_ns(newcomer) for engine, _, _ in found)
        most_ns = min(time_ns for _, _, time_ns in found) * (1 + self.share) + self.requests * one_ns

        def key(each: tuple[EngineLoad, int, int]) -> tuple[int, int, int]:
            engine, too_small, time_ns = each
            cached = -1 if time_ns > most_ns else engine.cached_blocks(newcomer.call.prefix)
            return -cached, too_small, time_ns

        return min(found, key=key)[0]


DISPATCHES: Mapping[str, DispatchPolicy] = {
    "round-robin": RoundRobin(),
    "least-requests": LeastRequests(),
    "least-loaded": LeastRequests(),
    "max-min": MaxMin(),
    "forecast": LeastForecast(),
    "prefix": LongestPrefix(),
}
"""Policies by name; ``least-loaded`` is another name of ``least-requests``."""


@dataclass(frozen=True, slots=True)
class PackerDispatch:
    """Requests go where a packer puts them, and move when it says so (docs/packing.md)."""

    name: str
    """Of the packer, in ``PACKERS``."""
    reads_prefixes: bool = False

    def packer(self) -> Packer:
        """A new one, which knows of no engine yet."""
        return PACKERS[self.name](Packing([]))


DISPATCH_NAMES = (*DISPATCHES, *PACKERS)
"""Everything that can choose engines for requests."""


def dispatch_named(name: str) -> DispatchPolicy | PackerDispatch:
    """The dispatch called ``name``; raises ConfigError with the possible names."""
    if name in PACKERS:
        return PackerDispatch(name)
    if name not in DISPATCHES:
        raise ConfigError(f"dispatch {name!r} is not known; possible are {', '.join(DISPATCH_NAMES)}")
    return DISPATCHES[name]
