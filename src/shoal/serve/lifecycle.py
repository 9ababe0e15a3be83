"""The states of a server: it serves, drains and ends."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.serve.errors import ShuttingDown
from shoal.serve.http.error_responses import error_response

_DRAINING = "the server is shutting down and takes no new requests"


class Lifecycle:
    """Whether the server takes requests, and how many are running.

    It only goes forward: serving, then draining (new requests are rejected), then ``expired`` (running
    requests must end now).
    """

    def __init__(self) -> None:
        self.draining = False
        self.expired = asyncio.Event()
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def drain(self) -> None:
        """Reject new requests from now on."""
        self.draining = True

    def expire(self) -> None:
        """End all running requests."""
        self.draining = True
        self.expired.set()

    @property
    def active(self) -> int:
        """Number of running requests."""
        return self._active

    async def wait_idle(self) -> None:
        """Wait until no request is running."""
        await self._idle.wait()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request as running inside the block; raises ShuttingDown while draining."""
        if self.draining:
            raise ShuttingDown(_DRAINING)
        self._active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()


class LifecycleMiddleware:
    """Counts POST requests, operators' too, until their answers end, and rejects them while draining."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._lifecycle.draining:
            await error_response(ShuttingDown(_DRAINING))(scope, receive, send)
            return
        with self._lifecycle.request():
            try:
                await self._app(scope, receive, send)
            except asyncio.CancelledError:
                if not self._lifecycle.expired.is_set():
                    raise
                # The server ends and has closed the connection; the request itself did not fail.
