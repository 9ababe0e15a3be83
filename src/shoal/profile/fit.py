"""Fitting latency models to measured steps, and checking them with slices that were not fitted."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.forecast import (
    CurveTimes,
    FitReport,
    FittedTimes,
    LatencyModel,
    PaddedLatency,
    StepRows,
    StepTimes,
    fit_curve,
    fit_latency,
    fit_padded,
)
from shoal.profile.measure import ServiceMeasurements


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceCheck:
    """A slice as it was measured, and as the models predict it."""

    sequences: int
    """Requests of the batch."""
    prompt_tokens: int
    """Length of the mean prompt."""
    output_tokens: int
    """Tokens that each request generates."""
    equal: bool
    """Whether all prompts are equally long."""
    measured_s: float
    """How long it took."""
    step_s: float
    """Prediction of the linear step model."""
    curve_s: float
    """Prediction of the curve."""
    padded_s: float | None
    """Prediction of SCLS's forms; None if prompts differ."""

    @property
    def step_error(self) -> float:
        """Relative error of the step model, negative if it predicts too little."""
        return self.step_s / self.measured_s - 1

    @property
    def curve_error(self) -> float:
        """Relative error of the curve."""
        return self.curve_s / self.measured_s - 1

    @property
    def padded_error(self) -> float | None:
        """Relative error of SCLS's forms."""
        return None if self.padded_s is None else self.padded_s / self.measured_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFit:
    """The latency models of one service and how good they are."""

    step: LatencyModel
    """The linear step model."""
    step_report: FitReport
    """How well it fits."""
    curve: CurveTimes
    """The piecewise linear model."""
    curve_report: FitReport
    """How well it fits."""
    padded: PaddedLatency
    """SCLS's forms."""
    prefill_report: FitReport
    """How well that of the prefill fits."""
    decode_report: FitReport
    """How well that of the decode fits."""
    slices: tuple[SliceCheck, ...]
    """Checks with slices that were not fitted."""


def fit_service(measured: ServiceMeasurements) -> ServiceFit:
    """Fit the step model and SCLS's forms to equal batches, and the curve to steps as in serving.

    Steps in which a prompt joins a batch belong to both.
    """
    linear = [sample for sample in measured.steps if sample.equal or sample.rows.chunks]
    step, step_report = fit_latency(
        [sample.shape for sample in linear], [sample.seconds for sample in linear]
    )
    curve, curve_report = fit_serving([measured])
    padded, prefill_report, decode_report = fit_padded(measured.prefill, measured.decode)
    checks = []
    for sample in measured.slices:
        prompts, output = sample.prompts, sample.output_tokens
        size, equal = len(prompts), len(set(prompts)) == 1
        checks.append(
            SliceCheck(
                sequences=size,
                prompt_tokens=round(sum(prompts) / size),
                output_tokens=output,
                equal=equal,
                measured_s=sample.seconds,
                step_s=slice_seconds(FittedTimes(step), prompts, output),
                curve_s=slice_seconds(curve, prompts, output),
                padded_s=padded.serve(float(size), prompts[0], output) if equal else None,
            )
        )
    return ServiceFit(
        step=step,
        step_report=step_report,
        curve=curve,
        curve_report=curve_report,
        padded=padded,
        prefill_report=prefill_report,
        decode_report=decode_report,
        slices=tuple(checks),
    )


def fit_serving(measured: Sequence[ServiceMeasurements]) -> tuple[CurveTimes, FitReport]:
    """Fit one curve to several measurements of one service.

    Rows of different lengths take longer to decode than equal ones, and a server's rows differ. So decode
    steps of several equal prompts are left out.
    """
    samples = [
        sample for run in measured for sample in run.steps if not sample.equal or sample.rows.decodes < 2
    ]
    return fit_curve([sample.rows for sample in samples], [sample.seconds for sample in samples])


def slice_seconds(times: StepTimes, prompts: Sequence[int], output_tokens: int) -> float:
    """Seconds for a batch: all prompts in one step, then decodes until each has ``output_tokens``."""
    chunks = tuple((tokens, 0) for tokens in prompts)
    first = times.step_time(StepRows(0, 0, chunks, len(prompts)))
    rest = times.decode_times(len(prompts), sum(prompts) + len(prompts), output_tokens - 1)
    return first + float(rest.sum())
