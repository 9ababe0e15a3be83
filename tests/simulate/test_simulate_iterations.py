"""Plans of several iterations: skipping ahead changes nothing then either."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulate_builders import make_request, make_spec, make_workload, run
from test_simulate_skip_ahead import ADMISSIONS, ORDERS, engine_logs

from hypothesis_profiles import examples
from shoal.cluster.manager.dispatch import LeastRequests
from shoal.schedule import PREEMPT_FOR_WAITING, Aggressive
from shoal.simulate import ClosedLoop


@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    max_iterations=st.sampled_from([1, 2, 4, 7, 100]),
    order=st.sampled_from(ORDERS),
    admission=st.sampled_from(ADMISSIONS),
    blocks=st.sampled_from([40, 70, 200, 1000]),
    block_size=st.sampled_from([1, 4, 16]),
    preemption_mode=st.sampled_from(["recompute", "swap"]),
    preempt_for_waiting=st.sampled_from(PREEMPT_FOR_WAITING),
    lengths=st.sampled_from(["maximum", "history"]),
    starvation_s=st.sampled_from([0.3, 10.0, 1e6]),
    rate=st.sampled_from([3.0, 20.0, 1e6]),
    prefix_caching=st.booleans(),
    services=st.sampled_from([{"a": 1}, {"a": 3}, {"a": 3, "b": 2}]),
    seed=st.integers(0, 10_000),
)
def test_skip_ahead_on_and_off_leave_identical_records_and_logs(
    blocks: int,
    block_size: int,
    rate: float,
    prefix_caching: bool,
    services: dict[str, int],
    seed: int,
    **knobs: Any,
) -> None:
    per_token = blocks * 4 // block_size if block_size > 1 else blocks * 4
    spec = make_spec(
        max(per_token, 12),
        block_size=block_size,
        per_merged=services,
        prefix_caching=prefix_caching,
        victim="newest",
        max_batched_tokens=64,
        **knobs,
    )
    requests = make_workload(24, rate=rate, services=tuple(services), block_size=block_size, seed=seed)
    on, log_on = run([spec], requests, skip_ahead=True)
    off, log_off = run([spec], requests, skip_ahead=False)
    assert log_on == log_off
    assert on == off
    ends = {row.request_id: row.output_tokens for row in on.requests}
    assert ends == {request.id: request.true_output_tokens for request in requests}


@settings(max_examples=examples(25), deadline=None)
@given(
    clients=st.sampled_from([None, 1, 7]),
    engines=st.sampled_from([2, 3]),
    loaded=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_several_engines_and_clients_that_wait(
    clients: int | None, engines: int, loaded: bool, seed: int
) -> None:
    specs = [make_spec(120, admission=Aggressive(watermark=1.0), max_iterations=4) for _ in range(engines)]
    requests = make_workload(60, rate=60.0, seed=seed)
    records = []
    for skip_ahead in (True, False):
        source = requests if clients is None else ClosedLoop(requests, clients)
        record, log = run(specs, source, skip_ahead=skip_ahead, dispatch=LeastRequests() if loaded else None)
        records.append((record, engine_logs(log)))
    assert records[0] == records[1]


@pytest.mark.parametrize("skip_ahead", [True, False])
def test_one_request_alone_is_decoded_in_plans_of_several_iterations(skip_ahead: bool) -> None:
    spec = make_spec(max_iterations=4)
    record, log = run([spec], [make_request(0, prompt=5, output=12)], skip_ahead=skip_ahead)
    assert [line.split(" | ")[0] for line in log] == [
        "0: 0 a: 0+5*",
        "0: 1 a: 0+1*",
        "0: 5 a: 0+1*",
        "0: 9 a: 0+1*",
    ]
    assert ["iterations" in line for line in log] == [False, True, True, True]
    assert record.engines[0].steps == record.engines[0].decode_steps + 1 == 12
    assert [(span.steps, span.decodes) for span in record.spans] == [(1, 0), (11, 1)]


def test_iterations_take_as_long_as_steps_of_their_own() -> None:
    requests = [make_request(number, prompt=5 + number, output=40) for number in range(3)]
    single, several = (
        run([make_spec(max_iterations=count)], requests, skip_ahead=False)[0] for count in (1, 8)
    )
    assert single.requests == several.requests
    assert single.spans == several.spans
    assert single.end_ns == several.end_ns


@pytest.mark.parametrize("skip_ahead", [True, False])
def test_an_arrival_ends_a_plan_after_the_iteration_under_way(skip_ahead: bool) -> None:
    spec = make_spec(max_iterations=50)
    alone, _ = run([spec], [make_request(0, prompt=5, output=30)], skip_ahead=skip_ahead)
    step_s = alone.end_ns / 30 / 1e9
    requests = [make_request(0, prompt=5, output=30), make_request(1, prompt=5, output=3, at_s=10.5 * step_s)]
    record, log = run([spec], requests, skip_ahead=skip_ahead)
    joined = next(number for number, line in enumerate(log) if "joined 1" in line)
    assert log[joined].startswith("0: 11 a: 0+1* 1+5*")
    assert "iterations 29" in log[joined - 1]
    first, second = sorted(record.requests, key=lambda row: row.request_id)
    assert (first.output_tokens, second.output_tokens) == (30, 3)


def test_memory_of_steps_that_an_arrival_prevents_is_in_use_with_and_without_skip_ahead() -> None:
    """A plan takes the blocks of all its steps, and those that were not made leave them to its requests."""
    spec = make_spec(80, block_size=1, max_iterations=30)
    requests = [make_request(0, prompt=3, output=30), make_request(1, prompt=3, output=30, at_s=0.0905)]
    on, log_on = run([spec], requests, skip_ahead=True)
    off, log_off = run([spec], requests, skip_ahead=False)
    assert log_on == log_off
    assert on == off


def test_a_plan_of_several_iterations_evicts_no_cached_prefix() -> None:
    """Its blocks are free ones; where too few are free, single steps go on."""
    shared = [make_request(0, prompt=40, output=1, hashes=range(10))]
    later = [make_request(1, prompt=5, output=30, at_s=1.0)]
    _, log = run([make_spec(16, max_iterations=16)], [*shared, *later])
    lengths = [int(line.split("iterations ")[1].split(" ")[0]) if "iterations" in line else 1 for line in log]
    assert max(lengths) > 1
    assert lengths[-1] == 1
    assert sum(lengths) == 31
