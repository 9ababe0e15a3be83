"""Prometheus metrics of the placement policy."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shoal.cluster.placing.status import PlacingStatus


class PlacementCollector(Collector):
    """What a policy did so far as metric families."""

    def __init__(self, status: PlacingStatus) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        """Nothing: metrics are read when the page is requested."""
        return []

    def collect(self) -> Iterator[Metric]:
        """See ``Collector``."""
        for name, text, counts in (
            ("searches", "Searches of a placement, by outcome: done or failed.", self._status.searches),
            ("changes", "Changes of the placement, by outcome: done or abandoned.", self._status.changes),
        ):
            counter = CounterMetricFamily(f"shoal_placement_{name}", text, labels=("outcome",))
            for outcome, count in counts.items():
                counter.add_metric([outcome], count)
            yield counter
        interval = GaugeMetricFamily(
            "shoal_placement_interval_seconds", "Length of the present interval of the placement policy."
        )
        if self._status.interval_s:
            interval.add_metric([], self._status.interval_s)
        search = GaugeMetricFamily(
            "shoal_placement_search_seconds", "How long the last search of a placement took."
        )
        if self._status.search_s is not None:
            search.add_metric([], self._status.search_s)
        yield from (interval, search)
