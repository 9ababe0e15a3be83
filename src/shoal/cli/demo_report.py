"""The demo's figures: latencies as the client saw them, memory as the server counted it."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rich import box
from rich.table import Table

from shoal.cli.demo_client import Burst, Exchange
from shoal.cli.demo_goals import goal_words
from shoal.core import SLO, attainment, has_goal, met, normalised_latency, percentile


@dataclass(frozen=True, slots=True)
class Latency:
    """Mean and 99th percentile in seconds; NaN where nothing was measured."""

    mean_s: float
    p99_s: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Latency":
        """Of measured values."""
        measured = list(values)
        return cls(_mean(measured), percentile(measured, 99))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceReport:
    """One service's part of the demo.

    evictions: how often the scheduler took a request's KV away. alone_s: time of one request when nothing
    else ran, the unit of normalised_latency (the mean over requests). slo: the goals of its requests;
    slo_attainment: the share of them that met their goals, those that failed included. NaN where not known.
    """

    requests: int
    finished: int
    output_tokens: int
    output_tokens_per_s: float
    ttft: Latency
    tpot: Latency
    e2e: Latency
    evictions: int
    alone_s: float
    normalised_latency: float
    slo: SLO
    slo_attainment: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """What the demo measured.

    kv_peak_use: most of the KV pool in use at once, as a fraction. block_waste: largest fraction of
    the pool that nobody could use (padding, slots without a token, and free parts of blocks that one
    service held). None where the server did not say.
    """

    services: dict[str, ServiceReport]
    duration_s: float
    kv_peak_use: float | None
    block_waste: float | None
    failures: tuple[str, ...]

    @property
    def succeeded(self) -> bool:
        """Whether every request finished."""
        return all(report.finished == report.requests for report in self.services.values())

    def to_json(self) -> dict[str, Any]:
        """As plain values; NaN becomes None, because JSON has no NaN."""
        plain: dict[str, Any] = _without_nan(asdict(self))
        return plain | {"succeeded": self.succeeded}


def summarise(burst: Burst) -> DemoReport:
    """The figures of a burst that has ended."""
    services = {}
    for name in dict.fromkeys(exchange.prompt.service for exchange in burst.exchanges):
        exchanges = [exchange for exchange in burst.exchanges if exchange.prompt.service == name]
        records = [exchange.record() for exchange in exchanges if exchange.finished]
        tokens = sum(record.output_tokens for record in records)
        alone_s = burst.alone.get(name, math.nan)
        services[name] = ServiceReport(
            requests=len(exchanges),
            finished=len(records),
            output_tokens=tokens,
            output_tokens_per_s=tokens / burst.duration_s if burst.duration_s else math.nan,
            ttft=Latency.of(record.ttft_s for record in records),
            tpot=Latency.of(record.tpot_s for record in records if record.output_tokens > 1),
            e2e=Latency.of(record.e2e_s for record in records),
            evictions=burst.metrics.evictions.get(name, 0),
            alone_s=alone_s,
            normalised_latency=_mean(normalised_latency(record, alone_s) for record in records),
            slo=exchanges[0].slo,
            slo_attainment=attainment(_outcome(exchange) for exchange in exchanges),
        )
    failed = [exchange for exchange in burst.exchanges if not exchange.finished]
    return DemoReport(
        services=services,
        duration_s=burst.duration_s,
        kv_peak_use=burst.metrics.peak_use,
        block_waste=burst.metrics.peak_waste,
        failures=tuple(f"{e.prompt.service} {e.number}: {e.error or e.status}" for e in failed),
    )


def _outcome(exchange: Exchange) -> bool | None:
    """Whether a request met its goals; None if it had none."""
    if exchange.finished:
        return met(exchange.record(), exchange.slo)
    return False if has_goal(exchange.slo) else None


def report_table(report: DemoReport) -> Table:
    """One row for each service, at most 80 columns wide."""
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
    """Lines below the table: what its last columns are measured by, and what the services share."""
    services = report.services
    alone = [f"{name} {one.alone_s:.3g} s" for name, one in services.items() if not math.isnan(one.alone_s)]
    if alone:
        yield f"x alone: mean E2E over that of one request alone ({', '.join(alone)})"
    goals = [f"{name} {goal_words(one.slo)}" for name, one in services.items() if has_goal(one.slo)]
    if goals:
        yield f"SLO: share within {'; '.join(goals)}"
    yield (
        f"KV pool: {_percent(report.kv_peak_use)} in use at the peak, "
        f"at most {_percent(report.block_waste)} block waste"
    )
    yield "evictions: " + ", ".join(f"{name} {one.evictions}" for name, one in services.items())


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
