"""Admission policies: is there enough memory to admit one more request?

They differ in the output lengths that they assume: the maximum (conservative), no further tokens
(aggressive), samples from recent outputs (past-future), predictions of a length predictor (predicted), the
true lengths (oracle), the next few tokens only (slice); ``batch`` admits one batch at a time. Memory is
counted in merged blocks. Past-Future scheduler: Gong et al., sections 3.1 to 3.3.

Admission policies ignore fragmentation: free blocks inside another service's merged blocks count as free,
since compaction can free them.
"""

from collections.abc import Mapping

from shoal.core import lookup
from shoal.schedule.policies.admissions.base import Admission
from shoal.schedule.policies.admissions.forecasting import Forecasting, Oracle, PastFuture, Predicted
from shoal.schedule.policies.admissions.token_sums import Aggressive, Batch, Conservative, Slice

ADMISSIONS: Mapping[str, type[Admission]] = {
    "conservative": Conservative,
    "aggressive": Aggressive,
    "past-future": PastFuture,
    "predicted": Predicted,
    "slice": Slice,
    "batch": Batch,
    "oracle": Oracle,
}


def admission_class(name: str) -> type[Admission]:
    """Raises ConfigError with the possible names if ``name`` is unknown."""
    return lookup("admission policy", ADMISSIONS, name)


__all__ = [
    "ADMISSIONS",
    "Admission",
    "Aggressive",
    "Batch",
    "Conservative",
    "Forecasting",
    "Oracle",
    "PastFuture",
    "Predicted",
    "Slice",
    "admission_class",
]
