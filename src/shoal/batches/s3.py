"""Batch former: bin packing by predicted memory (S3: Jin et al., 2023; UELLM's baseline)."""

from collections.abc import Sequence

from shoal.batches.forming import FormingContext
from shoal.batches.partial_batch import PartialBatch
from shoal.batches.requests import PooledRequest, RequestBatch


class FirstFitDecreasing:
    """Requests by predicted memory, largest first, each into the first batch where it fits.

    Predicted memory is input plus predicted output. A batch must fit with padding, because a static engine
    stores it; with requests of equal lengths this is plain first-fit-decreasing.
    """

    def form(self, requests: Sequence[PooledRequest], context: FormingContext) -> list[RequestBatch]:
        """Batches in the order of their first requests."""
        bins: list[PartialBatch] = []
        for request in sorted(requests, key=lambda request: -(request.tokens + request.predicted)):
            fitting = next((batch for batch in bins if batch.has_room(request)), None)
            if fitting is None:
                bins.append(PartialBatch(request, context))
            else:
                fitting.add(request)
        return [batch.to_batch() for batch in bins]
