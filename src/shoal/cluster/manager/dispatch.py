"""Dispatch policies: which engine gets a request (round robin, least requests, max-min, forecast, prefix)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.cluster.manager.engine_load import EngineLoad, UnassignedRequest
from shoal.cluster.packing import PACKERS, Packer, PackerTuning, make_packer
from shoal.core import ConfigError


class DispatchPolicy(Protocol):
    """Chooses among the engines that serve a request's service; a pure function of their loads."""

    @property
    def reads_prefixes(self) -> bool:
        """Whether the policy reads ``Submitted.prefix``."""
        ...

    def choose(self, unassigned: UnassignedRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
        """One of ``engines`` (at least one); the first of equals."""
        ...


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Each service's requests go to its engines in turn."""

    reads_prefixes: bool = False

    def choose(self, unassigned: UnassignedRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
        return engines[unassigned.turn % len(engines)]


@dataclass(frozen=True, slots=True)
class LeastRequests:
    """The engine with the fewest unfinished requests, each choice counted."""

    reads_prefixes: bool = False

    def choose(self, unassigned: UnassignedRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
        """Ties go to the engine that has the weights, or will have them first."""
        service = unassigned.call.service
        return min(engines, key=lambda engine: (engine.unfinished, engine.fetch_ns(service)))


@dataclass(frozen=True, slots=True)
class MaxMin:
    """The engine with the least sum of estimated request times, the new request included.

    SCLS (section 4.5): an engine's load grows by a request's estimated time when it gets the request, and
    falls by the same when the request has ended. The time is that of a request alone: an engine that runs
    many at once is less loaded than the sum says. Ours: engines whose memory would be too small come last, in
    order of how much is missing; and where its weights are absent, the request costs their fetch as well.
    """

    reads_prefixes: bool = False

    def choose(self, unassigned: UnassignedRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
        return min(engines, key=lambda engine: engine.pressure(unassigned))


@dataclass(frozen=True, slots=True)
class LeastForecast:
    """The engine with the lowest forecast KV peak, the new request included.

    Past-Future scheduler (sections 3.3 and 7), as a share of the engine's memory, since engines may differ. A
    choice costs time in proportion to the requests of all engines.
    """

    reads_prefixes: bool = False

    def choose(self, unassigned: UnassignedRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
        """Ties go to the engine with fewer requests, then to one that has the weights."""
        service = unassigned.call.service

        def key(engine: EngineLoad) -> tuple[float, int, int]:
            return engine.peak_share(unassigned), engine.unfinished, engine.fetch_ns(service)

        return min(engines, key=key)


@dataclass(frozen=True, slots=True)
class LongestPrefix:
    """The engine that has probably cached the longest prefix of the prompt, unless its load is too high.

    Limits apply to its estimated time and its memory. Blocks of prompts that were sent to an engine count as
    cached there; engines do not report their caches.
    """

    requests: float = 1.0
    """Extra load that an engine may have over the least loaded one, in requests like the new one,"""
    share: float = 0.25
    """and as a share of the least loaded engine's work. The same share bounds how much more its memory may be
    exceeded than that of the best engine."""
    reads_prefixes: bool = True

    def choose(self, unassigned: UnassignedRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
        """Ties are decided as by ``MaxMin``."""
        found = [(engine, *engine.pressure(unassigned)) for engine in engines]
        least = min(too_small for _, too_small, _ in found)
        found = [each for each in found if each[1] <= least * (1 + self.share)]
        one_ns = min(engine.cost_ns(unassigned) for engine, _, _ in found)
        most_ns = min(time_ns for _, _, time_ns in found) * (1 + self.share) + self.requests * one_ns

        def key(each: tuple[EngineLoad, int, int]) -> tuple[int, int, int]:
            engine, too_small, time_ns = each
            cached = -1 if time_ns > most_ns else engine.cached_blocks(unassigned.call.prefix)
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
"""Policies by name; ``least-loaded`` is an alias of ``least-requests``."""


@dataclass(frozen=True, slots=True)
class PackerDispatch:
    """A packer places requests, and migrates running ones (docs/packing.md)."""

    name: str
    """Key in ``PACKERS``."""
    reads_prefixes: bool = False

    def packer(self, tuning: PackerTuning) -> Packer:
        """A new packer without engines."""
        return make_packer(self.name, tuning)


DISPATCH_NAMES = (*DISPATCHES, *PACKERS)
"""All values of the ``dispatch`` option."""


def dispatch_named(name: str) -> DispatchPolicy | PackerDispatch:
    """The dispatch called ``name``; raises ConfigError with the possible names."""
    if name in PACKERS:
        return PackerDispatch(name)
    if name not in DISPATCHES:
        raise ConfigError(f"dispatch {name!r} is not known; possible are {', '.join(DISPATCH_NAMES)}")
    return DISPATCHES[name]
