"""Every order drives the scheduler: all requests are answered, and the answers do not depend on the order."""

import random
from dataclasses import replace
from functools import cache

import pytest
from schedule_builders import STEP_NS, make_pool, make_request, make_scheduler, run

from crossed import crossed
from shoal.core import SLO, Client, FinishReason
from shoal.schedule.policies.orders import (
    ORDERS,
    ClientPriority,
    DoublingBudget,
    EarliestDeadline,
    Fair,
    Fcfs,
    FcfsStrict,
    Mlfq,
    RoundRobin,
    ShortestRemaining,
    WeightedTurns,
)
from shoal.schedule.policies.orders.doubling_budget import VARIANTS

STEP_S = STEP_NS / 1e9
OUTPUTS = {"a": 6, "b": 15, "c": 40}
"""Longest output of each service."""

TUNED = [
    Fcfs(),
    FcfsStrict(),
    RoundRobin(),
    Mlfq(quantum_s=2 * STEP_S, prefill_tokens_per_s=4 / STEP_S),
    *(DoublingBudget(variant=variant, max_batch=4) for variant in VARIANTS),
    ShortestRemaining(token_s=STEP_S),
    EarliestDeadline(default_s=50 * STEP_S),
    WeightedTurns(),
    ClientPriority(),
    Fair(),
]
"""With options that have an effect for steps of a microsecond."""


def requests():
    """Prompts shorter and longer than a step's tokens; some requests have goals."""
    draw = random.Random(3)
    made = []
    for number in range(24):
        service = draw.choice("abc")
        request = make_request(
            [1_000 + number * 100 + at for at in range(draw.randint(1, 40))],
            draw.randint(1, OUTPUTS[service]),
            id=f"r{number}",
            service=service,
        )
        slo = draw.choice([SLO(), SLO(ttft_s=5 * STEP_S, tpot_s=2 * STEP_S)])
        priority = draw.randint(-2, 2)
        client = draw.choice([None, Client("a"), Client("b", 2.0)])
        made.append(replace(request, arrival_ns=number * STEP_NS, slo=slo, priority=priority, client=client))
    return made


@cache
def serve(order, **options):
    """A pool that holds a part of the requests, so that some are preempted; half arrive while others run."""
    pool = make_pool(30, per_merged={"a": 1, "b": 2, "c": 3})
    scheduler = make_scheduler(
        pool, order=order, max_batched_tokens=32, max_running=8, execution_s=20 * STEP_S, **options
    )
    first, later = requests()[:12], requests()[12:]

    def before_step(step, done):
        if later and step % 3 == 0:
            scheduler.submit(later.pop(0), step * STEP_NS)
        return bool(later)

    return run(scheduler, first, before_step=before_step)


@pytest.mark.parametrize(
    ("order", "preempt_for_waiting", "depth"), crossed(TUNED, ["never", "less-urgent"], [1, 2]), ids=repr
)
def test_every_order_answers_all_requests(order, preempt_for_waiting, depth):
    done = serve(order, preempt_for_waiting=preempt_for_waiting, depth=depth)
    assert len(done.ends) == 24
    assert set(done.ends.values()) == {FinishReason.STOP}
    assert done.tokens == serve(Fcfs(), preempt_for_waiting="never", depth=1).tokens


def test_orders_differ():
    """Otherwise the test above would show little."""
    assert {type(order) for order in TUNED} == set(ORDERS.values())
    sequences = {
        tuple(plan.service for plan in serve(order, preempt_for_waiting="less-urgent", depth=1).plans)
        for order in TUNED
    }
    assert len(sequences) == len(TUNED)
