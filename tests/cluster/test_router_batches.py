"""Batches and slices through the router: text, choices, stop strings, deaths, migrations, in virtual time."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from fake_cluster import FakeBackend
from test_router import PROMPT, QUICK, expected, greedy, play, tokens_of

from crossed import each_nth
from shoal.cluster.batching_options import BatchingOptions
from shoal.cluster.manager.actions import ClusterAction, Dispatch
from shoal.cluster.router.router import Router
from shoal.cluster.status import EngineState
from shoal.core import FinishReason, SamplingParams
from shoal.frontend.timeline import Phase
from shoal.schedule import Batch

SLICES = BatchingOptions(former="scls", interval_s=0.2, slice_tokens=16)
IDLE = BatchingOptions(max_batch=3)
PREDICTED = BatchingOptions(former="slo-odbs", max_batch=4, trust_predictions=True, lengths="learned")


def with_batches(batching: BatchingOptions, **options: object) -> dict[str, Any]:
    scheduler = {"admission": Batch(), "starvation_s": 1e6, "preempt_for_waiting": "never"}
    return {"cluster": replace(QUICK, batching=batching), "scheduler": scheduler} | options


@pytest.mark.parametrize("batching", [SLICES, IDLE, PREDICTED])
def test_answers_are_those_of_requests_alone(batching: BatchingOptions):
    async def scenario(router: Router, backend: FakeBackend) -> None:
        limits = [60, 3, 17, 33, 60, 1, 16]
        streams = [await router.submit("a", PROMPT, greedy(max_tokens=limit)) for limit in limits]
        for stream, limit in zip(streams, limits, strict=True):
            deltas = [delta async for delta in stream]
            assert [token for delta in deltas for token in delta.tokens] == expected(PROMPT, limit)
            assert [delta.finish for delta in deltas if delta.finish] == [FinishReason.LENGTH]
        assert router.unfinished == router.waiting == 0

    play(scenario, **with_batches(batching))


def test_a_request_waits_between_its_slices():
    decided: list[ClusterAction] = []

    async def scenario(router: Router, backend: FakeBackend) -> None:
        stream = await router.submit("a", PROMPT, greedy())
        assert await tokens_of(stream) == expected(PROMPT)
        [timeline] = stream.timelines
        phases = [phase.phase for phase in timeline.phases]
        assert phases.count(Phase.DECODE) == 4  # of 60 tokens in slices of 16
        assert phases.count(Phase.WAITING) >= 4

    play(scenario, decided=decided, **with_batches(SLICES))
    dispatches = [each for each in decided if isinstance(each, Dispatch)]
    assert [each.slice_tokens for each in dispatches] == [16, 16, 16, 12]
    assert [each.attempt for each in dispatches] == [1, 2, 3, 4]


def test_choices_and_stop_strings_go_on_over_slices():
    results = []
    for options in ({}, with_batches(SLICES)):

        async def scenario(router: Router, backend: FakeBackend) -> None:
            sampling = SamplingParams(temperature=1.0, seed=5, n=4, max_tokens=60, stop=("qu", "zz", "ab"))
            stream = await router.submit("a", PROMPT, sampling)
            texts: dict[int, str] = {}
            ends: dict[int, tuple[object, object]] = {}
            async for delta in stream:
                texts[delta.choice] = texts.get(delta.choice, "") + delta.text
                if delta.finish is not None:
                    ends[delta.choice] = delta.finish, delta.stop_reason
            results.append((texts, ends))

        play(scenario, **options)
    assert results[0] == results[1]
    assert len(results[0][0]) == 4


@pytest.mark.parametrize("kill_s", [0.2 * tenth for tenth in range(1, 13)])
def test_choices_that_a_death_left_apart_are_all_answered(kill_s: float):
    async def scenario(router: Router, backend: FakeBackend) -> None:
        stream = await router.submit("a", PROMPT, greedy(n=4, max_tokens=40))

        async def kill() -> None:
            await asyncio.sleep(kill_s)
            for process in list(backend.processes.values()):
                if process.suspects():
                    backend.die(process, "killed")

        killing = asyncio.create_task(kill())
        tokens: dict[int, list[int]] = {}
        async for delta in stream:
            tokens.setdefault(delta.choice, []).extend(delta.tokens)
        await killing
        assert tokens == dict.fromkeys(range(4), expected(PROMPT, 40))
        assert router.unfinished == router.waiting == 0
        assert sum(engine.requests for engine in router.engines) == 0

    slices = BatchingOptions(slice_tokens=7)
    options = with_batches(slices)
    options["scheduler"] |= {"max_running": 2}
    play(scenario, **options)


def test_a_request_that_is_cancelled_between_its_slices_is_gone():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        stream = await router.submit("a", PROMPT, greedy())
        other = await router.submit("a", PROMPT, greedy())
        async for delta in stream:
            if delta.tokens and router.engines[0].requests == 0:
                break
            if len(stream.timelines[0].phases) > 4:
                break
        await stream.aclose()
        assert await tokens_of(other) == expected(PROMPT)
        assert router.unfinished == 0

    play(scenario, engines=1, **with_batches(SLICES))


@pytest.mark.parametrize("batching", each_nth([SLICES, IDLE, PREDICTED], 3))
@pytest.mark.parametrize("kills", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_nothing_is_lost_in_batches_under_many_kills(batching: BatchingOptions, kills: int):
    async def scenario(router: Router, backend: FakeBackend) -> None:
        rng = random.Random(4)
        done = 0
        stopped = asyncio.Event()

        async def client(number: int) -> None:
            nonlocal done
            while not stopped.is_set():
                prompt = [97 + number, *(rng.randrange(97, 123) for _ in range(rng.randrange(1, 30)))]
                limit = rng.randrange(1, 100)
                stream = await router.submit("a", prompt, greedy(max_tokens=limit))
                if rng.random() < 0.1:
                    await asyncio.sleep(rng.uniform(0, 1))
                    await stream.aclose()
                    continue
                assert await tokens_of(stream) == expected(prompt, limit)
                done += 1

        clients = [asyncio.create_task(client(number)) for number in range(12)]
        for _ in range(kills):
            await asyncio.sleep(rng.uniform(0.2, 3))
            process = rng.choice(list(backend.processes.values()))
            if rng.random() < 0.2:
                process.hung = True
            elif rng.random() < 0.2 and process.loaded:
                router.administration.drain_engine(process.engine)
                await asyncio.sleep(0.5)
                router.administration.undrain_engine(process.engine)
            else:
                backend.die(process, "killed")
        stopped.set()
        await asyncio.gather(*clients)
        assert done > kills
        assert router.unfinished == router.waiting == 0
        assert all(engine.state is not EngineState.DRAINING for engine in router.engines)

    play(scenario, engines=3, **with_batches(batching, blocks=256))


def test_predictions_are_learned_from_answers():
    decided: list[ClusterAction] = []

    async def scenario(router: Router, backend: FakeBackend) -> None:
        for _ in range(12):
            await tokens_of(await router.submit("a", PROMPT, greedy(max_tokens=100, stop=("zz",))))

    batching = BatchingOptions(trust_predictions=True, lengths="history")
    play(scenario, decided=decided, **with_batches(batching))
    firsts = [each.slice_tokens for each in decided if isinstance(each, Dispatch) and each.attempt == 1]
    assert firsts[0] == 100
    assert firsts[-1] == len(expected(PROMPT, 100))
