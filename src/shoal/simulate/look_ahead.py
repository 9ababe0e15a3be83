"""Runs of decode steps computed ahead of the clock, until an event cuts them short."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.execute.simulated import cut_after
from shoal.schedule.decode_runs import DecodeRun


@dataclass(slots=True)
class StepsAhead:
    """A run of future decode steps, not committed yet: an arrival may cut it short.

    A step is planned as soon as fewer than ``depth`` plans are in flight, that is, when all but ``depth - 1``
    of the steps before it have ended.
    """

    run: DecodeRun
    start_ns: int
    ends_ns: list[int]
    """End times of the plans in flight at the start, which decode the same sequences, then of its steps."""
    depth: int
    """Plans in flight; one less when the first step is planned."""
    waiting: Mapping[str, int]
    """Waiting requests meanwhile, by service."""
    running: Mapping[str, int]
    """Running requests meanwhile, by service, also those whose weights are absent."""

    @property
    def due_ns(self) -> int:
        """When the first step after these is to be planned."""
        return self.ends_ns[-self.depth]

    def ended(self, now_ns: int) -> int:
        """Number of steps whose plans have ended by now."""
        ended = bisect_right(self.ends_ns, now_ns)
        if ended == len(self.ends_ns):
            return ended
        return ended - ended % self.run.max_iterations

    def planned_ns(self, step: int) -> int:
        """When a step is planned, if a plan begins with it."""
        return self.ends_ns[step - 1] if step else self.start_ns

    def cut(self, now_ns: int) -> None:
        """Keep only steps planned before now."""
        cut_after(self.ends_ns, now_ns, self.depth - 1)
