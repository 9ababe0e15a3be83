"""The engine behind a process: everything a client can see of it."""

import asyncio
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

from shoal.core import (
    SLO,
    EngineDied,
    FinishReason,
    GoalsOutOfReach,
    InvalidRequest,
    ModelUnsupported,
    QueueFull,
    SamplingParams,
)
from shoal.engine import wire
from shoal.engine.handle import EngineHandle

PROMPT = [97, 98, 99, 100, 101]
ENDLESS = SamplingParams(temperature=0.0, max_tokens=240)


@asynccontextmanager
async def started(*models: str, progress=None, **options):
    services = make_options(*models, **options)
    handle = await EngineHandle.start(
        services,
        {},
        {service.name: ByteTokenizer() for service in services.services},
        progress=progress,
        builder=BUILDER,
    )
    try:
        yield handle
    finally:
        await handle.close()


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


async def idle(handle) -> None:
    """Wait until no service has a request."""
    while any(s.waiting or s.running for s in (await handle.stats()).services.values()):
        await asyncio.sleep(0.005)


def test_a_call_streams_what_the_engine_makes():
    async def scenario():
        told = []
        async with started("fake", "fake", progress=told.append) as handle:
            assert told == ["loading fake", "loading fake"]
            assert set(handle.info.services) == {"a", "b"}
            deltas = await read(await handle.submit("b", PROMPT, greedy()))
            expected = expected_tokens(make_request(prompt=PROMPT), 8)
            assert [t for d in deltas for t in d.tokens] == expected
            assert "".join(d.text for d in deltas) == bytes(expected).decode()
            assert [d.finish for d in deltas if d.finish] == [FinishReason.LENGTH]
            stats = await handle.stats()
            assert (stats.services["b"].finished, stats.services["a"].finished) == (1, 0)
            assert stats.steps.count >= 8
            assert stats.steps.reply_ns > 0

    asyncio.run(scenario())


def test_choices_differ_and_all_arrive():
    async def scenario():
        async with started() as handle:
            sampling = SamplingParams(n=4, max_tokens=12, seed=1)
            outputs: dict[int, list[int]] = {}
            async for delta in handle.generate("a", PROMPT, sampling):
                outputs.setdefault(delta.choice, []).extend(delta.tokens)
            assert sorted(outputs) == [0, 1, 2, 3]
            assert all(len(tokens) == 12 for tokens in outputs.values())
            assert len({tuple(tokens) for tokens in outputs.values()}) == 4
            assert handle.unfinished == 0

    asyncio.run(scenario())


def test_a_stop_string_ends_the_stream_and_the_request():
    async def scenario():
        text = bytes(expected_tokens(make_request(prompt=PROMPT), 240)).decode()
        stop = text[9:12]
        async with started("fake?step_ms=2") as handle:
            sampling = greedy(max_tokens=240, stop=(stop,))
            deltas = await read(await handle.submit("a", PROMPT, sampling))
            assert "".join(d.text for d in deltas) == text[: text.index(stop)]
            assert (deltas[-1].finish, deltas[-1].stop_reason) == (FinishReason.STOP, stop)
            await idle(handle)
            stats = await handle.stats()
            assert stats.services["a"].output_tokens < 100
            assert (stats.services["a"].finished, stats.services["a"].cancelled) == (1, 0)

    asyncio.run(scenario())


def test_closing_a_stream_cancels_within_a_step():
    async def scenario():
        async with started("fake?step_ms=20") as handle:
            stream = await handle.submit("a", PROMPT, ENDLESS)
            await anext(stream)
            await stream.aclose()
            before = await handle.stats()
            await idle(handle)
            after = await handle.stats()
            assert after.steps.count - before.steps.count <= 1
            assert after.services["a"].cancelled == 1
            assert after.services["a"].live_blocks == 0
            assert [d async for d in stream] == []

    asyncio.run(scenario())


def test_leaving_a_generator_early_cancels():
    async def scenario():
        async with started("fake?step_ms=5") as handle:
            generator = handle.generate("a", PROMPT, ENDLESS)
            await anext(generator)
            await generator.aclose()
            assert handle.unfinished == 0
            await idle(handle)
            assert (await handle.stats()).services["a"].cancelled == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("service", "prompt", "sampling", "code", "words"),
    [
        ("nobody", PROMPT, {}, "model_not_found", "available: a, b"),
        ("a", [], {}, None, "empty"),
        ("a", [1, 300], {}, None, "0 to 299"),
        ("a", [-1], {}, None, "0 to 299"),
        ("a", PROMPT, {"stop_token_ids": (300,)}, None, "0 to 299"),
        ("a", [1] * 256, {"max_tokens": None}, "context_length_exceeded", "at most 255"),
        ("a", [1] * 250, {"max_tokens": 7}, "context_length_exceeded", "at most 6"),
        ("a", [1] * 250, {"max_tokens": None, "min_tokens": 7}, "context_length_exceeded", "at most 6"),
    ],
)
def test_bad_requests_are_refused_before_they_are_sent(service, prompt, sampling, code, words):
    async def scenario():
        async with started("fake?context=256", "fake", blocks=400) as handle:
            with pytest.raises(InvalidRequest, match=words) as refusal:
                await handle.submit(service, prompt, greedy(**sampling))
            assert refusal.value.code == code
            assert handle.unfinished == 0

    asyncio.run(scenario())


def test_the_longest_request_that_is_allowed_is_served():
    async def scenario():
        async with started("fake?context=256", blocks=12) as handle:
            total = handle.info.services["a"].max_total_tokens
            assert total < 256
            deltas = await read(await handle.submit("a", [1] * (total - 3), greedy(max_tokens=None)))
            assert sum(len(d.tokens) for d in deltas) == 3
            with pytest.raises(InvalidRequest, match="KV memory"):
                await handle.submit("a", [1] * (total - 3), greedy(max_tokens=4))

    asyncio.run(scenario())


def test_refusals_of_the_engine_are_delivered():
    async def scenario():
        async with started() as handle:
            handle.info.services["a"] = replace(
                handle.info.services["a"], context_tokens=10_000, max_total_tokens=10_000
            )
            with pytest.raises(InvalidRequest):
                await read(await handle.submit("a", [1] * 5_000, greedy(n=3)))
            assert handle.unfinished == handle.waiting == 0

    asyncio.run(scenario())


def test_a_full_queue_turns_calls_away():
    async def scenario():
        async with started("fake?step_ms=20", max_queue=4) as handle:
            stream = await handle.submit("a", PROMPT, greedy(n=4))
            with pytest.raises(QueueFull, match="max_queue") as refusal:
                await handle.submit("a", PROMPT, greedy())
            assert refusal.value.retry_after_s >= 1
            await read(stream)
            assert handle.waiting == 0
            await read(await handle.submit("a", PROMPT, greedy()))

    asyncio.run(scenario())


REFUSING = {"max_running": 1, "on_hopeless": "refuse"}


@pytest.mark.parametrize("n", [1, 3])
def test_a_call_whose_goals_are_out_of_reach_is_refused(n):
    async def scenario():
        async with started("fake?step_ms=10", blocks=100, scheduler=REFUSING) as handle:
            running = await handle.submit("a", PROMPT, greedy(max_tokens=60))
            await anext(running)
            late = await handle.submit("a", PROMPT, greedy(n=n), slo=SLO(ttft_s=0.1))
            patient = await handle.submit("a", PROMPT, greedy(), slo=SLO(ttft_s=100))
            with pytest.raises(GoalsOutOfReach, match=r"no token after 0\.1.* s: .*ttft 0\.1 s") as refusal:
                await read(late)
            assert refusal.value.retry_after_s >= 1
            assert handle.unfinished == 2
            assert count(await read(running)) == 59
            assert count(await read(patient)) == 8
            assert handle.waiting == 0
            assert (await handle.stats()).services["a"].live_blocks == 0

    asyncio.run(scenario())


def test_choices_that_wait_for_one_that_has_begun_are_not_refused():
    async def scenario():
        async with started("fake?step_ms=10", blocks=100, scheduler=REFUSING) as handle:
            sampling = greedy(n=3, max_tokens=10, ignore_eos=True)
            deltas = await read(await handle.submit("a", PROMPT, sampling, slo=SLO(ttft_s=0.05)))
            assert [sum(len(d.tokens) for d in deltas if d.choice == choice) for choice in range(3)] == [
                10
            ] * 3

    asyncio.run(scenario())


def test_killing_the_engine_ends_every_stream():
    async def scenario():
        async with started("fake?step_ms=10", blocks=1000) as handle:
            streams = [await handle.submit("a", PROMPT, ENDLESS) for _ in range(8)]
            readers = [asyncio.create_task(read(stream)) for stream in streams]
            await anext(await handle.submit("a", PROMPT, ENDLESS))
            os.kill(handle.pid, signal.SIGKILL)
            ends = await asyncio.gather(*readers, return_exceptions=True)
            assert [type(end) for end in ends] == [EngineDied] * 8
            assert "signal 9" in str(ends[0])
            assert not handle.alive
            assert handle.unfinished == 0
            with pytest.raises(EngineDied, match="signal 9"):
                await handle.submit("a", PROMPT, greedy())
            with pytest.raises(EngineDied, match="signal 9"):
                await handle.stats()

    asyncio.run(scenario())


def test_an_error_in_the_engine_is_told_to_every_stream(capfd):
    async def scenario():
        async with started("fake?step_ms=5", blocks=1000) as handle:
            stream = await handle.submit("a", PROMPT, ENDLESS)
            await anext(stream)
            poison = await handle.submit("a", [1, 299], greedy())
            for one in (stream, poison):
                with pytest.raises(EngineDied, match="the fake device is on fire"):
                    await read(one)

    asyncio.run(scenario())
    assert "Traceback" in capfd.readouterr().err


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
        async with started() as handle:
            os.kill(handle.pid, signal.SIGINT)
            os.kill(handle.pid, signal.SIGTERM)
            assert count(await read(await handle.submit("a", PROMPT, greedy(max_tokens=4)))) == 4

    asyncio.run(scenario())


def test_close_drains_and_then_ends():
    async def scenario():
        async with started("fake?step_ms=5") as handle:
            stream = await handle.submit("a", PROMPT, greedy(max_tokens=20))
            closing = asyncio.create_task(handle.close(drain_s=60))
            await until(lambda: not handle.alive)
            with pytest.raises(EngineDied, match="shutting down"):
                await handle.submit("a", PROMPT, greedy())
            assert sum(len(d.tokens) for d in await read(stream)) == 20
            await closing
            assert not psutil.pid_exists(handle.pid)
            await handle.close()

    asyncio.run(scenario())


def test_close_without_drain_fails_what_is_unfinished():
    async def scenario():
        async with started("fake?step_ms=5") as handle:
            stream = await handle.submit("a", PROMPT, ENDLESS)
            await anext(stream)
            await handle.close()
            with pytest.raises(EngineDied, match="shut down"):
                await read(stream)
            assert not psutil.pid_exists(handle.pid)

    asyncio.run(scenario())


def test_a_slow_reader_holds_nobody_up():
    async def scenario():
        async with started() as handle:
            slow = await handle.submit("a", PROMPT, greedy(max_tokens=200))
            for _ in range(3):
                assert count(await read(await handle.submit("a", PROMPT, greedy()))) == 8
            await until(lambda: slow.ended)
            assert count(await read(slow)) == 200

    asyncio.run(scenario())


def test_calls_end_once_and_nothing_is_kept_over_a_thousand():
    async def scenario():
        draw = random.Random(5)
        ends = {"whole": 0, "cut": 0}

        async def one(handle, number):
            sampling = greedy(max_tokens=draw.randint(1, 12), n=1 + number % 2)
            prompt = [97 + draw.randrange(26) for _ in range(draw.randint(1, 12))]
            leave_after = draw.choice([None, None, 0, 1, 3])
            finishes: list[int] = []
            async with await handle.submit("ab"[number % 2], prompt, sampling) as stream:
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

        async with started("fake", "fake", blocks=40) as handle:
            for start in range(0, 1000, 50):
                await asyncio.gather(*(one(handle, number) for number in range(start, start + 50)))
            await idle(handle)
            assert ends["whole"] + ends["cut"] == 1000
            assert min(ends.values()) > 100
            assert handle.unfinished == handle.waiting == 0
            assert not handle._calls
            await until(lambda: not handle._answers)
            stats = await handle.stats()
            assert stats.pool.live_bytes == 0
            # Calls that were cancelled before they were submitted never came to the scheduler.
            ended = sum(s.finished + s.cancelled for s in stats.services.values())
            assert ends["whole"] <= ended <= 1500

    asyncio.run(scenario())


def test_no_engine_outlives_its_parent():
    script = textwrap.dedent(
        """
        import asyncio, sys, time
        from engine_builders import BUILDER, ByteTokenizer, make_options
        from shoal.engine.handle import EngineHandle
        async def main():
            decoders = {"a": ByteTokenizer()}
            handle = await EngineHandle.start(make_options("fake"), {}, decoders, builder=BUILDER)
            print(handle.pid, flush=True)
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
    script = "import sys, shoal.engine, shoal.engine.offline; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_goals_and_arrival_are_sent_with_every_choice():
    async def main():
        async with started("fake") as handle:
            send, sent = handle._process.send, []
            handle._process.send = lambda message: (sent.append(message), send(message))
            await read(await handle.submit("a", PROMPT, greedy(n=2), SLO(ttft_s=1), arrival_ns=5))
            await read(handle.generate("a", PROMPT, greedy(), SLO(e2e_s=2)))
            await read(await handle.submit("a", PROMPT, greedy()))
            calls = [message.to_requests() for message in sent if isinstance(message, wire.Submit)]
            expected = [[SLO(ttft_s=1), SLO(ttft_s=1)], [SLO(e2e_s=2)], [SLO()]]
            assert [[request.slo for request in requests] for requests in calls] == expected
            assert [request.arrival_ns for request in calls[0]] == [5, 5]
            assert calls[1][0].arrival_ns > 5
            with pytest.raises(InvalidRequest, match="execution time"):
                await handle.submit("a", PROMPT, greedy(), SLO(e2e_scale=5))
            assert sum(isinstance(message, wire.Submit) for message in sent) == 3

    asyncio.run(main())
