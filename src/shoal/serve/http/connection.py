"""One HTTP connection: uvicorn's, with time-outs for slow clients and limits on headers and chunks."""

import math
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from httptools import HttpParserCallbackError
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from shoal.core import InvalidRequest
from shoal.serve.errors import (
    RequestTimeout,
    ShuttingDown,
    TooManyConnections,
    UnknownTransferCoding,
)
from shoal.serve.http.content_coding import header_entries
from shoal.serve.http.error_responses import error_response, shorten
from shoal.serve.options import ServerOptions

# Each second of a longer transfer must bring at least this many bytes.
_MIN_BYTES_PER_S = 1024
# Bytes of headers, trailers or chunk extensions between bytes of a body.
_MAX_HEAD_BYTES = 64 * 2**10
_LARGE_HEAD = f"headers are limited to {_MAX_HEAD_BYTES} bytes"
# Other codings, such as gzip, would leave the body encoded.
_TRANSFER_CODINGS = ("chunked", "identity")
_MAX_QUOTED_CHARACTERS = 80
# Requests that a client may send ahead of responses.
_MAX_PIPELINED = 8
# Chunks cost time: a body may have more than this many small chunks only if its mean chunk is larger.
_MAX_SMALL_CHUNKS = 8192
_SMALL_CHUNK_BYTES = 64
# Bytes that are read and dropped of a refused request.
_MAX_SKIPPED_BYTES = 2**16
# Retry-After of a connection that is refused because there are too many.
_RETRY_AFTER_S = 1
# How long a refused connection stays open for data that is on its way, if enough file descriptors are free.
_LINGER_S = 1.0
_RESERVED_FILES = 16


class Connection(HttpToolsProtocol):
    """A connection with time-outs for a slow client.

    ``check`` is called regularly. It ends the connection if a request did not arrive completely, or a
    response was not read, in time. A running request is cancelled then, as when a client disconnects.
    Every transferred byte extends the deadline, but never beyond the full time-out.
    waiting: shared by all connections; holds those whose next request has not arrived completely, the longest
    wait first. count_refused: called for each connection that is refused because there are too many.
    """

    def __init__(
        self,
        options: ServerOptions,
        waiting: dict["Connection", None],
        count_refused: Callable[[], None],
        **uvicorn: Any,
    ) -> None:
        super().__init__(**uvicorn)
        self.refusal: TooManyConnections | None = None
        """The error for the client if the connection limit is reached; None: the connection is served."""
        self._options = options
        self._waiting = waiting
        self._count_refused = count_refused
        self._request_started = False  # whether bytes of the next request have arrived
        self._in_body = False
        self._head_bytes = 0  # since the last byte of a body
        self._body_bytes = 0  # in the data that is being parsed
        self._small_chunks = 0.0  # of this body; large chunks offset them
        self._read_deadline_s = math.inf
        self._write_deadline_s = math.inf
        self._unsent_bytes = 0
        self._running: RequestResponseCycle | None = None  # the request whose response started last
        self._parse_error: Exception | None = None  # the error in the request that is being parsed
        self._final_error: Exception | None = None  # response to an invalid request, after those before it
        self._is_refused = False  # the response was written, and further data is dropped

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Writing pauses until the client has read every byte.
        transport.set_write_buffer_limits(high=0)
        with suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._waiting[self] = None
        self._read_deadline_s = time.monotonic() + self._options.read_timeout_s
        if self.refusal is not None:
            self.reject(self.refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the running request."""
        self._waiting.pop(self, None)
        self._notify_disconnect()
        super().connection_lost(exc)

    def _notify_disconnect(self) -> None:
        """Notify the running request of the disconnect; uvicorn notifies only the latest request."""
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def check(self, now_s: float) -> None:
        """End the connection if a deadline has passed; now_s: on the monotonic clock."""
        if self.flow.write_paused:
            unsent = self.transport.get_write_buffer_size()
            extension_s = max(0, self._unsent_bytes - unsent) / _MIN_BYTES_PER_S
            self._unsent_bytes = unsent
            self._write_deadline_s = min(
                self._write_deadline_s + extension_s, now_s + self._options.write_timeout_s
            )
            if now_s > self._write_deadline_s:
                self.transport.abort()
        if now_s <= self._read_deadline_s:
            return
        if self._is_client_waiting():
            self._read_deadline_s = now_s + self._options.read_timeout_s
        else:
            self.reject(RequestTimeout("the request took too long to arrive"))

    def _is_client_waiting(self) -> bool:
        """Whether the client waits for a response, or for this server to read."""
        return self._is_responding() or self.flow.read_paused

    def _is_responding(self) -> bool:
        """Whether a request has arrived completely and its response is incomplete."""
        running = self._running
        return running is not None and not running.response_complete and not running.more_body

    def reject(self, error: Exception) -> None:
        """Answer an incomplete request with ``error`` if no response has started, and close.

        TooManyConnections is sent even before a request has arrived, which may be on its way. Data that the
        client does not read at once is lost.
        """
        if self.transport.is_closing():
            return
        running = self._running
        response_started = running is not None and running.response_started and not running.response_complete
        too_many = isinstance(error, TooManyConnections)
        expects_response = self._request_started or (too_many and running is None)
        responds = expects_response and not response_started and not self._is_responding()
        if responds:
            self.transport.write(closing_response(error))
            if too_many:
                self._count_refused()
        self._notify_disconnect()
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        elif responds and too_many and self._has_spare_files():
            self._linger()
        else:
            self._skip_arrived()
            self.transport.close()

    def _linger(self) -> None:
        """Let the client close, drop what it still sends, and do not count the connection any more.

        Data that arrives at a closed socket resets the connection, and the client would lose the response.
        """
        self._is_refused = True
        self._waiting.pop(self, None)
        self.connections.discard(self)
        self.loop.call_later(_LINGER_S, self.transport.close)
        try:
            self.transport.write_eof()
        except OSError:  # the client has reset the connection
            self.transport.abort()

    def _has_spare_files(self) -> bool:
        """Whether more than the reserved file descriptors are free; a new one gets the lowest free number."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        try:
            number = os.dup(self.transport.get_extra_info("socket").fileno())
        except OSError:
            return False
        os.close(number)
        return limit == resource.RLIM_INFINITY or number < limit - _RESERVED_FILES

    def _skip_arrived(self) -> None:
        """Drop received data: closing a socket with unread data would reset the connection, too."""
        with suppress(OSError):
            os.read(self.transport.get_extra_info("socket").fileno(), _MAX_SKIPPED_BYTES)

    def shutdown(self) -> None:
        """End the connection, after a running response; called by uvicorn."""
        if self._is_responding():
            super().shutdown()
        else:
            self.reject(ShuttingDown("the server shut down before the whole request had arrived"))

    def data_received(self, data: bytes) -> None:
        """Parse the data, and extend the deadline of a body."""
        if self._is_refused or self._final_error is not None:
            return
        self._begin_request()
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_body:
            extension_s = self._body_bytes / _MIN_BYTES_PER_S
            max_deadline_s = time.monotonic() + self._options.read_timeout_s
            self._read_deadline_s = min(self._read_deadline_s + extension_s, max_deadline_s)
        self._body_bytes = 0
        if self._head_bytes > _MAX_HEAD_BYTES:
            self._refuse(_invalid(_LARGE_HEAD))

    def _begin_request(self) -> None:
        if not self._request_started:
            self._request_started = True
            self._read_deadline_s = time.monotonic() + self._options.read_timeout_s

    def send_400_response(self, msg: str) -> None:
        """Reject data that is not HTTP; called while the parser's exception is handled."""
        error = sys.exception()
        # The message of a callback's error says nothing about the data.
        why = "" if error is None or isinstance(error, HttpParserCallbackError) else f": {error}"
        self._refuse(self._parse_error or _invalid(f"this is not a request that HTTP/1.1 allows{why}"))

    def _refuse(self, error: Exception) -> None:
        """Reject the request that is being parsed, after the responses to those before it."""
        if self._is_responding():
            self._final_error = error
        else:
            self.reject(error)

    def on_message_begin(self) -> None:
        self._begin_request()
        self._in_body = False
        self._small_chunks = 0.0
        super().on_message_begin()

    def _unsupported_upgrade_warning(self) -> None:
        """No warning: the upgrade is ignored, and WebSocket support would not help."""

    def on_url(self, url: bytes) -> None:
        """Append to the target; a ValueError becomes a 400."""
        if not url.isascii():
            raise ValueError("a request target must be ASCII")
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; trailers are ignored."""
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request; a ValueError becomes a 400."""
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._fail_parsing(_invalid(f"at most {_MAX_PIPELINED} requests may be sent ahead of responses"))
        # ``_head_bytes`` may include later data, so count again.
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > _MAX_HEAD_BYTES:
            self._fail_parsing(_invalid(_LARGE_HEAD))
        for coding in header_entries(self.headers, b"transfer-encoding"):
            if coding not in _TRANSFER_CODINGS:
                self._fail_parsing(
                    UnknownTransferCoding(
                        f"transfer coding {shorten(coding, _MAX_QUOTED_CHARACTERS)!r} is not known here; "
                        "send the body as it is, with Content-Length or Transfer-Encoding: chunked"
                    )
                )
        super().on_headers_complete()
        self._in_body = True
        self._head_bytes = 0
        self._read_deadline_s = time.monotonic() + self._options.read_timeout_s

    def _fail_parsing(self, problem: Exception) -> NoReturn:
        """Raise a ValueError, so that parsing stops and the response is ``problem``."""
        self._parse_error = problem
        raise ValueError(str(problem))

    def on_body(self, body: bytes) -> None:
        """Append to the body; a ValueError becomes a 400."""
        # Fast, since chunks may be small.
        self._head_bytes = 0
        self._body_bytes += len(body)
        self._small_chunks += 1 - len(body) / _SMALL_CHUNK_BYTES
        if self._small_chunks > _MAX_SMALL_CHUNKS:
            self._fail_parsing(_invalid("the body comes in too many small chunks"))
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._request_started = self._in_body = False
        self._head_bytes = 0
        if self.cycle.response_complete:
            self._await_next()
        else:
            self._waiting.pop(self, None)
            self._read_deadline_s = math.inf

    def on_response_complete(self) -> None:
        """Continue with the next request, unless it is invalid."""
        if self._final_error is not None and not self._has_waiting_request():
            self.pipeline.clear()
            self.transport.write(closing_response(self._final_error))
            self._skip_arrived()
            self.transport.close()
        elif not self.pipeline:
            self._await_next()
        super().on_response_complete()
        # The read deadline replaces uvicorn's own timer.
        self._unset_keepalive_if_required()

    def _has_waiting_request(self) -> bool:
        """Whether a complete request waits for the responses to those before it."""
        return bool(self.pipeline) and not self.pipeline[-1][0].more_body

    def _await_next(self) -> None:
        timeout_s = self._options.read_timeout_s if self._request_started else self._options.keep_alive_s
        self._waiting[self] = None
        self._read_deadline_s = time.monotonic() + timeout_s

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        """Start the write time-out."""
        super().pause_writing()
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._write_deadline_s = time.monotonic() + self._options.write_timeout_s


def _invalid(problem: str) -> InvalidRequest:
    return InvalidRequest(problem, code="invalid_http")


def closing_response(error: Exception) -> bytes:
    """The bytes of an HTTP response for ``error`` that closes the connection."""
    response = error_response(error)
    if isinstance(error, TooManyConnections):
        response.headers["Retry-After"] = str(_RETRY_AFTER_S)
    headers = [*((name, value) for name, value in response.raw_headers if name != b"connection")]
    lines = [name + b": " + value + b"\r\n" for name, value in [*headers, (b"connection", b"close")]]
    return b"".join([STATUS_LINE[response.status_code], *lines, b"\r\n", response.body])
