"""Admissions against the plain formulas: all that makes a decision fast must not change it."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_builders import make_pool, make_request, make_scheduler, make_state, run

import shoal.schedule.request_state as request_state_module
from hypothesis_profiles import examples
from shoal.core import SyntheticPrompt, uniform
from shoal.kvcache import BlockPool
from shoal.schedule import Aggressive, Conservative, Oracle, PastFuture, Predicted, RequestState, Slice
from shoal.schedule.policies.memory_forecast import MemoryForecast
from shoal.schedule.running_batch import RequestTable
from shoal.schedule.shared_prefixes import SharedPrefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class FewerDraws(PastFuture):
    """The number of draws falls with every request, as it does for PastFuture with many of them."""

    def samples(self, requests: int) -> int:
        return max(1, 7 - requests // 2)


ADMISSIONS = (
    Aggressive(),
    Conservative(overcommit=1.2),
    Slice(tokens=3),
    Oracle(),
    Predicted(reserved=0.1),
    PastFuture(window=8),
    PastFuture(window=100),
    PastFuture(window=100, draws="max", reserved=0.2),
    FewerDraws(window=100),
    FewerDraws(window=8, draws="max"),
)


class Holder(NamedTuple):
    """A request, and the blocks that it begins with; the rest of its table is its own."""

    state: RequestState
    prefix: tuple[int, ...] = ()


@dataclass
class Case:
    """Running requests of two services, candidates of the first, and its past output lengths."""

    running: list[Holder]
    candidates: list[Holder]
    others: list[Holder]
    past: list[int]
    block_size: int
    per_merged: int
    capacity: int

    def forecasts(self, admission) -> tuple[MemoryForecast, list[MemoryForecast]]:
        """Forecasts of the running requests: of the service, and of the other one."""
        pool = make_pool(10, block_size=self.block_size, per_merged={"a": self.per_merged, "b": 2})
        history = admission.new_history(1_000)
        for length in self.past:
            history.record(length)
        made = [
            MemoryForecast(
                pool.layout.services[name],
                self.block_size,
                table := table_of(holders),
                shared_blocks(holders),
                lambda table=table: history.distribution(table.num_generated),
            )
            for name, holders in (("a", self.running), ("b", self.others))
        ]
        return made[0], made[1:] if self.others else []


def table_of(holders):
    return RequestTable([holder.state for holder in holders])


def shared_blocks(holders):
    prefixes = SharedPrefixes()
    for holder in holders:
        prefixes.hold(holder.prefix)
    return prefixes.sets([(holder.prefix, len(holder.prefix)) for holder in holders])


@st.composite
def cases(draw, candidates_share=False):
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    lengths = st.tuples(st.integers(1, 40), st.integers(0, 30), st.integers(1, 60))  # prompt, generated, left
    holders = {
        name: [
            _holder(draw, number, shape, block_size, may_share=name == "running" or candidates_share)
            for number, shape in enumerate(draw(shapes), start)
        ]
        for name, shapes, start in (
            ("running", st.lists(lengths, max_size=12), 0),
            ("candidates", st.lists(lengths, min_size=1, max_size=6), 100),
            ("others", st.lists(lengths, max_size=2), 200),
        )
    }
    per_merged = draw(st.integers(1, 3))
    percent = draw(st.integers(30, 130))
    ends = sum(
        -(-(holder.state.num_prompt_tokens + holder.state.max_new_tokens) // block_size)
        for some in holders.values()
        for holder in some
    )
    past = draw(st.lists(st.integers(1, 80), max_size=20))
    return Case(**holders, past=past, block_size=block_size, per_merged=per_merged,
                capacity=max(1, ends * percent // (100 * per_merged)))  # fmt: skip


def _holder(draw, number, shape, block_size, *, may_share):
    prompt, generated, left = shape
    state = make_state(
        number=number,
        prompt=prompt,
        output=generated + left // 2 + 1,
        generated=generated,
        predicted=generated + draw(st.integers(1, left)),
        max_new_tokens=generated + left,
    )
    if not may_share:
        return Holder(state)
    family, shared = draw(st.integers(0, 1)), draw(st.integers(0, prompt // block_size))
    return Holder(state, tuple(1_000 * family + at for at in range(shared)))


def lengths_by_formula(case, running, request, draws, window):
    """Each draw by hand: the past length that a uniform number picks among those beyond what is generated."""
    past = case.past[-window:]
    survival, steps = 1.0, []
    for length in sorted(set(past)):
        events = past.count(length)
        at_risk = sum(other >= length for other in past)
        if len(past) < window:
            at_risk += sum(holder.state.num_generated >= length for holder in running)
        survival *= 1 - events / at_risk
        steps.append((length, 1 - survival))
    below = max((mass for length, mass in steps if length <= request.num_generated), default=0.0)
    picked = []
    for sample in range(draws):
        target = below + uniform(0, request.number, request.num_generated, sample) * (1 - below)
        length = next((length for length, mass in steps if mass > target), math.inf)
        picked.append(min(length, request.max_new_tokens))
    return picked


def merged_blocks(case, holders, tokens, per_merged):
    """Every block of every table by name, those that several hold once."""
    blocks = set()
    for holder, count in zip(holders, tokens, strict=True):
        own = range(len(holder.prefix), -(-count // case.block_size))
        blocks |= {*holder.prefix, *((holder.state.number, at) for at in own)}
    return -(-len(blocks) // per_merged)


def peak_by_simulation(case, holders, lengths, per_merged):
    """All requests grow by a token, then ended ones leave; returns the maximum of merged blocks."""
    left = [
        max(length - holder.state.num_generated - 1, 0)
        for holder, length in zip(holders, lengths, strict=True)
    ]
    most = 0
    for step in range(max(left, default=-1) + 1):
        alive = [holder for holder, rest in zip(holders, left, strict=True) if rest >= step]
        tokens = [holder.state.num_tokens + step for holder in alive]
        most = max(most, merged_blocks(case, alive, tokens, per_merged))
    return most


def plain_demand(admission, case, holders):
    """The formulas for ``holders`` of the service and all of the other, without bounds or arrays."""
    services = [(holders, case.running, case.per_merged), (case.others, case.others, 2)]

    def in_all(tokens_of):
        return sum(
            merged_blocks(case, present, map(tokens_of, (holder.state for holder in present)), per_merged)
            for present, _, per_merged in services
        )

    def peaks(lengths_of):
        return sum(
            peak_by_simulation(
                case, present, [lengths_of(holder.state, running) for holder in present], per_merged
            )
            for present, running, per_merged in services
        )

    if isinstance(admission, Aggressive | Slice):
        return in_all(lambda state: state.num_tokens)
    if isinstance(admission, Conservative):
        return in_all(lambda state: max(state.num_prompt_tokens + state.max_new_tokens - 1, state.num_tokens))
    if isinstance(admission, Oracle):
        return peaks(lambda state, _: state.num_final_tokens - state.num_prompt_tokens)
    if isinstance(admission, Predicted):
        return peaks(lambda state, _: state.predicted_tokens)
    count = len(holders) + len(case.others)
    if isinstance(admission, FewerDraws):
        draws = max(1, 7 - count // 2)
    else:
        draws = 10 if admission.draws == "mean" else min(5, 200 // count + 1)
    drawn = [
        peaks(
            lambda state, running, at=at: lengths_by_formula(case, running, state, draws, admission.window)[
                at
            ]
        )
        for at in range(draws)
    ]
    return sum(drawn) / draws if admission.draws == "mean" else max(drawn)


SHARES = {
    Conservative: lambda admission: admission.overcommit,
    Aggressive: lambda admission: admission.watermark,
}


def plain_fits(admission, case, holders):
    share = SHARES.get(type(admission), lambda admission: 1 - getattr(admission, "reserved", 0.0))(admission)
    return plain_demand(admission, case, holders) <= share * case.capacity


@settings(max_examples=examples(250), deadline=None)
@given(cases(), st.sampled_from(ADMISSIONS))
def test_how_many_fit_is_what_the_plain_formulas_say(case, admission):
    """Where the capacity is about what they need; blocks that several hold count once."""
    running, others = case.forecasts(admission)
    expected = 0
    while expected < len(case.candidates) and plain_fits(
        admission, case, case.running + case.candidates[: expected + 1]
    ):
        expected += 1
    candidates = table_of(case.candidates)
    assert admission.how_many_fit(running, candidates, others, case.capacity) == expected


@settings(max_examples=examples(100), deadline=None)
@given(cases(), st.sampled_from(ADMISSIONS))
def test_several_candidates_are_admitted_as_one_after_another(case, admission):
    running, others = case.forecasts(admission)
    together = admission.how_many_fit(running, table_of(case.candidates), others, case.capacity)
    fitting = 0
    for candidate in case.candidates:
        alone = table_of([candidate])
        fits = admission.how_many_fit(running, alone, others, case.capacity) == 1
        running = running.plus(alone, running.shared)
        assert fits == admission.fits([running, *others], case.capacity)
        if not fits:
            break
        fitting += 1
    assert together == fitting


@settings(max_examples=examples(100), deadline=None)
@given(cases(candidates_share=True), st.sampled_from(ADMISSIONS))
def test_a_candidate_with_shared_blocks_follows_the_plain_formulas(case, admission):
    running, others = case.forecasts(admission)
    present = [*case.running, case.candidates[0]]
    joined = running.plus(table_of(case.candidates[:1]), shared_blocks(present))
    assert admission.fits([joined, *others], case.capacity) == plain_fits(admission, case, present)


@settings(max_examples=examples(100), deadline=None)
@given(cases())
def test_what_is_needed_grows_with_every_candidate_and_stays_between_the_bounds(case):
    for admission in (PastFuture(), Oracle()):
        running, others = case.forecasts(admission)
        demands = admission.demand_with_each(running, table_of(case.candidates), others)
        assert (np.diff(demands) >= 0).all()
        for count, demand in enumerate(demands.tolist(), start=1):
            joined = running.plus(table_of(case.candidates[:count]), running.shared)
            services = [joined, *others]
            assert admission.demand(services) == demand
            assert sum(service.footprint for service in services) <= demand
            assert demand <= sum(service.max_footprint for service in services)


def test_draws_become_fewer_with_many_requests():
    """One candidate more, and each of them is drawn less often: the mean is then of other numbers."""
    admission = PastFuture(window=20)
    assert [admission.samples(count) for count in (1, 64, 65, 128, 300)] == [10, 10, 9, 5, 3]
    holders = [Holder(make_state(number=number, prompt=9, max_new_tokens=50)) for number in range(80)]
    case = Case(holders[:60], holders[60:], [], [3, 9, 20, 40], 4, 1, 600)
    running, _ = case.forecasts(admission)
    demands = admission.demand_with_each(running, table_of(case.candidates), [])
    assert [admission.samples(60 + joined) for joined in range(1, 21)].count(10) == 4
    for joined in (1, 4, 5, 20):
        # The window is not full: those running count as not yet ended.
        draws = admission.samples(60 + joined)
        present = holders[: 60 + joined]
        drawn = [lengths_by_formula(case, case.running, holder.state, draws, 20) for holder in present]
        peaks = [peak_by_simulation(case, present, lengths, 1) for lengths in zip(*drawn, strict=True)]
        assert demands[joined - 1] == pytest.approx(sum(peaks) / draws)


def test_nothing_is_forecast_while_blocks_are_missing_or_nothing_waits(monkeypatch):
    forecasts_made = []
    for name in ("demand", "demand_with_each"):
        original = getattr(PastFuture, name)
        monkeypatch.setattr(
            PastFuture,
            name,
            lambda *given, original=original: forecasts_made.append(given) or original(*given),
        )
    scheduler = make_scheduler(make_pool(6), admission=PastFuture())
    run(scheduler, [make_request(16, 6), make_request(16, 6)])
    assert forecasts_made == []


def test_without_prefix_caching_nothing_is_hashed_published_or_looked_up(monkeypatch):
    def never(*arguments, **keywords):
        raise AssertionError("prefix work without prefix caching")

    for name in ("hash_blocks", "hash_next", "hash_synthetic"):
        monkeypatch.setattr(request_state_module, name, never)
    for name in ("match_prefix", "publish"):
        monkeypatch.setattr(BlockPool, name, never)
    prompt = list(range(12))
    scheduler = make_scheduler(make_pool(prefix_caching=False))
    scheduler.submit(make_request(SyntheticPrompt(8, (1, 2)), 6), 0)
    done = run(scheduler, [make_request(prompt, 9), make_request(prompt, 9)])
    assert {len(tokens) for tokens in done.tokens.values()} == {6, 9}
    assert scheduler.stats().services["a"].cached_tokens == 0
