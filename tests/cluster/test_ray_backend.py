"""Engines in the care of Ray: a cluster of three nodes on this machine, and everything that may die in it."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray
from engine_builders import BUILDER, ByteTokenizer, expected_tokens, make_options, make_request
from ray.cluster_utils import Cluster

import routers
from routers import QUICK
from shoal.cluster.options import ClusterOptions
from shoal.cluster.router import Router
from shoal.cluster.status import EngineState
from shoal.core import ConfigError, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PROMPT = [97, 98, 99, 100, 101]
LONG = SamplingParams(temperature=0.0, max_tokens=150)
SLOW = "fake?step_ms=10"
STORE_BYTES = 80 << 20


class Nodes:
    """A Ray cluster on loopback addresses, one for each node as if it were a host."""

    def __init__(self) -> None:
        self._hosts = 1
        head = self._arguments() | {"include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            self.add()
        self.cluster.wait_for_nodes()

    def _arguments(self) -> dict:
        self._hosts += 1
        return {
            "num_cpus": 1,
            "object_store_memory": STORE_BYTES,
            "node_ip_address": f"127.0.0.{self._hosts}",
        }

    def add(self) -> None:
        self.cluster.add_node(**self._arguments(), wait=False)

    def remove(self, address: str) -> None:
        [node] = [n for n in self.cluster.worker_nodes if n.node_ip_address == address]
        self.cluster.remove_node(node, allow_graceful=False)


@pytest.fixture(scope="module")
def nodes():
    tests = Path(__file__).parent
    path = [*sys.path, str(tests), str(tests.parent / "engine")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        made = Nodes()
        try:
            yield made
        finally:
            ray.shutdown()
            made.cluster.shutdown()


def options_of(nodes: Nodes, **further) -> ClusterOptions:
    return replace(QUICK, backend="ray", address=nodes.cluster.address, heartbeat_s=0.2, **further)


def make_router(nodes: Nodes, model: str = SLOW, engines: int = 2, **further) -> Router:
    """Not started; needs a running loop."""
    built = make_options(model, threads=further.pop("threads", 1))
    cluster = options_of(nodes, **further)
    return routers.make_router(built, {}, {"a": ByteTokenizer()}, BUILDER, engines=engines, cluster=cluster)


@asynccontextmanager
async def started(nodes: Nodes, **further):
    router = make_router(nodes, **further)
    await router.run()
    try:
        yield router
    finally:
        await router.close()


def engine_process(router: Router, engine: str) -> psutil.Process:
    [status] = [status for status in router.engines if status.name == engine]
    assert status.pid is not None
    return psutil.Process(status.pid)


def host_of(process: psutil.Process) -> str:
    """Where an engine listens."""
    return next(c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN)


async def until(condition) -> None:
    """Wait for something that must happen; the test's own limit ends it otherwise."""
    while not condition():
        await asyncio.sleep(0.02)


def all_ready(router: Router) -> bool:
    return all(engine.state is EngineState.READY for engine in router.engines)


async def stream_through(router: Router, harm) -> None:
    """Six streams, to which something happens; each must get what an undisturbed one gets."""
    streams = [await router.submit("a", [*PROMPT, 97 + number], LONG) for number in range(6)]
    outputs: list[list[int]] = [[] for _ in streams]

    async def read(number: int) -> None:
        async for delta in streams[number]:
            outputs[number] += delta.tokens

    reading = [asyncio.create_task(read(number)) for number in range(len(streams))]
    await until(lambda: all(len(output) >= 5 for output in outputs))
    harm()
    await asyncio.gather(*reading)
    for number, output in enumerate(outputs):
        request = make_request(prompt=[*PROMPT, 97 + number])
        assert output == expected_tokens(request, LONG.max_tokens)


def test_engines_run_on_different_nodes_and_leave_nothing(nodes):
    async def scenario():
        async with started(nodes) as router:
            engines = [engine_process(router, name) for name in "01"]
            assert len({host_of(engine) for engine in engines}) == 2
            await stream_through(router, lambda: None)
            actors = [engine.parent() for engine in engines]
        assert not any(process.is_running() for process in engines)
        psutil.wait_procs(actors, timeout=10)
        assert not any(actor.is_running() for actor in actors)
        assert not ray.is_initialized()

    asyncio.run(scenario())
