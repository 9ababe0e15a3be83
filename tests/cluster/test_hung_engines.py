"""Engines in processes of their own that hang, and others that are only slow: which of them are killed."""

import asyncio
import logging
import os
import pickle
import signal
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from engine_builders import ByteTokenizer, expected_tokens, make_options, make_request
from hanging_engine import BUILDER, COMPUTED_S

import routers
from routers import QUICK
from shoal.cluster.node.engine_processes import Node
from shoal.cluster.options import ClusterOptions
from shoal.cluster.router.router import Router
from shoal.core import EngineDied, SamplingParams
from shoal.engine.process.config import EngineConfig

PROMPT = [97, 98, 99, 100, 101]
TOKENS = 40
WATCHFUL = replace(QUICK, heartbeat_s=0.1, step_timeout_s=1.0)


def make_router(what: str, reached: Path, cluster: ClusterOptions = WATCHFUL) -> Router:
    options = make_options(f"fake#{what},{reached}", threads=1)
    return routers.make_router(options, {}, {"a": ByteTokenizer()}, BUILDER, cluster=cluster)


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def read(stream) -> list[int]:
    return [token async for delta in stream for token in delta.tokens]


@asynccontextmanager
async def running(router: Router):
    try:
        yield await asyncio.create_task(router.run())
    finally:
        await router.close()


@asynccontextmanager
async def throttled(pid: int):
    """The process is stopped four fifths of the time, as on a machine with more to do."""

    async def throttle() -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.04)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.01)

    task = asyncio.create_task(throttle())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("what", "why"),
    [("waits", "stands still: it used 0.0"), ("circles", "does not end: it took")],
)
def test_an_engine_whose_step_hangs_is_replaced_and_its_stream_goes_on(what, why, tmp_path, caplog):
    async def scenario():
        async with running(router := make_router(f"step-{what}", tmp_path / "reached")):
            sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS)
            stream = await router.submit("a", PROMPT, sampling)
            assert await read(stream) == expected_tokens(make_request(prompt=PROMPT), TOKENS)
            [engine] = router.engines
            assert engine.restarts == 1
            assert f"a step of a {why}" in engine.last_error
            assert "cluster.step_timeout" in engine.last_error

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert f"engine 0 is killed: a step of a {why}" in caplog.text


def test_an_engine_whose_step_takes_long_because_it_gets_little_of_a_core_lives(tmp_path):
    async def scenario():
        async with running(router := make_router("step-computes", tmp_path / "reached")):
            sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS)
            async with throttled(router.engines[0].pid):
                stream = await router.submit("a", PROMPT, sampling)
                assert await read(stream) == expected_tokens(make_request(prompt=PROMPT), TOKENS)
            assert (tmp_path / "reached").exists()
            assert router.engines[0].restarts == 0

    asyncio.run(scenario())


def test_a_start_fails_by_its_limit_where_loading_hangs(tmp_path):
    async def scenario():
        cluster = replace(WATCHFUL, load_timeout_s=2.0)
        router = make_router("load-waits", tmp_path / "reached", cluster)
        with pytest.raises(EngineDied) as failed:
            await router.run()
        assert "it did not get on with loading" in str(failed.value)
        assert "(the limit, cluster.load_timeout, is 2 s)" in str(failed.value)

    asyncio.run(scenario())


def test_an_engine_that_computes_while_it_loads_is_waited_for(tmp_path):
    async def scenario():
        cluster = replace(WATCHFUL, load_timeout_s=2.0)
        router = make_router("load-computes", tmp_path / "reached", cluster)
        starting = asyncio.create_task(router.run())
        await until(lambda: starting.done() or any(engine.pid for engine in router.engines))
        if not starting.done():
            async with throttled(router.engines[0].pid):
                await starting
        await starting
        assert router.engines[0].restarts == 0
        await router.close()

    asyncio.run(scenario())


def test_cpu_time_of_children_counts_while_an_engine_loads(tmp_path):
    """Such as that of the process that stores its weights."""

    async def scenario():
        node = Node(tmp_path, lambda event: None)
        options = make_options(f"fake#load-delegates,{tmp_path / 'reached'}", threads=1)
        config = EngineConfig(options=options, folders={}, builder=BUILDER, heartbeat_s=0.1)
        node.start("e", 1, pickle.dumps(config))
        await until(node.running)
        engine = psutil.Process(node.running()[0].pid)

        def children_s() -> float:
            [usage] = node.usages()
            return usage.cpu_s - sum(engine.cpu_times())

        async with asyncio.timeout(60):
            await until((tmp_path / "reached").exists)
            await until(lambda: children_s() >= COMPUTED_S)
        await node.close()

    asyncio.run(scenario())
