"""Offloaders: choose the worker for each batch (round-robin, max-min)."""

from collections.abc import Sequence
from typing import Protocol

from shoal.batches.requests import RequestBatch


class Offloader(Protocol):
    """Places batches on workers one by one; has no state."""

    def order(self, batches: Sequence[RequestBatch]) -> Sequence[RequestBatch]:
        """The batches in the order of placement."""
        ...

    def choose(self, loads: Sequence[float], turn: int) -> int:
        """The worker for the next placement.

        loads: estimated seconds of unfinished work of every worker; at least one. turn: placements so far.
        """
        ...


class RoundRobin:
    """One worker after the other, regardless of load."""

    def order(self, batches: Sequence[RequestBatch]) -> Sequence[RequestBatch]:
        return batches

    def choose(self, loads: Sequence[float], turn: int) -> int:
        return turn % len(loads)


class MaxMin:
    """The longest batch to the least loaded worker (SCLS, section 4.5).

    With idle workers this is the longest-processing-time rule, whose makespan is within 4/3 - 1/(3 workers)
    of the optimum (Graham, 1969).
    """

    def order(self, batches: Sequence[RequestBatch]) -> Sequence[RequestBatch]:
        return sorted(batches, key=lambda batch: -batch.estimate_s)

    def choose(self, loads: Sequence[float], turn: int) -> int:
        return min(range(len(loads)), key=loads.__getitem__)


OFFLOADERS: dict[str, Offloader] = {"round-robin": RoundRobin(), "max-min": MaxMin()}
"""By name."""
