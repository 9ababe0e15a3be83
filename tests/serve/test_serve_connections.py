"""Slow, idle, many or unfair clients, over real sockets."""

import asyncio
import errno
import json
import os
import resource
import socket
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
from serve_builders import BASE, FakeEngine, completion, generation, serving, until

from shoal.core import ConfigError
from shoal.serve import ServerOptions, server
from shoal.serve.errors import TooManyConnections
from shoal.serve.http.address import connection_limit
from shoal.serve.http.connection import Connection

ENDLESS = completion(max_tokens=150, ignore_eos=True)
SOON_S = 0.2


@pytest.fixture
def run():
    return lambda main: asyncio.run(asyncio.wait_for(main, 60))


@asynccontextmanager
async def connected(url, *sent):
    """A raw connection on which ``sent`` was written."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in sent:
            writer.write(part)
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def post(body, headers=""):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n{headers}\r\n"
    ).encode() + raw


async def response_of(reader):
    """Status and parsed body of the response before the connection is closed; None if there is none."""
    raw = await reader.read()
    head, _, body = raw.partition(b"\r\n\r\n")
    return (int(head.split()[1]), json.loads(body)) if raw else None


HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
BODY = post(completion())
CHUNKED = BODY[: BODY.index(b"Content-Length")] + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "code"),
    [(b"", None), (b"G", "request_timeout"), (HEAD, "request_timeout"), (BODY[:-1], "request_timeout")],
    ids=["nothing", "a byte", "half of the headers", "half of the body"],
)
def test_incomplete_requests_time_out(run, sent, code):
    async def main():
        async with (
            serving(FakeEngine(), read_timeout_s=SOON_S) as (url, _, _),
            connected(url, sent) as (reader, _),
        ):
            response = await response_of(reader)
            assert (
                response is None
                if code is None
                else (response[0], response[1]["error"]["code"]) == (408, code)
            )

    run(main())


@pytest.mark.parametrize("start", [HEAD + b"X: ", BODY[:-10]])
def test_occasional_bytes_do_not_extend_the_deadline_forever(start):
    async def main():
        async with (
            serving(FakeEngine(), read_timeout_s=SOON_S) as (url, _, _),
            connected(url, start) as (reader, writer),
        ):
            answering = asyncio.create_task(response_of(reader))
            # More than arrives in one time-out, but never the whole request.
            while not answering.done():
                with suppress(OSError):
                    writer.write(b" ")
                await asyncio.sleep(SOON_S / 4)
            with suppress(ConnectionResetError):
                assert answering.result()[0] == 408

    asyncio.run(asyncio.wait_for(main(), 60))


def test_engine_time_does_not_count_toward_time_outs():
    async def main():
        engine = FakeEngine(hold=asyncio.Event())
        options = {"read_timeout_s": 0.05, "write_timeout_s": 0.05, "keep_alive_s": 0.05}
        # The next request starts early: it must not end the first.
        async with serving(engine, **options) as (url, _, _), connected(url, BODY, HEAD) as (reader, _):
            await until(lambda: engine.paused == 1)
            await asyncio.sleep(0.3)
            engine.hold.set()
            assert (await reader.readline()).split()[1] == b"200"

    asyncio.run(main())


def test_idle_connections_are_closed(run):
    async def main():
        async with serving(FakeEngine(), keep_alive_s=SOON_S) as (url, _, _):
            async with connected(url, BODY) as (reader, _):
                status, body = await response_of(reader)
                assert (status, body["choices"][0]["text"]) == (200, "hello world")
            # The response comes before the request is complete.
            async with connected(url, BODY.replace(b"/completions", b"/nothing")[:-1]) as (reader, writer):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"}")
                assert b"unknown_url" in await reader.read()

    run(main())


@pytest.fixture
def small_buffers(monkeypatch):
    """Little is sent before the client must read."""
    listen = server.listen

    def small(options):
        listening = listen(options)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listening

    monkeypatch.setattr(server, "listen", small)


@pytest.mark.parametrize("stream", [True, False])
def test_a_reader_that_stalls_is_cut_off_and_its_request_cancelled(run, small_buffers, stream):
    async def main():
        engine = FakeEngine(context=10**6, pause_at=2000, hold=asyncio.Event() if stream else None)
        body = completion(max_tokens=4000, ignore_eos=True, logprobs=5, stream=stream)
        async with serving(engine, write_timeout_s=SOON_S) as (url, _, _):
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                host, _, port = url.removeprefix("http://").rpartition(":")
                client.connect((host, int(port)))
                client.sendall(post(body))
                await until(lambda: engine.submitted)
                await until(lambda: engine.cancelled if stream else not engine.tasks)
                await until(lambda: not is_served(client))
                # Data buffered by the kernel, and then no end.
                received = b"".join(iter(lambda: client.recv(2**16), b""))
                assert received.startswith(b"HTTP/1.1 200")
                assert not received.endswith((b"}", b"0\r\n\r\n"))

    run(main())


def is_served(client):
    """Whether the server's end of a connection, in this process, is open."""
    peers = {connection.raddr for connection in psutil.Process().net_connections()}
    return client.getsockname() in peers


def test_unread_deltas_of_several_prompts_are_joined():
    async def main():
        engine = FakeEngine(context=10**4)
        async with generation(engine, ["a", "b"], max_tokens=500, ignore_eos=True) as request:
            deltas = request.deltas()
            first = [await anext(deltas)]
            await until(lambda: not engine.tasks)
            rest = [pair async for pair in deltas]
        assert sum(len(delta.tokens) for _, delta in first + rest) == 1000
        assert len(rest) < 30

    asyncio.run(main())


@pytest.mark.parametrize("sent", [b"", HEAD, BODY[:-1]], ids=["nothing", "headers", "body"])
def test_waiting_connections_are_closed_for_new_ones(run, sent):
    async def main():
        async with (
            serving(FakeEngine(), max_connections=4) as (url, _, _),
            connected(url, sent) as (oldest, _),
        ):
            for _ in range(5):
                async with (
                    connected(url, sent) as _,
                    connected(url, sent) as _,
                    connected(url, sent) as _,
                    httpx.AsyncClient(base_url=url) as client,
                ):
                    assert (await client.get("/health")).status_code == 200
            assert b"\r\nretry-after: 1\r\n" in await oldest.readuntil(b"\r\n\r\n")
            assert json.loads(await oldest.read())["error"]["code"] == "too_many_connections"

    run(main())


@pytest.mark.parametrize("spare_files", [True, False])
def test_a_request_that_was_not_read_is_refused_and_not_reset(run, monkeypatch, spare_files):
    made = []
    monkeypatch.setattr(Connection, "_has_spare_files", lambda _: spare_files)

    class Kept(Connection):
        def connection_made(self, transport):
            super().connection_made(transport)
            made.append(self)

    monkeypatch.setattr(server, "Connection", Kept)

    async def main():
        async with serving(FakeEngine()) as (url, _, _), connected(url) as (reader, writer):
            await until(lambda: made)
            writer.write(BODY)
            made[0].reject(TooManyConnections("there is no room"))
            status, body = await response_of(reader)
            assert (status, body["error"]["code"]) == (503, "too_many_connections")

    run(main())


def test_a_refused_client_that_sends_a_request_gets_the_response(run):
    async def main():
        async with (
            serving(FakeEngine(), max_connections=1) as (url, _, _),
            connected(url) as (reader, writer),
            httpx.AsyncClient(base_url=url) as client,
        ):
            assert (await client.get("/health")).status_code == 200
            for part in (BODY[:-5], BODY[-5:]):
                writer.write(part)
                await asyncio.sleep(0.05)
            status, body = await response_of(reader)
            assert (status, body["error"]["code"]) == (503, "too_many_connections")

    run(main())


def test_a_refused_client_that_does_not_close_is_cut_off(run, monkeypatch):
    monkeypatch.setattr("shoal.serve.http.connection._LINGER_S", SOON_S)

    async def main():
        async with serving(FakeEngine(), max_connections=1) as (url, _, _):
            host, _, port = url.removeprefix("http://").rpartition(":")
            with socket.create_connection((host, int(port))) as refused:
                await until(lambda: is_served(refused))
                async with httpx.AsyncClient(base_url=url) as client:
                    assert (await client.get("/health")).status_code == 200
                    await until(lambda: not is_served(refused))

    run(main())


def test_refused_clients_that_reset_their_connections_do_no_harm(run, monkeypatch):
    def write_eof(self):
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr("asyncio.selector_events._SelectorSocketTransport.write_eof", write_eof)

    async def main():
        async with serving(FakeEngine(), max_connections=1) as (url, _, _):
            host, _, port = url.removeprefix("http://").rpartition(":")
            for _ in range(3):
                with socket.create_connection((host, int(port))) as refused:
                    await until(lambda refused=refused: is_served(refused))
                    async with httpx.AsyncClient(base_url=url) as client:
                        assert (await client.get("/health")).status_code == 200

    run(main())


def test_an_idle_connection_is_closed_silently_for_a_new_one(run):
    async def main():
        async with (
            serving(FakeEngine(), max_connections=1) as (url, _, _),
            connected(url, HEAD + b"\r\n") as (reader, _),
        ):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            async with httpx.AsyncClient(base_url=url) as client:
                assert (await client.get("/health")).status_code == 200
            assert (await reader.read()).endswith(b"}}}")

    run(main())


def test_connections_beyond_the_limit_get_a_503(run):
    async def main():
        engine = FakeEngine(hold=asyncio.Event())
        async with (
            serving(engine, max_connections=2) as (url, _, _),
            httpx.AsyncClient(base_url=url) as client,
        ):
            asking = [
                asyncio.create_task(client.post("/v1/completions", json=completion())) for _ in range(2)
            ]
            await until(lambda: engine.paused == 2)
            async with connected(url, HEAD + b"\r\n") as (reader, _):
                status, body = await response_of(reader)
            assert (status, body["error"]["code"]) == (503, "too_many_connections")
            async with httpx.AsyncClient(base_url=url) as late:
                refused = await late.post("/v1/completions", json=completion())
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            engine.hold.set()
            assert [(await response).status_code for response in asking] == [200, 200]
            async with httpx.AsyncClient(base_url=url) as other:
                assert "\nshoal_connections_refused_total 2.0\n" in (await other.get("/metrics")).text

    run(main())


def test_every_client_of_a_burst_gets_a_response_and_those_refused_are_counted(run):
    async def main():
        async with serving(FakeEngine(max_queue=100), max_connections=10) as (url, _, _):
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=url, limits=limits) as client:
                asking = [client.post("/v1/completions", json=completion()) for _ in range(40)]
                statuses = [response.status_code for response in await asyncio.gather(*asking)]
            assert set(statuses) == {200, 503}
            async with httpx.AsyncClient(base_url=url) as client:
                page = (await client.get("/metrics")).text
            assert f"\nshoal_connections_refused_total {statuses.count(503)}.0\n" in page

    run(main())


def test_accepting_goes_on_after_errors_with_one_line_in_the_log(monkeypatch, caplog):
    async def main():
        loop = asyncio.get_running_loop()
        accept, failures = loop.sock_accept, iter([errno.EMFILE, errno.EMFILE, errno.ECONNABORTED])

        async def failing(listening):
            for number in failures:
                raise OSError(number, os.strerror(number))
            return await accept(listening)

        monkeypatch.setattr(loop, "sock_accept", failing)
        async with serving(FakeEngine()) as (url, _, _), httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/health")).status_code == 200

    asyncio.run(main())
    assert len(caplog.records) <= 1


TESTS = Path(__file__).parents[1]
PROGRAM = """
import asyncio, resource, sys
import psutil
sys.path[:0] = sys.argv[1:3]
from serve_builders import SERVICES, FakeEngine, make_tokenizers
from shoal.serve import ServerOptions, StopSignal, serve_until_stopped
async def main():
    files = psutil.Process().num_fds() + 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    stop = StopSignal()
    with stop.on_signals():
        say = lambda url: print(url, flush=True)
        await serve_until_stopped(FakeEngine(), make_tokenizers(), SERVICES, ServerOptions(port=0), stop, say)
asyncio.run(main())
"""


def test_a_server_with_few_files_answers_while_many_connections_are_idle():
    async def main():
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROGRAM, *map(str, (TESTS, TESTS / "serve"))),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        url = (await process.stdout.readline()).decode().strip()
        host, _, port = url.removeprefix("http://").rpartition(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(100)]
        async with httpx.AsyncClient(base_url=url) as client:
            for _ in range(3):
                assert (await client.get("/health")).status_code == 200
        for connection in idle:
            connection.close()
        process.terminate()
        log = (await process.stderr.read()).decode()
        assert await process.wait() == 0
        assert "Traceback" not in log
        assert len(log.splitlines()) <= 2

    asyncio.run(asyncio.wait_for(main(), 60))


def test_more_connections_than_files_are_refused(monkeypatch):
    open_now = psutil.Process().num_fds()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (open_now + 52, 10**6))
    assert 10 <= connection_limit(None) <= 20
    assert connection_limit(3) == 3
    with pytest.raises(ConfigError, match="ulimit -n"):
        connection_limit(100)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 16))
    with pytest.raises(ConfigError, match="16 files"):
        connection_limit(None)


def test_a_disconnect_cancels_requests_before_the_latest_too(run):
    async def main():
        engine = FakeEngine(hold=asyncio.Event())
        async with serving(engine) as (url, _, _):
            async with connected(url, BODY, BODY):
                await until(lambda: engine.paused == 1)
                await asyncio.sleep(0.05)
            await until(lambda: len(engine.cancelled) == 1)

    run(main())


@pytest.mark.parametrize(
    "sent",
    [
        (HEAD + b"\r\n") * 200,
        HEAD + b"X: " + b"x" * 2**20,
        CHUNKED + b"0\r\nX: " + b"x" * 2**20,
        CHUNKED + b"1\r\n \r\n" * 20_000,
        b"GET /health?\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x00\xff\r\n\r\n",
    ],
    ids=["requests", "headers", "trailers", "chunks", "target", "garbage"],
)
def test_oversized_or_invalid_http_is_refused(run, sent, capsys):
    async def main():
        async with (
            serving(FakeEngine(), access_log=True, read_timeout_s=1000) as (url, _, _),
            httpx.AsyncClient(base_url=url) as client,
        ):
            async with connected(url, sent) as (reader, _):
                with suppress(ConnectionResetError):
                    # Whatever the response: the connection is closed.
                    while await reader.read(2**16):
                        pass
            assert (await client.get("/health")).status_code == 200

    run(main())
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (HEAD + b"X: " + b"x" * 100_000 + b"\r\n\r\n", "headers are limited to 65536 bytes"),
        (HEAD + b"X: 1234567890\r\n" * 5_000 + b"\r\n", "headers are limited to 65536 bytes"),
        (
            b"GET /health?" + b"x" * 65_000 + HEAD[len("GET /health") :] + b"X: " + b"x" * 600 + b"\r\n\r\n",
            "limited",
        ),
        (b"GARBAGE\r\n\r\n", "not a request"),
        (BODY[:-1].replace(b"Content-Length: ", b"Transfer-Encoding: chunked\r\nX: "), "not a request"),
    ],
    ids=["a header", "headers", "target and header", "garbage", "body"],
)
def test_an_invalid_request_gets_a_400_after_earlier_responses(run, sent, says, before):
    async def main():
        async with (
            serving(FakeEngine()) as (url, _, _),
            connected(url, BODY * before + sent) as (reader, _),
        ):
            raw = await reader.read()
            assert raw.count(b"HTTP/1.1 200 OK") == before
            *_, last = raw.split(b"HTTP/1.1 400 ")
            error = json.loads(last.partition(b"\r\n\r\n")[2])["error"]
            assert (error["code"], says in error["message"]) == ("invalid_http", True)

    run(main())


@pytest.mark.parametrize("count", [8, 9, 10, 200])
def test_too_many_pipelined_requests_get_a_400(run, count):
    async def main():
        closing = HEAD + b"Connection: close\r\n\r\n"
        sent = (HEAD + b"\r\n") * (count - 1) + closing
        async with serving(FakeEngine()) as (url, _, _), connected(url, sent) as (reader, _):
            raw = await reader.read()
            assert raw.count(b"HTTP/1.1 200 OK") == min(count, 9)
            assert raw.count(b"HTTP/1.1 400 ") == (count > 9)
            assert (b"at most 8 requests" in raw) == (count > 9)

    run(main())


def test_a_large_response_is_complete_before_the_next_400(run, small_buffers):
    async def main():
        body = completion(max_tokens=150, ignore_eos=True, logprobs=20)
        async with (
            serving(FakeEngine(context=2000)) as (url, _, _),
            connected(url, post(body) + b"GARBAGE\r\n\r\n") as (reader, _),
        ):
            await asyncio.sleep(SOON_S)
            first, refused, _ = (await reader.read()).partition(b"HTTP/1.1 400 ")
            assert json.loads(first.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 150
            assert refused

    run(main())


def test_a_websocket_upgrade_is_ignored_and_logs_no_advice(run, capsys):
    async def main():
        upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        async with serving(FakeEngine()) as (url, _, _), connected(url, HEAD + upgrade) as (reader, _):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")

    run(main())
    assert "pgrade" not in capsys.readouterr().err


def test_a_slow_body_at_shutdown_is_refused_without_a_traceback(run, capsys):
    async def main():
        async with (
            serving(FakeEngine(), drain_s=0) as (url, stop, task),
            connected(url, BODY[:-1]) as (reader, _),
        ):
            async with httpx.AsyncClient(base_url=url) as client:
                await client.get("/health")
            stop.request()
            status, body = await response_of(reader)
            assert (status, body["error"]["code"]) == (503, "shutting_down")
            await asyncio.wait_for(task, 10)

    run(main())
    assert capsys.readouterr().err == ""


def test_head_and_options_get_a_response():
    async def main():
        async with serving(FakeEngine()) as (url, _, _), httpx.AsyncClient(base_url=url) as client:
            for path in (
                "/health",
                "/v1/models",
                f"/v1/models/{BASE}",
                "/metrics",
                "/version",
                "/openapi.json",
                "/docs",
                "/",
            ):
                response = await client.head(path)
                assert (response.status_code, response.content) == (200, b"")
                assert (await client.get(path)).headers["Content-Type"] == response.headers["Content-Type"]
                options = await client.options(path)
                assert (options.status_code, options.content) == (204, b"")
                assert options.headers["Allow"] == "GET, HEAD, OPTIONS"
            assert (await client.options("/v1/completions")).headers["Allow"] == "POST, OPTIONS"

    asyncio.run(main())


def test_options_without_meaning_are_refused():
    for field in ("read_timeout_s", "write_timeout_s", "keep_alive_s", "max_connections"):
        with pytest.raises(ConfigError, match=field):
            ServerOptions(**{field: 0})


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        (["Transfer-Encoding: gzip"], 501, "unknown_transfer_coding"),
        (["Transfer-Encoding: gzip, chunked"], 501, "unknown_transfer_coding"),
        (["Transfer-Encoding: GZIP;level=9 , chunked"], 501, "unknown_transfer_coding"),
        (["Transfer-Encoding: gzip", "Transfer-Encoding: chunked"], 501, "unknown_transfer_coding"),
        (["Transfer-Encoding: xchunked"], 501, "unknown_transfer_coding"),
        # The length of the body is not known, or there are two.
        (["Transfer-Encoding: chunked, gzip"], 400, "invalid_http"),
        (["Transfer-Encoding: chunked", "Transfer-Encoding: gzip"], 400, "invalid_http"),
        (["Transfer-Encoding: chunked, chunked"], 400, "invalid_http"),
        (["Transfer-Encoding: identity"], 400, "invalid_http"),
        (["Transfer-Encoding: chunked", "Content-Length: 5"], 400, "invalid_http"),
        (["Content-Length: 5", "Transfer-Encoding: chunked"], 400, "invalid_http"),
        (["Content-Length: 5", "Transfer-Encoding: gzip"], 400, "invalid_http"),
        (["Content-Length: 5", "Content-Length: 6"], 400, "invalid_http"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/api/chat", "/admin/services", "/nothing"])
def test_a_body_of_unknown_length_or_coding_ends_the_connection(run, path, headers, status, code):
    body = json.dumps(completion()).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    head = "\r\n".join(lines)
    raw = head.encode() + b"\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)

    async def main():
        async with serving(FakeEngine()) as (url, _, _), connected(url, raw) as (reader, _):
            assert (answer := await response_of(reader)) is not None
            assert (answer[0], answer[1]["error"]["code"]) == (status, code)
            named = "gzip" if status == 501 and "gzip" in head.lower() else ""
            assert named in answer[1]["error"]["message"].lower()

    run(main())


def test_an_unknown_transfer_coding_is_refused_after_earlier_responses(run):
    async def main():
        engine = FakeEngine(hold=asyncio.Event())
        wrong = CHUNKED.replace(b"chunked", b"gzip, chunked")
        async with serving(engine) as (url, _, _), connected(url, BODY, wrong) as (reader, _):
            await until(lambda: engine.paused == 1)
            engine.hold.set()
            raw = await reader.read()
            assert raw.startswith(b"HTTP/1.1 200 ")
            assert b"HTTP/1.1 501 " in raw
            assert len(engine.submitted) == 1

    run(main())


@pytest.mark.parametrize("coding", ["identity, chunked", "Chunked", ", chunked"])
def test_chunked_bodies_are_read(run, coding):
    body = json.dumps(completion()).encode()
    raw = CHUNKED.replace(b"chunked", coding.encode()) + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)

    async def main():
        async with serving(FakeEngine()) as (url, _, _), connected(url, raw) as (reader, _):
            assert (await reader.readline()).split()[1] == b"200"

    run(main())
