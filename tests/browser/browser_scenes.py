"""Snapshots of the page's stream, invented: one function a scene, from seconds since the scene began."""

import math
from collections.abc import Callable
from typing import Any

Snapshot = dict[str, Any]
BEGIN = 1764336000.0
GIB = 2**30
MIB = 2**20
MARKUP = "<img src=x onerror=\"document.title='broken'\">"


def latency(count: int, p50: float) -> dict[str, Any]:
    if not count:
        return {"count": 0, "p50": None, "p95": None, "p99": None}
    return {"count": count, "p50": p50, "p95": 3.2 * p50, "p99": 5 * p50}


def service(name: str, **changes: Any) -> dict[str, Any]:
    idle = {
        "name": name,
        "model": name,
        "state": "ready",
        "error": None,
        "chat": True,
        "pinned": False,
        "engines": {"0": {"weights": "resident", "running": 0, "waiting": 0, "swapped": 0}},
        "running": 0,
        "waiting": 0,
        "swapped": 0,
        "requests_per_s": 0.0,
        "output_tokens_per_s": 0.0,
        "prompt_tokens_per_s": 0.0,
        "ttft_s": latency(0, 0),
        "inter_token_s": latency(0, 0),
        "preemptions": 0,
        "refused": 0,
        "goals": {"met": 0, "missed": 0},
        "note": "",
    }
    return idle | changes


def pool(total: int, services: dict[str, tuple[int, int, int]]) -> dict[str, Any]:
    """services: by name live, cached and free bytes."""
    parts = ("live_bytes", "cached_bytes", "free_bytes")
    return {
        "total_bytes": total,
        "live_bytes": sum(bytes[0] for bytes in services.values()),
        "cached_bytes": sum(bytes[1] for bytes in services.values()),
        "padding_bytes": 3 * MIB,
        "unfilled_bytes": 41 * MIB,
        "external_bytes": 0,
        "free_bytes": total - sum(map(sum, services.values())),
        "services": {name: dict(zip(parts, bytes, strict=True)) for name, bytes in services.items()},
    }


def engine(name: str, **changes: Any) -> dict[str, Any]:
    idle = {
        "name": name,
        "state": "ready",
        "device": "cpu",
        "restarts": 0,
        "heartbeat_age_s": 0.3,
        "last_error": None,
        "requests": 0,
        "steps_per_s": 0.0,
        "weight_bytes": 805 * MIB,
        "weights_memory_bytes": None,
        "moved": 0,
        "kv": pool(2 * GIB, {}),
    }
    return idle | changes


def request(id: str, service: str, phases: list[tuple[float, str, str | None]], **changes: Any) -> Snapshot:
    """phases: their begin in seconds since BEGIN."""
    usual = {
        "id": f"9f3c1a2b-{id}-0",
        "name": f"client-{id}",
        "service": service,
        "engine": phases[-1][2],
        "prompt_tokens": 34,
        "cached_tokens": 16,
        "output_tokens": 12,
        "phases": [[BEGIN + begin, phase, engine] for begin, phase, engine in phases],
        "ended": None,
        "finish": None,
    }
    return usual | changes


def snapshot(t: float, **changes: Any) -> Snapshot:
    usual = {
        "time": BEGIN + t,
        "version": "0.1.0",
        "status": "ok",
        "engines": [engine("0")],
        "services": [service("smollm2"), service("gemma3-270m", chat=False)],
        "requests": [],
        "requests_left_out": 0,
        "events": [event(1, -60, "info", "engine 0 is ready")],
    }
    return usual | changes


def event(number: int, at: float, level: str, text: str) -> dict[str, Any]:
    return {"number": number, "time": BEGIN + at, "level": level, "text": text}


def idle(t: float) -> Snapshot:
    kv = pool(2 * GIB, {"smollm2": (0, 200 * MIB, 30 * MIB)})
    return snapshot(t, engines=[engine("0", kv=kv)])


def loaded(t: float) -> Snapshot:
    """Two services under load; request 7 was preempted, request 12 again and again."""
    wave = math.sin(t / 6)
    small = service(
        "smollm2", model="HuggingFaceTB/SmolLM2-135M-Instruct", running=32, waiting=8 + int(6 * wave),
        swapped=2, requests_per_s=6.2, output_tokens_per_s=480 + 90 * wave,
        prompt_tokens_per_s=310.5, ttft_s=latency(370, 0.9), inter_token_s=latency(9000, 0.031),
        preemptions=4, refused=1, goals={"met": 300, "missed": 70}, note="waits for KV memory",
        engines={"0": {"weights": "resident", "running": 32, "waiting": 8, "swapped": 2}},
    )  # fmt: skip
    large = service(
        "gemma3-270m", running=20, requests_per_s=2.5, output_tokens_per_s=212 + 40 * wave, chat=False,
        prompt_tokens_per_s=80, ttft_s=latency(150, 0.12), inter_token_s=latency(4000, 0.04),
        goals={"met": 150, "missed": 0},
    )  # fmt: skip
    kv = pool(
        2 * GIB,
        {"smollm2": (900 * MIB, 256 * MIB, 100 * MIB), "gemma3-270m": (500 * MIB, 200 * MIB, 28 * MIB)},
    )
    return snapshot(
        t,
        engines=[engine("0", requests=60, steps_per_s=12.3, kv=kv)],
        services=[small, large],
        requests=loaded_requests(t),
        requests_left_out=14,
        events=[
            event(1, -60, "info", "engine 0 is ready"),
            event(2, -8, "warning", "smollm2: request client-7 was preempted: the KV pool is full"),
        ],
    )


def loaded_requests(t: float) -> list[Snapshot]:
    rows = []
    for number in range(60):
        name = "smollm2" if number % 3 else "gemma3-270m"
        begin = -55 + number * 0.85
        phases: list[tuple[float, str, str | None]] = [(begin, "waiting", None)]
        if number < 52:
            phases += [(begin + 0.4 + number % 5, "prefill", "0"), (begin + 1.5 + number % 5, "decode", "0")]
        if number == 7:
            phases += [(-20, "preempted", "0"), (-12, "decode", "0")]
        if number == 12:
            phases += [(-30, "preempted", "0"), (-25, "decode", "0"), (-8, "preempted", "0")]
        rows.append(request(str(number), name, phases, output_tokens=60 - number + int(t)))
    for number in range(60, 90):
        begin = -58 + (number - 60) * 1.5
        phases = [(begin, "waiting", None), (begin + 0.3, "prefill", "0"), (begin + 0.8, "decode", "0")]
        finish = "cancelled" if number == 70 else "length"
        rows.append(request(str(number), "smollm2", phases, ended=BEGIN + begin + 9, finish=finish))
    return rows


def degraded(t: float) -> Snapshot:
    """Engine 1 was killed 10 s ago and is starting again; its requests went on at engine 0."""
    dead = engine(
        "1", state="waiting", restarts=1, heartbeat_age_s=None, last_error="killed by signal 9", kv=None
    )
    phases = [(-30.0, "waiting", None), (-29.5, "prefill", "1"), (-29, "decode", "1"), (-10, "waiting", None),
              (-8, "prefill", "0"), (-7, "decode", "0")]  # fmt: skip
    both = {
        "0": {"weights": "resident", "running": 3, "waiting": 0, "swapped": 0},
        "1": {"weights": "absent", "running": 0, "waiting": 0, "swapped": 0},
    }
    return snapshot(
        t,
        status="degraded",
        engines=[
            engine("0", requests=3, steps_per_s=9, kv=pool(2 * GIB, {"smollm2": (400 * MIB, 0, 0)})),
            dead,
        ],
        services=[
            service("smollm2", running=3, engines=both, output_tokens_per_s=100),
            service("gemma3-270m", state="failed", error="the file model.safetensors is cut off"),
        ],
        requests=[request(str(number), "smollm2", phases) for number in range(3)],
        events=[
            event(1, -10, "warning", "engine 1 ended: killed by signal 9"),
            event(2, -9, "info", "3 requests go on at other engines"),
        ],
    )


def twenty(t: float) -> Snapshot:
    """Twenty services share two engines, whose weights come and go."""
    states = ["ready"] * 14 + ["loading", "pulling", "unloaded", "draining", "ready", "ready"]
    turn = int(t / 3)
    services = []
    for number, state in enumerate(states):
        places = {"0": "resident", "1": ["resident", "coming", "absent"][(number + turn) % 3]}
        busy = state == "ready" and number % 4 != 3
        services.append(
            service(
                f"service-{number + 1:02}",
                model=f"organisation/model-of-some-size-{number}",
                state=state,
                pinned=number == 5,
                engines={
                    name: {"weights": place, "running": number % 5, "waiting": number % 3, "swapped": 0}
                    for name, place in places.items()
                },
                running=number % 5 if busy else 0,
                waiting=(number + turn) % 7 if busy else 0,
                output_tokens_per_s=37.5 * (number % 5) if busy else 0,
                prompt_tokens_per_s=12.25 * (number % 4) if busy else 0,
                ttft_s=latency(number * 3 if busy else 0, 0.05 * (number + 1)),
                inter_token_s=latency(number * 90 if busy else 0, 0.02),
                note="weights are absent: they come in turns" if number in (4, 9) else "",
            )
        )
    parts = {
        one["name"]: ((number % 5) * 60 * MIB, (number % 4) * 25 * MIB, (number % 3) * 10 * MIB)
        for number, one in enumerate(services)
    }
    engines = [
        engine(
            name, device=f"cuda:{name}", weight_bytes=41 * GIB, weights_memory_bytes=48 * GIB, requests=31,
            steps_per_s=88.1, kv=pool(5 * GIB, parts),
        )
        for name in ("0", "1")
    ]  # fmt: skip
    return snapshot(t, engines=engines, services=services)


def moving(t: float) -> Snapshot:
    """Two requests have moved from engine 0 to engine 1, with and without their KV, and go on there."""
    phases = [(-20.0, "waiting", None), (-19, "prefill", "0"), (-16, "decode", "0"), (-4, "decode", "1")]
    by_tokens = [*phases[:3], (-4, "waiting", "1"), (-3, "prefill", "1"), (-2, "decode", "1")]
    on_both = {name: {"weights": "resident", "running": 1, "waiting": 0, "swapped": 0} for name in ("0", "1")}
    return snapshot(
        t,
        engines=[engine("0", moved=1, state="draining"), engine("1", requests=1)],
        services=[service("smollm2", running=1, engines=on_both)],
        requests=[
            request("1", "smollm2", phases),
            request("2", "smollm2", phases[:3]),
            request("3", "smollm2", by_tokens),
        ],
    )


def fresh(t: float) -> Snapshot:
    loading = engine("0", state="loading", heartbeat_age_s=None, weight_bytes=None, kv=None)
    return snapshot(
        t,
        status="down",
        engines=[loading],
        services=[service("smollm2", state="loading", engines={})],
        events=[],
    )


def empty(t: float) -> Snapshot:
    return snapshot(t, status="down", engines=[], services=[], events=[])


def draining(t: float) -> Snapshot:
    phases = [(-5.0, "waiting", None), (-4, "prefill", "0"), (-3, "decode", "0")]
    return snapshot(
        t,
        status="draining",
        services=[service("smollm2", running=1)],
        requests=[request("1", "smollm2", phases)],
        events=[event(1, -2, "info", "draining: waiting for 1 request")],
    )


def shared(t: float) -> Snapshot:
    """The key may see one service only; a fifth of the pool belongs to others."""
    kv = pool(1000 * MIB, {"smollm2": (200 * MIB, 100 * MIB, 100 * MIB), "hidden": (200 * MIB, 0, 0)})
    del kv["services"]["hidden"]
    return snapshot(t, engines=[engine("0", kv=kv)], services=[service("smollm2")])


def markup(t: float) -> Snapshot:
    """Markup in every text that comes from outside."""
    name = MARKUP
    phases = [(-5.0, "waiting", None), (-4, "prefill", name), (-3, "preempted", name), (-2, "decode", "1")]
    bad = engine(name, state="waiting", device=name, last_error=name, kv=pool(GIB, {name: (MIB, MIB, MIB)}))
    places = {name: {"weights": "resident", "running": 1, "waiting": 0, "swapped": 0}}
    return snapshot(
        t,
        version=name,
        engines=[bad],
        services=[service(name, model=name, state="failed", error=name, note=name, engines=places)],
        requests=[request(name, name, phases, name=name, ended=BEGIN, finish="error")],
        events=[event(1, -2, "warning", name)],
    )


SCENES: dict[str, Callable[[float], Snapshot]] = {
    scene.__name__: scene
    for scene in (idle, loaded, degraded, twenty, moving, fresh, empty, draining, shared, markup)
}
