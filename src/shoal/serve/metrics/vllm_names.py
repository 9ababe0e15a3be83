"""Metrics under vLLM's names, for vLLM's dashboards."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_NAMES = (
    ("shoal_requests_running", "num_requests_running"),
    ("shoal_requests_waiting", "num_requests_waiting"),
    ("shoal_requests_swapped", "num_requests_swapped"),
    ("shoal_preemptions", "num_preemptions"),
    ("shoal_prompt_tokens", "prompt_tokens"),
    ("shoal_output_tokens", "generation_tokens"),
    ("shoal_prompt_tokens", "prefix_cache_queries"),
    ("shoal_cached_tokens", "prefix_cache_hits"),
    ("shoal_requests_finished", "request_success"),
    ("shoal_request_ttft_seconds", "time_to_first_token_seconds"),
    ("shoal_inter_token_seconds", "inter_token_latency_seconds"),
    ("shoal_inter_token_seconds", "time_per_output_token_seconds"),
    ("shoal_request_tpot_seconds", "request_time_per_output_token_seconds"),
    ("shoal_request_e2e_seconds", "e2e_request_latency_seconds"),
    ("shoal_request_queue_seconds", "request_queue_time_seconds"),
    ("shoal_request_prefill_seconds", "request_prefill_time_seconds"),
    ("shoal_request_decode_seconds", "request_decode_time_seconds"),
    ("shoal_request_prompt_tokens", "request_prompt_tokens"),
    ("shoal_request_output_tokens", "request_generation_tokens"),
)
"""Our names, and vLLM's; some are those of earlier versions."""
_POOL_NAMES = ("kv_cache_usage_perc", "gpu_cache_usage_perc")
_PREFIX = "vllm:"
_REASONS = {"cancelled": "abort"}


class VllmCollector(Collector):
    """The metrics of ``registries`` under vLLM's names; ``service`` becomes ``model_name``."""

    def __init__(self, *registries: CollectorRegistry) -> None:
        self._registries = registries

    def describe(self) -> list[Metric]:
        """Nothing: metrics are read when the page is requested."""
        return []

    def collect(self) -> Iterator[Metric]:
        families = {family.name: family for registry in self._registries for family in registry.collect()}
        for name, vllm_name in _NAMES:
            if name in families:
                yield _renamed(families[name], vllm_name)
        use = {s.labels["engine"]: s.value for s in families["shoal_kv_utilisation"].samples}
        for vllm_name in _POOL_NAMES:
            usage = Metric(_PREFIX + vllm_name, "Share of the KV pool in use; all models share it.", "gauge")
            for sample in families["shoal_requests_running"].samples:
                usage.add_sample(usage.name, _labels(sample.labels), use[sample.labels["engine"]])
            yield usage


def _renamed(family: Metric, vllm_name: str) -> Metric:
    renamed = Metric(_PREFIX + vllm_name, family.documentation, family.type)
    for sample in family.samples:
        suffix = sample.name.removeprefix(family.name)
        renamed.samples.append(Sample(renamed.name + suffix, _labels(sample.labels), sample.value))
    return renamed


def _labels(labels: dict[str, str]) -> dict[str, str]:
    """vLLM's labels for ours; metrics of the server get the engine "0", as in vLLM with one engine."""
    translated = {"model_name": labels["service"], "engine": labels.get("engine", "0")}
    if "reason" in labels:
        translated["finished_reason"] = _REASONS.get(labels["reason"], labels["reason"])
    if "le" in labels:
        translated["le"] = labels["le"]
    return translated
