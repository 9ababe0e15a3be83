import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.forecast import Demand, SharedBlocks

requests = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40)), min_size=1, max_size=12)
block_sizes = st.sampled_from([1, 2, 3, 4, 16])


def columns(pairs):
    tokens, remaining = np.array(pairs, dtype=np.int64).T
    return tokens, remaining[None, :]


def peak_of(demand, remaining):
    return demand.timeline(remaining).peak()


def simulated_peak(pairs, block_size, per_merged=1, units=1, sets=()):
    """Step by step: every running request grows by a token, then those without remaining tokens leave."""
    peak = 0
    for step in range(max(remaining for _, remaining in pairs) + 1):
        alive = {at for at, (_, remaining) in enumerate(pairs) if remaining >= step}
        blocks = sum(-(-(pairs[at][0] + step) // block_size) for at in alive)
        blocks -= sum(count * max(0, len(alive & set(members)) - 1) for count, members in sets)
        peak = max(peak, -(-blocks // per_merged) * units)
    return peak


def shared_blocks(sets):
    members = [sorted(holders) for _, holders in sets]
    return SharedBlocks(
        counts=np.array([count for count, _ in sets]),
        members=np.array([member for holders in members for member in holders]),
        starts=np.cumsum([0, *map(len, members)])[:-1],
    )


@given(requests, block_sizes, st.integers(1, 5), st.integers(1, 3))
def test_the_peak_is_that_of_a_simulation(pairs, block_size, per_merged, units):
    tokens, remaining = columns(pairs)
    peak = peak_of(Demand(tokens, block_size, per_merged, units), remaining)
    assert peak.tolist() == [simulated_peak(pairs, block_size, per_merged, units)]


@given(requests)
def test_in_tokens_the_peak_is_equation_four(pairs):
    ordered = sorted(pairs, key=lambda pair: -pair[1])
    held = np.cumsum([tokens for tokens, _ in ordered])
    by_formula = max(held[i] + (i + 1) * ordered[i][1] for i in range(len(ordered)))
    tokens, remaining = columns(pairs)
    assert peak_of(Demand(tokens, 1), remaining).tolist() == [by_formula]


@st.composite
def batches_with_shared_prefixes(draw):
    """Requests whose first blocks are shared, as a tree: nested sets of holders."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    pairs = draw(st.lists(st.tuples(st.integers(24, 60), st.integers(0, 40)), min_size=2, max_size=10))
    sets, level = [], [list(range(len(pairs)))]
    for _ in range(draw(st.integers(1, 3))):
        below = []
        for holders in level:
            if len(holders) > 1:
                sets.append((draw(st.integers(1, 2)), holders))
                cut = draw(st.integers(0, len(holders)))
                below += [holders[:cut], holders[cut:]]
        level = below
    return block_size, pairs, sets


@given(batches_with_shared_prefixes())
def test_shared_blocks_count_once_while_anybody_holds_them(batch):
    block_size, pairs, sets = batch
    tokens, remaining = columns(pairs)
    shared = shared_blocks(sets)
    demand = Demand(tokens, block_size, shared=shared)
    assert peak_of(demand, remaining).tolist() == [simulated_peak(pairs, block_size, sets=sets)]
    now = sum(-(-count // block_size) for count in tokens.tolist())
    assert demand.total(tokens) == now - shared.surplus


@given(batches_with_shared_prefixes(), st.data())
def test_shared_blocks_without_one_holder(batch, data):
    block_size, pairs, sets = batch
    gone = data.draw(st.integers(0, len(pairs) - 1))
    rest = pairs[:gone] + pairs[gone + 1 :]
    fewer = [
        (count, [member - (member > gone) for member in holders if member != gone]) for count, holders in sets
    ]
    tokens, remaining = columns(rest)
    demand = Demand(tokens, block_size, shared=shared_blocks(sets).without(gone))
    assert peak_of(demand, remaining).tolist() == [simulated_peak(rest, block_size, sets=fewer)]


@given(batches_with_shared_prefixes(), requests, st.sampled_from([1, 3, 4]))
def test_a_timeline_with_candidates_equals_one_of_all_requests(batch, further, block_size):
    """The second draw has the lengths in reverse order."""
    _, pairs, sets = batch
    tokens, remaining = columns(pairs + further)
    remaining = np.concatenate([remaining, remaining[:, ::-1]])
    demand = Demand(tokens[: len(pairs)], block_size, shared=shared_blocks(sets))
    timeline = demand.timeline(remaining[:, : len(pairs)])
    peaks = timeline.peak_with_each(tokens[len(pairs) :], remaining[:, len(pairs) :])
    for count, peak in enumerate(peaks.tolist(), start=len(pairs) + 1):
        whole = Demand(tokens[:count], block_size, shared=shared_blocks(sets))
        assert whole.timeline(remaining[:, :count]).peak().tolist() == peak


@given(requests, block_sizes)
def test_a_timeline_may_begin_empty(pairs, block_size):
    tokens, remaining = columns(pairs)
    nobody = Demand(tokens[:0], block_size).timeline(remaining[:, :0])
    peaks = nobody.peak_with_each(tokens, remaining)
    alone = [simulated_peak(pairs[: count + 1], block_size) for count in range(len(pairs))]
    assert peaks.tolist() == [[peak] for peak in alone]


@given(requests, requests, block_sizes)
def test_several_draws_are_forecast_independently(first, second, block_size):
    size = min(len(first), len(second))
    tokens, remaining = columns(first[:size])
    other = columns(second[:size])[1]
    demand = Demand(tokens, block_size)
    both = peak_of(demand, np.concatenate([remaining, other]))
    assert both.tolist() == [*peak_of(demand, remaining), *peak_of(demand, other)]


def test_services_that_alternate_can_reach_the_sum_of_their_peaks():
    """A holds 0 and wants 100, B holds 90 and wants 10: 110 in lockstep, 190 if A runs first."""
    a = peak_of(Demand(np.array([1]), 1), np.array([[99]]))
    b = peak_of(Demand(np.array([90]), 1), np.array([[10]]))
    together = peak_of(Demand(np.array([1, 90]), 1), np.array([[99, 10]]))
    assert together.tolist() == [111]
    assert (a + b).tolist() == [200]


@given(st.lists(requests, min_size=1, max_size=3), block_sizes, st.data())
def test_no_interleaving_of_full_batches_exceeds_the_sum_of_peaks(services, block_size, data):
    """Whichever service steps next, with all it has; equality where each reaches its peak while others hold
    theirs, which lockstep within one service always does."""
    per_merged = [data.draw(st.integers(1, 4)) for _ in services]
    peaks = [
        peak_of(Demand(columns(pairs)[0], block_size, n), columns(pairs)[1])
        for pairs, n in zip(services, per_merged, strict=True)
    ]
    total = int(sum(peaks)[0])
    steps = [0] * len(services)
    ends = [max(remaining for _, remaining in pairs) for pairs in services]

    def held(at):
        alive = [tokens + steps[at] for tokens, remaining in services[at] if remaining >= steps[at]]
        return -(-sum(-(-tokens // block_size) for tokens in alive) // per_merged[at])

    most = sum(map(held, range(len(services))))
    while any(step <= end for step, end in zip(steps, ends, strict=True)):
        at = data.draw(st.sampled_from([i for i in range(len(services)) if steps[i] <= ends[i]]))
        steps[at] += 1
        most = max(most, sum(map(held, range(len(services)))))
    assert most <= total
    if len(services) == 1:
        assert most == total


def test_merged_blocks_are_counted_service_by_service():
    a = peak_of(Demand(np.array([5]), 4, blocks_per_merged=3), np.array([[0]]))
    b = peak_of(Demand(np.array([5]), 4, blocks_per_merged=5), np.array([[20]]))
    assert (a.tolist(), b.tolist()) == ([1], [2])


def test_very_long_outputs_are_sorted_too():
    pairs = [(1, 100_000), (1, 3), (5, 70_000)]
    tokens, remaining = columns(pairs)
    assert peak_of(Demand(tokens, 1), remaining).tolist() == [70_001 + 70_005]


def test_no_requests_need_no_memory():
    nobody = np.zeros((2, 0), dtype=np.int64)
    assert peak_of(Demand(np.zeros(0, dtype=np.int64), 16), nobody).tolist() == [0, 0]
