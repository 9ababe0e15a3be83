"""The engine's end of the ZeroMQ connection to its client, one client at a time."""

import zmq
from zmq.utils.monitor import recv_monitor_message

from shoal.engine.addresses import listen

_READABLE = int(zmq.POLLIN)
_LINGER_MS = 2000


class ClientLink:
    """A ROUTER socket. The client is the peer accepted last.

    Connections are counted, so that the loss of the last one is noticed even if nothing is sent.
    """

    def __init__(self, bind: str) -> None:
        """Listen at a ZeroMQ address, which may name a port "*"; raises zmq.ZMQError where that fails."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an error if the receiver is gone
        self._monitor = self._socket.get_monitor_socket(zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._connections = 0
        self._client_gone = False
        self._client: bytes | None = None
        self._sender: bytes | None = None
        self.endpoint = listen(self._socket, bind)
        """The address for its client (``addresses.connect``)."""

    @property
    def from_client(self) -> bool:
        """Whether the last received frame is from the client."""
        return self._sender == self._client

    def accept_sender(self) -> None:
        """Make the sender of the last received frame the client."""
        self._client, self._client_gone = self._sender, False

    def lost_client(self) -> bool:
        """Whether the client has gone since the last call.

        Call it when no frame is left: frames sent before the client's end are received after it.
        """
        while _readable(self._monitor):
            accepted = recv_monitor_message(self._monitor)["event"] == zmq.Event.ACCEPTED
            self._connections += 1 if accepted else -1
        if self._client is None or (self._connections and not self._client_gone):
            return False
        self._client = None
        return True

    def receive(self) -> bytes | None:
        """The next frame, if there is one."""
        try:
            self._sender = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return self._socket.recv()

    def send(self, frame: bytes) -> None:
        """Send a frame to the client; it is lost if there is none."""
        if self._client is not None and not self._client_gone:
            self._client_gone = not self._send(self._client, frame)

    def reply(self, frame: bytes) -> None:
        """Send a frame to the sender of the last received frame."""
        assert self._sender is not None
        self._send(self._sender, frame)

    def _send(self, receiver: bytes, frame: bytes) -> bool:
        """Send a frame; returns whether the receiver is connected."""
        try:
            self._socket.send(receiver, zmq.SNDMORE)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        self._socket.send(frame)
        return True

    def has_messages(self) -> bool:
        """Whether there is a frame, or a connection was made or lost."""
        return _readable(self._socket) or _readable(self._monitor)

    def watch(self, socket: "zmq.Socket[bytes]") -> None:
        """Let ``wait`` also return when another socket is readable."""
        self._poller.register(socket, zmq.POLLIN)

    def wait(self, timeout_ms: int | None) -> None:
        """Wait for messages; None: without a limit."""
        self._poller.poll(timeout_ms)

    def close(self) -> None:
        """Send queued messages, for a while, and close the socket."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=_LINGER_MS)
        self._context.term()


def _readable(socket: "zmq.Socket[bytes]") -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _READABLE)
