"""Requests that wait are forecast several at a time; they are admitted as if each were alone."""

from dataclasses import replace
from itertools import cycle, product, repeat
from random import Random

import pytest
from schedule_builders import make_pool, make_request, make_scheduler, run

import shoal.schedule.admitter as admitter_module
from shoal.schedule import ORDERS, Conservative, Oracle, PastFuture, Predicted
from shoal.schedule.admitter import LOOKAHEAD, Admitter
from shoal.schedule.policies.admissions import Admission, Forecasting

ADMISSIONS = {
    "conservative": Conservative(),
    "past-future": PastFuture(window=20, reserved=0.0),
    "past-future of late": PastFuture(window=500),
    "past-future max": PastFuture(draws="max"),
    "past-future now and then": PastFuture(window=20, admit_every=6),
    "oracle": Oracle(),
    "predicted": Predicted(),
}


def plain_how_many_fit(admission, running, candidates, others, capacity):
    """One candidate, among all the others, without bounds."""
    assert len(candidates) == 1
    joined = running.plus(candidates, running.shared)
    return int(admission.demand([joined, *others]) <= admission.limit(capacity))


def bursts(seed, count, services, shared_prefixes):
    """Many requests, a few long ones among them: when one of those ends, several others find room."""
    random = Random(seed)
    requests = []
    for number in range(count):
        long = number % 9 == 0
        prompt, output = (random.randint(*((30, 60) if long else (1, 8))) for _ in range(2))
        service = services[number % len(services)]
        request = make_request(prompt, output, service=service, max_tokens=80 if long else 10)
        if random.random() < shared_prefixes:
            request = replace(request, prompt=[*range(4 * random.randint(1, 3)), *request.prompt])
        requests.append(request)
    return requests


def record(monkeypatch, admission, order, per_merged, requests, depth):
    """Everything that was decided: each request's answer in turn, and every plan with its blocks."""
    answers = []
    admit = Admitter._admit

    def noted(admitter, coming, budget, *, force):
        answer = admit(admitter, coming, budget, force=force)
        answers.append((coming[0].number, answer, admitter.needed))
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(Admitter, "_admit", noted)
        pool = make_pool(64, block_size=4, per_merged=per_merged)
        scheduler = make_scheduler(pool, admission=admission, order=order, depth=depth, max_running=64)
        done = run(scheduler, requests)
    return answers, done.log, max(len(plan.joined) for plan in done.plans)


@pytest.mark.parametrize(
    ("admission", "order", "count"),
    [
        *zip(cycle(ADMISSIONS), ORDERS, repeat(50)),
        *(pytest.param(*both, 140, marks=pytest.mark.slow) for both in product(ADMISSIONS, ORDERS)),
    ],
)
def test_decisions_are_those_of_one_forecast_for_each_request(monkeypatch, admission, order, count):
    seed = sorted(ADMISSIONS).index(admission) + len(ADMISSIONS) * sorted(ORDERS).index(order)
    per_merged = {"a": 2, "b": 1} if seed % 3 == 0 else {"a": 1}
    requests = bursts(seed, count, list(per_merged), shared_prefixes=(0.0, 0.3)[seed % 2])
    case = ADMISSIONS[admission], order, per_merged, requests, 1 + seed % 2
    answers, log, most_joined = record(monkeypatch, *case)
    assert most_joined > 4
    with monkeypatch.context() as patch:
        patch.setattr(admitter_module, "LOOKAHEAD", 1)
        for base in (Admission, Forecasting):
            patch.setattr(base, "how_many_fit", plain_how_many_fit)
        plain_answers, plain_log, _ = record(monkeypatch, *case)
    assert answers == plain_answers
    assert log == plain_log


def test_one_forecast_does_for_several_requests(monkeypatch):
    """The first is admitted without one.

    Outputs of 5 after prompts of 4 are expected: each takes 2 blocks at its end, 57 of 60 may be taken.
    """
    forecasts_made = []
    demand = PastFuture.demand_with_each

    def noted(admission, running, candidates, others):
        forecasts_made.append((len(running), len(candidates)))
        return demand(admission, running, candidates, others)

    monkeypatch.setattr(PastFuture, "demand_with_each", noted)
    scheduler = make_scheduler(make_pool(60), admission=PastFuture(window=1), max_running=64)
    scheduler._services["a"].statistics.history.record(5)
    for _ in range(40):
        scheduler.submit(make_request(4, 5, max_tokens=60), 0)
    assert len(scheduler.schedule(0).joined) == 57 // 2
    # Of the last 8 the first 4 fit, the next is forecast once more.
    assert forecasts_made == [(1, LOOKAHEAD - 1), (8, 8), (16, 8), (24, 8), (28, 4)]
