"""The router with engines that die: in virtual time, with real schedulers around a fake model."""

import asyncio
import io
import random
import re
from collections.abc import Awaitable, Callable, Sequence

import pytest
from engine_builders import expected_tokens, make_request
from fake_cluster import LOAD_S, FakeBackend, make_router

from shoal.cluster.backends.interface import EngineWaiting
from shoal.cluster.manager.actions import ClusterAction
from shoal.cluster.manager.event_log import EventLogWriter, replay
from shoal.cluster.manager.events import ClusterEvent, EngineLoading
from shoal.cluster.node import EngineMessage
from shoal.cluster.options import ClusterOptions, RestartOptions
from shoal.cluster.router.router import Router
from shoal.cluster.status import EngineState
from shoal.core import EngineDied, FinishReason, SamplingParams, ServiceUnavailable
from shoal.engine.process.lifeline import Loading
from shoal.frontend.reader import Delta
from virtual_loop import run_virtually

QUICK = ClusterOptions(restart=RestartOptions(first_s=0.1, factor=1.0, max_s=0.1), heartbeat_s=0.2)
PROMPT = [97, 98, 99, 100, 101]


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 60} | fields))


def expected(prompt: list[int], limit: int = 60) -> list[int]:
    return expected_tokens(make_request("r", prompt, max_tokens=limit), limit)


async def tokens_of(stream) -> list[int]:
    return [token for delta in [delta async for delta in stream] for token in delta.tokens]


Scenario = Callable[[Router, FakeBackend], Awaitable[None]]


def play(
    scenario: Scenario,
    *,
    poison: int | None = None,
    step_s: float = 0.02,
    kv_transferable: bool = True,
    decided: list[ClusterAction] | None = None,
    **options,
) -> None:
    """Run ``scenario`` with a router that has started; then replay what its manager decided.

    decided: gets all of that.
    """
    log = io.BytesIO()
    options = {"cluster": QUICK} | options

    async def run() -> None:
        backend = FakeBackend(0, poison, step_s, kv_transferable)
        writer = EventLogWriter(log, options["cluster"])

        def note(now_ns: int, event: ClusterEvent, actions: Sequence[ClusterAction]) -> None:
            writer.write(now_ns, event, list(actions))
            if decided is not None:
                decided.extend(actions)

        router = make_router(backend, on_decision=note, **options)
        await router.run()
        try:
            await asyncio.wait_for(scenario(router, backend), 3600)
        finally:
            await router.close()

    run_virtually(run())
    replay(log.getvalue().splitlines(keepends=True))


def test_calls_spread_over_engines_and_are_answered():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        streams = [await router.submit("a", PROMPT, greedy()) for _ in range(8)]
        assert {engine.requests for engine in router.engines} == {4}
        for stream in streams:
            assert await tokens_of(stream) == expected(PROMPT)
        assert router.unfinished == router.waiting == 0

    play(scenario)


def test_an_engine_that_waits_for_resources_is_reported_but_makes_no_progress():
    reported: list[str] = []
    loading: list[ClusterEvent] = []

    def note(now_ns: int, event: ClusterEvent, actions: Sequence[ClusterAction]) -> None:
        if isinstance(event, EngineLoading):
            loading.append(event)

    async def run() -> None:
        backend = FakeBackend()
        router = make_router(backend, on_decision=note)
        starting = asyncio.create_task(router.run(reported.append))
        await asyncio.sleep(LOAD_S / 4)
        backend.on_event(EngineWaiting("0", 1, "waiting for a GPU"))
        backend.on_event(EngineMessage("0", 1, 1000, Loading("reading weights")))
        await starting
        backend.on_event(EngineMessage("1", 1, 1000, Loading("measuring")))
        await router.close()

    run_virtually(run())
    assert reported == ["engine 0: waiting for a GPU", "engine 0: reading weights"]
    assert loading == [EngineLoading("0", 1, "reading weights"), EngineLoading("1", 1, "measuring")]


def lines_about(caplog, engine: str) -> list[tuple[str, str]]:
    """Levels and texts of what was logged about an engine."""
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    return [(level, text) for level, text in lines if text.startswith(f"engine {engine}")]


def test_a_killed_engines_streams_go_on_where_they_stopped(caplog):
    caplog.set_level("INFO", "shoal.cluster")

    async def scenario(router: Router, backend: FakeBackend) -> None:
        prompts = [[97 + i, 98, 99] for i in range(8)]
        streams = [await router.submit("a", prompt, greedy()) for prompt in prompts]
        await asyncio.sleep(0.4)
        backend.die(backend.processes["0"], "killed by signal 9 (SIGKILL)")
        for prompt, stream in zip(prompts, streams, strict=True):
            assert await tokens_of(stream) == expected(prompt)
        assert router.services["a"].resumed == 4
        engine = router.engines[0]
        assert engine.restarts == 1
        assert "SIGKILL" in (engine.last_error or "")

    play(scenario)
    died, went_on = lines_about(caplog, "0")
    assert died == ("WARNING", "engine 0 died: killed by signal 9 (SIGKILL); 4 requests to be resumed")
    assert went_on[0] == "INFO"
    assert re.fullmatch(r"engine 0: 4 requests went on within \d+ ms \(4 on engine 1\)", went_on[1])
    assert len(caplog.records) == 2, "no line for every request"


def test_a_single_engine_is_started_again_and_its_streams_wait_for_it():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        stream = await router.submit("a", PROMPT, greedy())
        await asyncio.sleep(0.4)
        backend.die(backend.processes["0"], "killed")
        await asyncio.sleep(0.5)
        assert router.engines[0].state in (EngineState.LOADING, EngineState.WAITING)
        assert router.services["a"].waiting == 1
        assert await tokens_of(stream) == expected(PROMPT)

    play(scenario, engines=1)


@pytest.mark.parametrize("engines", [1, 2])
def test_an_engine_that_fails_the_start_is_reported_by_the_error_alone(engines, caplog):
    async def start() -> None:
        backend = FakeBackend()
        backend.fail_loading = engines
        router = make_router(backend, engines=engines)
        named = "engine [01]: " if engines > 1 else ""
        with pytest.raises(EngineDied, match=rf"ended while loading \({named}exit code 1\)"):
            await router.run()

    run_virtually(start())
    assert not caplog.records


def test_a_hung_engine_is_killed_and_its_streams_resumed():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        streams = [await router.submit("a", PROMPT, greedy()) for _ in range(4)]
        await asyncio.sleep(0.4)
        backend.processes["1"].hung = True
        for stream in streams:
            assert await tokens_of(stream) == expected(PROMPT)
        assert backend.killed == ["1"]

    play(scenario)


def test_only_the_poison_request_fails():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        good = [await router.submit("a", [97 + i, 5, 6], greedy()) for i in range(6)]
        bad = await router.submit("a", [66, 1, 2], greedy())
        later = asyncio.create_task(trickle(router))
        with pytest.raises(EngineDied, match="engines ended twice"):
            await tokens_of(bad)
        for number, stream in enumerate(good):
            assert await tokens_of(stream) == expected([97 + number, 5, 6])
        assert await later

    async def trickle(router: Router) -> bool:
        for number in range(20):
            await asyncio.sleep(0.3)
            stream = await router.submit("a", [120, number], greedy(max_tokens=20))
            assert await tokens_of(stream) == expected([120, number], 20)
        return True

    play(scenario, poison=66)
    play(scenario, poison=66, engines=1)


def test_suspects_of_one_token_each_are_answered_one_after_the_other():
    """Of each the first token is the last, while the other waits in quarantine."""

    async def scenario(router: Router, backend: FakeBackend) -> None:
        streams = [await router.submit("a", [97 + number, 5], greedy(max_tokens=1)) for number in range(2)]
        for _ in range(2):
            process = backend.processes["0"]
            process.hung = True  # it takes requests, and makes no step
            while len(process.core._scheduler.request_ids) < 2:
                for message in process.arrived:
                    backend._handle(process, message)
                process.arrived.clear()
                await asyncio.sleep(0.001)
            backend.die(process, "killed")
            while backend.processes["0"] is process or not backend.processes["0"].loaded:
                await asyncio.sleep(0.001)
        for stream in streams:
            assert len(await asyncio.wait_for(tokens_of(stream), 100)) == 1

    play(scenario, engines=1)


def test_requests_wait_for_an_engine_only_so_long(caplog):
    async def scenario(router: Router, backend: FakeBackend) -> None:
        begun = await router.submit("a", PROMPT, greedy())
        first = await anext(begun)
        assert first.tokens
        backend.fail_loading = 1000
        backend.die(backend.processes["0"], "killed")
        await asyncio.sleep(0.5)
        new = await router.submit("a", PROMPT, greedy())
        for stream in (begun, new):
            with pytest.raises(ServiceUnavailable) as caught:
                await tokens_of(stream)
            assert caught.value.retry_after_s > 0
        assert router.unfinished == router.waiting == 0
        backend.fail_loading = 0
        await asyncio.sleep(5 * LOAD_S)
        assert await tokens_of(await router.submit("a", PROMPT, greedy())) == expected(PROMPT)

    play(scenario, engines=1)
    assert ("WARNING", "engine 0: 1 request ended with an error") in lines_about(caplog, "0")


def test_a_cancelled_call_is_forgotten_wherever_it_is():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        streams = [await router.submit("a", PROMPT, greedy(n=2)) for _ in range(3)]
        await asyncio.sleep(0.1)
        await streams[0].aclose()
        backend.die(backend.processes["0"], "killed")
        backend.die(backend.processes["1"], "killed")
        await asyncio.sleep(0.05)
        await streams[1].aclose()
        assert await tokens_of(streams[2])
        assert router.unfinished == router.waiting == 0
        await asyncio.sleep(1)
        assert all(not process.core.busy for process in backend.processes.values())

    play(scenario)


def test_choices_and_stop_strings_go_on_as_if_nothing_had_happened():
    async def texts(router: Router, after: Callable[[], None]) -> list[tuple[str, object]]:
        sampling = SamplingParams(temperature=1.0, seed=5, n=4, max_tokens=60, stop=("qu", "zz", "ab"))
        stream = await router.submit("a", PROMPT, sampling)
        found: dict[int, list[Delta]] = {}
        async for delta in stream:
            found.setdefault(delta.choice, []).append(delta)
            after()
        return [
            ("".join(delta.text for delta in deltas), deltas[-1].stop_reason)
            for _, deltas in sorted(found.items())
        ]

    results = []

    async def undisturbed(router: Router, backend: FakeBackend) -> None:
        results.append(await texts(router, lambda: None))

    async def disturbed(router: Router, backend: FakeBackend) -> None:
        deltas = iter(range(1_000_000))

        def kill_now_and_then() -> None:
            if next(deltas) % 15 == 10:
                for process in backend.processes.values():
                    backend.die(process, "killed")

        results.append(await texts(router, kill_now_and_then))

    play(undisturbed)
    play(disturbed)
    assert results[0] == results[1]
    assert len(results[0]) == 4


@pytest.mark.parametrize(
    ("engines", "kills"), [(2, 20), (3, 20), pytest.param(3, 300, marks=pytest.mark.slow)]
)
def test_nothing_is_lost_under_many_kills(engines, kills):
    """Streams come and go while engines are killed, hung or fail to load."""

    async def scenario(router: Router, backend: FakeBackend) -> None:
        rng = random.Random(3)
        done = 0
        stopped = asyncio.Event()

        async def client(number: int) -> None:
            nonlocal done
            while not stopped.is_set():
                prompt = [97 + number, *(rng.randrange(97, 123) for _ in range(rng.randrange(1, 30)))]
                limit = rng.randrange(1, 100)
                stream = await router.submit("a", prompt, greedy(max_tokens=limit))
                last = None
                tokens: list[int] = []
                async for delta in stream:
                    assert last is None
                    tokens += delta.tokens
                    last = delta.finish
                assert tokens == expected(prompt, limit)
                assert last is FinishReason.LENGTH
                done += 1

        clients = [asyncio.create_task(client(number)) for number in range(12)]
        for _ in range(kills):
            await asyncio.sleep(rng.uniform(0.2, 3))
            process = rng.choice(list(backend.processes.values()))
            backend.fail_loading = rng.choice([0, 0, 0, 1])
            if rng.random() < 0.2:
                process.hung = True
            else:
                backend.die(process, "killed")
        backend.fail_loading = 0
        stopped.set()
        await asyncio.gather(*clients)
        assert done > kills
        assert router.services["a"].resumed > kills
        assert router.unfinished == router.waiting == 0

    play(scenario, engines=engines, blocks=256, step_s=0.12 if kills > 100 else 0.02)
