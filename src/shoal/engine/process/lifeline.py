"""The messages between an engine process and the one that owns it, over its standard input.

That is one end of a pair of sockets. What an engine is to do comes down once; signs of life go up. End of
file ends the engine. Frames are a length and msgpack. Importing this module needs neither torch nor numpy.
"""

import socket
import struct
import threading

import msgspec

from shoal.core import ConfigError, EngineDied, ModelUnavailable, ModelUnsupported, ShoalError
from shoal.engine.info import EngineInfo

PROTOCOL = 3
"""Of all messages between the processes of a cluster: those of one version understand each other."""

TRANSFER_SUFFIX = ".kv"
"""Behind an ``ipc`` address that an engine listens on: where it takes KV."""

LENGTH = struct.Struct("<I")
"""What precedes a frame: the size of its msgpack in bytes."""


class Start(msgspec.Struct, tag=True, frozen=True):
    """Down: what the engine is."""

    config: bytes
    """A pickled ``EngineConfig``."""
    bind: str
    """ZeroMQ address to bind once it has loaded; may name a port "*"."""
    journal: str
    """Path of its journal."""


class Loading(msgspec.Struct, tag=True, frozen=True):
    """Up: it is loading."""

    what: str
    """What it does now."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Up: it takes requests."""

    info: EngineInfo
    """Limits of its services."""
    endpoint: str
    """ZeroMQ address that it listens on."""
    transfer: str
    """ZeroMQ address where it takes KV of requests that move to it."""


class Beat(msgspec.Struct, tag=True, frozen=True):
    """Up: a sign of life."""

    hung: str = ""
    """Why its present step counts as hung, in words; empty: it does not."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Up, as the last message: the error that ends the engine."""

    kind: str
    """Name of the error's class."""
    message: str
    """Its message."""


FromEngine = Loading | Ready | Beat | Failed

_encoder = msgspec.msgpack.Encoder()
_start: msgspec.msgpack.Decoder[Start] = msgspec.msgpack.Decoder(Start)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def pack(message: Start | FromEngine) -> bytes:
    """One frame."""
    payload = _encoder.encode(message)
    return LENGTH.pack(len(payload)) + payload


class Frames:
    """Cuts what comes from a stream into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that are complete with ``data``."""
        self._rest += data
        payloads = []
        while len(self._rest) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._rest)[0]
            if len(self._rest) < end:
                break
            payloads.append(self._rest[LENGTH.size : end])
            self._rest = self._rest[end:]
        return payloads


def decode_from_engine(payload: bytes) -> FromEngine:
    """A message that an engine sent."""
    return _from_engine.decode(payload)


class Lifeline:
    """The engine's end, for any thread."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()

    def receive_start(self) -> Start:
        """What the engine is to be; raises ConnectionError if its owner is gone already."""
        (size,) = LENGTH.unpack(self._receive(LENGTH.size))
        return _start.decode(self._receive(size))

    def _receive(self, size: int) -> bytes:
        data = self._end.recv(size, socket.MSG_WAITALL)
        if len(data) < size:
            raise ConnectionError("the owner of this engine is gone")
        return data

    def send(self, message: FromEngine) -> None:
        """Send a message; waits for an owner that does not read. Raises ConnectionError if it is gone."""
        with self._lock:
            self._end.sendall(pack(message))


_ACTIONABLE = {error.__name__: error for error in (ConfigError, ModelUnavailable, ModelUnsupported)}


def describe_failure(error: BaseException) -> Failed:
    """The last message of an engine that ends with ``error``."""
    return Failed(type(error).__name__, str(error) or type(error).__name__)


def is_actionable(error: BaseException) -> bool:
    """Whether a person can act on ``error``'s message, so that no traceback is needed."""
    return type(error).__name__ in _ACTIONABLE


def failure_to_error(failed: Failed, doing: str) -> ShoalError:
    """The error to raise on the client's side: of the same class if a person can act on it."""
    known = _ACTIONABLE.get(failed.kind)
    if known is not None:
        return known(failed.message)
    return EngineDied(f"the engine failed while {doing}: {failed.kind}: {failed.message}")
