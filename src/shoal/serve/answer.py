"""The response that runs a call in the engine: whole or streamed, ended early when nobody listens."""

import asyncio
import logging
from contextlib import aclosing

from anyio import to_thread
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shoal.core import ShoalError
from shoal.serve.backend import Backend
from shoal.serve.errors import ShuttingDown, error_payload, error_response
from shoal.serve.formats import Format, Output
from shoal.serve.generation import Call, Generation, generating
from shoal.serve.lifecycle import Lifecycle
from shoal.serve.metrics import ServerMetrics

_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies would otherwise hold back what is meant to be seen at once.
    (b"x-accel-buffering", b"no"),
]
_CUT_OFF = "the server shut down before the answer was complete"
_log = logging.getLogger(__name__)


class Answer(Response):
    """Runs ``call`` and writes what comes of it; a client that disconnects cancels it.

    The status of a stream is sent with its first event, so an error before that is still an HTTP
    error; a later one is the stream's last event.
    """

    def __init__(
        self,
        call: Call,
        format: Format,
        stream: bool,
        backend: Backend,
        metrics: ServerMetrics,
        lifecycle: Lifecycle,
    ) -> None:
        super().__init__()
        self._call = call
        self._format = format
        self._streamed = stream
        self._backend = backend
        self._metrics = metrics
        self._lifecycle = lifecycle
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run until done, until the client is gone or until the server may wait no longer."""
        work = asyncio.create_task(self._run(send))
        gone = asyncio.create_task(_disconnected(receive))
        expired = asyncio.create_task(self._lifecycle.expired.wait())
        try:
            await asyncio.wait((work, gone, expired), return_when=asyncio.FIRST_COMPLETED)
        finally:
            over = work.done()
            for task in (work, gone, expired):
                task.cancel()
            await asyncio.gather(work, gone, expired, return_exceptions=True)
        error = work.exception() if over else ShuttingDown(_CUT_OFF)
        listening = over or not gone.done() or gone.cancelled()
        if error is not None and listening:
            await self._fail(error, scope, receive, send)

    async def _run(self, send: Send) -> None:
        async with generating(self._backend, self._call, self._metrics) as generation:
            await (self._send_stream if self._streamed else self._send_whole)(generation, send)

    async def _send_whole(self, generation: Generation, send: Send) -> None:
        outputs = [Output() for _ in range(len(self._call.prompts) * self._call.sampling.n)]
        async with aclosing(generation.deltas()) as deltas:
            async for index, delta in deltas:
                outputs[index].add(delta)
        # An answer may have megabytes of log-probabilities.
        body = await to_thread.run_sync(self._format.whole, outputs, generation.usage())
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._start(send, headers)
        await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, generation: Generation, send: Send) -> None:
        async with aclosing(generation.deltas()) as deltas:
            async for index, delta in deltas:
                chunks = self._format.chunks(index, delta, generation.choice_usage(index))
                events = b"".join(map(_event, chunks))
                if not events:
                    continue
                if not self._started:
                    await self._start(send, _EVENT_STREAM)
                await send({"type": "http.response.body", "body": events, "more_body": True})
        usage = self._format.last_chunk(generation.usage())
        end = (_event(usage) if usage is not None else b"") + _event(b"[DONE]")
        await send({"type": "http.response.body", "body": end})

    async def _start(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _fail(self, error: BaseException, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._started:
            if not isinstance(error, ShoalError):
                raise error
            await error_response(error)(scope, receive, send)
        elif self._streamed:
            await send({"type": "http.response.body", "body": _event(error_payload(error))})
        else:
            raise error


def _event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
