"""The executor protocol: the only thing that differs between a GPU, a CPU and a simulator."""

from collections.abc import Callable, Sequence
from typing import Protocol

from shoal.core import StepPlan, StepResult

Interrupted = Callable[[], bool]
"""Whether an arrival or a cancellation waits for the scheduler to be told; answers at once."""


def never() -> bool:
    """Nothing ever waits."""
    return False


class StepFailed(Exception):
    """A plan's forward pass or sampling failed, and the executor can go on; the message says how.

    Its copies and changes of the batch were carried out. KV was written for none but its new tokens, and
    none of its iterations counts.
    """


class Executor(Protocol):
    """Runs plans in the order in which they are submitted."""

    def submit(self, plan: StepPlan, interrupted: Interrupted = never) -> None:
        """Start a plan, or queue it behind those in flight; waits for it only if this thread computes it.

        interrupted: asked between the iterations of a plan; where it says so, no more of them are made. The
        last is also one in which a sequence gets its last token, or none.
        """

    def collect(self) -> StepResult:
        """Wait for the oldest plan in flight and return what it produced; its errors are raised here.

        Of a plan without rows that is one iteration without tokens.

        Raises:
            StepFailed: it was not completed. Of those in flight behind it, which may build on it, only the
                copies and the changes of the batch are carried out; collecting them raises the same. Plans
                submitted after all of them were collected run again.
            Exception: any other error leaves an unknown state; the executor can only be closed.
        """

    def ready(self, seq_ids: Sequence[int]) -> Sequence[int]:
        """Which of these sequences, whose rows were postponed, can be sampled now; answers at once.

        Also while plans are in flight. One that has left is ready.
        """

    def read_blocks(self, service: str, blocks: Sequence[int]) -> memoryview:
        """A copy of the KV in some of a service's blocks, one after the other, without padding.

        No plan is in flight, as in ``write_blocks``.
        """

    def write_blocks(self, service: str, blocks: Sequence[int], content: memoryview) -> None:
        """Write what another engine has read, of blocks of the same form.

        Raises ValueError, and writes nothing, where it is not of the size of so many blocks.
        """

    def close(self) -> None:
        """Release threads and memory; plans in flight are abandoned."""
