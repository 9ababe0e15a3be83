"""Requests that move between engines: in virtual time, with engines that speak the messages of migrations."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

import pytest
from fake_cluster import FakeBackend
from test_router import PROMPT, expected, greedy, tokens_of
from test_router import play as play_router

from shoal.cluster.events import MoveMethod
from shoal.cluster.router import Router
from shoal.cluster.status import EngineState
from shoal.core import FinishReason, SamplingParams

Scenario = Callable[[Router, FakeBackend], Awaitable[None]]


def play(scenario: Scenario, **options) -> None:
    """As in the router's tests, with engines between which KV can move, and which keep none in the end."""

    async def run(router: Router, backend: FakeBackend) -> None:
        await scenario(router, backend)
        assert router.unfinished == router.waiting == 0
        await asyncio.sleep(1)
        for process in backend.processes.values():
            assert process.moves.empty
            assert not process.live
            assert not process.core.busy
        assert all(engine.leases == engine.requests == 0 for engine in router.engines)

    play_router(run, **({"kv_format": "fake", "blocks": 640} | options))


def moves(router: Router) -> dict[tuple[str, str], int]:
    """Migrations that are over, by method and outcome."""
    found: dict[tuple[str, str], int] = {}
    for engine in router.engines:
        for key, count in engine.moves.items():
            found[key] = found.get(key, 0) + count
    return found


@pytest.mark.parametrize("method", list(MoveMethod))
def test_a_request_moves(method, caplog):
    caplog.set_level(logging.INFO, "shoal.cluster")

    async def scenario(router: Router, backend: FakeBackend) -> None:
        stream = await router.submit("a", PROMPT, greedy(max_tokens=100))
        await asyncio.sleep(0.4)
        assert [engine.requests for engine in router.engines] == [1, 0]
        router.administration.move_request(stream.id, None, method)
        await asyncio.sleep(0.4)
        assert [engine.requests for engine in router.engines] == [0, 1]
        assert await tokens_of(stream) == expected(PROMPT, 100)
        assert moves(router) == {(method, "done"): 1}
        assert router.services["a"].resumed == 0

    play(scenario)
    what = "by its tokens" if method is MoveMethod.TOKENS else "tokens of KV"
    [told] = [record.message for record in caplog.records if "moved from" in record.message]
    assert "moved from engine 0 to 1 in " in told
    assert told.endswith(what)


@pytest.mark.parametrize(
    ("sampling", "kv_format"),
    [
        (greedy(), ""),
        (SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=60), "fake"),
        (greedy(prompt_logprobs=0), "fake"),
    ],
)
def test_what_cannot_move_its_kv_moves_by_its_tokens(sampling, kv_format):
    async def scenario(router: Router, backend: FakeBackend) -> None:
        stream = await router.submit("a", PROMPT, sampling)
        await asyncio.sleep(0.4)
        router.administration.move_request(stream.id, "1", MoveMethod.LIVE)
        assert await tokens_of(stream)
        assert moves(router) == {("tokens", "done"): 1}

    play(scenario, kv_format=kv_format)


def test_where_nothing_can_move_nothing_happens():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        move = router.administration.move_request
        stream = await router.submit("a", PROMPT, greedy())
        move(stream.id, "0", MoveMethod.LIVE)
        move(stream.id, "nobody", MoveMethod.LIVE)
        move("nobody", None, MoveMethod.TOKENS)
        assert await tokens_of(stream) == expected(PROMPT)
        assert moves(router) == {}

    play(scenario)


def test_a_destination_without_room_changes_nothing(caplog):
    caplog.set_level(logging.INFO, "shoal.cluster")

    async def scenario(router: Router, backend: FakeBackend) -> None:
        backend.declines = 1.0
        stream = await router.submit("a", PROMPT, greedy())
        router.administration.move_request(stream.id, "1", MoveMethod.LIVE)
        assert await tokens_of(stream) == expected(PROMPT)
        assert moves(router) == {("live", "aborted"): 1}

    play(scenario)
    assert any(
        "not moved from engine 0 to 1: there is no room" in record.message for record in caplog.records
    )


def test_lost_kv_brings_the_request_back():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        backend.lost_kv = 1.0
        stream = await router.submit("a", PROMPT, greedy(max_tokens=200))
        router.administration.move_request(stream.id, "1", MoveMethod.STOP)
        assert await tokens_of(stream) == expected(PROMPT, 200)
        assert moves(router) == {("stop", "aborted"): 1}

    play(scenario)


@pytest.mark.parametrize("killed", ["0", "1"])
@pytest.mark.parametrize("after_s", [0.001, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12, 0.16, 0.2])
def test_source_or_destination_die_amid_a_move(killed, after_s):
    async def scenario(router: Router, backend: FakeBackend) -> None:
        stream = await router.submit("a", PROMPT, greedy(max_tokens=100))
        await asyncio.sleep(0.3)
        router.administration.move_request(stream.id, "1", MoveMethod.LIVE)
        await asyncio.sleep(after_s)
        backend.die(backend.processes[killed], "killed")
        assert await tokens_of(stream) == expected(PROMPT, 100)
        assert sum(moves(router).values()) == 1

    play(scenario)


def test_a_cancelled_request_leaves_nothing_wherever_it_is():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        for number in range(40):
            stream = await router.submit("a", PROMPT, greedy(max_tokens=100))
            router.administration.move_request(stream.id, None, MoveMethod.LIVE)
            await asyncio.sleep(0.01 * number)
            await stream.aclose()
        assert sum(moves(router).values()) == 40

    play(scenario)


def test_a_drained_engine_is_empty_soon_and_nobody_waits():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        prompts = [[97 + number, 98, 99] for number in range(20)]
        streams = [await router.submit("a", prompt, greedy(max_tokens=250)) for prompt in prompts]
        readers = [asyncio.create_task(tokens_of(stream)) for stream in streams]
        await asyncio.sleep(0.3)
        router.administration.drain_engine("0")
        began_s = asyncio.get_running_loop().time()
        while router.engines[0].requests or router.engines[0].leases:
            assert sum(engine.leases for engine in router.engines) <= 4
            await asyncio.sleep(0.01)
        # Each request alone would take 250 steps of 0.02 s.
        assert asyncio.get_running_loop().time() - began_s < 2
        assert moves(router) == {("live", "done"): 10}
        await router.administration.remove_engine("0")
        for prompt, reader in zip(prompts, readers, strict=True):
            assert await reader == expected(prompt, 250)

    play(scenario)


def test_a_drain_goes_on_when_there_is_room():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        backend.declines = 1.0
        streams = [await router.submit("a", PROMPT, greedy(max_tokens=250)) for _ in range(12)]
        router.administration.drain_engine("0")
        await asyncio.sleep(1.5)
        assert router.engines[0].requests == 6
        backend.declines = 0.0
        await asyncio.sleep(2)
        assert router.engines[0].requests == 0
        for stream in streams:
            assert await tokens_of(stream) == expected(PROMPT, 250)
        assert moves(router)["live", "done"] == 6

    play(scenario)


@pytest.mark.parametrize("migrations", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_nothing_is_lost_doubled_or_changed_by_many_moves(migrations):
    """Streams come and go while requests move, engines die, hang, are drained and added again."""

    async def scenario(router: Router, backend: FakeBackend) -> None:
        rng = random.Random(migrations)
        backend.lost_kv, backend.declines = 0.05, 0.1
        running: dict[str, None] = {}
        stopped = asyncio.Event()
        done = 0

        async def client(number: int) -> None:
            nonlocal done
            while not stopped.is_set():
                prompt = [97 + number, *(rng.randrange(97, 123) for _ in range(rng.randrange(1, 30)))]
                limit = rng.randrange(1, 150)
                stream = await router.submit("a", prompt, greedy(max_tokens=limit))
                running[stream.id] = None
                last, tokens = None, []
                cancels_at = rng.randrange(200)
                async for delta in stream:
                    assert last is None
                    tokens += delta.tokens
                    last = delta.finish
                    if len(tokens) > cancels_at:
                        await stream.aclose()
                        break
                del running[stream.id]
                if len(tokens) <= cancels_at:
                    assert tokens == expected(prompt, limit)
                    assert last is FinishReason.LENGTH
                else:
                    assert tokens == expected(prompt, limit)[: len(tokens)]
                done += 1

        async def administer() -> None:
            """Drain an engine now and then, and have it replaced."""
            number = 3
            while not stopped.is_set():
                await asyncio.sleep(rng.uniform(5, 20))
                ready = [engine.name for engine in router.engines if engine.state is EngineState.READY]
                if len(ready) < 3:
                    continue
                name = rng.choice(ready)
                plan = router._fleet.engines[name].plan
                router.administration.drain_engine(name)
                await asyncio.sleep(rng.uniform(0, 3))
                await router.administration.remove_engine(name)
                await replace_engine(number, plan)
                number += 1

        async def replace_engine(number: int, plan) -> None:
            from dataclasses import replace

            from shoal.core import EngineDied

            try:
                await router.administration.add_engine(replace(plan, name=str(number)))
            except EngineDied:
                await replace_engine(number + 100, plan)

        clients = [asyncio.create_task(client(number)) for number in range(16)]
        administering = asyncio.create_task(administer())
        began = 0
        while began < migrations:
            await asyncio.sleep(rng.uniform(0, 0.1))
            engines = [None, *(engine.name for engine in router.engines)]
            if running:
                request = rng.choice(list(running))
                router.administration.move_request(request, rng.choice(engines), rng.choice(list(MoveMethod)))
                began += 1
            if rng.random() < 0.02:
                process = rng.choice(list(backend.processes.values()))
                if rng.random() < 0.2:
                    process.hung = True
                else:
                    backend.die(process, "killed")
        stopped.set()
        await asyncio.gather(*clients, administering)
        assert done > migrations / 10
        if migrations == 1000:
            counts = moves(router)
            assert all(counts.get((method, outcome)) for method in MoveMethod for outcome in ("done",))

    play(scenario, engines=3)
