"""Listens, serves and drains."""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager

import uvicorn

from shoal.core import ConfigError, Service
from shoal.serve.app import create_app
from shoal.serve.backend import Backend, TextCodec
from shoal.serve.lifecycle import Lifecycle, StopSignal
from shoal.serve.options import ServerOptions
from shoal.serve.workers import Workers

_log = logging.getLogger(__name__)
# Once told to end, requests do within moments; a client that does not read is cut off after this.
_LAST_WORDS_S = 2
# Longer than clients keep idle connections, so that these close them and not we under their hands.
_KEEP_ALIVE_S = 75
_STARTUP_POLL_S = 0.01


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_until_stopped(
    backend: Backend,
    tokenizers: Mapping[str, TextCodec],
    services: Sequence[Service],
    options: ServerOptions,
    stop: StopSignal,
    ready: Callable[[str], None] | None = None,
    workers: Workers | None = None,
) -> None:
    """Serve HTTP until ``stop`` is asked for, then drain.

    Draining turns new requests away with a 503 and lets those under way go on for
    ``options.drain_s``, or until ``stop`` is asked for again; what remains ends with an error. ready
    is called with the base URL when requests are taken. workers: as ``create_app`` has it. Raises
    ConfigError if the address is taken.
    """
    listener = _listen(options)
    lifecycle = Lifecycle()
    app = create_app(backend, tokenizers, services, options, lifecycle, workers)
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_level="info" if options.access_log else "warning",
        access_log=options.access_log,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_LAST_WORDS_S,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not (server.started or serving.done()):
            await asyncio.sleep(_STARTUP_POLL_S)
        if ready is not None and server.started:
            host, port = listener.getsockname()[:2]
            ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        await _first(serving, stop.drain.wait())
        lifecycle.drain()
        if lifecycle.active and backend.alive:
            _log.warning(
                "stopping: waiting up to %g s for %d requests under way, no new ones are taken; "
                "a second Ctrl-C (or SIGTERM) ends them at once",
                options.drain_s,
                lifecycle.active,
            )
        await _first(serving, lifecycle.wait_idle(), stop.abort.wait(), timeout_s=options.drain_s)
    finally:
        lifecycle.expire()
        server.should_exit = True
        await serving


def check_address(options: ServerOptions) -> None:
    """Raise ConfigError if the address cannot be listened on."""
    _listen(options).close()


def _listen(options: ServerOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family, backlog=2048)
    except OSError as error:
        where = f"{options.host}:{options.port}"
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{where} is in use; choose another port, or 0 for a free one") from None
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from None


async def _first(
    serving: "asyncio.Task[None]", *events: Coroutine[object, object, object], timeout_s: float | None = None
) -> None:
    """Wait until one of ``events`` happens, ``serving`` ends or the time is over."""
    waits = [asyncio.create_task(event) for event in events]
    try:
        await asyncio.wait((serving, *waits), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
