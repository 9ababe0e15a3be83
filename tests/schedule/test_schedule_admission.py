"""Admissions against the plain formulas: all that makes a decision fast must not change it."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_builders import make_pool, make_request, make_scheduler, run

import shoal.schedule.tracked as tracked_module
from hypothesis_profiles import examples
from shoal.core import SyntheticPrompt, uniform
from shoal.forecast import LengthHistory
from shoal.kvcache import BlockPool
from shoal.schedule import Aggressive, Conservative, Oracle, PastFuture
from shoal.schedule.crowd import Crowd
from shoal.schedule.larger_crowd import LargerCrowd
from shoal.schedule.members import Members
from shoal.schedule.tracked import track


@st.composite
def crowds(draw):
    """Running requests, newcomers, past lengths, block size, blocks per merged, and a percentage."""
    request = st.tuples(st.integers(1, 40), st.integers(0, 30), st.integers(1, 60))  # prompt, generated, left
    return (
        draw(st.lists(request, max_size=12)),
        draw(st.lists(request, min_size=1, max_size=6)),
        draw(st.lists(st.integers(1, 80), max_size=20)),
        draw(st.sampled_from([1, 2, 4, 16])),
        draw(st.integers(1, 3)),
        draw(st.integers(30, 130)),
    )


def requests_of(pairs, block_size):
    made = []
    for number, (prompt, generated, left) in enumerate(pairs):
        request = make_request(prompt, generated + left // 2 + 1, max_tokens=generated + left)
        one = track(request, number, generated + left, ())
        one.generated, one.expected = generated, prompt + generated
        made.append(one)
    return made


def lengths_by_formula(past, running, one, draws, window):
    """Each draw by hand: the past length that a uniform number picks among those beyond what is generated."""
    survival, steps = 1.0, []
    for length in sorted(set(past)):
        events = past.count(length)
        at_risk = sum(other >= length for other in past)
        if len(past) < window:
            at_risk += sum(other.generated >= length for other in running)
        survival *= 1 - events / at_risk
        steps.append((length, 1 - survival))
    below = max((mass for length, mass in steps if length <= one.generated), default=0.0)
    picked = []
    for sample in range(draws):
        target = below + uniform(0, one.number, one.generated, sample) * (1 - below)
        length = next((length for length, mass in steps if mass > target), math.inf)
        picked.append(min(length, one.ceiling))
    return picked


def peak_by_simulation(requests, lengths, block_size, per_merged):
    """Everybody alive grows by a token, then those at their end leave; the most merged blocks at once."""
    left = [max(length - one.generated - 1, 0) for one, length in zip(requests, lengths, strict=True)]
    most = 0
    for step in range(max(left) + 1):
        blocks = sum(
            -(-(one.prompt_tokens + one.generated + step) // block_size)
            for one, rest in zip(requests, left, strict=True)
            if rest >= step
        )
        most = max(most, -(-blocks // per_merged))
    return most


def plain_decision(admission, past, running, requests, block_size, per_merged, capacity):
    """The formulas, without bounds, memory of earlier answers or arrays."""

    def merged(tokens):
        return -(-sum(-(-count // block_size) for count in tokens) // per_merged)

    now = [one.prompt_tokens + one.generated for one in requests]
    if isinstance(admission, Aggressive):
        return merged(now) <= admission.watermark * capacity
    if isinstance(admission, Conservative):
        ends = [
            max(one.prompt_tokens + one.ceiling - 1, have) for one, have in zip(requests, now, strict=True)
        ]
        return merged(ends) <= admission.overcommit * capacity
    if isinstance(admission, Oracle):
        truths = [one.last_token - one.prompt_tokens for one in requests]
        return peak_by_simulation(requests, truths, block_size, per_merged) <= capacity
    draws = 10 if admission.draws == "mean" else min(5, 200 // len(requests) + 1)
    drawn = [lengths_by_formula(past, running, one, draws, admission.window) for one in requests]
    peaks = [
        peak_by_simulation(requests, lengths, block_size, per_merged) for lengths in zip(*drawn, strict=True)
    ]
    demand = sum(peaks) / len(peaks) if admission.draws == "mean" else max(peaks)
    return demand <= (1 - admission.reserved) * capacity


ADMISSIONS = (
    Aggressive(),
    Conservative(overcommit=1.2),
    Oracle(),
    PastFuture(window=8),
    PastFuture(window=100),
    PastFuture(window=100, draws="max", reserved=0.2),
)


@settings(max_examples=examples(150), deadline=None)
@given(crowds(), st.sampled_from(ADMISSIONS))
def test_decisions_are_those_of_the_plain_formulas(state, admission):
    """One newcomer after another, where the capacity is about what they need."""
    running, newcomers, past, block_size, per_merged, percent = state
    history = admission.new_history(1_000)
    for length in past:
        history.record(length)
    past = past[-getattr(admission, "window", len(past) or 1) :]
    requests = requests_of([*running, *newcomers], block_size)
    held, waiting = requests[: len(running)], requests[len(running) :]
    layout = make_pool(10, block_size=block_size, per_merged={"a": per_merged}).layout.services["a"]
    crowd = Crowd.of(layout, block_size, Members.of(held, None), held, history)
    ends = sum(-(-(one.prompt_tokens + one.ceiling) // block_size) for one in requests)
    capacity = max(1, ends * percent // (100 * per_merged))
    present = list(held)
    for one in waiting:
        present.append(one)
        with_one = LargerCrowd(crowd, one, None)
        expected = plain_decision(admission, past, held, present, block_size, per_merged, capacity)
        assert admission.fits([with_one], capacity) is expected
        crowd = with_one


@settings(max_examples=examples(100), deadline=None)
@given(crowds())
def test_what_was_forecast_before_does_not_change_a_forecast(state):
    running, newcomers, past, block_size, per_merged, _ = state
    history = LengthHistory(1_000)
    for length in past:
        history.record(length)
    requests = requests_of([*running, *newcomers], block_size)
    held, waiting = requests[: len(running)], requests[len(running) :]
    layout = make_pool(10, block_size=block_size, per_merged={"a": per_merged}).layout.services["a"]

    def demands(admission, look_between):
        crowd, seen = Crowd.of(layout, block_size, Members.of(held, None), held, history), []
        if look_between:
            seen.append(admission.demand([crowd]))
        for one in waiting:
            crowd = LargerCrowd(crowd, one, None)
            if look_between:
                seen.append(admission.demand([crowd]))
        return seen, admission.demand([crowd]), crowd

    for admission in (PastFuture(), Oracle()):
        seen, stepwise, _ = demands(admission, look_between=True)
        _, at_once, crowd = demands(admission, look_between=False)
        assert stepwise == at_once
        assert seen == sorted(seen)
        assert crowd.footprint <= at_once <= crowd.most


def test_columns_follow_those_who_come_and_go():
    scheduler = make_scheduler(make_pool(40), victim="fewest-tokens", preempt_for_waiting=True, order="edf")
    group = scheduler._groups["a"]
    sizes = set()

    def before_step(step, done):
        members = Members.of(group.running, None)
        sizes.add(len(group.running))
        assert group.crowd().members.table.tolist() == members.table.tolist()
        assert group.crowd().tokens.tolist() == [one.expected for one in group.running]

    run(scheduler, [make_request(1 + at % 7, 1 + at % 11) for at in range(100)], before_step=before_step)
    assert max(sizes) > 8
    assert len(sizes) > 4


def test_nothing_is_forecast_while_blocks_are_missing_or_nobody_waits(monkeypatch):
    asked = []
    original = PastFuture.demand
    monkeypatch.setattr(
        PastFuture, "demand", lambda self, crowds: asked.append(len(crowds)) or original(self, crowds)
    )
    scheduler = make_scheduler(make_pool(6), admission=PastFuture())
    run(scheduler, [make_request(16, 6), make_request(16, 6)])
    assert asked == []


def test_without_prefix_caching_nothing_is_hashed_published_or_looked_up(monkeypatch):
    def never(*arguments, **keywords):
        raise AssertionError("prefix work without prefix caching")

    for name in ("hash_blocks", "hash_next", "hash_synthetic"):
        monkeypatch.setattr(tracked_module, name, never)
    for name in ("match_prefix", "publish"):
        monkeypatch.setattr(BlockPool, name, never)
    prompt = list(range(12))
    scheduler = make_scheduler(make_pool(prefix_caching=False))
    scheduler.submit(make_request(SyntheticPrompt(8, (1, 2)), 6), 0)
    done = run(scheduler, [make_request(prompt, 9), make_request(prompt, 9)])
    assert {len(tokens) for tokens in done.tokens.values()} == {6, 9}
    assert scheduler.stats().services["a"].cached_tokens == 0
