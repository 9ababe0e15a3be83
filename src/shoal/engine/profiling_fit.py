"""From measured steps to latency models, checked against whole slices that no fit has seen."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.engine.profiling import ServiceMeasurements
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceCheck:
    """A slice as it was measured, and as the models predict it, in seconds.

    prompt_tokens: of the mean prompt. padded_s: None where prompts differ.
    """

    sequences: int
    prompt_tokens: int
    output_tokens: int
    equal: bool
    measured_s: float
    step_s: float
    curve_s: float
    padded_s: float | None

    @property
    def step_error(self) -> float:
        """Relative error of the step model, negative where it predicts too little."""
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
    step_report: FitReport
    curve: CurveTimes
    curve_report: FitReport
    padded: PaddedLatency
    prefill_report: FitReport
    decode_report: FitReport
    slices: tuple[SliceCheck, ...]


def fit_service(measured: ServiceMeasurements) -> ServiceFit:
    """Fit the step model and SCLS's forms to equal batches, and the curve to what serving looks like.

    Steps with a newcomer belong to both.
    """
    linear = [sample for sample in measured.steps if sample.equal or sample.rows.chunks]
    step, step_report = fit_latency([one.shape for one in linear], [one.seconds for one in linear])
    curve, curve_report = fit_serving([measured])
    padded, prefill_report, decode_report = fit_padded(measured.prefill, measured.decode)
    checks = []
    for one in measured.slices:
        size, output, equal = len(one.prompts), one.output_tokens, len(set(one.prompts)) == 1
        checks.append(
            SliceCheck(
                sequences=size,
                prompt_tokens=round(sum(one.prompts) / size),
                output_tokens=output,
                equal=equal,
                measured_s=one.seconds,
                step_s=slice_seconds(FittedTimes(step), one.prompts, output),
                curve_s=slice_seconds(curve, one.prompts, output),
                padded_s=padded.serve(float(size), one.prompts[0], output) if equal else None,
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
    """The curve of all these measurements of one service, taken together.

    Rows of different lengths take longer to decode than equal ones, and a server's rows differ: decode steps
    of equal prompts, more than one, are left out.
    """
    samples = [
        sample for one in measured for sample in one.steps if not sample.equal or sample.rows.decodes < 2
    ]
    return fit_curve([one.rows for one in samples], [one.seconds for one in samples])


def slice_seconds(times: StepTimes, prompts: Sequence[int], output_tokens: int) -> float:
    """Seconds for a batch: all prompts in one step, then decodes until each has ``output_tokens``."""
    chunks = tuple((tokens, 0) for tokens in prompts)
    first = times.step_time(StepRows(0, 0, chunks, len(prompts)))
    rest = times.decode_times(len(prompts), sum(prompts) + len(prompts), output_tokens - 1)
    return first + float(rest.sum())
