"""What the node's process is to the server that uses it: a Unix socket."""

import asyncio
from contextlib import suppress
from functools import partial

import msgspec

from shoal.cluster.node import wire
from shoal.cluster.node.attachment import Tenancy
from shoal.cluster.node.folder import SOCKET, NodeFolder
from shoal.engine.process.child_process import PrestartedEngine


class NodeServer:
    """Lets servers reach a node at a socket in its folder; a connection's end is the end of its server."""

    def __init__(self, folder: NodeFolder, bare: PrestartedEngine | None = None) -> None:
        """bare: as in ``Node``."""
        self._folder = folder
        self.tenancy = Tenancy(folder.path, bare=bare)
        """Who uses the node."""
        self._client: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        """Serve until it is over, end the engines, and remove the folder."""
        server = await asyncio.start_unix_server(self._connected, self._folder.path / SOCKET)
        try:
            await self.tenancy.run()
        finally:
            server.close()
            self._folder.remove()
            if self._client is not None:
                self._client.transport.abort()
                await self.tenancy.freed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A server's connection, from its first to its last message."""
        try:
            if not await self._greet(reader, writer):
                return
            self._client = writer
            with suppress(msgspec.MsgspecError):
                while (message := await wire.read_to_node(reader)) is not None:
                    self.tenancy.handle(message)
            self._client = None
            self.tenancy.detach()
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
        return await self.tenancy.greet(hello, partial(wire.write, writer))
