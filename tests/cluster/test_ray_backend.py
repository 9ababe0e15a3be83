"""Engines in the care of Ray: a cluster of three nodes on this machine, and everything that may die in it."""

import asyncio
import os
import signal
import subprocess
import sys
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
from shoal.cluster.router.router import Router
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


async def restarted(router: Router, name: str, error: str) -> None:
    """Wait until an engine is ready again after an error."""
    number = int(name)
    await until(lambda: error in (router.engines[number].last_error or ""))
    await until(lambda: router.engines[number].state is EngineState.READY)


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


async def start(nodes: Nodes, **further) -> Router:
    router = make_router(nodes, hung_after_s=1.0, **further)
    await router.run()
    return router


@pytest.fixture(scope="class")
def running(nodes):
    with asyncio.Runner() as runner:
        router = runner.run(start(nodes, name="seen", orphan_after_s=0.0))
        yield runner, router
        runner.run(router.close())


class TestEnginesThatEnd:
    """One router sees it all: an engine that ends, an actor, a node; and at last it stands still itself."""

    def test_engines_run_on_different_nodes(self, running):
        runner, router = running
        assert len({host_of(engine_process(router, name)) for name in "01"}) == 2
        runner.run(stream_through(router, lambda: None))

    def test_a_killed_engine_is_started_again_by_its_actor(self, running):
        runner, router = running
        engine = engine_process(router, "0")
        actor = engine.parent()
        runner.run(stream_through(router, engine.kill))
        runner.run(restarted(router, "0", "killed by signal 9"))
        assert engine_process(router, "0").parent() == actor

    def test_a_stopped_engine_is_killed_and_started_again(self, running):
        runner, router = running
        engine = engine_process(router, "1")
        runner.run(stream_through(router, engine.suspend))
        runner.run(restarted(router, "1", "killed by signal 9"))
        assert not engine.is_running()

    def test_a_killed_actor_takes_its_engine_along_and_is_replaced(self, running):
        runner, router = running
        engine = engine_process(router, "0")
        actor = engine.parent()
        runner.run(stream_through(router, actor.kill))
        runner.run(restarted(router, "0", "its actor ended"))
        runner.run(until(lambda: not engine.is_running()))
        assert engine_process(router, "0").parent() != actor

    def test_a_stopped_actor_is_killed_and_replaced(self, running):
        runner, router = running
        engine = engine_process(router, "1")
        actor = engine.parent()
        runner.run(stream_through(router, actor.suspend))
        runner.run(restarted(router, "1", "its actor was silent"))
        assert engine_process(router, "1").parent() != actor

    def test_an_engine_on_standby_gives_its_actor_up_and_asks_for_another(self, running):
        runner, router = running
        engine, error = engine_process(router, "0"), router.engines[0].last_error
        actor = engine.parent()

        async def rest() -> None:
            await stream_through(router, lambda: None)
            await router.administration.deactivate_engine("0")
            await until(lambda: not actor.is_running())
            # Ray may give the place of the engine to others.
            await until(lambda: ray.available_resources().get("CPU", 0) >= 1)
            assert not engine.is_running()
            await router.administration.activate_engine("0")
            await stream_through(router, lambda: None)

        runner.run(rest())
        assert engine_process(router, "0").parent() != actor
        assert router.engines[0].last_error == error

    def test_an_engine_moves_from_a_node_that_is_gone(self, nodes, running):
        runner, router = running
        hosts = {name: host_of(engine_process(router, name)) for name in "01"}
        name, lost = next(item for item in hosts.items() if item[1] != "127.0.0.2")
        runner.run(stream_through(router, lambda: nodes.remove(lost)))
        runner.run(restarted(router, name, "its actor"))
        assert host_of(engine_process(router, name)) != lost

    def test_engines_whose_server_does_not_ask_any_more_end(self, running):
        _, router = running
        engines = [engine_process(router, name) for name in "01"]
        actors = [engine.parent() for engine in engines]
        gone, _ = psutil.wait_procs([*engines, *actors], timeout=30)
        assert len(gone) == 4


ABANDON = """
import asyncio, os, signal, sys
from test_ray_backend import SLOW, LONG, make_router
from shoal.cluster.options import ClusterOptions

class At:
    class cluster:
        address = sys.argv[1]

async def scenario():
    router = make_router(At, name="left")
    await router.run()
    for number in range(4):
        stream = await router.submit("a", [97, 98, 99, number], LONG)
        await anext(stream)
    print(*(engine.pid for engine in router.engines), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(scenario())
"""


def abandon(nodes: Nodes) -> list[psutil.Process]:
    """The engines of a server that was killed amid its streams."""
    tests = Path(__file__).parent
    path = [str(tests), str(tests.parent), str(tests.parent / "engine"), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", ABANDON, nodes.cluster.address],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        stdout=subprocess.PIPE,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    return [psutil.Process(int(pid)) for pid in done.stdout.splitlines()[-1].split()]


def test_a_server_that_is_started_again_has_its_engines_back(nodes):
    engines = abandon(nodes)
    actors = [engine.parent() for engine in engines]

    async def scenario():
        other = make_router(nodes, "fake?step_ms=11", name="left")
        with pytest.raises(ConfigError, match=r"engine 0.*step_ms=10' / 'fake.step_ms=11'"):
            await other.run()
        router = await start(nodes, name="left")
        try:
            assert [engine.pid for engine in router.engines] == [engine.pid for engine in engines]
            stats = await asyncio.gather(*map(router.stats, "01"))
            assert all(s.services["a"].running + s.services["a"].waiting == 0 for s in stats)
            await stream_through(router, lambda: None)
            second = make_router(nodes, name="left")
            with pytest.raises(ConfigError, match=rf"another server uses it \(process {os.getpid()}\)"):
                await second.run()
            await stream_through(router, lambda: None)
        finally:
            await router.close()
        assert not any(engine.is_running() for engine in engines)
        psutil.wait_procs(actors, timeout=10)
        assert not any(actor.is_running() for actor in actors)
        assert not ray.is_initialized()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("further", "message"),
    [
        (
            {"threads": 3},
            r"an engine needs 3 CPU on one node .* 127.0.0.2 has 1 CPU.*; free are 2 CPU in all",
        ),
        (
            {"engines": 3, "load_timeout_s": 5.0},
            r"an engine needs 1 CPU on one node .*; free are 0 CPU in all",
        ),
    ],
)
def test_a_cluster_without_room_is_an_error(nodes, further, message):
    async def scenario():
        router = make_router(nodes, **further)
        with pytest.raises(ConfigError, match=message):
            await asyncio.wait_for(router.run(), 30)

    asyncio.run(scenario())
