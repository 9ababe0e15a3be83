"""Fits the host overhead of engine steps to the token times of a measured run.

Every time stamp of a request is the end of a step. Between two stamps, a simulation of the same requests
makes a number of steps, some with prompt tokens; the time that it lacks against the measurement is their
overhead. The schedule depends on step times, so the simulation is repeated with the overhead that was found.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core import ConfigError, RequestRecord
from shoal.forecast import HostOverhead
from shoal.forecast.latency import FloatArray
from shoal.measure import RunRecord, StepSpan

ROUNDS = 10
"""Limit on simulations."""
SETTLED = 1e-3
"""The fit ends when the overhead changes all intervals by less than this share."""
_REWEIGHTED = 8
"""Rounds of reweighting, which turn least squares into least absolute errors."""

Simulate = Callable[[HostOverhead], RunRecord]
"""Simulates with an overhead; the record must have spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadFit:
    """A fitted overhead and its errors."""

    overhead: HostOverhead
    error: float
    """Mean relative error of the simulated intervals."""
    error_without: float
    """The same without overhead."""
    intervals: int
    """Number of compared intervals."""


@dataclass(frozen=True, slots=True)
class _Intervals:
    """Intervals between the stamps of all requests."""

    steps: FloatArray
    """One row each: [steps, steps with prompt tokens], as simulated."""
    missing_s: FloatArray
    """Measured minus simulated time."""
    measured_s: FloatArray


def fit_overhead(
    measured: Sequence[RequestRecord], simulate: Simulate, layers: int, *, lock_step: bool = False
) -> OverheadFit:
    """Fit the overhead per step, and per layer of a step with prompt tokens.

    measured: requests with the same ids as in the simulation, which may have more. layers: of the model.
    lock_step: engines are ranks that step together, so that a prompt of one costs all. Raises ConfigError if
    none of the requests was answered in simulation.
    """
    costs_s = np.zeros(2)
    tried: list[tuple[float, HostOverhead]] = []
    for number in range(ROUNDS):
        overhead = HostOverhead(step_s=float(costs_s[0]), layer_s=float(costs_s[1]) / layers)
        found = _intervals(measured, simulate(overhead), lock_step)
        tried.append((float(np.mean(np.abs(found.missing_s) / found.measured_s)), overhead))
        target_s = _solve(found, found.missing_s + found.steps @ costs_s)
        # Half steps after the first: the schedule changes with the costs, and might oscillate.
        change_s = (target_s - costs_s) * (0.5 if number else 1.0)
        if np.abs(found.steps @ change_s).sum() < SETTLED * found.measured_s.sum():
            break
        costs_s = costs_s + change_s
    error, best = min(tried, key=lambda pair: pair[0])
    return OverheadFit(overhead=best, error=error, error_without=tried[0][0], intervals=len(found.measured_s))


def _solve(found: _Intervals, seconds: FloatArray) -> FloatArray:
    """Non-negative costs per step and per prompt step with the least sum of absolute relative errors.

    Absolute errors limit the weight of intervals in which the simulation preempts another request.
    """
    from scipy.optimize import nnls  # slow to import, and only fits need it

    weights = 1 / found.measured_s
    for _ in range(_REWEIGHTED):
        costs: FloatArray = nnls(found.steps * weights[:, None], seconds * weights)[0]
        errors = np.abs(found.steps @ costs - seconds) / found.measured_s
        weights = 1 / found.measured_s / np.sqrt(np.maximum(errors, max(0.1 * np.median(errors), 1e-9)))
    return costs


def _intervals(measured: Sequence[RequestRecord], run: RunRecord, lock_step: bool) -> _Intervals:
    """Two per request: arrival to first token, first to last token."""
    engines = {row.engine for row in run.requests}
    spans = {engine: [span for span in run.spans if span.engine == engine] for engine in engines}
    clocks = {engine: _StepClock(own, run.spans if lock_step else own) for engine, own in spans.items()}
    simulated = {row.request_id: row for row in run.requests if row.answered}
    steps, missing_s, measured_s = [], [], []
    for record in measured:
        row = simulated.get(record.request_id)
        if row is None:
            continue
        for since_ns, until_ns, seconds in (
            (row.arrival_ns, row.first_token_ns, record.ttft_s),
            (row.first_token_ns, row.finish_ns, record.e2e_s - record.ttft_s),
        ):
            if seconds > 0:
                steps.append(clocks[row.engine].between(since_ns, until_ns))
                missing_s.append(seconds - (until_ns - since_ns) / 1e9)
                measured_s.append(seconds)
    if not steps:
        raise ConfigError("no request of the log is answered in simulation, so there is nothing to fit to")
    return _Intervals(np.array(steps), np.array(missing_s), np.array(measured_s))


class _StepClock:
    """Counts an engine's steps over time."""

    def __init__(self, spans: Sequence[StepSpan], prompts: Sequence[StepSpan]) -> None:
        """spans: its steps. prompts: steps for whose prompt tokens it has to wait."""
        # Ranks in lock step record the same step each.
        waited_for = {(span.start_ns, span.end_ns): span.steps for span in prompts if span.prefill_tokens}
        steps = [((span.start_ns, span.end_ns), span.steps) for span in spans]
        self._counts = [_cumulated(steps), _cumulated(sorted(waited_for.items()))]

    def between(self, since_ns: int, until_ns: int) -> tuple[float, float]:
        """Steps, and steps with prompt tokens, between two times; partial steps count in part."""
        steps, prompts = (
            float(np.diff(np.interp((since_ns, until_ns), times, counts))[0])
            for times, counts in self._counts
        )
        return steps, prompts


def _cumulated(steps: Iterable[tuple[tuple[int, int], int]]) -> tuple[FloatArray, FloatArray]:
    """Times, and the number of steps made until then; steps: ((start, end), count)."""
    times, counts = [0.0], [0.0]
    for (start_ns, end_ns), count in steps:
        times += [start_ns, end_ns]
        counts += [counts[-1], counts[-1] + count]
    return np.array(times), np.array(counts)
