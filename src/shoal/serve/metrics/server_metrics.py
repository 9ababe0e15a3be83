"""Latencies, finished and refused requests as Prometheus metrics, and the rendered /metrics page."""

import math
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from shoal.cluster.placing.status import PlacingStatus
from shoal.cluster.status import EngineStatus, ServiceStatus
from shoal.core import (
    SLO,
    EngineDied,
    FinishReason,
    QueueFull,
    RequestRecord,
    Service,
    ServiceUnavailable,
    SLOExpired,
    TokenDeadlines,
    has_goal,
    met,
    normalised_latency,
    resolve_slo,
)
from shoal.serve.metrics.engine_metrics import EngineCollector, ServiceCollector
from shoal.serve.metrics.placement_metrics import PlacementCollector
from shoal.serve.metrics.usage import UsageCounter
from shoal.serve.metrics.vllm_names import VllmCollector

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)
_TPOT_BUCKETS = (0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 5)
_QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)
_TOKENS_BUCKETS = tuple(2**power for power in range(18))
_E2E_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_NORMALISED_BUCKETS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 50, 100)
TTFT_BOUNDS = (*_TTFT_BUCKETS, math.inf)
INTER_TOKEN_BOUNDS = (*_INTER_TOKEN_BUCKETS, math.inf)
"""Upper bounds of the buckets in ``ServerMetrics.totals``, in seconds."""
_OUTCOMES = {True: "met", False: "missed"}
_REFUSAL_REASONS = {
    QueueFull: "queue_full",
    SLOExpired: "goals_out_of_reach",
    ServiceUnavailable: "no_engine",
    EngineDied: "engine_died",
}


class ServerMetrics:
    """Metrics that the server collects itself; each choice of a response counts as a request.

    build: labels of ``shoal_build_info``. vllm: also write metrics under vLLM's names.
    """

    def __init__(
        self, services: Sequence[Service], build: Mapping[str, str] | None = None, vllm: bool = False
    ) -> None:
        self._services: dict[str, Service] = {}
        self._vllm = vllm
        self.registry = CollectorRegistry()
        if build:
            text = "1, with what runs as labels."
            Gauge("shoal_build_info", text, tuple(build), registry=self.registry).labels(**build).set(1)
        self._ttft = self._histogram("ttft_seconds", "Time from arrival to the first token.", _TTFT_BUCKETS)
        self._tpot = self._histogram(
            "tpot_seconds", "Mean time per output token after the first.", _TPOT_BUCKETS
        )
        self._queue = self._histogram("queue_seconds", "Time from arrival to admission.", _QUEUE_BUCKETS)
        self._prefill = self._histogram(
            "prefill_seconds", "Time from admission to the first token.", _TTFT_BUCKETS
        )
        self._decode = self._histogram(
            "decode_seconds", "Time from the first to the last token.", _E2E_BUCKETS
        )
        self._prompt_tokens = self._histogram("prompt_tokens", "Tokens of the prompt.", _TOKENS_BUCKETS)
        self._output_tokens = self._histogram("output_tokens", "Tokens of the output.", _TOKENS_BUCKETS)
        self._inter_token = Histogram(
            "shoal_inter_token_seconds",
            "Time between two tokens of an output.",
            ("service",),
            buckets=_INTER_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._http = self._counter(
            "shoal_http_requests",
            "HTTP requests that were answered, by route, method and status.",
            "route",
            "method",
            "status",
        )
        self._refused_connections = self._counter(
            "shoal_connections_refused", "Connections closed with a 503 because there were too many."
        )
        self._e2e = self._histogram("e2e_seconds", "Time from arrival to the last token.", _E2E_BUCKETS)
        self._normalised = self._histogram(
            "normalised_latency",
            "Time from arrival to the last token, in execution times of the service.",
            _NORMALISED_BUCKETS,
        )
        self._finished = self._counter(
            "shoal_requests_finished",
            "Requests that ended, by reason: stop, length, cancelled, invalid or error.",
            "service",
            "reason",
        )
        self._refused = self._counter(
            "shoal_requests_refused",
            "Requests refused, by reason: queue_full, goals_out_of_reach, no_engine or engine_died.",
            "service",
            "reason",
        )
        self._goals = self._counter(
            "shoal_slo_requests",
            "Requests with latency goals that ended, by outcome: met or missed.",
            "service",
            "outcome",
        )
        self._goal_tokens = self._counter(
            "shoal_slo_tokens",
            "Tokens of requests with goals for TTFT and TPOT, by outcome: on_time or late.",
            "service",
            "outcome",
        )
        self.usage = UsageCounter()
        self.registry.register(self.usage)
        for service in services:
            self.add_service(service)

    def add_service(self, service: Service) -> None:
        """Add the metrics of a service; a service that is added again continues its metrics."""
        self._services[service.name] = service
        self._create_samples(service)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _create_samples(self, service: Service) -> None:
        """Start a service's metrics at 0, because a counter that first appears as 1 has no rate."""
        for histogram in (
            self._ttft,
            self._tpot,
            self._e2e,
            self._queue,
            self._prefill,
            self._decode,
            self._prompt_tokens,
            self._output_tokens,
            self._inter_token,
        ):
            histogram.labels(service.name)
        for reason in _REFUSAL_REASONS.values():
            self._refused.labels(service.name, reason)
        if service.execution_s is not None:
            self._normalised.labels(service.name)
        if has_goal(service.slo):
            for outcome in _OUTCOMES.values():
                self._goals.labels(service.name, outcome)
        if TokenDeadlines.of(service.slo, 0) is not None:
            self.count_deadlines(service.name, 0, 0)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"shoal_request_{name}", text, ("service",), buckets=buckets, registry=self.registry)

    def inter_token(self, service: str) -> Histogram:
        """The histogram of a service's inter-token latency in seconds; look it up once for many tokens."""
        return self._inter_token.labels(service)

    def token_deadlines(self, name: str, slo: SLO, arrival_ns: int) -> TokenDeadlines | None:
        """Deadlines of the tokens of a request; slo: its own goals."""
        service = self._services[name]
        own = SLO(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s)
        return TokenDeadlines.of(resolve_slo(own, service.slo, service.execution_s), arrival_ns)

    def count_deadlines(self, service: str, on_time: int, late: int) -> None:
        """Count tokens within and after their deadlines."""
        self._goal_tokens.labels(service, "on_time").inc(on_time)
        self._goal_tokens.labels(service, "late").inc(late)

    def count_http(self, route: str, method: str, status: int) -> None:
        self._http.labels(route, method, str(status)).inc()

    def count_refused_connection(self) -> None:
        """Count a connection that was refused because there are too many."""
        self._refused_connections.inc()

    def count_finished(self, reason: FinishReason, record: RequestRecord, slo: SLO, queue_s: float) -> None:
        """Count a finished request, with its latencies.

        slo: the request's own goals. queue_s: from arrival to first admission.
        """
        service = self._services[record.service]
        self._finished.labels(service.name, reason.value).inc()
        self._ttft.labels(service.name).observe(record.ttft_s)
        self._e2e.labels(service.name).observe(record.e2e_s)
        self._queue.labels(service.name).observe(queue_s)
        self._prefill.labels(service.name).observe(max(0.0, record.ttft_s - queue_s))
        self._decode.labels(service.name).observe(record.e2e_s - record.ttft_s)
        self._prompt_tokens.labels(service.name).observe(record.prompt_tokens)
        self._output_tokens.labels(service.name).observe(record.output_tokens)
        if record.output_tokens > 1:
            self._tpot.labels(service.name).observe(record.tpot_s)
        if service.execution_s is not None:
            self._normalised.labels(service.name).observe(normalised_latency(record, service.execution_s))
        outcome = met(record, resolve_slo(slo, service.slo, service.execution_s))
        if outcome is not None:
            self._goals.labels(service.name, _OUTCOMES[outcome]).inc()

    def count_refused(self, name: str, error: QueueFull | EngineDied, requests: int, slo: SLO) -> None:
        """Count valid requests that were refused with ``error``; SLOExpired is a missed goal, too."""
        self._refused.labels(name, _REFUSAL_REASONS[type(error)]).inc(requests)
        if isinstance(error, SLOExpired):
            self._count_missed(name, slo, requests)

    def _count_missed(self, name: str, slo: SLO, requests: int) -> None:
        """Count requests that missed their goals, if they or the service have any."""
        service = self._services[name]
        if has_goal(resolve_slo(slo, service.slo, service.execution_s)):
            self._goals.labels(name, _OUTCOMES[False]).inc(requests)

    def count_unfinished(self, name: str, reason: FinishReason, slo: SLO) -> None:
        """Count an unfinished request; a failed one missed its goals, if it had any."""
        self._finished.labels(name, reason.value).inc()
        if reason is FinishReason.ERROR:
            self._count_missed(name, slo, 1)

    def totals(self) -> dict[tuple[str, str], tuple[float, ...]]:
        """Counters by (name, service), as of now.

        The names are ttft and inter_token (cumulative buckets), refused, met and missed (goals).
        """
        found: dict[tuple[str, str], tuple[float, ...]] = {}
        for name, histogram in (("ttft", self._ttft), ("inter_token", self._inter_token)):
            for labels, value in _samples(histogram, "_bucket"):
                key = name, labels["service"]
                found[key] = (*found.get(key, ()), value)
        for labels, value in _samples(self._refused, "_total"):
            key = "refused", labels["service"]
            found[key] = (found.get(key, (0.0,))[0] + value,)
        for labels, value in _samples(self._goals, "_total"):
            found[labels["outcome"], labels["service"]] = (value,)
        return found

    def render(
        self,
        engines: Sequence[EngineStatus],
        services: Mapping[str, ServiceStatus],
        wanted_engines: int,
        placing: PlacingStatus | None = None,
    ) -> bytes:
        """The page. wanted_engines: number of engines that are to run. placing: of the placement policy."""
        cluster = CollectorRegistry()
        cluster.register(EngineCollector(engines, wanted_engines))
        cluster.register(ServiceCollector(services))
        if placing is not None:
            cluster.register(PlacementCollector(placing))
        page = generate_latest(self.registry) + generate_latest(cluster)
        if self._vllm:
            renamed = CollectorRegistry()
            renamed.register(VllmCollector(self.registry, cluster))
            page += generate_latest(renamed)
        return page


def _samples(metric: Histogram | Counter, suffix: str) -> Iterator[tuple[Mapping[str, str], float]]:
    """(labels, value) of the samples whose names end with ``suffix``; buckets by their bounds."""
    for family in metric.collect():
        for sample in family.samples:
            if sample.name.endswith(suffix):
                yield sample.labels, sample.value
