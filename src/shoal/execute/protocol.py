"""The executor protocol: the only thing that differs between a GPU, a CPU and a simulator."""

from typing import Protocol

from shoal.core import StepPlan, StepResult


class Executor(Protocol):
    """Runs plans in the order in which they are submitted."""

    def submit(self, plan: StepPlan) -> None:
        """Start a plan, or queue it behind those in flight; returns without waiting for it."""

    def collect(self) -> StepResult:
        """Wait for the oldest plan in flight and return what it produced; its errors are raised here."""

    def close(self) -> None:
        """Release threads and memory; plans in flight are abandoned."""
