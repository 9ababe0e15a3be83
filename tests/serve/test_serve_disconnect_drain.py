"""Disconnects, and draining servers, over real sockets."""

import asyncio
import socket

import httpx
import pytest
from serve_builders import FakeEngine, chat, completion, events, serving, until

from shoal.core import ConfigError
from shoal.serve import ServerOptions

ENDLESS = completion(max_tokens=150, ignore_eos=True)


@pytest.mark.parametrize("path_body", [("/v1/completions", ENDLESS), ("/v1/chat/completions", chat())])
@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_before_the_first_token_cancels_the_request(path_body, stream):
    path, body = path_body

    async def main():
        engine = FakeEngine(hold=asyncio.Event())
        async with serving(engine) as (url, _, _), httpx.AsyncClient(base_url=url) as client:
            asking = asyncio.create_task(client.post(path, json=body | {"stream": stream, "n": 2}))
            await until(lambda: engine.waiting == 2)
            asking.cancel()
            await until(lambda: len(engine.cancelled) == 2)
            await until(lambda: not engine.tasks)
            metrics = (await client.get("/metrics")).text
            name = body["model"]
            assert f'shoal_requests_finished_total{{reason="cancelled",service="{name}"}} 2.0' in metrics

    asyncio.run(main())


def test_a_disconnect_in_mid_stream_cancels_the_request():
    async def main():
        engine = FakeEngine(pause_at=3, hold=asyncio.Event())
        async with serving(engine) as (url, _, _), httpx.AsyncClient(base_url=url) as client:
            async with client.stream("POST", "/v1/completions", json=ENDLESS | {"stream": True}) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        break
            await until(lambda: len(engine.cancelled) == 1)
            await until(lambda: not engine.tasks)

    asyncio.run(main())


def test_draining_lets_streams_finish_and_rejects_new_requests():
    async def main():
        engine = FakeEngine(pause_at=3, hold=asyncio.Event())
        async with serving(engine) as (url, stop, task), httpx.AsyncClient(base_url=url) as client:
            body = completion(prompt="hello", stream=True)
            streaming = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: engine.paused == 1)
            stop.request()
            await asyncio.sleep(0)
            response = await client.post("/v1/completions", json=completion())
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "shutting_down"
            assert (await client.get("/health")).status_code == 503
            assert (await client.get("/v1/models")).status_code == 200
            engine.hold.set()
            *chunks, done = events((await streaming).text)
            assert done == "[DONE]"
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello"
            await asyncio.wait_for(task, 10)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["deadline", "second signal"])
def test_requests_that_outlast_the_drain_end_with_an_error(how):
    async def main():
        engine = FakeEngine(pause_at=3, hold=asyncio.Event())
        drain_s = 0.05 if how == "deadline" else 1000
        async with (
            serving(engine, drain_s=drain_s) as (url, stop, task),
            httpx.AsyncClient(base_url=url) as client,
        ):
            body = completion(prompt="hello")
            streaming = asyncio.create_task(client.post("/v1/completions", json=body | {"stream": True}))
            whole = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: engine.paused == 2)
            stop.request()
            if how == "second signal":
                stop.request()
            await asyncio.wait_for(task, 10)
            assert events((await streaming).text)[-1]["error"]["code"] == "shutting_down"
            assert (await whole).status_code == 503
            assert len(engine.cancelled) == 2

    asyncio.run(main())


def test_idle_server_stops_at_once_and_frees_its_port():
    async def main():
        async with serving(FakeEngine(), drain_s=1000) as (url, stop, task):
            stop.request()
            await asyncio.wait_for(task, 10)
            port = int(url.rpartition(":")[2])
        async with serving(FakeEngine()) as _:
            with socket.create_server(("127.0.0.1", port)):
                pass

    asyncio.run(main())


def test_port_in_use_is_a_clear_error():
    from serve_builders import SERVICES, make_tokenizers

    from shoal.serve import StopSignal, serve_until_stopped

    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = ServerOptions(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="in use"):
            asyncio.run(serve_until_stopped(FakeEngine(), make_tokenizers(), SERVICES, options, StopSignal()))


def test_large_body_over_a_socket_gets_its_413():
    async def main():
        async with (
            serving(FakeEngine()) as (url, _, _),
            httpx.AsyncClient(base_url=url, timeout=30) as client,
        ):
            response = await client.post("/v1/completions", json=completion(prompt="x" * 10_000_000))
            assert response.status_code == 413
            assert (await client.post("/v1/completions", json=completion())).status_code == 200

    asyncio.run(main())


def test_garbage_on_the_socket_does_not_stop_the_server():
    async def main():
        async with serving(FakeEngine()) as (url, _, _), httpx.AsyncClient(base_url=url) as client:
            host, _, port = url.removeprefix("http://").rpartition(":")
            for garbage in (
                b"\x00\xff\r\n\r\n",
                b"POST /v1/completions HTTP/1.1\r\nContent-Length: 50\r\n\r\n{",
            ):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(garbage)
                await writer.drain()
                writer.close()
            assert (await client.get("/health")).status_code == 200

    asyncio.run(main())
