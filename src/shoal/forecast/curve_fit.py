"""Fits a curve of step times to measured steps."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from shoal.forecast.latency import FloatArray
from shoal.forecast.latency_curve import Bend, CurveTimes
from shoal.forecast.latency_fit import FitReport, fit_costs
from shoal.forecast.step_times import StepRows


def fit_curve(rows: Sequence[StepRows], seconds: Sequence[float]) -> tuple[CurveTimes, FitReport]:
    """Fit a curve to measured steps; raises ValueError without usable samples.

    As in ``fit_latency``, costs are not negative, errors are relative, and a second fit leaves out the worst
    samples. The curve bends at powers of two, as far as there are samples between one and the next. What does
    not vary in the samples costs 0.

    rows: what each step computed. seconds: how long it took.
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
    constant, *bends, chunk, context, work = costs
    curve = CurveTimes(
        constant_s=constant,
        tokens=_bend(token_knots, bends[: len(token_knots)]),
        decodes=_bend(decode_knots, bends[len(token_knots) :]),
        chunk_s=chunk,
        context_s=context,
        work_s=work,
    )
    return curve, report


def _knots(counts: np.ndarray) -> tuple[int, ...]:
    """Powers of two up to the largest count, without those that have no count since the knot before."""
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
    """How far each count reaches into each piece, as a share of it [samples, knots]."""
    columns = [
        np.clip((counts - below) / (above - below), 0.0, 1.0) for below, above in pairwise((0, *knots))
    ]
    return np.column_stack([np.empty((len(counts), 0)), *columns])


def _bend(knots: Sequence[int], rises: Sequence[float]) -> Bend:
    """A bend from the cost that each piece adds."""
    return Bend(tuple(knots), tuple(np.cumsum(rises).tolist()))
