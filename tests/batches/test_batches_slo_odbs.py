"""SLO-ODBS: the paper's example, worked examples, and what the literal reading does differently."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from padded_builders import ids, make_context, make_request

from experiments.padded.account import account
from shoal.batches import Aim, Fixed, PooledRequest, Reading, RequestBatch, SloOdbs
from shoal.core import ConfigError

MEAN = 100
LITERAL = SloOdbs(reading=Reading.ALGORITHM)
EQUATIONS = SloOdbs(reading=Reading.EQUATIONS)


def by_length(*lengths: int) -> list[PooledRequest]:
    return [
        make_request(number, remaining=10_000, predicted=length, slo_s=1.0)
        for number, length in enumerate(lengths)
    ]


def by_slo(*goals: float) -> list[PooledRequest]:
    return [
        make_request(number, remaining=10_000, predicted=MEAN, slo_s=goal)
        for number, goal in enumerate(goals)
    ]


def formed(former: SloOdbs, requests: list[PooledRequest], max_batch: int | None) -> list[list[str]]:
    context = make_context(max_batch=max_batch, trust_predictions=True, mean_predicted=float(MEAN))
    return ids(former.form(requests, context))


@pytest.mark.parametrize("aim", [Aim.BOTH, Aim.LENGTH])
def test_the_papers_example(aim: Aim) -> None:
    """UELLM, Fig. 3: one batch of three generates 174 tokens with 6 pads, two batches 74 with 2."""
    lengths = [(8, 58), (6, 8), (4, 8)]
    requests = [
        make_request(number, tokens=tokens, remaining=1024, predicted=output, slo_s=5.0)
        for number, (tokens, output) in enumerate(lengths)
    ]
    context = make_context(
        max_batch=3, trust_predictions=True, mean_slo_s=5.0, mean_predicted=sum(o for _, o in lengths) / 3
    )

    def spent(batches: list[RequestBatch]) -> tuple[int, int]:
        accounts = [
            account(batch, [request.predicted for request in batch.requests], batch.iterations)
            for batch in batches
        ]
        tokens = sum(spent.useful_tokens + spent.invalid_tokens for spent in accounts)
        return tokens, sum(spent.pad_tokens for spent in accounts)

    assert spent(Fixed().form(requests, context)) == (174, 6)
    batches = SloOdbs(aim=aim).form(requests, context)
    assert sorted(ids(batches)) == [["r0"], ["r1", "r2"]]
    assert spent(batches) == (74, 2)


@pytest.mark.parametrize("former", [SloOdbs(aim=aim, reading=reading) for aim in Aim for reading in Reading])
@pytest.mark.parametrize("largest", [1, 5, 16])
def test_equal_requests_fill_batches_of_the_largest_size(former: SloOdbs, largest: int) -> None:
    batches = formed(former, by_length(*[MEAN] * 40), largest)
    assert [len(batch) for batch in batches] == [largest] * (40 // largest) + [40 % largest] * (
        40 % largest > 0
    )


def test_the_threshold_binds_on_lengths() -> None:
    # B_max 4: threshold 2 x 1.2 x 4 = 9.6. Lengths 1, 0.2, 0.2 of the mean, longest first:
    # second: (2 + 0.8) x 2 x 1.2 = 6.72 joins; third: (2 + 0.8) x 3 x 1.2 = 10.08 does not.
    # Size and composite metric (1 + 1, as the mean's) would allow four.
    requests = by_length(20, 100, 20)
    assert formed(SloOdbs(aim=Aim.LENGTH), requests, 4) == [["r2"], ["r1", "r0"]]
    # At 0.4 of the mean: (2 + 0.6) x 3 x 1.2 = 9.36 joins.
    assert formed(SloOdbs(aim=Aim.LENGTH), by_length(40, 100, 40), 4) == [["r1", "r0", "r2"]]
    # Lengths that weigh less: (2 + 0.5 x 0.8) x 3 x 1.2 = 8.64 joins.
    lighter = SloOdbs(aim=Aim.LENGTH, length_weight=0.5)
    assert formed(lighter, requests, 4) == [["r1", "r0", "r2"]]


def test_the_threshold_binds_on_goals() -> None:
    # B_max 3: threshold 7.2. Goals of 2 means: (2 + 2) x 2 x 1.2 = 9.6; the composite metric, 2 + 1
    # against a mean of 2, would allow 3 x 2 / 3 = 2.
    assert formed(SloOdbs(aim=Aim.SLO), by_slo(2, 2), 3) == [["r0"], ["r1"]]
    # 0.5 and 2.0: (2 + 0.5) x 2 x 1.2 = 6 joins.
    assert formed(SloOdbs(aim=Aim.SLO), by_slo(0.5, 2), 3) == [["r0", "r1"]]


def test_a_batch_above_the_mean_is_smaller() -> None:
    # Lengths of 3 means: the threshold allows 4, but CM = 1 + 3 against 2 leaves half of B_max.
    assert [len(batch) for batch in formed(SloOdbs(), by_length(300, 300, 300), 4)] == [2, 1]


def test_without_a_largest_size_only_memory_counts() -> None:
    assert formed(SloOdbs(), by_length(1, 1000, 50, 9000), None) == [["r0", "r2", "r1", "r3"]]


def test_the_order_of_batches() -> None:
    urgent_last = by_slo(0.9, 0.5, 0.1, 0.7)
    assert formed(SloOdbs(aim=Aim.SLO), urgent_last, 2) == [["r2", "r1"], ["r3", "r0"]]
    assert formed(SloOdbs(aim=Aim.LENGTH), by_length(10, 100, 20, 90), 3) == [["r2", "r0"], ["r1", "r3"]]


def test_both_are_sorted_by_goal_and_half_the_length() -> None:
    requests = [
        make_request(0, remaining=999, predicted=100, slo_s=0.5),  # 0.5 + 0.5
        make_request(1, remaining=999, predicted=20, slo_s=0.8),  # 0.8 + 0.1
        make_request(2, remaining=999, predicted=60, slo_s=0.4),  # 0.4 + 0.3
    ]
    assert formed(SloOdbs(), requests, 1) == [["r2"], ["r0"], ["r1"]]  # one each, by goal
    assert formed(SloOdbs(), requests, 9) == [["r2", "r1", "r0"]]  # one batch, as looked at


def test_read_literally_a_short_one_joins_a_long_batch_for_free() -> None:
    requests = by_length(100, 20, 20)
    # (2 - 0.8) x 3 x 1.2 = 4.32 <= 9.6
    assert formed(LITERAL, requests, 4) == [["r0", "r1", "r2"]]
    assert [len(batch) for batch in formed(SloOdbs(), requests, 4)] == [2, 1]


def test_read_literally_the_order_is_by_goal_alone() -> None:
    requests = [
        make_request(0, remaining=999, predicted=10, slo_s=0.9),
        make_request(1, remaining=999, predicted=300, slo_s=0.8),
    ]
    assert formed(LITERAL, requests, 1) == [["r1"], ["r0"]]


def test_in_the_equations_lengths_add_up() -> None:
    # B_max 4: threshold (2 + 2) x 4 x 1.2 = 19.2. Three of twice the mean length, goals of the mean:
    # second (2 + 4) x 2 x 1.2 = 14.4 joins, third (2 + 4) x 3 x 1.2 = 21.6 does not.
    assert [len(batch) for batch in formed(EQUATIONS, by_length(200, 200, 200), 4)] == [2, 1]
    # Read as the algorithm has it, equal lengths cost nothing: (2 + 0) x 3 x 1.2 = 7.2 of 9.6; CM allows
    # 4 x 2 / (1 + 2) = 2.67, so a mean goal of less than half is needed for the third.
    early = [make_request(n, remaining=999, predicted=200, slo_s=0.1) for n in range(3)]
    assert [len(batch) for batch in formed(LITERAL, early, 4)] == [3]
    # (0.2 + 4) x 3 x 1.2 = 15.1 of 19.2
    assert [len(batch) for batch in formed(EQUATIONS, early, 4)] == [3]
    # Short ones join in any number that size allows: (2 + 0.2) x 4 x 1.2 = 10.6.
    assert [len(batch) for batch in formed(EQUATIONS, by_length(10, 10, 10, 10), 4)] == [4]


def test_a_threshold_of_ones_own() -> None:
    lengths = by_length(*[MEAN] * 8)
    # A batch of n mean requests costs 2 n 1.2.
    assert [len(batch) for batch in formed(SloOdbs(threshold=7.2), lengths, 8)] == [3, 3, 2]
    assert [len(batch) for batch in formed(SloOdbs(threshold=1e9), lengths, 8)] == [8]
    assert [len(batch) for batch in formed(SloOdbs(threshold=1e-9), lengths, 8)] == [1] * 8
    by_lengths_alone = SloOdbs(latency_weight=0, threshold=1.0)
    assert formed(by_lengths_alone, by_length(100, 100, 300, 300), 6) == [["r0", "r1"], ["r2", "r3"]]


def test_the_paper_weighs_length_by_w1_and_goal_by_w2_in_the_composite_metric() -> None:
    weights = {"latency_weight": 1.0, "length_weight": 3.0, "threshold": 1e9}
    requests = by_length(*[300] * 6)
    # CM of ours: 1 x 1 + 3 x 3 = 10 against a mean of 4; the paper's: 1 x 3 + 3 x 1 = 6.
    assert [len(batch) for batch in formed(SloOdbs(**weights), requests, 10)] == [4, 2]
    literal = SloOdbs(**weights, reading=Reading.ALGORITHM)
    assert [len(batch) for batch in formed(literal, requests, 10)] == [6]
    assert [len(batch) for batch in formed(literal, requests, 7)] == [4, 2]


@given(st.lists(st.floats(0.1, 10), max_size=20), st.integers(1, 8))
def test_a_request_without_a_goal_counts_as_the_mean(goals: list[float], largest: int) -> None:
    without = [make_request(number, predicted=50) for number in range(len(goals))]
    with_mean = [make_request(number, predicted=50, slo_s=1.0) for number in range(len(goals))]
    assert formed(SloOdbs(), without, largest) == formed(SloOdbs(), with_mean, largest)


@given(st.lists(st.tuples(st.integers(1, 900), st.floats(0.1, 10)), max_size=25), st.integers(1, 12))
def test_every_batch_is_within_threshold_and_size(drawn: list[tuple[int, float]], largest: int) -> None:
    requests = [
        make_request(number, remaining=1000, predicted=length, slo_s=goal)
        for number, (length, goal) in enumerate(drawn)
    ]
    context = make_context(max_batch=largest, trust_predictions=True, mean_predicted=float(MEAN))
    for batch in SloOdbs().form(requests, context):
        for size in range(2, len(batch) + 1):
            *others, last = batch.requests[:size]
            slo = max(other.slo_s or 0 for other in others)
            length = max(other.predicted for other in others)
            cost = ((last.slo_s or 0) + slo) * size + abs(last.predicted - length) / MEAN * size
            assert cost <= 2 * largest + 1e-9
        assert len(batch) <= largest


@pytest.mark.parametrize(
    "wrong",
    [
        {"latency_weight": 0},
        {"latency_weight": -1, "threshold": 1},
        {"length_weight": -1},
        {"latency_overhead": 0},
        {"length_overhead": -1},
        {"threshold": 0},
    ],
)
def test_weights_without_meaning_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        SloOdbs(**wrong)


def test_lengths_are_ignored_by_slo_dbs_and_goals_by_odbs() -> None:
    lengths, goals = (10, 900, 50, 300), (1.0, 0.2, 5.0, 2.0)
    for largest, aim in itertools.product((1, 3, 8), (Aim.SLO, Aim.LENGTH)):
        mixed = [
            make_request(number, remaining=999, predicted=length, slo_s=goal)
            for number, (length, goal) in enumerate(zip(lengths, goals, strict=True))
        ]
        plain = [
            make_request(
                number,
                remaining=999,
                predicted=MEAN if aim is Aim.SLO else length,
                slo_s=goal if aim is Aim.SLO else 1.0,
            )
            for number, (length, goal) in enumerate(zip(lengths, goals, strict=True))
        ]
        assert formed(SloOdbs(aim=aim), mixed, largest) == formed(SloOdbs(aim=aim), plain, largest)
