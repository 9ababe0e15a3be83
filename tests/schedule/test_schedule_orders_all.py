"""What holds for every order."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orders_builders import FakeService, decide, make_state, taking_part, view_of

from hypothesis_profiles import examples
from shoal.core import SLO, ConfigError
from shoal.schedule.policies.orders import ORDERS, DoublingBudget, FcfsStrict, order_class
from shoal.schedule.policies.orders.doubling_budget import VARIANTS
from shoal.schedule.policies.orders.fair import Fair, FairQueue
from shoal.schedule.running_batch import RequestTable

EVERY = [cls() for cls in ORDERS.values()] + [DoublingBudget(variant=variant) for variant in VARIANTS[1:]]


class OnlyTheHead(Sequence):
    """A queue of which only the head may be read."""

    def __init__(self, requests):
        self._requests = requests

    def __len__(self):
        return len(self._requests)

    def __iter__(self):
        raise AssertionError("an order walks through the queue")

    def __getitem__(self, at):
        assert at == 0, "an order looks past the head of a queue"
        return self._requests[0]

    def by_index(self):
        return OnlyByIndex(self._requests)


class OnlyByIndex(OnlyTheHead):
    """A queue in which the order ``fair`` may look for the first request of each client."""

    def __getitem__(self, at):
        return self._requests[at]


def a_request(name):
    return st.builds(
        make_state,
        st.just(name),
        prompt=st.integers(1, 5_000),
        service_time_s=st.floats(0, 10),
        generated=st.integers(0, 20),
        predicted=st.integers(21, 50),
        arrival_s=st.floats(0, 5),
        slo=st.sampled_from([SLO(), SLO(ttft_s=1.0, tpot_s=0.1), SLO(e2e_s=3.0)]),
        priority=st.integers(-3, 3),
    )


@st.composite
def some_services(draw):
    services = []
    for name in "abc"[: draw(st.integers(1, 3))]:
        running = draw(st.lists(a_request(name), max_size=5))
        begun = draw(st.sets(st.sampled_from(range(5))))
        last_prefill = draw(st.integers(-1, 20))
        services.append(
            FakeService(
                name,
                waiting=OnlyTheHead(draw(st.lists(a_request(name), max_size=3))),
                running=running,
                prefilling=[request for at, request in enumerate(running) if at in begun],
                last_step=draw(st.integers(last_prefill, 20)),
                last_prefill=last_prefill,
                consecutive_steps=draw(st.integers(0, 10)),
                mean_s=draw(st.floats(0.1, 10)),
                deviation_s=draw(st.floats(0, 5)),
                finished=draw(st.sampled_from([[], [5, 30]])),
            )
        )
    return services


def allow_index(order, services):
    """Let the order ``fair`` look for the first request of each client."""
    for service in services:
        if isinstance(order, Fair):
            service.waiting = service.waiting.by_index()


def is_queue_of(turn, service):
    """Whether a turn admits from the queue of its service, in whatever order."""
    if isinstance(turn.waiting, FairQueue):
        return list(turn.waiting) == list(FairQueue(service.waiting, 0, Fair().prices))
    return turn.waiting is service.waiting


def _taking_part(turns, service):
    return {request for turn in turns for request in taking_part(turn, service)}


@pytest.mark.parametrize("order", EVERY, ids=repr)
@settings(max_examples=examples(25), deadline=None)
@given(services=some_services(), step=st.integers(21, 200))
def test_every_service_has_a_turn_whatever_memory_refuses(order, services, step):
    allow_index(order, services)
    turns = decide(order, *services, step=step)
    by_name = {service.service: service for service in services}
    for turn in turns:
        running = taking_part(turn, by_name[turn.service])
        assert len(set(running)) == len(running)
        assert turn.seq_ids is None or sorted(turn.seq_ids) == turn.seq_ids.tolist()
        if not is_queue_of(turn, by_name[turn.service]):
            assert len(turn.waiting) == 0
    for service in services:
        own = [turn for turn in turns if turn.service == service.service]
        assert _taking_part(own, service) == set(service.requests)
        # A decode does not depend on a prompt of another request.
        unconditional = _taking_part([turn for turn in own if not turn.prefill], service)
        assert unconditional >= set(service.requests) - set(service.prefilling)
        if not isinstance(order, FcfsStrict):
            assert any(is_queue_of(turn, service) for turn in own) or not len(service.waiting)
        if not service.requests and not len(service.waiting):
            assert own == []
    if isinstance(order, FcfsStrict) and turns:
        assert turns[0].waiting is by_name[turns[0].service].waiting


@pytest.mark.parametrize("order", EVERY, ids=repr)
@settings(max_examples=examples(10), deadline=None)
@given(services=some_services())
def test_deciding_twice_is_deciding_once(order, services):
    allow_index(order, services)
    by_name = {service.service: service for service in services}

    def as_lists(turn):
        service = by_name[turn.service]
        return turn.service, taking_part(turn, service), is_queue_of(turn, service), turn.prefill

    first, second = (order.decide(view_of(*services, step=30), 7) for _ in range(2))
    assert list(map(as_lists, first.turns)) == list(map(as_lists, second.turns))
    assert first.until_ns == second.until_ns


@pytest.mark.parametrize("order", EVERY, ids=repr)
def test_priorities_do_not_depend_on_other_requests(order):
    requests = [make_state(service_time_s=at, generated=at, predicted=99) for at in range(6)]
    service = FakeService(running=requests, finished=[3, 30])
    together = order.keys(service, service.running).tolist()
    assert together == [order.keys(service, RequestTable([request]))[0] for request in requests]
    assert order.rank(requests[0], service) == order.rank(requests[0], service)


def test_orders_are_found_by_name_and_unknown_names_refused():
    assert order_class("doubling-budget") is DoublingBudget
    assert set(ORDERS) == {
        "fcfs",
        "fcfs-strict",
        "round-robin",
        "mlfq",
        "doubling-budget",
        "shortest-remaining",
        "edf",
        "priority",
        "fair",
        "weighted-turns",
    }
    with pytest.raises(ConfigError, match="did you mean 'mlfq'"):
        order_class("mlfk")


@pytest.mark.parametrize("order", EVERY, ids=repr)
def test_nothing_to_do_is_no_turn(order):
    assert decide(order, FakeService("a"), FakeService("b")) == []
