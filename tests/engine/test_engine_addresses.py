"""Ports of engines: only a peer that was told the address, with its key, gets anything."""

import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import zmq

from shoal.engine import wire
from shoal.engine.addresses import connect, listen
from shoal.engine.migration.transfer import Blocks, Transfer
from shoal.engine.process.client_link import ClientLink

TCP = "tcp://127.0.0.1:*"
PATIENCE_S = 5.0


@contextmanager
def peer(kind: int) -> Iterator["zmq.Socket[bytes]"]:
    context = zmq.Context()
    made = context.socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    try:
        yield made
    finally:
        context.destroy(linger=0)


def receive(link: ClientLink, patience_s: float = PATIENCE_S) -> bytes | None:
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        if (frame := link.receive()) is not None:
            return frame
        time.sleep(0.005)
    return None


def hello(session: str) -> bytes:
    return wire.encode(wire.Hello(wire.PROTOCOL, session, 0))


def strangers(address: str) -> list[tuple[str, str]]:
    """What somebody may try who can reach the port, by name."""
    endpoint, _, _ = address.partition("#")
    other, _ = zmq.curve_keypair()
    return [("without a key", endpoint), ("with another key", f"{endpoint}#{other.decode()}")]


def test_only_the_holder_of_the_address_reaches_the_engine():
    link = ClientLink(TCP)
    with peer(zmq.DEALER) as plain, peer(zmq.DEALER) as other, peer(zmq.DEALER) as right, closing(link):
        for made, (name, address) in zip((plain, other), strangers(link.endpoint), strict=True):
            connect(made, address)
            made.send(hello(name))
        raw_port = int(link.endpoint.partition("#")[0].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", raw_port)) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
            connect(right, link.endpoint)
            right.send(hello("right"))
            frame = receive(link)
            assert frame == hello("right")
            link.accept_sender()
            assert receive(link, 0.3) is None
        link.send(b"answer")
        assert right.poll(int(PATIENCE_S * 1000))
        assert right.recv() == b"answer"
        assert not plain.poll(0)
        assert not other.poll(0)
        assert not link.lost_client()


def test_only_the_holder_of_the_address_sends_kv():
    blocks = Blocks("m", 0, 1)
    with closing(Transfer(TCP)) as receiver, closing(Transfer(TCP)) as sender:
        for _, address in strangers(receiver.endpoint):
            until = time.monotonic() + 0.3
            while time.monotonic() < until:
                # Without a handshake nothing may be sent, or what is queued never leaves.
                if sender.can_send(address):
                    sender.send(address, blocks, memoryview(b"false"))
                    break
                time.sleep(0.005)
        until = time.monotonic() + PATIENCE_S
        while not sender.can_send(receiver.endpoint):
            assert time.monotonic() < until
        sender.send(receiver.endpoint, blocks, memoryview(b"true"))
        while (arrived := receiver.receive()) is None:
            assert time.monotonic() < until
            time.sleep(0.005)
        assert bytes(arrived.content) == b"true"
        time.sleep(0.2)
        assert receiver.receive() is None


def test_each_socket_has_a_key_of_its_own_and_files_have_none(tmp_path: Path):
    with closing(ClientLink(TCP)) as one, closing(ClientLink(TCP)) as two:
        assert one.endpoint.partition("#")[2] != two.endpoint.partition("#")[2] != ""
    with closing(ClientLink(f"ipc://{tmp_path}/e")) as link:
        assert "#" not in link.endpoint


def test_an_address_that_is_none_is_refused():
    with peer(zmq.DEALER) as made, pytest.raises(zmq.ZMQError):
        connect(made, "nowhere")
    with peer(zmq.ROUTER) as made, pytest.raises(zmq.ZMQError):
        listen(made, "tcp://no-such-host-here.invalid:1")
