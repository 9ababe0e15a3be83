"""The HTTP response that runs a generation request: full or streamed, cancelled if the client disconnects."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

from anyio import to_thread
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shoal.core import ShoalError
from shoal.serve.absent_weights import weights_are_absent
from shoal.serve.backend import Backend
from shoal.serve.errors import ShuttingDown
from shoal.serve.generation import Generation, GenerationRequest, submit_request
from shoal.serve.http.error_responses import classify, error_payload, error_response
from shoal.serve.http.request_context import context_of
from shoal.serve.lifecycle import Lifecycle
from shoal.serve.metrics.server_metrics import ServerMetrics
from shoal.serve.openai.error_field_names import FieldNames, client_field_names
from shoal.serve.openai.response_bodies import ErrorBody
from shoal.serve.openai.response_formats import Format, Output

_STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    # Without this, proxies may buffer the stream.
    (b"x-accel-buffering", b"no"),
]
# Proxies and clients give up on a stream that is silent for about a minute.
_KEEP_ALIVE_S = 15.0
# Idle checks in each keep-alive interval; the interval is exact to one check.
_IDLE_CHECKS = 3
# The first check comes after an invalid request would have been refused with an HTTP error.
_FIRST_CHECK_S = 0.1
_LOADING = b": loading\n\n"
_CUT_OFF = "the server shut down before the response was complete"


@dataclass(frozen=True, slots=True)
class Framing:
    """Framing of the events of a stream."""

    event: Callable[[bytes], bytes]
    """Frames an event with this JSON."""
    end: bytes
    """Follows the last event."""
    media_type: bytes = b"text/event-stream; charset=utf-8"
    comment: bytes = b": keep-alive\n\n"
    """A comment that clients ignore; b"": the format has none."""
    error: Callable[[ErrorBody], bytes] | None = None
    """The JSON of an error; None: as in a full response."""


def _event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


_UNNAMED_EVENTS = Framing(_event, end=_event(b"[DONE]"))


class GenerationResponse(Response):
    """Runs a generation request and sends its output. A client that disconnects cancels the request.

    The status of a stream is sent with its first event, or earlier where it waits for its service or weights
    to be loaded. So an error before that is an HTTP error, and a later error is the last event of the stream.
    """

    def __init__(
        self,
        request: GenerationRequest,
        format: Format,
        stream: bool,
        backend: Backend,
        metrics: ServerMetrics,
        lifecycle: Lifecycle,
        framing: Framing = _UNNAMED_EVENTS,
    ) -> None:
        super().__init__()
        self._request = request
        self._format = format
        self._stream = stream
        self._backend = backend
        self._metrics = metrics
        self._lifecycle = lifecycle
        self._framing = framing
        self._field_names: FieldNames = {}
        self._started = False
        self._sent_event = False  # since the last idle check

    def translate(self, wrap: Callable[[Format], Format], framing: Framing, field_names: FieldNames) -> None:
        """Answer in another API's format: ``wrap`` of the present one. field_names: its names in errors."""
        self._format, self._framing, self._field_names = wrap(self._format), framing, field_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run until the output is complete, the client disconnects or the drain timeout is over."""
        self._context = context_of(scope)
        self._context.sampling = self._request.sampling
        generating = asyncio.create_task(self._run_named(send))
        disconnected = asyncio.create_task(_wait_disconnected(receive))
        expired = asyncio.create_task(self._lifecycle.expired.wait())
        tasks = [generating, disconnected, expired]
        if self._stream:
            tasks.append(asyncio.create_task(self._keep_alive(send)))
        try:
            await asyncio.wait(tasks[:3], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended = generating.done()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        error = generating.exception() if ended else ShuttingDown(_CUT_OFF)
        connected = ended or not disconnected.done() or disconnected.cancelled()
        if not connected:
            self._context.why = "the client left"
        elif error is not None:
            await self._send_error(error, scope, receive, send)

    async def _run_named(self, send: Send) -> None:
        with client_field_names(self._field_names):
            await self._run(send)

    async def _run(self, send: Send) -> None:
        context = self._context
        async with submit_request(self._backend, self._request, self._metrics) as generation:
            context.count_tokens(generation.usage().prompt_tokens, 0)
            context.timelines += generation.timelines
            try:
                await (self._send_stream if self._stream else self._send_full)(generation, send)
            finally:
                context.count_tokens(0, generation.usage().completion_tokens)
                self._record_times(generation)

    async def _send_full(self, generation: Generation, send: Send) -> None:
        outputs = await collect(generation)
        self._record_times(generation)
        # In a thread: a response may have megabytes of log-probabilities.
        await self._send_body(send, await to_thread.run_sync(self._format.full, outputs, generation.usage()))

    async def _send_body(self, send: Send, body: bytes) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._start(send, headers)
        await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, generation: Generation, send: Send) -> None:
        async with aclosing(generation.deltas(self._request.pace_s)) as deltas:
            async for index, delta in deltas:
                chunks = self._format.chunks(index, delta, generation.choice_usage(index))
                events = b"".join(map(self._framing.event, chunks))
                if not events:
                    continue
                if not self._started:
                    await self._start_stream(send)
                self._sent_event = True
                await send({"type": "http.response.body", "body": events, "more_body": True})
        self._record_times(generation)
        usage = self._format.usage_chunk(generation.usage())
        end = (b"" if usage is None else self._framing.event(usage)) + self._framing.end
        if not self._started:
            await self._start_stream(send)
        self._sent_event = True
        await send({"type": "http.response.body", "body": end})

    async def _keep_alive(self, send: Send) -> None:
        """Start a stream that waits for loading, and send a comment when it is silent for long."""
        silent_checks = 0
        await asyncio.sleep(_FIRST_CHECK_S)
        while True:
            if not self._started and self._waits_for_loading():
                await self._start_stream(send)
                await self._send_comment(send, _LOADING)
            await asyncio.sleep(_KEEP_ALIVE_S / _IDLE_CHECKS)
            silent_checks = 0 if self._sent_event or not self._started else silent_checks + 1
            self._sent_event = False
            if silent_checks == _IDLE_CHECKS:
                silent_checks = 0
                await self._send_comment(send, self._framing.comment)

    def _waits_for_loading(self) -> bool:
        service = self._request.service
        return self._backend.waits_for_load(service) or weights_are_absent(self._backend, service)

    async def _send_comment(self, send: Send, comment: bytes) -> None:
        if self._framing.comment:
            await send({"type": "http.response.body", "body": comment, "more_body": True})

    def _record_times(self, generation: Generation) -> None:
        self._context.queue_s, self._context.first_token_s = generation.first_choice_times()
        self._context.load_ns = generation.load_ns

    async def _start_stream(self, send: Send) -> None:
        await self._start(send, [(b"content-type", self._framing.media_type), *_STREAM_HEADERS])

    async def _start(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_error(self, error: BaseException, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._started:
            if not isinstance(error, ShoalError):
                raise error
            await error_response(error)(scope, receive, send)
        elif self._stream:
            self._context.why = str(error)
            write = self._framing.error
            payload = error_payload(error, scope) if write is None else write(classify(error)[1])
            await send({"type": "http.response.body", "body": self._framing.event(payload)})
        else:
            raise error


async def collect(generation: Generation) -> list[Output]:
    request = generation.request
    outputs = [Output() for _ in range(len(request.prompts) * request.sampling.n)]
    async with aclosing(generation.deltas()) as deltas:
        async for index, delta in deltas:
            outputs[index].add(delta)
    return outputs


async def _wait_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
