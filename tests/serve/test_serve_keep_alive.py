"""Comments in silent streams."""

import asyncio
import json

import httpx
import openai
import pytest
from serve_builders import FakeEngine, chat, completion, serving, serving_in_thread, until
from weights_status import engine_with_weights

from shoal.core import ServiceUnavailable
from shoal.schedule.policies.residency import Place
from shoal.serve import generation_response

COMMENT = b": keep-alive\n\n"


class AbsentEngine(FakeEngine):
    """Its weights are at one place, as far as the server knows."""

    def __init__(self, place, **options):
        super().__init__(**options)
        self.place = place

    @property
    def engines(self):
        return [engine_with_weights("0", {"chat": self.place, "base": self.place})]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(generation_response, "_KEEP_ALIVE_S", 0.06)


def stream_of(path, body, pause_at=None):
    """The bytes of a stream, which pauses before a token until it has two comments."""

    async def main():
        engine = FakeEngine(context=4000)
        if pause_at is not None:
            engine.hold, engine.pause_at = asyncio.Event(), pause_at
        received = b""
        async with (
            serving(engine) as (url, _, _),
            httpx.AsyncClient(base_url=url, timeout=30) as client,
            client.stream("POST", path, json=body) as response,
        ):
            async for piece in response.aiter_raw():
                received += piece
                if received.count(COMMENT) >= 2:
                    engine.hold.set()
        return received

    return asyncio.run(main())


def text_of(stream):
    """The pieces of text in a stream of any kind, joined."""
    found = []
    for line in stream.decode().splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            for choice in event.get("choices", [{"text": event.get("delta")}]):
                found.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
    return "".join(piece for piece in found if isinstance(piece, str))


STREAMS = [
    ("/v1/completions", completion(stream=True)),
    ("/v1/chat/completions", chat(stream=True)),
    ("/v1/responses", {"model": "chat", "input": "hi", "stream": True, "temperature": 0}),
]


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_a_silent_stream_gets_comments_between_its_events(path, body):
    received = stream_of(path, body, pause_at=2)
    events = received.split(b"\n\n")
    assert events.pop() == b""
    assert 0 < events.index(b": keep-alive") < len(events) - events[::-1].index(b": keep-alive") < len(events)
    assert text_of(received) == text_of(stream_of(path, body)) != ""


def test_openai_s_client_skips_comments():
    class Pause:
        async def wait(self):
            await asyncio.sleep(0.3)

    with (
        serving_in_thread(FakeEngine(hold=Pause(), pause_at=2)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.completions.create(model="base", prompt="hello", temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "hello"


def test_nothing_is_sent_before_the_first_event():
    """Its status is not known yet."""

    async def main():
        engine = FakeEngine(hold=asyncio.Event())
        async with serving(engine) as (url, _, _), httpx.AsyncClient(base_url=url, timeout=30) as client:
            asking = asyncio.create_task(client.post("/v1/completions", json=completion(stream=True)))
            await until(lambda: engine.paused)
            await asyncio.sleep(0.3)
            engine.hold.set()
            return (await asking).content

    assert COMMENT not in asyncio.run(main())


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_a_stream_whose_service_is_loaded_begins_at_once(path, body):
    async def main(waking):
        engine = FakeEngine(hold=asyncio.Event(), waking=set(waking))
        received = b""
        async with (
            serving(engine) as (url, _, _),
            httpx.AsyncClient(base_url=url, timeout=30) as client,
        ):
            if not waking:
                engine.hold.set()
            async with client.stream("POST", path, json=body) as response:
                assert response.status_code == 200
                async for piece in response.aiter_raw():
                    received += piece
                    engine.waking.clear()
                    engine.hold.set()
        return received

    received = asyncio.run(main(["chat", "base"]))
    assert received.startswith(b": loading\n\n")
    assert text_of(received) == text_of(asyncio.run(main([]))) != ""


@pytest.mark.parametrize("place", [Place.ABSENT, Place.COMING])
@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_a_stream_that_waits_for_its_weights_begins_at_once(path, body, place):
    async def main():
        engine = AbsentEngine(place, hold=asyncio.Event())
        received = b""
        async with (
            serving(engine) as (url, _, _),
            httpx.AsyncClient(base_url=url, timeout=30) as client,
            client.stream("POST", path, json=body) as response,
        ):
            assert response.status_code == 200
            async for piece in response.aiter_raw():
                received += piece
                if received.count(COMMENT) >= 2:
                    engine.hold.set()
        return received

    received = asyncio.run(main())
    assert received.startswith(b": loading\n\n" + COMMENT)
    assert received.count(b": loading") == 1
    assert text_of(received) == text_of(stream_of(path, body)) != ""


def test_a_stream_whose_weights_are_there_waits_for_its_first_event():
    async def main():
        engine = AbsentEngine(Place.RESIDENT, hold=asyncio.Event())
        async with serving(engine) as (url, _, _), httpx.AsyncClient(base_url=url, timeout=30) as client:
            asking = asyncio.create_task(client.post("/v1/completions", json=completion(stream=True)))
            await until(lambda: engine.paused)
            await asyncio.sleep(0.3)
            engine.hold.set()
            return (await asking).content

    assert b": " not in asyncio.run(main()).split(b"data: ")[0]


def test_weights_that_never_come_are_an_error_of_the_stream():
    async def main():
        why = ServiceUnavailable("'chat' cannot be served now: its weights cannot be loaded", retry_after_s=5)
        engine = AbsentEngine(Place.ABSENT, hold=asyncio.Event(), fail_after=0, failure=why)
        async with (
            serving(engine) as (url, _, _),
            httpx.AsyncClient(base_url=url, timeout=30) as client,
            client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response,
        ):
            received = b""
            async for piece in response.aiter_raw():
                received += piece
                engine.hold.set()
        return received

    events = asyncio.run(main()).split(b"\n\n")
    error = json.loads(events[-2].removeprefix(b"data: "))["error"]
    assert (events[0], error["code"]) == (b": loading", "service_unavailable")


def test_a_stream_whose_service_cannot_be_loaded_ends_with_the_error():
    async def main():
        why = ServiceUnavailable("service 'chat' could not be loaded: no memory", retry_after_s=5)
        engine = FakeEngine(hold=asyncio.Event(), waking={"chat"}, fail_after=0, failure=why)
        async with (
            serving(engine) as (url, _, _),
            httpx.AsyncClient(base_url=url, timeout=30) as client,
            client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response,
        ):
            assert response.status_code == 200
            received = b""
            async for piece in response.aiter_raw():
                received += piece
                engine.hold.set()
        return received

    events = asyncio.run(main()).split(b"\n\n")
    assert events[0] == b": loading"
    error = json.loads(events[-2].removeprefix(b"data: "))["error"]
    assert (error["code"], error["message"]) == (
        "service_unavailable",
        "service 'chat' could not be loaded: no memory",
    )


def test_an_invalid_request_is_refused_before_its_service_is_loaded():
    async def main():
        engine = FakeEngine(waking={"base"})
        async with serving(engine) as (url, _, _), httpx.AsyncClient(base_url=url) as client:
            body = completion(stream=True, max_tokens=10_000)
            return (await client.post("/v1/completions", json=body)).status_code

    assert asyncio.run(main()) == 400


@pytest.mark.parametrize("stream", [True, False])
def test_while_a_service_loads_streams_get_headers(stream):
    """Lines of JSON have no comments; a response that is not streamed has no status yet."""

    async def main():
        engine = FakeEngine(hold=asyncio.Event(), waking={"base"})
        async with serving(engine) as (url, _, _), httpx.AsyncClient(base_url=url, timeout=30) as client:
            body = {"model": "base", "prompt": "hello", "raw": True, "stream": stream}
            body["options"] = {"temperature": 0}
            async with asyncio.timeout(30):
                if stream:
                    async with client.stream("POST", "/api/generate", json=body) as response:
                        engine.hold.set()
                        lines = (await response.aread()).decode().splitlines()
                else:
                    asking = asyncio.create_task(client.post("/api/generate", json=body))
                    await until(lambda: engine.paused)
                    await asyncio.sleep(0.3)
                    assert not asking.done()
                    engine.hold.set()
                    lines = (await asking).text.splitlines()
        return "".join(json.loads(line)["response"] for line in lines)

    assert asyncio.run(main()) == "hello"


def test_a_stream_with_events_gets_no_comment(monkeypatch):
    monkeypatch.setattr(generation_response, "_KEEP_ALIVE_S", 30)
    assert COMMENT not in stream_of("/v1/completions", completion(stream=True))


def test_lines_of_json_have_no_comments():
    async def main():
        engine = FakeEngine(hold=asyncio.Event(), pause_at=1)
        async with serving(engine) as (url, _, _), httpx.AsyncClient(base_url=url, timeout=30) as client:
            body = {"model": "base", "prompt": "hello", "raw": True, "stream": True}
            asking = asyncio.create_task(client.post("/api/generate", json=body))
            await until(lambda: engine.paused)
            await asyncio.sleep(0.3)
            engine.hold.set()
            return (await asking).text

    lines = asyncio.run(main()).splitlines()
    assert len(lines) > 1
    assert all(json.loads(line)["model"] == "base" for line in lines)
