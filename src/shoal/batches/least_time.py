"""Batch former: batches with minimal total serving time, by dynamic programming (SCLS, algorithm 1)."""

import math
from collections.abc import Sequence

from shoal.batches.forming import FormingContext
from shoal.batches.requests import PooledRequest, RequestBatch


class LeastTime:
    """Sorts requests by input length and cuts the sorted list so that the estimated total time is minimal.

    Dynamic programming over the cuts, with n x (largest batch that fits) estimates. If every batch runs for a
    whole slice, and its cost does not decrease with its longest input, then no other partition is cheaper:
    sort the batches of any partition by their longest input, and refill them from the sorted list with the
    same sizes; then no batch has a longer input than before. Requests with less than a slice left may need
    different numbers of iterations; the result is then optimal only among cuts of the sorted list.
    """

    def form(self, requests: Sequence[PooledRequest], context: FormingContext) -> list[RequestBatch]:
        """Shortest inputs first; ties go to the cut with the smaller last batch."""
        ranked = sorted(requests, key=lambda request: request.tokens)
        starts = _best_starts(ranked, context)
        batches = []
        end = len(ranked)
        while end:
            batches.append(context.batch(ranked[starts[end] : end]))
            end = starts[end]
        return batches[::-1]


def _best_starts(ranked: Sequence[PooledRequest], context: FormingContext) -> list[int]:
    """For each number of leading requests, the start of the last batch in their best partition."""
    iterations_by_request = [context.needed_iterations(request) for request in ranked]
    serve = context.time.serve
    least = [0.0] + [math.inf] * len(ranked)
    starts = [0] * (len(ranked) + 1)
    for end, longest in enumerate((request.tokens for request in ranked), start=1):
        iterations = 0
        for start in range(end - 1, -1, -1):
            iterations = max(iterations, iterations_by_request[start])
            size = end - start
            if not context.fits(size, longest, iterations):
                break
            total = least[start] + serve(size, longest, iterations)
            if total < least[end]:
                least[end], starts[end] = total, start
    return starts
