"""Fits of step times to measurements: non-negative costs, relative errors, robust to a few bad samples.

The squared *relative* error is minimised, so that short decode steps count as much as long prefills. A
disturbance of the machine makes a measured step longer, never shorter, so its error relative to the
measurement stays below 1 and cannot pull the fit far. But such a fit underestimates the mean by the square of
the noise. So a second fit leaves out the samples that deviate most and takes errors relative to the first
fit's predictions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.forecast.latency import FloatArray, LatencyModel, StepShape, shape_matrix
from shoal.forecast.latency_padded import Bilinear, PaddedLatency

MOST_DROPPED = 0.1
"""Share of the samples that the second fit may leave out."""
FAR_OUT = 5.0
"""It leaves out samples with more than this many times the median error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """How well a fit describes all of its samples, including those that the second fit left out."""

    rmse_s: float
    """Root of the mean squared error."""
    mean_absolute_percent_error: float
    """In percent of the measured time."""
    samples: int
    """Number of samples."""
    dropped: int
    """How many of them the second fit left out."""


@dataclass(frozen=True, slots=True)
class PaddedSample:
    """One measured iteration of a padded batch."""

    sequences: int
    """Rows of the batch."""
    length: int
    """Tokens of each row."""
    seconds: float
    """How long it took."""


def fit_latency(shapes: Sequence[StepShape], seconds: Sequence[float]) -> tuple[LatencyModel, FitReport]:
    """Fit a linear model to measured steps; raises ValueError without usable samples.

    What does not vary in the samples (for instance because none has a prefill) costs 0.
    """
    features = np.column_stack([np.ones(len(shapes)), shape_matrix(shapes)])
    costs, report = fit_costs(features, np.asarray(seconds, dtype=np.float64))
    constant, sequence, token, context, work = costs
    model = LatencyModel(
        constant_s=constant, sequence_s=sequence, token_s=token, context_s=context, work_s=work
    )
    return model, report


def fit_padded(
    prefill: Sequence[PaddedSample], decode: Sequence[PaddedSample]
) -> tuple[PaddedLatency, FitReport, FitReport]:
    """Fit SCLS's two forms, with a report for prefill and one for decode; raises ValueError likewise."""
    prefill_form, prefill_report = _fit_bilinear(prefill)
    decode_form, decode_report = _fit_bilinear(decode)
    return PaddedLatency(prefill=prefill_form, decode=decode_form), prefill_report, decode_report


def _fit_bilinear(samples: Sequence[PaddedSample]) -> tuple[Bilinear, FitReport]:
    sequences = np.array([sample.sequences for sample in samples], dtype=np.float64)
    lengths = np.array([sample.length for sample in samples], dtype=np.float64)
    features = np.column_stack([sequences * lengths, sequences, lengths, np.ones(len(samples))])
    costs, report = fit_costs(features, np.array([sample.seconds for sample in samples], dtype=np.float64))
    product, sequence, length, constant = costs
    return Bilinear(product=product, sequence=sequence, length=length, constant=constant), report


def fit_costs(features: FloatArray, seconds: FloatArray) -> tuple[list[float], FitReport]:
    """Fit the costs of the columns of ``features`` [samples, columns] twice, as the module says.

    Raises ValueError without usable samples.
    """
    if len(seconds) == 0 or len(features) != len(seconds):
        raise ValueError(f"a fit needs one time for each shape, got {len(features)} and {len(seconds)}")
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise ValueError("measured times must be finite and above 0")
    predicted = features @ _solve(features, seconds, seconds)
    kept = _without_worst(np.abs(predicted / seconds - 1))
    # A disturbed sample that was kept nevertheless has an error below 2.
    scale = np.maximum(predicted, seconds / 2)
    costs = _solve(features[kept], seconds[kept], scale[kept])
    error = features @ costs - seconds
    report = FitReport(
        rmse_s=float(np.sqrt(np.mean(error**2))),
        mean_absolute_percent_error=float(np.mean(np.abs(error) / seconds) * 100),
        samples=len(seconds),
        dropped=int((~kept).sum()),
    )
    return costs.tolist(), report


def _solve(features: FloatArray, seconds: FloatArray, unit: FloatArray) -> FloatArray:
    """Non-negative least squares of errors in ``unit``s; columns are scaled, since they differ by 1e6."""
    from scipy.optimize import nnls  # takes a third of a second to import, and only fits need it

    relative = features / unit[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0
    solution: FloatArray = nnls(relative / scale, seconds / unit)[0]
    costs: FloatArray = solution / scale
    return costs


def _without_worst(errors: FloatArray) -> NDArray[np.bool_]:
    """Which samples to keep: all but those far out, of which at most ``MOST_DROPPED`` are left out."""
    far = errors > FAR_OUT * np.median(errors)
    worst = np.argsort(-errors, kind="stable")[: int(MOST_DROPPED * len(errors))]
    kept = np.ones(len(errors), dtype=np.bool_)
    kept[worst] = ~far[worst]
    return kept
