"""KV transfer between engines: non-blocking ZeroMQ sockets.

Each engine receives KV at one address, and connects to another engine's address while it has KV to send.
"""

from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq

from shoal.engine.addresses import connect, listen
from shoal.engine.process.lifeline import TRANSFER_SUFFIX

_EVENTS = zmq.EVENTS
_READABLE, _WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)
# High-water mark in messages, at either end: some tens of MiB with messages of a few MiB.
_MAX_QUEUED = 8
_LINGER_MS = 2000


class Blocks(msgspec.Struct, array_like=True, frozen=True):
    """Header of a message with the KV of consecutive blocks of a request."""

    migration: str
    first: int
    """Index of the first block in the request's block table."""
    count: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """Received blocks, with their content."""

    blocks: Blocks
    content: memoryview


class KVTransfer(Protocol):
    """Non-blocking exchange of KV with other engines."""

    @property
    def message_bytes(self) -> int:
        """Target size of a message, which has at least one block."""
        ...

    @property
    def turn_bytes(self) -> int:
        """Maximum KV read, and written, between two steps, while running requests wait."""
        ...

    def can_receive(self) -> bool:
        """Whether blocks have arrived."""
        ...

    def receive(self) -> Arrived | None:
        """The next blocks that have arrived, if any."""
        ...

    def can_send(self, to: str) -> bool:
        """Whether ``send`` to this address would succeed now; raises zmq.ZMQError for an invalid address."""
        ...

    def send(self, to: str, blocks: Blocks, content: memoryview) -> None:
        """Send blocks, after ``can_send``; they are lost if no engine listens there."""
        ...

    def disconnect(self, to: str) -> None:
        """Close the connection to an address."""
        ...


def transfer_address(bind: str) -> str:
    """The address for KV of an engine that listens to its client at ``bind``."""
    return bind + TRANSFER_SUFFIX if bind.startswith("ipc:") else bind


class Transfer:
    """A ``KVTransfer`` over ZeroMQ."""

    message_bytes = 2 << 20
    turn_bytes = 16 << 20

    def __init__(self, bind: str) -> None:
        """Listen at a ZeroMQ address, which may name a port "*"; raises zmq.ZMQError where that fails."""
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.PULL)
        """Readable when blocks have arrived; for pollers."""
        self.socket.set_hwm(_MAX_QUEUED)
        self.endpoint = listen(self.socket, bind)
        """The address where KV is received (``addresses.connect``)."""
        self._decoder = msgspec.msgpack.Decoder(Blocks)
        self._receivers: dict[str, zmq.Socket[bytes]] = {}

    def can_receive(self) -> bool:
        """Whether blocks have arrived."""
        return bool(int(self.socket.getsockopt(_EVENTS)) & _READABLE)

    def receive(self) -> Arrived | None:
        """The next blocks that have arrived, if any; malformed messages are dropped."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            try:
                header, content = frames
                return Arrived(self._decoder.decode(header.buffer), content.buffer)
            except (ValueError, msgspec.MsgspecError):
                continue

    def can_send(self, to: str) -> bool:
        """Whether ``send`` to this address would succeed now; connects to it. Raises zmq.ZMQError."""
        socket = self._receivers.get(to)
        if socket is None:
            socket = self._context.socket(zmq.PUSH)
            socket.set_hwm(_MAX_QUEUED)
            try:
                connect(socket, to)
            except zmq.ZMQError:
                socket.close(linger=0)
                raise
            self._receivers[to] = socket
        return bool(int(socket.getsockopt(_EVENTS)) & _WRITABLE)

    def send(self, to: str, blocks: Blocks, content: memoryview) -> None:
        """Send blocks, after ``can_send``; they are lost if no engine listens there."""
        socket = self._receivers[to]
        socket.send(msgspec.msgpack.encode(blocks), zmq.SNDMORE | zmq.NOBLOCK)
        socket.send(content, zmq.NOBLOCK, copy=False)

    def disconnect(self, to: str) -> None:
        """Close the connection to an address; queued messages are still sent, for a while."""
        socket = self._receivers.pop(to, None)
        if socket is not None:
            socket.close(linger=_LINGER_MS)

    def close(self) -> None:
        """Send queued messages, for a while, and close the sockets."""
        for to in list(self._receivers):
            self.disconnect(to)
        self.socket.close(linger=0)
        self._context.term()
