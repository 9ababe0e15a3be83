"""The main loop of the engine process, with a list as its link."""

from contextlib import closing

import pytest
from engine_builders import make_engine

from shoal.core import SamplingParams
from shoal.engine import wire
from shoal.engine.migration.transfer import Transfer
from shoal.engine.process.server import EngineServer, Services
from shoal.frontend.choice_requests import expand_choices


class Over(Exception):
    """Raised when all messages are handled."""


class Frames:
    """A link with a fixed list of messages; after the last one the server ends."""

    from_client = True

    def __init__(self, *messages):
        self.frames = [wire.encode(message) for message in messages]
        self.sent = []

    def receive(self):
        return self.frames.pop(0) if self.frames else None

    def lost_client(self):
        return False

    def has_messages(self):
        return bool(self.frames)

    def send(self, frame):
        self.sent.append(wire.decode_from_engine(frame))

    def wait(self, timeout_ms):
        assert not self.frames, "the loop waits although messages are there"
        raise Over


class StrangerFirst(Frames):
    """A link whose sender is not the client before its first message."""

    from_client = False

    def accept_sender(self):
        self.from_client = True


def serve(engine, info, link):
    with closing(Transfer("inproc://kv")) as transfer, pytest.raises(Over):
        EngineServer(engine, link, transfer, Services(engine, info, lambda info: None)).run()


def submitted_before_each_step(*messages, model="fake", **options):
    """How many calls had been submitted at each step, up to the last one that found new ones."""
    engine, info = make_engine(model, **options)
    step, submit, calls, counts = engine.step, engine.submit, [], []

    def counted():
        if len(calls) > (counts[-1] if counts else 0):
            counts.append(len(calls))
        return step()

    def noted(*requests):
        calls.append(requests)
        submit(*requests)

    engine.step, engine.submit = counted, noted
    serve(engine, info, Frames(*messages))
    return counts


def call(number, prompt=8, n=1):
    sampling = SamplingParams(max_tokens=2, n=n, seed=number)
    return wire.Submit.from_requests(expand_choices(f"call-{number}", "a", [97] * prompt, sampling, 0))


def test_steps_go_on_while_many_calls_arrive():
    assert submitted_before_each_step(*map(call, range(100)), blocks=400) == [32, 64, 96, 100]


def test_few_large_calls_are_submitted_per_step():
    assert submitted_before_each_step(*(call(number, n=20) for number in range(6))) == [2, 4, 6]
    long = [call(number, prompt=20_000) for number in range(4)]
    assert submitted_before_each_step(*long, model="fake?context=50000", blocks=12_000) == [2, 4]


def test_cancels_and_stats_do_not_wait_for_submissions():
    calls = [call(number, n=8) for number in range(200)]
    cancels = [wire.Cancel([choice.id for choice in message.choices]) for message in calls]
    assert submitted_before_each_step(*calls, *cancels) == []
    assert submitted_before_each_step(*calls[:8], *cancels[4:8]) == [4]
    engine, info = make_engine()
    socket = Frames(*calls, wire.AskStats(7))
    serve(engine, info, socket)
    assert socket.sent[0].key == 7


def test_a_call_that_can_never_be_served_leaves_nothing_behind():
    engine, info = make_engine()
    socket = Frames(call(1, prompt=300, n=3))
    serve(engine, info, socket)
    assert [type(message) for message in socket.sent] == [wire.Refused]
    assert engine.unfinished == 0


@pytest.mark.parametrize(("ahead_s", "shifted_s"), [(0, 0), (-0.9, 0), (0.9, 0), (5000, 5000), (-3, -3)])
def test_arrival_times_are_converted_from_another_hosts_clock(monkeypatch, ahead_s, shifted_s):
    engine, info = make_engine()
    monkeypatch.setattr(engine, "now_ns", lambda: 10**13)
    arrivals = []
    monkeypatch.setattr(engine, "submit", lambda *requests: arrivals.extend(r.arrival_ns for r in requests))
    hello = wire.Hello(wire.PROTOCOL, "session", 10**13 - int(ahead_s * 1e9))
    serve(engine, info, StrangerFirst(hello, call(1, n=2)))
    assert arrivals == [shifted_s * 10**9] * 2
