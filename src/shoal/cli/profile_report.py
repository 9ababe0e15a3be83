"""Results of ``shoal profile``: tables, JSON and pictures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from shoal.forecast import Bilinear, FitReport, LatencyProfile, PaddedSample
from shoal.measure import Panel, Series
from shoal.profile.fit import ServiceFit, fit_service
from shoal.profile.measure import ServiceMeasurements

DEGREE = 1
"""Tensor-parallel degree of an engine on one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceProfile:
    """Measurements and fits of a service."""

    measured: ServiceMeasurements
    fit: ServiceFit
    execution_s: float
    """Time of the mean request alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileReport:
    """Measurements and fits of all services of an engine."""

    device: str
    threads: int
    prompt_tokens: int
    """Prompt length of the mean request."""
    output_tokens: int
    """Output length of the mean request."""
    services: Mapping[str, ServiceProfile]

    @property
    def place(self) -> str:
        """Device and threads of the measurement, as text."""
        return f"{self.device}, {self.threads} thread{'s' if self.threads > 1 else ''}"

    @classmethod
    def of(
        cls,
        measured: Mapping[str, ServiceMeasurements],
        device: str,
        threads: int,
        prompt_tokens: int,
        output_tokens: int,
    ) -> "ProfileReport":
        services = {}
        for name, measurements in measured.items():
            fit = fit_service(measurements)
            services[name] = ServiceProfile(
                measured=measurements,
                fit=fit,
                execution_s=fit.curve.execution_time(prompt_tokens, output_tokens),
            )
        return cls(
            device=device,
            threads=threads,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            services=services,
        )

    def to_profile(self) -> LatencyProfile:
        """The profile file that other commands read."""
        return LatencyProfile(
            device=self.device,
            threads=self.threads,
            models={(name, DEGREE): service.fit.step for name, service in self.services.items()},
            padded={(name, DEGREE): service.fit.padded for name, service in self.services.items()},
            curves={(name, DEGREE): service.fit.curve for name, service in self.services.items()},
        )

    def to_json(self) -> dict[str, Any]:
        """The contents of the tables as plain values."""
        services = {}
        for name, service in self.services.items():
            fit = asdict(service.fit)
            for plain, check in zip(fit["slices"], service.fit.slices, strict=True):
                plain |= {
                    "step_error": check.step_error,
                    "curve_error": check.curve_error,
                    "padded_error": check.padded_error,
                }
            services[name] = {**fit, "execution_s": service.execution_s}
        return {
            "device": self.device,
            "threads": self.threads,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "services": services,
        }


def report_tables(report: ProfileReport) -> list[Table]:
    """Errors of the fits, errors on unseen slices, and coefficients; at most 80 columns wide."""
    return [_fits_table(report), _slices_table(report), _costs_table(report)]


def _fits_table(report: ProfileReport) -> Table:
    length = f"{report.prompt_tokens} + {report.output_tokens}"
    table = _table(
        f"Step times on {report.place}",
        ("service", "form"),
        ("samples", "left out", "RMSE", "mean error"),
        caption=f"A request of {length} tokens alone, for services[].execution in the configuration file: "
        + ", ".join(f"{name} {format_seconds(s.execution_s)}" for name, s in report.services.items()),
    )
    for name, service in report.services.items():
        fit = service.fit
        for form, fitted in (
            ("step", fit.step_report),
            ("curve", fit.curve_report),
            ("padded prefill", fit.prefill_report),
            ("padded decode", fit.decode_report),
        ):
            table.add_row(name, form, *_quality(fitted))
    return table


def _quality(report: FitReport) -> tuple[str, ...]:
    return (
        str(report.samples),
        str(report.dropped),
        format_seconds(report.rmse_s),
        f"{report.mean_absolute_percent_error:.1f}%",
    )


def _slices_table(report: ProfileReport) -> Table:
    table = _table(
        "Whole slices that no fit has seen",
        ("service",),
        ("batch", "prompt", "output", "measured", "step", "curve", "padded"),
        caption="errors of the predictions; ~: prompts of different lengths, for which the curve is made",
    )
    for name, service in report.services.items():
        for check in service.fit.slices:
            table.add_row(
                name,
                str(check.sequences),
                f"{'' if check.equal else '~'}{check.prompt_tokens}",
                str(check.output_tokens),
                format_seconds(check.measured_s),
                f"{check.step_error:+.1%}",
                f"{check.curve_error:+.1%}",
                "" if check.padded_error is None else f"{check.padded_error:+.1%}",
            )
    return table


def _costs_table(report: ProfileReport) -> Table:
    table = _table(
        "Coefficients in microseconds",
        ("service", "form"),
        ("N x l", "N", "l", "step", "token", "attended"),
        caption="padded: coefficients 1 to 4 of SCLS's Eqs. 3 and 4 (N sequences of length l); "
        "step: for each sequence, step, token, and position attended by decodes / prefills",
    )
    for name, service in report.services.items():
        step = service.fit.step
        table.add_row(
            name,
            "step",
            "",
            _micro(step.sequence_s),
            "",
            _micro(step.constant_s),
            _micro(step.token_s),
            f"{_micro(step.context_s)} / {_micro(step.work_s)}",
        )
        for form, bilinear in (
            ("prefill", service.fit.padded.prefill),
            ("decode", service.fit.padded.decode),
        ):
            table.add_row(name, f"padded {form}", *_bilinear(bilinear), "", "")
    return table


def _bilinear(form: Bilinear) -> tuple[str, ...]:
    return tuple(_micro(cost) for cost in (form.product, form.sequence, form.length, form.constant))


def _table(title: str, names: Sequence[str], numbers: Sequence[str], caption: str | None = None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title, caption=caption)
    for heading in names:
        table.add_column(heading, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def format_seconds(seconds: float) -> str:
    """A duration with three digits, as written in the configuration file."""
    return f"{seconds:.3g}s" if seconds >= 1 else f"{seconds * 1e3:.3g}ms"


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.3g}" if seconds < 1e-3 else f"{seconds * 1e6:.0f}"


def profile_panels(report: ProfileReport) -> list[list[Panel]]:
    """A row for each service: predicted against measured, then decode and prefill times by length."""
    return [list(_panels(name, service)) for name, service in report.services.items()]


def _panels(name: str, service: ServiceProfile) -> Iterator[Panel]:
    curve, padded = service.fit.curve, service.fit.padded
    kinds: dict[str, tuple[list[float], list[float]]] = {
        "prefill": ([], []),
        "decode": ([], []),
        "mixed": ([], []),
    }
    for sample in service.measured.steps:
        if sample.equal and sample.rows.decodes > 1:
            continue
        kind = "decode" if not sample.rows.chunks else "mixed" if sample.rows.decodes else "prefill"
        kinds[kind][0].append(sample.seconds * 1e3)
        kinds[kind][1].append(curve.step_time(sample.rows) * 1e3)
    yield Panel(
        title=f"{name}: curve",
        x_label="measured step (ms)",
        y_label="predicted step (ms)",
        series=[Series(kind, x, y, colour=i) for i, (kind, (x, y)) in enumerate(kinds.items())],
        log=True,
        diagonal=True,
    )
    for kind, samples, form in (
        ("decode", service.measured.decode, padded.decode),
        ("prefill", service.measured.prefill, padded.prefill),
    ):
        yield Panel(
            title=f"{name}: {kind} of N padded sequences (lines: fit)",
            x_label="positions attended by each row" if kind == "decode" else "prompt tokens",
            y_label="step (ms)",
            series=list(_by_batch(samples, form)),
            log=kind == "prefill",
        )


def _by_batch(samples: Sequence[PaddedSample], form: Bilinear) -> Iterator[Series]:
    for colour, batch in enumerate(sorted({sample.sequences for sample in samples})):
        of_batch = sorted((s for s in samples if s.sequences == batch), key=lambda s: s.length)
        lengths = [float(sample.length) for sample in of_batch]
        yield Series(f"N = {batch}", lengths, [s.seconds * 1e3 for s in of_batch], colour=colour)
        yield Series(
            "", lengths, [form.time(float(batch), at) * 1e3 for at in lengths], line=True, colour=colour
        )
