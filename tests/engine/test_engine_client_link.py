"""The engine has one client at a time, whose requests end with its connection."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest
from engine_builders import make_engine, make_request

from shoal.core import FinishReason
from shoal.engine import wire
from shoal.engine.migration.transfer import Transfer
from shoal.engine.process.client_link import ClientLink
from shoal.engine.process.server import EngineServer, Services
from shoal.frontend.engine_connection import EngineConnection

TIMEOUT_S = 30


class Client:
    """A connection, and the messages received over it."""

    def __init__(self, endpoint, session="s"):
        self.messages = []
        self.news = asyncio.Event()
        self.channel = EngineConnection(endpoint, session, self._take)
        self.send = self.channel.send

    def _take(self, message):
        self.messages.append(message)
        self.news.set()

    def submit(self, id, **fields):
        self.send(wire.Submit.from_requests([make_request(id, **fields)]))

    async def until(self, condition):
        async with asyncio.timeout(TIMEOUT_S):
            while not condition(self.messages):
                self.news.clear()
                await self.news.wait()

    def events(self, id):
        stepped = [message for message in self.messages if isinstance(message, wire.Stepped)]
        return [event for message in stepped for event in message.events if event.request_id == id]

    async def stats(self, key=1):
        self.send(wire.AskStats(key))
        await self.until(lambda messages: any(isinstance(m, wire.Stats) and m.key == key for m in messages))
        return next(m.stats for m in self.messages if isinstance(m, wire.Stats) and m.key == key)


class Link(ClientLink):
    """A link whose server can be ended."""

    over = False

    def wait(self, timeout_ms):
        if self.over:
            raise Over
        super().wait(timeout_ms)


class Over(Exception):
    """The test is over."""


def serve(server):
    with pytest.raises(Over):
        server.run()


@asynccontextmanager
async def engine(bind, *models, **options):
    """A server in a thread; yields its engine and its endpoint."""
    link = Link(bind)
    made, info = make_engine(*models, **{"blocks": 1000} | options)
    transfer = Transfer("inproc://kv")
    server = EngineServer(made, link, transfer, Services(made, info, lambda info: None))
    thread = threading.Thread(target=serve, args=(server,))
    thread.start()
    try:
        yield made, link.endpoint
    finally:
        link.over = True
        last = Client(link.endpoint, "last")
        await asyncio.to_thread(thread.join, TIMEOUT_S)
        last.channel.close()
        link.close()
        transfer.close()
        assert not thread.is_alive()


async def until(condition):
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture(params=["ipc", "tcp"])
def bind(request, tmp_path):
    return f"ipc://{tmp_path}/e" if request.param == "ipc" else "tcp://127.0.0.1:*"


def free(made):
    return made.unfinished == 0 and made.fake_pool.live_blocks("a") == 0


@pytest.mark.parametrize("step_ms", [0, 5])
def test_requests_of_a_disconnected_client_are_cancelled(bind, step_ms):
    async def scenario():
        async with engine(bind, f"fake?context=4000&step_ms={step_ms}") as (made, endpoint):
            client = Client(endpoint)
            for number in range(20):
                client.submit(f"s-{number}-0#1", max_tokens=3000)
            await client.until(lambda _: client.events("s-19-0#1"))
            client.channel.close()
            await until(lambda: free(made))

    asyncio.run(scenario())


def test_an_idle_engine_detects_a_disconnected_client(bind):
    """The only request does not fit beside allocated blocks, so no step runs."""

    async def scenario():
        async with engine(bind, blocks=20) as (made, endpoint):
            client = Client(endpoint)
            await client.stats()
            taken = made.fake_pool.allocate("a", 20)
            client.submit("r", max_tokens=30)
            await until(lambda: made.unfinished == 1 and made.idle)
            client.channel.close()
            await until(lambda: made.unfinished == 0)
            made.fake_pool.free("a", taken)

    asyncio.run(scenario())


def test_a_new_client_replaces_the_old_one(bind):
    async def scenario():
        async with engine(bind, "fake?context=4000&step_ms=2") as (made, endpoint):
            first = Client(endpoint, "first")
            first.submit("first-1-0#1", max_tokens=3000)
            await first.until(lambda _: first.events("first-1-0#1"))
            second = Client(endpoint, "second")
            second.submit("second-1-0#1", max_tokens=5)
            await second.until(lambda _: second.events("second-1-0#1")[4:])
            assert second.events("second-1-0#1")[-1].finish is FinishReason.LENGTH
            assert made.unfinished == 0
            first.submit("first-2-0#1")
            await first.until(lambda messages: messages.count(wire.Forgotten()) == 2)
            assert not first.events("first-2-0#1")
            # A disconnect of a peer that is not the client changes nothing.
            second.submit("second-2-0#1", max_tokens=100)
            first.channel.close()
            await second.until(lambda _: second.events("second-2-0#1"))
            await second.until(lambda _: second.events("second-2-0#1")[-1].finish is not None)
            assert second.events("second-2-0#1")[-1].finish is FinishReason.LENGTH
            second.channel.close()

    asyncio.run(scenario())


def test_a_peer_with_another_protocol_is_not_the_client(bind, monkeypatch):
    async def scenario():
        async with engine(bind) as (made, endpoint):
            monkeypatch.setattr(wire, "PROTOCOL", wire.PROTOCOL + 1)
            stranger = Client(endpoint)
            monkeypatch.undo()
            stranger.submit("r")
            await stranger.until(lambda messages: messages == [wire.Forgotten()] * 2)
            assert made.unfinished == 0
            stranger.channel.close()

    asyncio.run(scenario())


def test_a_disconnect_is_detected_while_other_peers_are_connected(bind):
    async def scenario():
        async with engine(bind, "fake?context=4000&step_ms=1") as (made, endpoint):
            other = Client(endpoint)
            await other.stats()
            client = Client(endpoint)
            client.submit("r", max_tokens=3000)
            await client.until(lambda _: client.events("r"))
            client.channel.close()
            await until(lambda: free(made))
            other.channel.close()

    asyncio.run(scenario())


def test_clients_connect_and_disconnect(bind):
    async def scenario():
        async with engine(bind, "fake?context=4000&step_ms=1") as (made, endpoint):
            for number in range(30):
                client = Client(endpoint, str(number))
                await client.stats()
                client.submit(f"{number}-0-0#1", max_tokens=3000)
                if number % 3:
                    await client.until(lambda _, c=client, n=number: c.events(f"{n}-0-0#1"))
                client.channel.close()
            await until(lambda: free(made))
            made.fake_pool.check_integrity()

    asyncio.run(scenario())


def test_a_connection_keeps_reading_after_an_error_and_while_it_sends(bind):
    async def scenario():
        errors = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        async with engine(bind) as (_, endpoint):
            keys = []

            def take(message):
                keys.append(message.key)
                if message.key < 20:
                    channel.send(wire.AskStats(message.key + 1))
                    depth.append(1)
                    assert len(depth) == 1, "messages are handed on one at a time"
                    depth.pop()
                if message.key % 7 == 3:
                    raise RuntimeError("the reader is broken")

            depth = []
            channel = EngineConnection(endpoint, "s", take)
            channel.send(wire.AskStats(0))
            await until(lambda: len(keys) == 21)
            channel.close()
            channel.close()
            channel.send(wire.AskStats(99))
        assert keys == list(range(21))
        assert len(errors) == 3

    asyncio.run(scenario())
