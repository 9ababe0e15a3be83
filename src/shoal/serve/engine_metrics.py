"""The counters and gauges of an engine as Prometheus metrics."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shoal.engine.stats import EngineStats
from shoal.forecast import Spread
from shoal.schedule import Observed


class EngineCollector(Collector):
    """A snapshot of the engine's counters as metric families."""

    def __init__(self, stats: EngineStats | None, age_s: float) -> None:
        self._stats = stats
        self._age_s = age_s

    def describe(self) -> list[Metric]:
        """None: they are read when they are asked for."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All of them; without an engine only that there is none."""
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


def _spread(spread: Spread | None) -> Iterator[_Sample]:
    if spread is not None:
        yield ("mean",), spread.mean
        yield ("deviation",), spread.deviation


def _accuracy(observed: Observed) -> Iterator[_Sample]:
    if observed.accuracy is not None and observed.accuracy.samples:
        yield (), observed.accuracy.hit_rate


def _majority(observed: Observed) -> Iterator[_Sample]:
    if observed.accuracy is not None and observed.accuracy.samples:
        yield (), observed.accuracy.majority_share


_OBSERVED: Sequence[tuple[str, str, Sequence[str], Callable[[Observed], Iterator[_Sample]]]] = (
    ("arrival_rate", "Requests that arrive in a second, of late.", (), _arrivals),
    ("execution_seconds", "Time of the steps of a request, as orders use it.", ("stat",), _execution),
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
