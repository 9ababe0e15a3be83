"""Adding and removing services of an engine without a model, directly and through its server."""

import threading
from contextlib import closing
from pathlib import Path

import pytest
from engine_builders import FAKE_WEIGHT_BYTES, expected_tokens, make_engine, make_request, run_all

from shoal.core import ConfigError, FinishReason, InvalidRequest, ModelUnsupported, Service
from shoal.engine import wire
from shoal.engine.core import Engine
from shoal.engine.migration.transfer import Transfer
from shoal.engine.process.server import EngineServer, Services
from shoal.schedule import WeightsOptions
from shoal.schedule.policies.residency import Place

FOLDER = Path("anywhere")


def settle(engine, future, limit=10_000):
    """Step until a change is done; events by request."""
    events = {}
    while not future.done():
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        limit -= 1
        assert limit, "the change never comes"
        engine.fake_services.loading.wait(0.001)
    return events


def add(engine, name, model="fake"):
    return engine.add_service(Service(name=name, model=model), FOLDER)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("model", ["fake", "large"])
def test_a_service_is_added_between_two_steps(model, depth):
    engine, _ = make_engine(blocks=640, scheduler={"depth": depth})
    loading = engine.fake_services.loading
    loading.clear()
    future = add(engine, "b", model)
    requests = [make_request(str(number), prompt=9 + number, max_tokens=40) for number in range(4)]
    engine.submit(*requests)
    tokens = {request.id: [] for request in requests}
    for _ in range(10):
        for event in engine.step():
            tokens[event.request_id] += event.tokens
    assert not future.done()
    assert all(tokens.values()), "steps go on while it loads"
    with pytest.raises(InvalidRequest, match="not served here"):
        engine.submit(make_request("early", service="b"))
    loading.set()
    before = engine.fake_pool.layout
    for name, events in settle(engine, future).items():
        tokens[name] += [token for event in events for token in event.tokens]
    assert (engine.fake_pool.layout.merged_bytes == before.merged_bytes) == (model == "fake")
    assert future.result().model == model
    engine.submit(make_request("b", service="b", prompt=5))
    for name, events in run_all(engine).items():
        tokens.setdefault(name, []).extend(token for event in events for token in event.tokens)
    for request in requests:
        assert tokens[request.id] == expected_tokens(request, 40)
    assert tokens["b"] == expected_tokens(make_request("b", service="b", prompt=5), 8)
    engine.fake_pool.check_integrity({})


def test_an_idle_engine_adds_a_loaded_service():
    engine, _ = make_engine()
    engine.step()
    assert engine.idle
    engine.fake_services.loading.clear()
    future = add(engine, "b")
    assert engine.idle, "nothing can be done before it has loaded"
    engine.fake_services.loading.set()
    settle(engine, future)
    assert set(engine.stats().services) == {"a", "b"}


def test_a_plan_of_many_iterations_ends_early_for_a_loaded_service():
    engine, _ = make_engine("fake?step_ms=2", scheduler={"max_iterations": 200})
    engine.submit(make_request("r", max_tokens=200))
    engine.step()  # the prompt
    loading = engine.fake_services.loading
    loading.clear()
    future = add(engine, "b")
    threading.Timer(0.02, loading.set).start()
    assert 0 < sum(len(event.tokens) for event in engine.step()) < 199
    settle(engine, future)


@pytest.mark.parametrize("drain", [True, False])
def test_a_service_is_removed_when_its_requests_have_ended(drain):
    engine, _ = make_engine("fake", "fake", scheduler={"depth": 2, "max_running": 2})
    engine.submit(*[make_request(f"{name}{i}", service=name) for name in "ab" for i in range(3)])
    engine.step()
    future = engine.remove_service("a", drain=drain)
    with pytest.raises(InvalidRequest, match="not served here; available: b"):
        engine.submit(make_request("late"))
    assert engine.remove_service("a", drain=True) is future
    events = settle(engine, future)
    reasons = {name: [e.finish for e in told if e.finish] for name, told in events.items()}
    wanted = FinishReason.LENGTH if drain else FinishReason.CANCELLED
    assert [reasons[f"a{i}"] for i in range(3)] == [[wanted]] * 3
    rest = run_all(engine)
    ended = events | rest
    assert [ended[f"b{i}"][-1].finish for i in range(3)] == [FinishReason.LENGTH] * 3
    assert set(engine.stats().services) == {"b"}
    engine.fake_pool.check_integrity({})


LIMITED = WeightsOptions(memory_bytes=2 * FAKE_WEIGHT_BYTES)


def test_a_service_that_does_not_fit_beside_what_was_pinned_is_refused_before_anything_changes():
    engine, _ = make_engine("fake", "fake", blocks=640, weights=LIMITED)
    layout = engine.fake_pool.layout
    engine.pin_service("a", True).result()
    third = add(engine, "c")
    settle(engine, third)
    assert third.result().pinned is False
    engine.remove_service("c", drain=True)
    settle(engine, add(engine, "d"))
    pinned = engine.add_service(Service(name="e", model="fake", pin=True), FOLDER)
    settle(engine, pinned)
    with pytest.raises(ConfigError, match=r"of 'a' \(.*, pinned\), 'e' \(.*, pinned\), 'b'"):
        pinned.result()
    assert set(engine.stats().services) == {"a", "b", "d"}
    assert engine.fake_pool.layout.merged_bytes == layout.merged_bytes
    engine.submit(make_request("r", service="d"))
    run_all(engine)
    engine.fake_pool.check_integrity({})


def test_invalid_pins_are_rejected():
    engine, _ = make_engine("fake", "fake", "fake", weights=LIMITED)
    engine.pin_service("a", True).result()
    with pytest.raises(ConfigError, match="must be in memory at once"):
        engine.pin_service("b", True).result()
    with pytest.raises(ConfigError, match="no service 'x'; there are: a, b, c"):
        engine.pin_service("x", False).result()


def test_an_idle_engine_fetches_what_is_pinned_at_once():
    engine, _ = make_engine("fake", "fake", "fake", weights=LIMITED)
    while not engine.idle:
        engine.step()
    assert engine.stats().services["c"].weights.place is Place.ABSENT
    engine.pin_service("c", True).result()
    for _ in range(10):
        engine.step()
    assert engine.stats().services["c"].weights.place is Place.RESIDENT


def test_invalid_service_changes_are_rejected():
    engine, _ = make_engine()
    with pytest.raises(ConfigError, match="'a' is there already"):
        add(engine, "a").result()
    with pytest.raises(ConfigError, match="no service 'x'; there are: a"):
        engine.remove_service("x", drain=False).result()
    failing = add(engine, "b", "unsupported")
    settle(engine, failing)
    with pytest.raises(ModelUnsupported, match="computed wrongly"):
        failing.result()
    engine.fake_services.loading.clear()
    first = add(engine, "b")
    with pytest.raises(ConfigError, match="'b' is there already"):
        add(engine, "b").result()
    with pytest.raises(ConfigError, match="being loaded"):
        engine.remove_service("b", drain=True).result()
    engine.fake_services.loading.set()
    settle(engine, first)
    fixed = Engine(engine._scheduler, engine._pool, engine.fake_executor)
    for future in (add(fixed, "c"), fixed.remove_service("a", drain=True)):
        with pytest.raises(ConfigError, match="are fixed"):
            future.result()


def test_a_service_whose_block_exceeds_the_pool_is_rejected():
    engine, _ = make_engine(blocks=4)
    future = add(engine, "b", "large")
    settle(engine, future)
    with pytest.raises(ConfigError, match=r"1024 bytes does not hold one block of service 'b', .* bytes"):
        future.result()


def test_a_request_that_needs_the_whole_pool_delays_new_services():
    engine, info = make_engine("fake?context=100000", blocks=37)
    room = info.services["a"].max_total_tokens
    engine.submit(make_request("r", prompt=8, max_tokens=room - 8))
    engine.step()
    future = add(engine, "b", "large")
    events = settle(engine, future)
    with pytest.raises(ConfigError, match=r"with it a request of 'a' can have \d+ tokens.*try again later"):
        future.result()
    rest = run_all(engine)
    assert sum(len(e.tokens) for e in events.get("r", []) + rest["r"]) >= room - 9
    again = add(engine, "b", "large")
    settle(engine, again)
    assert again.result().model == "large"


class Over(Exception):
    """Raised when all messages are handled."""


class Frames:
    """A link whose client sends each message after the reply to the one before."""

    def __init__(self, *messages):
        self.messages = [wire.encode(message) for message in messages]
        self.sent = []
        self.free = True
        self.from_client = True

    def receive(self):
        if not self.free or not self.messages:
            return None
        self.free = False
        return self.messages.pop(0)

    def send(self, frame):
        message = wire.decode_from_engine(frame)
        self.sent.append(message)
        self.free = self.free or isinstance(message, wire.ServiceChanged)

    def lost_client(self):
        return False

    def has_messages(self):
        return self.free and bool(self.messages)

    def wait(self, timeout_ms):
        if self.free and not self.messages:
            raise Over


def test_replies_to_changes_are_sent_when_they_are_done():
    engine, info = make_engine()
    socket = Frames(
        wire.AddService(1, Service(name="b", model="large"), "somewhere"),
        wire.AddService(2, Service(name="c", model="unsupported"), "somewhere"),
        wire.RemoveService(3, "a", drain=False),
        wire.RemoveService(4, "a", drain=False),
    )
    told = []
    with closing(Transfer("inproc://kv")) as transfer, pytest.raises(Over):
        EngineServer(engine, socket, transfer, Services(engine, info, told.append)).run()
    answers = [message for message in socket.sent if isinstance(message, wire.ServiceChanged)]
    assert [answer.key for answer in answers] == [1, 2, 3, 4]
    assert [set(answer.services) for answer in answers] == [{"a", "b"}, {"a", "b"}, {"b"}, {"b"}]
    assert answers[0].services["b"].model == "large"
    alone, beside = info.services["a"].kv_tokens, answers[0].services["a"].kv_tokens
    assert beside < alone
    assert answers[0].services["a"].max_total_tokens == min(256, beside)
    assert [dict(info.services) for info in told] == [info.services, answers[0].services, answers[2].services]
    assert [answer.error is None for answer in answers] == [True, False, True, False]
    assert "computed wrongly" in answers[1].error
    assert "there are: b" in answers[3].error
    assert set(engine.stats().services) == {"b"}
    each = FAKE_WEIGHT_BYTES
    assert [answer.weight_bytes for answer in answers] == [2 * each, 2 * each, each, each]
    assert [info.weight_bytes for info in told] == [each, 2 * each, each]


def test_replies_to_pins_tell_what_is_pinned():
    engine, info = make_engine("fake", "fake", weights=LIMITED)
    socket = Frames(wire.PinService(1, "x", True), wire.PinService(2, "b", True))
    told = []
    with closing(Transfer("inproc://kv")) as transfer, pytest.raises(Over):
        EngineServer(engine, socket, transfer, Services(engine, info, told.append)).run()
    failed, done = (message for message in socket.sent if isinstance(message, wire.ServiceChanged))
    assert (failed.key, done.key, done.error) == (1, 2, None)
    assert "no service 'x'" in failed.error
    assert [answer.services["b"].pinned for answer in (failed, done)] == [False, True]
    assert [info.services["b"].pinned for info in told] == [False, True]
