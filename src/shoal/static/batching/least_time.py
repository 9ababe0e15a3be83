"""Batches of least total serving time (SCLS, algorithm 1)."""

import math
from collections.abc import Sequence

from shoal.static.batching.forming import Forming
from shoal.static.batching.types import StaticBatch, StaticRequest


class LeastTime:
    """Sorts requests by input length and cuts the sorted list where the estimated total time is least.

    Dynamic programming over the cuts: n x the largest batch that fits, estimates. Where the cost of a batch
    depends on its size and does not fall with its longest input, no other division of the requests is
    cheaper: sort any division's batches by their longest input and refill them, sizes kept, from the sorted
    list; no batch then has a longer input than before. That holds where every batch runs for a whole
    slice. Requests with less than a slice left may also differ in the iterations they need; the result
    is then the best among cuts of the sorted list only.
    """

    def form(self, requests: Sequence[StaticRequest], forming: Forming) -> list[StaticBatch]:
        """Of equally good cuts the one with the smaller last batch; shortest inputs first."""
        ranked = sorted(requests, key=lambda request: request.tokens)
        starts = _best_starts(ranked, forming)
        batches = []
        end = len(ranked)
        while end:
            batches.append(forming.batch(ranked[starts[end] : end]))
            end = starts[end]
        return batches[::-1]


def _best_starts(ranked: Sequence[StaticRequest], forming: Forming) -> list[int]:
    """For every count of leading requests, where the last batch of their best division starts."""
    horizons = [forming.horizon(request) for request in ranked]
    serve = forming.time.serve
    least = [0.0] + [math.inf] * len(ranked)
    starts = [0] * (len(ranked) + 1)
    for end, longest in enumerate((request.tokens for request in ranked), start=1):
        iterations = 0
        for start in range(end - 1, -1, -1):
            iterations = max(iterations, horizons[start])
            size = end - start
            if not forming.fits(size, longest, iterations):
                break
            total = least[start] + serve(size, longest, iterations)
            if total < least[end]:
                least[end], starts[end] = total, start
    return starts
