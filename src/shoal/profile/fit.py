"""Fits latency models to measured step times, and checks them on slices that were not fitted."""

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
    """Measured and predicted time of one slice."""

    sequences: int
    prompt_tokens: int
    """Mean prompt length."""
    output_tokens: int
    """Output length of each request."""
    equal: bool
    """Whether all prompts are equally long."""
    measured_s: float
    step_s: float
    """Prediction of the linear step model."""
    curve_s: float
    """Prediction of the piecewise linear model."""
    padded_s: float | None
    """Prediction of the SCLS model; None if prompts differ in length."""

    @property
    def step_error(self) -> float:
        """Relative error of ``step_s``, negative if it is too small."""
        return self.step_s / self.measured_s - 1

    @property
    def curve_error(self) -> float:
        return self.curve_s / self.measured_s - 1

    @property
    def padded_error(self) -> float | None:
        return None if self.padded_s is None else self.padded_s / self.measured_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFit:
    """Fitted latency models of one service, and their errors."""

    step: LatencyModel
    step_report: FitReport
    curve: CurveTimes
    curve_report: FitReport
    padded: PaddedLatency
    """The SCLS model: equations of prefill and decode of a padded batch."""
    prefill_report: FitReport
    decode_report: FitReport
    slices: tuple[SliceCheck, ...]
    """Checks on slices that were not fitted."""


def fit_service(measured: ServiceMeasurements) -> ServiceFit:
    """Fit the step model and the SCLS model to equal batches, and the curve to steps as in serving.

    Steps in which a prompt joins a batch are used for the step model and the curve.
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
    steps of several equal prompts are excluded.
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
