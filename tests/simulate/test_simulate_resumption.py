"""Requests of which some output was made before they come to a simulation."""

from dataclasses import replace

import pytest
from simulate_builders import TIMES, make_request, make_spec, make_workload, run

from shoal.core import Request, ResumeState
from shoal.forecast import StepRows
from shoal.measure import RequestRow

SECOND = 1_000_000_000


def seconds(rows: StepRows) -> int:
    return round(TIMES.step_time(rows) * 1e9)


def cut(request: Request, row: RequestRow, made: int) -> Request:
    """``request`` after so many of the tokens of ``row``, as if that had taken ten seconds."""
    assert request.sampling.max_tokens is not None
    state = ResumeState(
        max_new_tokens=request.sampling.max_tokens,
        age_ns=10 * SECOND,
        first_token_age_ns=8 * SECOND,
        last_token_age_ns=2 * SECOND,
        largest_gap_ns=SECOND,
        num_cached_tokens=row.cached_tokens,
        num_admissions=1,
        num_preemptions=3,
    )
    return replace(request, output_tokens=made, resume_state=state)


@pytest.mark.parametrize("skip_ahead", [False, True])
def test_what_is_made_and_what_was_made_are_one_record(skip_ahead: bool) -> None:
    request = make_request(0, output=6, at_s=30.0, max_tokens=9)
    record, _ = run([make_spec()], [request], skip_ahead=skip_ahead)
    [whole] = record.requests
    for made in range(1, 6):
        record, log = run([make_spec()], [cut(request, whole, made)], skip_ahead=skip_ahead)
        [row] = record.requests
        assert (row.output_tokens, row.finish, row.preemptions) == (6, "stop", 3)
        assert row.recomputed_tokens == 10 + made - 1
        assert (row.arrival_ns, row.first_token_ns) == (20 * SECOND, 22 * SECOND)
        assert row.largest_gap_ns == 2 * SECOND + seconds(StepRows(0, 0, ((10 + made, 0),), 1))
        assert record.engines[0].output_tokens == len(log) == 6 - made
        assert record.engines[0].prefill_tokens == 0
    record, log = run([make_spec()], [cut(request, whole, 6)], skip_ahead=skip_ahead)
    [row] = record.requests
    assert (row.output_tokens, row.finish, row.finish_ns, log) == (6, "stop", 30 * SECOND, [])


@pytest.mark.parametrize("depth", [1, 2])
def test_skip_ahead_on_and_off_leave_identical_records(depth: int) -> None:
    requests = make_workload(60)
    plain, _ = run([make_spec(60)], requests)
    rows = {row.request_id: row for row in plain.requests}
    coming = [
        cut(request, rows[request.id], (request.true_output_tokens or 1) * (number % 4) // 4)
        if number % 3
        else request
        for number, request in enumerate(requests)
    ]
    on, log = run([make_spec(60, depth=depth)], coming)
    off, log_off = run([make_spec(60, depth=depth)], coming, skip_ahead=False)
    assert on == off
    assert log == log_off
    results = {row.request_id: (row.output_tokens, row.finish) for row in on.requests}
    assert results == {name: (row.output_tokens, row.finish) for name, row in rows.items()}


def test_what_cannot_go_on_is_refused() -> None:
    request = replace(make_request(0), output_tokens=2, resume_state=ResumeState(max_new_tokens=99))
    record, _ = run([make_spec(5)], [request])
    [row] = record.requests
    assert row.finish == "refused"
    assert "promised up to 99" in (row.error or "")
