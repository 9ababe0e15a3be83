"""Services on the same weights decode in one step, and the one whose turn it is notices nothing of it."""

from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from schedule_builders import STEP_NS, make_pool, make_request, make_scheduler, run
from test_schedule_failures import Device
from test_schedule_random import ADMISSION_POINTS, PREEMPTIONS, policies, serve, workloads

from hypothesis_profiles import examples
from shoal.core import ConfigError, FinishReason, StepPlan, StepResult
from shoal.kvcache import BlockPool, KVShape, LayerShape, plan_layout
from shoal.schedule import Scheduler, Slice

NAMES = "ab"


def make_shared(blocks=64, *, names=NAMES, prefix_caching=True, **options):
    """A scheduler of services on the same weights."""
    pool = make_pool(blocks, per_merged=dict.fromkeys(names, 1), prefix_caching=prefix_caching, alike=True)
    return make_scheduler(pool, weights=dict.fromkeys(names, "shared"), **options)


def co_batched_rows(plan: StepPlan) -> int:
    return sum(rows for _, rows in plan.co_batched)


def test_co_batched_decodes_follow_the_rows_of_the_leader():
    requests = [make_request(5, 6), make_request(6, 7, service="b")]
    done = run(make_shared(), requests)
    assert done.log == [
        "0 a: 0+5* | joined 0(0 of 5 cached: 0,1)",
        "1 b: 1+6*; a: 0+1* | joined 1(0 of 6 cached: 2,3)",
        "2 a: 0+1*; b: 1+1*",
        "3 a: 0+1*; b: 1+1*",
        "4 a: 0+1*; b: 1+1* | grown 0(4) 1(5)",
        "5 a: 0+1*; b: 1+1*",
        "6 b: 1+1* | left 0",
        "7 b: 1+1*",
    ]


def test_no_co_batching_without_the_same_weights_or_if_off_or_split():
    pool = make_pool(per_merged={"a": 1, "b": 1}, alike=True)
    split = BlockPool(
        plan_layout(
            dict.fromkeys(NAMES, KVShape("float32", (LayerShape(1, 8, 8),))),
            memory_bytes=1 << 16,
            block_size=4,
            kind="split",
        )
    )
    same, others = dict.fromkeys(NAMES, "shared"), {"a": "one", "b": "other"}
    for some_pool, weights, on in [
        (pool, {}, True),
        (pool, others, True),
        (pool, same, False),
        (split, same, True),
    ]:
        scheduler = make_scheduler(some_pool, weights=weights, co_batch=on)
        for number in range(4):
            scheduler.submit(make_request(5, 6, service=NAMES[number % 2]), 0)
        for _ in range(6):
            plan = scheduler.schedule(0)
            assert plan.seq_ids
            assert not plan.co_batched
            scheduler.update(plan, StepResult.of_step([7] * len(plan.sampled), STEP_NS), STEP_NS)


def test_services_whose_blocks_differ_cannot_share_weights():
    with pytest.raises(ConfigError, match="services a and b cannot share weights"):
        make_scheduler(make_pool(per_merged={"a": 1, "b": 2}), weights=dict.fromkeys(NAMES, "shared"))


def test_a_bound_below_one_is_refused():
    with pytest.raises(ConfigError, match="co_batch_rows must be at least 1, got 0"):
        make_shared(co_batch_rows=0)


@settings(max_examples=examples(150), deadline=None)
@given(workloads(), st.sampled_from(ADMISSION_POINTS), policies, st.sampled_from(PREEMPTIONS))
def test_outputs_are_those_of_services_that_step_by_themselves(work, admission, policy, preemption):
    work = {**work, "cancels": {}}
    _, together = serve(work, admission, **policy, **preemption)
    _, apart = serve(work, admission, co_batch=False, **policy, **preemption)
    assert together.tokens == apart.tokens
    assert together.ends == apart.ends
    assert not any(plan.co_batched for plan in apart.plans)


@settings(max_examples=examples(150), deadline=None)
@given(workloads(), st.sampled_from(ADMISSION_POINTS), policies, st.sampled_from(PREEMPTIONS))
def test_no_step_exceeds_the_bounds(work, admission, policy, preemption):
    scheduler, done = serve(work, admission, **policy, **preemption)
    for plan in done.plans:
        assert sum(plan.new_tokens) <= scheduler.options.max_batched_tokens
        assert sum(rows for _, rows in plan.co_batched) <= (scheduler.options.co_batch_rows or 1_000)
        assert {name for name, _ in plan.co_batched} <= work["weights"].keys() - {plan.service}


def leaders_part(plan: StepPlan) -> StepPlan:
    """What a plan says about its own service, and about all services together."""
    own = plan.rows_by_service()[0][1]
    seq_ids = plan.seq_ids[own]
    return replace(
        plan,
        seq_ids=seq_ids,
        new_tokens=plan.new_tokens[own],
        sampled=tuple(row for row in plan.sampled if row < own.stop),
        grown=tuple(grown for grown in plan.grown if grown[0] in seq_ids),
        co_batched=(),
    )


@settings(max_examples=examples(100), deadline=None)
@given(workloads(), st.sampled_from(ADMISSION_POINTS), policies, st.sampled_from(PREEMPTIONS))
def test_the_leader_gets_the_step_that_it_would_get_alone(work, admission, policy, preemption):
    """At every decision the same service, rows, blocks, admissions, preemptions and copies."""
    schedule = Scheduler.schedule

    def compared(scheduler, now_ns):
        alone = deepcopy(scheduler)
        for state in alone._services.values():
            state.running._bind()
        alone._builder._co_batcher.form = lambda leader, scheduled, admitted: []
        expected, plan = schedule(alone, now_ns), schedule(scheduler, now_ns)
        assert (leaders_part(plan) if isinstance(plan, StepPlan) else plan) == expected
        return plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "schedule", compared)
        serve(work, admission, **policy, **preemption)


def first_steps(done, requests):
    """In which step each was admitted first."""
    ids = {tuple(request.prompt): request.id for request in requests}
    steps = {}
    for plan in done.plans:
        for joined in plan.joined:
            steps.setdefault(ids[tuple(joined.tokens[: joined.prompt_tokens])], plan.number)
    return steps


@example(
    [("a", 1, 12, 0), ("b", 1, 2, 0), ("b", 1, 1, 8), ("a", 1, 1, 8), *[(name, 1, 1, 0) for name in "aba"]]
)
@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(1, 9), st.integers(1, 30), st.sampled_from([0, 0, 1, 8])
        ),
        min_size=1,
        max_size=20,
    )
)
def test_first_come_first_served_admits_in_the_same_steps_and_needs_no_more_of_them(work):
    def serve_together(co_batch):
        scheduler = make_shared(400, names="abc", co_batch=co_batch)
        step, coming, requests, hurried = 0, [], [], []
        for number, (service, prompt, output, after) in enumerate(work):
            step += after
            requests.append(make_request(prompt, output, id=f"{number}", service=service))
            coming.append((step, requests[-1]))

        def before_step(step, _):
            while coming and (coming[0][0] <= step or not scheduler.unfinished):
                arrives, request = coming.pop(0)
                scheduler.submit(request, step * STEP_NS)
                hurried.extend([request.id] * (arrives > step))
            return bool(coming)

        done = run(scheduler, before_step=before_step)
        return first_steps(done, requests), len(done.plans), hurried

    (together, steps, hurried), (apart, more_steps, _) = serve_together(True), serve_together(False)
    assert steps <= more_steps
    # Requests that arrive early because nothing is left to do share steps with other requests than apart.
    if not hurried:
        assert all(together[request] <= apart[request] for request in apart)


@pytest.mark.parametrize("order", ["weighted-turns", "round-robin", "fcfs", "mlfq", "doubling-budget"])
def test_prompts_of_a_service_whose_decodes_take_part_all_the_time_do_not_wait_longer(order):
    """Its decodes are in every step of the other, which has more requests: that is no turn of its own."""
    waits = []
    for co_batch in (True, False):
        scheduler = make_shared(400, order=order, co_batch=co_batch, execution_s=50 * STEP_NS / 1e9)
        requests = [make_request(4, 60) for _ in range(5)] + [make_request(4, 60, service="b")]
        late = make_request(4, 5, service="b")

        def before_step(step, _, scheduler=scheduler, late=late):
            if step == 20:
                scheduler.submit(late, step * STEP_NS)
            return step < 20

        done = run(scheduler, requests, before_step=before_step)
        waits.append(first_steps(done, [*requests, late])[late.id] - 20)
    together, apart = waits
    assert together <= apart


def test_a_decode_without_a_free_block_waits_for_its_own_turn():
    """The pool has 6 blocks of 4 tokens, two of which are cached: a step of their own evicts these."""
    scheduler = make_shared(6)

    def before_step(step, _):
        if step == 1:
            assert scheduler.pool.usage().services["a"].cached_blocks == 2
            scheduler.submit(make_request(3, 8), 0)
            scheduler.submit(make_request(3, 8, service="b"), 0)
        return step == 0

    done = run(scheduler, [make_request(8, 1)], before_step=before_step)
    assert done.log[6:] == [
        "6 a: 1+1*; b: 2+1*",
        "7 a: 1+1*; b: 2+1* | grown 1(1)",
        "8 a: 1+1*",
        "9 b: 2+1* | left 1 | grown 2(1)",
        "10 b: 2+1*",
    ]


def test_a_decode_at_the_end_of_a_slice_waits_for_its_own_turn():
    """The first token of each comes with its prompt, three more are a slice's."""
    scheduler = make_shared(admission=Slice(tokens=3))
    done = run(scheduler, [make_request(4, 8), make_request(4, 8, service="b")])
    assert done.log[2:8] == [
        "2 a: 0+1*; b: 1+1*",
        "3 a: 0+1*; b: 1+1* | grown 0(4)",
        "4 a: 0+1*",
        "5 b: 1+1*; a: 0+1* | grown 1(5)",
        "6 a: 0+1*; b: 1+1*",
        "7 a: 0+1*; b: 1+1*",
    ]


def test_co_batched_requests_do_not_starve():
    """A starved request would have a turn of its service, which in fact is always that of the other."""
    scheduler = make_shared(starvation_s=4 * STEP_NS / 1e9)
    done = run(scheduler, [make_request(4, 40), make_request(4, 39, service="b")])
    assert [plan.service for plan in done.plans] == ["a", "b"] + ["a"] * 38
    assert all(plan.co_batched for plan in done.plans[1:])


def test_services_with_the_longest_time_without_a_step_come_first():
    """With one row of others to a step, four services take every second one."""
    scheduler = make_shared(names="abcd", co_batch_rows=1)
    done = run(scheduler, [make_request(4, 12, service=service) for service in "abcd"])
    pairs = [{plan.service, *(name for name, _ in plan.co_batched)} for plan in done.plans[4:]]
    assert all(one | other == set("abcd") for one, other in zip(pairs[0:16:2], pairs[1:16:2], strict=True))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_co_batch_too_large_for_the_device_is_tried_ever_more_rarely(depth):
    """Each service fits by itself, both do not."""
    scheduler = make_shared(400, depth=depth)
    requests = [make_request(4, 60, service=NAMES[number % 2]) for number in range(16)]
    done = run(scheduler, requests, fails=Device(rows=10).fails)
    assert set(done.ends.values()) == {FinishReason.STOP}
    assert len(done.failed) <= 2 + len(done.plans).bit_length()
    assert any(plan.co_batched for plan in done.failed)


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("depth", [1, 2])
def test_a_failing_request_does_not_affect_others_of_either_service(position, depth):
    """It fails from its tenth token on, in a step of both services."""
    scheduler = make_shared(400, depth=depth)
    requests = [make_request(4, 40, service=NAMES[number % 2]) for number in range(8)]
    poison = requests[position]
    seq_ids = set()

    def fails(plan):
        seq_ids.update(new.seq_id for new in plan.joined if new.seed == poison.seed)
        known = len(run_tokens.get(poison.id, ()))
        return known >= 10 and not seq_ids.isdisjoint(plan.seq_ids)

    run_tokens = {}

    def before_step(_, done):
        run_tokens.update(done.tokens)

    done = run(scheduler, requests, before_step=before_step, fails=fails)
    assert done.failed[0].co_batched
    assert done.ends.pop(poison.id) is FinishReason.ERROR
    assert list(done.ends.values()) == [FinishReason.STOP] * 7
    assert len(done.failed) <= 8
