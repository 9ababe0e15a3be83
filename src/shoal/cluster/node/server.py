"""The node's Unix socket, at which a server attaches."""

import asyncio
from contextlib import suppress
from functools import partial

import msgspec

from shoal.cluster.node import wire
from shoal.cluster.node.attachment import Attachment
from shoal.cluster.node.folder import SOCKET, NodeFolder
from shoal.engine.process.child_process import PrestartedEngine


class NodeServer:
    """Serves a node at a socket in its folder; the end of a connection detaches its server."""

    def __init__(self, folder: NodeFolder, prestarted: PrestartedEngine | None = None) -> None:
        """prestarted: as in ``Node``."""
        self._folder = folder
        self.attachment = Attachment(folder.path, prestarted=prestarted)
        self._client: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        """Serve until the node is to end; then end the engines and remove the folder."""
        server = await asyncio.start_unix_server(self._connected, self._folder.path / SOCKET)
        try:
            await self.attachment.run()
        finally:
            server.close()
            self._folder.remove()
            if self._client is not None:
                self._client.transport.abort()
                await self.attachment.wait_detached()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection."""
        try:
            if not await self._greet(reader, writer):
                return
            self._client = writer
            with suppress(msgspec.MsgspecError):
                while (message := await wire.read_to_node(reader)) is not None:
                    self.attachment.handle(message)
            self._client = None
            self.attachment.detach()
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
        return await self.attachment.greet(hello, partial(wire.write, writer))
