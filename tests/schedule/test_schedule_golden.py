"""Schedule logs, line by line, of instances small enough to follow by hand."""

import pytest
from schedule_builders import make_pool, make_request, make_scheduler, run

from shoal.core import StepResult
from shoal.schedule import Aggressive, Conservative, PastFuture, describe


def figure_six(admission):
    """Capacity 21 tokens; A (3 + 4) and B (6 + 5) run; at step t = 2 the request N (6 + 4) arrives."""
    scheduler = make_scheduler(make_pool(21, block_size=1, prefix_caching=False), admission=admission)
    for name, prompt, output in (("A", 3, 4), ("B", 6, 5)):
        scheduler.submit(make_request(prompt, output, id=name, max_tokens=output), 0)
    coming = [make_request(6, 4, id="N", max_tokens=4)]

    def before_step(step, done):
        if step == 2 and coming:
            scheduler.submit(coming.pop(), 0)

    done = run(scheduler, before_step=before_step)
    rows = [line.split(" | ")[0] for line in done.log]
    return rows, scheduler.stats().services["a"]


def test_figure_six_aggressive_admits_at_once_and_preempts_at_22_tokens():
    """At t + 1 the step would hold 6 + 9 + 7 = 22 tokens."""
    rows, stats = figure_six(Aggressive(watermark=1.0))
    assert rows == [
        "0 a: 0+3* 1+6*",
        "1 a: 0+1* 1+1*",
        "2 a: 0+1* 1+1* 2+6*",
        "3 a: 0+1* 1+1*",
        "4 a: 1+1* 3+7*",
        "5 a: 3+1*",
        "6 a: 3+1*",
    ]
    assert (stats.preemptions, stats.recomputed_tokens) == (1, 6)


def test_figure_six_past_future_admits_a_step_later():
    """At t 22 tokens are predicted one step on; at t + 1 the new one's first token comes when A has left."""
    rows, stats = figure_six(PastFuture(reserved=0.0))
    assert rows == [
        "0 a: 0+3* 1+6*",
        "1 a: 0+1* 1+1*",
        "2 a: 0+1* 1+1*",
        "3 a: 0+1* 1+1* 2+6*",
        "4 a: 1+1* 2+1*",
        "5 a: 2+1*",
        "6 a: 2+1*",
    ]
    assert stats.preemptions == 0


def test_figure_six_conservative_admits_when_the_first_has_ended():
    rows, stats = figure_six(Conservative())
    assert rows == [
        "0 a: 0+3* 1+6*",
        "1 a: 0+1* 1+1*",
        "2 a: 0+1* 1+1*",
        "3 a: 0+1* 1+1*",
        "4 a: 1+1* 2+6*",
        "5 a: 2+1*",
        "6 a: 2+1*",
        "7 a: 2+1*",
    ]
    assert stats.preemptions == 0


def test_decodes_go_first_then_chunks_then_waiting_requests():
    scheduler = make_scheduler(max_batched_tokens=6)
    done = run(scheduler, [make_request(4, 3), make_request(9, 2), make_request(3, 2)])
    assert done.log == [
        "0 a: 0+4* 1+2 | joined 0(0 of 4 cached: 0) 1(0 of 9 cached: 1)",
        "1 a: 0+1* 1+5 | grown 0(2) 1(3)",
        "2 a: 0+1* 1+2* 2+3* | joined 2(0 of 3 cached: 4) | grown 1(5)",
        "3 a: 1+1* 2+1* | left 0",
    ]


def test_a_prompt_that_was_computed_before_is_found():
    """Only full blocks are shared: four of the six tokens."""
    scheduler = make_scheduler(make_pool(8), max_running=1)
    done = run(scheduler, [make_request([1, 2, 3, 4, 5, 6], 2), make_request([1, 2, 3, 4, 9], 1)])
    assert done.log == [
        "0 a: 0+6* | joined 0(0 of 6 cached: 0,1)",
        "1 a: 0+1*",
        "2 a: 1+1* | joined 1(4 of 5 cached: 0,1) | left 0",
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_found_in_full_is_copied_on_write(depth):
    pool = make_pool(8)
    scheduler = make_scheduler(pool, depth=depth)
    prompt = list(range(8))
    scheduler.submit(make_request(prompt, 2, id="first"), 0)
    first = scheduler.schedule(0)
    assert describe(first) == "0 a: 0+8* | joined 0(0 of 8 cached: 0,1)"
    scheduler.update(first, StepResult.of_step([5], 1), 0)
    scheduler.submit(make_request(prompt, 2, id="second"), 0)
    second = scheduler.schedule(0)
    # Its last block, 2, is its own; it refers to block 1 until the copy is made.
    assert describe(second) == "1 a: 0+1* 1+1* | joined 1(7 of 8 cached: 0,2) | grown 0(3) | copy 1>2"
    assert pool.live_blocks("a") == 4
    events = scheduler.update(second, StepResult.of_step([6, 5], 1), 0)
    assert [event.cached_tokens for event in events] == [0, 7]
    # The first ended; its second block is cached, the second request keeps block 0 and its copy.
    assert pool.live_blocks("a") == 2


def test_a_line_has_times_if_they_are_given():
    scheduler = make_scheduler()
    scheduler.submit(make_request(4, 3), 0)
    plan = scheduler.schedule(5_000)
    line = "0 a: 0+4* | joined 0(0 of 4 cached: 0)"
    assert describe(plan) == line
    assert describe(plan, 5_000) == f"{line} | at 5000"
    assert describe(plan, 5_000, [800, 810]) == f"{line} | at 5000 | took 800 810"


def test_unchanged_columns_are_the_same_objects():
    scheduler = make_scheduler()
    done = run(scheduler, [make_request(4, 6), make_request(5, 6)])
    for before, after in zip(done.plans[1:4], done.plans[2:5], strict=True):
        assert after.seq_ids is before.seq_ids
        assert after.new_tokens is before.new_tokens
        assert after.sampled is before.sampled
