"""One HTTP connection: uvicorn's, with an end to waiting for its client."""

import math
import socket
import time
from contextlib import suppress
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from shoal.core import InvalidRequest
from shoal.serve.errors import RequestTimeout, ShuttingDown, error_response
from shoal.serve.options import ServerOptions

# Within a time-out clients need not be fast; over many of them they must send or take so many bytes a second.
_SLOWEST_BYTES_PER_S = 1024
# Headers, trailers or chunk extensions, read without coming to anything.
_MAX_HEAD_BYTES = 64 * 2**10
# Requests sent ahead while an earlier one is answered.
_MAX_PIPELINED = 8
# A body may have so many chunks, and more only if they have so many bytes on average: each costs time.
_MAX_SMALL_CHUNKS = 8192
_SMALL_CHUNK_BYTES = 64


class Connection(HttpToolsProtocol):
    """Reads requests of a client that is slow or worse, and writes answers to it.

    ``check``, to be called now and then, ends the connection when a whole request has not come or an
    answer has not been taken in time; the engine's request is cancelled then as when a client leaves.
    Bytes win time, but never more than the time-out. waiting: shared by all connections, in it are those
    whose next request is not wholly here, the one that waits longest first.
    """

    def __init__(self, options: ServerOptions, waiting: dict["Connection", None], **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._options = options
        self._waiting = waiting
        self._begun = False  # whether bytes of the next request have come
        self._in_body = False
        self._head_bytes = 0  # read since something came of it
        self._body_bytes = 0  # of the data that is being parsed
        self._small_chunks = 0.0  # of this body; large ones make up for them
        self._read_deadline_s = math.inf
        self._write_deadline_s = math.inf
        self._unsent_bytes = 0
        self._running: RequestResponseCycle | None = None  # the request that was begun to be answered last

    def connection_made(self, transport: Any) -> None:
        """Wait for the first request."""
        super().connection_made(transport)
        # Every byte that the client has not taken holds back what comes next.
        transport.set_write_buffer_limits(high=0)
        with suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._waiting[self] = None
        self._read_deadline_s = time.monotonic() + self._options.read_timeout_s

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel what is under way."""
        self._waiting.pop(self, None)
        self._tell_gone()
        super().connection_lost(exc)

    def _tell_gone(self) -> None:
        """Let the request under way know that nobody listens; uvicorn tells only the latest to arrive."""
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def check(self, now_s: float) -> None:
        """End the connection if its client is overdue; now_s: on the monotonic clock."""
        if self.flow.write_paused:
            unsent = self.transport.get_write_buffer_size()
            won_s = max(0, self._unsent_bytes - unsent) / _SLOWEST_BYTES_PER_S
            self._unsent_bytes = unsent
            self._write_deadline_s = min(
                self._write_deadline_s + won_s, now_s + self._options.write_timeout_s
            )
            if now_s > self._write_deadline_s:
                self.transport.abort()
        if now_s <= self._read_deadline_s:
            return
        if self._client_waits():
            self._read_deadline_s = now_s + self._options.read_timeout_s
        else:
            self.refuse(RequestTimeout("the request took too long to arrive"))

    def _client_waits(self) -> bool:
        """Whether an earlier request is answered, or the client's bytes are left unread."""
        return self._answering() or self.flow.read_paused

    def _answering(self) -> bool:
        """Whether a request that is wholly here has not got all of its answer."""
        running = self._running
        return running is not None and not running.response_complete and not running.more_body

    def refuse(self, error: Exception) -> None:
        """Answer the request that is not wholly here with ``error``, if it is not too late, and close."""
        if self.transport.is_closing():
            return
        running = self._running
        answered = running is not None and running.response_started and not running.response_complete
        if self._begun and not answered and not self._answering():
            self.transport.write(closing_answer(error))
        self._tell_gone()
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        self.transport.close()

    def shutdown(self) -> None:
        """End now if idle, after the answer if one is under way; for the server."""
        if self._answering():
            super().shutdown()
        else:
            self.refuse(ShuttingDown("the server shut down before the whole request had arrived"))

    def data_received(self, data: bytes) -> None:
        """Read on."""
        if not self._begun:
            self._begun = True
            self._read_deadline_s = time.monotonic() + self._options.read_timeout_s
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_body:
            won_s = self._body_bytes / _SLOWEST_BYTES_PER_S
            latest_s = time.monotonic() + self._options.read_timeout_s
            self._read_deadline_s = min(self._read_deadline_s + won_s, latest_s)
        self._body_bytes = 0
        if self._head_bytes > _MAX_HEAD_BYTES:
            self.refuse(
                InvalidRequest(f"headers are limited to {_MAX_HEAD_BYTES} bytes", code="invalid_http")
            )

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self.refuse(InvalidRequest("this is not a request that HTTP/1.1 allows", code="invalid_http"))

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_body = False
        self._small_chunks = 0.0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a part of the target; raises ValueError, which becomes a 400."""
        if not url.isascii():
            raise ValueError("a request target must be ASCII")
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; trailers mean nothing to us."""
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer; raises ValueError, which becomes a 400."""
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise ValueError("too many requests sent ahead")
        super().on_headers_complete()
        self._in_body = True
        self._head_bytes = 0
        self._read_deadline_s = time.monotonic() + self._options.read_timeout_s

    def on_body(self, body: bytes) -> None:
        """Take a part of the body; raises ValueError, which becomes a 400."""
        # Little is done here, since chunks may be small.
        self._head_bytes = 0
        self._body_bytes += len(body)
        self._small_chunks += 1 - len(body) / _SMALL_CHUNK_BYTES
        if self._small_chunks > _MAX_SMALL_CHUNKS:
            raise ValueError("too many small chunks")
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is wholly here."""
        super().on_message_complete()
        self._begun = self._in_body = False
        self._head_bytes = 0
        if self.cycle.response_complete:
            self._await_next()
        else:
            self._waiting.pop(self, None)
            self._read_deadline_s = math.inf

    def on_response_complete(self) -> None:
        """Go on to the next request."""
        if not self.pipeline:
            self._await_next()
        super().on_response_complete()
        # Of two timers one is enough.
        self._unset_keepalive_if_required()

    def _await_next(self) -> None:
        patience_s = self._options.read_timeout_s if self._begun else self._options.keep_alive_s
        self._waiting[self] = None
        self._read_deadline_s = time.monotonic() + patience_s

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        """The client has not taken what was written."""
        super().pause_writing()
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._write_deadline_s = time.monotonic() + self._options.write_timeout_s


def closing_answer(error: Exception) -> bytes:
    """A whole HTTP response that tells ``error`` and ends the connection."""
    answer = error_response(error)
    headers = [*((name, value) for name, value in answer.raw_headers if name != b"connection")]
    lines = [name + b": " + value + b"\r\n" for name, value in [*headers, (b"connection", b"close")]]
    return b"".join([STATUS_LINE[answer.status_code], *lines, b"\r\n", answer.body])
