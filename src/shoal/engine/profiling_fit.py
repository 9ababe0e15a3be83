"""From measured steps to latency models, checked against whole slices that no fit has seen."""

from dataclasses import dataclass

from shoal.engine.profiling import ServiceMeasurements
from shoal.forecast import FitReport, LatencyModel, PaddedLatency, fit_latency, fit_padded


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceCheck:
    """A slice as it was measured, and as the two models predict it, in seconds."""

    sequences: int
    prompt_tokens: int
    output_tokens: int
    measured_s: float
    step_s: float
    padded_s: float

    @property
    def step_error(self) -> float:
        """Relative error of the step model, negative where it predicts too little."""
        return self.step_s / self.measured_s - 1

    @property
    def padded_error(self) -> float:
        """Relative error of SCLS's forms, negative where they predict too little."""
        return self.padded_s / self.measured_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFit:
    """The latency models of one service and how good they are."""

    step: LatencyModel
    step_report: FitReport
    padded: PaddedLatency
    prefill_report: FitReport
    decode_report: FitReport
    slices: tuple[SliceCheck, ...]


def fit_service(measured: ServiceMeasurements) -> ServiceFit:
    """Fit the step model to all steps, and SCLS's forms to those of padded batches."""
    step, step_report = fit_latency(
        [sample.shape for sample in measured.steps], [sample.seconds for sample in measured.steps]
    )
    padded, prefill_report, decode_report = fit_padded(measured.prefill, measured.decode)
    checks = tuple(
        SliceCheck(
            sequences=one.sequences,
            prompt_tokens=one.prompt_tokens,
            output_tokens=one.output_tokens,
            measured_s=one.seconds,
            step_s=step.slice_time(one.sequences, one.prompt_tokens, one.output_tokens),
            padded_s=padded.serve(float(one.sequences), one.prompt_tokens, one.output_tokens),
        )
        for one in measured.slices
    )
    return ServiceFit(
        step=step,
        step_report=step_report,
        padded=padded,
        prefill_report=prefill_report,
        decode_report=decode_report,
        slices=checks,
    )
