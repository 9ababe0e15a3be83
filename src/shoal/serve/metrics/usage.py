"""What each API key has used of each service since the start of the server."""

import time
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from shoal.serve.http.request_context import RequestContext

_FIRST_ERROR_STATUS = 400


class KeyUsage(Struct):
    """The use of one service with one API key."""

    key: str | None
    """Name of the key; null: the server has no keys."""
    service: str
    requests: int = 0
    """HTTP requests that named the service."""
    failed: int = 0
    """Of these, answered with an error, or given up by the client before the answer began."""
    prompt_tokens: int = 0
    output_tokens: int = 0


class UsageReport(Struct):
    """Response of /admin/usage."""

    since: float
    """Start of the server, in seconds since 1970."""
    data: list[KeyUsage]
    object: Literal["list"] = "list"


class UsageCounter(Collector):
    """Counts the use of services by API key, for reports and as Prometheus metrics."""

    def __init__(self) -> None:
        self._since = time.time()
        self._usage: dict[tuple[str | None, str], KeyUsage] = {}

    def count(self, context: RequestContext) -> None:
        """Count a request that has ended, if it named a service."""
        if context.service is None:
            return
        key = None if context.key is None else context.key.name
        used = self._usage.setdefault((key, context.service), KeyUsage(key, context.service))
        used.requests += 1
        used.failed += context.status >= _FIRST_ERROR_STATUS
        used.prompt_tokens += context.prompt_tokens
        used.output_tokens += context.output_tokens

    def report(self) -> UsageReport:
        """All that was used, by key and service in the order of their first requests."""
        return UsageReport(self._since, list(self._usage.values()))

    def describe(self) -> list[Metric]:
        """Nothing: metrics are read when the page is requested."""
        return []

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "shoal_key_requests",
            "HTTP requests that named the service, by API key.",
            labels=("key", "service"),
        )
        tokens = CounterMetricFamily(
            "shoal_key_tokens",
            "Tokens of these requests, by kind: prompt or output.",
            labels=("key", "service", "kind"),
        )
        for used in self._usage.values():
            labels = [used.key or "", used.service]
            requests.add_metric(labels, used.requests)
            tokens.add_metric([*labels, "prompt"], used.prompt_tokens)
            tokens.add_metric([*labels, "output"], used.output_tokens)
        yield from (requests, tokens)
