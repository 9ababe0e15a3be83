"""Step times of a running engine: fitted to a sample of its steps, or, with few of them, from its speed."""

from collections.abc import Sequence

from shoal.forecast.curve_fit import fit_curve
from shoal.forecast.latency import LatencyModel
from shoal.forecast.latency_fit import fit_latency
from shoal.forecast.step_times import FittedTimes, StepRows, StepTimes

LEAST_OF_EACH = 16
"""Steps with prompts, and steps without, that a fit needs."""
LEAST_FOR_CURVE = 128
"""Steps that the piecewise linear model needs, which has several times as many costs as the linear one."""


def times_from_speed(prefill_s: float, decode_s: float) -> StepTimes:
    """A linear model of a request that runs alone; prefill_s, decode_s: seconds per prompt and output token.

    A prompt is one step, and an output token is one step of one token, so that a token costs ``prefill_s``
    and a step the rest of ``decode_s``.
    """
    model = LatencyModel(
        constant_s=max(0.0, decode_s - prefill_s),
        sequence_s=0.0,
        token_s=prefill_s,
        context_s=0.0,
        work_s=0.0,
    )
    return FittedTimes(model)


def serving_times(rows: Sequence[StepRows], seconds: Sequence[float], otherwise: StepTimes) -> StepTimes:
    """Step times fitted to steps as they ran; otherwise: if there are too few of them.

    rows: the computation of each step. seconds: its duration, more than 0.
    """
    prompts = sum(bool(step.chunks) for step in rows)
    if min(prompts, len(rows) - prompts) < LEAST_OF_EACH:
        return otherwise
    if len(rows) < LEAST_FOR_CURVE:
        model, _ = fit_latency([step.shape for step in rows], seconds)
        fitted: StepTimes = FittedTimes(model)
    else:
        fitted, _ = fit_curve(rows, seconds)
    return fitted if _increases(fitted) else otherwise


def _increases(times: StepTimes) -> bool:
    """Whether steps take time, and many tokens more than few: else noise was fitted."""
    few, many = StepRows(1, 1, (), 1), StepRows(0, 0, ((4096, 0),), 1)
    return 0 < times.step_time(few) < times.step_time(many)
