"""Traffic statistics of one service over sliding windows: arrival rate, lengths, execution time, latency."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.core import ConfigError

NS = 1_000_000_000
MIN_SPAN_NS = NS
"""Minimum span of a rate; the first two arrivals could otherwise give thousands per second."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and population standard deviation."""

    mean: float
    deviation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Traffic of one service over its sliding windows; None without data."""

    finished: int
    """Finished requests in the window of requests, as for the next three fields."""
    prompt_tokens: Spread | None
    output_tokens: Spread | None
    execution_s: Spread
    """Sum of the durations of a request's steps; the prior before data."""
    arrivals_per_s: float
    """Over the time window, as for the following fields."""
    latency_s: float | None
    """Mean end-to-end latency."""
    ttft_s: float | None
    """Mean."""
    attainment: float | None
    """Share of the requests with goals that met them."""


@dataclass(frozen=True, slots=True)
class _Finished:
    finish_ns: int
    prompt_tokens: int
    output_tokens: int
    execution_ns: int
    """Sum of the durations of its steps."""
    latency_ns: int
    """Arrival to last token."""
    ttft_ns: int
    met: bool | None
    """Whether it met its goals; None without goals."""


@dataclass(slots=True)
class _Sums:
    """Sums of integers, which are exact, so that values can be removed without error."""

    count: int = 0
    total: int = 0
    squares: int = 0

    def add(self, value: int, times: int = 1) -> None:
        """Add a value, or remove it with ``times`` -1."""
        self.count += times
        self.total += times * value
        self.squares += times * value * value

    def spread(self, unit: int = 1) -> Spread | None:
        """Mean and deviation in multiples of ``unit``; None without values."""
        if self.count == 0:
            return None
        scale = self.count * unit
        return Spread(self.total / scale, math.sqrt(self.count * self.squares - self.total**2) / scale)


class ServiceMonitor:
    """Arrivals and finished requests of one service over sliding windows; has no clock.

    prior_execution_s: execution time before the first request has finished. window_requests: window of
    lengths and execution times. window_s: window of arrivals, latencies and attainment.
    """

    def __init__(
        self, prior_execution_s: float = 1.0, window_requests: int = 1000, window_s: float = 600.0
    ) -> None:
        if window_requests < 1:
            raise ConfigError(f"window_requests must be at least 1 request, got {window_requests}")
        if not window_s > 0:
            raise ConfigError(f"window_s must be above 0 seconds, got {window_s}")
        self._prior = Spread(prior_execution_s, 0.0)
        self._window_requests = window_requests
        self._window_ns = round(window_s * NS)
        self._first_arrival_ns: int | None = None
        self._arrivals: deque[int] = deque()
        self._finished: deque[_Finished] = deque()
        self._prompts, self._outputs, self._executions = _Sums(), _Sums(), _Sums()

    def arrived(self, now_ns: int) -> None:
        if self._first_arrival_ns is None:
            self._first_arrival_ns = now_ns
        self._arrivals.append(now_ns)
        self._forget_arrivals(now_ns)

    def finished(
        self,
        now_ns: int,
        prompt_tokens: int,
        output_tokens: int,
        execution_ns: int,
        arrival_ns: int,
        first_token_ns: int,
        met: bool | None,
    ) -> None:
        """Count a finished request (not a cancelled or failed one).

        execution_ns: sum of the durations of its steps. met: whether it met its goals; None without goals.
        """
        if len(self._finished) == self._window_requests:
            self._count(self._finished.popleft(), times=-1)
        request = _Finished(
            now_ns,
            prompt_tokens,
            output_tokens,
            execution_ns,
            now_ns - arrival_ns,
            first_token_ns - arrival_ns,
            met,
        )
        self._finished.append(request)
        self._count(request, times=1)

    @property
    def execution(self) -> tuple[float, float]:
        """Mean and standard deviation of execution time in seconds, in O(1); (prior, 0) before data."""
        spread = self._executions.spread(NS) or self._prior
        return spread.mean, spread.deviation

    def snapshot(self, now_ns: int) -> Traffic:
        """Statistics at ``now_ns``, which must not be earlier than the last event."""
        self._forget_arrivals(now_ns)
        recent = [request for request in self._finished if request.finish_ns > now_ns - self._window_ns]
        return Traffic(
            finished=len(self._finished),
            prompt_tokens=self._prompts.spread(),
            output_tokens=self._outputs.spread(),
            execution_s=self._executions.spread(NS) or self._prior,
            arrivals_per_s=self._rate(now_ns),
            latency_s=_mean([request.latency_ns / NS for request in recent]),
            ttft_s=_mean([request.ttft_ns / NS for request in recent]),
            attainment=_mean([request.met for request in recent if request.met is not None]),
        )

    def _count(self, request: _Finished, times: int) -> None:
        self._prompts.add(request.prompt_tokens, times)
        self._outputs.add(request.output_tokens, times)
        self._executions.add(request.execution_ns, times)

    def _forget_arrivals(self, now_ns: int) -> None:
        while self._arrivals and self._arrivals[0] <= now_ns - self._window_ns:
            self._arrivals.popleft()

    def _rate(self, now_ns: int) -> float:
        """Arrivals per second over the window, or since the first arrival if that is shorter."""
        if self._first_arrival_ns is None:
            return 0.0
        span_ns = min(self._window_ns, max(MIN_SPAN_NS, now_ns - self._first_arrival_ns))
        return len(self._arrivals) * NS / span_ns


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
