"""Plans in flight, with their requests; numbers of planned steps."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.core import StepPlan
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import Rows, RunningBatch


class PlannedRows(NamedTuple):
    """The rows of one service in a plan in flight, with their requests."""

    plan: StepPlan
    """A plan of these rows alone; without co-batching, the plan itself."""
    requests: Sequence[RequestState]
    """By row of the plan."""
    rows: Rows
    """Rows in the running batch, valid until a request is removed from it."""
    num_removals: int
    """Of the batch, when the plan was made."""


class InFlightStep(NamedTuple):
    """A plan in flight."""

    plan: StepPlan
    parts: Sequence[PlannedRows]
    """The rows of its service, then those of each co-batched service."""
    pinned_blocks: list[int]
    """Blocks of its service that stay referenced until the update, as sources of copies."""
    swapped_blocks: list[int]
    """Host blocks of its service that stay referenced until the update."""

    def decodes_all(self, batch: RunningBatch) -> bool:
        """Whether it decodes exactly the requests of ``batch``, and its update frees no block."""
        plan, rows = self.plan, len(batch)
        if len(self.parts) > 1 or self.pinned_blocks or self.swapped_blocks:
            return False
        each_one = len(plan.sampled) == len(plan.seq_ids) == rows == plan.new_tokens.count(1)
        return each_one and plan.seq_ids == tuple(batch.seq_id.tolist())


class StepTracker:
    """Plans in flight, the number of planned steps, and the epoch of the scheduler's state."""

    def __init__(self) -> None:
        self.planned = 0
        """Steps planned so far, counting each iteration of a plan."""
        self.in_flight: deque[InFlightStep] = deque()
        """Plans without an update yet, oldest first."""
        self.epoch = 0
        """Increases with every change of state; within an epoch, scheduling again gives the same result."""
        self.on_steps: Callable[[int, int], None] | None = None
        """Called with the first step number and the maximum number of steps of each plan."""

    def mark_changed(self, changed: bool) -> bool:
        """Start a new epoch if ``changed``; returns ``changed``."""
        self.epoch += changed
        return changed

    def report(self, steps: int) -> None:
        """Report the next plan, of at most ``steps`` steps, to the listener."""
        if self.on_steps is not None:
            self.on_steps(self.planned, steps)

    def begin(self, step: InFlightStep) -> StepPlan:
        self.in_flight.append(step)
        self.planned += step.plan.iterations
        self.epoch += 1
        return step.plan

    def finish_oldest(self, iterations: int) -> tuple[InFlightStep, int]:
        """Remove the oldest plan in flight; also returns how many of its iterations were not done."""
        step = self.in_flight.popleft()
        self.epoch += 1
        missing = step.plan.iterations - iterations
        self.planned -= missing
        return step, missing
