"""What the node's process is to the server that uses it, and what it does without one."""

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from shoal.cluster.node import wire
from shoal.cluster.node.engines import Node, NodeEvent
from shoal.cluster.node.folder import SOCKET, NodeFolder
from shoal.engine.lifeline import PROTOCOL

# How long a server waits for the one before it, which may just be ending.
_TAKEOVER_S = 1.0


class NodeServer:
    """Lets one server at a time use a node's engines, and ends when none came back for too long."""

    def __init__(self, folder: NodeFolder) -> None:
        self._folder = folder
        self._node = Node(folder.path, self._tell)
        self._settings: Mapping[str, str] = {}
        self._hello: wire.Hello | None = None
        """Of the server that uses the node, or did so last."""
        self._client: asyncio.StreamWriter | None = None
        self._free = asyncio.Event()
        self._free.set()
        self._orphaned: asyncio.TimerHandle | None = None
        self._beating: asyncio.TimerHandle | None = None
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Serve until it is over, end the engines, and remove the folder."""
        server = await asyncio.start_unix_server(self._connected, self._folder.path / SOCKET)
        try:
            await self._over.wait()
        finally:
            server.close()
            self._stop_beating()
            await self._node.close()
            self._folder.remove()
            if self._client is not None:
                self._client.transport.abort()
                await self._free.wait()

    def end_unused(self) -> None:
        """End, unless a server uses the node."""
        if self._client is None:
            self._over.set()

    def end_unclaimed(self) -> None:
        """End, unless a server has used the node."""
        if self._hello is None:
            self._over.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A server's connection, from its first to its last message."""
        try:
            if not await self._greet(reader, writer):
                return
            with suppress(msgspec.MsgspecError):
                while (message := await wire.read_to_node(reader)) is not None:
                    self._handle(message)
            self._detach()
        finally:
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            hello = await wire.read_to_node(reader)
        except msgspec.MsgspecError:
            hello = None
        if not isinstance(hello, wire.Hello):
            wire.write(writer, wire.Refused("the first message was not understood"))
            return False
        with suppress(TimeoutError):
            await asyncio.wait_for(self._free.wait(), _TAKEOVER_S)
        await self._node.settle()
        if self._over.is_set():
            return False  # without an answer: there will be another node in a moment
        why = self._why_not(hello)
        if why is not None:
            wire.write(writer, wire.Refused(why))
            return False
        self._attach(hello, writer)
        return True

    def _why_not(self, hello: wire.Hello) -> str | None:
        """Why a server may not use the node, if it may not."""
        if self._client is not None:
            assert self._hello is not None
            return f"another server uses it (process {self._hello.pid})"
        if hello.protocol != PROTOCOL:
            return f"it speaks another protocol (protocol: {PROTOCOL} / {hello.protocol})"
        if not self._node.owns_any:
            return None
        names = sorted({*self._settings, *hello.settings})
        differing = [
            f"{name}: {self._settings.get(name, '-')} / {hello.settings.get(name, '-')}"
            for name in names
            if self._settings.get(name) != hello.settings.get(name)
        ]
        return f"its engines run with other settings ({', '.join(differing)})" if differing else None

    def _attach(self, hello: wire.Hello, writer: asyncio.StreamWriter) -> None:
        if self._orphaned is not None:
            self._orphaned.cancel()
        self._hello, self._settings, self._client = hello, hello.settings, writer
        self._free.clear()
        wire.write(writer, wire.Welcome(os.getpid(), self._node.running()))
        self._beat(writer, hello.heartbeat_s)

    def _detach(self) -> None:
        """The server is gone."""
        assert self._hello is not None
        self._client = None
        self._stop_beating()
        self._free.set()
        wait_s = self._hello.orphan_after_s if self._node.owns_any else 0.0
        self._orphaned = asyncio.get_running_loop().call_later(wait_s, self._over.set)

    def _handle(self, message: wire.ToNode) -> None:
        match message:
            case wire.StartEngine():
                self._node.start(message.engine, message.incarnation, message.config)
            case wire.KillEngine():
                self._node.kill(message.engine, message.incarnation)
            case wire.Shutdown():
                self._over.set()

    def _tell(self, event: NodeEvent) -> None:
        if self._client is not None:
            wire.write(self._client, event)

    def _beat(self, client: asyncio.StreamWriter, every_s: float) -> None:
        wire.write(client, wire.NodeBeat())
        self._beating = asyncio.get_running_loop().call_later(every_s, self._beat, client, every_s)

    def _stop_beating(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
