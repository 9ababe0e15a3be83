"""Whether an engine process still does its work, and what it last told of itself."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.engine.stats import EngineStats

PROCESS_SILENCE_S = 15.0
"""A process gives a sign of life every second, whatever it computes: it is stopped, or gets no CPU."""

STEP_SILENCE_S = 300.0
"""Only between steps it tells of itself, and a step over large prompts on a slow CPU takes minutes."""


@dataclass(frozen=True, slots=True)
class Silence:
    """An engine has not been heard of for ``duration_s``; ``what``: in words."""

    duration_s: float
    what: str


@dataclass(slots=True)
class Vitals:
    """Signs of life of an engine process, kept by its client.

    process_limit_s, step_limit_s: how long the process, and the engine in it, may be silent. clock: in
    nanoseconds. stats: what the engine last told, None before that.
    """

    process_limit_s: float = PROCESS_SILENCE_S
    step_limit_s: float = STEP_SILENCE_S
    clock: Callable[[], int] = time.monotonic_ns
    stats: EngineStats | None = None
    _beat_ns: int = field(init=False)
    _told_ns: int = field(init=False)

    def __post_init__(self) -> None:
        """Begin as if everything had just been heard."""
        self._beat_ns = self._told_ns = self.clock()

    def beat(self) -> None:
        """The process has given a sign of life."""
        self._beat_ns = self.clock()

    def tell(self, stats: EngineStats) -> None:
        """The engine has told of itself."""
        self.stats = stats
        self._told_ns = self.clock()

    @property
    def age_s(self) -> float:
        """How old ``stats`` are."""
        return (self.clock() - self._told_ns) / 1e9

    def silence(self) -> Silence | None:
        """What has been silent for too long, if anything; None again as soon as it is heard."""
        process_s = (self.clock() - self._beat_ns) / 1e9
        if process_s > self.process_limit_s:
            return Silence(process_s, "the engine process gives no sign of life")
        if self.age_s > self.step_limit_s:
            return Silence(self.age_s, "the engine process does not come to the end of its step")
        return None
