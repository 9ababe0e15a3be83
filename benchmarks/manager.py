"""Requests per second that the cluster manager handles on one core: submit, dispatch, end.

    python -m benchmarks.manager [--engines 64] [--requests 100000] [--unfinished 2000] [--dispatch max-min]

Engines send heartbeats, and ticks come as in a server. ``--unfinished`` requests are running, which fill two
thirds of the engines. A packer gets their progress every second; no request grows. Times are CPU time.
"""

import argparse
import gc
import time
from collections import deque
from random import Random

from rich.table import Table

from benchmarks.interrupts import print_at_end
from shoal.cluster.manager.dispatch import DISPATCH_NAMES, dispatch_named
from shoal.cluster.manager.events import (
    ClusterEvent,
    Ended,
    EngineAdded,
    EngineHeartbeat,
    EngineReady,
    EpochBegan,
    ServiceSpeed,
    Submitted,
    Ticked,
)
from shoal.cluster.manager.manager import Manager
from shoal.cluster.options import ClusterOptions
from shoal.cluster.packing import PACKERS

NAMES = [name for name in DISPATCH_NAMES if name != "least-loaded"]
RATE = 10_000
"""Requests per second on the manager's clock."""
_MEAN_TOKENS = 1055
"""Of a request in an epoch of a second: half of the longest prompt, and 50 tokens of output."""


def make_events(
    engines: int, requests: int, unfinished: int, prefixes: bool, packs: bool
) -> list[tuple[int, ClusterEvent]]:
    """Events with their times in nanoseconds."""
    random = Random(1)
    speeds = {name: ServiceSpeed(2e-4, 2e-2) for name in ("chat", "code")}
    names = [f"e{number}" for number in range(engines)]
    events: list[tuple[int, ClusterEvent]] = [(0, EngineAdded(name, tuple(speeds))) for name in names]
    kv_tokens = round(1.5 * unfinished * _MEAN_TOKENS / engines)
    room = dict.fromkeys(speeds, kv_tokens)
    events += [(0, EngineReady(name, 1, speeds, {}, kv_tokens, room)) for name in names]
    unfinished_ids: deque[str] = deque()
    for number in range(requests):
        now_ns = round(number / RATE * 1e9)
        if number % (RATE // 4) == 0:
            events.append((now_ns, Ticked()))
            events += [(now_ns, EngineHeartbeat(name, 1)) for name in names]
        if packs and number % RATE == 0:
            events.append((now_ns, EpochBegan(dict.fromkeys(unfinished_ids, 0))))
        family = random.randrange(500)
        request = Submitted(
            f"3f9a01bc-{number}",
            random.choice(("chat", "code")),
            prompt_tokens=random.randint(10, 2000),
            most_tokens=1000,
            prefix=(*range(family * 100, family * 100 + 20), *range(10**6 + number, 10**6 + number + 20))
            if prefixes
            else (),
        )
        events.append((now_ns, request))
        unfinished_ids.append(request.request)
        if len(unfinished_ids) > unfinished:
            events.append((now_ns, Ended(unfinished_ids.popleft(), random.randint(1, 1000))))
    return events


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--unfinished", type=int, default=2_000, help="requests under way")
    parser.add_argument("--dispatch", nargs="*", choices=NAMES, default=NAMES)
    arguments = parser.parse_args()
    table = Table("dispatch", "requests", "requests/s", "µs a request")
    with print_at_end(table, 120):
        for name in arguments.dispatch:
            policy = dispatch_named(name)
            # The policy "forecast" examines every unfinished request of every engine.
            packs = name in PACKERS
            requests = arguments.requests // (50 if name == "forecast" else 10 if packs else 1)
            events = make_events(
                arguments.engines, requests, arguments.unfinished, policy.reads_prefixes, packs
            )
            manager = Manager(ClusterOptions(dispatch=name), policy)
            gc.collect()
            started = time.process_time()
            for now_ns, event in events:
                manager.handle(event, now_ns)
            cpu_s = time.process_time() - started
            table.add_row(name, str(requests), f"{requests / cpu_s:,.0f}", f"{cpu_s / requests * 1e6:.1f}")


if __name__ == "__main__":
    main()
