"""What a batch former is, and what it is told."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.static.batching.estimates import MemoryLimit, ServingTime
from shoal.static.batching.types import StaticBatch, StaticRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Forming:
    """Estimates and limits under which batches are formed.

    time, memory: cost of a batch. slice_tokens: most iterations of one batch; None: as many as its requests
    may need. max_batch: most requests in one batch; None: as many as fit.
    trust_predictions: a batch runs for the longest prediction in it, not for the longest limit.
    mean_slo_s, mean_predicted: running means over all requests submitted so far, the units in which
    goals and lengths are compared; a request without a goal counts as one with the mean goal.
    """

    time: ServingTime
    memory: MemoryLimit
    slice_tokens: int | None = None
    max_batch: int | None = None
    trust_predictions: bool = False
    mean_slo_s: float = 1.0
    mean_predicted: float = 1.0

    def horizon(self, request: StaticRequest) -> int:
        """Iterations that this request asks of its batch; a batch runs for the most that any asks."""
        wanted = request.predicted if self.trust_predictions else request.remaining
        return wanted if self.slice_tokens is None else min(wanted, self.slice_tokens)

    def fits(self, size: int, input_tokens: int, iterations: int) -> bool:
        """Whether such a batch is allowed. A request alone always is: its submission made sure of it."""
        if size == 1:
            return True
        if self.max_batch is not None and size > self.max_batch:
            return False
        return self.memory.fits(size, input_tokens, iterations)

    def batch(self, requests: Sequence[StaticRequest]) -> StaticBatch:
        """The batch of these requests, with its padded length, iterations and estimate."""
        longest = max(one.tokens for one in requests)
        iterations = max(self.horizon(one) for one in requests)
        return StaticBatch(
            requests=tuple(requests),
            input_tokens=longest,
            iterations=iterations,
            estimate_s=self.time.serve(len(requests), longest, iterations),
        )


class BatchFormer(Protocol):
    """Divides requests into batches; holds knobs, no state."""

    def form(self, requests: Sequence[StaticRequest], forming: Forming) -> list[StaticBatch]:
        """Every request in exactly one batch, each of which fits; the batch to serve first comes first.

        requests: in the order in which they came into the pool.
        """
        ...
