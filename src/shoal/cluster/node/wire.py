"""Messages between a node and its server: msgpack with a length, over a Unix socket or an actor's methods."""

import asyncio

import msgspec

from shoal.cluster.node.engine_processes import EngineExited, EngineMessage, EngineUsage, RunningEngine
from shoal.engine.process.lifeline import LENGTH


class Hello(msgspec.Struct, tag=True, frozen=True):
    """To the node, as the first message."""

    protocol: int
    pid: int
    """Process of the sender, for error messages."""
    settings: dict[str, str]
    """As in ``EngineBackend.attach``."""
    heartbeat_s: float
    """Interval of the node's heartbeats."""
    orphan_after_s: float
    """The node and its engines end this long after the server is gone."""


class StartEngine(msgspec.Struct, tag=True, frozen=True):
    """To the node: start a process."""

    engine: str
    incarnation: int
    config: bytes
    """A pickled ``EngineConfig``."""


class KillEngine(msgspec.Struct, tag=True, frozen=True):
    """To the node: kill a process."""

    engine: str
    incarnation: int


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """To the node: end all engines and itself, then the connection."""


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """From the node, as the first message: the server is attached."""

    pid: int
    engines: list[RunningEngine]
    """Running engines."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """From the node, as the only message: the server is refused."""

    why: str


class NodeBeat(msgspec.Struct, tag=True, frozen=True):
    """From the node: a heartbeat."""

    usages: list[EngineUsage] = []
    """Resource usage of its engines, which tells working ones from hung ones."""


ToNode = Hello | StartEngine | KillEngine | Shutdown
FromNode = Welcome | Refused | NodeBeat | EngineMessage | EngineExited

_encoder = msgspec.msgpack.Encoder()
_to_node: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)
_from_node: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)


def encode(message: ToNode | FromNode) -> bytes:
    return _encoder.encode(message)


def decode_to_node(payload: bytes) -> ToNode:
    """A message of the server; raises msgspec.MsgspecError."""
    return _to_node.decode(payload)


def decode_from_node(payload: bytes) -> FromNode:
    """A message of the node; raises msgspec.MsgspecError."""
    return _from_node.decode(payload)


def write(writer: asyncio.StreamWriter, message: ToNode | FromNode) -> None:
    """Send without waiting; lost if the other end is gone."""
    payload = encode(message)
    writer.write(LENGTH.pack(len(payload)) + payload)


async def read_to_node(reader: asyncio.StreamReader) -> ToNode | None:
    """The next message of the server; None: the connection ended. Raises msgspec.MsgspecError."""
    payload = await _read(reader)
    return None if payload is None else decode_to_node(payload)


async def read_from_node(reader: asyncio.StreamReader) -> FromNode | None:
    """The next message of the node; None: the connection ended. Raises msgspec.MsgspecError."""
    payload = await _read(reader)
    return None if payload is None else decode_from_node(payload)


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    try:
        (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
