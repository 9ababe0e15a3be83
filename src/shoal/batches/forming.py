"""The interface of batch formers, and the estimates and limits under which they form batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.batches.estimates import MemoryLimit, ServingTime
from shoal.batches.requests import PooledRequest, RequestBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class FormingContext:
    """Estimates and limits under which batches are formed."""

    time: ServingTime
    memory: MemoryLimit
    slice_tokens: int | None = None
    """Maximum iterations of a batch; None: as many as its requests may need."""
    max_batch: int | None = None
    """Maximum requests in a batch; None: as many as fit."""
    trust_predictions: bool = False
    """Iterations of a batch follow from predicted output lengths, not from limits."""
    mean_slo_s: float = 1.0
    """Mean goal of all requests submitted so far: the unit of goals, and the goal of requests without one."""
    mean_predicted: float = 1.0
    """Mean predicted output tokens of all requests submitted so far: the unit of lengths."""

    def needed_iterations(self, request: PooledRequest) -> int:
        """Iterations that a request needs; a batch runs for the maximum over its requests."""
        wanted = request.predicted if self.trust_predictions else request.remaining
        return wanted if self.slice_tokens is None else min(wanted, self.slice_tokens)

    def fits(self, size: int, input_tokens: int, iterations: int) -> bool:
        """Whether such a batch is allowed. A single request always is: its submission checked it."""
        if size == 1:
            return True
        if self.max_batch is not None and size > self.max_batch:
            return False
        return self.memory.fits(size, input_tokens, iterations)

    def batch(self, requests: Sequence[PooledRequest]) -> RequestBatch:
        """The batch of these requests, with padded length, iterations and estimate."""
        longest = max(request.tokens for request in requests)
        iterations = max(self.needed_iterations(request) for request in requests)
        return RequestBatch(
            requests=tuple(requests),
            input_tokens=longest,
            iterations=iterations,
            estimate_s=self.time.serve(len(requests), longest, iterations),
        )


class BatchFormer(Protocol):
    """Divides requests into batches; has parameters, but no state."""

    def form(self, requests: Sequence[PooledRequest], context: FormingContext) -> list[RequestBatch]:
        """Put every request in exactly one batch that fits; returns batches in the order of service.

        requests: in the order of their arrival in the pool.
        """
        ...
