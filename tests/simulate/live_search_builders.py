"""Search tasks of small running clusters."""

import random
from collections.abc import Mapping

from shoal.cluster.manager.events import ServiceSpeed
from shoal.cluster.placing.search_task import SearchedEngine, SearchedService, SearchTask
from shoal.cluster.placing.traffic import ReplayedRequest
from shoal.core import SLO

SPEED = ServiceSpeed(1e-3, 1e-2)
WINDOW_S = 12.0


def replayed(rates: Mapping[str, float], seed: int = 0, slo: SLO | None = None) -> list[ReplayedRequest]:
    """Requests of each service at a rate, of a few different lengths."""
    draw = random.Random(seed)
    goals = slo or SLO(ttft_s=1.0, tpot_s=0.05)
    requests = []
    for service, rate in rates.items():
        at_s = 0.0
        while (at_s := at_s + draw.expovariate(rate)) < WINDOW_S:
            tokens = draw.randint(20, 60)
            requests.append(
                ReplayedRequest(service, int(at_s * 1e9), draw.randint(20, 200), 200, tokens, goals)
            )
    return sorted(requests, key=lambda each: each.arrival_ns)


def make_task(rates: Mapping[str, float], present: Mapping[str, str], **further: object) -> SearchTask:
    """A task; present: the services of each engine, as the letters of a word."""
    services = {
        name: SearchedService(weights=name, weight_bytes=10**8, kv_token_bytes=4096, context_tokens=2048)
        for name in sorted({*"".join(present.values()), *rates})
    }
    engines = [
        SearchedEngine(name=name, kind="cpu", kv_bytes=64 << 20, services=frozenset(services))
        for name in present
    ]
    fields: dict[str, object] = {
        "engines": engines,
        "services": services,
        "present": {name: frozenset(word) for name, word in present.items()},
        "requests": replayed(rates),
        "window_s": WINDOW_S,
        "speeds": {(name, "cpu"): SPEED for name in services},
    }
    return SearchTask(**(fields | further))  # type: ignore[arg-type]
