"""Orders from elsewhere: by submission, round robin, feedback queue, shortest job, earliest deadline."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orders_builders import SECOND, FakeService, Machine, decide, make_state, taking_part

from shoal.core import SLO, ConfigError
from shoal.schedule.policies.orders import (
    MAX_DELAY_STEPS,
    ClientPriority,
    EarliestDeadline,
    Fcfs,
    FcfsStrict,
    Mlfq,
    RoundRobin,
    ShortestRemaining,
)
from shoal.schedule.running_batch import RequestTable


def requests(service, count, **traits):
    return [make_state(service, **traits) for _ in range(count)]


# First come, first served


def test_fcfs_takes_the_oldest_prompt_then_the_service_without_a_step_for_longest():
    a = FakeService("a", running=requests("a", 1), last_step=4)
    b = FakeService("b", waiting=requests("b", 1), running=requests("b", 1), last_step=3)
    turns = decide(Fcfs(), a, b, step=5)
    assert [(turn.service, turn.prefill) for turn in turns] == [("b", True), ("b", False), ("a", False)]


def test_fcfs_passes_over_no_service_for_long():
    a = FakeService("a", running=requests("a", 1), last_step=0)
    b = FakeService("b", waiting=requests("b", 1), running=requests("b", 1), last_step=MAX_DELAY_STEPS)
    assert decide(Fcfs(), a, b, step=MAX_DELAY_STEPS)[0].service == "b"
    assert decide(Fcfs(), a, b, step=MAX_DELAY_STEPS + 1)[0].service == "a"


def test_fcfs_strict_admits_for_the_service_of_the_oldest_alone():
    b, a = requests("b", 1), requests("a", 2)
    turns = decide(
        FcfsStrict(), FakeService("a", waiting=a[1:], running=a[:1]), FakeService("b", waiting=b, running=[])
    )
    assert [turn.service for turn in turns] == ["b", "a"]
    assert turns[0].waiting is b
    assert list(turns[1].waiting) == []


# Round robin


def test_decodes_go_round_by_quota():
    services = [
        FakeService(name, running=requests(name, 2), quota=quota) for name, quota in (("a", 3), ("b", 2))
    ]
    assert Machine(RoundRobin(), *services).run(12) == "aaabb" * 2 + "aa"


def test_a_service_alone_is_not_held_up_by_its_quota():
    a = FakeService("a", running=requests("a", 1), quota=2)
    assert Machine(RoundRobin(), a).run(5) == "aaaaa"


def test_prompts_go_round_and_delay_decodes_by_one_step():
    """Capitals are prompt steps; the decodes of a prompt's own service ride along."""
    services = [FakeService(name, waiting=requests(name, 3)) for name in "abc"]
    machine = Machine(RoundRobin(), *services)
    assert machine.run(24) == "ABa" + "CbaAcbBac" * 2 + "Cba"
    assert machine.run(19) == "a" * 7 + "c" * 8 + "b" * 4


def test_within_a_service_the_oldest_is_prefilled_first():
    waiting = requests("a", 3)
    turn = decide(RoundRobin(), FakeService("a", waiting=waiting))[0]
    assert turn.waiting is waiting


def test_where_no_prompt_fits_decodes_go_on_by_quota():
    services = [
        FakeService(name, waiting=requests(name, 1), running=requests(name, 1), quota=2) for name in "ab"
    ]
    machine = Machine(RoundRobin(), *services)
    machine.admits = False
    assert machine.run(8) == "aabbaabb"
    machine.admits = True
    assert machine.run(4) == "AbBa"


def test_a_decode_turn_computes_no_prompt():
    decode, begun = requests("a", 2)
    service = FakeService("a", running=[decode, begun], prefilling=[begun])
    turns = decide(RoundRobin(), service)
    assert [(taking_part(turn, service), turn.prefill) for turn in turns] == [
        ([decode, begun], True),
        ([decode], False),
    ]


def test_a_prompt_does_not_count_as_a_decode():
    begun, decode, other = (
        make_state("a", number=0),
        make_state("a", number=5),
        make_state("b", number=3),
    )
    services = (
        FakeService("a", running=[begun, decode], prefilling=[begun]),
        FakeService("b", running=[other]),
    )
    turns = decide(EarliestDeadline(default_s=float("inf")), *services)
    assert [(turn.service, turn.prefill) for turn in turns] == [("a", True), ("b", False), ("a", False)]


# Feedback queue


def feedback(**options):
    return Mlfq(**{"quantum_s": 1.0, "levels": 4, "prefill_tokens_per_s": 10.0, **options})


def level_of(request, **options):
    return feedback(**options).levels_of(RequestTable([request]))[0]


@pytest.mark.parametrize(
    ("prompt", "level"),
    [(1, 0), (10, 0), (11, 1), (20, 1), (21, 2), (40, 2), (41, 3), (80, 3), (81, 3), (10_000, 3)],
)
def test_a_request_joins_the_level_whose_quantum_covers_its_prefill(prompt, level):
    assert level_of(make_state(prompt=prompt)) == level


@pytest.mark.parametrize(
    ("prompt", "service_time_s", "level"),
    [
        (5, 0.999, 0),
        (5, 1.0, 1),
        (5, 2.999, 1),
        (5, 3.0, 2),
        (5, 6.999, 2),
        (5, 7.0, 3),
        (5, 1_000, 3),
        (15, 1.999, 1),  # joined level 1: quanta 2, then 4
        (15, 2.0, 2),
        (15, 5.999, 2),
        (15, 6.0, 3),
        (35, 3.999, 2),  # joined level 2: quantum 4
        (35, 4.0, 3),
    ],
)
def test_a_request_is_demoted_when_it_has_used_its_quantum(prompt, service_time_s, level):
    assert level_of(make_state(prompt=prompt, service_time_s=service_time_s)) == level


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(0, 300), st.integers(1, 6))
def test_levels_are_those_of_a_queue_that_is_walked_step_by_step(prompt, quarters, levels):
    level = 0
    while level < levels - 1 and 2**level < prompt / 10:
        level += 1
    left = quarters / 4
    while level < levels - 1 and left >= 2**level:
        left -= 2**level
        level += 1
    assert level_of(make_state(prompt=prompt, service_time_s=quarters / 4), levels=levels) == level


def test_lower_levels_first_then_first_come_first_served():
    low, low_too = make_state("b", service_time_s=0.5), make_state("a", service_time_s=0.9)
    high = make_state("a", number=0, service_time_s=1.5)
    a = FakeService("a", running=[high, low_too])
    b = FakeService("b", running=[low])
    turns = decide(feedback(), a, b)
    assert [turn.service for turn in turns] == ["b", "a"]
    assert taking_part(turns[1], a) == [low_too, high]
    low.service_time_ns = SECOND
    assert [turn.service for turn in decide(feedback(), a, b)] == ["a", "b"]


def test_the_queue_is_ranked_by_level():
    assert feedback().rank(make_state(prompt=40), FakeService()) == 2


# Shortest remaining


def test_the_shortest_remaining_time_first():
    fast = FakeService("fast", running=[make_state("fast", predicted=50, generated=10)], finished=[100])
    slow = FakeService("slow", running=[make_state("slow", predicted=30)], finished=[20, 20], mean_s=1.0)
    # 40 tokens of 10 ms against 30 of 50 ms.
    assert [turn.service for turn in decide(ShortestRemaining(), slow, fast)] == ["fast", "slow"]
    assert ShortestRemaining().keys(slow, slow.running) == pytest.approx([1.5])
    slow.requests[0].num_generated = 25
    assert [turn.service for turn in decide(ShortestRemaining(), slow, fast)] == ["slow", "fast"]


def test_before_anything_has_finished_a_token_takes_what_is_assumed():
    service = FakeService(mean_s=5.0)
    assert ShortestRemaining(token_s=0.5).keys(service, RequestTable([make_state(predicted=4)])) == [2.0]


def test_the_queue_is_ranked_by_predicted_tokens_left():
    assert ShortestRemaining().rank(make_state(predicted=9, generated=2), FakeService()) == 7


# Priorities of clients


def test_the_lowest_priority_first_and_equals_by_arrival():
    low, high = make_state("a", priority=3), make_state("a", priority=-2)
    a = FakeService("a", running=[low, high])
    b = FakeService("b", running=[make_state("b", priority=-1), make_state("b", priority=3)])
    turns = decide(ClientPriority(), a, b)
    assert [turn.service for turn in turns] == ["a", "b"]
    assert taking_part(turns[0], a) == [high, low]
    high.num_generated = 50
    assert [turn.service for turn in decide(ClientPriority(), a, b)] == ["a", "b"]
    first, second = make_state("a"), make_state("b")
    services = FakeService("a", running=[first]), FakeService("b", running=[second])
    assert [turn.service for turn in decide(ClientPriority(), *services[::-1])] == ["a", "b"]


def test_a_waiting_request_of_higher_priority_makes_its_service_step():
    a = FakeService("a", running=[make_state("a")])
    b = FakeService("b", waiting=[make_state("b", priority=-1)])
    turns = decide(ClientPriority(), a, b)
    assert [(turn.service, turn.prefill) for turn in turns] == [("b", True), ("a", False)]
    assert ClientPriority().rank(b.waiting[0], b) == -1


# Earliest deadline


@pytest.mark.parametrize(
    ("slo", "generated", "allowed_s"),
    [
        (SLO(ttft_s=2.0, tpot_s=0.5), 0, 2.0),
        (SLO(ttft_s=2.0, tpot_s=0.5), 3, 3.5),
        (SLO(ttft_s=2.0, tpot_s=0.5, e2e_s=3.0), 1, 2.5),
        (SLO(ttft_s=2.0, tpot_s=0.5, e2e_s=3.0), 3, 3.0),
        (SLO(ttft_s=2.0), 0, 2.0),
        (SLO(ttft_s=2.0), 1, 60.0),
        (SLO(ttft_s=2.0, e2e_s=9.0), 1, 9.0),
        (SLO(tpot_s=0.5), 4, 62.0),
        (SLO(e2e_s=90.0), 5, 90.0),
        (SLO(), 5, 60.0),
    ],
)
def test_when_the_next_token_is_due(slo, generated, allowed_s):
    request = make_state(slo=slo, generated=generated, arrival_s=100.0)
    due_ns = (100.0 + allowed_s) * SECOND
    assert EarliestDeadline().keys(FakeService(), RequestTable([request])) == [due_ns]
    assert EarliestDeadline().rank(request, FakeService()) == due_ns


@pytest.mark.parametrize(
    ("slo", "generated", "allowed_s"),
    [
        (SLO(mtpot_s=0.5), 3, 7.5),
        (SLO(mtpot_s=0.5), 0, 60.0),
        (SLO(ttft_s=2.0, mtpot_s=0.5), 0, 2.0),
        (SLO(ttft_s=2.0, tpot_s=1.0, mtpot_s=0.5), 3, 5.0),
        (SLO(mtpot_s=0.5, e2e_s=7.2), 3, 7.2),
    ],
)
def test_a_token_is_due_before_the_gap_is_too_long(slo, generated, allowed_s):
    """The last token came 7 s after arrival."""
    request = make_state(slo=slo, generated=generated, arrival_s=100.0)
    request.last_token_ns = 107 * SECOND
    assert EarliestDeadline().rank(request, FakeService()) == (100.0 + allowed_s) * SECOND


def test_the_earliest_deadline_first():
    """a: due at 3, 6 and 60; b: 4; a's second is ahead of its goals, though it came first."""
    late = make_state("a", arrival_s=0.0)
    ahead = make_state("a", arrival_s=1.0, generated=4, slo=SLO(ttft_s=1.0, tpot_s=1.0))
    urgent = make_state("a", arrival_s=2.0, slo=SLO(ttft_s=1.0))
    middle = make_state("b", arrival_s=0.0, slo=SLO(e2e_s=4.0))
    a = FakeService("a", waiting=[urgent], running=[late, ahead])
    b = FakeService("b", running=[middle])
    turns = decide(EarliestDeadline(), a, b)
    assert [(turn.service, turn.prefill) for turn in turns] == [("a", True), ("b", False), ("a", False)]
    assert taking_part(turns[0], a) == [ahead, late]


@pytest.mark.parametrize(
    ("order", "options", "message"),
    [
        (Mlfq, {"quantum_s": 0.0}, "order mlfq: quantum_s must be at least a nanosecond, got 0.0"),
        (Mlfq, {"levels": 0}, "levels must be at least 1, got 0"),
        (Mlfq, {"prefill_tokens_per_s": 0}, "prefill_tokens_per_s must be above 0, got 0"),
        (ShortestRemaining, {"token_s": -1}, "token_s must be above 0, got -1"),
        (EarliestDeadline, {"default_s": -1}, "default_s must not be negative, got -1"),
    ],
)
def test_invalid_options_are_refused(order, options, message):
    with pytest.raises(ConfigError, match=message):
        order(**options)
