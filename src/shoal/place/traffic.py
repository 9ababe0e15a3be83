"""Statistics of a service's recent traffic: rate, lengths, burstiness."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core import SLO, Request
from shoal.forecast import StepRows, StepTimes

StepTimesOf = Callable[[str, str, int], StepTimes]
"""Step times by (service, kind of device, number of devices)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLoad:
    """Recent traffic of a service, and its latency goal."""

    requests: int
    """Number of requests."""
    rate_per_s: float
    prompt_tokens: float
    """Mean length."""
    output_tokens: float
    """Mean length, at least 1."""
    execution_s: float
    """L^: time of a mean request alone on one device."""
    goal_s: float
    """Goal for the end-to-end latency."""
    arrival_cv: float = 1.0
    """Coefficient of variation of inter-arrival times; 1 for a Poisson process."""


def load_of(requests: Sequence[Request], window_s: float, execution_s: float, goal_s: float) -> ServiceLoad:
    """The load of a service's requests, with known output lengths, over a time window.

    Without requests it is negligible, not zero.
    """
    if not requests:
        return ServiceLoad(
            requests=0,
            rate_per_s=1e-9,
            prompt_tokens=1,
            output_tokens=1,
            execution_s=execution_s,
            goal_s=goal_s,
        )
    gaps = np.diff([request.arrival_ns for request in requests])
    spread = float(gaps.std() / gaps.mean()) if len(gaps) > 1 and gaps.mean() > 0 else 1.0
    return ServiceLoad(
        requests=len(requests),
        rate_per_s=len(requests) / window_s,
        prompt_tokens=float(np.mean([len(request.prompt) for request in requests])),
        output_tokens=float(np.mean([request.true_output_tokens or 1 for request in requests])),
        execution_s=execution_s,
        goal_s=goal_s,
        arrival_cv=spread,
    )


def goal_of(slo: SLO, execution_s: float, output_tokens: float) -> float:
    """Goal for the end-to-end latency of a mean request in seconds, from all goals; infinite without any.

    execution_s: time of that request alone. output_tokens: its length.
    """
    goals = [slo.e2e_s, None if slo.e2e_scale is None else slo.e2e_scale * execution_s]
    per_token_s = [each for each in (slo.tpot_s, slo.mtpot_s) if each is not None]
    if per_token_s:
        goals.append((slo.ttft_s or execution_s) + min(per_token_s) * output_tokens)
    elif slo.ttft_s is not None:
        goals.append(slo.ttft_s + execution_s)
    return min((each for each in goals if each is not None), default=math.inf)


def alone_s(times: StepTimes, prompt_tokens: int, output_tokens: int) -> float:
    """Seconds of a request alone: its prompt in one step, then a step per further token."""
    prefill_s = times.step_time(StepRows(0, 0, ((prompt_tokens, 0),), 1))
    return prefill_s + float(times.decode_times(1, prompt_tokens + 1, max(1, output_tokens - 1)).sum())
