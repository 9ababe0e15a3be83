"""Offloaders: which worker serves which batch."""

from collections.abc import Sequence
from typing import Protocol

from shoal.static.batching.types import StaticBatch


class Offloader(Protocol):
    """Places batches on workers one by one; holds no state."""

    def order(self, batches: Sequence[StaticBatch]) -> Sequence[StaticBatch]:
        """The batches in the order in which they are to be placed."""
        ...

    def choose(self, loads: Sequence[float], turn: int) -> int:
        """The worker for the next placement.

        loads: estimated seconds of unfinished work of every worker; at least one. turn: placements so far.
        """
        ...


class RoundRobin:
    """One after the other, whatever they have to do already."""

    def order(self, batches: Sequence[StaticBatch]) -> Sequence[StaticBatch]:
        """As formed."""
        return batches

    def choose(self, loads: Sequence[float], turn: int) -> int:
        """The next in turn."""
        return turn % len(loads)


class MaxMin:
    """The longest batch to the least loaded worker (SCLS, section 4.5).

    From empty workers this is the longest-processing-time rule: the last worker ends within
    4/3 - 1/(3 workers) of the best possible time (Graham, 1969).
    """

    def order(self, batches: Sequence[StaticBatch]) -> Sequence[StaticBatch]:
        """Longest estimated serving time first; equal ones as formed."""
        return sorted(batches, key=lambda batch: -batch.estimate_s)

    def choose(self, loads: Sequence[float], turn: int) -> int:
        """The least loaded; of equals the first."""
        return min(range(len(loads)), key=loads.__getitem__)


OFFLOADERS: dict[str, Offloader] = {"round-robin": RoundRobin(), "max-min": MaxMin()}
"""Offloaders by name."""
