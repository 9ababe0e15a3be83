"""Fits of step-time models to measurements: non-negative costs, relative errors, robust to outliers.

The squared *relative* error is minimised, so that short decode steps count as much as long prefills. Noise of
the machine makes a measured step longer, never shorter, so its error relative to the measurement is below 1
and has little effect. But such a fit underestimates the mean by the square of the noise. So a second fit
leaves out outliers, and takes errors relative to the predictions of the first fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.forecast.latency import FloatArray, LatencyModel, StepShape, shape_matrix
from shoal.forecast.latency_padded import Bilinear, PaddedLatency

MAX_DROPPED = 0.1
"""Share of the samples that the second fit may leave out."""
OUTLIER_FACTOR = 5.0
"""Outliers have more than this multiple of the median error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """Errors of a fit over all samples, including outliers."""

    rmse_s: float
    mean_absolute_percent_error: float
    """In percent of the measured time."""
    samples: int
    dropped: int
    """Outliers that the second fit left out."""


@dataclass(frozen=True, slots=True)
class PaddedSample:
    """One measured iteration of a padded batch."""

    sequences: int
    length: int
    """Tokens of each row."""
    seconds: float


def fit_latency(shapes: Sequence[StepShape], seconds: Sequence[float]) -> tuple[LatencyModel, FitReport]:
    """Fit a linear model to measured steps; raises ValueError without usable samples.

    A count that does not vary in the samples (for instance because none has a prefill) costs 0.
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
    """Fit SCLS's formulas, with reports for prefill and decode; raises ValueError as ``fit_latency``."""
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
    """Fit the costs of the columns of ``features`` [samples, columns], in the two fits described above.

    Raises ValueError without usable samples.
    """
    if len(seconds) == 0 or len(features) != len(seconds):
        raise ValueError(f"a fit needs one time for each shape, got {len(features)} and {len(seconds)}")
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise ValueError("measured times must be finite and above 0")
    predicted = features @ _solve(features, seconds, seconds)
    kept = _without_outliers(np.abs(predicted / seconds - 1))
    # Limits the relative error of an outlier that was kept to 2.
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
    from scipy.optimize import nnls  # a slow import

    relative = features / unit[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0
    solution: FloatArray = nnls(relative / scale, seconds / unit)[0]
    costs: FloatArray = solution / scale
    return costs


def _without_outliers(errors: FloatArray) -> NDArray[np.bool_]:
    """Which samples to keep: all except outliers, of which at most ``MAX_DROPPED`` are left out."""
    far = errors > OUTLIER_FACTOR * np.median(errors)
    worst = np.argsort(-errors, kind="stable")[: int(MAX_DROPPED * len(errors))]
    kept = np.ones(len(errors), dtype=np.bool_)
    kept[worst] = ~far[worst]
    return kept
