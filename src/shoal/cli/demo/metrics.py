"""Preemptions, KV pool use and resumed requests from the server's /metrics, for the demo."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

_WASTE_USES = ("padding", "unfilled", "external")


@dataclass(slots=True)
class MetricsSummary:
    """The /metrics pages so far, over all engines."""

    preemptions: dict[str, int] = field(default_factory=dict)
    """Preemptions by service, from the last page."""
    peak_use: float | None = None
    """Largest share of the KV pools in live blocks; None if no page reported it."""
    peak_waste: float | None = None
    """Largest share of the KV pools that no service could use: padding inside live blocks, their slots
    without a token, and free blocks inside merged blocks of another service. None if no page reported it."""
    age_s: float = 0.0
    """Age of the oldest state of a running engine on the last page."""
    resumed: int = 0
    """Requests resumed after the end of their engine, from the last page."""

    fetches: int = 0
    """Fetches of weights, from the last page; 0 where all stay."""
    weight_waits: int = 0
    """How often a request waited for weights, from the last page."""
    weight_wait_s: float = 0.0
    """Total time of these waits."""

    def add(self, page: str) -> None:
        """Add a page in Prometheus' text format."""
        pool_bytes: Counter[str] = Counter()
        preemptions: Counter[str] = Counter()
        ages_s: dict[str, float] = {}
        ended = set()
        resumed = 0
        weights: defaultdict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                engine = sample.labels.get("engine", "")
                if sample.name == "shoal_preemptions_total":
                    preemptions[sample.labels["service"]] += int(sample.value)
                elif sample.name == "shoal_engine_state_age_seconds":
                    ages_s[engine] = sample.value
                elif sample.name == "shoal_engine_up" and not sample.value:
                    ended.add(engine)
                elif sample.name == "shoal_kv_bytes":
                    pool_bytes[sample.labels["use"]] += int(sample.value)
                elif sample.name == "shoal_requests_resumed_total":
                    resumed += int(sample.value)
                elif sample.name.startswith("shoal_weight_") and sample.name.endswith("_total"):
                    weights[sample.name] += sample.value
        self.preemptions.update(preemptions)
        self.resumed = max(resumed, self.resumed)
        self.fetches = int(weights["shoal_weight_fetches_total"])
        self.weight_waits = int(weights["shoal_weight_waits_total"])
        self.weight_wait_s = weights["shoal_weight_wait_seconds_total"]
        self.age_s = max((age for engine, age in ages_s.items() if engine not in ended), default=0.0)
        if {"total", "live", *_WASTE_USES} <= pool_bytes.keys():
            used = pool_bytes["live"] / pool_bytes["total"]
            waste = sum(pool_bytes[use] for use in _WASTE_USES) / pool_bytes["total"]
            self.peak_use = max(used, self.peak_use or 0.0)
            self.peak_waste = max(waste, self.peak_waste or 0.0)
