"""Latency metrics: TTFT, time per output token, MTPOT, end-to-end and normalised latency, percentiles."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """Times and counts of one finished request; all times are on one clock."""

    request_id: str
    service: str
    arrival_ns: int
    first_token_ns: int
    """When the observer received the first token."""
    finish_ns: int
    """When the observer received the last token."""
    prompt_tokens: int
    output_tokens: int
    largest_gap_ns: int = 0
    """Largest inter-token latency (MTPOT); 0 for an output of one token, and where it is not known."""

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return (self.first_token_ns - self.arrival_ns) / 1e9

    @property
    def e2e_s(self) -> float:
        """Arrival to last token."""
        return (self.finish_ns - self.arrival_ns) / 1e9

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first; 0 for an output of one token."""
        if self.output_tokens < 2:
            return 0.0
        return (self.finish_ns - self.first_token_ns) / 1e9 / (self.output_tokens - 1)

    @property
    def mtpot_s(self) -> float:
        """Largest inter-token latency; 0 for an output of one token."""
        return self.largest_gap_ns / 1e9


def normalised_latency(record: RequestRecord, execution_s: float) -> float:
    """End-to-end latency divided by ``execution_s``, the time that the service's mean request takes alone.

    ``execution_s`` must be the same in all runs that are compared. SeaLLM's equation 1 is the mean over
    requests.
    """
    return record.e2e_s / execution_s


def percentile(values: Sequence[float], percent: float) -> float:
    """Linearly interpolated percentile (0-100) of ``values``; NaN if there are none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)
