"""The access log and the server's log."""

import asyncio
import io
import json
import logging
import logging.config
import re
from contextlib import contextmanager
from datetime import datetime

import httpx
import pytest
from serve_builders import FakeEngine, chat, completion, serving, until

from shoal.config.api_keys import ApiKey
from shoal.serve.http import log_config
from shoal.serve.http.log_config import OncePerMinute


def record(message, *arguments, level=logging.WARNING):
    return logging.LogRecord("name", level, "file", 1, message, arguments, None)


def test_a_kind_of_warning_is_written_once_a_minute(monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(log_config.time, "monotonic", lambda: now_s)
    once = OncePerMinute()
    assert [once.filter(record("bad %s", i)) for i in range(4)] == [True, False, False, False]
    assert once.filter(record("worse")), "another kind"
    assert all(once.filter(record("bug", level=logging.ERROR)) for _ in range(3))
    now_s += 61
    later = record("bad %s", 5)
    assert once.filter(later)
    assert later.getMessage() == "bad 5 (and 3 more times)"


LINE = re.compile(
    r'(?P<time>\S+) (?P<status>\d+) (?P<request>"(?:[^"\\]|\\.)*")(?P<rest>(?: \w+=(?:"[^"]*"|\S+))*)'
)


def lines_of(requests, capfd, **options):
    """The access log of (method, path, headers, body) sent one after the other."""

    async def main():
        async with (
            serving(FakeEngine(), access_log=True, **options) as (url, _, _),
            httpx.AsyncClient(base_url=url) as client,
        ):
            for method, path, headers, body in requests:
                await client.request(method, path, headers=headers, json=body)

    asyncio.run(main())
    return capfd.readouterr().out.splitlines()


def fields_of(line):
    match = LINE.fullmatch(line)
    rest = dict(re.findall(r'(\w+)=("[^"]*"|\S+)', match["rest"]))
    return {"time": match["time"], "status": match["status"], "request": match["request"], **rest}


ALICE = ApiKey(name="alice", key="sk-secret", services=("base",))
HEADERS = {"Authorization": "Bearer sk-secret", "x-request-id": "r-1"}
REQUESTS = [
    ("POST", "/v1/completions?token=query", HEADERS, completion()),
    ("POST", "/v1/completions", HEADERS, completion(stream=True, n=2)),
    ("POST", "/v1/completions", HEADERS, completion(max_tokens=-1)),
    ("POST", "/v1/chat/completions", HEADERS, chat()),
    ("POST", "/v1/completions", {"Authorization": "Bearer sk-wrong"}, completion()),
    ("GET", "/health", {}, None),
]


def test_a_request_is_a_line(capfd):
    full, stream, bad, forbidden, unknown, health = map(
        fields_of, lines_of(REQUESTS, capfd, api_keys=(ALICE,))
    )
    for line in (full, stream):
        assert (line["status"], line["request"], line["id"]) == ("200", '"POST /v1/completions"', "r-1")
        assert (line["key"], line["service"], line["prompt_tokens"]) == ("alice", "base", "12")
        assert 0 <= float(line["queue_s"]) <= float(line["first_token_s"]) <= float(line["total_s"])
        assert "why" not in line
        assert datetime.fromisoformat(line["time"]).tzinfo is not None
    assert (full["output_tokens"], stream["output_tokens"]) == ("12", "24")
    assert bad["status"] == "400"
    assert "max_tokens" in bad["why"]
    assert (forbidden["status"], forbidden["service"]) == ("403", "chat")
    assert "alice" in forbidden["why"]
    assert unknown["status"] == "401"
    assert "key" not in unknown
    assert (health["status"], health["request"]) == ("200", '"GET /health"')
    assert not {"key", "service", "prompt_tokens", "queue_s", "why"} & set(health)


def test_a_line_can_be_json(capfd):
    lines = lines_of(REQUESTS, capfd, api_keys=(ALICE,), access_log_format="json")
    first, *_, last = map(json.loads, lines)
    assert first["status"] == 200
    assert (first["method"], first["path"], first["output_tokens"]) == ("POST", "/v1/completions", 12)
    assert list(last) == ["time", "status", "method", "path", "id", "client", "total_s"]


def test_no_secret_is_in_a_line(capfd):
    for format in ("text", "json"):
        written = "".join(lines_of(REQUESTS, capfd, api_keys=(ALICE,), access_log_format=format))
        assert not {"sk-", "query", "hello"} & {word for word in ("sk-", "query", "hello") if word in written}


def test_disconnects_and_dead_engines_are_logged(capfd):
    async def main():
        engine = FakeEngine(hold=asyncio.Event(), pause_at=2)
        async with serving(engine, access_log=True) as (url, _, _), httpx.AsyncClient(base_url=url) as client:
            async with client.stream("POST", "/v1/completions", json=completion(stream=True)) as response:
                await anext(response.aiter_bytes())
            await until(lambda: engine.cancelled)
        async with (
            serving(FakeEngine(fail_after=2), access_log=True) as (url, _, _),
            httpx.AsyncClient(base_url=url) as client,
        ):
            await client.post("/v1/completions", json=completion(stream=True))

    asyncio.run(main())
    left, died = map(fields_of, capfd.readouterr().out.splitlines())
    assert (left["status"], left["why"], left["output_tokens"]) == ("200", '"the client left"', "2")
    assert died["status"] == "200"
    assert "engine process ended" in died["why"]


@pytest.mark.parametrize("format", ["text", "json"])
def test_the_access_log_has_the_real_address_and_no_control_characters(capfd, format):
    async def main():
        async with (
            serving(FakeEngine(), access_log=True, access_log_format=format) as (url, _, _),
            httpx.AsyncClient(base_url=url) as client,
        ):
            forged = {"X-Forwarded-For": "6.6.6.6", "x-request-id": "a\tb"}
            await client.get('/a%1b[31m%0a%7f%c2%9b"%20key=root', headers=forged)
            host, _, port = url.removeprefix("http://").rpartition(":")
            for raw in (b"GET /a?\x1b[31m\x07 HTTP/1.1\r\n\r\n", b"G\x1bT / HTTP/1.1\r\n\r\n"):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(raw)
                await reader.readline()
                writer.close()

    asyncio.run(main())
    written = "".join(capfd.readouterr())
    assert r'/a\u001b[31m\n\u007f\u009b\" key=root"' in written
    assert "127.0.0.1:" in written
    assert "6.6.6.6" not in written
    assert not set(written) & (set(map(chr, [*range(32), *range(127, 160)])) - {"\n"})
    assert len(written.splitlines()) <= 4


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


@contextmanager
def logging_as(config):
    """Log with the configuration ``config``."""
    loggers = [logging.getLogger(name) for name in config["loggers"]]
    before = [(logger.level, logger.handlers[:]) for logger in loggers]
    logging.config.dictConfig(config)
    try:
        yield
    finally:
        for logger, (level, handlers) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.handlers[:] = handlers


class Unread(io.StringIO):
    """A pipe whose reader is closed."""

    def write(self, text):
        raise BrokenPipeError


def test_events_have_times_and_go_to_the_current_standard_error(monkeypatch, capsys):
    with logging_as(log_config.log_config()):
        for _ in range(2):
            logging.getLogger("shoal.cluster.router.recovery_log").warning("engine %s died", 0)
        stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00"
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 2, "every death is told"
        assert all(re.fullmatch(rf"{stamp} WARNING:  engine 0 died", line) for line in lines)
        monkeypatch.setattr("sys.stdout", Unread())
        logging.getLogger(log_config.ACCESS_LOGGER).info("a line that nobody reads")
        assert "Traceback" not in capsys.readouterr().err


def test_a_closed_standard_output_is_no_error(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout", None)
    with logging_as(log_config.log_config()):
        logging.getLogger(log_config.ACCESS_LOGGER).info("a line for nobody")
        logging.getLogger("shoal.cluster.router.fleet").info("engine 0 is ready")
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("INFO:     engine 0 is ready")


@pytest.mark.parametrize(
    ("level", "ours", "uvicorns"),
    [("info", "IWE", "WE"), ("warning", "WE", "WE"), ("error", "E", "E")],
)
def test_the_log_level_does_not_affect_the_access_log(level, ours, uvicorns, capsys):
    with logging_as(log_config.log_config(level)):
        for name in (
            "shoal.cluster.router.fleet",
            "shoal.serve.admin.operations",
            "shoal.serve.launch",
            "uvicorn.error",
        ):
            for severity in (logging.INFO, logging.WARNING, logging.ERROR):
                logging.getLogger(name).log(severity, "%s", name)
        logging.getLogger(log_config.ACCESS_LOGGER).info("a request")
    out, err = capsys.readouterr()
    told = [line.split()[-2:] for line in err.splitlines()]
    for name, severities in (
        ("shoal.cluster.router.fleet", ours),
        ("shoal.serve.admin.operations", ours),
        ("shoal.serve.launch", ours),
        ("uvicorn.error", uvicorns),
    ):
        assert "".join(severity[0] for severity, said in told if said == name) == severities
    assert out == "a request\n"


@pytest.mark.parametrize(("level", "lines"), [("info", 1), ("warning", 1), ("error", 0)])
def test_a_server_logs_from_its_level_on(level, lines, capfd):
    async def main():
        async with serving(FakeEngine(), log_level=level) as (url, _, _):
            host, _, port = url.removeprefix("http://").rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"\x00\x00\r\n\r\n")
            await reader.read()
            writer.close()

    asyncio.run(main())
    assert len(capfd.readouterr().err.splitlines()) == lines
