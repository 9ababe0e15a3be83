"""The client's end of the connection to an engine process."""

import asyncio
import contextlib
import time
from collections.abc import Callable

import zmq

from shoal.engine import wire
from shoal.engine.process.connection_monitor import ConnectionMonitor

_READABLE = int(zmq.POLLIN)


class EngineConnection:
    """A DEALER socket that is connected to an engine.

    It is watched here, and not by ``zmq.asyncio``, whose futures take as much time for one message as
    everything else that is done for a token.
    """

    def __init__(self, endpoint: str, session: str, on_message: Callable[[wire.FromEngine], None]) -> None:
        """Connect to an engine that listens, whose client this process is from now on.

        session: names the process. on_message: called from the event loop for each message, in order; with
        ``Forgotten`` when a TCP connection is lost or cannot be made. Raises zmq.ZMQError if the address
        means nothing; nothing is raised or told if nobody is at an address on this host.
        """
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._reading = False
        self._watch: ConnectionMonitor | None = None
        if endpoint.startswith("tcp:"):
            self._watch = ConnectionMonitor(self._socket, lambda: on_message(wire.Forgotten()))
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError:
            if self._watch is not None:
                self._watch.close()
            self._context.destroy(linger=0)
            raise
        self._loop.add_reader(self._socket.fileno(), self._receive)
        self.send(wire.Hello(wire.PROTOCOL, session, time.monotonic_ns()))

    def send(self, message: wire.ToEngine) -> None:
        """Send a message without waiting; it is lost if nobody is there any more, or after ``close``."""
        if self._socket.closed:
            return
        with contextlib.suppress(zmq.Again):
            self._socket.send(wire.encode(message), zmq.NOBLOCK)
        # Sending looks, too, and then the descriptor tells of nothing that has come.
        if not self._reading and self._has_frames():
            self._loop.call_soon(self._receive)

    def close(self) -> None:
        """Release the socket, and drop what was not sent; closing twice does nothing."""
        if self._socket.closed:
            return
        if self._watch is not None:
            self._watch.close()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger=0)
        self._context.term()

    def _receive(self) -> None:
        """Take all frames: the descriptor tells of one only until somebody looks."""
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
