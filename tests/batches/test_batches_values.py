"""Requests between batches, the two estimates, offloaders, intervals, and token accounting."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from padded_builders import Swift, make_context, make_request, make_requests, memory_of

from experiments.padded.account import account
from experiments.padded.interval import AdaptiveInterval, FixedInterval, WhenIdle
from experiments.padded.offload import OFFLOADERS
from experiments.padded.options import StaticOptions
from experiments.padded.presets import static_preset
from shoal.batches import FormingContext, MemoryByBytes, MemoryByRule, RequestBatch
from shoal.core import ConfigError


def make_batch(*tokens: int, iterations: int = 10, estimate_s: float = 1.0) -> RequestBatch:
    requests = make_requests(*tokens)
    return RequestBatch(
        requests=tuple(requests),
        input_tokens=max(tokens),
        iterations=iterations,
        estimate_s=estimate_s,
    )


def test_a_request_after_a_slice() -> None:
    request = make_request(tokens=10, remaining=100, predicted=30)
    after = request.after(20)
    assert (after.tokens, after.remaining, after.predicted, after.slices) == (30, 80, 10, 1)
    assert request.after(20, predicted=55).predicted == 55
    assert after.number == request.number


def test_a_request_that_outgrew_its_prediction_is_believed_to_go_on_twice_as_long() -> None:
    request = make_request(tokens=10, remaining=100, predicted=30)
    assert request.after(30).predicted == 60
    assert request.after(30).after(60).predicted == 10  # all that its limit leaves


@pytest.mark.parametrize("generated", [-1, 100, 101])
def test_a_request_at_its_limit_has_ended(generated: int) -> None:
    with pytest.raises(ValueError, match="cannot go on"):
        make_request(remaining=100).after(generated)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": 0},
        {"remaining": 0},
        {"predicted": 0},
        {"remaining": 5, "predicted": 6},
        {"slo_s": 0.0},
    ],
)
def test_a_request_without_meaning_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="request 'r0'"):
        make_request(**wrong)  # type: ignore[arg-type]


def test_memory_by_bytes() -> None:
    # 2 rows x (90 + 10) tokens x 5 bytes = 1000, of which 0.8 x 1250 may be used.
    memory = MemoryByBytes(token_bytes=5, available_bytes=1250, zeta=0.8)
    assert memory.fits(2, 90, 10)
    assert not memory.fits(2, 91, 10)
    assert not memory.fits(2, 90, 11)
    assert not memory.fits(3, 90, 10)


@pytest.mark.parametrize(("total", "most"), [(512, 28), (513, 22), (1024, 22), (1025, 12), (2048, 12)])
def test_memory_by_rule(total: int, most: int) -> None:
    assert MemoryByRule().fits(most, total - 128, 128)
    assert not MemoryByRule().fits(most + 1, total - 128, 128)


@pytest.mark.parametrize(
    "make",
    [
        lambda: MemoryByBytes(token_bytes=0, available_bytes=1),
        lambda: MemoryByBytes(token_bytes=1, available_bytes=0),
        lambda: MemoryByBytes(token_bytes=1, available_bytes=1, zeta=1.5),
        lambda: FixedInterval(-1),
        lambda: AdaptiveInterval(-1),
        lambda: AdaptiveInterval(1, factor=1.0),
        lambda: StaticOptions(
            former=static_preset("sls").former,
            offloader=OFFLOADERS["max-min"],
            interval=WhenIdle(),
            max_batch=0,
        ),
    ],
)
def test_numbers_without_meaning_are_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError):
        make()


def test_a_batch_runs_for_what_its_members_ask() -> None:
    requests = [make_request(0, remaining=100, predicted=20), make_request(1, remaining=50, predicted=40)]

    def iterations(context: FormingContext) -> int:
        return context.batch(requests).iterations

    assert iterations(make_context()) == 100
    assert iterations(make_context(slice_tokens=64)) == 64
    assert iterations(make_context(trust_predictions=True)) == 40
    assert iterations(make_context(trust_predictions=True, slice_tokens=30)) == 30


def test_one_alone_may_always_run() -> None:
    context = make_context(memory=memory_of(1), max_batch=1)
    assert context.fits(1, 100, 100)
    assert not context.fits(2, 1, 1)


def test_round_robin_takes_turns_whatever_the_load() -> None:
    offloader = OFFLOADERS["round-robin"]
    batches = [make_batch(1, estimate_s=1.0), make_batch(1, estimate_s=9.0)]
    assert list(offloader.order(batches)) == batches
    assert [offloader.choose([9.0, 0.0, 5.0], turn) for turn in range(5)] == [0, 1, 2, 0, 1]


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=7), st.integers(1, 3))
def test_max_min_is_within_four_thirds_of_the_best(times: list[float], workers: int) -> None:
    offloader = OFFLOADERS["max-min"]
    loads = [0.0] * workers
    for turn, batch in enumerate(offloader.order([make_batch(1, estimate_s=seconds) for seconds in times])):
        loads[offloader.choose(loads, turn)] += batch.estimate_s
    best = min(
        max(sum(seconds for seconds, at in zip(times, where, strict=True) if at == w) for w in range(workers))
        for where in itertools.product(range(workers), repeat=len(times))
    )
    assert max(loads) <= (4 / 3 - 1 / (3 * workers)) * best + 1e-9


def test_max_min_by_hand() -> None:
    # The bound is reached: 5 5 4 4 3 3 3 on three workers end at 11, the best is 9.
    offloader = OFFLOADERS["max-min"]
    loads = [0.0] * 3
    for batch in offloader.order([make_batch(1, estimate_s=seconds) for seconds in (3, 5, 4, 3, 5, 4, 3)]):
        loads[offloader.choose(loads, 0)] += batch.estimate_s
    assert loads == [11.0, 8.0, 8.0]


def test_intervals() -> None:
    assert WhenIdle().after_s([5.0]) is None
    assert FixedInterval(6.0).after_s([50.0, 90.0]) == 6.0
    assert AdaptiveInterval(6.0).after_s([50.0, 90.0]) == 25.0
    assert AdaptiveInterval(6.0).after_s([0.0, 90.0]) == 6.0


def test_the_account_of_a_batch() -> None:
    # Inputs 4, 9, 6 padded to 9; outputs 2, 7, 5 of 7 iterations.
    spent = account(make_batch(4, 9, 6), [2, 7, 5], 7)
    assert spent.pad_tokens == 5 + 0 + 3
    assert spent.invalid_tokens == 5 + 0 + 2
    assert spent.useful_tokens == 14
    assert (spent.prefilled_tokens, spent.recomputed_tokens) == (19, 0)


def test_the_prefill_of_a_second_slice_is_done_again() -> None:
    batch = make_context(slice_tokens=8).batch(
        [make_request(0, tokens=4).after(3), make_request(1, tokens=9)]
    )
    assert account(batch, [8, 8], 8).recomputed_tokens == 7


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(0, 10)), min_size=1, max_size=9))
def test_every_position_of_a_batch_is_accounted_for(rows: list[tuple[int, int]]) -> None:
    batch = make_batch(*(tokens for tokens, _ in rows))
    outputs = [output for _, output in rows]
    run = max(outputs)
    spent = account(batch, outputs, run)
    assert spent.pad_tokens + spent.prefilled_tokens == len(rows) * batch.input_tokens
    assert spent.useful_tokens + spent.invalid_tokens == len(rows) * run


@pytest.mark.parametrize(
    ("outputs", "run", "problem"),
    [([1], 5, "as many outputs"), ([1, 1], 11, "iterations run"), ([1, 6], 5, "output of request 'r1'")],
)
def test_an_account_of_another_batch_is_refused(outputs: list[int], run: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        account(make_batch(4, 9), outputs, run)


def test_the_quick_estimate_of_these_tests_rises() -> None:
    serve = Swift().serve
    assert serve(1, 10, 10) < serve(2, 10, 10) < serve(2, 20, 10) < serve(2, 20, 20)
