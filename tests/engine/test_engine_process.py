"""The loop of the engine process, on a socket that is a list."""

import zmq
from engine_builders import make_engine

from shoal.core import SamplingParams
from shoal.engine import wire
from shoal.engine.choices import expand_choices
from shoal.engine.process import EngineServer


class Frames:
    """A socket whose other end has sent all that it will send."""

    def __init__(self, *messages):
        self.frames = [wire.encode(message) for message in messages]
        self.sent = []

    def recv(self, flags):
        if not self.frames:
            raise zmq.Again
        return self.frames.pop(0)

    def send(self, frame):
        self.sent.append(wire.decode_from_engine(frame))

    def poll(self, timeout):
        raise AssertionError("the loop waits although messages are there")


def left_before_each_step(*messages, model="fake", **options):
    """How many messages were left to take at each step, until told to shut down."""
    engine, _ = make_engine(model, **options)
    socket = Frames(*messages, wire.Shutdown())
    step, left = engine.step, []

    def counted():
        left.append(len(socket.frames))
        return step()

    engine.step = counted
    EngineServer(engine, socket).run()
    return left


def call(number, prompt=8, n=1):
    sampling = SamplingParams(max_tokens=2, n=n, seed=number)
    return wire.Submit.from_requests(expand_choices(f"call-{number}", "a", [97] * prompt, sampling, 0))


def test_steps_go_on_while_many_submissions_arrive():
    assert left_before_each_step(*map(call, range(100)), blocks=400) == [69, 37, 5]


def test_calls_of_many_choices_or_with_long_prompts_are_taken_few_at_a_time():
    assert left_before_each_step(*(call(number, n=20) for number in range(6))) == [5, 3, 1]
    long = [call(number, prompt=40_000) for number in range(4)]
    assert left_before_each_step(*long, model="fake?context=50000", blocks=12_000) == [3, 1]


def test_cancels_are_taken_at_once():
    cancels = [wire.Cancel([f"call-{number}-0"]) for number in range(30)]
    assert left_before_each_step(*map(call, range(30)), *cancels) == []


def test_a_call_that_can_never_be_served_leaves_nothing_behind():
    engine, _ = make_engine()
    socket = Frames(call(1, prompt=300, n=3), wire.Shutdown())
    EngineServer(engine, socket).run()
    assert [type(message) for message in socket.sent] == [wire.Refused]
    assert engine.unfinished == 0
