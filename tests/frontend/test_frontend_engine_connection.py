"""A client's end of the connection to an engine on another host."""

import asyncio

import pytest

from shoal.engine import wire
from shoal.engine.process import connection_monitor
from shoal.engine.process.client_link import ClientLink
from shoal.frontend.engine_connection import EngineConnection


class Cable:
    """A connection through which everything goes until it is cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server

    async def lay(self) -> str:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, far_writer]
        await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(data)
        writer.close()

    def cut(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()


async def until(condition) -> None:
    """Wait for something that must happen; the test's own limit ends it otherwise."""
    while not condition():
        await asyncio.sleep(0.005)


def test_a_lost_connection_is_told_once_and_both_ends_notice(monkeypatch):
    monkeypatch.setattr(connection_monitor, "_NOTICE_S", 0.01)

    async def scenario():
        link = ClientLink("tcp://127.0.0.1:*")
        told: list[wire.FromEngine] = []
        cable = Cable(int(link.endpoint.rpartition(":")[2]))
        channel = EngineConnection(await cable.lay(), "session", told.append)
        frames = []
        await until(lambda: (frame := link.receive()) is not None and frames.append(frame) is None)
        hello = wire.decode_to_engine(frames[0])
        assert isinstance(hello, wire.Hello)
        assert (hello.protocol, hello.session) == (wire.PROTOCOL, "session")
        link.welcome()
        link.send(wire.encode(wire.Stepped([])))
        await until(lambda: told)
        cable.cut()
        await until(link.lost_client)
        await until(lambda: len(told) == 2)
        await asyncio.sleep(0.05)
        assert told == [wire.Stepped([]), wire.Forgotten()]
        channel.close()
        link.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("close", [True, False])
def test_a_connection_that_is_not_made_is_told_unless_the_channel_is_closed(monkeypatch, close):
    monkeypatch.setattr(connection_monitor, "_CONNECT_S", 0.01)

    async def scenario():
        link = ClientLink("tcp://127.0.0.1:*")
        endpoint = link.endpoint
        link.close()
        told: list[wire.FromEngine] = []
        channel = EngineConnection(endpoint, "session", told.append)
        if close:
            channel.close()
        await asyncio.sleep(0.1)
        assert told == ([] if close else [wire.Forgotten()])
        channel.close()

    asyncio.run(scenario())
