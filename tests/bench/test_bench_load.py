"""Open and closed loop."""

import asyncio

import pytest
from bench_builders import HeldTarget, make_call

from shoal.bench import ClientState, LoadRun, run_load


def test_an_open_loop_sends_at_its_times_whatever_is_under_way():
    async def scenario():
        target, run = HeldTarget(), LoadRun()
        calls = [make_call(number, at_ms=number) for number in (2, 0, 1)]
        task = asyncio.create_task(run_load(target, calls, run))
        await target.wait_for(3)
        for event in target.release.values():
            event.set()
        await task
        return target, run

    target, run = asyncio.run(scenario())
    assert target.sent == ["r0", "r1", "r2"]
    assert [answer.finish for answer in run.answers] == ["stop"] * 3
    assert (run.ended, run.running) == (3, 0)
    assert run.end_ns - run.begin_ns >= 2e6


def test_a_closed_loop_has_at_most_its_clients_under_way():
    async def scenario():
        target, run = HeldTarget(), LoadRun()
        task = asyncio.create_task(
            run_load(target, [make_call(number) for number in range(7)], run, clients=3)
        )
        for _ in range(5):
            await target.wait_for(3)
            target.release[target.under_way[0]].set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await target.wait_for(2)
        for name in list(target.under_way):
            target.release[name].set()
        await task
        return target, run

    target, run = asyncio.run(scenario())
    assert target.most == 3
    assert target.sent == [f"r{number}" for number in range(7)]
    assert run.ended == 7


def test_fewer_calls_than_clients_are_all_sent():
    async def scenario():
        target, run = HeldTarget(), LoadRun()
        task = asyncio.create_task(run_load(target, [make_call()], run, clients=8))
        await target.wait_for(1)
        target.release["r0"].set()
        await task
        return run

    assert asyncio.run(scenario()).ended == 1


def test_a_cancelled_run_tells_what_there_is():
    run, seen = LoadRun(), []

    async def scenario():
        target = HeldTarget()
        task = asyncio.create_task(run_load(target, [make_call(0), make_call(1)], run, on_change=seen.append))
        await target.wait_for(2)
        target.release["r0"].set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert seen[-1] is run
    assert [answer.finish for answer in run.answers] == ["stop", ""]
    assert run.end_ns > 0


@pytest.mark.parametrize(
    ("client", "saturated"),
    [
        (ClientState(), False),
        (ClientState(delays_s=[0.001] * 99 + [0.5], cpu_share=0.2), False),
        (ClientState(delays_s=[0.03] * 100, cpu_share=0.2), True),
        (ClientState(delays_s=[0.001], cpu_share=0.95), True),
    ],
)
def test_a_client_that_is_late_or_busy_is_saturated(client, saturated):
    assert client.saturated is saturated
