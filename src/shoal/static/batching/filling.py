"""A batch that is being filled, one request at a time."""

from shoal.static.batching.forming import Forming
from shoal.static.batching.types import StaticBatch, StaticRequest


class Filling:
    """Requests so far, and what a padded batch of them would measure."""

    def __init__(self, first: StaticRequest, forming: Forming) -> None:
        self._forming = forming
        self._requests = [first]
        self._longest = first.tokens
        self._iterations = forming.horizon(first)

    def __len__(self) -> int:
        """Number of requests."""
        return len(self._requests)

    def has_room(self, request: StaticRequest) -> bool:
        """Whether the batch still fits with this one more."""
        return self._forming.fits(
            len(self._requests) + 1,
            max(self._longest, request.tokens),
            max(self._iterations, self._forming.horizon(request)),
        )

    def add(self, request: StaticRequest) -> None:
        """Put it in."""
        self._requests.append(request)
        self._longest = max(self._longest, request.tokens)
        self._iterations = max(self._iterations, self._forming.horizon(request))

    def close(self) -> StaticBatch:
        """The batch of these requests."""
        return self._forming.batch(self._requests)
