"""The messages between a node and the server that uses it.

They go over a Unix stream, as a length and msgpack, or as arguments and results of an actor's methods.
"""

import asyncio

import msgspec

from shoal.cluster.node.engine_processes import EngineExited, EngineSaid, EngineUsage, RunningEngine
from shoal.engine.process.lifeline import LENGTH


class Hello(msgspec.Struct, tag=True, frozen=True):
    """To the node, as the first message."""

    protocol: int
    """``PROTOCOL`` of the sender."""
    pid: int
    """Process of the sender, for people."""
    settings: dict[str, str]
    """What the engines are built from, by name."""
    heartbeat_s: float
    """The node is to give a sign of life so often."""
    orphan_after_s: float
    """The node and its engines end so long after this server is gone."""


class StartEngine(msgspec.Struct, tag=True, frozen=True):
    """To the node: start a process."""

    engine: str
    """Its name."""
    incarnation: int
    """Which start of it."""
    config: bytes
    """A pickled ``EngineConfig``."""


class KillEngine(msgspec.Struct, tag=True, frozen=True):
    """To the node: kill a process."""

    engine: str
    """Its name."""
    incarnation: int
    """Which start of it."""


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """To the node: end all engines and itself. The end of the connection tells that this is done."""


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """From the node, as the first message: the server may use it."""

    pid: int
    """The node's process."""
    engines: list[RunningEngine]
    """What runs already."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """From the node, as the only message: the server may not use it."""

    why: str
    """Why, in words."""


class NodeBeat(msgspec.Struct, tag=True, frozen=True):
    """From the node: a sign of life."""

    usages: list[EngineUsage] = []
    """What its engines have used, which tells those that work from those that hang."""


ToNode = Hello | StartEngine | KillEngine | Shutdown
FromNode = Welcome | Refused | NodeBeat | EngineSaid | EngineExited

_encoder = msgspec.msgpack.Encoder()
_to_node: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)
_from_node: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)


def encode(message: ToNode | FromNode) -> bytes:
    """The msgpack of a message."""
    return _encoder.encode(message)


def decode_to_node(payload: bytes) -> ToNode:
    """A message of the server; raises msgspec.MsgspecError."""
    return _to_node.decode(payload)


def decode_from_node(payload: bytes) -> FromNode:
    """A message of the node; raises msgspec.MsgspecError."""
    return _from_node.decode(payload)


def write(writer: asyncio.StreamWriter, message: ToNode | FromNode) -> None:
    """Send a message without waiting; it is lost if nobody is there any more."""
    payload = encode(message)
    writer.write(LENGTH.pack(len(payload)) + payload)


async def read_to_node(reader: asyncio.StreamReader) -> ToNode | None:
    """The next message of the server; None: there is none any more. Raises msgspec.MsgspecError."""
    payload = await _read(reader)
    return None if payload is None else decode_to_node(payload)


async def read_from_node(reader: asyncio.StreamReader) -> FromNode | None:
    """The next message of the node; None: there is none any more. Raises msgspec.MsgspecError."""
    payload = await _read(reader)
    return None if payload is None else decode_from_node(payload)


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    try:
        (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
