"""When a waiting request may preempt: not for a slot, and only where it gains more than the victims lose."""

import pytest
from schedule_builders import make_pool, make_request, make_scheduler, run
from test_schedule_memory import STEP_NS, step

from shoal.schedule import DoublingBudget, WeightedTurns


def of_two_services(blocks=12, long_s=100.0, **options):
    """Requests of ``b`` take 1 s alone, those of ``a`` as long as is said; 12 blocks of 4 tokens."""
    return make_scheduler(
        make_pool(blocks, per_merged={"a": 1, "b": 1}, prefix_caching=False),
        execution_s={"a": long_s, "b": 1.0},
        **{"order": DoublingBudget(), "victim": "lowest-priority", "preempt_for_waiting": "gain"} | options,
    )


def fill(scheduler, prompts, steps=2):
    """Run requests of ``a`` with these prompt lengths; returns the time."""
    for at, prompt in enumerate(prompts):
        scheduler.submit(make_request(prompt, 40, service="a", id=f"long{at}"), 0)
    now = 0
    for _ in range(steps):
        step(scheduler, now)
        now += STEP_NS
    return now


def preemptions(scheduler):
    return scheduler.stats().services["a"].preemptions


def arrive(scheduler, now, service="b", prompt=12):
    scheduler.submit(make_request(prompt, 1, service=service, id="short"), now)
    step(scheduler, now)


@pytest.mark.parametrize(
    ("long_s", "preempted"),
    [(100.0, 1), (2.0, 1), (0.9, 0)],
    ids=["much longer requests", "longer requests", "shorter requests"],
)
def test_a_request_preempts_only_those_of_services_with_longer_requests(long_s, preempted):
    scheduler = of_two_services(long_s=long_s)
    now = fill(scheduler, [12, 12, 12])
    arrive(scheduler, now)
    assert preemptions(scheduler) == preempted


def test_a_request_does_not_preempt_those_of_its_own_service():
    for mode, expected in (("gain", 0), ("less-urgent", 1)):
        scheduler = of_two_services(long_s=2 * STEP_NS / 1e9, preempt_for_waiting=mode)
        now = fill(scheduler, [9, 9, 9], steps=6)  # beyond the first budget of their service
        assert preemptions(scheduler) == 0
        arrive(scheduler, now, service="a")
        assert preemptions(scheduler) == expected, mode


def test_many_victims_lose_more_than_one_request_gains():
    """Of services that take twice as long, one victim loses less than the request gains, two lose as much."""
    for prompts, expected in (([4] * 6, 0), ([12] * 3, 1)):
        scheduler = of_two_services(long_s=2.0)
        now = fill(scheduler, prompts)
        arrive(scheduler, now, prompt=15)
        assert preemptions(scheduler) == expected, prompts


def test_slots_are_no_reason_to_preempt_but_for_a_starved_request():
    for starvation_s, expected in ((1_000.0, 0), (5 * STEP_NS / 1e9, 1)):
        scheduler = of_two_services(
            1_000, preempt_for_waiting="less-urgent", max_running=2, starvation_s=starvation_s
        )
        now = fill(scheduler, [4, 4])
        scheduler.submit(make_request(4, 1, service="b", id="short"), now)
        for _ in range(8):
            step(scheduler, now)
            now += STEP_NS
        assert preemptions(scheduler) == expected


def test_a_preempted_request_goes_before_new_ones_of_its_service():
    scheduler = of_two_services(order=WeightedTurns())
    now = fill(scheduler, [12, 12, 12])
    arrive(scheduler, now)
    [victim] = scheduler.services["a"].waiting
    scheduler.submit(make_request(2, 1, service="a", id="newcomer"), now)
    assert [request.request.id for request in scheduler.services["a"].waiting] == [
        victim.request.id,
        "newcomer",
    ]


def test_all_requests_are_answered_whatever_may_preempt():
    for mode in ("never", "gain", "less-urgent"):
        scheduler = of_two_services(preempt_for_waiting=mode)
        requests = [make_request(3 + at % 9, 1 + at % 5, service="ab"[at % 2]) for at in range(30)]
        done = run(scheduler, requests)
        assert len(done.ends) == 30


def test_the_number_of_slots_follows_from_memory_and_the_tokens_of_a_step():
    def slots(blocks, **options):
        return make_scheduler(make_pool(blocks), **{"max_running": None} | options).max_running

    assert slots(1_000, max_batched_tokens=2_048) == 512
    assert slots(100, max_batched_tokens=2_048) == 100
    assert slots(1_000, max_batched_tokens=3) == 1
    assert slots(1_000, max_running=7) == 7
