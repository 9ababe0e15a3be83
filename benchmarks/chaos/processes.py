"""Chaos test of engine processes without a model: many kills; no token may be lost, doubled or changed.

    python -m benchmarks.chaos.processes                  # 100 kills of three engines on this machine
    PYTHONPATH=tests/engine ray start --head --num-cpus 3
    python -m benchmarks.chaos.processes --backend ray --kills 30

The engines are those of the tests: real schedulers with a fake model that is a function of the tokens so far,
so every stream is known beforehand. A kill takes an engine with at least five streams in decode; every fifth
stops it (SIGSTOP) instead, until it is detected and killed.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path

from shoal.cluster.backends.make import make_backend
from shoal.cluster.options import ClusterOptions, EnginePlan, RestartOptions
from shoal.cluster.router.call import Call
from shoal.cluster.router.router import Router
from shoal.cluster.status import EngineState
from shoal.core import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "engine"))

from engine_builders import BUILDER, ByteTokenizer, expected_tokens, make_options, make_request

LEAST_STREAMS = 5
TOKENS = 180
STEP_MS = 10


class Kills:
    """Clients that read and compare streams, and kills of their engines."""

    def __init__(self, router: Router, clients: int) -> None:
        self.router = router
        self.clients = clients
        self.rng = random.Random(1)
        self.streams = 0
        self.wrong = 0
        self.waits_s: list[float] = []
        self.stopped = False

    async def read(self) -> None:
        """Read streams one after another, and compare each with the expected tokens."""
        while not self.stopped:
            prompt = [97, *(self.rng.randrange(97, 123) for _ in range(self.rng.randrange(3, 60)))]
            sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS)
            stream = await self.router.submit("a", prompt, sampling)
            tokens = [token async for delta in stream for token in delta.tokens]
            self.streams += 1
            self.wrong += tokens != expected_tokens(make_request(prompt=prompt, max_tokens=TOKENS), TOKENS)

    def streams_in_decode(self, engine: str) -> list[Call]:
        """An engine's streams in decode."""
        calls = self.router._calls.all()
        return [call for call in calls if call.engine == engine and call.output_tokens > 0]

    async def kill(self, number: int) -> None:
        """Kill one engine, and wait until its streams continue."""
        while True:
            ready = [engine for engine in self.router.engines if engine.state is EngineState.READY]
            busy = [engine for engine in ready if len(self.streams_in_decode(engine.name)) >= LEAST_STREAMS]
            if busy and len(ready) > 1:
                break
            await asyncio.sleep(0.01)
        engine = self.rng.choice(busy)
        made = {call.id: call.output_tokens for call in self.streams_in_decode(engine.name)}
        began = time.monotonic()
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP if number % 5 == 4 else signal.SIGKILL)
        while any(
            (call := self.router._calls.get(name)) is not None
            and (call.engine == engine.name or call.output_tokens == tokens)
            for name, tokens in made.items()
        ):
            await asyncio.sleep(0.005)
        if number % 5 != 4:
            self.waits_s.append(time.monotonic() - began)

    async def run(self, kills: int) -> None:
        reading = [asyncio.create_task(self.read()) for _ in range(self.clients)]
        for number in range(kills):
            await self.kill(number)
            if number % 10 == 9:
                print(f"{number + 1:4} kills: {self.streams} streams, {self.wrong} wrong", flush=True)
        self.stopped = True
        await asyncio.gather(*reading)


async def main(options: argparse.Namespace) -> int:
    """Start engines, kill them, and print the results."""
    cluster = ClusterOptions(
        backend=options.backend,
        address=options.address,
        heartbeat_s=0.2,
        hung_after_s=1.0,
        restart=RestartOptions(first_s=0.05, max_s=0.05),
    )
    engine = make_options(f"fake?step_ms={STEP_MS}", blocks=2048, threads=1)
    router = Router(
        [EnginePlan(name=str(number), options=engine) for number in range(options.engines)],
        {},
        {"a": ByteTokenizer()},
        make_backend(cluster),
        cluster,
        max_queue=engine.max_queue,
        builder=BUILDER,
    )
    await router.run()
    kills = Kills(router, options.clients)
    try:
        await kills.run(options.kills)
        resumed = router.services["a"].resumed
    finally:
        await router.close()
    print(f"{options.kills} kills, {resumed} resumed, {kills.streams} streams, {kills.wrong} wrong")
    waits_ms = sorted(1000 * wait for wait in kills.waits_s)
    print(
        f"from a kill until all go on: median {statistics.median(waits_ms):.0f}, worst {waits_ms[-1]:.0f} ms"
    )
    return 1 if kills.wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=["local", "ray"], default="local")
    parser.add_argument("--address", default="auto", help="of a Ray cluster on this machine")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--kills", type=int, default=100)
    sys.exit(asyncio.run(main(parser.parse_args())))
