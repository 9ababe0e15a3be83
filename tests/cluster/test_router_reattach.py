"""A server that dies, and another that finds its engines: in virtual time, with real schedulers."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from engine_builders import ByteTokenizer, make_options
from fake_cluster import FOLDER, FakeBackend, make_router
from test_router import PROMPT, QUICK, expected, greedy, tokens_of

from shoal.cluster.backends.interface import EngineConfig
from shoal.cluster.router.router import Router
from shoal.cluster.status import EngineState, ServiceState
from shoal.core import ConfigError, EngineDied, Service
from shoal.schedule import ORDERS
from virtual_loop import run_virtually


async def started(backend: FakeBackend, **options) -> Router:
    router = make_router(backend, cluster=QUICK, blocks=640, **options)
    await router.run()
    return router


async def die(router: Router) -> None:
    """Its process is killed: it does nothing any more, without closing."""
    for task in list(router._tasks):
        task.cancel()
    await asyncio.gather(*router._tasks, return_exceptions=True)


def test_the_next_server_has_the_same_engines_and_none_of_the_old_requests():
    async def scenario() -> None:
        backend = FakeBackend()
        first = await started(backend)
        for _ in range(6):
            await first.submit("a", PROMPT, greedy(max_tokens=200))
        await asyncio.sleep(0.2)
        cores = [process.core for process in backend.processes.values()]
        assert sum(core.unfinished for core in cores) == 6
        await die(first)
        second = await started(backend)
        assert (first.found_engines, second.found_engines) == ({}, {"0": 1000, "1": 1000})
        assert backend.starts == 2
        assert [engine.state for engine in second.engines] == [EngineState.READY] * 2
        streams = [await second.submit("a", PROMPT, greedy()) for _ in range(4)]
        await asyncio.sleep(0.2)
        assert sum(core.unfinished for core in cores) == 4
        for stream in streams:
            assert await tokens_of(stream) == expected(PROMPT)
        backend.die(backend.processes["0"], "killed by signal 9 (SIGKILL)")
        await asyncio.sleep(10)
        assert backend.starts == 3
        assert [engine.state for engine in second.engines] == [EngineState.READY] * 2
        await second.close()

    run_virtually(scenario())


def test_what_an_earlier_server_added_goes_and_what_it_unloaded_comes_back():
    async def scenario() -> None:
        backend = FakeBackend()
        first = await started(backend, models=("fake", "fake"))
        await first.administration.add_service(Service(name="new", model="fake"), FOLDER, ByteTokenizer())
        await first.administration.unload_service("b")
        assert all(set(process.info.services) == {"a", "new"} for process in backend.processes.values())
        await die(first)
        second = await started(backend, models=("fake", "fake"))
        assert set(second.info.services) == {"a", "b"}
        await asyncio.sleep(5)
        assert {name: status.state for name, status in second.services.items()} == {
            "a": ServiceState.READY,
            "b": ServiceState.READY,
        }
        assert all(set(process.info.services) == {"a", "b"} for process in backend.processes.values())
        assert await tokens_of(await second.submit("b", PROMPT, greedy())) == expected(PROMPT)
        assert backend.starts == 2
        await second.close()

    run_virtually(scenario())


def test_a_service_that_cannot_be_loaded_again_ends_the_start():
    async def scenario() -> None:
        backend = FakeBackend()
        first = await started(backend, models=("fake", "fake"))
        await first.administration.unload_service("b")
        await die(first)
        for process in backend.processes.values():
            process.core.add_service = lambda service, folder: _failed("its folder is gone")
        second = make_router(backend, cluster=QUICK, blocks=640, models=("fake", "fake"))
        with pytest.raises(ConfigError, match=r"'b' cannot be loaded: its folder is gone"):
            await second.run()
        await second.close()

    run_virtually(scenario())


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize("how", ["hangs", "dies"])
def test_a_found_engine_that_does_not_answer_is_replaced(how, loaded, caplog):
    async def scenario() -> None:
        backend = FakeBackend()
        first = await started(backend)
        stream = await first.submit("a", PROMPT, greedy(max_tokens=200))
        await asyncio.sleep(0.2)
        await die(first)
        hung = backend.processes["1"]
        hung.hung, hung.loaded = True, loaded
        if how == "dies":
            asyncio.get_running_loop().call_later(0.01, backend.die, hung, "killed by signal 9 (SIGKILL)")
        second = await started(backend)
        assert second.found_engines == {"0": 1000}
        assert backend.killed == (["1"] if how == "hangs" else [])
        assert backend.starts == 3
        assert backend.processes["1"] is not hung
        assert [engine.state for engine in second.engines] == [EngineState.READY] * 2
        assert all(engine.stats is not None for engine in second.engines)
        streams = [await second.submit("a", PROMPT, greedy()) for _ in range(4)]
        for stream in streams:
            assert await tokens_of(stream) == expected(PROMPT)
        assert {engine.name: engine.restarts for engine in second.engines} == {"0": 0, "1": 1}
        await second.close()

    run_virtually(scenario())
    assert "engine 1: found running (process 1000), and is replaced: killed by signal 9" in caplog.text


def test_a_replacement_that_does_not_start_ends_the_start():
    async def scenario() -> None:
        backend = FakeBackend()
        await die(await started(backend))
        backend.processes["1"].hung = True
        backend.fail_loading = 1
        second = make_router(backend, cluster=QUICK, blocks=640)
        with pytest.raises(EngineDied, match="engine 1: exit code 1"):
            await second.run()
        await second.close()

    run_virtually(scenario())


def _failed(message: str):
    future = asyncio.Future()
    future.set_exception(ConfigError(message))
    return future


def test_settings_are_compared_one_by_one() -> None:
    options = make_options("fake", "other", blocks=8)
    folders = {"a": Path("/models/a"), "b": Path("/models/b")}
    config = EngineConfig(options=options, folders=folders, builder="torch", heartbeat_s=1.0)
    order = ORDERS["edf"]()
    changed = replace(options, scheduler=replace(options.scheduler, order=order), threads=3)
    settings, others = config.settings("engine 0"), replace(config, options=changed).settings("engine 0")
    differing = {name: others[name] for name in settings if settings[name] != others.get(name)}
    assert differing == {
        "engine 0.options.scheduler.order": "EarliestDeadline",
        "engine 0.options.threads": "3",
    }
