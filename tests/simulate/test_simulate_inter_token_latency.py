"""The times between tokens of a simulation (inter-token latency), over all tokens."""

import pytest
from simulate_builders import make_request, make_spec, make_workload, run

from shoal.measure import summarise


@pytest.mark.parametrize("skip_ahead", [True, False])
@pytest.mark.parametrize("knobs", [{}, {"max_iterations": 4}, {"depth": 2}, {"blocks": 40}], ids=str)
def test_every_gap_is_counted_once(knobs, skip_ahead):
    requests = make_workload(40, services=("a", "b"))
    spec = make_spec(per_merged={"a": 1, "b": 1}, **knobs)
    record, _ = run([spec], requests, skip_ahead=skip_ahead)
    for service, gaps in record.inter_token_latencies.items():
        rows = [row for row in record.requests if row.service == service]
        assert len(gaps) == sum(row.output_tokens - 1 for row in rows)
        # Gaps of an answer add up to the time from its first to its last token.
        total_s = sum(row.finish_ns - row.first_token_ns for row in rows) / 1e9
        assert gaps.mean_s * len(gaps) == pytest.approx(total_s, rel=1e-9)
        assert gaps.percentile_s(100) == pytest.approx(
            max(row.largest_gap_ns for row in rows) / 1e9, rel=0.012
        )


def test_the_summary_has_those_of_each_service_and_of_all():
    spec = make_spec(per_merged={"a": 1, "b": 1})
    requests = [make_request(number, output=10 + number, service="ab"[number % 2]) for number in range(6)]
    summary = summarise(run([spec, spec], requests)[0])
    spreads = [group.inter_token_s for group in (summary.overall, *summary.services.values())]
    assert all(spread is not None and spread.p50 <= spread.p99 for spread in spreads)
    assert min(spread.mean for spread in spreads[1:]) <= spreads[0].mean <= max(s.mean for s in spreads[1:])


def test_answers_of_one_token_have_none():
    summary = summarise(run([make_spec()], [make_request(0, output=1)])[0])
    assert summary.overall.inter_token_s is None
