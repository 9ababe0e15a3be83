"""The /metrics page: latencies that the server measured, and the counters of its engine."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shoal.core import (
    SLO,
    EngineDied,
    FinishReason,
    GoalsOutOfReach,
    QueueFull,
    RequestRecord,
    Service,
    has_goal,
    met,
    normalised_latency,
    resolve_slo,
)
from shoal.engine.stats import EngineStats
from shoal.forecast import Spread
from shoal.schedule import Observed

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)
_TPOT_BUCKETS = (0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_E2E_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_NORMALISED_BUCKETS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 50, 100)
_OUTCOMES = {True: "met", False: "missed"}
_REFUSAL_REASONS = {
    QueueFull: "queue_full",
    GoalsOutOfReach: "goals_out_of_reach",
    EngineDied: "engine_died",
}


class ServerMetrics:
    """Metrics that the server collects itself; each choice of a response counts as a request."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = {service.name: service for service in services}
        self.registry = CollectorRegistry()
        self._ttft = self._histogram("ttft_seconds", "Time from arrival to the first token.", _TTFT_BUCKETS)
        self._tpot = self._histogram(
            "tpot_seconds", "Mean time per output token after the first.", _TPOT_BUCKETS
        )
        self._e2e = self._histogram("e2e_seconds", "Time from arrival to the last token.", _E2E_BUCKETS)
        self._normalised = self._histogram(
            "normalised_latency",
            "Time from arrival to the last token, in execution times of the service.",
            _NORMALISED_BUCKETS,
        )
        self._finished = Counter(
            "shoal_requests_finished",
            "Requests that ended, by reason: stop, length, cancelled or error.",
            ("service", "reason"),
            registry=self.registry,
        )
        self._refused = Counter(
            "shoal_requests_refused",
            "Requests that were refused, by reason: queue_full, goals_out_of_reach or engine_died.",
            ("service", "reason"),
            registry=self.registry,
        )
        self._goals = Counter(
            "shoal_slo_requests",
            "Requests with latency goals that ended, by outcome: met or missed.",
            ("service", "outcome"),
            registry=self.registry,
        )
        for service in services:
            self._create_samples(service)

    def _create_samples(self, service: Service) -> None:
        """Start a service's metrics at 0: a counter that first appears with a 1 has no rate."""
        for histogram in (self._ttft, self._tpot, self._e2e):
            histogram.labels(service.name)
        for reason in _REFUSAL_REASONS.values():
            self._refused.labels(service.name, reason)
        if service.execution_s is not None:
            self._normalised.labels(service.name)
        if has_goal(service.slo):
            for outcome in _OUTCOMES.values():
                self._goals.labels(service.name, outcome)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"shoal_request_{name}", text, ("service",), buckets=buckets, registry=self.registry)

    def count_finished(self, reason: FinishReason, record: RequestRecord, slo: SLO) -> None:
        """Count a request that finished, with its latencies; ``slo``: the request's own goals."""
        service = self._services[record.service]
        self._finished.labels(service.name, reason.value).inc()
        self._ttft.labels(service.name).observe(record.ttft_s)
        self._e2e.labels(service.name).observe(record.e2e_s)
        if record.output_tokens > 1:
            self._tpot.labels(service.name).observe(record.tpot_s)
        if service.execution_s is not None:
            self._normalised.labels(service.name).observe(normalised_latency(record, service.execution_s))
        outcome = met(record, resolve_slo(slo, service.slo, service.execution_s))
        if outcome is not None:
            self._goals.labels(service.name, _OUTCOMES[outcome]).inc()

    def count_refused(self, name: str, error: QueueFull | EngineDied, requests: int, slo: SLO) -> None:
        """Count valid requests that were refused with ``error``; who waited until then missed its goals."""
        self._refused.labels(name, _REFUSAL_REASONS[type(error)]).inc(requests)
        if isinstance(error, GoalsOutOfReach):
            self._count_missed(name, slo, requests)

    def _count_missed(self, name: str, slo: SLO, requests: int) -> None:
        """Requests got nothing, or not all; ``slo``: their own goals, if they have any."""
        service = self._services[name]
        if has_goal(resolve_slo(slo, service.slo, service.execution_s)):
            self._goals.labels(name, _OUTCOMES[False]).inc(requests)

    def count_unfinished(self, name: str, reason: FinishReason, slo: SLO) -> None:
        """Count a request that was cancelled or failed; a failed one missed its goals, if it had any."""
        self._finished.labels(name, reason.value).inc()
        if reason is FinishReason.ERROR:
            self._count_missed(name, slo, 1)

    def render(self, stats: EngineStats | None, age_s: float = 0.0) -> bytes:
        """The Prometheus text. ``stats`` are ``age_s`` seconds old, and None if the engine has ended."""
        engine = CollectorRegistry()
        engine.register(_EngineCollector(stats, age_s))
        return generate_latest(self.registry) + generate_latest(engine)


class _EngineCollector(Collector):
    """A snapshot of the engine's counters as metric families."""

    def __init__(self, stats: EngineStats | None, age_s: float) -> None:
        self._stats = stats
        self._age_s = age_s

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        up = 0 if self._stats is None else 1
        yield GaugeMetricFamily("shoal_engine_up", "Whether the engine runs.", value=up)
        if self._stats is not None:
            yield GaugeMetricFamily(
                "shoal_engine_state_age_seconds",
                "How old what this page says of the engine is.",
                value=self._age_s,
            )
            yield from _service_metrics(self._stats)
            yield from _observed_metrics(self._stats)
            yield from _kv_metrics(self._stats)
            yield from _step_metrics(self._stats)


_GAUGES = {
    "requests_waiting": ("waiting", "Requests that wait for admission."),
    "requests_running": ("running", "Requests that are being computed."),
    "requests_swapped": ("swapped", "Waiting requests whose KV is saved in host memory."),
}
_COUNTERS = {
    "evictions": "Running requests that were preempted and lost their blocks in the KV pool.",
    "recomputed_tokens": "Tokens computed again after preemptions.",
    "swapped_tokens": "Tokens whose KV was saved in host memory at preemptions.",
    "compacted_blocks": "KV blocks moved so that merged blocks became free.",
    "cached_tokens": "Prompt tokens found in the prefix cache.",
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "output_tokens": "Tokens generated.",
    "long_token_gaps": "Ended requests with a time between two tokens beyond scheduler.max_token_gap.",
    "failed_steps": "Steps that failed, whose requests were tried again in smaller ones.",
}
_STEP_PARTS = ("schedule", "prepare", "forward", "sample", "update", "reply")


def _service_metrics(stats: EngineStats) -> Iterator[Metric]:
    for name, (field, text) in _GAUGES.items():
        gauge = GaugeMetricFamily(f"shoal_{name}", text, labels=["service"])
        for service, service_stats in stats.services.items():
            gauge.add_metric([service], getattr(service_stats, field))
        yield gauge
    for name, text in _COUNTERS.items():
        counter = CounterMetricFamily(f"shoal_{name}", text, labels=["service"])
        for service, service_stats in stats.services.items():
            counter.add_metric([service], getattr(service_stats, name))
        yield counter


_Sample = tuple[tuple[str, ...], float | None]
"""Label values after ``service``, and the value; None if there is no data."""


def _observed_metrics(stats: EngineStats) -> Iterator[Metric]:
    """The statistics that the engine's policies use; samples without data are left out."""
    for name, text, labels, read_samples in _OBSERVED:
        gauge = GaugeMetricFamily(f"shoal_{name}", text, labels=["service", *labels])
        for service, observed in _observed_services(stats).items():
            for values, value in read_samples(observed):
                if value is not None:
                    gauge.add_metric([service, *values], value)
        yield gauge
    corrections = CounterMetricFamily(
        "shoal_length_corrections", "Requests that outgrew their predicted length.", labels=["service"]
    )
    for service, observed in _observed_services(stats).items():
        if observed.corrections is not None:
            corrections.add_metric([service], observed.corrections)
    yield corrections


def _observed_services(stats: EngineStats) -> Mapping[str, Observed]:
    return {
        name: service_stats.observed
        for name, service_stats in stats.services.items()
        if service_stats.observed is not None
    }


def _arrivals(observed: Observed) -> Iterator[_Sample]:
    yield (), observed.traffic.arrivals_per_s


def _execution(observed: Observed) -> Iterator[_Sample]:
    yield from _spread(observed.traffic.execution_s)


def _tokens(observed: Observed) -> Iterator[_Sample]:
    for kind, spread in (
        ("prompt", observed.traffic.prompt_tokens),
        ("output", observed.traffic.output_tokens),
    ):
        for values, value in _spread(spread):
            yield (kind, *values), value


def _spread(spread: Spread | None) -> Iterator[_Sample]:
    if spread is not None:
        yield ("mean",), spread.mean
        yield ("deviation",), spread.deviation


def _latency(observed: Observed) -> Iterator[_Sample]:
    yield ("ttft",), observed.traffic.ttft_s
    yield ("e2e",), observed.traffic.latency_s


def _attainment(observed: Observed) -> Iterator[_Sample]:
    yield (), observed.traffic.attainment


def _accuracy(observed: Observed) -> Iterator[_Sample]:
    if observed.accuracy is not None and observed.accuracy.samples:
        yield (), observed.accuracy.hit_rate


def _majority(observed: Observed) -> Iterator[_Sample]:
    if observed.accuracy is not None and observed.accuracy.samples:
        yield (), observed.accuracy.majority_share


_OBSERVED: Sequence[tuple[str, str, Sequence[str], Callable[[Observed], Iterator[_Sample]]]] = (
    ("arrival_rate", "Requests that arrive in a second, of late.", (), _arrivals),
    ("execution_seconds", "Time of the steps of a request, as orders use it.", ("stat",), _execution),
    ("request_tokens", "Tokens of the requests that finished last.", ("kind", "stat"), _tokens),
    ("mean_latency_seconds", "Mean latency of requests that finished of late.", ("kind",), _latency),
    ("slo_attainment", "Share of requests with goals that met them, of late.", (), _attainment),
    ("length_prediction_accuracy", "Share of output lengths predicted correctly, of late.", (), _accuracy),
    ("length_prediction_majority", "Share of the commonest output length, of late.", (), _majority),
)


def _kv_metrics(stats: EngineStats) -> Iterator[Metric]:
    pool = stats.pool
    use = GaugeMetricFamily("shoal_kv_bytes", "Bytes of the KV pool, by use.", labels=["use"])
    for name in ("total", "live", "cached", "padding", "unfilled", "external"):
        use.add_metric([name], getattr(pool, f"{name}_bytes"))
    yield use
    yield GaugeMetricFamily(
        "shoal_kv_utilisation",
        "Share of the KV pool in live blocks.",
        value=pool.live_bytes / pool.total_bytes,
    )
    blocks = GaugeMetricFamily(
        "shoal_kv_blocks", "KV blocks of a service, by use.", labels=["service", "use"]
    )
    for service, service_stats in stats.services.items():
        for name in ("live", "cached", "free"):
            blocks.add_metric([service, name], getattr(service_stats, f"{name}_blocks"))
    yield blocks


def _step_metrics(stats: EngineStats) -> Iterator[Metric]:
    yield CounterMetricFamily("shoal_steps", "Steps that the engine ran.", value=stats.steps.count)
    parts = CounterMetricFamily("shoal_step_seconds", "Where the time of all steps went.", labels=["part"])
    for part in _STEP_PARTS:
        parts.add_metric([part], getattr(stats.steps, f"{part}_ns") / 1e9)
    yield parts
