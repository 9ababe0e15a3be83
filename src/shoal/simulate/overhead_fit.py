"""Fits what an engine's host adds to its steps, from when a measured run's requests got their tokens.

Every time stamp of a request is the end of a step. Between two of them a simulation of the same requests
makes so many steps, so many of which compute prompt tokens; what it takes less than was measured is their
overhead. The schedule depends on how long steps take, so the requests are simulated again with what was
found.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core import ConfigError, RequestRecord
from shoal.forecast import HostOverhead
from shoal.forecast.latency import FloatArray
from shoal.measure import RunRecord, StepSpan

ROUNDS = 10
"""Simulations at most."""
SETTLED = 1e-3
"""Nothing is simulated again where the overhead changes all intervals by less than this share."""
_REWEIGHTED = 8
"""How often a solution is weighted again: squares so weighted become absolute errors."""

Simulate = Callable[[HostOverhead], RunRecord]
"""Gives the record of a run with an overhead, with its spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadFit:
    """An overhead, and how near it comes."""

    overhead: HostOverhead
    """What the host adds."""
    error: float
    """Mean error of the simulated intervals with it, as a share of each."""
    error_without: float
    """The same without overhead."""
    intervals: int
    """Times between two stamps that were compared."""


@dataclass(frozen=True, slots=True)
class _Intervals:
    """What lies between the stamps of all requests."""

    steps: FloatArray
    """[steps, of which compute prompt tokens] in simulation, one row for each."""
    missing_s: FloatArray
    """What the simulation takes less than was measured."""
    measured_s: FloatArray
    """What was measured."""


def fit_overhead(
    measured: Sequence[RequestRecord], simulate: Simulate, layers: int, *, lock_step: bool = False
) -> OverheadFit:
    """The overhead per step, and per layer of a step with prompt tokens, of a model with so many layers.

    measured: the requests whose times count, with the ids that they have in simulation, which may have more.
    lock_step: engines are ranks that step together, so that a prompt of one costs all. Raises ConfigError
    where none of the requests was answered in simulation.
    """
    costs_s = np.zeros(2)
    tried: list[tuple[float, HostOverhead]] = []
    for number in range(ROUNDS):
        overhead = HostOverhead(step_s=float(costs_s[0]), layer_s=float(costs_s[1]) / layers)
        found = _intervals(measured, simulate(overhead), lock_step)
        tried.append((float(np.mean(np.abs(found.missing_s) / found.measured_s)), overhead))
        target_s = _solve(found, found.missing_s + found.steps @ costs_s)
        # Half of the way at later times: a schedule that changes with the costs may else swing.
        change_s = (target_s - costs_s) * (0.5 if number else 1.0)
        if np.abs(found.steps @ change_s).sum() < SETTLED * found.measured_s.sum():
            break
        costs_s = costs_s + change_s
    error, best = min(tried, key=lambda pair: pair[0])
    return OverheadFit(overhead=best, error=error, error_without=tried[0][0], intervals=len(found.measured_s))


def _solve(found: _Intervals, seconds: FloatArray) -> FloatArray:
    """Costs of at least 0 by step and by prompt step, with the least sum of absolute relative errors.

    Not of squares, because an interval in which the simulation preempts somebody else says nothing.
    """
    from scipy.optimize import nnls  # slow to import, and only fits need it

    weights = 1 / found.measured_s
    for _ in range(_REWEIGHTED):
        costs: FloatArray = nnls(found.steps * weights[:, None], seconds * weights)[0]
        errors = np.abs(found.steps @ costs - seconds) / found.measured_s
        weights = 1 / found.measured_s / np.sqrt(np.maximum(errors, max(0.1 * np.median(errors), 1e-9)))
    return costs


def _intervals(measured: Sequence[RequestRecord], run: RunRecord, lock_step: bool) -> _Intervals:
    """Of each request two: from its arrival to its first token, and from there to its last."""
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
    """Counts an engine's steps by time."""

    def __init__(self, spans: Sequence[StepSpan], prompts: Sequence[StepSpan]) -> None:
        """spans: its steps. prompts: those that it has to wait for where they compute prompt tokens."""
        # Ranks in lock-step have the same step each.
        waited_for = {(span.start_ns, span.end_ns): span.steps for span in prompts if span.prefill_tokens}
        steps = [((span.start_ns, span.end_ns), span.steps) for span in spans]
        self._counts = [_cumulated(steps), _cumulated(sorted(waited_for.items()))]

    def between(self, since_ns: int, until_ns: int) -> tuple[float, float]:
        """Steps, and those with prompt tokens; of a step that is cut, the share that lies between."""
        steps, prompts = (
            float(np.diff(np.interp((since_ns, until_ns), times, counts))[0])
            for times, counts in self._counts
        )
        return steps, prompts


def _cumulated(steps: Iterable[tuple[tuple[int, int], int]]) -> tuple[FloatArray, FloatArray]:
    """Times, and how many of ``steps``, each with its beginning and end, were made until then."""
    times, counts = [0.0], [0.0]
    for (start_ns, end_ns), count in steps:
        times += [start_ns, end_ns]
        counts += [counts[-1], counts[-1] + count]
    return np.array(times), np.array(counts)
