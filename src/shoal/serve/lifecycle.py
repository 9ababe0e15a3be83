"""Draining: while the server shuts down, running requests finish and new ones get a 503."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.serve.errors import ShuttingDown
from shoal.serve.http.error_responses import error_response

_DRAINING = "the server is shutting down and takes no new requests"


class Lifecycle:
    """Whether the server accepts requests, and how many are running.

    The states are serving, draining (new requests are rejected) and ``expired`` (running requests must end
    now), in this order.
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
    """Counts running POST requests, operators' too, and rejects new ones while draining."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
