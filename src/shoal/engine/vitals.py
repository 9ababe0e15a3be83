"""Whether an engine process still works, and its latest stats."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.engine.stats import EngineStats

PROCESS_SILENCE_S = 15.0
"""Heartbeats come every second, whatever is computed: a process silent for so long is stopped or starved."""

STEP_SILENCE_S = 300.0
"""Stats come only between steps, and a step over large prompts takes minutes on a slow CPU."""


@dataclass(frozen=True, slots=True)
class Silence:
    """An engine has not been heard of for too long."""

    duration_s: float
    """For how long."""
    what: str
    """What is missing, in words."""


@dataclass(slots=True)
class Vitals:
    """Heartbeats and stats of an engine process, as its client has got them."""

    process_limit_s: float = PROCESS_SILENCE_S
    """How long the process may send no heartbeat."""
    step_limit_s: float = STEP_SILENCE_S
    """How long the engine in it may send no stats."""
    clock: Callable[[], int] = time.monotonic_ns
    """Nanoseconds."""
    stats: EngineStats | None = None
    """The latest stats; None before the first."""
    _heartbeat_ns: int = field(init=False)
    """When the last heartbeat came."""
    _stats_ns: int = field(init=False)
    """When the last stats came."""

    def __post_init__(self) -> None:
        """Start as if both had just come."""
        self._heartbeat_ns = self._stats_ns = self.clock()

    def heartbeat(self) -> None:
        """Note a heartbeat of the process."""
        self._heartbeat_ns = self.clock()

    def update(self, stats: EngineStats) -> None:
        """Take new stats of the engine."""
        self.stats = stats
        self._stats_ns = self.clock()

    @property
    def age_s(self) -> float:
        """How old ``stats`` are."""
        return (self.clock() - self._stats_ns) / 1e9

    def silence(self) -> Silence | None:
        """What has been silent for too long, if anything is."""
        process_s = (self.clock() - self._heartbeat_ns) / 1e9
        if process_s > self.process_limit_s:
            return Silence(process_s, "the engine process gives no sign of life")
        if self.age_s > self.step_limit_s:
            return Silence(self.age_s, "the engine process does not come to the end of its step")
        return None
