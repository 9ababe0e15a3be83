"""One Shoal for many threads and coroutines: concurrent streams, cancellations, errors and close."""

import asyncio
import gc
import inspect
import os
import signal
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from engine_builders import FAILING_TOKEN, expected_tokens, make_request
from hypothesis import given
from hypothesis import strategies as st

from shoal import Grammar, GrammarKind, Service, Shoal
from shoal.core import (
    ConfigError,
    EngineDied,
    FinishReason,
    InvalidRequest,
    ShoalError,
    SLOExpired,
    TokenEvent,
)
from shoal.frontend.offline_async_api import AsyncCalls
from shoal.kvcache.options import KVCacheOptions
from shoal.schedule.options import SchedulerOptions

SMALL = KVCacheOptions(memory_bytes=1 << 14, block_size=4)
TALK = [{"role": "user", "content": "hi"}]

pytestmark = pytest.mark.usefixtures("fake_models")


def expected_text(prompt: str, limit: int) -> str:
    return bytes(expected_tokens(make_request(prompt=list(prompt.encode())), limit)).decode()


def greedy(limit: int, **fields) -> dict:
    return {"temperature": 0, "max_tokens": limit, **fields}


class Gate:
    """Blocks the steps of a Shoal until it is opened."""

    def __init__(self, shoal: Shoal) -> None:
        executor = shoal._engine.fake_executor
        self._collect = executor.collect
        executor.collect = self._held
        self._open = threading.Event()
        self._reached = threading.Event()

    def _held(self):
        self._reached.set()
        assert self._open.wait(60)
        return self._collect()

    def wait(self) -> None:
        """Wait until a step is running."""
        assert self._reached.wait(60)

    def open(self) -> None:
        self._open.set()


def assert_nothing_is_left(shoal: Shoal) -> None:
    stats = shoal.stats()
    for service in stats.services.values():
        assert (service.running, service.waiting, service.live_blocks) == (0, 0, 0)
    assert not shoal._engine.busy


def test_a_stream_is_the_text_in_pieces():
    with Shoal("fake", kv_cache=SMALL) as shoal:
        pieces = list(shoal.stream("hello", **greedy(20)))
        assert len(pieces) > 1
        assert "".join(pieces) == expected_text("hello", 20)
        assert "".join(shoal.stream_chat(TALK, greedy(9))) == expected_text("<user>hi<assistant>", 9)
        stopped = shoal.stream("hello", **greedy(40, stop=expected_text("hello", 40)[6:9]))
        assert "".join(stopped) == expected_text("hello", 40)[:6]
        assert_nothing_is_left(shoal)


def hold_until_a_message(shoal: Shoal, step: int) -> None:
    """From the given step on, every step waits for a message."""
    executor = shoal._engine.fake_executor
    collect = executor.collect

    def held_collect():
        while executor.steps >= step and not shoal._engine.interrupted():
            time.sleep(0.001)
        return collect()

    executor.collect = held_collect


@pytest.mark.parametrize("way", ["break", "close", "collect"])
def test_an_abandoned_stream_is_cancelled(way):
    with Shoal("fake", kv_cache=SMALL) as shoal:
        hold_until_a_message(shoal, 3)
        if way == "break":
            for _ in shoal.stream("hello", **greedy(200)):
                break
        else:
            stream = shoal.stream("hello", **greedy(200))
            next(stream)
            if way == "close":
                stream.close()
            del stream
        gc.collect()
        assert shoal.stats().services["fake"].cancelled == 1
        assert_nothing_is_left(shoal)


def test_an_unread_stream_is_not_started():
    with Shoal("fake", kv_cache=SMALL) as shoal:
        shoal.stream("hello", **greedy(200)).close()
        shoal.stream("hello", **greedy(200))
        assert shoal.stats().steps.count == 0
        with pytest.raises(InvalidRequest, match="of one prompt, but 2 were given"):
            shoal.stream(["a", "b"])
        with pytest.raises(InvalidRequest, match="n is 2; use n=1"):
            shoal.stream("a", n=2)
        with pytest.raises(InvalidRequest, match="empty"):
            shoal.stream("")


def test_streams_and_calls_are_batched_together():
    with Shoal("fake", kv_cache=SMALL) as shoal:
        gate = Gate(shoal)
        with ThreadPoolExecutor(4) as pool:
            first = pool.submit(shoal.generate, "first", greedy(30))
            gate.wait()
            others = [pool.submit(shoal.generate, "other", greedy(30)) for _ in range(2)]
            stream = pool.submit(list, shoal.stream("stream", greedy(30)))
            while shoal._runner.thread._messages.qsize() < 3:
                time.sleep(0.001)
            gate.open()
            assert first.result()[0].text == expected_text("first", 30)
            assert [other.result()[0].text for other in others] == [expected_text("other", 30)] * 2
            assert "".join(stream.result()) == expected_text("stream", 30)
        # Alone they would take 30 each.
        assert shoal.stats().steps.count < 45


def test_coroutines_get_the_same_outputs_as_threads():
    async def ask(shoal: Shoal) -> list:
        async def text(stream) -> str:
            return "".join([piece async for piece in stream])

        return await asyncio.gather(
            *(shoal.agenerate(f"prompt {i}", **greedy(5 + i)) for i in range(40)),
            shoal.achat(TALK, greedy(9)),
            text(shoal.astream("hello", **greedy(20))),
            text(shoal.astream_chat(TALK, **greedy(9))),
        )

    with Shoal("fake", kv_cache=SMALL) as shoal:
        *outputs, chat, stream, streamed_chat = asyncio.run(ask(shoal))
        assert [output[0].text for output in outputs] == [
            expected_text(f"prompt {i}", 5 + i) for i in range(40)
        ]
        assert chat[0].text == streamed_chat == expected_text("<user>hi<assistant>", 9)
        assert stream == expected_text("hello", 20)
        assert_nothing_is_left(shoal)


def test_requests_are_cancelled_with_their_task():
    async def give_up(shoal: Shoal) -> None:
        gate = Gate(shoal)

        async def read() -> None:
            async for _ in shoal.astream("stream", **greedy(200)):
                pass

        tasks = [asyncio.create_task(shoal.agenerate("whole", **greedy(200))), asyncio.create_task(read())]
        await asyncio.to_thread(gate.wait)
        while shoal._runner.thread._messages.qsize() + len(shoal._runner.thread._batches) < 2:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in done] == [asyncio.CancelledError] * 2
        gate.open()
        [output] = await shoal.agenerate("after", **greedy(8))
        assert output.text == expected_text("after", 8)
        async for _ in shoal.astream("given up", **greedy(200)):
            break

    with Shoal("fake", kv_cache=SMALL) as shoal:
        asyncio.run(give_up(shoal))
        assert_nothing_is_left(shoal)
        stats = shoal.stats().services["fake"]
        assert stats.cancelled >= 2
        assert stats.cancelled + stats.finished == 4


def test_invalid_arguments_are_rejected_in_coroutines():
    async def ask(shoal: Shoal) -> None:
        with pytest.raises(InvalidRequest, match="empty"):
            await shoal.agenerate("")
        with pytest.raises(InvalidRequest, match="did you mean 'max_tokens'"):
            await shoal.achat(TALK, max_token=1)
        with pytest.raises(InvalidRequest, match="of one prompt"):
            await anext(shoal.astream(["a", "b"]))
        with pytest.raises(InvalidRequest, match="truncate_prompt_tokens must be"):
            await shoal.aembed("a", truncate_prompt_tokens=0)

    with Shoal("fake", kv_cache=SMALL) as shoal:
        asyncio.run(ask(shoal))


def test_sync_and_async_methods_have_the_same_arguments():
    for name in ("generate", "chat", "stream", "stream_chat", "embed"):
        own = inspect.signature(getattr(Shoal, name)).parameters.keys() - {"progress"}
        assert own == inspect.signature(getattr(AsyncCalls, f"a{name}")).parameters.keys()


def with_embeddings(shoal: Shoal) -> None:
    """Make the fake engine embed: a prompt's embedding is its length and its first token."""
    submit, step, vectors = shoal._engine.submit, shoal._engine.step, {}

    def remembering_submit(*requests):
        vectors.update({r.id: struct.pack("<2f", len(r.prompt), r.prompt[0]) for r in requests})
        submit(*requests)

    shoal._engine.submit = remembering_submit
    shoal._engine.step = lambda: [e._replace(embedding=vectors[e.request_id]) for e in step()]


def test_texts_are_embedded():
    with Shoal([Service(name="a", model="fake"), Service(name="b", model="fake")], kv_cache=SMALL) as shoal:
        with_embeddings(shoal)
        assert shoal.embed("hey", "a") == [(3, ord("h"))]
        assert shoal.embed(["hey", [7, 8]], ["a", "b"]) == [(3, ord("h")), (2, 7)]
        assert shoal.embed([], "a") == []
        assert shoal.embed("hello", "b", truncate_prompt_tokens=2) == [(2, ord("l"))]
        most = shoal.info.services["a"].max_total_tokens
        assert shoal.embed("x" * 400, "a", truncate_prompt_tokens=-1) == [(most - 1, ord("x"))]
        with pytest.raises(InvalidRequest, match="at most"):
            shoal.embed("x" * 400, "a")
        assert asyncio.run(shoal.aembed(["hey"], "a")) == [(3, ord("h"))]


@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        (FinishReason.INVALID, InvalidRequest),
        (FinishReason.REFUSED, SLOExpired),
        (FinishReason.ERROR, ShoalError),
    ],
)
def test_a_failed_stream_or_embedding_raises(finish, expected):
    async def read(shoal: Shoal) -> None:
        async for _ in shoal.astream("hello"):
            pass

    with Shoal("fake", kv_cache=SMALL) as shoal:
        step = shoal._engine.step

        def failing_step():
            events = step()
            for event in events:
                shoal._engine.cancel(event.request_id)
            return [TokenEvent(event.request_id, finish=finish, error="out of luck") for event in events]

        shoal._engine.step = failing_step
        for ask in (
            lambda: list(shoal.stream("hello")),
            lambda: shoal.embed("hello"),
            lambda: asyncio.run(read(shoal)),
        ):
            with pytest.raises(expected, match="out of luck") as caught:
                ask()
            assert type(caught.value) is expected
        [output] = shoal.generate("hello")
        assert (output.outputs[0].finish_reason, output.outputs[0].error) == (finish, "out of luck")


@pytest.mark.failing_steps
def test_an_engine_error_reaches_all_callers():
    async def ask(shoal: Shoal) -> list:
        async def read() -> None:
            async for _ in shoal.astream("stream", **greedy(100)):
                pass

        calls = [shoal.agenerate("x", **greedy(100)) for _ in range(3)]
        return await asyncio.gather(*calls, read(), return_exceptions=True)

    with Shoal("fake", kv_cache=SMALL) as shoal:
        gate = Gate(shoal)
        with ThreadPoolExecutor(4) as pool:
            waiting = [
                pool.submit(shoal.generate, "x", greedy(100)),
                pool.submit(list, shoal.stream("x", **greedy(100))),
                pool.submit(asyncio.run, ask(shoal)),
            ]
            gate.wait()
            waiting.append(pool.submit(shoal.generate, [[FAILING_TOKEN]], greedy(100)))
            gate.open()
            for call in (waiting[0], waiting[1], waiting[3]):
                with pytest.raises(EngineDied, match="the fake device is on fire"):
                    call.result(60)
            errors = waiting[2].result(60)
        assert [type(error) for error in errors] == [EngineDied] * 4
        for ask_again in (lambda: shoal.generate("x"), lambda: list(shoal.stream("x"))):
            with pytest.raises(EngineDied):
                ask_again()
        assert shoal.stats().steps.count > 0


def test_calls_during_close_raise_config_error():
    shoal = Shoal("fake", kv_cache=SMALL)
    gate = Gate(shoal)
    with ThreadPoolExecutor(4) as pool:
        waiting = [
            pool.submit(shoal.generate, ["a", "b"], greedy(100)),
            pool.submit(list, shoal.stream("c", **greedy(100))),
            pool.submit(asyncio.run, shoal.agenerate("d", **greedy(100))),
        ]
        gate.wait()
        closing_too = pool.submit(shoal.close)
        while not shoal._runner.thread._closed:
            time.sleep(0.001)
        gate.open()
        for call in waiting:
            with pytest.raises(ConfigError, match="closed"):
                call.result(60)
        closing_too.result(60)
    assert shoal._engine.fake_executor.closed
    shoal.close()
    assert shoal.stats().services["fake"].running == 0
    for ask in (
        lambda: list(shoal.stream("x")),
        lambda: asyncio.run(shoal.agenerate("x")),
        lambda: shoal.generate("x", grammar=Grammar(GrammarKind.REGEX, "a+")),
    ):
        with pytest.raises(ConfigError, match="closed"):
            ask()


def test_an_interrupt_ends_only_the_interrupted_call():
    with Shoal("fake", kv_cache=SMALL) as shoal:
        gate = Gate(shoal)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(shoal.generate, "other", greedy(30))
            gate.wait()

            def press() -> None:
                thread = shoal._runner.thread
                while thread._messages.empty():  # the call of the main thread
                    time.sleep(0.001)
                os.kill(os.getpid(), signal.SIGINT)
                while thread._messages.qsize() < 2:  # and its cancellation
                    time.sleep(0.001)
                gate.open()

            threading.Thread(target=press).start()
            with pytest.raises(KeyboardInterrupt):
                shoal.generate(["a", "b", "c"], greedy(100))
            assert other.result()[0].text == expected_text("other", 30)
        assert shoal.stats().services["fake"].cancelled == 3
        assert_nothing_is_left(shoal)


def test_a_tokenizer_error_fails_only_its_call():
    with Shoal("fake", kv_cache=SMALL) as shoal:
        tokenizer = shoal.tokenizers["fake"]
        decode = tokenizer.decode

        def failing_decode(tokens, skip_special_tokens=True):
            if threading.current_thread().name == "shoal-engine" and tokens and broken.is_set():
                broken.clear()
                raise ValueError("no such token")
            return decode(tokens, skip_special_tokens)

        broken = threading.Event()
        tokenizer.decode = failing_decode
        gate = Gate(shoal)
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(shoal.generate, "hello", greedy(30)) for _ in range(2)]
            gate.wait()
            broken.set()
            gate.open()
            results = [call.exception() or call.result()[0].text for call in calls]
        assert sorted(map(str, results)) == sorted([expected_text("hello", 30), "no such token"])
        assert_nothing_is_left(shoal)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["generate", "stream", "agenerate", "astream"]),
        st.integers(0, 5),  # which prompt
        st.integers(1, 40),  # how many tokens
        st.none() | st.integers(0, 3),  # pieces, or loops of the event loop, until it is given up
    ),
    min_size=1,
    max_size=24,
)


async def act_async(shoal: Shoal, kind: str, prompt: str, limit: int, until: int | None) -> str | None:
    async def whole() -> str:
        if kind == "agenerate":
            return (await shoal.agenerate(prompt, **greedy(limit)))[0].text
        return "".join([piece async for piece in shoal.astream(prompt, **greedy(limit))])

    task = asyncio.create_task(whole())
    if until is not None:
        for _ in range(until):
            await asyncio.sleep(0)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
            return None
    return await task


def act(shoal: Shoal, kind: str, prompt: str, limit: int, until: int | None) -> str | None:
    """The text, or None where the call was abandoned."""
    if kind in ("agenerate", "astream"):
        return asyncio.run(act_async(shoal, kind, prompt, limit, until))
    if kind == "generate":
        return shoal.generate(prompt, **greedy(limit))[0].text
    pieces = []
    with closing(shoal.stream(prompt, **greedy(limit))) as stream:
        for piece in stream:
            pieces.append(piece)
            if until is not None and len(pieces) > until:
                return None
    return "".join(pieces)


@given(actions=ACTIONS, depth=st.integers(1, 2), threads=st.integers(1, 8))
def test_concurrent_calls_have_the_same_outputs_as_single_ones(actions, depth, threads):
    with Shoal("fake", kv_cache=SMALL, scheduler=SchedulerOptions(depth=depth)) as shoal:
        with ThreadPoolExecutor(threads) as pool:
            texts = [
                pool.submit(act, shoal, kind, f"prompt {number}" * (1 + number), limit, until)
                for kind, number, limit, until in actions
            ]
            for (_, number, limit, until), text in zip(actions, texts, strict=True):
                if until is None or text.result(60) is not None:
                    assert text.result(60) == expected_text(f"prompt {number}" * (1 + number), limit)
        assert_nothing_is_left(shoal)
        stats = shoal.stats().services["fake"]
        assert stats.finished + stats.cancelled <= len(actions)
