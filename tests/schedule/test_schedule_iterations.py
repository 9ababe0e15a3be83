"""Several decode steps under one plan, and several tokens of a row: the same as single steps, early ends."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_builders import STEP_NS, ReplayExecutor, make_pool, make_request, make_scheduler, run
from test_schedule_random import (
    ADMISSION_POINTS,
    PREEMPTIONS,
    check_ends,
    policies,
    serve,
    workloads,
)

from hypothesis_profiles import examples
from shoal.core import ANONYMOUS_TOKEN, FinishReason, StepResult, TokenLogprobs
from shoal.schedule import Conservative, WeightedTurns


def submitted(scheduler, *requests):
    """A scheduler whose requests have computed their prompts and decode."""
    for request in requests:
        scheduler.submit(request, 0)
    plan = scheduler.schedule(0)
    scheduler.update(plan, StepResult.of_step([1] * len(requests), STEP_NS), STEP_NS)
    return scheduler


def committed(scheduler, iterations, now_ns=STEP_NS):
    """A plan of ``iterations`` iterations."""
    decode_run = scheduler.decode_runs.next_run(now_ns, iterations)
    assert decode_run is not None
    assert decode_run.steps == iterations
    plan, _ = scheduler.decode_runs.commit(decode_run, iterations)
    assert plan.iterations == iterations
    return plan


def steps_left(scheduler, now_ns=STEP_NS, most=100):
    decode_run = scheduler.decode_runs.next_run(now_ns, most)
    return 0 if decode_run is None else decode_run.steps


def table(scheduler, service="a"):
    return [list(request.block_ids) for request in scheduler.services[service].running.requests]


# The same as single steps


def merged(plans):
    """The plan with many iterations that says the same as some of one."""
    first, *others = plans
    grown: dict[int, tuple[int, ...]] = {}
    for plan in plans:
        for seq_id, blocks in plan.grown:
            grown[seq_id] = grown.get(seq_id, ()) + blocks
    for number, plan in enumerate(others, start=first.number + 1):
        assert plan.number == number
        assert (plan.seq_ids, plan.new_tokens, plan.sampled) == (
            first.seq_ids,
            first.new_tokens,
            first.sampled,
        )
        assert not any((plan.left, plan.joined, plan.moved, plan.copies, plan.swap_out_copies, plan.zero))
    return replace(first, iterations=len(plans), grown=tuple(sorted(grown.items())))


def compare_with_single_steps(several, single):
    """The same decisions and blocks, plan by plan; returns how many steps came in plans of several."""
    ahead, in_runs = list(single.plans), 0
    for plan in several.plans:
        steps, ahead = ahead[: plan.iterations], ahead[plan.iterations :]
        if plan.iterations > 1:
            # A merged block that changes hands is cleared before the first step.
            zero = tuple(block for step in steps for block in step.zero)
            assert plan.zero == zero
            steps = [replace(step, zero=()) for step in steps]
            plan = replace(plan, zero=())
            in_runs += plan.iterations
        assert replace(plan, grown=tuple(sorted(plan.grown))) == merged(steps)
    assert not ahead
    assert several.tokens == single.tokens
    assert several.ends == single.ends
    return in_runs


@settings(max_examples=examples(150), deadline=None)
@given(
    workloads(services=("a", "b")),
    st.sampled_from(ADMISSION_POINTS),
    policies,
    st.sampled_from(PREEMPTIONS),
    st.integers(2, 12),
)
def test_several_iterations_decide_and_allocate_as_single_steps(work, admission, policy, preemption, most):
    """All are there from the beginning, and end only with their last token.

    No two have an output in common, as in simulations: of blocks that are alike one is published, and the
    blocks of later steps may evict the other before it is known that the new one is alike.
    """
    requests = [
        replace(request, sampling=replace(request.sampling, ignore_eos=True)) for request in work["requests"]
    ]
    plain = {"requests": requests, "arrivals": [0] * len(requests), "cancels": {}, "depth": 1}
    runs = [
        serve(
            {**work, **plain},
            admission,
            vocabulary=None,
            max_iterations=iterations,
            stops_early=False,
            **policy,
            **preemption,
        )
        for iterations in (most, 1)
    ]
    (scheduler, several), (other, single) = runs
    compare_with_single_steps(several, single)
    assert scheduler.stats() == other.stats()
    assert scheduler.pool.usage() == other.pool.usage()


@pytest.mark.parametrize("most", [2, 7, 100])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("block_size", [1, 4])
def test_nearly_all_steps_can_be_made_in_plans_of_several(most, caching, block_size):
    requests = [make_request(3 + at, 30 + 9 * at, max_tokens=30 + 9 * at) for at in range(4)]
    done = []
    for max_iterations in (most, 1):
        pool = make_pool(300 // block_size, block_size=block_size, prefix_caching=caching)
        done.append(run(make_scheduler(pool), requests, max_iterations=max_iterations))
    in_runs = compare_with_single_steps(*done)
    # Not the prompts, and not a last step that is left over.
    assert in_runs > len(done[1].plans) - 8


@settings(max_examples=examples(150), deadline=None)
@given(
    workloads(),
    st.sampled_from(ADMISSION_POINTS),
    policies,
    st.sampled_from(PREEMPTIONS),
    st.integers(2, 12),
    st.booleans(),
)
def test_outputs_do_not_depend_on_the_number_of_iterations(
    work, admission, policy, preemption, most, stops_early
):
    """Outputs end anywhere; tokens of an executor that does not stop then are dropped."""
    work = {**work, "cancels": {}, "depth": 1}
    _, plain = serve({**work, "caching": False, "max_running": 1}, Conservative(), vocabulary=40)
    scheduler, done = serve(
        work,
        admission,
        vocabulary=40,
        max_iterations=most,
        stops_early=stops_early,
        **policy,
        **preemption,
    )
    assert done.tokens == plain.tokens
    assert done.ends == plain.ends
    check_ends(work, scheduler, done)


# Results


def test_a_plan_that_stops_early_counts_the_iterations_done():
    scheduler = submitted(make_scheduler(order=WeightedTurns()), make_request(3, 50), make_request(5, 50))
    state = scheduler.services["a"]
    plan = committed(scheduler, 6)
    assert (plan.number, state.last_step, state.consecutive_steps) == (1, 6, 6)
    assert [len(blocks) for blocks in table(scheduler)] == [3, 3]
    events = scheduler.update(plan, StepResult([[5, 6], [7, 8]], [10, 20]), 100)
    assert [event.tokens for event in events] == [(5, 7), (6, 8)]
    batch = state.running
    assert batch.num_generated.tolist() == [3, 3]
    assert batch.num_tokens_with_in_flight.tolist() == [6, 8]
    assert batch.num_scheduled.tolist() == batch.num_computed.tolist() == [5, 7]
    assert batch.service_time_ns.tolist() == [STEP_NS + 30] * 2
    assert (state.last_step, state.consecutive_steps, scheduler.stats().steps) == (2, 2, 3)
    # The blocks are there already.
    following = committed(scheduler, 4, now_ns=100)
    assert (following.number, following.grown) == (3, ())


@pytest.mark.parametrize("caching", [False, True])
def test_a_plan_that_stops_early_changes_no_output(caching):
    requests = [make_request(3 + at, 20) for at in range(3)]
    alone = run(make_scheduler(), requests)
    scheduler = make_scheduler(make_pool(64, prefix_caching=caching))
    executor = ReplayExecutor(scheduler.pool)
    for request in requests:
        scheduler.submit(request, 0)
    tokens = {request.id: [] for request in requests}
    now = 0
    while scheduler.unfinished:
        decode_run = scheduler.decode_runs.next_run(now, 5)
        plan = (
            scheduler.schedule(now)
            if decode_run is None
            else scheduler.decode_runs.commit(decode_run, decode_run.steps)[0]
        )
        result = executor.run(plan, 1 + plan.number % plan.iterations)
        now += result.duration_ns
        for event in scheduler.update(plan, result, now):
            tokens[event.request_id] += event.tokens
        scheduler.pool.check_integrity()
    assert tokens == alone.tokens
    assert scheduler.stats().steps == len(alone.plans)


def test_an_iteration_may_make_several_tokens_of_a_row():
    """As with speculation: up to 5 tokens of each row under one plan, as many as each row got right."""
    requests = [make_request(3 + at, 20) for at in range(3)]
    alone = run(make_scheduler(), requests)
    scheduler = make_scheduler()
    executor = ReplayExecutor(scheduler.pool)
    for request in requests:
        scheduler.submit(request, 0)
    tokens = {request.id: [] for request in requests}
    now = speculated = 0
    while scheduler.unfinished:
        decode_run = scheduler.decode_runs.next_run(now, 5)
        if decode_run is None:
            plan = scheduler.schedule(now)
            result = executor.run(plan)
        else:
            plan, _ = scheduler.decode_runs.commit(decode_run, decode_run.steps)
            counts = [1 + (plan.number + row) % plan.iterations for row in range(len(plan.seq_ids))]
            result = executor.run_at_once(plan, counts)
            speculated += max(counts) > 1
        now += STEP_NS
        before = scheduler.stats().steps
        for event in scheduler.update(plan, result, now):
            tokens[event.request_id] += event.tokens
        assert scheduler.stats().steps == before - plan.iterations + 1
        batch = scheduler.services["a"].running
        for row, seq_id in enumerate(batch.seq_id.tolist()):
            sequence = executor.sequences[seq_id]
            assert batch.num_tokens_with_in_flight[row] == len(sequence.tokens)
            assert batch.num_scheduled[row] == batch.num_computed[row] == sequence.computed
            assert batch.requests[row].block_ids == sequence.table
        scheduler.pool.check_integrity()
    assert tokens == alone.tokens
    assert speculated > 3
    assert scheduler.stats().steps < len(alone.plans)


def test_a_stop_token_in_the_middle_ends_a_row_there():
    pool = make_pool(prefix_caching=False)
    scheduler = submitted(make_scheduler(pool, eos=(2,)), make_request(3, None), make_request(5, None))
    plan = committed(scheduler, 4)
    result = StepResult([[5, 6], [2, 7], [8, 2], [9, 9]], [10] * 4)
    first, second = scheduler.update(plan, result, 100)
    assert (first.tokens, first.finish, first.stop_token) == ((5, 2), FinishReason.STOP, 2)
    assert (second.tokens, second.finish, second.stop_token) == ((6, 7, 2), FinishReason.STOP, 2)
    assert scheduler.stats().services["a"].output_tokens == 2 + 2 + 3
    assert scheduler.unfinished == pool.live_blocks("a") == 0


def test_min_tokens_and_max_tokens_hold_within_a_plan():
    scheduler = submitted(
        make_scheduler(eos=(2,)),
        make_request(3, None, min_tokens=4),
        make_request(5, None, max_tokens=20),
    )
    plan = committed(scheduler, 5)
    events = scheduler.update(plan, StepResult([[2, 5]] * 5, [10] * 5), 100)
    # With the token of its prompt it has 4, of which the last may end it.
    assert (events[0].tokens, events[0].finish) == ((2, 2, 2), FinishReason.STOP)
    assert (events[1].tokens, events[1].finish) == ((5,) * 5, None)
    assert steps_left(scheduler, 100) == 14
    plan = committed(scheduler, 14, 100)
    (event,) = scheduler.update(plan, StepResult([[5]] * 14, [10] * 14), 300)
    assert (len(event.tokens), event.finish) == (14, FinishReason.LENGTH)


def test_the_largest_gap_is_between_iterations_or_plans():
    scheduler = submitted(make_scheduler(eos=(2,)), make_request(3, None), make_request(5, None))
    batch = scheduler.services["a"].running
    assert batch.first_token_ns.tolist() == batch.last_token_ns.tolist() == [STEP_NS] * 2
    assert batch.largest_gap_ns.tolist() == [0, 0]
    # Ends are at 1100, 1140 and 1150.
    scheduler.update(committed(scheduler, 3), StepResult([[5, 6]] * 3, [100, 40, 10]), 1_150)
    assert batch.largest_gap_ns.tolist() == [100, 100]
    assert batch.last_token_ns.tolist() == [1_150] * 2
    # The engine was idle for 300 before; then 1500, 1502 and 1702, of which the first has no part.
    requests = list(batch.requests)
    plan = committed(scheduler, 3, 1_450)
    scheduler.update(plan, StepResult([[5, 6], [2, 7], [0, 8]], [50, 2, 400]), 1_902)
    first, second = requests
    assert (first.largest_gap_ns, first.last_token_ns) == (350, 1_502)
    assert (batch.requests, batch.last_token_ns.tolist()) == ([second], [1_902])
    assert batch.largest_gap_ns.tolist() == [400]
    assert batch.first_token_ns.tolist() == [STEP_NS]


def test_log_probabilities_go_with_their_tokens():
    scheduler = submitted(make_scheduler(eos=(2,)), make_request(3, None), make_request(5, None, logprobs=0))
    known = [TokenLogprobs(token, -0.1 * token) for token in (7, 2, 8)]
    result = StepResult([[5, 7], [6, 2], [7, 8]], [10] * 3, logprobs=[[None, logprobs] for logprobs in known])
    first, second = scheduler.update(committed(scheduler, 3), result, 100)
    assert (first.tokens, first.logprobs) == ((5, 6, 7), None)
    assert (second.tokens, second.logprobs) == ((7, 2), tuple(known[:2]))


def test_tokens_of_which_only_the_time_is_known_are_told_at_the_end():
    scheduler = submitted(make_scheduler(), make_request(3, 4), make_request(5, 9))
    plan = committed(scheduler, 3)
    result = StepResult([[ANONYMOUS_TOKEN] * 2] * 3, [10] * 3)
    (event,) = scheduler.update(plan, result, 100)
    assert (event.tokens, event.finish) == ((ANONYMOUS_TOKEN,), FinishReason.STOP)
    assert scheduler.services["a"].running.num_generated.tolist() == [4]
    assert scheduler.stats().services["a"].output_tokens == 2 * 4


def test_a_request_cancelled_during_a_plan_ends_at_its_update():
    pool = make_pool()
    scheduler = submitted(make_scheduler(pool), make_request(3, None, id="x"), make_request(5, None))
    plan = committed(scheduler, 5)
    assert scheduler.cancel("x", 50) is None
    first, second = scheduler.update(plan, StepResult([[5, 6]] * 2, [10] * 2), 100)
    assert (first.tokens, first.finish) == ((), FinishReason.CANCELLED)
    assert (second.tokens, second.finish) == ((6, 6), None)
    pool.check_integrity({"a": table(scheduler)})


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (StepResult([[5, 6], [5]], [10, 10]), "samples 2 tokens, got 1"),
        (StepResult([[5, 6, 7]] * 2, [10, 10]), "samples 2 tokens, got 3"),
        (StepResult([[5, 6]] * 4, [10] * 4), "has up to 3 tokens of a row, got 4"),
        (StepResult([], []), "has up to 3 tokens of a row, got 0"),
        (StepResult([[5, 6]] * 2, []), "has 2 tokens of a row, got 0 times"),
        (StepResult([[5, 6]] * 2, [10] * 3), "has 2 tokens of a row, got 3 times"),
        (StepResult([[5, 6]] * 2, [10]), "has 2 tokens of a row, got 1 times"),
        (StepResult([[5, 6]] * 2, [10] * 3, [2, 2]), "has 2 tokens of a row, got 3 times"),
        (StepResult([[5, 6]] * 2, [10], [2]), r"1 to 2 tokens of 2 rows, got counts \[2\]"),
        (StepResult([[5, 6]] * 2, [10], [2, 0]), r"1 to 2 tokens of 2 rows, got counts \[2, 0\]"),
        (StepResult([[5, 6]] * 2, [10], [3, 1]), r"1 to 2 tokens of 2 rows, got counts \[3, 1\]"),
    ],
)
def test_a_result_that_does_not_fit_is_refused_and_changes_nothing(result, message):
    scheduler = submitted(make_scheduler(), make_request(3, None), make_request(5, None))
    plan = committed(scheduler, 3)
    before = scheduler.stats()
    with pytest.raises(ValueError, match=message):
        scheduler.update(plan, result, 100)
    assert (scheduler.in_flight, scheduler.stats()) == (1, before)
    scheduler.update(plan, StepResult([[5, 6]] * 2, [10], [1, 2]), 100)
    assert scheduler.services["a"].running.num_generated.tolist() == [2, 3]
