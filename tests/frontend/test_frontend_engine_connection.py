"""A client's end of the connection to an engine on another host."""

import asyncio

import pytest

from shoal.engine import wire
from shoal.engine.process import connection_monitor
from shoal.engine.process.client_link import ClientLink
from shoal.frontend.engine_connection import EngineConnection


class TcpProxy:
    """A TCP proxy that can cut the connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, far_writer]
        await asyncio.gather(self._forward(reader, far_writer), self._forward(far_reader, writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(data)
        writer.close()

    def cut(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()


async def until(condition) -> None:
    """Wait for a condition, up to the timeout of the test."""
    while not condition():
        await asyncio.sleep(0.005)


def test_a_lost_connection_is_reported_once_at_both_ends(monkeypatch):
    monkeypatch.setattr(connection_monitor, "_NOTICE_S", 0.01)

    async def scenario():
        link = ClientLink("tcp://127.0.0.1:*")
        received: list[wire.FromEngine] = []
        endpoint, mark, key = link.endpoint.partition("#")
        proxy = TcpProxy(int(endpoint.rpartition(":")[2]))
        connection = EngineConnection(await proxy.start() + mark + key, "session", received.append)
        frames = []
        await until(lambda: (frame := link.receive()) is not None and frames.append(frame) is None)
        hello = wire.decode_to_engine(frames[0])
        assert isinstance(hello, wire.Hello)
        assert (hello.protocol, hello.session) == (wire.PROTOCOL, "session")
        link.accept_sender()
        link.send(wire.encode(wire.Stepped([])))
        await until(lambda: received)
        proxy.cut()
        await until(link.lost_client)
        await until(lambda: len(received) == 2)
        await asyncio.sleep(0.05)
        assert received == [wire.Stepped([]), wire.Forgotten()]
        connection.close()
        link.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("close", [True, False])
def test_a_failed_connect_is_reported_unless_closed(monkeypatch, close):
    monkeypatch.setattr(connection_monitor, "_CONNECT_S", 0.01)

    async def scenario():
        link = ClientLink("tcp://127.0.0.1:*")
        endpoint = link.endpoint
        link.close()
        received: list[wire.FromEngine] = []
        connection = EngineConnection(endpoint, "session", received.append)
        if close:
            connection.close()
        await asyncio.sleep(0.1)
        assert received == ([] if close else [wire.Forgotten()])
        connection.close()

    asyncio.run(scenario())
