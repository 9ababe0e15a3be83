"""The HTTP client: what it makes of streams and errors."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from bench_builders import make_call

from shoal.bench import Answer, Target
from shoal.core import ShoalError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def event(text=None, finish=None, **more):
    choice = {"index": 0, "text": text or "", "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 7}}\n\n'
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def serving(pieces, bodies=None):
    """A server that answers every request with these pieces of bytes, each in a packet of its own."""

    async def answer(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        [*lengths] = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
        length = int(lengths[0].split(b":")[1]) if lengths else 0
        body = await reader.readexactly(length)
        if bodies is not None:
            bodies.append((head.decode(), json.loads(body) if body else None))
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def send(pieces, bodies=None, chat=False, **options):
    async def scenario():
        answer = Answer(make_call())
        async with (
            serving(pieces, bodies) as url,
            Target.open(url, headers={}, chat=chat, extra=options) as target,
        ):
            await target.send(answer)
        return answer

    return asyncio.run(scenario())


def test_chunks_with_text_are_timed_and_usage_is_read():
    answer = send([HEAD, event("a"), event(""), event("b"), event(finish="length"), USAGE, DONE])
    assert answer.pieces == ["a", "b"]
    assert len(answer.chunks_ns) == 2
    assert answer.sent_ns < answer.chunks_ns[0] < answer.chunks_ns[1] <= answer.end_ns
    assert (answer.prompt_tokens, answer.output_tokens, answer.finish) == (9, 7, "length")
    assert answer.error is None


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
def test_packets_may_end_anywhere(size):
    whole = (
        event("a") + event("b", finish="stop").replace(b"\n\n", b"\r\n\r\n") + b": loading\n\n" + USAGE + DONE
    )
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    answer = send([HEAD, *pieces])
    assert (len(answer.chunks_ns), answer.finish, answer.output_tokens) == (2, "stop", 7)


def test_chunks_are_counted_where_the_server_does_not():
    answer = send([HEAD, event("a"), event("b", finish="stop"), DONE])
    assert (answer.output_tokens, answer.prompt_tokens) == (2, 0)


@pytest.mark.parametrize("field", ["content", "reasoning_content", "reasoning"])
def test_chats_are_asked_and_read(field):
    bodies = []
    delta = {"choices": [{"delta": {field: "a"}}]}
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    lines = [b"data: " + json.dumps(each).encode() + b"\n\n" for each in (role, delta)]
    answer = send([HEAD, *lines, event(finish="stop"), DONE], bodies, chat=True, ignore_eos=True)
    assert len(answer.chunks_ns) == 1
    [(head, body)] = bodies
    assert head.startswith("POST /v1/chat/completions ")
    assert body["messages"] == [{"role": "user", "content": "the of"}]
    assert (body["model"], body["max_tokens"], body["stream"], body["ignore_eos"]) == ("chat", 4, True, True)


@pytest.mark.parametrize(
    ("pieces", "finish", "words"),
    [
        ([HEAD, event("a")], "error", "ended before the answer did"),
        (
            [HEAD, event("a"), b'data: {"error": {"message": "out of luck"}}\n\n', DONE],
            "error",
            "out of luck",
        ),
        ([HEAD, b'data: {"error": "plain"}\n\n'], "error", "plain"),
        ([HEAD, b"data: nonsense\n\n"], "error", "malformed"),
        (
            [b'HTTP/1.1 400 Bad\r\nContent-Length: 34\r\n\r\n{"error": {"message": "too long"}}'],
            "error",
            "status 400",
        ),
        ([b"HTTP/1.1 429 Busy\r\nContent-Length: 4\r\n\r\nfull"], "refused", "status 429: full"),
        ([b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nfull"], "refused", "status 503: full"),
        ([b"HTTP"], "error", ""),
        ([], "error", ""),
    ],
)
def test_what_goes_wrong_is_told(pieces, finish, words):
    answer = send(pieces)
    assert answer.finish == finish
    assert words in answer.error
    assert answer.end_ns >= answer.sent_ns > 0


def models(pieces):
    async def scenario():
        async with serving(pieces) as url, Target.open(url, headers={}, chat=False, extra={}) as target:
            return await target.services()

    return asyncio.run(scenario())


def body(text, status=b"200 OK"):
    head = b"HTTP/1.1 " + status + b"\r\nContent-Type: application/json\r\nContent-Length: "
    return [head + str(len(text)).encode() + b"\r\n\r\n" + text]


def test_models_are_listed():
    assert models(body(b'{"data": [{"id": "a"}, {"id": "b"}]}')) == ["a", "b"]


@pytest.mark.parametrize("pieces", [body(b"{}"), body(b"[]"), body(b"no json"), body(b"{}", b"401 No"), []])
def test_a_server_without_a_list_of_models_is_explained(pieces):
    with pytest.raises(ShoalError, match="models"):
        models(pieces)


def test_a_missing_server_is_reported():
    async def scenario():
        async with Target.open("http://127.0.0.1:1", headers={}, chat=False, extra={}) as target:
            await target.services()

    with pytest.raises(ShoalError, match=r"no models of http://127\.0\.0\.1:1"):
        asyncio.run(scenario())
