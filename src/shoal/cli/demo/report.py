"""The demo's results: latencies as the client measured them, memory as the server counted it."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rich import box
from rich.table import Table

from shoal.cli.demo.client import Burst, DemoRequest, Kill
from shoal.cli.demo.prompts import format_goals
from shoal.core import SLO, attainment, has_goal, met, normalised_latency, percentile


@dataclass(frozen=True, slots=True)
class Latency:
    """Mean and 99th percentile; NaN if nothing was measured."""

    mean_s: float
    p99_s: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Latency":
        measured = list(values)
        return cls(_mean(measured), percentile(measured, 99))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceReport:
    """Results of a service; NaN for unknown numbers."""

    requests: int
    finished: int
    output_tokens: int
    output_tokens_per_s: float
    ttft: Latency
    tpot: Latency
    e2e: Latency
    largest_gap: Latency
    """Longest time between two chunks with text, over responses of two tokens or more."""
    preemptions: int
    alone_s: float
    """End-to-end latency of a request when nothing else ran."""
    normalised_latency: float
    """Mean end-to-end latency in units of ``alone_s``."""
    slo: SLO
    slo_attainment: float
    """Share of the requests that met their goals; failed requests missed theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    services: dict[str, ServiceReport]
    duration_s: float
    kv_peak_use: float | None
    """Largest share of the KV pool in use at once; None if the server did not report it."""
    block_waste: float | None
    """Largest share of the KV pool that no service could use (``MetricsSummary.peak_waste``); None if the
    server did not report it."""
    failures: tuple[str, ...]
    """A line for each request that failed."""
    kill: Kill | None = None
    """The engine that was killed during the burst, if any."""
    resumed: int = 0
    """How often a request was resumed after the end of its engine."""
    fetches: int = 0
    """Fetches of weights; 0 where all stay."""
    weight_waits: int = 0
    """How often a request waited for weights."""
    weight_wait_s: float = 0.0
    """Total time of these waits."""

    @property
    def succeeded(self) -> bool:
        return all(report.finished == report.requests for report in self.services.values())

    def to_json(self) -> dict[str, Any]:
        """The report as plain values; NaN becomes None, because JSON has no NaN."""
        plain: dict[str, Any] = _without_nan(asdict(self))
        return plain | {"succeeded": self.succeeded}


def summarise(burst: Burst) -> DemoReport:
    """The results of a burst that has ended."""
    services = {}
    for name in dict.fromkeys(request.prompt.service for request in burst.requests):
        requests = [request for request in burst.requests if request.prompt.service == name]
        records = [request.record() for request in requests if request.finished]
        tokens = sum(record.output_tokens for record in records)
        alone_s = burst.alone_s.get(name, math.nan)
        services[name] = ServiceReport(
            requests=len(requests),
            finished=len(records),
            output_tokens=tokens,
            output_tokens_per_s=tokens / burst.duration_s if burst.duration_s else math.nan,
            ttft=Latency.of(record.ttft_s for record in records),
            tpot=Latency.of(record.tpot_s for record in records if record.output_tokens > 1),
            e2e=Latency.of(record.e2e_s for record in records),
            largest_gap=Latency.of(record.mtpot_s for record in records if record.output_tokens > 1),
            preemptions=burst.metrics.preemptions.get(name, 0),
            alone_s=alone_s,
            normalised_latency=_mean(normalised_latency(record, alone_s) for record in records),
            slo=requests[0].slo,
            slo_attainment=attainment(_met_goals(request) for request in requests),
        )
    failed = [request for request in burst.requests if not request.finished]
    return DemoReport(
        services=services,
        duration_s=burst.duration_s,
        kv_peak_use=burst.metrics.peak_use,
        block_waste=burst.metrics.peak_waste,
        failures=tuple(
            f"{request.prompt.service} {request.number}: {request.error or request.status}"
            for request in failed
        ),
        kill=burst.kill,
        resumed=burst.metrics.resumed,
        fetches=burst.metrics.fetches,
        weight_waits=burst.metrics.weight_waits,
        weight_wait_s=burst.metrics.weight_wait_s,
    )


def _met_goals(request: DemoRequest) -> bool | None:
    """Whether a request met its goals; None if it has no goals."""
    if request.finished:
        return met(request.record(), request.slo)
    return False if has_goal(request.slo) else None


def report_table(report: DemoReport) -> Table:
    """A row for each service, at most 80 columns wide."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        title=f"{sum(s.requests for s in report.services.values())} requests in {report.duration_s:.1f} s "
        "(times: mean / p99)",
    )
    table.add_column("service", no_wrap=True)
    for heading in ("done", "tok/s", "TTFT", "TPOT", "E2E", "x alone", "SLO"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, service in report.services.items():
        table.add_row(
            name,
            f"{service.finished}/{service.requests}",
            f"{service.output_tokens_per_s:.0f}",
            *(_times(latency) for latency in (service.ttft, service.tpot, service.e2e)),
            "-" if math.isnan(service.normalised_latency) else f"{service.normalised_latency:.3g}",
            "-" if math.isnan(service.slo_attainment) else f"{service.slo_attainment:.0%}",
        )
    return table


def report_notes(report: DemoReport) -> Iterator[str]:
    """Lines below the table: definitions of its last columns, and metrics of the KV pool."""
    services = report.services
    alone = [
        f"{name} {service.alone_s:.3g} s"
        for name, service in services.items()
        if not math.isnan(service.alone_s)
    ]
    if alone:
        yield f"x alone: mean E2E over that of one request alone ({', '.join(alone)})"
    yield "largest gap in a stream: " + ", ".join(
        f"{name} {_times(service.largest_gap)}" for name, service in services.items()
    )
    goals = [
        f"{name} {format_goals(service.slo)}" for name, service in services.items() if has_goal(service.slo)
    ]
    if goals:
        yield f"SLO: share within {'; '.join(goals)}"
    yield (
        f"KV pool: {_percent(report.kv_peak_use)} in use at the peak, "
        f"at most {_percent(report.block_waste)} block waste"
    )
    if report.kill is not None:
        yield (
            f"engine {report.kill.engine} (process {report.kill.pid}) was killed with {report.kill.requests} "
            f"requests under way: {report.resumed} went on, {len(report.failures) or 'none'} failed"
        )
    if report.fetches:
        mean_s = report.weight_wait_s / max(1, report.weight_waits)
        yield (
            f"weights: {report.fetches} fetches, for which requests waited {report.weight_waits} times, "
            f"{mean_s:.2g} s on average"
        )
    yield "preemptions: " + ", ".join(f"{name} {service.preemptions}" for name, service in services.items())


def comparison(shared: DemoReport, separate: DemoReport, tight: DemoReport | None = None) -> Iterator[str]:
    """Lines that compare one engine for all services with an engine for each, in the same burst.

    tight: one engine for all services, whose memory does not hold the weights of all.
    """
    yield "One engine for both, compared with an engine for each:"
    yield f"the burst took {_times_as_long(shared, separate)}."
    yield "Sharing pays where the load moves between models or memory is scarce, and costs"
    yield "where all are always busy: see --chat-share 0.5, and docs/benchmarks.md."
    if tight is not None:
        yield "One engine with memory for one model's weights, compared with memory for both:"
        yield f"the burst took {_times_as_long(tight, shared)}."
        yield f"Weights were fetched {tight.fetches} times. Running requests kept their KV"
        yield "meanwhile, and went on afterwards: see docs/many-models.md."


def _times_as_long(one: DemoReport, other: DemoReport) -> str:
    means = [_mean(service.e2e.mean_s for service in each.services.values()) for each in (one, other)]
    burst = one.duration_s / other.duration_s
    return f"{burst:.2f} times as long, a request on average {means[0] / means[1]:.2f} times"


def _mean(values: Iterable[float]) -> float:
    measured = list(values)
    return fmean(measured) if measured else math.nan


def _times(latency: Latency) -> str:
    if math.isnan(latency.mean_s):
        return "-"
    if latency.p99_s < 1:
        return f"{latency.mean_s * 1e3:.0f}/{latency.p99_s * 1e3:.0f} ms"
    return f"{latency.mean_s:.3g}/{latency.p99_s:.3g} s"


def _percent(fraction: float | None) -> str:
    return "unknown" if fraction is None else f"{fraction:.1%}"


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
