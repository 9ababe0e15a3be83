"""The report of a run of static batches: throughput, response times, wasted tokens (SCLS, section 5)."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean, pstdev
from typing import Any

from experiments.padded.account import BatchAccount, account
from experiments.padded.executor import StaticResult
from shoal.batches import RequestBatch
from shoal.core import RequestRecord, percentile


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticReport:
    """The figures of one run; NaN if nothing was measured."""

    requests: int
    finished: int
    failed: int
    batches: int
    mean_batch_size: float
    duration_s: float
    """Start to last response."""
    requests_per_s: float
    """Finished requests per second."""
    tokens_per_s: float
    """Output tokens of finished requests per second."""
    response_mean_s: float
    """End-to-end latency of finished requests."""
    response_p95_s: float
    tokens: BatchAccount
    """Sums over all batches."""
    slices: Mapping[int, int]
    """Number of requests by number of batches that they were in."""
    early_return_ratio: float
    """Share of batches that ended before their limit because all their requests had ended."""
    worker_completion_s: tuple[float, ...]
    """When each worker finished its last batch; 0 if it had none."""
    worker_completion_std_s: float
    """Standard deviation of ``worker_completion_s``."""
    estimate_error: float
    """Mean of |estimated - measured| / measured serving time, of batches that ran to their limit."""

    def to_json(self) -> dict[str, Any]:
        """As plain values; NaN becomes None, because JSON has no NaN."""
        plain = asdict(self) | {"slices": {str(n): count for n, count in sorted(self.slices.items())}}
        return {
            key: None if isinstance(value, float) and math.isnan(value) else value
            for key, value in plain.items()
        }


class StaticTally:
    """Accumulates the figures of finished batches."""

    def __init__(self) -> None:
        self._accounts: list[BatchAccount] = []
        self._sizes: list[int] = []
        self._errors: list[float] = []
        self._early = 0

    def add(self, batch: RequestBatch, result: StaticResult, used: Sequence[int]) -> None:
        """Add a finished batch; used: its output tokens that belong to each request's response."""
        self._accounts.append(account(batch, used, result.iterations_run))
        self._sizes.append(len(batch))
        if result.iterations_run < batch.iterations:
            self._early += 1
        else:
            measured_s = result.duration_ns / 1e9
            self._errors.append(abs(batch.estimate_s - measured_s) / measured_s)

    def report(
        self,
        records: Sequence[RequestRecord],
        failed: int,
        slices: Counter[int],
        completed_ns: Sequence[int | None],
        duration_ns: int,
    ) -> StaticReport:
        """The figures of the run; records: of its finished requests."""
        duration_s = duration_ns / 1e9
        responses = [record.e2e_s for record in records]
        completions = tuple((end_ns or 0) / 1e9 for end_ns in completed_ns)
        sums = {
            field.name: sum(getattr(batch_account, field.name) for batch_account in self._accounts)
            for field in fields(BatchAccount)
        }
        return StaticReport(
            requests=len(records) + failed,
            finished=len(records),
            failed=failed,
            batches=len(self._sizes),
            mean_batch_size=_mean(self._sizes),
            duration_s=duration_s,
            requests_per_s=len(records) / duration_s if duration_s else math.nan,
            tokens_per_s=sum(record.output_tokens for record in records) / duration_s
            if duration_s
            else math.nan,
            response_mean_s=_mean(responses),
            response_p95_s=percentile(responses, 95),
            tokens=BatchAccount(**sums),
            slices=dict(sorted(slices.items())),
            early_return_ratio=self._early / len(self._sizes) if self._sizes else math.nan,
            worker_completion_s=completions,
            worker_completion_std_s=pstdev(completions),
            estimate_error=_mean(self._errors),
        )


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan
