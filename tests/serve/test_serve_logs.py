"""What clients can make the server write."""

import asyncio
import logging

import httpx
from serve_builders import FakeEngine, serving

from shoal.serve import logs
from shoal.serve.logs import EscapeControls, OncePerMinute


def record(message, *arguments, level=logging.WARNING):
    return logging.LogRecord("name", level, "file", 1, message, arguments, None)


def test_a_kind_of_warning_is_written_once_a_minute(monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now_s)
    once = OncePerMinute()
    assert [once.filter(record("bad %s", i)) for i in range(4)] == [True, False, False, False]
    assert once.filter(record("worse")), "another kind"
    assert all(once.filter(record("bug", level=logging.ERROR)) for _ in range(3))
    now_s += 61
    later = record("bad %s", 5)
    assert once.filter(later)
    assert later.getMessage() == "bad 5 (and 3 more times)"


def test_control_characters_are_escaped():
    written = record('%s - "%s" %d', "a\x1b[31m", "b\nc\x7f\x9b", 200, level=logging.INFO)
    assert EscapeControls().filter(written)
    assert written.getMessage() == 'a\\x1b[31m - "b\\x0ac\\x7f\\x9b" 200'


def test_the_access_log_tells_the_real_address_and_nothing_that_steers_a_terminal(capfd):
    async def main():
        async with (
            serving(FakeEngine(), access_log=True) as (url, _, _),
            httpx.AsyncClient(base_url=url) as client,
        ):
            forged = {"X-Forwarded-For": "6.6.6.6"}
            await client.get("/health?%1b[31m", headers=forged)
            host, _, port = url.removeprefix("http://").rpartition(":")
            for raw in (b"GET /health?\x1b[31m\x07 HTTP/1.1\r\n\r\n", b"G\x1bT / HTTP/1.1\r\n\r\n"):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(raw)
                await reader.readline()
                writer.close()

    asyncio.run(main())
    written = "".join(capfd.readouterr())
    assert '"GET /health?%1b[31m HTTP/1.1" 200' in written
    assert "127.0.0.1:" in written
    assert "6.6.6.6" not in written
    assert not set(written) & (set(map(chr, range(32))) - {"\n"})


def test_garbage_makes_one_line(capfd):
    async def main():
        async with serving(FakeEngine()) as (url, _, _):
            host, _, port = url.removeprefix("http://").rpartition(":")
            for _ in range(5):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"\x00\x00\r\n\r\n")
                await reader.read()
                writer.close()

    asyncio.run(main())
    assert len(capfd.readouterr().err.splitlines()) == 1
