"""Runs the HTTP server (uvicorn) until a stop signal, and drains it."""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from shoal.core import Service
from shoal.engine.options import EngineOptions
from shoal.serve.admin.kept_changes import KeptChanges
from shoal.serve.admin.restore import restore_changes
from shoal.serve.app import create_app
from shoal.serve.backend import Backend, TextCodec
from shoal.serve.cpu_workers import Workers
from shoal.serve.http.address import connection_limit, listen
from shoal.serve.http.allowed_hosts import allowed_hosts
from shoal.serve.http.connection import Connection
from shoal.serve.http.exposure import log_warnings
from shoal.serve.http.listener import Listener
from shoal.serve.http.log_config import log_config
from shoal.serve.lifecycle import Lifecycle
from shoal.serve.model_download import PullService
from shoal.serve.options import ServerOptions
from shoal.serve.stop_signal import StopSignal
from shoal.serve.tracing import Tracing

_log = logging.getLogger(__name__)
# After the drain timeout, requests end quickly; connections that are still open after this time are closed.
_ABORT_DELAY_S = 2
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
    on_ready: Callable[[str], None] | None = None,
    workers: Workers | None = None,
    engine_options: EngineOptions | None = None,
    pull: PullService | None = None,
    tracing: Tracing | None = None,
    kept: KeptChanges | None = None,
) -> None:
    """Serve HTTP until ``stop`` is requested, then drain.

    While draining, new requests get a 503. Running requests continue for ``options.drain_s``, or until a
    second stop request, and then end with an error. on_ready: called with the base URL once the server
    accepts requests; kept changes of operators are made again after that. workers, engine_options, pull,
    tracing, kept: see ``create_app``. Raises ConfigError if the address is in use, or if the process can open
    no connections.
    """
    limit = connection_limit(options.max_connections)
    listen_socket = listen(options)
    host, port = listen_socket.getsockname()[:2]
    lifecycle = Lifecycle()
    hosts = allowed_hosts(options.allowed_hosts, options.host, host)
    app = create_app(
        backend, tokenizers, services, options, lifecycle, workers, hosts, engine_options, pull, tracing, kept
    )
    server = _Server(_uvicorn_config(app, options))
    log_warnings(options, host)
    # No sockets for uvicorn: the listener accepts the connections.
    serving = asyncio.create_task(server.serve(sockets=[]))
    while not (server.started or serving.done()):
        await asyncio.sleep(_STARTUP_POLL_S)
    app.state.feed.start()
    count_refused = app.state.metrics.count_refused_connection
    listener = _create_listener(listen_socket, server, limit, options, count_refused)
    restoring = asyncio.create_task(restore_changes(app.state.admin))
    try:
        if on_ready is not None:
            on_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        await _wait_first(serving, stop.drain.wait())
        lifecycle.drain()
        if lifecycle.active:
            _log.warning(
                "stopping: waiting up to %g s for requests under way (%d), no new ones are taken; "
                "a second Ctrl-C (or SIGTERM) ends them at once",
                options.drain_s,
                lifecycle.active,
            )
        await _wait_first(serving, lifecycle.wait_idle(), stop.abort.wait(), timeout_s=options.drain_s)
    finally:
        restoring.cancel()
        lifecycle.expire()
        await listener.stop_accepting()
        server.should_exit = True
        abort_timer = asyncio.get_running_loop().call_later(_ABORT_DELAY_S, listener.abort)
        await serving
        abort_timer.cancel()
        await listener.aclose()


def _uvicorn_config(app: ASGIApp, options: ServerOptions) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="off",
        http="httptools",
        ws="none",
        log_config=log_config(options.log_level),
        access_log=False,
        # Any client could write a forged address into the log.
        proxy_headers=False,
        # Later than ``listener.abort``.
        timeout_graceful_shutdown=_ABORT_DELAY_S + 1,
    )


def _create_listener(
    listen_socket: socket.socket,
    server: uvicorn.Server,
    limit: int,
    options: ServerOptions,
    count_refused: Callable[[], None],
) -> Listener:
    waiting: dict[Connection, None] = {}
    state = server.server_state
    uvicorn_arguments = {"config": server.config, "server_state": state, "app_state": {}}
    return Listener(
        listen_socket,
        partial(Connection, options, waiting, count_refused, **uvicorn_arguments),
        cast(set[Connection], state.connections),
        waiting,
        limit,
        min(options.read_timeout_s, options.write_timeout_s, options.keep_alive_s),
    )


async def _wait_first(
    serving: "asyncio.Task[None]", *events: Coroutine[object, object, object], timeout_s: float | None = None
) -> None:
    """Wait until one of ``events`` happens, ``serving`` ends or ``timeout_s`` is over."""
    waits = [asyncio.create_task(event) for event in events]
    try:
        await asyncio.wait((serving, *waits), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
