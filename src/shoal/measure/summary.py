"""Summary of a run: latency percentiles, throughput, goodput, SLO attainment, overall and by service."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from shoal.core import attainment, has_goal, met, normalised_latency, percentile
from shoal.measure.inter_token_latencies import InterTokenLatencies
from shoal.measure.records import EngineTotals, RequestRow, RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean and percentiles of one quantity over requests."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread | None":
        """The spread of ``values``; None if there are none."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p95, p99 = (percentile(ordered, percent) for percent in (50, 90, 95, 99))
        return cls(mean=fmean(ordered), p50=p50, p90=p90, p95=p95, p99=p99)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """The figures of one service, or of all services.

    A figure without any request is None. Rates are per second of the run; latencies are those of answered
    requests.
    """

    requests: int
    """All requests that arrived."""
    answered: int
    """Requests with a complete response."""
    refused: int
    """Requests refused on arrival, or when their goals were out of reach."""
    failed: int
    """Requests that ended with an error."""
    cancelled: int
    """Requests cancelled by their client."""
    cut: int
    """Answered requests that ended at a limit (``max_tokens``, the context, the pool)."""
    prompt_tokens: int
    """Prompt tokens of all requests that were not refused."""
    output_tokens: int
    """Output tokens of all requests, also of those that were not answered."""
    throughput: float | None
    """Answered requests per second."""
    output_tokens_per_s: float | None
    goodput: float | None
    """Answered requests per second that met their goals; None if no request has goals."""
    slo_attainment: float | None
    """Share of the requests with goals that met them. Refused and failed requests missed theirs; cancelled
    requests do not count."""
    tokens_on_time: float | None
    """Share of the tokens with deadlines (``TokenDeadlines``) that were on time; None if none has any. Tokens
    that were never made do not count."""
    ttft_s: Spread | None
    tpot_s: Spread | None
    """Time per output token, over responses of two tokens or more."""
    e2e_s: Spread | None
    largest_gap_s: Spread | None
    """Largest inter-token latency (MTPOT), over responses of two tokens or more."""
    inter_token_s: Spread | None
    """Inter-token latency over all tokens after the first, also of requests that were not answered; None if
    not recorded."""
    normalised_latency: Spread | None
    """End-to-end latency over execution time, of services with a known execution time."""
    preemptions: int
    recomputed_tokens: int
    """Tokens computed again after preemptions."""
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of one run."""

    title: str
    duration_s: float
    """Time from the first arrival to the end of the run."""
    overall: GroupSummary
    services: dict[str, GroupSummary]
    kv_used_mean: float | None
    """Share of the pool in use, mean over the steps of all engines; None without steps."""
    kv_used_peak: float | None
    """Largest share of the pool in use in any engine; None without steps."""
    engines: tuple[EngineTotals, ...]
    """By number of the engine."""
    engines_up: float | None
    """Mean number of engines that ran or loaded; None: all did, all the time."""
    moves: Mapping[str, Mapping[str, int]]
    """Migrations as in ``RunRecord``."""
    withdrawn: int
    """As in ``RunRecord``."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without NaN."""
        plain = asdict(self)
        plain["engines"] = list(plain["engines"])
        return plain


def met_goals(row: RequestRow) -> bool | None:
    """Whether a request met its goals; None without goals or after a cancellation.

    A refused or failed request has missed its goals.
    """
    if row.answered:
        return met(row, row.slo)
    return False if has_goal(row.slo) and row.finish != "cancelled" else None


def normalised_latency_of(row: RequestRow, run: RunRecord) -> float | None:
    """Normalised latency of an answered request whose service has an execution time; else None."""
    execution_s = run.execution_s.get(row.service)
    return normalised_latency(row, execution_s) if row.answered and execution_s is not None else None


def run_window_ns(run: RunRecord) -> tuple[int, int]:
    """First arrival, and the end of the last step or response; (0, 0) for an empty run."""
    if not run.requests:
        return 0, run.end_ns
    start = min(row.arrival_ns for row in run.requests)
    return start, max(run.end_ns, max(row.finish_ns for row in run.requests))


def summarise(run: RunRecord) -> Summary:
    """The figures of a finished run, by the formulas of ``shoal.core``."""
    start_ns, end_ns = run_window_ns(run)
    duration_s = (end_ns - start_ns) / 1e9
    by_service: dict[str, list[RequestRow]] = {}
    for row in run.requests:
        by_service.setdefault(row.service, []).append(row)
    inter_token = run.inter_token_latencies
    steps = sum(engine.steps for engine in run.engines)
    weighted = math.fsum(engine.kv_used_mean * engine.steps for engine in run.engines if engine.steps)
    return Summary(
        title=run.title,
        duration_s=duration_s,
        overall=_summarise_group(
            run.requests, run, duration_s, InterTokenLatencies.merge(inter_token.values())
        ),
        services={
            name: _summarise_group(
                by_service[name], run, duration_s, inter_token.get(name, InterTokenLatencies())
            )
            for name in sorted(by_service)
        },
        kv_used_mean=weighted / steps if steps else None,
        kv_used_peak=max(engine.kv_used_peak for engine in run.engines if engine.steps) if steps else None,
        engines=tuple(run.engines),
        engines_up=_engines_up(run.engines),
        moves=run.moves,
        withdrawn=run.withdrawn,
    )


def _engines_up(engines: Sequence[EngineTotals]) -> float | None:
    shares = [engine.up for engine in engines if engine.up is not None]
    return math.fsum(shares) if shares else None


def _summarise_group(
    rows: Sequence[RequestRow], run: RunRecord, duration_s: float, latencies: InterTokenLatencies
) -> GroupSummary:
    answered = [row for row in rows if row.answered]
    multi_token = [row for row in answered if row.output_tokens > 1]
    outcomes = [met_goals(row) for row in rows]
    with_goals = any(has_goal(row.slo) for row in rows)
    normalised_latencies = (normalised_latency_of(row, run) for row in answered)
    output_tokens = sum(row.output_tokens for row in rows)
    share = attainment(outcomes)
    return GroupSummary(
        requests=len(rows),
        answered=len(answered),
        refused=sum(row.finish == "refused" for row in rows),
        failed=sum(row.finish == "error" for row in rows),
        cancelled=sum(row.finish == "cancelled" for row in rows),
        cut=sum(row.finish == "length" for row in rows),
        prompt_tokens=sum(row.prompt_tokens for row in rows if row.finish != "refused"),
        output_tokens=output_tokens,
        throughput=_rate(len(answered), duration_s),
        output_tokens_per_s=_rate(output_tokens, duration_s),
        goodput=_rate(outcomes.count(True), duration_s) if with_goals else None,
        slo_attainment=None if math.isnan(share) else share,
        tokens_on_time=_share_on_time(rows),
        ttft_s=Spread.of(row.ttft_s for row in answered),
        tpot_s=Spread.of(row.tpot_s for row in multi_token),
        e2e_s=Spread.of(row.e2e_s for row in answered),
        largest_gap_s=Spread.of(row.mtpot_s for row in multi_token),
        inter_token_s=_inter_token_spread(latencies),
        normalised_latency=Spread.of(value for value in normalised_latencies if value is not None),
        preemptions=sum(row.preemptions for row in rows),
        recomputed_tokens=sum(row.recomputed_tokens for row in rows),
        cached_tokens=sum(row.cached_tokens for row in rows),
    )


def _share_on_time(rows: Sequence[RequestRow]) -> float | None:
    counted = [(row.tokens_on_time, row.output_tokens) for row in rows if row.tokens_on_time is not None]
    tokens = sum(tokens for _, tokens in counted)
    return sum(on_time for on_time, _ in counted) / tokens if tokens else None


def _inter_token_spread(latencies: InterTokenLatencies) -> Spread | None:
    if not len(latencies):
        return None
    p50, p90, p95, p99 = (latencies.percentile_s(percent) for percent in (50, 90, 95, 99))
    return Spread(mean=latencies.mean_s, p50=p50, p90=p90, p95=p95, p99=p99)


def _rate(count: int, duration_s: float) -> float | None:
    return count / duration_s if duration_s > 0 else None
