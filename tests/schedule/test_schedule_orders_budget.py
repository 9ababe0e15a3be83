"""Doubling budget: how budgets run out, and what its variants prefer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orders_builders import SECOND, FakeService, decide, make_state, taking_part

from shoal.core import ConfigError
from shoal.schedule.policies.orders import DoublingBudget
from shoal.schedule.policies.orders.doubling_budget import budget_left, budget_of
from shoal.schedule.running_batch import RequestTable


def key(order, service, request):
    return order.keys(service, RequestTable([request]))[0]


def test_a_budget_is_the_mean_and_the_deviation():
    assert budget_of(FakeService(mean_s=2.0, deviation_s=0.5).traits) == 2.5 * SECOND
    service = FakeService(mean_s=2.0, deviation_s=0.5)
    assert key(DoublingBudget(), service, make_state()) == pytest.approx(2.5 * 2.0)
    assert key(DoublingBudget(), service, make_state(service_time_s=1.0)) == pytest.approx(1.5 * 2.0)


def test_a_service_without_statistics_works():
    assert key(DoublingBudget(), FakeService(mean_s=0.0), make_state(service_time_s=1.0)) == 0.0


@pytest.mark.parametrize(
    ("charged", "left"),
    [(0, 10), (9, 1), (10, 20), (29, 1), (30, 40), (69, 1), (70, 80), (149, 1), (150, 160)],
)
def test_budgets_double_when_q_3q_7q_have_been_charged(charged, left):
    assert budget_left(charged, 10) == left


@settings(deadline=None)
@given(st.integers(1, 50), st.lists(st.integers(1, 40), max_size=30))
def test_what_is_left_is_what_charging_step_by_step_leaves(budget, steps):
    """A step that goes beyond the budget takes the rest from the next one."""
    grant = left = budget
    for step in steps:
        left -= step
        while left <= 0:
            grant *= 2
            left += grant
        assert left > 0
    assert budget_left(sum(steps), budget) == left


def test_a_request_longer_than_the_mean_drops_behind_then_rises_again():
    order, service = DoublingBudget(), FakeService(mean_s=2.0)
    fresh = key(order, service, make_state())
    seen = [key(order, service, make_state(service_time_s=charged)) / fresh for charged in range(0, 8)]
    assert seen == pytest.approx([1.0, 0.5, 2.0, 1.5, 1.0, 0.5, 4.0, 3.5])


def test_a_long_request_lets_shorter_services_pass_when_its_budget_is_used_up():
    short = FakeService("short", waiting=[make_state("short")], mean_s=1.5)
    within, beyond = make_state("long", service_time_s=1.9), make_state("long", service_time_s=2.0)
    long = FakeService("long", running=[within], mean_s=2.0)
    assert decide(DoublingBudget(), short, long)[0].service == "long"
    long.requests = [beyond]
    assert decide(DoublingBudget(), short, long)[0].service == "short"


def test_the_queue_is_ranked_by_the_share_left_whatever_is_known_of_the_service():
    order = DoublingBudget()
    assert order.rank(make_state(), FakeService(mean_s=1.0, deviation_s=2.0)) == 1.0
    assert order.rank(make_state(), FakeService(mean_s=7.0)) == 1.0
    assert order.rank(make_state(service_time_s=1.0), FakeService(mean_s=4.0)) == 0.75
    assert order.rank(make_state(service_time_s=1.0), FakeService(mean_s=1.0)) == 2.0


def test_join_steps_the_service_of_the_smallest_with_waiting_requests_and_decodes():
    old, young = make_state("a", service_time_s=1.0), make_state("a", service_time_s=3.0)
    a = FakeService("a", waiting=[make_state("a")], running=[old, young], mean_s=4.0)
    b = FakeService("b", waiting=[make_state("b")], mean_s=3.0)
    turns = decide(DoublingBudget(), a, b)
    assert [(turn.service, turn.prefill) for turn in turns] == [("a", False), ("b", True), ("a", True)]
    assert taking_part(turns[0], a) == [young, old]
    assert turns[0].waiting is a.waiting


def test_a_waiting_request_that_memory_rejects_no_longer_speaks_for_its_service():
    a = FakeService("a", waiting=[make_state("a")], running=[make_state("a", service_time_s=1.0)], mean_s=1.0)
    b = FakeService("b", running=[make_state("b", service_time_s=1.0)], mean_s=1.2)
    turns = decide(DoublingBudget(), a, b)
    assert [(turn.service, turn.prefill) for turn in turns] == [("b", False), ("a", True), ("a", False)]


def test_equals_are_served_first_come_first_served():
    young, old = (
        FakeService(name, waiting=[make_state(name, number=at)]) for name, at in (("a", 9), ("b", 4))
    )
    assert [turn.service for turn in decide(DoublingBudget(), young, old)] == ["b", "a"]


def test_literal_serves_one_phase_at_a_time():
    decode = make_state("a", service_time_s=1.0)
    begun, far = make_state("a", service_time_s=0.5), make_state("a", service_time_s=0.7)
    waiting = [make_state("a"), make_state("a")]
    a = FakeService("a", waiting=waiting, running=[decode, begun, far], prefilling=[begun, far], mean_s=4.0)
    decodes, prompts = decide(DoublingBudget(variant="literal"), a)
    assert taking_part(decodes, a) == [decode]
    assert (list(decodes.waiting), decodes.prefill) == ([], False)
    assert taking_part(prompts, a) == [far, begun]
    assert (prompts.waiting, prompts.prefill) == (waiting, True)


def test_literal_drains_its_batch_before_requests_join():
    """A running request always has less left than one that waits, until it outlasts its budget."""
    running = make_state("a", service_time_s=0.1)
    a = FakeService("a", waiting=[make_state("a")], running=[running])
    literal = DoublingBudget(variant="literal")
    assert not decide(literal, a)[0].prefill
    running.service_time_ns = 1 * SECOND
    assert decide(literal, a)[0].prefill
    running.service_time_ns = round(2.1 * SECOND)
    assert not decide(literal, a)[0].prefill


def test_batch_puts_fifty_requests_of_1_2_s_before_one_of_1_s():
    many = FakeService("many", waiting=[make_state("many") for _ in range(50)], mean_s=1.2)
    single = FakeService("single", waiting=[make_state("single")], mean_s=1.0)
    assert decide(DoublingBudget(), many, single)[0].service == "single"
    assert decide(DoublingBudget(variant="batch"), many, single)[0].service == "many"
    assert decide(DoublingBudget(variant="batch", max_batch=1), many, single)[0].service == "single"


def test_batch_counts_no_more_requests_than_a_step_serves():
    many = FakeService("many", waiting=[make_state("many") for _ in range(50)])
    request = make_state("many")
    assert key(DoublingBudget(variant="batch"), many, request) == pytest.approx(1 / 50)
    assert key(DoublingBudget(variant="batch", max_batch=8), many, request) == pytest.approx(1 / 8)
    many.requests = [make_state("many") for _ in range(100)]
    assert key(DoublingBudget(variant="batch"), many, request) == pytest.approx(1 / 64)


def test_c_mu_expects_what_past_requests_went_on_to_need():
    """Half of them end after 10 tokens, half after 90: one that is past the 10 has far to go."""
    service = FakeService(mean_s=5.0, finished=[10, 90])
    order = DoublingBudget(variant="c-mu")
    requests = [make_state(generated=generated) for generated in (0, 8, 10, 88)]
    token_s = 5.0 / 50
    assert order.keys(service, RequestTable(requests)) == pytest.approx(
        [remaining * token_s * 5.0 for remaining in (50, 42, 80, 2)]
    )
    limited = make_state(generated=10, max_new_tokens=30)
    assert key(order, service, limited) == pytest.approx(20 * token_s * 5.0)


def test_c_mu_is_as_join_before_the_first_request_has_finished():
    service, request = FakeService(mean_s=2.0, deviation_s=1.0), make_state(service_time_s=1.0)
    assert key(DoublingBudget(variant="c-mu"), service, request) == key(DoublingBudget(), service, request)


def test_invalid_options_are_refused():
    with pytest.raises(ConfigError, match=r"variant must be one of join, literal, batch, c-mu, got 'joyn'"):
        DoublingBudget(variant="joyn")
    with pytest.raises(ConfigError, match="max_batch must be at least 1, got 0"):
        DoublingBudget(max_batch=0)
