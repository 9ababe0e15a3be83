"""The steps of an engine: how many were planned, and which plans are in flight."""

from collections import deque
from collections.abc import Callable

from shoal.core import StepPlan
from shoal.schedule.planning import InFlightStep


class Steps:
    """Plans in the order in which they were made."""

    def __init__(self) -> None:
        self.planned = 0
        """Steps planned so far, each iteration of a plan counted."""
        self.in_flight: deque[InFlightStep] = deque()
        """Plans made and not yet updated, the oldest first."""
        self.epoch = 0
        """Goes up with everything that happens; in the same epoch a second look is the same as the first."""
        self.on_steps: Callable[[int, int], None] | None = None
        """Told of the first step of each plan, and of how many at most it has, for the same requests."""

    def note(self, something: bool) -> bool:
        """Note that ``something`` happened, if it did."""
        self.epoch += something
        return something

    def tell(self, steps: int) -> None:
        """The next plan has so many steps at most."""
        if self.on_steps is not None:
            self.on_steps(self.planned, steps)

    def begin(self, step: InFlightStep) -> StepPlan:
        """A plan was made; returns it."""
        self.in_flight.append(step)
        self.planned += step.plan.iterations
        self.epoch += 1
        return step.plan

    def finish_oldest(self, iterations: int) -> tuple[InFlightStep, int]:
        """The oldest plan in flight is over after so many iterations; also returns how many were not made."""
        step = self.in_flight.popleft()
        self.epoch += 1
        missing = step.plan.iterations - iterations
        self.planned -= missing
        return step, missing
