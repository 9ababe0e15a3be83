"""A router with engines in processes of their own: everything a client can see of them."""

import asyncio
import io
import os
import random
import signal
import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from engine_builders import BUILDER, ByteTokenizer, expected_tokens, make_options, make_request

import routers
from routers import QUICK
from shoal.cluster.manager.event_log import EventLogWriter, replay
from shoal.cluster.options import ClusterOptions
from shoal.cluster.router.router import OnDecision, Router
from shoal.cluster.status import EngineState
from shoal.core import (
    SLO,
    EngineDied,
    FinishReason,
    InvalidRequest,
    ModelUnsupported,
    QueueFull,
    SamplingParams,
    SLOExpired,
)
from shoal.engine import wire

PROMPT = [97, 98, 99, 100, 101]
ENDLESS = SamplingParams(temperature=0.0, max_tokens=240)


def make_router(
    *models: str,
    engines: int = 1,
    cluster: ClusterOptions = QUICK,
    on_decision: OnDecision | None = None,
    **options,
) -> Router:
    """A router of engines with fake models, not started; needs a running loop."""
    built = make_options(*models, **options)
    tokenizers = {service.name: ByteTokenizer() for service in built.services}
    return routers.make_router(
        built, {}, tokenizers, BUILDER, engines=engines, cluster=cluster, on_decision=on_decision
    )


@asynccontextmanager
async def started(*models: str, progress=None, cluster: ClusterOptions = QUICK, **options):
    """A router that is closed in the end; then its manager's decisions are made once more from the log."""
    log = io.BytesIO()
    router = make_router(*models, cluster=cluster, on_decision=EventLogWriter(log, cluster).write, **options)
    await router.run(progress)
    try:
        yield router
    finally:
        await router.close()
    replay(log.getvalue().splitlines(keepends=True))


def pid_of(router: Router, engine: int = 0) -> int:
    pid = router.engines[engine].pid
    assert pid is not None
    return pid


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 8} | fields))


async def read(stream) -> list:
    return [delta async for delta in stream]


def count(deltas) -> int:
    return sum(len(delta.tokens) for delta in deltas)


async def until(condition) -> None:
    """Wait for something that must happen; the test's own limit ends it otherwise."""
    while not condition():
        await asyncio.sleep(0.005)


async def idle(router) -> None:
    """Wait until no service has a request."""
    while any(s.waiting or s.running for s in (await router.stats("0")).services.values()):
        await asyncio.sleep(0.005)


def test_a_call_streams_what_the_engine_makes():
    async def scenario():
        messages = []
        async with started("fake", "fake", progress=messages.append) as router:
            assert messages == ["loading fake", "loading fake"]
            assert set(router.info.services) == {"a", "b"}
            deltas = await read(await router.submit("b", PROMPT, greedy()))
            expected = expected_tokens(make_request(prompt=PROMPT), 8)
            assert [t for d in deltas for t in d.tokens] == expected
            assert "".join(d.text for d in deltas) == bytes(expected).decode()
            assert [d.finish for d in deltas if d.finish] == [FinishReason.LENGTH]
            stats = await router.stats("0")
            assert (stats.services["b"].finished, stats.services["a"].finished) == (1, 0)
            assert stats.steps.count >= 8
            assert stats.steps.reply_ns > 0

    asyncio.run(scenario())


def test_choices_differ_and_all_arrive():
    async def scenario():
        async with started() as router:
            sampling = SamplingParams(n=4, max_tokens=12, seed=1)
            outputs: dict[int, list[int]] = {}
            async for delta in await router.submit("a", PROMPT, sampling):
                outputs.setdefault(delta.choice, []).extend(delta.tokens)
            assert sorted(outputs) == [0, 1, 2, 3]
            assert all(len(tokens) == 12 for tokens in outputs.values())
            assert len({tuple(tokens) for tokens in outputs.values()}) == 4
            assert router.unfinished == 0

    asyncio.run(scenario())


def test_a_stop_string_ends_the_stream_and_the_request():
    async def scenario():
        text = bytes(expected_tokens(make_request(prompt=PROMPT), 240)).decode()
        stop = text[9:12]
        async with started("fake?step_ms=2") as router:
            sampling = greedy(max_tokens=240, stop=(stop,))
            deltas = await read(await router.submit("a", PROMPT, sampling))
            assert "".join(d.text for d in deltas) == text[: text.index(stop)]
            assert (deltas[-1].finish, deltas[-1].stop_reason) == (FinishReason.STOP, stop)
            await idle(router)
            stats = await router.stats("0")
            assert stats.services["a"].output_tokens < 100
            assert (stats.services["a"].finished, stats.services["a"].cancelled) == (1, 0)

    asyncio.run(scenario())


def test_closing_a_stream_cancels_within_a_step():
    async def scenario():
        async with started("fake?step_ms=20") as router:
            stream = await router.submit("a", PROMPT, ENDLESS)
            await anext(stream)
            await stream.aclose()
            before = await router.stats("0")
            await idle(router)
            after = await router.stats("0")
            assert after.steps.count - before.steps.count <= 1
            assert after.services["a"].cancelled == 1
            assert after.services["a"].live_blocks == 0
            assert [d async for d in stream] == []

    asyncio.run(scenario())


BAD_REQUESTS = [
    ("nobody", PROMPT, {}, "model_not_found", "available: a, b"),
    ("a", [], {}, None, "empty"),
    ("a", [1, 300], {}, None, "0 to 299"),
    ("a", [-1], {}, None, "0 to 299"),
    ("a", PROMPT, {"stop_token_ids": (300,)}, None, "0 to 299"),
    ("a", [1] * 256, {"max_tokens": None}, "context_length_exceeded", "at most 255"),
    ("a", [1] * 250, {"max_tokens": 7}, "context_length_exceeded", "at most 6"),
    ("a", [1] * 250, {"max_tokens": None, "min_tokens": 7}, "context_length_exceeded", "at most 6"),
]


def test_bad_requests_are_refused_before_they_are_sent():
    async def scenario():
        async with started("fake?context=256", "fake", blocks=400) as router:
            for service, prompt, sampling, code, words in BAD_REQUESTS:
                with pytest.raises(InvalidRequest, match=words) as refusal:
                    await router.submit(service, prompt, greedy(**sampling))
                assert refusal.value.code == code
                assert router.unfinished == 0

    asyncio.run(scenario())


def test_the_longest_request_that_is_allowed_is_served():
    async def scenario():
        async with started("fake?context=256", blocks=12) as router:
            total = router.info.services["a"].max_total_tokens
            assert total < 256
            deltas = await read(await router.submit("a", [1] * (total - 3), greedy(max_tokens=None)))
            assert sum(len(d.tokens) for d in deltas) == 3
            with pytest.raises(InvalidRequest, match="KV memory"):
                await router.submit("a", [1] * (total - 3), greedy(max_tokens=4))

    asyncio.run(scenario())


def test_refusals_of_the_engine_are_delivered():
    async def scenario():
        async with started() as router:
            router.info.services["a"] = replace(
                router.info.services["a"], context_tokens=10_000, max_total_tokens=10_000
            )
            with pytest.raises(InvalidRequest):
                await read(await router.submit("a", [1] * 5_000, greedy(n=3)))
            assert router.unfinished == router.waiting == 0

    asyncio.run(scenario())


def test_a_full_queue_turns_calls_away():
    async def scenario():
        async with started("fake?step_ms=20", max_queue=4) as router:
            stream = await router.submit("a", PROMPT, greedy(n=4))
            with pytest.raises(QueueFull, match="max_queue") as refusal:
                await router.submit("a", PROMPT, greedy())
            assert refusal.value.retry_after_s >= 1
            await read(stream)
            assert router.waiting == 0
            await read(await router.submit("a", PROMPT, greedy()))

    asyncio.run(scenario())


REFUSING = {"max_running": 1, "on_hopeless": "refuse"}


@pytest.mark.parametrize("n", [1, 3])
def test_a_call_whose_goals_are_out_of_reach_is_refused(n):
    async def scenario():
        async with started("fake?step_ms=10", blocks=100, scheduler=REFUSING) as router:
            running = await router.submit("a", PROMPT, greedy(max_tokens=60))
            await anext(running)
            late = await router.submit("a", PROMPT, greedy(n=n), slo=SLO(ttft_s=0.1))
            patient = await router.submit("a", PROMPT, greedy(), slo=SLO(ttft_s=100))
            with pytest.raises(SLOExpired, match=r"no token after 0\.1.* s: .*ttft 0\.1 s") as refusal:
                await read(late)
            assert refusal.value.retry_after_s >= 1
            assert router.unfinished == 2
            assert count(await read(running)) == 59
            assert count(await read(patient)) == 8
            assert router.waiting == 0
            assert (await router.stats("0")).services["a"].live_blocks == 0

    asyncio.run(scenario())


def test_choices_that_wait_for_one_that_has_begun_are_not_refused():
    async def scenario():
        async with started("fake?step_ms=10", blocks=100, scheduler=REFUSING) as router:
            sampling = greedy(n=3, max_tokens=10, ignore_eos=True)
            deltas = await read(await router.submit("a", PROMPT, sampling, slo=SLO(ttft_s=0.05)))
            assert [sum(len(d.tokens) for d in deltas if d.choice == choice) for choice in range(3)] == [
                10
            ] * 3

    asyncio.run(scenario())


def test_streams_of_a_killed_engine_go_on():
    async def scenario():
        async with started("fake?step_ms=10", engines=2, blocks=1000) as router:
            streams = [await router.submit("a", PROMPT, ENDLESS) for _ in range(8)]
            for stream in streams:
                await anext(stream)
            killed = pid_of(router)
            os.kill(killed, signal.SIGKILL)
            expected = expected_tokens(make_request(prompt=PROMPT), 240)
            for stream in streams:
                tokens = [token for delta in await read(stream) for token in delta.tokens]
                assert tokens == expected[-len(tokens) :]
                assert len(tokens) >= 200
            engine = router.engines[0]
            assert "SIGKILL" in engine.last_error
            assert router.services["a"].resumed == 4
            await until(lambda: router.engines[0].state is EngineState.READY)
            assert pid_of(router) != killed
            assert router.engines[0].restarts == 1

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_hung_engine_is_killed_and_its_streams_go_on():
    watchful = replace(QUICK, heartbeat_s=0.2, hung_after_s=1)

    async def scenario():
        async with started("fake?step_ms=10", engines=2, blocks=1000, cluster=watchful) as router:
            streams = [await router.submit("a", PROMPT, ENDLESS) for _ in range(4)]
            first = [await anext(stream) for stream in streams]
            os.kill(pid_of(router, 1), signal.SIGSTOP)
            for delta, stream in zip(first, streams, strict=True):
                assert count([delta, *await read(stream)]) == 240
            assert router.engines[1].restarts == 1

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_request_that_engines_die_of_fails_alone(capfd):
    async def scenario():
        async with started("fake?step_ms=5", blocks=1000) as router:
            stream = await router.submit("a", PROMPT, ENDLESS)
            first = await anext(stream)
            poison = await router.submit("a", [1, 299], greedy())
            with pytest.raises(EngineDied, match="engines ended twice"):
                await read(poison)
            assert count([first, *await read(stream)]) == 240

    asyncio.run(scenario())
    assert "the fake device is on fire" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        ("unsupported", ModelUnsupported, "computed wrongly"),
        ("crash", EngineDied, "RuntimeError: out of luck"),
        ("exit", EngineDied, "exit code 3"),
    ],
)
def test_errors_while_loading_are_raised_by_start(model, error, words):
    async def scenario():
        with pytest.raises(error, match=words):
            async with started("fake", model):
                pass

    asyncio.run(scenario())


def test_interrupts_leave_the_engine_to_its_parent():
    async def scenario():
        async with started() as router:
            os.kill(pid_of(router), signal.SIGINT)
            os.kill(pid_of(router), signal.SIGTERM)
            assert count(await read(await router.submit("a", PROMPT, greedy(max_tokens=4)))) == 4

    asyncio.run(scenario())


def test_close_drains_and_then_ends():
    async def scenario():
        async with started("fake?step_ms=5") as router:
            stream = await router.submit("a", PROMPT, greedy(max_tokens=20))
            pid = pid_of(router)
            closing = asyncio.create_task(router.close(drain_s=60))
            await asyncio.sleep(0)
            with pytest.raises(EngineDied, match="shutting down"):
                await router.submit("a", PROMPT, greedy())
            assert sum(len(d.tokens) for d in await read(stream)) == 20
            await closing
            assert not psutil.pid_exists(pid)
            await router.close()

    asyncio.run(scenario())


def test_close_without_drain_fails_what_is_unfinished():
    async def scenario():
        async with started("fake?step_ms=5") as router:
            stream = await router.submit("a", PROMPT, ENDLESS)
            await anext(stream)
            pid = pid_of(router)
            await router.close()
            with pytest.raises(EngineDied, match="shut down"):
                await read(stream)
            assert not psutil.pid_exists(pid)

    asyncio.run(scenario())


def test_a_slow_reader_does_not_delay_other_streams():
    async def scenario():
        async with started() as router:
            slow = await router.submit("a", PROMPT, greedy(max_tokens=200))
            for _ in range(3):
                assert count(await read(await router.submit("a", PROMPT, greedy()))) == 8
            await until(lambda: slow.ended)
            assert count(await read(slow)) == 200

    asyncio.run(scenario())


def test_calls_end_once_and_nothing_is_kept_over_a_thousand():
    async def scenario():
        draw = random.Random(5)
        ends = {"whole": 0, "cut": 0}

        async def one(router, number):
            sampling = greedy(max_tokens=draw.randint(1, 12), n=1 + number % 2)
            prompt = [97 + draw.randrange(26) for _ in range(draw.randint(1, 12))]
            leave_after = draw.choice([None, None, 0, 1, 3])
            finishes: list[int] = []
            async with await router.submit("ab"[number % 2], prompt, sampling) as stream:
                seen = 0
                while leave_after is None or seen < leave_after:
                    try:
                        delta = await anext(stream)
                    except StopAsyncIteration:
                        break
                    seen += 1
                    assert delta.choice not in finishes
                    if delta.finish is not None:
                        finishes.append(delta.choice)
            whole = len(finishes) == sampling.n
            assert whole or leave_after is not None
            ends["whole" if whole else "cut"] += 1

        async with started("fake", "fake", blocks=40) as router:
            for start in range(0, 1000, 50):
                await asyncio.gather(*(one(router, number) for number in range(start, start + 50)))
            await idle(router)
            assert ends["whole"] + ends["cut"] == 1000
            assert min(ends.values()) > 100
            assert router.unfinished == router.waiting == 0
            assert not router._calls
            stats = await router.stats("0")
            assert stats.pool.live_bytes == 0
            # Calls that were cancelled before they were submitted never came to the scheduler.
            ended = sum(s.finished + s.cancelled for s in stats.services.values())
            assert ends["whole"] <= ended <= 1500

    asyncio.run(scenario())


def test_no_engine_outlives_a_server_without_a_name():
    script = textwrap.dedent(
        """
        import asyncio, time
        from test_router_processes import make_router, pid_of
        async def main():
            router = make_router("fake")
            await router.run()
            print(pid_of(router), flush=True)
            time.sleep(600)
        asyncio.run(main())
        """
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    }
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as parent:
        engine = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    engine.wait(timeout=60)


def test_the_client_side_does_not_import_torch():
    modules = "sys, shoal.cluster.router.router, shoal.cluster.backends.local"
    script = f"import {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_goals_and_arrival_are_sent_with_every_choice():
    async def main():
        async with started("fake") as router:
            channel = router._fleet.engines["0"]._channel
            send, sent = channel.send, []
            channel.send = lambda message: (sent.append(message), send(message))
            await read(await router.submit("a", PROMPT, greedy(n=2), SLO(ttft_s=1), arrival_ns=5))
            await read(await router.submit("a", PROMPT, greedy(), SLO(e2e_s=2)))
            await read(await router.submit("a", PROMPT, greedy()))
            calls = [message.to_requests() for message in sent if isinstance(message, wire.Submit)]
            expected = [[SLO(ttft_s=1), SLO(ttft_s=1)], [SLO(e2e_s=2)], [SLO()]]
            assert [[request.slo for request in requests] for requests in calls] == expected
            assert [request.arrival_ns for request in calls[0]] == [5, 5]
            assert calls[1][0].arrival_ns > 5
            with pytest.raises(InvalidRequest, match="execution time"):
                await router.submit("a", PROMPT, greedy(), SLO(e2e_scale=5))
            assert sum(isinstance(message, wire.Submit) for message in sent) == 3

    asyncio.run(main())


def test_an_arrival_is_served_while_another_request_decodes():
    async def main():
        async with started("fake?step_ms=20", scheduler={"max_iterations": 200}) as router:
            long = await router.submit("a", PROMPT, greedy(max_tokens=240))
            await anext(long)
            short = await read(await router.submit("a", PROMPT, greedy(max_tokens=2)))
            assert short[-1].finish is FinishReason.LENGTH
            assert router.unfinished == 1
            await long.aclose()
            await idle(router)
            assert (await router.stats("0")).steps.count < 240

    asyncio.run(main())


@pytest.mark.parametrize("max_iterations", [1, 4])
def test_streams_are_the_same(max_iterations):
    """Stop strings in the middle of several tokens, texts, and how many tokens are counted."""
    request = make_request(prompt=PROMPT, max_tokens=40)
    text = bytes(expected_tokens(request, 40)).decode()

    async def main():
        async with started(scheduler={"max_iterations": max_iterations}) as router:
            for end in range(3, 12):
                deltas = await read(
                    await router.submit("a", PROMPT, greedy(max_tokens=40, stop=(text[2:end],)))
                )
                assert "".join(delta.text for delta in deltas) == text[:2]
                assert sum(len(delta.tokens) for delta in deltas) == end
                assert deltas[-1].finish is FinishReason.STOP
                assert deltas[-1].stop_reason == text[2:end]
            deltas = await read(await router.submit("a", PROMPT, greedy(max_tokens=40)))
            assert "".join(delta.text for delta in deltas) == text
            await until(lambda: not router.unfinished)

    asyncio.run(main())
