"""The highest rate that a server sustains: doubles the rate until it does not, then halves the interval."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

_MOST_DOUBLINGS = 16


@dataclass(slots=True)
class Sweep:
    """Rates that were tried, in this order."""

    sustained: list[float] = field(default_factory=list)
    failed: list[float] = field(default_factory=list)

    @property
    def knee(self) -> float | None:
        """The highest sustained rate below all that were not; None: none was."""
        least = min(self.failed, default=float("inf"))
        return max([rate for rate in self.sustained if rate < least], default=None)


async def find_knee(try_rate: Callable[[float], Awaitable[bool]], rate: float, steps: int) -> Sweep:
    """Try rates from ``rate`` on; ``try_rate`` says whether one is sustained.

    If the first is not, smaller ones are tried. steps: how often the interval between the last sustained rate
    and the first other one is halved.
    """
    sweep = Sweep()

    async def attempt(value: float) -> bool:
        kept = await try_rate(value)
        (sweep.sustained if kept else sweep.failed).append(value)
        return kept

    up = await attempt(rate)
    for _ in range(_MOST_DOUBLINGS):
        if bool(sweep.sustained) and bool(sweep.failed):
            break
        rate = rate * 2 if up else rate / 2
        await attempt(rate)
    for _ in range(steps):
        low = sweep.knee
        if low is None or not sweep.failed:
            break
        await attempt((low + min(sweep.failed)) / 2)
    return sweep
