"""The frames and messages between an engine process and its owner."""

import socket
import threading

import pytest
from engine_builders import make_engine
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import ConfigError, EngineDied, ModelUnavailable, ModelUnsupported
from shoal.engine.process import lifeline


@given(st.lists(st.binary(max_size=9), max_size=6), st.data())
def test_frames_are_reassembled_from_any_chunks(payloads, data):
    stream = b"".join(lifeline.LENGTH.pack(len(payload)) + payload for payload in payloads)
    frames, got = lifeline.Frames(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        got += frames.feed(stream[:size])
        stream = stream[size:]
    assert got == payloads


def test_messages_arrive_as_they_were_sent():
    _, info = make_engine("fake", "fake")
    ours, its = socket.socketpair()
    with ours, its:
        engine = lifeline.Lifeline(its)
        start = lifeline.Start(b"x" * 1_000_000, "ipc:///tmp/x", "/tmp/y")
        threading.Thread(target=ours.sendall, args=(lifeline.pack(start),)).start()
        assert engine.receive_start() == start
        messages = [
            lifeline.Loading("weights"),
            lifeline.Ready(info, "ipc:///tmp/x", "ipc:///tmp/x.kv"),
            lifeline.Beat("a step stands still"),
            lifeline.Failed("RuntimeError", "why"),
        ]
        for message in messages:
            engine.send(message)
        frames = lifeline.Frames().feed(ours.recv(1 << 16))
        assert [lifeline.decode_from_engine(frame) for frame in frames] == messages
        ours.close()
        with pytest.raises(ConnectionError):
            engine.receive_start()


@pytest.mark.parametrize("error", [ConfigError, ModelUnavailable, ModelUnsupported])
def test_actionable_errors_keep_their_class(error):
    failed = lifeline.describe_failure(error("do this"))
    again = lifeline.failure_to_error(failed, "loading")
    assert (type(again), str(again)) == (error, "do this")


def test_other_errors_become_engine_died():
    again = lifeline.failure_to_error(lifeline.describe_failure(MemoryError()), "running")
    assert isinstance(again, EngineDied)
    assert str(again) == "the engine failed while running: MemoryError: MemoryError"
