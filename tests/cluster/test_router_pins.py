"""Services that are pinned while a router runs: on engines that have them, or load them later."""

import asyncio

import pytest
from engine_builders import FAKE_WEIGHT_BYTES, make_options
from fake_cluster import FakeBackend
from test_router import PROMPT, expected, greedy, play, tokens_of
from test_router_reattach import die, started

from shoal.cluster.options import EnginePlan
from shoal.cluster.router.router import Router
from shoal.cluster.status import EngineState
from shoal.core import ConfigError
from shoal.schedule import WeightsOptions
from virtual_loop import run_virtually

MODELS = ("fake", "fake", "fake")
TWO_FIT = WeightsOptions(memory_bytes=2 * FAKE_WEIGHT_BYTES)
ALL_FIT = WeightsOptions(memory_bytes=3 * FAKE_WEIGHT_BYTES)


def pins(router: Router, backend: FakeBackend) -> dict[str, list[str]]:
    """Pinned services by engine, as its scheduler has them; they are what the router says."""
    found = {
        name: [service for service in "abc" if service in process.core._scheduler.services]
        for name, process in backend.processes.items()
        if process.alive
    }
    told = [name for name, info in router.info.services.items() if info.pinned]
    pinned = {
        name: [service for service in services if backend.processes[name].core._scheduler.is_pinned(service)]
        for name, services in found.items()
    }
    for name, services in found.items():
        assert pinned[name] == [service for service in services if service in told]
    return pinned


def test_a_service_is_pinned_on_all_engines_and_on_those_that_load_it_later():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        await router.administration.pin_service("b", True)
        assert pins(router, backend) == {"0": ["b"], "1": ["b"]}
        await router.administration.pin_service("b", True)
        backend.die(backend.processes["1"], "killed")
        await asyncio.sleep(1)
        await ready(router)
        assert pins(router, backend) == {"0": ["b"], "1": ["b"]}
        await router.administration.unload_service("b")
        await router.administration.load_service("b")
        await asyncio.sleep(0.5)  # the other engine
        assert pins(router, backend) == {"0": ["b"], "1": ["b"]}
        for name in "abc":
            assert await tokens_of(await router.submit(name, PROMPT, greedy())) == expected(PROMPT)
        await router.administration.pin_service("b", False)
        assert pins(router, backend) == {"0": [], "1": []}

    play(scenario, models=MODELS, weights=TWO_FIT, blocks=640)


def test_a_pin_while_an_engine_starts_reaches_it():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        backend.die(backend.processes["1"], "killed")
        while backend.starts < 3:
            await asyncio.sleep(0.01)
        await router.administration.pin_service("c", True)
        await ready(router)
        await asyncio.sleep(0.5)
        assert pins(router, backend) == {"0": ["c"], "1": ["c"]}

    play(scenario, models=MODELS, weights=TWO_FIT, blocks=640)


def test_an_unloaded_service_is_pinned_when_it_is_loaded():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        await router.administration.unload_service("c")
        await router.administration.pin_service("c", True)
        assert router.info.services["c"].pinned
        assert pins(router, backend) == {"0": [], "1": []}
        await router.administration.load_service("c")
        await asyncio.sleep(0.5)  # the other engine
        assert pins(router, backend) == {"0": ["c"], "1": ["c"]}

    play(scenario, models=MODELS, weights=TWO_FIT, blocks=640)


def test_a_pin_for_which_one_engine_has_no_memory_changes_nothing():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        small = make_options(*MODELS, weights=TWO_FIT, blocks=640)
        await router.administration.add_engine(EnginePlan(name="2", options=small))
        await router.administration.pin_service("a", True)
        with pytest.raises(ConfigError, match=r"engine 2: weights.memory: .* of 'a' \(.*, pinned\), 'b' \("):
            await router.administration.pin_service("b", True)
        await asyncio.sleep(0.5)
        assert pins(router, backend) == {"0": ["a"], "1": ["a"], "2": ["a"]}
        with pytest.raises(ConfigError, match="there is no service 'x'; there are: a, b, c"):
            await router.administration.pin_service("x", True)

    play(scenario, models=MODELS, weights=ALL_FIT, blocks=640)


def test_an_engine_that_dies_of_a_pin_gets_it_with_its_next_process():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        pinning = asyncio.create_task(router.administration.pin_service("a", True))
        await asyncio.sleep(0)
        backend.die(backend.processes["0"], "killed")
        await pinning
        await asyncio.sleep(1)
        await ready(router)
        await asyncio.sleep(0.5)
        assert pins(router, backend) == {"0": ["a"], "1": ["a"]}

    play(scenario, models=MODELS, weights=TWO_FIT, blocks=640)


def test_what_an_earlier_server_pinned_is_as_the_configuration_says():
    async def scenario() -> None:
        backend = FakeBackend()
        first = await started(backend, models=MODELS, weights=TWO_FIT)
        await first.administration.pin_service("b", True)
        assert pins(first, backend) == {"0": ["b"], "1": ["b"]}
        await die(first)
        second = await started(backend, models=MODELS, weights=TWO_FIT)
        await asyncio.sleep(0.5)
        assert pins(second, backend) == {"0": [], "1": []}
        assert backend.starts == 2
        await second.close()

    run_virtually(scenario())


async def ready(router: Router) -> None:
    while any(engine.state is not EngineState.READY for engine in router.engines):
        await asyncio.sleep(0.01)
