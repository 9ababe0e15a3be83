"""Newcomers are looked at several at a time; who is let in is as if each had been forecast by itself."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from schedule_builders import make_pool, make_request, make_scheduler, run

from shoal.schedule import ORDERS, Conservative, Oracle, PastFuture, Predicted
from shoal.schedule.admission import Admission
from shoal.schedule.crowd import Crowd
from shoal.schedule.line import Line
from shoal.schedule.members import Members
from shoal.schedule.newcomers import Door

ADMISSIONS = {
    "conservative": Conservative(),
    "past-future": PastFuture(window=20, reserved=0.0),
    "past-future of late": PastFuture(window=500),
    "past-future max": PastFuture(draws="max"),
    "past-future now and then": PastFuture(window=20, admit_every=6),
    "oracle": Oracle(),
    "predicted": Predicted(),
}


def plain_crowd_with(door, one, kept):
    """Every column written out, every block counted, nothing carried over from the newcomers before."""
    group = door._group
    joined = [newcomer.request for newcomer in door.joined]
    present = [*group.running, *joined, one]
    tables = [(other.blocks, other.shareable) for other in present[:-1]]
    group.shared.hold(kept)
    members = Members.of(present, group.shared.sets([*tables, (kept, len(kept))]))
    group.shared.drop(kept)
    return Crowd(
        group.layout,
        door._pool.block_size,
        len(present),
        members.shared,
        lambda: members,
        lambda: np.array([other.expected for other in present]),
        lambda: np.array([other.predicted for other in present]),
        lambda _: group.crowd().lengths,
    )


def plain_fits(admission, crowds, capacity):
    return admission.demand(crowds) <= admission.limit(capacity)


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
    """Everything that was decided: each newcomer's answer in turn, and every plan with its blocks."""
    answers = []
    admit = Door.admit

    def noted(door, one, budget, *, always):
        answer = admit(door, one, budget, always=always)
        answers.append((one.number, answer, door.needed))
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(Door, "admit", noted)
        pool = make_pool(64, block_size=4, per_merged=per_merged)
        scheduler = make_scheduler(pool, admission=admission, order=order, depth=depth, max_running=64)
        done = run(scheduler, requests)
    return answers, done.log, max(len(plan.joined) for plan in done.plans)


@pytest.mark.parametrize("count", [50, pytest.param(140, marks=pytest.mark.slow)])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("admission", ADMISSIONS)
def test_decisions_are_those_of_one_forecast_for_each_newcomer(monkeypatch, admission, order, count):
    seed = sorted(ADMISSIONS).index(admission) + len(ADMISSIONS) * sorted(ORDERS).index(order)
    per_merged = {"a": 2, "b": 1} if seed % 3 == 0 else {"a": 1}
    requests = bursts(seed, count, list(per_merged), shared_prefixes=(0.0, 0.3)[seed % 2])
    case = ADMISSIONS[admission], order, per_merged, requests, 1 + seed % 2
    answers, log, most_joined = record(monkeypatch, *case)
    assert most_joined > 4
    with monkeypatch.context() as patch:
        patch.setattr(Door, "_crowd_with", plain_crowd_with)
        patch.setattr(Admission, "fits", plain_fits)
        plain_answers, plain_log, _ = record(monkeypatch, *case)
    assert answers == plain_answers
    assert log == plain_log


def test_one_forecast_does_for_several_newcomers(monkeypatch):
    """The first is let in without, then the next 2 and 12 at a time are looked at together.

    Outputs of 5 after prompts of 4 are believed: each takes 2 blocks at its end, 57 of 60 may be taken.
    """
    lines, forecasts = [], []
    outlook, forecast = Line.outlook, Crowd._forecast
    monkeypatch.setattr(Line, "outlook", lambda *args: lines.append(args[0]) or outlook(*args))
    monkeypatch.setattr(Crowd, "_forecast", lambda *args: forecasts.append(args[0]) or forecast(*args))
    scheduler = make_scheduler(make_pool(60), admission=PastFuture(window=1), max_running=64)
    scheduler._groups["a"].history.record(5)
    for _ in range(40):
        scheduler.submit(make_request(4, 5, max_tokens=60), 0)
    assert len(scheduler.schedule(0).joined) == 57 // 2
    assert sorted(len(line.newest) for line in set(lines)) == [2, 12, 12, 12]
    assert len(forecasts) == 1
