"""A summary of the server's /metrics for the demo."""

from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

_WASTE_USES = ("padding", "unfilled", "external")


@dataclass(slots=True)
class MetricsSummary:
    """Summary of the /metrics pages so far."""

    evictions: dict[str, int] = field(default_factory=dict)
    """Preemptions by service, from the last page."""
    peak_use: float | None = None
    """Largest share of the KV pool in live blocks; None if no page had it."""
    peak_waste: float | None = None
    """Largest share of the KV pool that no service could use: padding inside live blocks, their slots without
    a token, and free blocks inside merged blocks of another service. None if no page had it."""
    age_s: float = 0.0
    """Age of the engine's state on the last page."""

    def add(self, page: str) -> None:
        """Add a page of Prometheus text."""
        pool_bytes: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == "shoal_evictions_total":
                    self.evictions[sample.labels["service"]] = int(sample.value)
                elif sample.name == "shoal_engine_state_age_seconds":
                    self.age_s = sample.value
                elif sample.name == "shoal_kv_bytes":
                    pool_bytes[sample.labels["use"]] = sample.value
        if {"total", "live", *_WASTE_USES} <= pool_bytes.keys():
            used = pool_bytes["live"] / pool_bytes["total"]
            waste = sum(pool_bytes[use] for use in _WASTE_USES) / pool_bytes["total"]
            self.peak_use = max(used, self.peak_use or 0.0)
            self.peak_waste = max(waste, self.peak_waste or 0.0)
