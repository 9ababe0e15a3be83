"""Target: a server with OpenAI's API; sends calls to it, and times the chunks of their streams."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import msgspec

from shoal.core import NO_GOALS, SLO, ShoalError

_CONNECT_S = 10.0
_REFUSALS = (429, 503)
"""Statuses of a server that takes no more requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request to send."""

    id: str
    service: str
    text: str
    """The prompt."""
    output_tokens: int
    """Limit on the output; with ``ignore_eos`` its length."""
    arrival_ns: int = 0
    """When to send it in an open loop, from the begin of the run."""
    slo: SLO = NO_GOALS


@dataclass(slots=True)
class Answer:
    """What came of a call. Times are of ``time.monotonic_ns``."""

    call: Call
    sent_ns: int = 0
    end_ns: int = 0
    chunks_ns: list[int] = field(default_factory=list)
    """Arrivals of chunks with text: tokens, or a few at a time."""
    pieces: list[str] = field(default_factory=list)
    """The texts of these chunks."""
    prompt_tokens: int = 0
    """As the server counted."""
    output_tokens: int = 0
    """As the server counted; chunks, if it did not."""
    finish: str = ""
    """As in ``RequestRow``; empty until the end."""
    error: str | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def new_text(self) -> str:
        delta = self.delta or _Delta()
        return self.text or delta.content or delta.reasoning_content or delta.reasoning or ""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class Target:
    """A server, and how calls are put to it.

    chat: send prompts as chats instead of texts to complete. extra: fields of every request.
    """

    def __init__(self, session: aiohttp.ClientSession, *, chat: bool, extra: Mapping[str, Any]) -> None:
        self._session = session
        self._path = "/v1/chat/completions" if chat else "/v1/completions"
        self._chat = chat
        self._extra = extra

    @classmethod
    @asynccontextmanager
    async def open(
        cls, url: str, *, headers: Mapping[str, str], chat: bool, extra: Mapping[str, Any]
    ) -> AsyncIterator[Self]:
        """Connections to the server at ``url``, as many as there are calls at once."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            url, headers=headers, timeout=timeout, connector=connector, read_bufsize=1 << 18
        ) as session:
            yield cls(session, chat=chat, extra=extra)

    async def services(self) -> list[str]:
        """Names of the models that the server has; raises ShoalError."""
        try:
            async with self._session.get("/v1/models") as response:
                if response.status != 200:
                    raise ShoalError(f"the server has no list of models: {await _error_of(response)}")
                return [str(each["id"]) for each in (await response.json(content_type=None))["data"]]
        except (aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError) as error:
            raise ShoalError(f"no models of {self._session._base_url}: {_text_of(error)}") from error

    async def send(self, answer: Answer) -> None:
        """Send the call of ``answer`` now, and read the stream to its end; fills in the answer."""
        answer.sent_ns = time.monotonic_ns()
        try:
            async with self._session.post(self._path, json=self._body(answer.call)) as response:
                if response.status != 200:
                    answer.finish = "refused" if response.status in _REFUSALS else "error"
                    answer.error = await _error_of(response)
                else:
                    await _read_stream(response, answer)
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
            answer.finish, answer.error = "error", _text_of(error)
        finally:
            answer.end_ns = time.monotonic_ns()
            answer.finish = answer.finish or "cancelled"
            answer.output_tokens = answer.output_tokens or len(answer.chunks_ns)

    def _body(self, call: Call) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt": call.text}
        if self._chat:
            prompt = {"messages": [{"role": "user", "content": call.text}]}
        return {
            "model": call.service,
            **prompt,
            "max_tokens": call.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }


async def _read_stream(response: aiohttp.ClientResponse, answer: Answer) -> None:
    """Read server-sent events to the end of the stream."""
    rest = b""
    while data := await response.content.readany():
        now_ns = time.monotonic_ns()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (content := line[5:].strip()) != b"[DONE]":
                _take(_decode(content), answer, now_ns)
                if answer.error is not None:
                    return
    if not answer.finish:
        answer.finish, answer.error = "error", "the stream ended before the answer did"


def _take(chunk: _Chunk, answer: Answer, now_ns: int) -> None:
    if chunk.error is not None:
        message = chunk.error.get("message") if isinstance(chunk.error, dict) else None
        answer.finish, answer.error = "error", str(message or chunk.error)
        return
    for choice in chunk.choices:
        if text := choice.new_text:
            answer.chunks_ns.append(now_ns)
            answer.pieces.append(text)
        if choice.finish_reason is not None:
            answer.finish = "length" if choice.finish_reason == "length" else "stop"
    if chunk.usage is not None:
        answer.prompt_tokens = chunk.usage.prompt_tokens
        answer.output_tokens = chunk.usage.completion_tokens


async def _error_of(response: aiohttp.ClientResponse) -> str:
    """Status and message of an error."""
    text = (await response.text(errors="replace"))[:500]
    try:
        found = msgspec.json.decode(text)
        text = str(found["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        pass
    return f"status {response.status}: {text}"


def _text_of(error: Exception) -> str:
    return str(error) or type(error).__name__
