"""Fit of the piecewise linear step-time model (``latency_curve``) to measured steps."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from shoal.forecast.latency import FloatArray
from shoal.forecast.latency_curve import CurveTimes, PiecewiseCost
from shoal.forecast.latency_fit import FitReport, fit_costs
from shoal.forecast.step_times import StepRows


def fit_curve(rows: Sequence[StepRows], seconds: Sequence[float]) -> tuple[CurveTimes, FitReport]:
    """Fit a curve to measured steps; raises ValueError without usable samples.

    As in ``fit_latency``, costs are not negative, errors are relative, and a second fit leaves out outliers.
    Knots are powers of two, if there are samples between one and the next. A count that does not vary in the
    samples costs 0.

    rows: the computation of each step. seconds: its duration.
    """
    tokens = np.array([step.new_tokens for step in rows], dtype=np.int64)
    decodes = np.array([step.decodes for step in rows], dtype=np.int64)
    token_knots, decode_knots = _knots(tokens), _knots(decodes)
    features = np.column_stack(
        [
            np.ones(len(rows)),
            _pieces(tokens, token_knots),
            _pieces(decodes, decode_knots),
            [len(step.chunks) for step in rows],
            [step.decode_context for step in rows],
            [step.shape.prefill_work for step in rows],
        ]
    )
    costs, report = fit_costs(features, np.asarray(seconds, dtype=np.float64))
    constant, *rises, chunk, context, work = costs
    curve = CurveTimes(
        constant_s=constant,
        tokens=_piecewise_cost(token_knots, rises[: len(token_knots)]),
        decodes=_piecewise_cost(decode_knots, rises[len(token_knots) :]),
        chunk_s=chunk,
        context_s=context,
        work_s=work,
    )
    return curve, report


def _knots(counts: np.ndarray) -> tuple[int, ...]:
    """Powers of two up to the largest count, except those without a count since the previous knot."""
    knots: list[int] = []
    power, largest = 1, int(counts.max(initial=0))
    while not knots or knots[-1] < largest:
        if ((counts > (knots[-1] if knots else 0)) & (counts <= power)).any():
            knots.append(min(power, largest))
        elif power > largest:
            break
        power *= 2
    return tuple(knots)


def _pieces(counts: np.ndarray, knots: Sequence[int]) -> FloatArray:
    """The covered share of each piece for each count [samples, knots]."""
    columns = [
        np.clip((counts - below) / (above - below), 0.0, 1.0) for below, above in pairwise((0, *knots))
    ]
    return np.column_stack([np.empty((len(counts), 0)), *columns])


def _piecewise_cost(knots: Sequence[int], rises: Sequence[float]) -> PiecewiseCost:
    """From the cost that each piece adds."""
    return PiecewiseCost(tuple(knots), tuple(np.cumsum(rises).tolist()))
