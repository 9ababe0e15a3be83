"""The phases of requests as the router knows them: admissions, preemptions, migrations, deaths."""

import asyncio
from itertools import pairwise

import pytest
from fake_cluster import FakeBackend
from test_router import PROMPT, greedy, play, tokens_of

from shoal.cluster.manager.events import MigrationMethod
from shoal.cluster.router.router import Router
from shoal.cluster.status import RequestStatus, RequestTable
from shoal.core import EngineDied, FinishReason, SamplingParams
from shoal.frontend.timeline import MAX_PHASES, Phase, Timeline

WAITING, PREFILL, DECODE, PREEMPTED, EARLIER = Phase
ALL = 1000


def phases(request: RequestStatus) -> list[tuple[Phase, str | None]]:
    return [begin[1:] for begin in request.phases]


def ended(router: Router) -> RequestStatus:
    table = router.requests(ALL)
    assert not table.unfinished
    [request] = table.ended
    return request


def test_a_phase_begins_once_and_never_before_the_last():
    timeline = Timeline.from_arrival(100)
    timeline.begin(WAITING, None, 150)
    timeline.begin(PREFILL, "0", 50)
    timeline.begin(DECODE, "0", 200)
    timeline.begin(DECODE, "0", 300)
    timeline.begin(DECODE, "1", 300)
    assert timeline.phases == [
        (100, WAITING, None),
        (100, PREFILL, "0"),
        (200, DECODE, "0"),
        (300, DECODE, "1"),
    ]


def test_a_request_that_is_preempted_again_and_again_has_few_phases():
    timeline, every = Timeline.from_arrival(0), [(0, WAITING, None)]
    for number in range(1, 1000):
        phase = (PREFILL, DECODE, PREEMPTED)[number % 3]
        timeline.begin(phase, "0", number)
        every.append((number, phase, "0"))
    latest = MAX_PHASES - 2
    assert timeline.phases == [every[0], (1, EARLIER, "0"), *every[-latest:]]


def test_no_phase_begins_after_the_end():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        stream = await router.submit("a", PROMPT, greedy())
        await anext(stream)
        await stream.aclose()
        [timeline] = stream.timelines
        assert timeline.finish is FinishReason.CANCELLED
        assert timeline.phase is DECODE

    play(scenario)


def test_a_request_waits_is_admitted_and_decodes():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        assert router.requests(ALL) == RequestTable([], [], 0)
        stream = await router.submit("a", PROMPT, greedy(), log_name="mine")
        [waiting] = router.requests(ALL).unfinished
        assert phases(waiting) == [(WAITING, None), (WAITING, "0")]
        assert (waiting.name, waiting.service, waiting.engine) == ("mine", "a", "0")
        await anext(stream)
        [running] = router.requests(ALL).unfinished
        assert running.ended_ns is running.finish is None
        assert running.output_tokens > 0
        await tokens_of(stream)
        request = ended(router)
        assert phases(request) == [(WAITING, None), (WAITING, "0"), (PREFILL, "0"), (DECODE, "0")]
        assert (request.prompt_tokens, request.output_tokens, request.finish) == (len(PROMPT), 60, "length")
        begins = [begin.begin_ns for begin in request.phases]
        assert begins == sorted(begins)
        assert request.ended_ns is not None
        assert request.ended_ns > begins[-1]

    play(scenario)


def test_every_choice_is_a_request():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        stream = await router.submit("a", PROMPT, SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=60))
        assert len(router.requests(ALL).unfinished) == 3
        table = router.requests(2)
        assert (len(table.unfinished), table.left_out) == (2, 1)
        await tokens_of(stream)
        assert len({request.id for request in router.requests(ALL).ended}) == 3
        assert len(router.requests(2).ended) == 2

    play(scenario)


def test_requests_of_one_service_are_not_left_out_for_those_of_others():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        streams = [await router.submit(service, PROMPT, greedy()) for service in ("a", "a", "b", "b")]
        table = router.requests(1, {"b"})
        assert [request.service for request in table.unfinished] == ["b"]
        assert table.left_out == 1
        assert router.requests(ALL, set()) == RequestTable([], [], 0)
        for stream in reversed(streams):
            await tokens_of(stream)
        assert [request.service for request in router.requests(1, {"b"}).ended] == ["b"]

    play(scenario, models=("fake", "fake"), blocks=640)


def test_preempted_requests_are_told_and_come_back():
    """A pool too small for all of them: each runs and is preempted in turn."""

    async def scenario(router: Router, backend: FakeBackend) -> None:
        streams = [await router.submit("a", PROMPT, greedy(max_tokens=80)) for _ in range(6)]
        await asyncio.gather(*map(tokens_of, streams))
        stats = await router.stats("0")
        requests = router.requests(ALL).ended
        assert stats.services["a"].preemptions > 0
        told = [phase for request in requests for phase, _ in phases(request)]
        assert told.count(PREEMPTED) == stats.services["a"].preemptions
        for request in requests:
            for (before, _), (after, _) in pairwise(phases(request)):
                assert after is not PREEMPTED or before in (PREFILL, DECODE)
                assert before is not PREEMPTED or after is PREFILL
            assert request.phases[-1].phase is DECODE

    play(scenario, engines=1, blocks=24)


@pytest.mark.parametrize("method", list(MigrationMethod))
def test_a_migration_is_a_phase_on_another_engine(method):
    async def scenario(router: Router, backend: FakeBackend) -> None:
        stream = await router.submit("a", PROMPT, greedy(max_tokens=100))
        await asyncio.sleep(0.4)
        router.administration.migrate_request(stream.id, None, method)
        await tokens_of(stream)
        engines = [engine for _, engine in phases(ended(router))]
        assert list(dict.fromkeys(engines)) == [None, "0", "1"]
        assert ended(router).engine == "1"
        if method is not MigrationMethod.TOKENS:
            assert phases(ended(router))[-2:] == [(DECODE, "0"), (DECODE, "1")]

    play(scenario, blocks=640)


def test_a_request_whose_engine_dies_waits_and_goes_on_elsewhere():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        stream = await router.submit("a", PROMPT, greedy())
        await anext(stream)
        backend.die(backend.processes["0"], "killed by signal 9")
        await tokens_of(stream)
        assert phases(ended(router))[2:] == [
            (PREFILL, "0"),
            (DECODE, "0"),
            (WAITING, None),
            (WAITING, "1"),
            (PREFILL, "1"),
            (DECODE, "1"),
        ]

    play(scenario)


def test_why_requests_ended_is_remembered():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        left = await router.submit("a", PROMPT, greedy())
        await left.aclose()
        assert ended(router).finish == "cancelled"
        lost = await router.submit("a", PROMPT, greedy())
        closing = asyncio.create_task(router.close())
        with pytest.raises(EngineDied):
            await tokens_of(lost)
        await closing
        assert [(request.finish, request.why) for request in router.requests(ALL).ended] == [
            ("cancelled", ""),
            ("error", "the engine was shut down before the request finished"),
        ]

    play(scenario)
