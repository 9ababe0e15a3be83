"""The number of requests that an engine can have so that they meet their goals, learned from outcomes."""

from dataclasses import dataclass

PERIOD_NS = 5_000_000_000
"""Outcomes are judged together over at least this time,"""
LEAST_OUTCOMES = 5
"""and of at least so many requests."""
LOWER, RAISE, NEAR = 0.8, 1.05, 0.8
"""The limit falls to the first share of the load at which goals were missed. It rises by the second factor
where they are met at a load of at least the third share of it."""


@dataclass(slots=True)
class GoalLimit:
    """Learns the limit; ``attainment`` is the share of requests that are to meet their goals."""

    attainment: float
    per_engine: float | None = None
    """The limit; None: none is known, since goals have always been met."""
    _met: int = 0
    _missed: int = 0
    _load: float = 0.0
    """Requests of an engine now."""
    _loads: float = 0.0
    """Sum of the loads at which the requests of this period ended."""
    _since_ns: int | None = None
    _held_until_ns: int = 0

    def ended(self, met: bool) -> None:
        """A request with goals ended, at the load observed last."""
        self._met += met
        self._missed += not met
        self._loads += self._load

    def observe(self, unfinished: float, engines: int, start_ns: int, now_ns: int) -> None:
        """Note the load of the running engines, and judge a period that is over.

        unfinished: requests of all engines. start_ns: how long an engine takes to start. After a decrease,
        another is only due when an engine that was started for the first had time to help.
        """
        self._load = unfinished / max(1, engines)
        ended = self._met + self._missed
        if ended and self._since_ns is None:
            self._since_ns = now_ns
        if self._since_ns is None or now_ns - self._since_ns < PERIOD_NS or ended < LEAST_OUTCOMES:
            return
        load = self._loads / ended
        if self._met < self.attainment * ended:
            if now_ns >= self._held_until_ns:
                self.per_engine = max(1.0, LOWER * load)
                self._held_until_ns = now_ns + start_ns + 2 * PERIOD_NS
        elif self.per_engine is not None and load >= NEAR * self.per_engine:
            self.per_engine *= RAISE
        self._met = self._missed = 0
        self._loads, self._since_ns = 0.0, None
