"""Weighted turns: services step in proportion to (N / L^2)^1.5, with doubling budget inside a service."""

import math
from collections import Counter

from orders_builders import FakeService, decide, make_state, taking_part

from shoal.schedule import DoublingBudget
from shoal.schedule.policies.orders import WeightedTurns


def test_requests_with_output_come_first():
    """Also one that comes from an engine that died, and was never preempted here."""
    new, resumed, preempted = make_state(service_time_s=0.0), make_state(generated=3), make_state()
    preempted.num_preemptions = 1
    service = FakeService(mean_s=1.0)
    ranks = [WeightedTurns().rank(request, service) for request in (new, resumed, preempted)]
    assert ranks == [1.0, -math.inf, -math.inf]


def shares_of_turns(*services, steps=2_100):
    """How often each steps."""
    turns = Counter()
    for step in range(steps):
        chosen = decide(WeightedTurns(), *services, step=step)[0].service
        service = next(service for service in services if service.service == chosen)
        service.last_step = service.last_turn = step
        turns[chosen] += 1
    return turns


def service_of(name, count, **traits):
    return FakeService(name, running=[make_state(name) for _ in range(count)], **traits)


def test_services_step_as_often_as_their_weights_say():
    """(N / L^2)^1.5 is 16 of a, 4 of b and 1 of c."""
    turns = shares_of_turns(
        service_of("a", 4, mean_s=2 / 16 ** (1 / 3)),
        service_of("b", 4, mean_s=2 / 4 ** (1 / 3)),
        service_of("c", 4, mean_s=2.0),
    )
    assert abs(turns["a"] - 1_600) < 80
    assert abs(turns["b"] - 400) < 60
    assert abs(turns["c"] - 100) < 40


def test_the_number_of_requests_counts_less_than_their_length():
    """b has four times as many, each four times as long: a's weight is 4^1.5 times b's."""
    turns = shares_of_turns(service_of("a", 3, mean_s=1.0), service_of("b", 12, mean_s=4.0))
    assert 6.9 < turns["a"] / turns["b"] < 8.1


def test_the_time_alone_counts_where_it_is_known():
    """Batches inflate b's mean; alone its requests are as short as those of a."""
    unknown = shares_of_turns(service_of("a", 2, mean_s=1.0), service_of("b", 2, mean_s=4.0))
    known = shares_of_turns(
        service_of("a", 2, mean_s=1.0, alone_s=0.5), service_of("b", 2, mean_s=4.0, alone_s=0.5)
    )
    assert unknown["b"] < 100
    assert abs(known["a"] - known["b"]) <= 2


def test_a_waiting_request_counts_where_it_can_join():
    """Each has one that runs, b also one that waits: with it b's weight is larger."""
    a = FakeService("a", running=[make_state("a")], mean_s=1.0)
    b = FakeService("b", running=[make_state("b")], waiting=[make_state("b")], mean_s=1.3)
    turns = decide(WeightedTurns(), a, b)
    assert [(turn.service, turn.prefill) for turn in turns] == [("b", True), ("a", False), ("b", False)]


def test_within_a_service_and_for_memory_it_is_doubling_budget():
    service = FakeService(running=[make_state(service_time_s=at) for at in (0.5, 2.5, 0.9, 0.0)], mean_s=1.0)
    ours, budgets = WeightedTurns(), DoublingBudget()
    assert (ours.keys(service, service.running) == budgets.keys(service, service.running)).all()
    assert [ours.rank(request, service) for request in service.requests] == [
        budgets.rank(request, service) for request in service.requests
    ]
    [turn] = decide(ours, service)
    assert [request.service_time_ns / 1e9 for request in taking_part(turn, service)] == [0.9, 0.5, 2.5, 0.0]


def test_prompts_go_first_with_co_batched_decodes():
    """b has one request that waits; a step of either brings the 16 decodes of a nearer to their ends."""
    a = FakeService("a", running=[make_state("a") for _ in range(16)], companions=["b"], mean_s=1.0)
    b = FakeService("b", waiting=[make_state("b")], companions=["a"], mean_s=1.0)
    assert [turn.service for turn in decide(WeightedTurns(), a, b)] == ["b", "a"]
    a.companions = b.companions = ()
    assert [turn.service for turn in decide(WeightedTurns(), a, b)] == ["a", "b"]


def test_for_prompts_steps_led_by_another_service_do_not_count():
    """Both decode in every step; b, whose requests are longer, has led none for three."""
    a = FakeService(
        "a", running=[make_state("a")], waiting=[make_state("a")], companions=["b"], last_step=9, mean_s=1.0
    )
    b = FakeService(
        "b",
        running=[make_state("b")],
        waiting=[make_state("b")],
        companions=["a"],
        last_step=9,
        last_turn=6,
        mean_s=1.5,
    )
    turns = decide(WeightedTurns(), a, b, step=10)
    assert [(turn.service, turn.prefill) for turn in turns[:2]] == [("b", True), ("a", True)]


def test_another_model_has_as_many_turns_as_against_one_service_with_all_requests():
    """Two services of two requests each that decode together, and one of four on another model."""
    halves = [service_of(name, 2, mean_s=1.0, companions=[other]) for name, other in ("ab", "ba")]
    other = service_of("c", 4, mean_s=1.0)
    turns = Counter()
    for step in range(300):
        chosen = decide(WeightedTurns(), *halves, other, step=step)[0].service
        for service in [other] if chosen == "c" else halves:
            service.last_step = step
        turns[chosen] += 1
    assert turns["c"] == 150
