"""The engine's end of the connection to its client: one client at a time."""

import zmq
from zmq.utils.monitor import recv_monitor_message

_READABLE = int(zmq.POLLIN)
_LINGER_MS = 2000


class ClientLink:
    """A ROUTER socket; the client is who was welcomed last, and only its messages count.

    Connections are counted, so that the end of the last is noticed also where nothing is sent.
    """

    def __init__(self, bind: str) -> None:
        """Listen at a ZeroMQ address, which may name a port "*"; raises zmq.ZMQError where that fails."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # tells that a receiver is gone
        self._monitor = self._socket.get_monitor_socket(zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._connections = 0
        self._is_gone = False
        self._client: bytes | None = None
        self._sender: bytes | None = None
        self._socket.bind(bind)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        """The address that it listens at."""

    @property
    def from_client(self) -> bool:
        """Whether the frame that was received last is the client's."""
        return self._sender == self._client

    def welcome(self) -> None:
        """Who sent the frame that was received last is the client from now on."""
        self._client, self._is_gone = self._sender, False

    def lost_client(self) -> bool:
        """Whether the client is gone since this was last asked.

        To be asked when no frame is left: what a client sent before it was gone is received after its end.
        """
        while _readable(self._monitor):
            accepted = recv_monitor_message(self._monitor)["event"] == zmq.Event.ACCEPTED
            self._connections += 1 if accepted else -1
        if self._client is None or (self._connections and not self._is_gone):
            return False
        self._client = None
        return True

    def receive(self) -> bytes | None:
        """The next frame, if one has come."""
        try:
            self._sender = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return self._socket.recv()

    def send(self, frame: bytes) -> None:
        """Send a frame to the client; it is lost if there is none."""
        if self._client is not None and not self._is_gone:
            self._is_gone = not self._send(self._client, frame)

    def reply(self, frame: bytes) -> None:
        """Send a frame to whoever sent the last one."""
        assert self._sender is not None
        self._send(self._sender, frame)

    def _send(self, receiver: bytes, frame: bytes) -> bool:
        """Send a frame; returns whether the receiver is there."""
        try:
            self._socket.send(receiver, zmq.SNDMORE)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        self._socket.send(frame)
        return True

    def has_news(self) -> bool:
        """Whether a frame has come, or somebody connected or left; answers at once."""
        return _readable(self._socket) or _readable(self._monitor)

    def watch(self, socket: "zmq.Socket[bytes]") -> None:
        """Let ``wait`` end also when there is something on another socket."""
        self._poller.register(socket, zmq.POLLIN)

    def wait(self, timeout_ms: int | None) -> None:
        """Wait for news; None waits for ever."""
        self._poller.poll(timeout_ms)

    def close(self) -> None:
        """Send what is left, for a while, and release the socket."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=_LINGER_MS)
        self._context.term()


def _readable(socket: "zmq.Socket[bytes]") -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _READABLE)
