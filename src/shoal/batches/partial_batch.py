"""A partial batch, to which formers add one request at a time while it fits."""

from shoal.batches.forming import FormingContext
from shoal.batches.requests import PooledRequest, RequestBatch


class PartialBatch:
    """The requests so far, and the padded length and iterations of their batch."""

    def __init__(self, first: PooledRequest, context: FormingContext) -> None:
        self._context = context
        self._requests = [first]
        self._longest = first.tokens
        self._iterations = context.needed_iterations(first)

    def __len__(self) -> int:
        return len(self._requests)

    def has_room(self, request: PooledRequest) -> bool:
        """Whether the batch fits with one more request."""
        return self._context.fits(
            len(self._requests) + 1,
            max(self._longest, request.tokens),
            max(self._iterations, self._context.needed_iterations(request)),
        )

    def add(self, request: PooledRequest) -> None:
        self._requests.append(request)
        self._longest = max(self._longest, request.tokens)
        self._iterations = max(self._iterations, self._context.needed_iterations(request))

    def to_batch(self) -> RequestBatch:
        return self._context.batch(self._requests)
