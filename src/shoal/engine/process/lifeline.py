"""Lifeline: the messages between an engine process and its owner, over the engine's standard input.

Standard input is one end of a socket pair. The owner sends Start once; the engine sends progress, Ready,
heartbeats and its last error. End of file ends the engine. A frame is a length and msgpack. Importing this
module needs neither torch nor numpy.
"""

import socket
import struct
import threading

import msgspec

from shoal.core import ConfigError, EngineDied, ModelUnavailable, ModelUnsupported, ShoalError
from shoal.engine.info import EngineInfo

PROTOCOL = 8
"""Version of all messages between the processes of a cluster."""

TRANSFER_SUFFIX = ".kv"
"""Suffix of an engine's ``ipc`` address for its address for KV."""

LENGTH = struct.Struct("<I")
"""Header of a frame: the size of its msgpack in bytes."""


class Start(msgspec.Struct, tag=True, frozen=True):
    """To the engine: its configuration."""

    config: bytes
    """A pickled ``EngineConfig``."""
    bind: str
    """ZeroMQ address to listen on once it has loaded; may name a port "*"."""
    journal: str
    """Path of its crash journal."""


class Loading(msgspec.Struct, tag=True, frozen=True):
    """From the engine: progress of loading."""

    what: str
    """The present activity."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """From the engine: it accepts requests; sent again when its services change."""

    info: EngineInfo
    endpoint: str
    """ZeroMQ address that it listens on."""
    transfer: str
    """ZeroMQ address where it receives KV of migrations."""


class Beat(msgspec.Struct, tag=True, frozen=True):
    """From the engine: a heartbeat."""

    hung: str = ""
    """Why the present step counts as hung; empty: it does not."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """From the engine, as the last message: the error that ends it."""

    kind: str
    """Class name of the error."""
    message: str


FromEngine = Loading | Ready | Beat | Failed

_encoder = msgspec.msgpack.Encoder()
_start: msgspec.msgpack.Decoder[Start] = msgspec.msgpack.Decoder(Start)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def pack(message: Start | FromEngine) -> bytes:
    payload = _encoder.encode(message)
    return LENGTH.pack(len(payload)) + payload


class Frames:
    """Splits a byte stream into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads completed by ``data``."""
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
    return _from_engine.decode(payload)


class Lifeline:
    """The engine's end; thread-safe."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()

    def receive_start(self) -> Start:
        """Wait for Start; raises ConnectionError if the owner is gone."""
        (size,) = LENGTH.unpack(self._receive(LENGTH.size))
        return _start.decode(self._receive(size))

    def _receive(self, size: int) -> bytes:
        data = self._end.recv(size, socket.MSG_WAITALL)
        if len(data) < size:
            raise ConnectionError("the owner of this engine is gone")
        return data

    def send(self, message: FromEngine) -> None:
        """Send a message; blocks while the owner does not read. Raises ConnectionError without an owner."""
        with self._lock:
            self._end.sendall(pack(message))


_ACTIONABLE = {error.__name__: error for error in (ConfigError, ModelUnavailable, ModelUnsupported)}


def describe_failure(error: BaseException) -> Failed:
    """The last message of an engine that ends with ``error``."""
    return Failed(type(error).__name__, str(error) or type(error).__name__)


def is_actionable(error: BaseException) -> bool:
    """Whether users can act on the message of ``error``, so that no traceback is needed."""
    return type(error).__name__ in _ACTIONABLE


def failure_to_error(failed: Failed, doing: str) -> ShoalError:
    """The error to raise in the owner: of the same class if users can act on it, else EngineDied."""
    known = _ACTIONABLE.get(failed.kind)
    if known is not None:
        return known(failed.message)
    return EngineDied(f"the engine failed while {doing}: {failed.kind}: {failed.message}")
