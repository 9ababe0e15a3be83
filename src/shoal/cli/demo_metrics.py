"""What the demo keeps of the server's /metrics."""

from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

_WASTE = ("padding", "unfilled", "external")


@dataclass(slots=True)
class MetricsSummary:
    """Running summary of the /metrics pages seen so far.

    evictions: by service, from the last page. peak_use: largest share of the KV pool in live blocks.
    peak_waste: largest share of the pool that nobody could use: padding inside live blocks, slots in them
    that hold no token yet, and free blocks inside merged blocks that another service holds. None where no
    page said. age_s: how old the engine's state on the last page was.
    """

    evictions: dict[str, int] = field(default_factory=dict)
    peak_use: float | None = None
    peak_waste: float | None = None
    age_s: float = 0.0

    def add(self, page: str) -> None:
        """Take in one page of Prometheus text."""
        pool: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == "shoal_evictions_total":
                    self.evictions[sample.labels["service"]] = int(sample.value)
                elif sample.name == "shoal_engine_state_age_seconds":
                    self.age_s = sample.value
                elif sample.name == "shoal_kv_bytes":
                    pool[sample.labels["use"]] = sample.value
        if {"total", "live", *_WASTE} <= pool.keys():
            used = pool["live"] / pool["total"]
            waste = sum(pool[use] for use in _WASTE) / pool["total"]
            self.peak_use = max(used, self.peak_use or 0.0)
            self.peak_waste = max(waste, self.peak_waste or 0.0)
