"""What a batch former is, and what it is told."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.static.batching.estimates import MemoryLimit, ServingTime
from shoal.static.batching.types import StaticBatch, StaticRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Forming:
    """Estimates and limits under which batches are formed."""

    time: ServingTime
    """How long a batch takes."""
    memory: MemoryLimit
    """Whether a batch fits."""
    slice_tokens: int | None = None
    """Most iterations of a batch; None: as many as its requests may need."""
    max_batch: int | None = None
    """Most requests in a batch; None: as many as fit."""
    trust_predictions: bool = False
    """A batch runs for the longest prediction in it, not for the longest limit."""
    mean_slo_s: float = 1.0
    """Mean goal of all requests submitted so far, the unit of goals; also the goal of those without any."""
    mean_predicted: float = 1.0
    """Mean predicted output tokens of all requests submitted so far, the unit of lengths."""

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
        longest = max(request.tokens for request in requests)
        iterations = max(self.horizon(request) for request in requests)
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
