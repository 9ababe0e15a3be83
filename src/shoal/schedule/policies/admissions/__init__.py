"""Admissions: is there memory for one more request?

One family over the question which output lengths to assume: the largest possible (conservative), none beyond
what is there (aggressive), those of the recent past (past-future), those that a length predictor gives each
request (predicted), the true ones (oracle), the next few tokens only (slice).
Memory is counted in merged blocks. Past-Future scheduler: Gong et al., sections 3.1 to 3.3.

No admission sees fragmentation: blocks that are free inside another service's merged blocks count as free,
and compaction makes them so.
"""

from collections.abc import Mapping

from shoal.core import lookup
from shoal.schedule.policies.admissions.base import Admission
from shoal.schedule.policies.admissions.forecasting import Forecasting, Oracle, PastFuture, Predicted
from shoal.schedule.policies.admissions.token_sums import Aggressive, Conservative, Slice

ADMISSIONS: Mapping[str, type[Admission]] = {
    "conservative": Conservative,
    "aggressive": Aggressive,
    "past-future": PastFuture,
    "predicted": Predicted,
    "slice": Slice,
    "oracle": Oracle,
}
"""Admissions by name."""


def admission_class(name: str) -> type[Admission]:
    """The admission called ``name``; raises ConfigError with the possible names."""
    return lookup("admission policy", ADMISSIONS, name)


__all__ = [
    "ADMISSIONS",
    "Admission",
    "Aggressive",
    "Conservative",
    "Forecasting",
    "Oracle",
    "PastFuture",
    "Predicted",
    "Slice",
    "admission_class",
]
