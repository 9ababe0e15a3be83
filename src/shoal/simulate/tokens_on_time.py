"""TokensOnTime: counts the tokens of simulated requests that come within their deadlines."""

from collections.abc import Mapping, Sequence

import numpy as np

from shoal.core import StepPlan
from shoal.schedule.policies.view import ServiceView
from shoal.schedule.running_batch import RequestTable


class TokensOnTime:
    """Tokens within their deadlines (``TokenDeadlines``), by request, over all engines of a simulation."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def count(self, services: Mapping[str, ServiceView], plan: StepPlan, ends_ns: Sequence[int]) -> None:
        """Count the tokens of a plan before the scheduler is updated with its result.

        ends_ns: end of each iteration, with which each sampled row has a token.
        """
        if not plan.sampled:
            return
        for service, own in plan.rows_by_service():
            batch = services[service].running
            if not len(batch) or np.isnan(batch.ttft_s + batch.tpot_s).all():
                continue
            seq_ids = np.array([plan.seq_ids[row] for row in plan.sampled if own.start <= row < own.stop])
            rows = np.minimum(batch.seq_id.searchsorted(seq_ids), len(batch) - 1)
            still_running = batch.seq_id[rows] == seq_ids
            self._count(batch.take(rows[still_running]), ends_ns)

    def _count(self, rows: RequestTable, ends_ns: Sequence[int]) -> None:
        numbers = rows.num_generated[:, None] + np.arange(len(ends_ns))
        after_s = rows.ttft_s[:, None] + numbers * rows.tpot_s[:, None]
        late_ns = np.array(ends_ns) - rows.arrival_ns[:, None]
        on_time = (late_ns <= np.rint(after_s * 1e9)).sum(axis=1)  # not a number without goals: false
        for request, count in zip(rows.requests, on_time.tolist(), strict=True):
            if count:
                name = request.request.id
                self._counts[name] = self._counts.get(name, 0) + count

    def take(self, request: str) -> int:
        """The number of a request that has ended."""
        return self._counts.pop(request, 0)
