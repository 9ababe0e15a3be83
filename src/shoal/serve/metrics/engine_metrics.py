"""Prometheus metrics of engines and services: counters and gauges from their last reports.

All metrics of an engine have the label ``engine``, and there are no sums over engines, which queries would
count twice. Counters of a dead engine stay; its gauges (requests, KV) disappear.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shoal.cluster.manager.actions import MigrationOutcome
from shoal.cluster.manager.events import MigrationMethod
from shoal.cluster.status import EngineState, EngineStatus, ServiceStatus
from shoal.engine.stats import EngineStats, ServiceStats
from shoal.forecast import Spread
from shoal.schedule import Observed
from shoal.schedule.policies.residency import Place

Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)
_StatsByEngine = Mapping[str, EngineStats]


class EngineCollector(Collector):
    """A snapshot of engines as metric families; wanted: number of engines that are to run."""

    def __init__(self, engines: Sequence[EngineStatus], wanted: int) -> None:
        self._engines = engines
        self._wanted = wanted

    def describe(self) -> list[Metric]:
        """Nothing: metrics are read when the page is requested."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("shoal_wanted_engines", "Engines that are to run.", value=self._wanted)
        up = _gauge("engine_up", "Whether the engine runs.")
        standby = _gauge("engine_standby", "Whether the engine is on standby, so that it does not run.")
        restarts = _counter("engine_restarts", "How often the engine was started again.")
        beats = _gauge("engine_heartbeat_age_seconds", "How long ago the engine's last sign of life came.")
        weights = _gauge("weight_bytes", "Size of the weights in the engine's memory.")
        budget = _gauge("weight_memory_bytes", "Limit on the size of the weights in the engine's memory.")
        ages = _gauge("engine_state_age_seconds", "How old what this page says of the engine is.")
        leases = _gauge("request_leases", "Requests of other engines for which the engine keeps KV.")
        moves = _counter(
            "migrations", "Requests that were to move from the engine to another.", "method", "outcome"
        )
        withdrawn = _counter(
            "packing_withdrawals", "Requests that the dispatch took from the engine for lack of memory."
        )
        for engine in self._engines:
            on_standby = engine.state is EngineState.STANDBY
            standby.add_metric([engine.name], float(on_standby))
            if not on_standby:  # it is not down, either
                up.add_metric([engine.name], float(engine.runs))
            restarts.add_metric([engine.name], engine.restarts)
            leases.add_metric([engine.name], engine.leases)
            withdrawn.add_metric([engine.name], engine.withdrawn)
            for method, outcome in product(MigrationMethod, MigrationOutcome):
                moves.add_metric([engine.name, method, outcome], engine.migrations.get((method, outcome), 0))
            if engine.heartbeat_age_s is not None:
                beats.add_metric([engine.name], engine.heartbeat_age_s)
            if engine.runs and engine.resident_weight_bytes is not None:
                weights.add_metric([engine.name], engine.resident_weight_bytes)
            if engine.runs and engine.weights_memory_bytes is not None:
                budget.add_metric([engine.name], engine.weights_memory_bytes)
            if engine.stats is not None:
                ages.add_metric([engine.name], engine.stats_age_s)
        yield from (up, standby, restarts, beats, ages, weights, budget, leases, moves, withdrawn)
        stats_by_engine = {engine.name: engine.stats for engine in self._engines if engine.stats is not None}
        live_stats = {
            e.name: stats_by_engine[e.name] for e in self._engines if e.runs and e.name in stats_by_engine
        }
        yield from _service_gauges(live_stats)
        yield from _service_counters(stats_by_engine)
        yield from _observed_gauges(live_stats)
        yield _corrections(stats_by_engine)
        yield from _weights_gauges(live_stats)
        yield from _weights_counters(stats_by_engine)
        yield from _kv_gauges(live_stats)
        yield from _step_counters(stats_by_engine)
        yield from _usage(stats_by_engine, live_stats)


class ServiceCollector(Collector):
    """A snapshot of services, over all engines, as metric families."""

    def __init__(self, services: Mapping[str, ServiceStatus]) -> None:
        self._services = services

    def describe(self) -> list[Metric]:
        """Nothing: metrics are read when the page is requested."""
        return []

    def collect(self) -> Iterator[Metric]:
        engines = GaugeMetricFamily(
            "shoal_service_engines",
            "Engines of a service: those that are to have it, those that are ready, and those that load it.",
            labels=["service", "state"],
        )
        waiting = GaugeMetricFamily(
            "shoal_requests_without_engine", "Requests that no engine has.", labels=["service"]
        )
        resumed = CounterMetricFamily(
            "shoal_requests_resumed", "Requests that went on after the end of an engine.", labels=["service"]
        )
        batches = CounterMetricFamily(
            "shoal_batches", "Batches of requests that were formed and dispatched.", labels=["service"]
        )
        batched = CounterMetricFamily(
            "shoal_batched_requests",
            "Requests in these batches, in each that they were in.",
            labels=["service"],
        )
        for name, service in self._services.items():
            engines.add_metric([name, "wanted"], service.wanted)
            engines.add_metric([name, "ready"], service.ready)
            engines.add_metric([name, "loading"], service.loading)
            waiting.add_metric([name], service.waiting)
            resumed.add_metric([name], service.resumed)
            if service.batches:
                batches.add_metric([name], service.batches)
                batched.add_metric([name], service.batched_requests)
        yield from (engines, waiting, resumed, batches, batched)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"shoal_{name}", text, labels=["engine", *labels])


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"shoal_{name}", text, labels=["engine", *labels])


_GAUGES = {
    "requests_waiting": ("waiting", "Requests that wait for admission."),
    "requests_running": ("running", "Requests that are being computed."),
    "requests_swapped": ("swapped", "Waiting requests whose KV is saved in host memory."),
}
_COUNTERS = {
    "preemptions": "Running requests that were preempted and lost their blocks in the KV pool.",
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


def _service_gauges(stats: _StatsByEngine) -> Iterator[Metric]:
    for name, (field, text) in _GAUGES.items():
        yield _by_service(_gauge(name, text, "service"), stats, field)


def _service_counters(stats: _StatsByEngine) -> Iterator[Metric]:
    for name, text in _COUNTERS.items():
        yield _by_service(_counter(name, text, "service"), stats, name)


def _by_service(family: Family, stats: _StatsByEngine, field: str) -> Family:
    for engine, service, service_stats in _services(stats):
        family.add_metric([engine, service], getattr(service_stats, field))
    return family


def _services(stats: _StatsByEngine) -> Iterator[tuple[str, str, ServiceStats]]:
    """(engine, service, statistics) of every service of every engine."""
    for engine, engine_stats in stats.items():
        for service, service_stats in engine_stats.services.items():
            yield engine, service, service_stats


_Sample = tuple[tuple[str, ...], float | None]
"""Label values after ``service``, and the value; None if there is no data."""


def _observed_gauges(stats: _StatsByEngine) -> Iterator[Metric]:
    """Statistics that the engines' policies use; samples without data are left out."""
    for name, text, labels, read_samples in _OBSERVED:
        gauge = _gauge(name, text, "service", *labels)
        for engine, service, service_stats in _services(stats):
            for values, value in read_samples(service_stats.observed) if service_stats.observed else ():
                if value is not None:
                    gauge.add_metric([engine, service, *values], value)
        yield gauge


def _corrections(stats: _StatsByEngine) -> Metric:
    corrections = _counter("length_corrections", "Requests that outgrew their predicted length.", "service")
    for engine, service, service_stats in _services(stats):
        if service_stats.observed is not None and service_stats.observed.corrections is not None:
            corrections.add_metric([engine, service], service_stats.observed.corrections)
    return corrections


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


_WEIGHTS_COUNTERS = {
    "weight_fetches": ("fetches", "Fetches of the weights of a service."),
    "weight_evictions": ("evictions", "How often the weights of a service left the engine's memory."),
    "weight_fetch_seconds": ("fetching_s", "Time of the fetches."),
    "weight_waits": ("waits", "How often a request waited for weights that were not in memory."),
    "weight_wait_seconds": ("waiting_s", "Time of these waits."),
}


def _weights_gauges(stats: _StatsByEngine) -> Iterator[Metric]:
    places = _gauge("weight_place", "1 for the place where the weights of a service are.", "service", "place")
    for engine, service, service_stats in _services(stats):
        if service_stats.weights is not None:
            for place in Place:
                places.add_metric([engine, service, place.value], float(place is service_stats.weights.place))
    yield places


def _weights_counters(stats: _StatsByEngine) -> Iterator[Metric]:
    for name, (field, text) in _WEIGHTS_COUNTERS.items():
        counter = _counter(name, text, "service")
        for engine, service, service_stats in _services(stats):
            if service_stats.weights is not None:
                counter.add_metric([engine, service], getattr(service_stats.weights, field))
        yield counter


def _kv_gauges(stats: _StatsByEngine) -> Iterator[Metric]:
    use = _gauge("kv_bytes", "Bytes of the KV pool, by use.", "use")
    utilisation = _gauge("kv_utilisation", "Share of the KV pool in live blocks.")
    for engine, engine_stats in stats.items():
        pool = engine_stats.pool
        for name in ("total", "live", "cached", "padding", "unfilled", "external"):
            use.add_metric([engine, name], getattr(pool, f"{name}_bytes"))
        utilisation.add_metric([engine], pool.live_bytes / pool.total_bytes)
    blocks = _gauge("kv_blocks", "KV blocks of a service, by use.", "service", "use")
    for engine, service, service_stats in _services(stats):
        for name in ("live", "cached", "free"):
            blocks.add_metric([engine, service, name], getattr(service_stats, f"{name}_blocks"))
    yield from (use, utilisation, blocks)


def _step_counters(stats: _StatsByEngine) -> Iterator[Metric]:
    steps = _counter("steps", "Steps that the engine ran.")
    parts = _counter("step_seconds", "Where the time of all steps went.", "part")
    for engine, engine_stats in stats.items():
        steps.add_metric([engine], engine_stats.steps.count)
        for part in _STEP_PARTS:
            parts.add_metric([engine, part], getattr(engine_stats.steps, f"{part}_ns") / 1e9)
    yield from (steps, parts)


def _usage(stats: _StatsByEngine, live: _StatsByEngine) -> Iterator[Metric]:
    """What processes of engines use; a GPU's figures are of all its processes."""
    cpu = _counter(
        "engine_cpu_seconds", "CPU time of the engine's process, and of its children that have ended."
    )
    memory = _gauge("engine_memory_bytes", "Memory in use by the engine's process.")
    busy = _gauge("gpu_utilisation", "Share of the last moments in which a kernel ran on the engine's GPU.")
    used = _gauge("gpu_memory_bytes", "Memory in use on the engine's GPU, by all processes.")
    power = _gauge("gpu_power_watts", "Power that the engine's GPU draws.")
    for engine, each in stats.items():
        if each.usage is not None:
            cpu.add_metric([engine], each.usage.cpu_s)
    for engine, each in live.items():
        if each.usage is None:
            continue
        memory.add_metric([engine], each.usage.rss_bytes)
        if (device := each.usage.device) is not None:
            busy.add_metric([engine], device.utilisation)
            used.add_metric([engine], device.memory_bytes)
            power.add_metric([engine], device.power_w)
    yield from (cpu, memory, busy, used, power)
