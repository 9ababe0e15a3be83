"""Rows become requests."""

import pytest
import workload_builders as build

from shoal.core import ConfigError, InvalidRequest
from shoal.workload import (
    LENGTHS,
    FixedLength,
    Independent,
    Poisson,
    TraceRow,
    Uniform,
    generate_rows,
    sort_by_arrival,
    to_requests,
    with_arrivals,
    with_lengths,
)


def test_requests_carry_what_the_rows_say() -> None:
    rows = [
        build.row(arrival=5, prompt=1100, output=7, hashes=(1, 2, 3)),
        build.row(arrival=9, prompt=3, output=1),
    ]
    first, second = to_requests(rows, "chat")
    assert (first.id, second.id) == ("r0", "r1")
    assert (first.service, first.arrival_ns, second.arrival_ns) == ("chat", 0, 4)
    assert (len(first.prompt), first.true_output_tokens) == (1100, 7)
    assert (len(first.prompt.block_hashes), second.prompt.block_hashes) == (1100 // 16, ())
    assert first.sampling.max_tokens is None
    assert first.seed != second.seed


def test_requests_are_sorted_and_numbered_by_arrival() -> None:
    rows = [build.row(arrival=9, prompt=1), build.row(arrival=4, prompt=2), build.row(arrival=4, prompt=3)]
    assert [(r.id, len(r.prompt), r.arrival_ns) for r in to_requests(rows, "a", prefix="x")] == [
        ("x0", 2, 0),
        ("x1", 3, 0),
        ("x2", 1, 5),
    ]
    assert [r.arrival_ns for r in to_requests(rows, "a", from_zero=False)] == [4, 4, 9]
    assert [len(r.prompt) for r in to_requests(rows, "a", limit=2)] == [2, 3]


def test_time_scale_and_max_tokens() -> None:
    rows = [build.row(arrival=0), build.row(arrival=1000)]
    assert [r.arrival_ns for r in to_requests(rows, "a", time_scale=0.5)] == [0, 500]
    assert {r.sampling.max_tokens for r in to_requests(rows, "a", max_tokens=5)} == {5}
    with pytest.raises(InvalidRequest):
        to_requests(rows, "a", max_tokens=0)


def test_the_service_may_depend_on_the_row() -> None:
    rows = [build.row(arrival=1, client="b"), build.row(arrival=0, client="a")]
    assert [r.service for r in to_requests(rows, lambda n, row: f"{row.client}{n}")] == ["a0", "b1"]


def test_no_rows_no_requests() -> None:
    assert to_requests([], "a") == []
    assert sort_by_arrival([]) == []


def test_rows_without_lengths_and_senseless_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="request 0 of the trace has no lengths"):
        to_requests([TraceRow(0, 0, 0)], "a")
    with pytest.raises(ConfigError, match="block_size"):
        to_requests([build.row()], "a", block_size=0)
    with pytest.raises(ConfigError, match="time_scale"):
        to_requests([build.row()], "a", time_scale=float("nan"))


def test_single_token_requests() -> None:
    (request,) = to_requests([build.row(prompt=1, output=1, hashes=(4,))], "a")
    assert (len(request.prompt), request.prompt.block_hashes, request.true_output_tokens) == (1, (), 1)


def test_generated_rows_are_keyed_by_the_seed() -> None:
    rows = generate_rows(LENGTHS["sharegpt"], Poisson(2.0), 50, seed=3)
    assert rows == generate_rows(LENGTHS["sharegpt"], Poisson(2.0), 50, seed=3)
    assert rows != generate_rows(LENGTHS["sharegpt"], Poisson(2.0), 50, seed=4)


def test_lengths_and_arrivals_are_replaced_apart() -> None:
    rows = [build.row(arrival=7, prompt=600, client="c", hashes=(1,)), build.row(arrival=8)]
    sized = with_lengths(rows, Independent(FixedLength(2), FixedLength(3)), 0)
    assert [(r.arrival_ns, r.prompt_tokens, r.output_tokens, r.client, r.hashes) for r in sized] == [
        (7, 2, 3, "c", ()),
        (8, 2, 3, None, ()),
    ]
    timed = with_arrivals(rows, Uniform(1.0), 0)
    assert [(r.arrival_ns, r.hashes) for r in timed] == [(0, (1,)), (10**9, ())]
