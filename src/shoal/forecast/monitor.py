"""One service's traffic as it was lately: what orders, re-placement and reports are fed with."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.core import ConfigError

NS = 1_000_000_000
SHORTEST_SPAN_NS = NS
"""A rate is never that of less than a second, or the first two arrivals could promise thousands."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and standard deviation (of all values, not estimated for more), in the values' unit."""

    mean: float
    deviation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One service over its sliding windows; None where nothing of the kind was seen.

    Of all finished requests that are remembered, whatever their age (``finished`` of them): prompt_tokens,
    output_tokens, execution_s (sum of the steps a request took part in; the prior before data).
    Over the time window: arrivals_per_s; and of requests finished within it mean latency_s (arrival to last
    token), mean ttft_s, and attainment, the share that met its goals among those that have goals.
    """

    finished: int
    prompt_tokens: Spread | None
    output_tokens: Spread | None
    execution_s: Spread
    arrivals_per_s: float
    latency_s: float | None
    ttft_s: float | None
    attainment: float | None


@dataclass(frozen=True, slots=True)
class _Finished:
    """One finished request; times in nanoseconds."""

    finish_ns: int
    prompt_tokens: int
    output_tokens: int
    execution_ns: int
    latency_ns: int
    ttft_ns: int
    met: bool | None


@dataclass(slots=True)
class _Sums:
    """Count, sum and sum of squares of whole numbers: exact, so that values can leave again for ever."""

    count: int = 0
    total: int = 0
    squares: int = 0

    def add(self, value: int, times: int = 1) -> None:
        """One value more, or with ``times`` -1 one less."""
        self.count += times
        self.total += times * value
        self.squares += times * value * value

    def spread(self, unit: int = 1) -> Spread | None:
        """Mean and deviation in multiples of ``unit``; None of no values."""
        if self.count == 0:
            return None
        scale = self.count * unit
        return Spread(self.total / scale, math.sqrt(self.count * self.squares - self.total**2) / scale)


class ServiceMonitor:
    """Arrivals and finished requests of one service over sliding windows; told the time, never asking it.

    prior_execution_s: execution time that is believed before the first request has finished.
    window_requests: finished requests that are remembered. window_s: age at which arrivals, latencies and
    attainment are forgotten, in seconds.
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
        """A request was submitted."""
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
        """A request has finished (never a cancelled or failed one).

        execution_ns: sum of the durations of the steps it took part in. met: whether it met its goals, None
        where it has none.
        """
        if len(self._finished) == self._window_requests:
            self._count(self._finished.popleft(), times=-1)
        one = _Finished(
            now_ns,
            prompt_tokens,
            output_tokens,
            execution_ns,
            now_ns - arrival_ns,
            first_token_ns - arrival_ns,
            met,
        )
        self._finished.append(one)
        self._count(one, times=1)

    @property
    def execution(self) -> tuple[float, float]:
        """Mean and standard deviation of the execution time, in seconds; (prior, 0) before data. O(1)."""
        spread = self._executions.spread(NS) or self._prior
        return spread.mean, spread.deviation

    def snapshot(self, now_ns: int) -> Traffic:
        """What the windows hold at ``now_ns``, which is not before anything that was reported."""
        self._forget_arrivals(now_ns)
        recent = [one for one in self._finished if one.finish_ns > now_ns - self._window_ns]
        return Traffic(
            finished=len(self._finished),
            prompt_tokens=self._prompts.spread(),
            output_tokens=self._outputs.spread(),
            execution_s=self._executions.spread(NS) or self._prior,
            arrivals_per_s=self._rate(now_ns),
            latency_s=_mean([one.latency_ns / NS for one in recent]),
            ttft_s=_mean([one.ttft_ns / NS for one in recent]),
            attainment=_mean([one.met for one in recent if one.met is not None]),
        )

    def _count(self, one: _Finished, times: int) -> None:
        self._prompts.add(one.prompt_tokens, times)
        self._outputs.add(one.output_tokens, times)
        self._executions.add(one.execution_ns, times)

    def _forget_arrivals(self, now_ns: int) -> None:
        while self._arrivals and self._arrivals[0] <= now_ns - self._window_ns:
            self._arrivals.popleft()

    def _rate(self, now_ns: int) -> float:
        """Arrivals a second over the window, or since the first arrival while that is less."""
        if self._first_arrival_ns is None:
            return 0.0
        span_ns = min(self._window_ns, max(SHORTEST_SPAN_NS, now_ns - self._first_arrival_ns))
        return len(self._arrivals) * NS / span_ns


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
