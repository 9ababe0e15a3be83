"""Batches as bin packing of predicted memory (S3: Jin et al., 2023; UELLM's baseline)."""

from collections.abc import Sequence

from shoal.static.batching.filling import Filling
from shoal.static.batching.forming import Forming
from shoal.static.batching.types import StaticBatch, StaticRequest


class FirstFitDecreasing:
    """Requests by predicted memory, largest first, each into the first batch that still has room for it.

    Predicted memory is that of input and predicted output. A batch has room if it fits padded, since that
    is what a static engine holds; among requests of equal lengths this is plain first-fit-decreasing.
    """

    def form(self, requests: Sequence[StaticRequest], forming: Forming) -> list[StaticBatch]:
        """Batches in the order in which they were opened."""
        bins: list[Filling] = []
        for request in sorted(requests, key=lambda request: -(request.tokens + request.predicted)):
            roomy = next((batch for batch in bins if batch.has_room(request)), None)
            if roomy is None:
                bins.append(Filling(request, forming))
            else:
                roomy.add(request)
        return [batch.close() for batch in bins]
