"""Why a service is slow, in one sentence, from its counts."""

from collections.abc import Sequence

from shoal.serve.page.snapshot import KV, Engine, Service

_FULL = 0.9
"""Share of live blocks from which a pool is called full."""
_HOLDS = 0.5
"""Share of the pool from which another service is named as its holder."""
_MISSED = 0.1
"""Share of missed goals that is worth a note."""


def note_of(service: Service, engines: Sequence[Engine]) -> str:
    """What holds a service up; "": nothing that its counts show.

    In this order: it is not ready, requests wait (for weights, for KV memory, for their turn), requests were
    refused, goals were missed, requests were preempted.
    """
    if service.state != "ready":
        return _not_ready(service)
    if service.waiting:
        return _waiting(service, [engine for engine in engines if engine.name in service.engines])
    if service.refused:
        return f"{_requests(service.refused)} refused in the last minute"
    ended = service.goals.met + service.goals.missed
    if service.goals.missed > _MISSED * ended:
        return f"{service.goals.missed} of {_requests(ended)} missed their goals in the last minute"
    if service.preemptions:
        times = "once" if service.preemptions == 1 else f"{service.preemptions} times"
        return f"preempted {times} in the last minute: KV memory is short"
    return ""


def _not_ready(service: Service) -> str:
    if service.state == "failed":
        return f"cannot be loaded: {service.error or 'unknown reason'}"
    if service.state == "unloaded":
        return "unloaded; a request loads it"
    return {"pulling": "its model is being downloaded", "loading": "is being loaded"}.get(
        service.state, "is being unloaded, when its requests have ended"
    )


def _waiting(service: Service, engines: Sequence[Engine]) -> str:
    count = _requests(service.waiting)
    if not engines:
        return f"{count} without an engine: none of its engines runs"
    places = {part.weights for part in service.engines.values()}
    if places == {"absent"}:
        return f"{count} waiting until its weights may come: others use the memory"
    if "resident" not in places:
        return f"{count} waiting for its weights, which are coming"
    if service.preemptions or service.swapped or all(_is_full(engine.kv) for engine in engines):
        return f"{count} waiting for KV memory{_holder(service, engines)}"
    if not service.running and any(engine.requests > service.waiting for engine in engines):
        return f"{count} waiting for a turn: other services are served"
    return f"{count} waiting for a turn: the engine computes others first"


def _holder(service: Service, engines: Sequence[Engine]) -> str:
    """Which other service holds most of the pools, if one does; ", ..." or ""."""
    held: dict[str, int] = {}
    total = 0
    for kv in [engine.kv for engine in engines if engine.kv is not None]:
        total += kv.total_bytes
        for name, part in kv.services.items():
            held[name] = held.get(name, 0) + part.live_bytes
    most = max(held, key=lambda name: held[name], default=service.name)
    if most == service.name or held[most] < _HOLDS * total:
        return ""
    return f"; {most} holds {held[most] / total:.0%} of the pool"


def _is_full(kv: KV | None) -> bool:
    """Live blocks, and blocks that only other services can use, leave little."""
    return kv is not None and kv.live_bytes + kv.external_bytes >= _FULL * kv.total_bytes


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"
