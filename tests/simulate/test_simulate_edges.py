"""Small and odd inputs: nothing hangs, nothing is lost, and times are as computed by hand."""

from dataclasses import replace
from random import Random

import pytest
from simulate_builders import PLAIN, TIMES, make_request, make_spec, make_workload, run

from shoal.cluster.manager.dispatch import LeastRequests
from shoal.core import ConfigError
from shoal.forecast import StepRows
from shoal.schedule import Aggressive, Conservative
from shoal.simulate import ClosedLoop, OpenLoop, Simulation, Watch


def seconds(rows: StepRows) -> int:
    return round(TIMES.step_time(rows) * 1e9)


def test_one_request_takes_its_prefill_and_its_decodes() -> None:
    record, log = run([make_spec()], [make_request(0, prompt=10, output=4, at_s=0.5)])
    [row] = record.requests
    prefill = seconds(StepRows(0, 0, ((10, 0),), 1))
    decodes = [seconds(StepRows(1, context, (), 1)) for context in (11, 12, 13)]
    assert row.first_token_ns - row.arrival_ns == prefill
    assert row.finish_ns - row.first_token_ns == sum(decodes)
    assert row.largest_gap_ns == max(decodes)
    assert (row.output_tokens, row.finish, row.engine) == (4, "stop", 0)
    assert record.end_ns == row.finish_ns
    assert len(log) == 4


def test_a_single_token_output_has_no_gap() -> None:
    record, _ = run([make_spec()], [make_request(0, prompt=1, output=1)])
    [row] = record.requests
    assert row.first_token_ns == row.finish_ns > 0
    assert (row.largest_gap_ns, row.tpot_s, row.output_tokens) == (0, 0.0, 1)


def test_an_output_is_cut_at_max_tokens() -> None:
    record, _ = run([make_spec()], [make_request(0, output=50, max_tokens=7)])
    assert (record.requests[0].output_tokens, record.requests[0].finish) == (7, "length")


def test_no_requests_at_all() -> None:
    record, log = run([make_spec(), make_spec()], [])
    assert (record.requests, record.end_ns, log) == ([], 0, [])
    assert [engine.steps for engine in record.engines] == [0, 0]


def test_all_at_time_zero_are_answered_once_each() -> None:
    requests = [make_request(number, 1 + number % 30, 1 + number % 9) for number in range(200)]
    record, _ = run([make_spec(60)], requests)
    assert sorted(row.request_id for row in record.requests) == sorted(one.id for one in requests)
    assert all(row.answered for row in record.requests)


def test_requests_out_of_order_arrive_by_their_times() -> None:
    requests = make_workload(50)
    shuffled = list(requests)
    Random(1).shuffle(shuffled)
    in_order, _ = run([make_spec()], requests)
    out_of_order, _ = run([make_spec()], shuffled)
    assert in_order == out_of_order


@pytest.mark.parametrize("prompt", [400 * 4, 10_000])
def test_a_request_that_never_fits_is_refused_and_blocks_no_other(prompt: int) -> None:
    requests = [make_request(0), make_request(1, prompt=prompt), make_request(2)]
    record, _ = run([make_spec(400)], requests)
    rows = {row.request_id: row for row in record.requests}
    assert (rows["r1"].finish, rows["r1"].engine, rows["r1"].output_tokens) == ("refused", -1, 0)
    assert "tokens" in (rows["r1"].error or "")
    assert rows["r0"].answered
    assert rows["r2"].answered


def test_an_unknown_service_is_refused_and_the_possible_are_named() -> None:
    record, _ = run([make_spec()], [make_request(0, service="b")])
    assert record.requests[0].finish == "refused"
    assert "possible are a" in (record.requests[0].error or "")


def test_a_refused_client_sends_its_next_request() -> None:
    requests = [make_request(number, prompt=10_000 if number % 2 else 5) for number in range(10)]
    record, _ = run([make_spec()], ClosedLoop(requests, 1))
    assert [row.finish for row in record.requests].count("refused") == 5
    assert len(record.requests) == 10


@pytest.mark.parametrize("skip_ahead", [True, False])
def test_a_request_ends_at_a_token_that_comes_too_late(skip_ahead: bool) -> None:
    requests = [
        make_request(0, 10, 400),
        make_request(1, 900, 50, at_s=0.5),
        make_request(2, 5, 100, at_s=0.9),
    ]
    step_s = TIMES.step_time(StepRows(1, 60, ((900, 0),), 2))
    spec = replace(make_spec(max_batched_tokens=2000), abort_gap_s=step_s * 0.9)
    record, _ = run([spec], requests, skip_ahead=skip_ahead)
    rows = {row.request_id: row for row in record.requests}
    assert {name: row.finish for name, row in rows.items()} == {"r0": "cancelled", "r1": "stop", "r2": "stop"}
    assert rows["r0"].largest_gap_ns > spec.abort_gap_s * 1e9 > rows["r1"].largest_gap_ns
    assert rows["r0"].finish_ns == rows["r1"].first_token_ns
    kept, _ = run([make_spec(max_batched_tokens=2000)], requests, skip_ahead=skip_ahead)
    assert all(row.finish == "stop" for row in kept.requests)


def test_a_decode_step_that_takes_too_long_ends_all_its_requests() -> None:
    spec = replace(make_spec(), abort_gap_s=seconds(StepRows(1, 14, (), 1)) / 1e9)
    for skip_ahead in (True, False):
        record, _ = run([spec], [make_request(0, 10, 30)], skip_ahead=skip_ahead)
        [row] = record.requests
        assert (row.finish, row.output_tokens) == ("cancelled", 6)


@pytest.mark.parametrize("clients", [1, 3, 50])
def test_clients_have_one_request_each_at_a_time(clients: int) -> None:
    requests = [make_request(number, 5, 1 + number % 11) for number in range(40)]
    record, _ = run([make_spec(2_000)], ClosedLoop(requests, clients))
    times = [(row.arrival_ns, 1) for row in record.requests] + [
        (row.finish_ns, -1) for row in record.requests
    ]
    present = peak = 0
    for _, change in sorted(times):
        present += change
        peak = max(peak, present)
    assert peak == min(clients, 40)


def test_clients_think() -> None:
    requests = [make_request(number, 5, 3) for number in range(4)]
    record, _ = run([make_spec()], ClosedLoop(requests, 1, think_ns=7_000_000_000))
    for before, after in zip(record.requests, record.requests[1:], strict=False):
        assert after.arrival_ns == before.finish_ns + 7_000_000_000


def test_round_robin_deals_in_turn_and_least_loaded_avoids_the_busy() -> None:
    long = make_request(0, 10, 400)
    short = [make_request(number, 10, 2, at_s=number) for number in range(1, 7)]
    record, _ = run([make_spec(), make_spec()], [long, *short])
    engines = {row.request_id: row.engine for row in record.requests}
    assert [engines[f"r{number}"] for number in range(7)] == [0, 1, 0, 1, 0, 1, 0]
    record, _ = run([make_spec(), make_spec()], [long, *short], dispatch=LeastRequests())
    engines = {row.request_id: row.engine for row in record.requests}
    assert [engines[f"r{number}"] for number in range(4)] == [0, 1, 1, 1]


def test_services_on_engines_of_their_own() -> None:
    specs = [make_spec(per_merged={"a": 1}), make_spec(per_merged={"b": 1})]
    record, _ = run(specs, make_workload(30, services=("a", "b")))
    assert {(row.service, row.engine) for row in record.requests} == {("a", 0), ("b", 1)}


def test_swapping_costs_time() -> None:
    knobs = {"preemption_mode": "swap", "admission": Conservative(overcommit=20.0)}
    requests = [make_request(number, 20, 40) for number in range(8)]
    record, _ = run([make_spec(40, **knobs)], requests)
    slow = replace(make_spec(40, **knobs), host_bytes_per_s=1e4)
    slowly, _ = run([slow], requests)
    assert record.engines[0].swapped_tokens > 0
    assert slowly.engines[0].busy_ns > 1.5 * record.engines[0].busy_ns


def test_samples_tell_the_state_at_their_times() -> None:
    requests = [make_request(number, 8, 20) for number in range(3)]
    record, _ = run([make_spec(400, block_size=4)], requests)
    first = record.samples[0]
    assert (first.time_ns, first.running, first.waiting) == (0, 3, 0)
    assert first.kv_used == 3 * 2 / 400
    later = record.samples[2]
    steps_done = sum(1 for span in record.spans for _ in range(span.steps) if span.end_ns <= later.time_ns)
    assert steps_done >= 1
    assert later.running == 3
    delivered = sum(sample.tokens_per_s * 0.05 for sample in record.samples)
    assert 0 < delivered <= 60
    assert record.engines[0].output_tokens == 60


def test_samples_tell_services_apart() -> None:
    requests = [make_request(number, 8, 20, service="ab"[number % 2]) for number in range(5)]
    record, _ = run([make_spec(400, per_merged={"a": 1, "b": 1}, max_running=4)], requests)
    assert any(set(sample.services) == {"a", "b"} for sample in record.samples)
    for sample in record.samples:
        parts = sample.services.values()
        assert sum(part.waiting for part in parts) == sample.waiting
        assert sum(part.running for part in parts) == sample.running
        assert sum(part.kv_used for part in parts) == pytest.approx(sample.kv_used)


def test_preemptions_are_recorded_with_their_times() -> None:
    record, _ = run([make_spec(40, admission=Conservative(overcommit=20.0))], make_workload(60))
    assert record.engines[0].preemptions > 0
    assert sum(event.count for event in record.events) == record.engines[0].preemptions
    assert {event.kind for event in record.events} == {"preempted"}
    times = [event.time_ns for event in record.events]
    assert times == sorted(times)
    assert len({time_ns // 50_000_000 for time_ns in times}) == len(times)
    assert 0 < times[0] <= times[-1] < record.end_ns


def test_spans_cover_the_busy_time() -> None:
    record, _ = run([make_spec(60)], make_workload(40))
    assert sum(span.end_ns - span.start_ns for span in record.spans) == record.engines[0].busy_ns
    assert sum(span.steps for span in record.spans) == record.engines[0].steps
    for before, after in zip(record.spans, record.spans[1:], strict=False):
        assert before.end_ns <= after.start_ns


def test_refusals_count_in_the_evaluation_of_slos() -> None:
    record, _ = run([make_spec()], [make_request(0, prompt=10_000)])
    assert record.requests[0].answered is False


def test_wrong_set_ups_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one engine"):
        Simulation([], OpenLoop([]))
    with pytest.raises(ConfigError, match="KV pool is for"):
        replace(make_spec(), services={})
    with pytest.raises(ConfigError, match="microsecond"):
        Watch(sample_s=0.0)
    with pytest.raises(ValueError, match="at least 1 client"):
        ClosedLoop([], 0)
    assert isinstance(PLAIN.admission, Aggressive)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_refusal_in_the_middle_of_a_skipped_run_changes_nothing(depth: int) -> None:
    requests = [
        make_request(0, 100, 400),
        make_request(1, 10_000, 5, at_s=1.0),
        make_request(2, 100, 5, at_s=30.0),
    ]
    on, log_on = run([make_spec(400, depth=depth)], requests)
    off, log_off = run([make_spec(400, depth=depth)], requests, skip_ahead=False)
    assert (on, log_on) == (off, log_off)
    assert all(row.arrival_ns <= row.first_token_ns <= row.finish_ns for row in on.requests)


def test_years_without_requests_leave_two_samples() -> None:
    requests = [make_request(0), make_request(1, at_s=1e9)]
    record, _ = run([make_spec()], requests)
    assert len(record.requests) == 2
    assert len(record.samples) < 20
    times = [sample.time_ns for sample in record.samples]
    assert times == sorted(set(times))
    assert all(time_ns % 50_000_000 == 0 for time_ns in times)
