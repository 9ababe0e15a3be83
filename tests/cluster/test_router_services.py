"""Services and engines that come and go while a router runs: in virtual time, with real schedulers."""

import asyncio
import logging
import random
from contextlib import suppress

import pytest
from engine_builders import FAKE_WEIGHT_BYTES, ByteTokenizer, make_options
from fake_cluster import FOLDER, FakeBackend
from test_router import PROMPT, expected, greedy, play, tokens_of

from shoal.cluster.options import EnginePlan
from shoal.cluster.router.router import Router
from shoal.cluster.status import EngineState, ServiceState
from shoal.core import ConfigError, EngineDied, InvalidRequest, Service


async def add(router: Router, name: str, model: str = "fake", **fields) -> None:
    service = Service(name=name, model=model, **fields)
    await router.administration.add_service(service, FOLDER, ByteTokenizer())


async def reaches(router: Router, service: str, state: ServiceState) -> None:
    while router.services[service].state is not state:
        await asyncio.sleep(0.05)


def test_a_service_comes_and_goes_and_wakes_up():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        others = [await router.submit("a", PROMPT, greedy(max_tokens=100)) for _ in range(4)]
        await add(router, "new")
        assert set(router.info.services) == {"a", "new"}
        assert await tokens_of(await router.submit("new", PROMPT, greedy())) == expected(PROMPT)
        await router.administration.unload_service("new")
        assert router.services["new"].state is ServiceState.UNLOADED
        assert all("new" not in process.core._scheduler.services for process in backend.processes.values())
        assert await tokens_of(await router.submit("new", PROMPT, greedy())) == expected(PROMPT)
        assert router.services["new"].ready == 2
        await router.administration.unload_service("new")
        await router.administration.load_service("new")
        running = await router.submit("new", PROMPT, greedy())
        removing = asyncio.create_task(router.administration.remove_service("new"))
        await asyncio.sleep(0.1)
        with pytest.raises(InvalidRequest, match="not served here"):
            await router.submit("new", PROMPT, greedy())
        assert await tokens_of(running) == expected(PROMPT)
        await removing
        assert set(router.services) == set(router.info.services) == {"a"}
        for stream in others:
            assert await tokens_of(stream) == expected(PROMPT, 100)

    play(scenario, blocks=640)


@pytest.mark.parametrize("engines", [1, 2])
def test_the_requests_of_a_service_that_is_removed_survive_the_death_of_their_engine(engines):
    async def scenario(router: Router, backend: FakeBackend) -> None:
        await add(router, "new")
        running = [await router.submit("new", PROMPT, greedy()) for _ in range(4)]
        await asyncio.sleep(0.3)
        removing = asyncio.create_task(router.administration.remove_service("new"))
        await asyncio.sleep(0.1)
        backend.die(backend.processes["0"], "killed by signal 9 (SIGKILL)")
        for stream in running:
            assert await tokens_of(stream) == expected(PROMPT)
        await removing
        assert set(router.services) == set(router.info.services) == {"a"}
        # Nothing is left of it, and its name can be used again.
        backend.die(backend.processes["0"], "killed by signal 9 (SIGKILL)")
        assert await tokens_of(await router.submit("a", PROMPT, greedy())) == expected(PROMPT)
        assert all("new" not in process.core._scheduler.services for process in backend.processes.values())
        await add(router, "new")
        assert await tokens_of(await router.submit("new", PROMPT, greedy())) == expected(PROMPT)

    play(scenario, blocks=640, engines=engines)


def test_a_service_whose_engine_dies_is_unloaded_only_when_its_requests_have_ended():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        await add(router, "new")
        running = await router.submit("new", PROMPT, greedy())
        await asyncio.sleep(0.3)
        unloading = asyncio.create_task(router.administration.unload_service("new"))
        await reaches(router, "new", ServiceState.DRAINING)
        backend.die(backend.processes["0"], "killed by signal 9 (SIGKILL)")
        while router.engines[0].state is not EngineState.WAITING:
            await asyncio.sleep(0.001)
        while not running.ended:
            assert router.services["new"].state is ServiceState.DRAINING
            assert not unloading.done()
            await asyncio.sleep(0.05)
        assert await tokens_of(running) == expected(PROMPT)
        await unloading
        assert router.services["new"].state is ServiceState.UNLOADED

    play(scenario, blocks=640, engines=1)


def test_a_request_before_the_unload_keeps_the_service_and_the_caller_gets_an_error():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        running = await router.submit("a", PROMPT, greedy())
        unloading = asyncio.create_task(router.administration.unload_service("a"))
        await reaches(router, "a", ServiceState.DRAINING)
        late = await router.submit("a", PROMPT, greedy())
        with pytest.raises(ConfigError, match="'a' stays loaded: a request came meanwhile"):
            await unloading
        for stream in (running, late):
            assert await tokens_of(stream) == expected(PROMPT)
        assert router.services["a"].state is ServiceState.READY
        await router.administration.unload_service("a")
        assert router.services["a"].state is ServiceState.UNLOADED

    play(scenario, models=("fake", "fake"))


def test_the_room_of_others_follows_who_comes_and_goes():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        alone = router.info.services["a"]
        await add(router, "new", "large")
        beside = router.info.services["a"]
        assert beside.kv_tokens < alone.kv_tokens
        assert beside.max_total_tokens == min(beside.context_tokens, beside.kv_tokens)
        await router.administration.remove_service("new")
        assert router.info.services["a"].max_total_tokens >= beside.max_total_tokens
        assert await tokens_of(await router.submit("a", PROMPT, greedy())) == expected(PROMPT)

    play(scenario, blocks=64)


def test_an_idle_service_is_unloaded_and_wakes_up():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        await add(router, "new", idle_after_s=30.0)
        await asyncio.sleep(20)
        assert await tokens_of(await router.submit("new", PROMPT, greedy())) == expected(PROMPT)
        await asyncio.sleep(25)
        assert router.services["new"].state is ServiceState.READY
        await reaches(router, "new", ServiceState.UNLOADED)
        assert await tokens_of(await router.submit("new", PROMPT, greedy())) == expected(PROMPT)
        assert router.services["a"].state is ServiceState.READY

    play(scenario, blocks=640)


def test_an_unloaded_service_is_wanted_by_no_engine_until_a_request_comes(caplog):
    async def scenario(router: Router, backend: FakeBackend) -> None:
        def counts() -> tuple[int, int, int, bool]:
            status = router.services["new"]
            return status.wanted, status.ready, status.loading, router.waits_for_load("new")

        def weights() -> list[int]:
            return [engine.info.weight_bytes // FAKE_WEIGHT_BYTES for engine in router.engines]

        await add(router, "new")
        assert (counts(), weights()) == ((2, 2, 0, False), [2, 2])
        await router.administration.unload_service("new")
        assert (counts(), weights()) == ((0, 0, 0, False), [1, 1])
        caplog.clear()
        for process in backend.processes.values():
            process.core.fake_services.loading.clear()
        stream = await router.submit("new", PROMPT, greedy())
        await asyncio.sleep(3)
        assert (counts(), weights()) == ((2, 0, 2, True), [1, 1])
        for process in backend.processes.values():
            process.core.fake_services.loading.set()
        assert await tokens_of(stream) == expected(PROMPT)
        assert (counts(), weights()) == ((2, 2, 0, False), [2, 2])
        lines = [record.getMessage() for record in caplog.records]
        for engine in "01":
            [line] = [line for line in lines if line.startswith(f"engine {engine}: service new is loaded in")]
            seconds, _, why = line.rpartition(" in ")[2].partition(" s, ")
            assert 3 <= float(seconds) < 60
            assert why == "asked for by a request"
        await router.administration.unload_service("new")
        caplog.clear()
        await router.administration.load_service("new")
        assert {record.getMessage().rpartition(" ")[2] for record in caplog.records} == {"s"}

    with caplog.at_level(logging.INFO):
        play(scenario, blocks=640)


def test_a_call_tells_how_long_it_waited_until_its_service_was_loaded():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        now_ns = asyncio.get_running_loop().now_ns
        await add(router, "new")
        await router.administration.unload_service("new")
        for process in backend.processes.values():
            process.core.fake_services.loading.clear()
        began_ns = now_ns()
        first = await router.submit("new", PROMPT, greedy())
        await asyncio.sleep(3)
        between_ns = now_ns() - began_ns
        second = await router.submit("new", PROMPT, greedy())
        await asyncio.sleep(1)
        for process in backend.processes.values():
            process.core.fake_services.loading.set()
        assert await tokens_of(first) == await tokens_of(second) == expected(PROMPT)
        assert 4e9 < first.load_ns < now_ns() - began_ns
        assert second.load_ns == first.load_ns - between_ns
        third = await router.submit("new", PROMPT, greedy())
        assert await tokens_of(third) == expected(PROMPT)
        assert third.load_ns == 0

    play(scenario, blocks=640)


def test_a_service_is_kept_as_long_as_is_said_meanwhile():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        change = router.administration
        await change.keep_service("a", 0)
        assert router.services["a"].state is ServiceState.UNLOADED
        stream = await router.submit("a", PROMPT, greedy())
        await reaches(router, "a", ServiceState.READY)
        await change.keep_service("a", 0)
        assert await tokens_of(stream) == expected(PROMPT)
        await reaches(router, "a", ServiceState.UNLOADED)
        await change.load_service("a")
        await change.keep_service("a", 30.0)
        await asyncio.sleep(25)
        assert router.services["a"].state is ServiceState.READY
        await reaches(router, "a", ServiceState.UNLOADED)
        # That was until it was unloaded.
        await change.load_service("a")
        await asyncio.sleep(100)
        assert router.services["a"].state is ServiceState.READY
        with pytest.raises(ConfigError, match="'z'"):
            await change.keep_service("z", 0)

    play(scenario, blocks=640)


@pytest.mark.parametrize(
    ("name", "model", "words"),
    [("new", "unsupported", "computed wrongly"), ("a", "fake", "already")],
)
def test_what_cannot_be_added_changes_nothing(name, model, words):
    async def scenario(router: Router, backend: FakeBackend) -> None:
        with pytest.raises(ConfigError, match=words):
            await add(router, name, model)
        assert set(router.services) == set(router.info.services) == {"a"}
        assert await tokens_of(await router.submit("a", PROMPT, greedy())) == expected(PROMPT)

    play(scenario, blocks=640)


def test_unknown_names_and_last_ones_are_refused():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        change = router.administration
        for work in (
            change.remove_service("z"),
            change.load_service("z"),
            change.unload_service("z"),
            change.remove_engine("z"),
            change.remove_service("a"),
            change.remove_engine("0"),
            change.add_service(Service(name="b", model="fake"), FOLDER, ByteTokenizer(), engines=["z"]),
        ):
            with pytest.raises(ConfigError, match=r"there is no |last one"):
                await work
        with pytest.raises(ConfigError, match="there is no engine"):
            change.drain_engine("z")

    play(scenario, engines=1)


def test_the_only_engine_of_a_service_stays():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        await router.administration.add_service(
            Service(name="new", model="fake"), FOLDER, ByteTokenizer(), engines=["1"]
        )
        with pytest.raises(ConfigError, match="engine '1' is the only one of new"):
            await router.administration.remove_engine("1")
        assert await tokens_of(await router.submit("new", PROMPT, greedy())) == expected(PROMPT)
        await router.administration.remove_service("new")
        await router.administration.remove_engine("1")
        assert [engine.name for engine in router.engines] == ["0"]

    play(scenario, blocks=640)


def test_longer_requests_go_to_the_larger_engine() -> None:
    async def scenario(router: Router, backend: FakeBackend) -> None:
        before = router.info.services["a"].max_total_tokens
        small = EnginePlan(name="small", options=make_options("fake", blocks=8))
        await router.administration.add_engine(small)
        assert router.info.services["a"].max_total_tokens == before
        room = router.engines[-1].info.services["a"].kv_tokens  # type: ignore[union-attr]
        assert room + 100 < before
        long = {f"l{number}": [number + 1] * room for number in range(4)}
        streams = [await router.submit("a", prompt, greedy(max_tokens=99)) for prompt in long.values()]
        assert [await tokens_of(stream) for stream in streams] == [
            expected(prompt, 99) for prompt in long.values()
        ]
        # Without a limit of its own a request ends where the smallest engine does that its prompt fits.
        for prompt, most in (([7] * (room - 5), 5), ([7] * room, before - room)):
            assert len(await tokens_of(await router.submit("a", prompt, greedy(max_tokens=None)))) == most
        with pytest.raises(InvalidRequest, match=f"takes {before} tokens of prompt and output together"):
            await router.submit("a", PROMPT, greedy(max_tokens=before))

    play(scenario, blocks=640)


def test_a_long_request_of_a_dead_engine_waits_until_it_is_back() -> None:
    async def scenario(router: Router, backend: FakeBackend) -> None:
        small = EnginePlan(name="small", options=make_options("fake", blocks=8))
        await router.administration.add_engine(small)
        await router.administration.remove_engine("1")
        prompt = [3] * 60
        stream = await router.submit("a", prompt, greedy(max_tokens=99))
        await asyncio.sleep(0.1)
        backend.die(backend.processes["0"], "killed by signal 9 (SIGKILL)")
        assert await tokens_of(await router.submit("a", PROMPT, greedy())) == expected(PROMPT)
        assert await tokens_of(stream) == expected(prompt, 99)
        assert [engine.restarts for engine in router.engines] == [1, 0]

    play(scenario, blocks=640)


def test_an_engine_that_is_undrained_gets_requests_again() -> None:
    async def scenario(router: Router, backend: FakeBackend) -> None:
        change = router.administration
        with pytest.raises(ConfigError, match="there is no engine"):
            change.undrain_engine("z")
        change.drain_engine("0")
        streams = [await router.submit("a", PROMPT, greedy(max_tokens=150)) for _ in range(2)]
        assert [engine.requests for engine in router.engines] == [0, 2]
        change.undrain_engine("0")
        streams += [await router.submit("a", PROMPT, greedy(max_tokens=150)) for _ in range(2)]
        assert [engine.requests for engine in router.engines] == [2, 2]
        for stream in streams:
            assert await tokens_of(stream) == expected(PROMPT, 150)

    play(scenario)


def test_engines_come_drain_and_go():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        change = router.administration
        streams = [await router.submit("a", PROMPT, greedy(max_tokens=150)) for _ in range(4)]
        plan = EnginePlan(name="new", options=make_options("fake", blocks=640))
        await change.add_engine(plan)
        with pytest.raises(ConfigError, match="already"):
            await change.add_engine(plan)
        change.drain_engine("0")
        before = {engine.name: engine.requests for engine in router.engines}
        streams += [await router.submit("a", PROMPT, greedy(max_tokens=150)) for _ in range(4)]
        after = {engine.name: engine.requests for engine in router.engines}
        assert after["0"] == before["0"]
        assert after["new"] > 0
        change.drain_engine("1")
        with pytest.raises(ConfigError, match="'new' is the last one that takes requests"):
            change.drain_engine("new")
        with pytest.raises(ConfigError, match="'new' is the last one that takes requests"):
            await change.remove_engine("new")
        await change.remove_engine("0")
        assert [engine.name for engine in router.engines] == ["1", "new"]
        for stream in streams:
            assert await tokens_of(stream) == expected(PROMPT, 150)
        backend.fail_loading = 1
        with pytest.raises(EngineDied, match="does not start"):
            await change.add_engine(EnginePlan(name="bad", options=plan.options))
        assert [engine.name for engine in router.engines] == ["1", "new"]

    play(scenario, blocks=640)


def test_services_come_and_go_at_random_while_engines_die():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        rng = random.Random(5)
        stopped = asyncio.Event()
        answered = dict.fromkeys(("a", "b", "c"), 0)

        async def client(number: int) -> None:
            while not stopped.is_set():
                service = rng.choice(sorted(router.info.services))
                prompt = [97 + number, *(rng.randrange(97, 123) for _ in range(rng.randrange(1, 20)))]
                try:
                    stream = await router.submit(service, prompt, greedy(max_tokens=50))
                except InvalidRequest:
                    continue  # it was removed meanwhile
                assert await tokens_of(stream) == expected(prompt, 50)
                answered[service] += 1

        clients = [asyncio.create_task(client(number)) for number in range(6)]
        for _ in range(25):
            await asyncio.sleep(rng.uniform(0.1, 1.5))
            if rng.random() < 0.2:
                backend.die(rng.choice(list(backend.processes.values())), "killed")
            name = rng.choice("bc")
            if name not in router.info.services:
                await add(router, name)
            elif rng.random() < 0.4:
                await router.administration.remove_service(name)
            elif rng.random() < 0.5:
                unloading = asyncio.create_task(router.administration.unload_service(name))
                await asyncio.sleep(rng.uniform(0, 0.5))
                await router.administration.load_service(name)
                with suppress(ConfigError):  # it was loaded again before it was unloaded
                    await unloading
            for process in backend.processes.values():
                if process.alive:
                    process.core.fake_pool.check_integrity()
        stopped.set()
        await asyncio.gather(*clients)
        assert min(answered.values()) > 10
        while any(engine.state is not EngineState.READY for engine in router.engines):
            await asyncio.sleep(0.5)
        assert router.unfinished == router.waiting == 0

    # A step of the fake model takes no time, by which the default order would tell services apart.
    play(scenario, blocks=640, scheduler={"starvation_s": 0.3})
