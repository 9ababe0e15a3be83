"""Batches of a fixed size, first come first served."""

from collections.abc import Sequence

from shoal.static.batching.filling import Filling
from shoal.static.batching.forming import Forming
from shoal.static.batching.types import StaticBatch, StaticRequest


class Fixed:
    """Fills batch after batch, up to ``max_batch`` or what fits, in the order of the pool."""

    def form(self, requests: Sequence[StaticRequest], forming: Forming) -> list[StaticBatch]:
        """First come, first served."""
        batches: list[Filling] = []
        for request in requests:
            if batches and batches[-1].has_room(request):
                batches[-1].add(request)
            else:
                batches.append(Filling(request, forming))
        return [batch.close() for batch in batches]
