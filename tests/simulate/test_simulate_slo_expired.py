"""Requests put last or refused in a simulation: skipping ahead changes nothing, and refusals are counted."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulate_builders import PLAIN, make_request, make_spec, make_workload, run
from test_simulate_skip_ahead import ADMISSIONS, ORDERS

from hypothesis_profiles import examples
from shoal.core import SLO, Request
from shoal.measure import RunRecord, summarise
from shoal.simulate import ClosedLoop

GOALS = st.lists(
    st.builds(
        SLO,
        ttft_s=st.sampled_from([None, 0.02, 0.1, 0.5]),
        tpot_s=st.sampled_from([None, None, 0.01]),
        mtpot_s=st.sampled_from([None, None, 0.03, 0.2]),
        e2e_s=st.sampled_from([None, None, 0.2, 1.0]),
    ),
    min_size=1,
    max_size=5,
)


def with_goals(requests: Sequence[Request], goals: Sequence[SLO]) -> list[Request]:
    return [replace(one, slo=goals[number % len(goals)]) for number, one in enumerate(requests)]


@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    on_hopeless=st.sampled_from(["last", "refuse"]),
    goals=GOALS,
    order=st.sampled_from(ORDERS),
    admission=st.sampled_from(ADMISSIONS),
    blocks=st.sampled_from([40, 70, 200]),
    shape=st.sampled_from([(1, 1), (2, 1), (1, 4), (1, 100)]),
    preemption_mode=st.sampled_from(["recompute", "swap"]),
    preempt_for_waiting=st.sampled_from(["never", "less-urgent"]),
    starvation_s=st.sampled_from([0.3, 1e6]),
    rate=st.sampled_from([20.0, 1e6]),
    services=st.sampled_from([{"a": 1}, {"a": 3, "b": 2}]),
    clients=st.sampled_from([None, None, 9]),
    seed=st.integers(0, 10_000),
)
def test_skip_ahead_on_and_off_leave_identical_records_and_logs(
    goals: list[SLO],
    shape: tuple[int, int],
    blocks: int,
    rate: float,
    services: dict[str, int],
    clients: int | None,
    seed: int,
    **knobs: Any,
) -> None:
    knobs |= dict(zip(("depth", "max_iterations"), shape, strict=True))
    spec = make_spec(blocks, per_merged=services, victim="newest", max_batched_tokens=64, **knobs)
    requests = with_goals(make_workload(24, rate=rate, services=tuple(services), seed=seed), goals)
    (on, log_on), (off, log_off) = (
        run([spec], requests if clients is None else ClosedLoop(requests, clients), skip_ahead=skip_ahead)
        for skip_ahead in (True, False)
    )
    assert log_on == log_off
    assert on == off
    for row in on.requests:
        refused = row.finish == "refused"
        assert row.output_tokens == (0 if refused else requests[int(row.request_id[1:])].true_output_tokens)
        assert not refused or knobs["on_hopeless"] == "refuse"
    assert len(on.requests) == len(requests)


def overloaded(on_hopeless: str, *, skip_ahead: bool = True) -> tuple[RunRecord, list[str]]:
    """One runs for two seconds, one step after another; three wait, two of them for too long."""
    requests = [
        make_request(0, 40, 200),
        replace(make_request(1, 10, 5), slo=SLO(ttft_s=0.5)),
        make_request(2, 10, 6),
        replace(make_request(3, 10, 7), slo=SLO(e2e_s=1.0)),
    ]
    spec = make_spec(options=PLAIN, max_running=1, on_hopeless=on_hopeless)
    return run([spec], requests, skip_ahead=skip_ahead)


@pytest.mark.parametrize("on_hopeless", ["last", "refuse"])
def test_a_run_of_steps_ends_when_a_request_can_no_longer_meet_its_slo(on_hopeless: str) -> None:
    on, log_on = overloaded(on_hopeless)
    off, log_off = overloaded(on_hopeless, skip_ahead=False)
    assert log_on == log_off
    assert on == off
    ends = [row.request_id for row in on.requests]
    assert ends == (["r0", "r2", "r1", "r3"] if on_hopeless == "last" else ["r1", "r3", "r0", "r2"])


def test_a_refused_request_is_counted_as_refused_and_as_a_goal_missed() -> None:
    run_record, _ = overloaded("refuse")
    rows = {row.request_id: row for row in run_record.requests}
    row = rows["r1"]
    assert (row.finish, row.output_tokens, row.answered) == ("refused", 0, False)
    assert 0.5 < row.e2e_s < 0.52  # the step that was under way ends first
    assert row.error is not None
    assert "ttft 0.5 s" in row.error
    overall = summarise(run_record).overall
    assert (overall.requests, overall.answered, overall.refused, overall.failed) == (4, 2, 2, 0)
    assert overall.slo_attainment == 0
    assert overall.ttft_s is not None
    answered = [rows["r0"].ttft_s, rows["r2"].ttft_s]
    assert overall.ttft_s.mean == pytest.approx(sum(answered) / 2)
