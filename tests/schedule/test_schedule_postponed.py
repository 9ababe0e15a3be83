"""Postponed rows, which cannot be sampled yet: outputs do not change, other requests are not delayed."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_builders import STEP_NS, make_pool, make_request, make_scheduler, run
from test_schedule_random import (
    ADMISSION_POINTS,
    PREEMPTIONS,
    check_ends,
    policies,
    serve,
    workloads,
)

from hypothesis_profiles import examples
from shoal.core import NO_TOKEN, Failure, FinishReason, Idle, StepPlan, StepResult
from shoal.schedule import Conservative, Slice
from shoal.schedule.results import check_result
from shoal.schedule.starvation import starving


def by_chance(seed, share):
    """Says so in a share of all cases."""
    draws = random.Random(seed)
    return lambda seq_id: draws.random() < share


@settings(max_examples=examples(200), deadline=None)
@given(
    work=workloads(),
    admission=st.sampled_from(ADMISSION_POINTS),
    policy=policies,
    preemption=st.sampled_from(PREEMPTIONS),
    seed=st.integers(0, 999),
    shares=st.tuples(st.sampled_from([0.1, 0.5, 0.9]), st.sampled_from([0.1, 0.5, 1.0])),
    iterations=st.sampled_from([1, 1, 4]),
)
def test_postponed_rows_change_no_output(work, admission, policy, preemption, seed, shares, iterations):
    if iterations > 1:
        work = {**work, "depth": 1}
    _, plain = serve({**work, "caching": False, "depth": 1, "max_running": 1, "cancels": {}}, Conservative())
    scheduler, done = serve(
        work,
        admission,
        **policy,
        **preemption,
        max_iterations=iterations,
        postpones=by_chance(seed, shares[0]),
        is_ready=by_chance(seed + 1, shares[1]),
    )
    check_ends(work, scheduler, done)
    for name, tokens in done.tokens.items():
        if done.ends[name] is FinishReason.CANCELLED:
            assert tokens == plain.tokens[name][: len(tokens)]
        else:
            assert (tokens, done.ends[name]) == (plain.tokens[name], plain.ends[name])


@settings(max_examples=examples(100), deadline=None)
@given(
    work=workloads(),
    admission=st.sampled_from(ADMISSION_POINTS),
    policy=policies,
    preemption=st.sampled_from(PREEMPTIONS),
    seed=st.integers(0, 999),
    failing=st.sets(st.integers(0, 40), max_size=8),
)
def test_postponed_rows_change_no_output_with_failing_steps(
    work, admission, policy, preemption, seed, failing
):
    work = {**work, "cancels": {}}
    _, plain = serve({**work, "caching": False, "depth": 1, "max_running": 1}, Conservative())
    _, done = serve(
        work,
        admission,
        **policy,
        **preemption,
        fails=lambda plan: plan.number in failing,
        postpones=by_chance(seed, 0.4),
        is_ready=by_chance(seed + 1, 0.4),
    )
    for request in work["requests"]:
        if done.ends[request.id] is not FinishReason.ERROR:
            assert done.tokens[request.id] == plain.tokens[request.id]


@pytest.mark.parametrize("depth", [1, 2])
def test_others_continue_without_one_that_never_becomes_ready(depth):
    scheduler = make_scheduler(make_pool(400), depth=depth)
    requests = [make_request(4, 40) for _ in range(3)]
    slow = 1  # the second that is admitted
    left = []

    def before_step(step, done):
        left.append(len(done.ends))

    done = run(
        scheduler,
        requests,
        before_step=before_step,
        postpones=lambda seq_id: seq_id == slow and min(left[-1], 2) < 2,
        is_ready=lambda seq_id: False,
    )
    assert set(done.ends.values()) == {FinishReason.STOP}
    # It takes part again only when nothing else is left to do.
    with_it = [plan.number for plan in done.plans if slow in plan.seq_ids]
    assert all(number <= depth or number >= 40 for number in with_it)
    assert sum(len(plan.seq_ids) for plan in done.plans if plan.number < 40) <= 2 * 40 + depth


def test_a_plan_in_flight_behind_may_give_its_token():
    """With two plans in flight the second has the row too: by then it may be sampled."""
    scheduler = make_scheduler(depth=2)
    scheduler.submit(make_request(4, 3), 0)
    first, second = scheduler.schedule(0), scheduler.schedule(0)
    assert first.seq_ids == second.seq_ids == (0,)
    scheduler.update(first, StepResult([[NO_TOKEN]], [STEP_NS], postponed=frozenset({0})), STEP_NS)
    assert scheduler.postponed == [0]
    assert isinstance(scheduler.schedule(STEP_NS), Idle)
    [event] = scheduler.update(second, StepResult.of_step([7], STEP_NS), 2 * STEP_NS)
    assert (event.tokens, event.position) == ((7,), 0)
    assert scheduler.postponed == []
    third = scheduler.schedule(2 * STEP_NS)
    assert isinstance(third, StepPlan)
    assert (third.seq_ids, third.new_tokens, third.sampled) == ((0,), (1,), (0,))


def test_a_postponed_request_may_be_cancelled_and_detached():
    scheduler = make_scheduler()
    requests = [make_request(4, 3), make_request(4, 3)]
    scheduler.submit_all(requests, 0)
    plan = scheduler.schedule(0)
    result = StepResult([[NO_TOKEN, NO_TOKEN]], [STEP_NS], postponed=frozenset({0, 1}))
    assert scheduler.update(plan, result, STEP_NS) == []
    assert isinstance(scheduler.schedule(STEP_NS), Idle)
    assert scheduler.cancel(requests[0].id, STEP_NS).finish is FinishReason.CANCELLED
    rest = scheduler.detach(requests[1].id, STEP_NS)
    assert rest.output_tokens == ()
    scheduler.ready([0, 1])
    assert scheduler.unfinished == 0
    assert scheduler.pool.live_blocks("a") == 0


def test_a_postponed_request_needs_no_wake_up():
    """It would starve by now, were it not left out on purpose."""
    scheduler = make_scheduler(starvation_s=3 * STEP_NS / 1e9)
    scheduler.submit(make_request(4, 3), 0)
    plan = scheduler.schedule(0)
    scheduler.update(plan, StepResult([[NO_TOKEN]], [STEP_NS], postponed=frozenset({0})), STEP_NS)
    assert scheduler.schedule(90 * STEP_NS) == Idle(None)
    scheduler.ready([0])
    assert isinstance(scheduler.schedule(91 * STEP_NS), StepPlan)


def test_a_postponed_request_does_not_block_other_starved_requests():
    scheduler = make_scheduler(starvation_s=3 * STEP_NS / 1e9)
    requests = [make_request(4, 9), make_request(4, 9)]
    scheduler.submit_all(requests, 0)
    plan = scheduler.schedule(0)
    scheduler.update(plan, StepResult([[NO_TOKEN, 5]], [STEP_NS], postponed=frozenset({0})), STEP_NS)
    [starved] = starving(scheduler._services.values(), 90 * STEP_NS)
    assert starved.request.id == requests[1].id


def test_a_postponed_request_is_not_co_batched():
    pool = make_pool(per_merged={"a": 1, "b": 1}, alike=True)
    scheduler = make_scheduler(pool, weights={"a": "same", "b": "same"})
    for name in "ab":
        scheduler.submit(make_request(4, 9, id=name, service=name), 0)
    first = scheduler.schedule(0)
    scheduler.update(first, StepResult.of_step([5], STEP_NS), STEP_NS)
    second = scheduler.schedule(STEP_NS)
    late = second.sampled.index(second.seq_ids.index(1))
    tokens = [NO_TOKEN if place == late else 6 for place in range(len(second.sampled))]
    scheduler.update(second, StepResult([tokens], [STEP_NS], postponed=frozenset({late})), 2 * STEP_NS)
    assert scheduler.postponed == [1]
    third = scheduler.schedule(2 * STEP_NS)
    assert third.seq_ids == (0,)
    scheduler.update(third, StepResult.of_step([7], STEP_NS), 3 * STEP_NS)
    scheduler.ready([1])
    assert set(scheduler.schedule(3 * STEP_NS).seq_ids) == {0, 1}


def test_nothing_is_preempted_for_a_slice_while_a_request_is_postponed():
    scheduler = make_scheduler(make_pool(6), admission=Slice(tokens=2))
    scheduler.submit_all([make_request(4, 9, ignore_eos=True) for _ in range(2)], 0)
    plan = scheduler.schedule(0)
    scheduler.update(plan, StepResult([[NO_TOKEN] * 2], [STEP_NS], postponed=frozenset({0, 1})), STEP_NS)
    assert isinstance(scheduler.schedule(STEP_NS), Idle)
    assert scheduler.running == 2


@pytest.mark.parametrize(
    "result",
    [
        StepResult([[5, 6]], [1], postponed=frozenset({0})),
        StepResult([[NO_TOKEN, 6], [5, 6]], [1, 1], postponed=frozenset({0})),
        StepResult([[NO_TOKEN, 6], [NO_TOKEN, 6]], [1, 1], postponed=frozenset({0})),
        StepResult([[5, NO_TOKEN]], [1], postponed=frozenset({2})),
        StepResult([[NO_TOKEN, 6]], [1], postponed=frozenset({-1})),
        StepResult([[NO_TOKEN, 6]], [1], postponed=frozenset({0}), failures={0: Failure("why")}),
        StepResult([[NO_TOKEN, 6]], [1], counts=[1, 1], postponed=frozenset({0})),
    ],
    ids=str,
)
def test_a_result_that_cannot_have_postponed_these_rows_is_refused(result):
    plan = StepPlan(number=3, service="a", seq_ids=(0, 1), new_tokens=(1, 1), sampled=(0, 1), iterations=2)
    with pytest.raises(ValueError, match="plan 3"):
        check_result(plan, result)
