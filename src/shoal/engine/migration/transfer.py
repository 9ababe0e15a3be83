"""KV on its way from one engine to another: ZeroMQ sockets that never keep an engine waiting.

Everybody takes KV at one address, and connects to others' addresses while there is something to send.
"""

from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq

from shoal.engine.process.lifeline import TRANSFER_SUFFIX

_EVENTS = zmq.EVENTS
_READABLE, _WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)
# Messages on their way, at either end: with those of a few MiB some tens of MiB.
_QUEUED = 8
_LINGER_MS = 2000


class Blocks(msgspec.Struct, array_like=True, frozen=True):
    """Precedes the KV of some successive blocks of a request's table."""

    migration: str
    """Whose they are."""
    first: int
    """Place of the first in the table."""
    count: int
    """How many."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Blocks that have come."""

    blocks: Blocks
    """Which."""
    content: memoryview
    """Their bytes."""


class KVTransfer(Protocol):
    """What an engine needs to exchange KV with others; nothing of it keeps an engine waiting."""

    @property
    def message_bytes(self) -> int:
        """About the size of a message, of one block at least."""
        ...

    @property
    def turn_bytes(self) -> int:
        """Read, and written, between two steps: requests that run wait meanwhile."""
        ...

    def has_news(self) -> bool:
        """Whether something has come."""
        ...

    def receive(self) -> Arrived | None:
        """The next blocks that have come, if any."""
        ...

    def can_send(self, to: str) -> bool:
        """Whether ``send`` to this address would be taken now; raises zmq.ZMQError where it never will."""
        ...

    def send(self, to: str, blocks: Blocks, content: memoryview) -> None:
        """Send blocks where ``can_send`` says so; they are lost if nobody is there."""
        ...

    def disconnect(self, to: str) -> None:
        """Nothing more is sent there for now."""
        ...


def transfer_address(bind: str) -> str:
    """Where an engine takes KV that listens to its client at ``bind``."""
    return bind + TRANSFER_SUFFIX if bind.startswith("ipc:") else bind


class Transfer:
    """One engine's end, as a ``KVTransfer``."""

    message_bytes = 2 << 20
    turn_bytes = 16 << 20

    def __init__(self, bind: str) -> None:
        """Listen at a ZeroMQ address, which may name a port "*"; raises zmq.ZMQError where that fails."""
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.PULL)
        """Readable when something has come: for pollers."""
        self.socket.set_hwm(_QUEUED)
        self.socket.bind(bind)
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        """The address where KV is taken."""
        self._decoder = msgspec.msgpack.Decoder(Blocks)
        self._receivers: dict[str, zmq.Socket[bytes]] = {}

    def has_news(self) -> bool:
        """Whether something has come; answers at once."""
        return bool(int(self.socket.getsockopt(_EVENTS)) & _READABLE)

    def receive(self) -> Arrived | None:
        """The next blocks that have come, if any; what is not of this form is dropped."""
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
        """Whether ``send`` to this address would be taken now; connects to it. Raises zmq.ZMQError."""
        socket = self._receivers.get(to)
        if socket is None:
            socket = self._context.socket(zmq.PUSH)
            socket.set_hwm(_QUEUED)
            try:
                socket.connect(to)
            except zmq.ZMQError:
                socket.close(linger=0)
                raise
            self._receivers[to] = socket
        return bool(int(socket.getsockopt(_EVENTS)) & _WRITABLE)

    def send(self, to: str, blocks: Blocks, content: memoryview) -> None:
        """Send blocks where ``can_send`` says so; they are lost if nobody is there."""
        socket = self._receivers[to]
        socket.send(msgspec.msgpack.encode(blocks), zmq.SNDMORE | zmq.NOBLOCK)
        socket.send(content, zmq.NOBLOCK, copy=False)

    def disconnect(self, to: str) -> None:
        """Nothing more is sent there for now; what was sent still goes, for a while."""
        socket = self._receivers.pop(to, None)
        if socket is not None:
            socket.close(linger=_LINGER_MS)

    def close(self) -> None:
        """Send what is left, for a while, and release the sockets."""
        for to in list(self._receivers):
            self.disconnect(to)
        self.socket.close(linger=0)
        self._context.term()
