"""Decode steps that an engine of a simulation will make if nothing happens."""

from bisect import bisect_right
from dataclasses import dataclass

from shoal.execute.simulated import cut_after
from shoal.schedule.decode_runs import DecodeRun


@dataclass(slots=True)
class StepsAhead:
    """A run of decode steps that lies ahead and is not committed yet: an arrival may cut it short.

    A step is planned as soon as fewer than ``depth`` plans are in flight: when the last but ``depth - 1`` of
    those before it has ended.
    """

    run: DecodeRun
    """As the scheduler says."""
    start_ns: int
    """When its first step is planned."""
    ends_ns: list[int]
    """When the plans end that are in flight then, decodes of the same sequences, and after them its steps."""
    depth: int
    """Plans in flight: one less when the first step is planned."""
    waiting: int
    """Requests that wait meanwhile."""

    @property
    def due_ns(self) -> int:
        """When the next step is to be planned that is not one of these."""
        return self.ends_ns[-self.depth]

    def ended(self, now_ns: int) -> int:
        """How many steps of plans that have ended there are by now."""
        ended = bisect_right(self.ends_ns, now_ns)
        if ended == len(self.ends_ns):
            return ended
        return ended - ended % self.run.max_iterations

    def planned_ns(self, step: int) -> int:
        """When a step of the run is planned, if a plan begins with it."""
        return self.ends_ns[step - 1] if step else self.start_ns

    def cut(self, now_ns: int) -> None:
        """Leave only what is planned by now, not what would be planned at this very moment."""
        cut_after(self.ends_ns, now_ns, self.depth - 1)
