"""Accepts connections, no more than there may be, and looks after those that there are."""

import asyncio
import logging
import resource
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress

import psutil

from shoal.core import ConfigError
from shoal.serve.connection import Connection, closing_answer
from shoal.serve.errors import TooManyConnections
from shoal.serve.logs import OncePerMinute

_MOST_CONNECTIONS = 4096
# Descriptors for what the process opens beside connections: worker processes, files, the engine.
_RESERVED_FILES = 32
_ACCEPT_RETRY_S = 0.1
_ACCEPTED_AT_ONCE = 64
# Time-outs are noticed with this delay; shorter where they are short themselves.
_LONGEST_SWEEP_S = 1.0
_log = logging.getLogger(__name__)
_log.addFilter(OncePerMinute())


def connection_limit(wanted: int | None) -> int:
    """How many connections there may be at once: ``wanted``, or as many as the process can open.

    Raises ConfigError if they are more than that, or if there is no room for any.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return wanted or _MOST_CONNECTIONS
    room = soft - psutil.Process().num_fds() - _RESERVED_FILES
    if room < (wanted or 1):
        raise ConfigError(
            f"the process may open {soft} files, which has room for {max(0, room)} connections and not for "
            f"{wanted or 'any'} (server.max_connections); raise the limit with `ulimit -n`"
        )
    return wanted or min(room, _MOST_CONNECTIONS)


class Listener:
    """Accepts connections on ``listening`` until closed.

    make: a new connection's protocol. connections: those that are open. waiting: those of them whose next
    request is not wholly here, the longest wait first; when there are ``limit`` connections, they make
    room for new ones. Where nobody can, new ones get a 503. timeout_s: the shortest time-out of connections.
    """

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[], Connection],
        connections: Collection[Connection],
        waiting: dict[Connection, None],
        limit: int,
        timeout_s: float,
    ) -> None:
        listening.setblocking(False)
        self._listening = listening
        self._make = make
        self._connections = connections
        self._waiting = waiting
        self._limit = limit
        self._full = TooManyConnections(
            f"the server has {limit} connections (server.max_connections) and can take no more now"
        )
        self._turned_away = closing_answer(self._full)
        self._connecting: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept(), name="accept")
        self._sweeping = asyncio.create_task(self._sweep(min(_LONGEST_SWEEP_S, timeout_s / 4)), name="sweep")

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(self._listening)
                clients = [client, *self._accept_more()]
            except OSError as error:
                _log.warning("cannot accept a connection: %s", error.strerror or error)
                self._make_room()
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            for client in clients:
                self._take(client)
            # Connections that there are have their turn.
            await asyncio.sleep(0)
            if self._connecting:
                await asyncio.wait(tuple(self._connecting))

    def _accept_more(self) -> Iterator[socket.socket]:
        """Those that wait already; one at a time they would wait long behind many."""
        with suppress(OSError):
            for _ in range(_ACCEPTED_AT_ONCE - 1):
                client, _ = self._listening.accept()
                client.setblocking(False)
                yield client

    def _take(self, client: socket.socket) -> None:
        """Begin to serve ``client``, or turn it away."""
        if len(self._connections) + len(self._connecting) >= self._limit:
            _log.warning(
                "%d connections are open, the most (server.max_connections): "
                "those that wait longest for a request are closed",
                self._limit,
            )
            if not self._make_room():
                self._turn_away(client)
                return
        task = asyncio.create_task(self._connect(client))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, client: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._make, client)
        except OSError:
            client.close()

    def _make_room(self) -> bool:
        """Close a connection that nothing is lost with; whether there was one."""
        for connection in self._waiting:
            if not connection.flow.write_paused and not connection.transport.is_closing():
                connection.refuse(self._full)
                return True
        return False

    def _turn_away(self, client: socket.socket) -> None:
        with suppress(OSError):
            # What is left unread would reset the connection, and the answer be lost.
            client.recv(2**16)
        with suppress(OSError):
            client.send(self._turned_away)
        client.close()

    async def _sweep(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            now_s = time.monotonic()
            for connection in list(self._connections):
                connection.check(now_s)

    async def stop_accepting(self) -> None:
        """Accept no more, and free the address."""
        self._accepting.cancel()
        await asyncio.wait((self._accepting, *self._connecting))
        self._listening.close()

    def abort(self) -> None:
        """End all connections at once."""
        for connection in list(self._connections):
            connection.transport.abort()

    async def aclose(self) -> None:
        """Look after connections no more."""
        await self.stop_accepting()
        self._sweeping.cancel()
        await asyncio.wait((self._sweeping,))
