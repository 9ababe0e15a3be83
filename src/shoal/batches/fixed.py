"""Batch former: batches of a fixed size, first come first served."""

from collections.abc import Sequence

from shoal.batches.forming import FormingContext
from shoal.batches.partial_batch import PartialBatch
from shoal.batches.requests import PooledRequest, RequestBatch


class Fixed:
    """Fills one batch after the other in the order of the pool, up to ``max_batch`` or the memory."""

    def form(self, requests: Sequence[PooledRequest], context: FormingContext) -> list[RequestBatch]:
        batches: list[PartialBatch] = []
        for request in requests:
            if batches and batches[-1].has_room(request):
                batches[-1].add(request)
            else:
                batches.append(PartialBatch(request, context))
        return [batch.to_batch() for batch in batches]
