"""What a service's recent traffic is like."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core import Request
from shoal.forecast import StepRows, StepTimes

StepTimesOf = Callable[[str, str, int], StepTimes]
"""Step times of a service, on devices of a kind, so many of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLoad:
    """What a service's recent traffic is like, and what is wanted for it."""

    requests: int
    """How many came."""
    rate_per_s: float
    """How many come in a second."""
    prompt_tokens: float
    """Mean prompt."""
    output_tokens: float
    """Mean output, at least one token."""
    execution_s: float
    """L^: what a mean request takes alone on one device."""
    goal_s: float
    """The latency within which a request is served."""
    arrival_cv: float = 1.0
    """Coefficient of variation of the times between requests; a Poisson process has 1."""


def load_of(requests: Sequence[Request], window_s: float, execution_s: float, goal_s: float) -> ServiceLoad:
    """The load of a service's requests, whose output lengths are known, over a window of time.

    Without requests there is next to none.
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


def alone_s(times: StepTimes, prompt_tokens: int, output_tokens: int) -> float:
    """Seconds of a request that runs alone: its prompt in one step, then a step for every further token."""
    prefill_s = times.step_time(StepRows(0, 0, ((prompt_tokens, 0),), 1))
    return prefill_s + float(times.decode_times(1, prompt_tokens + 1, max(1, output_tokens - 1)).sum())
