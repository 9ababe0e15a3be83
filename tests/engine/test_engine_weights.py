"""An engine with less memory for weights than its services need."""

import itertools
import logging

from engine_builders import (
    FAKE_WEIGHT_BYTES,
    FETCH_S,
    ByteTokenizer,
    expected_tokens,
    make_engine,
    make_request,
    run_all,
)

from shoal.core import FinishReason, SamplingParams, TokenEvent
from shoal.engine import wire
from shoal.engine.absent_weights import AbsentWeights
from shoal.engine.weights_reports import WeightsReports
from shoal.frontend.reader import ChoiceReader
from shoal.schedule import WeightsOptions
from shoal.schedule.policies.residency import Place
from shoal.schedule.weights_options import DEFAULT_BANDWIDTH

ONE = WeightsOptions(memory_bytes=FAKE_WEIGHT_BYTES)


def run(*services, model="fake", weights=ONE):
    """Requests of these services, one after another; their clock advances by 10 ms whenever it is read."""
    engine, _ = make_engine(model, model, weights=weights)
    engine._clock = itertools.count(0, 10_000_000).__next__
    requests = [make_request(f"r{at}", service=service, max_tokens=5) for at, service in enumerate(services)]
    events = {}
    for request in requests:
        engine.submit(request)
        events |= run_all(engine)
    return engine, requests, events


def test_services_take_turns_in_the_memory():
    engine, requests, events = run("a", "b", "a")
    for request in requests:
        tokens = [token for event in events[request.id] for token in event.tokens]
        assert tokens == expected_tokens(request, 5)
    services = engine.stats().services
    assert (services["a"].weights.place, services["b"].weights.place) == (Place.RESIDENT, Place.ABSENT)
    assert (services["a"].weights.fetches, services["a"].weights.evictions) == (2, 1)
    assert services["b"].weights.fetching_s == FETCH_S


def test_places_of_weights_are_decoded_as_sent():
    engine, _, _ = run("a", "b")
    stats = engine.stats()
    assert {each.weights.place for each in stats.services.values()} == {Place.RESIDENT, Place.ABSENT}
    assert wire.decode_from_engine(wire.encode(wire.Stats(4, stats))).stats == stats


def test_without_a_limit_there_are_no_statistics_of_weights():
    engine, _, _ = run("a", weights=WeightsOptions())
    assert engine.stats().services["a"].weights is None


def test_weights_that_come_and_leave_are_logged_with_their_services(caplog):
    caplog.set_level(logging.DEBUG, "shoal.engine")
    run("a", "b")
    assert [record.getMessage() for record in caplog.records if "weights" in record.getMessage()] == [
        "the weights of a came in 0.250 s",
        "the weights of a leave",
        "the weights of b came in 0.250 s",
    ]
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}


def test_a_failed_fetch_is_a_warning(caplog):
    _, _, events = run("a", model="fake?failing_fetches=1")
    [failed] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert failed.getMessage() == "the weights of a could not be fetched: the disk is gone"
    assert events["r0"][-1].finish is FinishReason.LENGTH  # it was tried again


def test_requests_end_after_three_failures_and_may_go_on_elsewhere():
    engine, _, events = run("a", model="fake?failing_fetches=9")
    assert events["r0"][-1].finish is FinishReason.UNLOADED
    assert events["r0"][-1].error == "its weights cannot be loaded (the disk is gone)"
    assert AbsentWeights(("a",), FAKE_WEIGHT_BYTES / DEFAULT_BANDWIDTH, failing=True) in engine.absent_weights


def test_clients_see_an_error_where_weights_cannot_be_loaded():
    event = TokenEvent("r", finish=FinishReason.UNLOADED, error="gone")
    reader = ChoiceReader(make_request("r"), 0, SamplingParams(), ByteTokenizer())
    delta = reader.read(event, 0)
    assert (delta.finish, delta.error) == (FinishReason.ERROR, "gone")


def test_a_client_is_told_of_absent_weights_when_they_change():
    engine, _ = make_engine("fake", "fake", weights=ONE)
    sent = []
    reports = WeightsReports(
        engine, lambda message: sent.append(wire.decode_from_engine(wire.encode(message)))
    )

    def absent():
        """The services of what was reported since the last call."""
        found = [[weights.services for weights in message.absent] for message in sent]
        sent.clear()
        return found

    reports.send()
    assert absent() == [[("a",), ("b",)]]
    for request_id, service in (("r0", "a"), ("r1", "b")):
        engine.submit(make_request(request_id, service=service))
        run_all(engine)
        reports.send()
        reports.send()
    assert absent() == [[("b",)], [("a",)]]
    engine.submit(make_request("r2", service="b"))
    run_all(engine)
    reports.send()
    assert absent() == []
    reports.restart()
    reports.send()
    [again] = sent
    assert again.absent == (AbsentWeights(("a",), FETCH_S),)


def test_nothing_is_reported_where_all_weights_stay():
    engine, _ = make_engine("fake", "fake")
    sent = []
    WeightsReports(engine, sent.append).send()
    assert not sent
