"""Batch formers against brute force, worked examples, and properties of all of them."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from padded_builders import (
    Bilinear,
    ids,
    make_context,
    make_request,
    make_requests,
    memory_of,
    tokens_of,
)

from hypothesis_profiles import examples
from shoal.batches import (
    FORMERS,
    FirstFitDecreasing,
    Fixed,
    FormingContext,
    LeastTime,
    MemoryByRule,
    PooledRequest,
    batch_former,
)
from shoal.core import ConfigError

EVERY_FORMER = pytest.mark.parametrize("name", FORMERS)


@dataclass(frozen=True)
class RisingCost:
    """Any cost that rises with size and with longest input; iterations scale it."""

    seed: int
    table: dict[tuple[int, int], float] = field(default_factory=dict)

    def serve(self, sequences: int, input_tokens: int, iterations: int, /) -> float:
        return self._cost(sequences, input_tokens) * iterations

    def _cost(self, size: int, length: int) -> float:
        if size == 0 or length == 0:
            return 0.0
        if (size, length) not in self.table:
            step = random.Random(f"{self.seed}/{size}/{length}").choice([0.0, 0.1, 1.0, 5.0])
            below = max(self._cost(size - 1, length), self._cost(size, length - 1))
            self.table[size, length] = below + step
        return self.table[size, length]


@dataclass(frozen=True)
class FallingWithSize:
    """A cost that falls with size, which no engine has; it still rises with the longest input."""

    def serve(self, sequences: int, input_tokens: int, iterations: int, /) -> float:
        return input_tokens**1.5 + 20 / sequences


def cost(requests: Sequence[PooledRequest], context: FormingContext) -> float:
    """Of one batch; infinite where it does not fit."""
    longest = max(request.tokens for request in requests)
    iterations = max(context.needed_iterations(request) for request in requests)
    if not context.fits(len(requests), longest, iterations):
        return math.inf
    return context.time.serve(len(requests), longest, iterations)


def contiguous(requests: Sequence[PooledRequest]) -> Iterator[list[Sequence[PooledRequest]]]:
    """Every way to cut the list."""
    for size in range(len(requests)):
        for cuts in itertools.combinations(range(1, len(requests)), size):
            yield [requests[a:b] for a, b in itertools.pairwise((0, *cuts, len(requests)))]


def best_cuts(requests: Sequence[PooledRequest], context: FormingContext) -> float:
    ranked = sorted(requests, key=lambda request: request.tokens)
    return min(sum(cost(part, context) for part in parts) for parts in contiguous(ranked))


def best_partition(requests: Sequence[PooledRequest], context: FormingContext) -> float:
    """Least cost over all set partitions: the first of the rest shares a batch with any subset of it."""
    costs: dict[tuple[PooledRequest, ...], float] = {(): 0.0}

    def least(rest: tuple[PooledRequest, ...]) -> float:
        if rest not in costs:
            first, others = rest[0], rest[1:]
            costs[rest] = min(
                cost((first, *mates), context) + least(tuple(other for other in others if other not in mates))
                for size in range(len(others) + 1)
                for mates in itertools.combinations(others, size)
            )
        return costs[rest]

    return least(tuple(requests))


def total(requests: Sequence[PooledRequest], context: FormingContext) -> float:
    return sum(batch.estimate_s for batch in LeastTime().form(requests, context))


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=7)


@settings(max_examples=examples(50), deadline=None)
@given(lengths, st.integers(0, 1_000_000), st.integers(30, 150), st.one_of(st.none(), st.integers(1, 5)))
def test_least_time_is_the_best_of_all_set_partitions(
    tokens: list[int], seed: int, room: int, max_batch: int | None
) -> None:
    requests = make_requests(*tokens, remaining=20)
    context = make_context(time=RisingCost(seed), memory=memory_of(room), slice_tokens=8, max_batch=max_batch)
    assert total(requests, context) == pytest.approx(best_partition(requests, context))


@pytest.mark.parametrize("seed", range(4))
def test_least_time_is_the_best_of_all_set_partitions_of_nine(seed: int) -> None:
    requests = make_requests(*(random.Random(seed).randint(1, 15) for _ in range(9)))
    context = make_context(time=RisingCost(seed), memory=memory_of(100), slice_tokens=8)
    assert total(requests, context) == pytest.approx(best_partition(requests, context))


@settings(max_examples=examples(30), deadline=None)
@given(lengths)
def test_least_time_does_not_need_a_cost_that_rises_with_size(tokens: list[int]) -> None:
    requests = make_requests(*tokens)
    context = make_context(time=FallingWithSize(), slice_tokens=8)
    assert total(requests, context) == pytest.approx(best_partition(requests, context))


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 20)), min_size=1, max_size=9),
    st.integers(0, 1_000_000),
    st.integers(30, 150),
)
def test_least_time_is_the_best_cut_when_some_are_nearly_done(
    lengths: list[tuple[int, int]], seed: int, room: int
) -> None:
    requests = [
        make_request(number, tokens=tokens, remaining=remaining)
        for number, (tokens, remaining) in enumerate(lengths)
    ]
    context = make_context(time=RisingCost(seed), memory=memory_of(room), slice_tokens=16)
    assert total(requests, context) == pytest.approx(best_cuts(requests, context))


def test_some_nearly_done_are_better_off_in_a_division_that_is_no_cut() -> None:
    requests = [
        make_request(number, tokens=tokens, remaining=remaining)
        for number, (tokens, remaining) in enumerate([(10, 100), (11, 1), (12, 100), (13, 1)])
    ]
    context = make_context(
        time=Bilinear(prefill=(0, 0, 0, 0.01), decode=(0, 1, 0, 1)), slice_tokens=100, max_batch=2
    )
    assert best_partition(requests, context) < best_cuts(requests, context)
    assert total(requests, context) == pytest.approx(best_cuts(requests, context))


def test_least_time_keeps_one_long_input_apart() -> None:
    """SCLS, Fig. 11: 13.5 s together, 7.6 s apart."""
    requests = make_requests(*[10] * 15, 1024, remaining=1024)
    context = make_context(time=Bilinear(), slice_tokens=128)
    batches = LeastTime().form(requests, context)
    assert tokens_of(batches) == [[10] * 15, [1024]]
    assert sum(batch.estimate_s for batch in batches) == pytest.approx(7.6, abs=0.1)
    assert context.batch(requests).estimate_s == pytest.approx(13.5, abs=0.1)


def test_least_time_looks_no_further_back_than_a_batch_that_fits() -> None:
    asked = []

    class Counting(Bilinear):
        def serve(self, sequences: int, input_tokens: int, iterations: int, /) -> float:
            asked.append(sequences)
            return 1.0

    context = make_context(time=Counting(), memory=memory_of(7 * 18), slice_tokens=8)
    batches = LeastTime().form(make_requests(*[10] * 200), context)
    assert max(asked) == 7
    assert len(asked) <= 200 * 7 + len(batches)
    assert sorted(map(len, batches)) == [4] + [7] * 28


def test_fixed_takes_them_as_they_came() -> None:
    batches = Fixed().form(make_requests(9, 1, 5, 7, 3), make_context(max_batch=2))
    assert tokens_of(batches) == [[9, 1], [5, 7], [3]]
    assert [batch.input_tokens for batch in batches] == [9, 7, 3]


def test_fixed_closes_a_batch_early_where_the_memory_ends() -> None:
    context = make_context(memory=memory_of(45), slice_tokens=10, max_batch=3)
    assert tokens_of(Fixed().form(make_requests(5, 5, 5, 11, 11), context)) == [[5, 5, 5], [11, 11]]


def test_s3_by_hand() -> None:
    # Sizes 70, 60, 50, 40, 30, 20 and room for 100 of one input length: rows x the longest must fit.
    sizes = [30, 60, 20, 70, 50, 40]
    requests = [
        make_request(number, tokens=10, remaining=500, predicted=size - 10)
        for number, size in enumerate(sizes)
    ]
    context = make_context(memory=memory_of(150), trust_predictions=True)
    batches = FirstFitDecreasing().form(requests, context)
    # 70 opens; 60: 2 x 70 fits beside it; 50 does not (3 x 70), opens; 40, 30: 3 x 50 fits; 20 opens.
    predicted = [[request.predicted + 10 for request in batch.requests] for batch in batches]
    assert predicted == [[70, 60], [50, 40, 30], [20]]
    assert [batch.iterations for batch in batches] == [60, 40, 10]


def test_s3_goes_back_to_an_earlier_batch() -> None:
    requests = [
        make_request(0, tokens=80, remaining=99, predicted=20),
        make_request(1, tokens=20, remaining=99, predicted=70),
        make_request(2, tokens=75, remaining=99, predicted=10),
    ]
    context = make_context(memory=memory_of(200), trust_predictions=True)
    # r0 (100) opens; r1 (90) beside it would be 2 x (80 + 70): opens; r2 (85): 2 x (80 + 20) fits.
    assert ids(FirstFitDecreasing().form(requests, context)) == [["r0", "r2"], ["r1"]]


def first_fit_decreasing(sizes: list[tuple[int, int]], room: int) -> list[list[int]]:
    """Indices by bin; a bin of rows (input, output) holds rows x (longest input + longest output)."""
    bins: list[list[int]] = []
    order = sorted(range(len(sizes)), key=lambda index: (-sum(sizes[index]), index))
    for index in order:
        for inside in bins:
            rows = [sizes[row] for row in [*inside, index]]
            if len(rows) * (max(row[0] for row in rows) + max(row[1] for row in rows)) <= room:
                inside.append(index)
                break
        else:
            bins.append([index])
    return bins


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=20), st.integers(80, 400))
def test_s3_is_first_fit_decreasing(sizes: list[tuple[int, int]], room: int) -> None:
    requests = [
        make_request(number, tokens=tokens, remaining=50, predicted=predicted)
        for number, (tokens, predicted) in enumerate(sizes)
    ]
    context = make_context(memory=memory_of(room), trust_predictions=True)
    expected = [[f"r{index}" for index in inside] for inside in first_fit_decreasing(sizes, room)]
    assert ids(FirstFitDecreasing().form(requests, context)) == expected


@st.composite
def contexts(draw: st.DrawFn) -> FormingContext:
    return make_context(
        memory=draw(st.sampled_from([memory_of(100), memory_of(700), memory_of(5000), MemoryByRule()])),
        slice_tokens=draw(st.sampled_from([None, 1, 16])),
        max_batch=draw(st.sampled_from([None, 1, 3, 16])),
        trust_predictions=draw(st.booleans()),
        mean_slo_s=draw(st.sampled_from([0.5, 20.0])),
        mean_predicted=draw(st.sampled_from([1.0, 20.0])),
    )


@st.composite
def pools(draw: st.DrawFn) -> list[PooledRequest]:
    pool = []
    for number in range(draw(st.integers(0, 30))):
        remaining = draw(st.integers(1, 50))
        pool.append(
            make_request(
                number,
                tokens=draw(st.integers(1, 50)),
                remaining=remaining,
                predicted=draw(st.integers(1, remaining)),
                slo_s=draw(st.one_of(st.none(), st.floats(0.1, 100))),
            )
        )
    return pool


@EVERY_FORMER
@settings(max_examples=examples(30), deadline=None)
@given(pool=pools(), context=contexts())
def test_every_request_is_in_one_batch_that_fits(
    name: str, pool: list[PooledRequest], context: FormingContext
) -> None:
    batches = FORMERS[name].form(pool, context)
    assert sorted(itertools.chain(*ids(batches))) == sorted(request.id for request in pool)
    for batch in batches:
        assert batch == context.batch(batch.requests)
        assert context.memory.fits(len(batch), batch.input_tokens, batch.iterations)
        assert context.max_batch is None or len(batch) <= context.max_batch
        assert context.slice_tokens is None or batch.iterations <= context.slice_tokens


@EVERY_FORMER
def test_a_former_makes_use_of_the_room_there_is(name: str) -> None:
    pool = [make_request(number, tokens=10, remaining=10, slo_s=1.0) for number in range(12)]
    context = make_context(memory=memory_of(4 * 20), max_batch=6, mean_predicted=10.0)
    assert [len(batch) for batch in FORMERS[name].form(pool, context)] == [4, 4, 4]


def test_an_unknown_former_is_refused_by_name() -> None:
    assert batch_former("scls") is FORMERS["scls"]
    with pytest.raises(ConfigError, match=r"batch former 'sclss'.*did you mean 'scls'"):
        batch_former("sclss")
