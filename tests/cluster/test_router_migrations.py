"""Requests that move between engines: in virtual time, with engines that speak the messages of migrations."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count, product

import pytest
from fake_cluster import FakeBackend
from test_router import PROMPT, expected, greedy, tokens_of
from test_router import play as play_router

from crossed import crossed
from shoal.cluster.manager.actions import ClusterAction, MigrationEnded, MigrationOutcome
from shoal.cluster.manager.events import MigrationMethod
from shoal.cluster.router.router import Router
from shoal.cluster.status import EngineState
from shoal.core import ConfigError, EngineDied, FinishReason, SamplingParams

Scenario = Callable[[Router, FakeBackend], Awaitable[None]]


def play(scenario: Scenario, **options) -> None:
    """As in the router's tests, with engines between which KV can move, and which keep none in the end."""

    async def run(router: Router, backend: FakeBackend) -> None:
        await scenario(router, backend)
        assert router.unfinished == router.waiting == 0
        await asyncio.sleep(20)  # who hangs is killed by then
        for process in [process for process in backend.processes.values() if process.alive]:
            assert not process.core.busy
            assert not process.core._scheduler.leases
            assert not process.core._migrations.ready
            process.core.fake_pool.check_integrity()
        assert all(engine.leases == engine.requests == 0 for engine in router.engines)

    play_router(run, **({"blocks": 640} | options))


def moves(router: Router) -> Counter[tuple[MigrationMethod, MigrationOutcome]]:
    """Migrations that are over."""
    return sum((Counter(engine.migrations) for engine in router.engines), Counter())


@pytest.mark.parametrize("method", list(MigrationMethod))
def test_a_request_migrates(method, caplog):
    caplog.set_level(logging.INFO, "shoal.cluster")

    async def scenario(router: Router, backend: FakeBackend) -> None:
        stream = await router.submit("a", PROMPT, greedy(max_tokens=100))
        await asyncio.sleep(0.4)
        assert [engine.requests for engine in router.engines] == [1, 0]
        router.administration.migrate_request(stream.id, None, method)
        await asyncio.sleep(0.4)
        assert [engine.requests for engine in router.engines] == [0, 1]
        assert await tokens_of(stream) == expected(PROMPT, 100)
        assert moves(router) == {(method, "done"): 1}
        assert router.services["a"].resumed == 0

    play(scenario)
    what = "by its tokens" if method is MigrationMethod.TOKENS else "tokens of KV"
    [line] = [record.message for record in caplog.records if "moved from" in record.message]
    assert "moved from engine 0 to 1 in " in line
    assert line.endswith(what)


@pytest.mark.parametrize(
    ("sampling", "kv_transferable"),
    [
        (greedy(), False),
        (SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=60), True),
        (greedy(prompt_logprobs=0), True),
    ],
)
def test_a_request_whose_kv_cannot_migrate_is_recomputed(sampling, kv_transferable):
    async def scenario(router: Router, backend: FakeBackend) -> None:
        stream = await router.submit("a", PROMPT, sampling)
        await asyncio.sleep(0.4)
        router.administration.migrate_request(stream.id, "1", MigrationMethod.LIVE)
        assert await tokens_of(stream)
        assert moves(router) == {("tokens", "done"): 1}

    play(scenario, kv_transferable=kv_transferable)


def test_an_impossible_migration_is_ignored():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        move = router.administration.migrate_request
        stream = await router.submit("a", PROMPT, greedy())
        move(stream.id, "0", MigrationMethod.LIVE)
        with pytest.raises(ConfigError, match="there is no engine 'z'"):
            move(stream.id, "z", MigrationMethod.LIVE)
        move("nobody", None, MigrationMethod.TOKENS)
        assert await tokens_of(stream) == expected(PROMPT)
        assert moves(router) == {}

    play(scenario)


def test_a_destination_without_room_changes_nothing(caplog):
    caplog.set_level(logging.INFO, "shoal.cluster")

    async def scenario(router: Router, backend: FakeBackend) -> None:
        backend.declines = 1.0
        stream = await router.submit("a", PROMPT, greedy())
        router.administration.migrate_request(stream.id, "1", MigrationMethod.LIVE)
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
        router.administration.migrate_request(stream.id, "1", MigrationMethod.STOP)
        assert await tokens_of(stream) == expected(PROMPT, 200)
        assert moves(router) == {("stop", "aborted"): 1}

    play(scenario)


@pytest.mark.parametrize(
    ("after_s", "killed"), crossed([0.001, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12, 0.16, 0.2], ["0", "1"])
)
def test_source_or_destination_dies_during_a_migration(killed, after_s):
    async def scenario(router: Router, backend: FakeBackend) -> None:
        stream = await router.submit("a", PROMPT, greedy(max_tokens=100))
        await asyncio.sleep(0.3)
        router.administration.migrate_request(stream.id, "1", MigrationMethod.LIVE)
        await asyncio.sleep(after_s)
        backend.die(backend.processes[killed], "killed")
        assert await tokens_of(stream) == expected(PROMPT, 100)
        assert sum(moves(router).values()) == 1

    play(scenario)


def test_a_cancelled_request_leaves_nothing_wherever_it_is():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        for number in range(40):
            stream = await router.submit("a", PROMPT, greedy(max_tokens=100))
            await asyncio.sleep(0.1)
            router.administration.migrate_request(stream.id, None, MigrationMethod.LIVE)
            await asyncio.sleep(0.005 * number)
            await stream.aclose()
        assert sum(moves(router).values()) == 40

    play(scenario)


def test_a_drained_engine_is_soon_empty_and_no_stream_pauses():
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
def test_nothing_is_lost_duplicated_or_changed_by_many_migrations(migrations):
    """Streams come and go while requests move, engines die, hang, are drained and replaced."""
    decided: list[ClusterAction] = []

    async def scenario(router: Router, backend: FakeBackend) -> None:
        crowd = Crowd(router, backend, seed=migrations)
        backend.lost_kv, backend.declines = 0.05, 0.1
        clients = [asyncio.create_task(crowd.client(number)) for number in range(16)]
        replacing = asyncio.create_task(crowd.replace_engines())
        while sum(isinstance(action, MigrationEnded) for action in decided) < migrations:
            await asyncio.sleep(crowd.random.uniform(0, 0.1))
            crowd.move_one()
            if crowd.random.random() < 0.02:
                crowd.harm_one()
        crowd.stopped.set()
        await asyncio.gather(*clients, replacing)
        assert crowd.answered > migrations / 10

    play(scenario, engines=3, decided=decided)
    ends = Counter((each.method, each.outcome) for each in decided if isinstance(each, MigrationEnded))
    if migrations == 1000:
        assert set(ends) >= set(product(MigrationMethod, (MigrationOutcome.DONE, MigrationOutcome.ABORTED)))


class Crowd:
    """Clients whose streams must be right, and what disturbs them."""

    def __init__(self, router: Router, backend: FakeBackend, seed: int) -> None:
        self.router, self.backend = router, backend
        self.random = random.Random(seed)
        self.running: dict[str, None] = {}
        self.stopped = asyncio.Event()
        self.answered = 0

    async def client(self, number: int) -> None:
        """Ask again and again; leave now and then before the end."""
        rng = self.random
        while not self.stopped.is_set():
            prompt = [97 + number, *(rng.randrange(97, 123) for _ in range(rng.randrange(1, 30)))]
            limit, leaves_at = rng.randrange(1, 150), rng.randrange(300)
            stream = await self.router.submit("a", prompt, greedy(max_tokens=limit))
            self.running[stream.id] = None
            last, tokens = None, []
            async for delta in stream:
                assert last is None
                tokens += delta.tokens
                last = delta.finish
                if len(tokens) > leaves_at:
                    await stream.aclose()
                    break
            del self.running[stream.id]
            assert tokens == expected(prompt, limit)[: len(tokens)]
            assert len(tokens) > leaves_at or last is FinishReason.LENGTH
            self.answered += 1

    def move_one(self) -> None:
        """Move any request anywhere."""
        engines = [None, *(engine.name for engine in self.router.engines)]
        if self.running:
            request = self.random.choice(list(self.running))
            method = self.random.choice(list(MigrationMethod))
            self.router.administration.migrate_request(request, self.random.choice(engines), method)

    def harm_one(self) -> None:
        """Kill an engine, or let it hang."""
        process = self.random.choice(list(self.backend.processes.values()))
        if self.random.random() < 0.2:
            process.hung = True
        else:
            self.backend.die(process, "killed")

    async def replace_engines(self) -> None:
        """Drain an engine now and then, remove it at any moment, and add another."""
        for number in count(3):
            await asyncio.sleep(self.random.uniform(5, 20))
            if self.stopped.is_set():
                return
            ready = [engine.name for engine in self.router.engines if engine.state is EngineState.READY]
            if len(ready) < 2:
                continue
            name = self.random.choice(ready)
            plan = self.router._fleet.engines[name].plan
            self.router.administration.drain_engine(name)
            await asyncio.sleep(self.random.uniform(0, 3))
            await self.router.administration.remove_engine(name)
            while name not in [engine.name for engine in self.router.engines]:
                with suppress(EngineDied):
                    name = str(number)
                    await self.router.administration.add_engine(replace(plan, name=name))
