"""EngineConnection: the client's end of the ZeroMQ connection to an engine process."""

import asyncio
import contextlib
import time
from collections.abc import Callable

import zmq

from shoal.engine import wire
from shoal.engine.addresses import connect
from shoal.engine.process.connection_monitor import ConnectionMonitor

_READABLE = int(zmq.POLLIN)


class EngineConnection:
    """A DEALER socket that is connected to an engine.

    It does not use ``zmq.asyncio``, whose futures take as much time per message as all other work for a
    token.
    """

    def __init__(self, endpoint: str, session: str, on_message: Callable[[wire.FromEngine], None]) -> None:
        """Connect to an engine, and become its client.

        session: name of this process. on_message: called from the event loop for each message, in order; with
        ``Forgotten`` when a TCP connection is lost or cannot be made. Raises zmq.ZMQError for an invalid
        address. Nothing is reported if no engine listens at an address on this host.
        """
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._reading = False
        self._monitor: ConnectionMonitor | None = None
        if endpoint.startswith("tcp:"):
            self._monitor = ConnectionMonitor(self._socket, lambda: on_message(wire.Forgotten()))
        try:
            connect(self._socket, endpoint)
        except zmq.ZMQError:
            if self._monitor is not None:
                self._monitor.close()
            self._context.destroy(linger=0)
            raise
        self._loop.add_reader(self._socket.fileno(), self._receive)
        self.send(wire.Hello(wire.PROTOCOL, session, time.monotonic_ns()))

    def send(self, message: wire.ToEngine) -> None:
        """Send a message without waiting; it is lost without a receiver, or after ``close``."""
        if self._socket.closed:
            return
        with contextlib.suppress(zmq.Again):
            self._socket.send(wire.encode(message), zmq.NOBLOCK)
        # Sending also reads the socket's state, and the descriptor then does not signal frames that have
        # arrived.
        if not self._reading and self._has_frames():
            self._loop.call_soon(self._receive)

    def close(self) -> None:
        """Close the socket, and drop unsent messages; closing twice does nothing."""
        if self._socket.closed:
            return
        if self._monitor is not None:
            self._monitor.close()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger=0)
        self._context.term()

    def _receive(self) -> None:
        """Read all frames: the descriptor signals only once for all of them."""
        if self._reading:
            return
        self._reading = True
        try:
            while not self._socket.closed and self._has_frames():
                self._on_message(wire.decode_from_engine(self._socket.recv(zmq.NOBLOCK)))
        except Exception:
            self._loop.call_soon(self._receive)
            raise
        finally:
            self._reading = False

    def _has_frames(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE)
