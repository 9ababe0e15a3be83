"""Fits a curve of step times to measured steps."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from shoal.forecast.latency import FloatArray
from shoal.forecast.latency_curve import Bend, CurveTimes
from shoal.forecast.latency_fit import FitReport, fit_costs
from shoal.forecast.step_times import StepRows


def fit_curve(rows: Sequence[StepRows], seconds: Sequence[float]) -> tuple[CurveTimes, FitReport]:
    """The curve that describes measured steps best; raises ValueError without usable samples.

    As ``fit_latency``: non-negative, relative errors, and twice, the second time without what deviates most.
    The curve bends at powers of two, as far as there are samples between one and the next. What the samples
    never vary costs 0.
    """
    tokens = np.array([one.new_tokens for one in rows], dtype=np.int64)
    decodes = np.array([one.decodes for one in rows], dtype=np.int64)
    token_knots, decode_knots = _knots(tokens), _knots(decodes)
    features = np.column_stack(
        [
            np.ones(len(rows)),
            _pieces(tokens, token_knots),
            _pieces(decodes, decode_knots),
            [len(one.chunks) for one in rows],
            [one.decode_context for one in rows],
            [one.shape.prefill_work for one in rows],
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
    """Powers of two up to the first beyond all counts, less those with no count since the knot before."""
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
    """How far each count reaches into each piece, as a share of it: [samples, knots]; costs are rises."""
    columns = [
        np.clip((counts - below) / (above - below), 0.0, 1.0) for below, above in pairwise((0, *knots))
    ]
    return np.column_stack([np.empty((len(counts), 0)), *columns])


def _bend(knots: Sequence[int], rises: Sequence[float]) -> Bend:
    return Bend(tuple(knots), tuple(np.cumsum(rises).tolist()))
