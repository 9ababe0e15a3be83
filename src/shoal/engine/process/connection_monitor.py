"""Whether a connection to another host still is one."""

import asyncio
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

_HEARTBEAT_MS = 1000
_SILENCE_MS = 10_000
_CONNECT_S = 10.0
# An engine that ends takes its connection along; its owner tells soon why it ended.
_NOTICE_S = 1.0
_READABLE = int(zmq.POLLIN)


class ConnectionMonitor:
    """Tells once when a socket's only connection is lost, is not made, or has been silent for 10 s.

    To be made before the socket connects. on_lost: called from the event loop.
    """

    def __init__(self, link: "zmq.Socket[bytes]", on_lost: Callable[[], None]) -> None:
        link.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        link.set(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
        link.set(zmq.HEARTBEAT_TTL, _SILENCE_MS)  # so that the other end notices, too
        self._link = link
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._monitor = link.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED)
        self._loop.add_reader(self._monitor.fileno(), self._read)
        self._telling = self._loop.call_later(_CONNECT_S, on_lost)
        self._loop.call_soon(self._read)

    def close(self) -> None:
        """Look no more; before the socket is closed."""
        self._telling.cancel()
        self._loop.remove_reader(self._monitor.fileno())
        self._link.disable_monitor()
        self._monitor.close(linger=0)

    def _read(self) -> None:
        """Take all events: the descriptor tells of one only until somebody looks."""
        while not self._monitor.closed and int(self._monitor.getsockopt(zmq.EVENTS)) & _READABLE:
            connected = recv_monitor_message(self._monitor)["event"] == zmq.Event.HANDSHAKE_SUCCEEDED
            self._telling.cancel()
            if not connected:
                self._telling = self._loop.call_later(_NOTICE_S, self._on_lost)
