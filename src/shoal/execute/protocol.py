"""The Executor protocol: submit plans and collect results; implemented for torch and for simulation."""

from collections.abc import Callable, Sequence
from typing import Protocol

from shoal.core import Arrival, StepPlan, StepResult

Interrupted = Callable[[], bool]
"""Whether an arrival or a cancellation is waiting for the scheduler; returns at once."""


def never() -> bool:
    """An ``Interrupted`` that never interrupts."""
    return False


class StepFailed(Exception):
    """A plan's forward pass or sampling failed, and the executor can go on; the message has the error.

    The plan's copies and batch changes were applied. KV was written only for its new tokens, and none of its
    iterations counts.
    """


class WeightsAbsent(RuntimeError):
    """A plan has rows of a service whose weights are not in memory: an error of the scheduler."""


class Executor(Protocol):
    """Runs plans in the order in which they are submitted."""

    def submit(self, plan: StepPlan, interrupted: Interrupted = never) -> None:
        """Start a plan, or queue it behind those in flight; waits for it only if this thread computes it.

        interrupted: called between the iterations of a plan; if True, no more iterations are run. An
        iteration in which a sequence ends or gets no token is also the last.
        """

    def collect(self) -> StepResult:
        """Wait for the oldest plan in flight and return its result; its errors are raised here.

        The result of a plan without rows is one iteration without tokens.

        Raises:
            StepFailed: the plan was not completed. Of plans in flight behind it, which may depend on it, only
                copies and batch changes are applied; collecting them raises StepFailed, too. Plans that are
                submitted after all of them were collected run normally.
            Exception: any other error leaves an unknown state; the executor can only be closed.
        """

    def ready(self, seq_ids: Sequence[int]) -> Sequence[int]:
        """Which of these sequences, whose rows were postponed, can be sampled now; returns at once.

        May be called while plans are in flight. A sequence that has left is ready.
        """

    def arrivals(self) -> Sequence[Arrival]:
        """Weights of ``StepPlan.fetch`` that have come, or failed to, since the last call; returns at once.

        May be called while plans are in flight. An arrival ends a plan's iterations early.
        """

    def read_blocks(self, service: str, blocks: Sequence[int]) -> memoryview:
        """A copy of the KV of some of a service's blocks, one after the other, without padding.

        As for ``write_blocks``, no plan may be in flight.
        """

    def write_blocks(self, service: str, blocks: Sequence[int], content: memoryview) -> None:
        """Write KV that another engine read from blocks of the same layout.

        Raises ValueError, and writes nothing, if ``content`` does not have the size of the blocks.
        """

    def close(self) -> None:
        """Release threads and memory; plans in flight are abandoned."""
