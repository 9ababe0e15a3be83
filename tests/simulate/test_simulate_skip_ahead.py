"""Skipping ahead changes nothing: the same records, byte for byte, and the same schedule log."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulate_builders import make_request, make_spec, make_workload, run

from hypothesis_profiles import examples
from shoal.cluster.manager.dispatch import LeastRequests
from shoal.core import Client
from shoal.schedule import (
    PREEMPT_FOR_WAITING,
    Admission,
    Aggressive,
    Conservative,
    DoublingBudget,
    EarliestDeadline,
    Fcfs,
    FcfsStrict,
    Mlfq,
    Oracle,
    Order,
    PastFuture,
    Predicted,
    RoundRobin,
    ShortestRemaining,
    Slice,
    WeightedTurns,
)
from shoal.schedule.policies.orders import Fair
from shoal.simulate import ClosedLoop

ORDERS: list[Order] = [
    Fcfs(),
    FcfsStrict(),
    RoundRobin(),
    Mlfq(),
    DoublingBudget(),
    ShortestRemaining(),
    EarliestDeadline(),
    WeightedTurns(),
    Fair(),
]
CLIENTS = (None, Client("a"), Client("b", 2.0))
ADMISSIONS: list[Admission] = [
    Aggressive(watermark=1.0),
    Aggressive(watermark=0.7),
    Conservative(),
    Conservative(overcommit=3.0, admit_every=10),
    PastFuture(),
    PastFuture(cold_start="max", draws="max", admit_every=10, window=20),
    Oracle(),
    Predicted(),
    Slice(tokens=7),
]


def engine_logs(log: list[str]) -> dict[str, list[str]]:
    """By engine: what engines do at the same time may be told in any order."""
    logs: dict[str, list[str]] = {}
    for line in log:
        logs.setdefault(line.split(":")[0], []).append(line)
    return logs


@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    order=st.sampled_from(ORDERS),
    admission=st.sampled_from(ADMISSIONS),
    blocks=st.sampled_from([40, 70, 200, 1000]),
    block_size=st.sampled_from([1, 4, 16]),
    preemption_mode=st.sampled_from(["recompute", "swap"]),
    preempt_for_waiting=st.sampled_from(PREEMPT_FOR_WAITING),
    lengths=st.sampled_from(["maximum", "history"]),
    starvation_s=st.sampled_from([0.3, 10.0, 1e6]),
    depth=st.sampled_from([1, 2]),
    rate=st.sampled_from([3.0, 20.0, 1e6]),
    prefix_caching=st.booleans(),
    services=st.sampled_from([{"a": 1}, {"a": 3}, {"a": 3, "b": 2}]),
    context=st.sampled_from([1 << 20, 70]),
    seed=st.integers(0, 10_000),
)
def test_skip_ahead_on_and_off_leave_identical_records_and_logs(
    blocks: int,
    block_size: int,
    rate: float,
    prefix_caching: bool,
    services: dict[str, int],
    context: int,
    seed: int,
    **knobs: Any,
) -> None:
    per_token = blocks * 4 // block_size if block_size > 1 else blocks * 4
    spec = make_spec(
        max(per_token, 12),
        block_size=block_size,
        per_merged=services,
        prefix_caching=prefix_caching,
        context=context,
        victim="newest",
        max_batched_tokens=64,
        **knobs,
    )
    requests = [
        replace(request, client=CLIENTS[number % len(CLIENTS)])
        for number, request in enumerate(
            make_workload(24, rate=rate, services=tuple(services), block_size=block_size, seed=seed)
        )
    ]
    on, log_on = run([spec], requests, skip_ahead=True)
    off, log_off = run([spec], requests, skip_ahead=False)
    assert log_on == log_off
    assert on == off
    assert Counter(row.request_id for row in on.requests) == {one.id: 1 for one in requests}


@settings(max_examples=examples(25), deadline=None)
@given(
    clients=st.sampled_from([None, 1, 7]),
    engines=st.sampled_from([2, 3]),
    loaded=st.booleans(),
    depth=st.sampled_from([1, 2]),
    seed=st.integers(0, 10_000),
)
def test_several_engines_and_clients_that_wait(
    clients: int | None, engines: int, loaded: bool, depth: int, seed: int
) -> None:
    specs = [make_spec(120, admission=Aggressive(watermark=1.0), depth=depth) for _ in range(engines)]
    requests = make_workload(60, rate=60.0, seed=seed)
    records = []
    for skip_ahead in (True, False):
        source = requests if clients is None else ClosedLoop(requests, clients)
        record, log = run(specs, source, skip_ahead=skip_ahead, dispatch=LeastRequests() if loaded else None)
        records.append((record, engine_logs(log)))
    assert records[0] == records[1]


@settings(max_examples=examples(25), deadline=None)
@given(
    admission=st.sampled_from(ADMISSIONS),
    block_size=st.sampled_from([1, 4]),
    depth=st.sampled_from([1, 2]),
    seed=st.integers(0, 10_000),
)
def test_records_are_the_same_without_a_log(
    admission: Admission, block_size: int, depth: int, seed: int
) -> None:
    spec = make_spec(
        320 // block_size, block_size=block_size, prefix_caching=False, admission=admission, depth=depth
    )
    requests = make_workload(40, rate=200.0, block_size=block_size, seed=seed)
    on, _ = run([spec], requests, logged=False)
    off, _ = run([spec], requests, skip_ahead=False)
    assert on == off


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_are_really_skipped(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.schedule import Scheduler

    calls = Counter[str]()
    real = Scheduler.schedule
    monkeypatch.setattr(
        Scheduler, "schedule", lambda self, now_ns: (calls.update("x"), real(self, now_ns))[1]
    )
    spec = make_spec(2_000, block_size=16, depth=depth)
    requests = [make_request(number, 30, 300 + number, at_s=0.0) for number in range(8)]
    record, _ = run([spec], requests)
    assert record.engines[0].steps == 307
    assert calls["x"] < 30 * depth


@pytest.mark.parametrize("seed", range(6))
def test_prompts_of_tokens_among_synthetic_ones(seed: int) -> None:
    requests = make_workload(40, rate=40.0, seed=seed)
    mixed = [
        replace(one, prompt=[one.seed * 100 + at for at in range(len(one.prompt))]) if number % 2 else one
        for number, one in enumerate(requests)
    ]
    spec = make_spec(60, admission=Aggressive(watermark=1.0))
    on, log_on = run([spec], mixed)
    off, log_off = run([spec], mixed, skip_ahead=False)
    assert log_on == log_off
    assert on == off
