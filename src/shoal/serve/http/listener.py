"""Accepts connections up to the limit, replaces idle ones when it is reached, and runs their time-outs."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress

from shoal.serve.errors import TooManyConnections
from shoal.serve.http.connection import Connection
from shoal.serve.http.log_config import OncePerMinute

_ACCEPT_RETRY_S = 0.1
_ACCEPT_BATCH = 64
# Longest interval between checks of time-outs; shorter if the time-outs are short.
_MAX_CHECK_INTERVAL_S = 1.0
_log = logging.getLogger(__name__)
_log.addFilter(OncePerMinute())


class Listener:
    """Accepts connections on ``listen_socket`` until closed.

    At ``limit`` connections, a new connection replaces the one that has waited longest for a request. If none
    is waiting, the new connection gets a 503.
    create: makes the protocol of a new connection. connections: the open ones. waiting: those whose next
    request has not arrived completely, the longest wait first. timeout_s: the shortest time-out.
    """

    def __init__(
        self,
        listen_socket: socket.socket,
        create: Callable[[], Connection],
        connections: Collection[Connection],
        waiting: dict[Connection, None],
        limit: int,
        timeout_s: float,
    ) -> None:
        listen_socket.setblocking(False)
        self._listen_socket = listen_socket
        self._create = create
        self._connections = connections
        self._waiting = waiting
        self._limit = limit
        self._limit_reached = TooManyConnections(
            f"the server has {limit} connections (server.max_connections) and can take no more now"
        )
        self._connecting: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept(), name="accept")
        self._checking = asyncio.create_task(
            self._check_connections(min(_MAX_CHECK_INTERVAL_S, timeout_s / 4)), name="check connections"
        )

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(self._listen_socket)
                clients = [client, *self._accept_more()]
            except OSError as error:
                _log.warning("cannot accept a connection: %s", error.strerror or error)
                self._close_waiting()
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            for client in clients:
                try:
                    self._serve(client)
                except Exception:
                    _log.exception("a connection could not be served")
                    client.close()
            # Let the open connections run.
            await asyncio.sleep(0)
            if self._connecting:
                await asyncio.wait(tuple(self._connecting))

    def _accept_more(self) -> Iterator[socket.socket]:
        """More connections of the backlog; accepting one per turn of the event loop would be slow."""
        with suppress(OSError):
            for _ in range(_ACCEPT_BATCH - 1):
                client, _ = self._listen_socket.accept()
                client.setblocking(False)
                yield client

    def _serve(self, client: socket.socket) -> None:
        """Start to serve ``client``, or to refuse it because of the limit."""
        create = self._create
        if len(self._connections) + len(self._connecting) >= self._limit:
            _log.warning(
                "%d connections are open, the most (server.max_connections): "
                "those that wait longest for a request are closed",
                self._limit,
            )
            if not self._close_waiting():
                create = self._create_refused
        task = asyncio.create_task(self._connect(create, client))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _create_refused(self) -> Connection:
        connection = self._create()
        connection.refusal = self._limit_reached
        return connection

    async def _connect(self, create: Callable[[], Connection], client: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(create, client)
        except OSError:
            client.close()

    def _close_waiting(self) -> bool:
        """Close the connection that has waited longest for a request; returns False if none is waiting."""
        for connection in self._waiting:
            if not connection.flow.write_paused and not connection.transport.is_closing():
                connection.reject(self._limit_reached)
                return True
        return False

    async def _check_connections(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            now_s = time.monotonic()
            for connection in list(self._connections):
                connection.check(now_s)

    async def stop_accepting(self) -> None:
        """Stop accepting connections, and free the address."""
        self._accepting.cancel()
        await asyncio.wait((self._accepting, *self._connecting))
        self._listen_socket.close()

    def abort(self) -> None:
        for connection in list(self._connections):
            connection.transport.abort()

    async def aclose(self) -> None:
        """Stop accepting connections and checking time-outs."""
        await self.stop_accepting()
        self._checking.cancel()
        await asyncio.wait((self._checking,))
