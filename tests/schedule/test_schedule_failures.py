"""Steps that fail: requests that the device can compute end as if nothing had happened."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_builders import make_pool, make_request, make_scheduler, run
from test_schedule_random import ADMISSION_POINTS, PREEMPTIONS, policies, serve, workloads

from hypothesis_profiles import examples
from shoal.core import FinishReason, StepPlan
from shoal.schedule import Conservative
from shoal.schedule.step_limit import TOKENS_PER_ROW


class Device:
    """Decides which steps fail; it learns the requests' sequences from the plans.

    rows, tokens: most that a step may have. poison: seeds of requests with which every step fails. services:
    of which every step fails. random: a function that makes further steps fail, by their number.
    """

    def __init__(self, *, rows=10**6, tokens=10**6, poison=(), services=(), random=lambda number: False):
        self.rows, self.tokens, self.random = rows, tokens, random
        self.poison, self.services = frozenset(poison), frozenset(services)
        self.seeds: dict[int, int] = {}

    def fails(self, plan: StepPlan) -> bool:
        self.seeds.update({joined.seq_id: joined.seed for joined in plan.joined})
        return (
            len(plan.seq_ids) > self.rows
            or sum(plan.new_tokens) > self.tokens
            or any(service in self.services for service, _ in plan.rows_by_service())
            or any(self.seeds[seq_id] in self.poison for seq_id in plan.seq_ids)
            or self.random(plan.number)
        )


def sizes(plans):
    return [len(plan.seq_ids) for plan in plans]


@settings(max_examples=examples(300), deadline=None)
@given(
    work=workloads(),
    admission=st.sampled_from(ADMISSION_POINTS),
    policy=policies,
    preemption=st.sampled_from(PREEMPTIONS),
    rows=st.sampled_from([1, 2, 3, 100]),
    tokens=st.sampled_from([TOKENS_PER_ROW, 2 * TOKENS_PER_ROW, 1000]),
    poison=st.sets(st.integers(0, 13), max_size=3),
    services=st.sets(st.sampled_from("abc"), max_size=1),
)
def test_computable_requests_end_as_if_nothing_had_failed(
    work, admission, policy, preemption, rows, tokens, poison, services
):
    work = {**work, "cancels": {}}
    _, plain = serve({**work, "caching": False, "depth": 1, "max_running": 1}, Conservative())
    poisoned = [request for number, request in enumerate(work["requests"]) if number in poison]
    lost = {request.id for request in poisoned}
    lost |= {request.id for request in work["requests"] if request.service in services}
    device = Device(
        rows=rows, tokens=tokens, poison=[request.seed for request in poisoned], services=services
    )
    _, done = serve(work, admission, **policy, **preemption, fails=device.fails)
    for request in work["requests"]:
        if request.id in lost:
            assert done.ends[request.id] is FinishReason.ERROR
            assert done.tokens[request.id] == []
        else:
            assert done.ends[request.id] is plain.ends[request.id]
            assert done.tokens[request.id] == plain.tokens[request.id]


@settings(max_examples=examples(150), deadline=None)
@given(
    work=workloads(),
    admission=st.sampled_from(ADMISSION_POINTS),
    policy=policies,
    preemption=st.sampled_from(PREEMPTIONS),
    failing=st.sets(st.integers(0, 40), max_size=12),
)
def test_random_failures_and_cancels_leave_no_request_behind(work, admission, policy, preemption, failing):
    _, plain = serve({**work, "caching": False, "depth": 1, "max_running": 1, "cancels": {}}, Conservative())
    device = Device(random=failing.__contains__)
    scheduler, done = serve(work, admission, **policy, **preemption, fails=device.fails)
    for request in work["requests"]:
        tokens, end = done.tokens[request.id], done.ends[request.id]
        assert tokens == plain.tokens[request.id][: len(tokens)]
        if end is FinishReason.CANCELLED:
            assert request.id in work["cancels"]
        elif end is not FinishReason.ERROR:
            assert tokens == plain.tokens[request.id]
    failed = sum(service.failed_steps for service in scheduler.stats().services.values())
    assert failed == len(done.failed)


@settings(max_examples=examples(100), deadline=None)
@given(
    work=workloads(services=("a",)),
    policy=policies,
    preemption=st.sampled_from(PREEMPTIONS),
    iterations=st.sampled_from([2, 5]),
    failing=st.sets(st.integers(0, 40), max_size=12),
)
def test_of_several_iterations_that_fail_none_counts(work, policy, preemption, iterations, failing):
    work = {**work, "cancels": {}, "depth": 1}
    _, plain = serve({**work, "caching": False, "max_running": 1}, Conservative())
    device = Device(random=failing.__contains__)
    _, done = serve(
        work, Conservative(), **policy, **preemption, max_iterations=iterations, fails=device.fails
    )
    for request in work["requests"]:
        if done.ends[request.id] is not FinishReason.ERROR:
            assert done.tokens[request.id] == plain.tokens[request.id]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_batch_too_large_for_the_device_is_tried_ever_more_rarely(depth):
    scheduler = make_scheduler(make_pool(400), depth=depth)
    device = Device(rows=5)
    done = run(scheduler, [make_request(4, 60) for _ in range(16)], fails=device.fails)
    assert set(done.ends.values()) == {FinishReason.STOP}
    # 16 and 8 fail, 4 succeed; 8 are tried again after 1, 2, 4, ... steps.
    assert sizes(done.failed[:2]) == [16, 8]
    assert len(done.plans) > 16 * 60 / 5
    assert len(done.failed) <= 3 + len(done.plans).bit_length()
    assert max(sizes(done.plans[-50:])) == 4


@pytest.mark.parametrize("position", [0, 1, 7, 14, 15])
@pytest.mark.parametrize("depth", [1, 2])
def test_one_request_that_always_fails_is_found_by_halving(position, depth):
    scheduler = make_scheduler(make_pool(400), depth=depth)
    requests = [make_request(4, 40) for _ in range(16)]
    poison = requests[position]
    done = run(scheduler, requests, fails=Device(poison=[poison.seed]).fails)
    assert done.ends.pop(poison.id) is FinishReason.ERROR
    assert list(done.ends.values()) == [FinishReason.STOP] * 15
    assert len(done.failed) <= 6
    # The others decode together again soon.
    assert len(done.plans) < 40 + 25 * depth


def test_a_prompt_too_long_for_a_step_is_computed_in_smaller_chunks():
    scheduler = make_scheduler(make_pool(400))
    done = run(scheduler, [make_request(600, 3)], fails=Device(tokens=200).fails)
    assert list(done.ends.values()) == [FinishReason.STOP]
    assert [sum(plan.new_tokens) for plan in done.failed[:2]] == [600, 304]
    assert len(done.failed) <= 5


def test_a_prompt_that_fails_in_any_step_ends_with_an_error():
    scheduler = make_scheduler(make_pool(400))
    request = make_request(600, 3)
    done = run(scheduler, [request], fails=Device(poison=[request.seed]).fails)
    assert done.ends == {request.id: FinishReason.ERROR}
    assert [sum(plan.new_tokens) for plan in done.failed] == [600, 304, 144, 64, 32, 16]


@pytest.mark.parametrize("order", ["fcfs", "round-robin", "weighted-turns"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_service_that_always_fails_ends_each_request_once_and_others_continue(order, depth):
    pool = make_pool(400, per_merged={"a": 1, "b": 1})
    scheduler = make_scheduler(pool, order=order, depth=depth)
    requests = [make_request(4, 30, service="ab"[number % 2]) for number in range(20)]
    done = run(scheduler, requests, fails=Device(services=["b"]).fails)
    ends = Counter((request.service, done.ends[request.id]) for request in requests)
    assert ends == {("a", FinishReason.STOP): 10, ("b", FinishReason.ERROR): 10}
    assert len(done.failed) <= 10 + 4
    assert scheduler.stats().services["a"].failed_steps == 0
    assert scheduler.stats().services["a"].preemptions == 0


def test_a_limit_is_removed_after_many_steps_without_a_failure():
    scheduler = make_scheduler(make_pool(400))
    device = Device(random={50}.__contains__)
    done = run(scheduler, [make_request(4, 400) for _ in range(4)], fails=device.fails)
    limit = scheduler.services["a"].limit
    assert sizes(done.failed) == [4]
    assert limit.rows == limit.tokens == scheduler.options.max_batched_tokens


@pytest.mark.parametrize("prompts", [1, 2])
def test_a_request_detached_before_its_step_fails_has_no_event(prompts):
    scheduler = make_scheduler()
    requests = [make_request(4, 3) for _ in range(prompts)]
    for request in requests:
        scheduler.submit(request, 0)
    scheduler.schedule(0)
    assert scheduler.detach(requests[0].id, 1) is not None
    assert scheduler.abandon("out of memory", 2) == []
    assert scheduler.pool.live_blocks("a") == 0
    assert scheduler.unfinished == scheduler.waiting == prompts - 1


def test_a_failed_plan_cannot_be_updated():
    scheduler = make_scheduler()
    scheduler.submit(make_request(4, 3), 0)
    plan = scheduler.schedule(0)
    scheduler.abandon("out of memory", 1)
    with pytest.raises(ValueError, match="oldest in flight is none"):
        scheduler.update(plan, None, 2)
