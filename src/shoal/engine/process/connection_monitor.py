"""Detects the loss of a TCP connection to an engine on another host."""

import asyncio
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

_HEARTBEAT_MS = 1000
_SILENCE_MS = 10_000
_CONNECT_S = 10.0
# When an engine ends, its owner reports the reason shortly after the connection is lost.
_NOTICE_S = 1.0
_READABLE = int(zmq.POLLIN)


class ConnectionMonitor:
    """Calls ``on_lost`` once when a socket's only connection is lost, cannot be made, or is silent for 10 s.

    Create it before the socket connects. on_lost: called from the event loop.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", on_lost: Callable[[], None]) -> None:
        socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
        socket.set(zmq.HEARTBEAT_TTL, _SILENCE_MS)  # for the other end
        self._socket = socket
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._monitor = socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED)
        self._loop.add_reader(self._monitor.fileno(), self._read)
        self._timer = self._loop.call_later(_CONNECT_S, on_lost)
        self._loop.call_soon(self._read)

    def close(self) -> None:
        """Stop monitoring; call it before the socket is closed."""
        self._timer.cancel()
        self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def _read(self) -> None:
        """Read all events: the descriptor signals only once for all of them."""
        while not self._monitor.closed and int(self._monitor.getsockopt(zmq.EVENTS)) & _READABLE:
            connected = recv_monitor_message(self._monitor)["event"] == zmq.Event.HANDSHAKE_SUCCEEDED
            self._timer.cancel()
            if not connected:
                self._timer = self._loop.call_later(_NOTICE_S, self._on_lost)
