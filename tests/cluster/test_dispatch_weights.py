"""Dispatch among engines that do not hold the weights of all services."""

from itertools import product

import pytest
from manager_builders import SECOND, Bench, dispatched

from shoal.cluster.manager.actions import Drop, Refuse, Reserve, Withdraw
from shoal.cluster.manager.engine_load import EngineLoad, UnassignedRequest
from shoal.cluster.manager.events import (
    MigrationMethod,
    MigrationWanted,
    Submitted,
    WeightsFailed,
    WeightsMoved,
)
from shoal.engine.absent_weights import AbsentWeights

A = AbsentWeights(("a",), 0.5)
B, C = AbsentWeights(("b",), 2.0), AbsentWeights(("c",), 4.0)
REQUEST_S = 0.02 + 10 * 0.01
"""Estimated time of a request of these tests, alone."""


def bench_with(dispatch="max-min", **absent):
    """Two engines with all services, and what is absent from them."""
    bench = Bench(dispatch=dispatch)
    bench.add("e0", "e1", services=("a", "b", "c", "d"))
    for engine, weights in absent.items():
        bench.emit(WeightsMoved(engine, 1, weights))
    return bench


def send(bench, request, service="a"):
    """The engine that a request is sent to."""
    [(_, engine, _)] = dispatched(bench.submit(request, service, prompt=20, most=10))
    return engine


@pytest.mark.parametrize("dispatch", ["max-min", "prefix", "least-requests", "forecast"])
def test_of_equal_engines_the_one_with_the_weights_is_chosen(dispatch):
    bench = bench_with(dispatch, e0=(A,))
    assert send(bench, "r0") == "e1"
    bench = bench_with(dispatch, e1=(A,))
    assert send(bench, "r0") == "e0"


@pytest.mark.parametrize("dispatch", ["max-min", "prefix"])
def test_a_fetch_costs_its_time(dispatch):
    """Engine 1 has the weights, and is chosen until its queue is longer than a fetch at engine 0."""
    bench = bench_with(dispatch, e0=(A,))
    chosen = [send(bench, f"r{number}") for number in range(8)]
    first = chosen.index("e0")
    assert set(chosen[:first]) == {"e1"}
    assert first == {"max-min": 5, "prefix": 5}[dispatch]
    assert first * REQUEST_S > A.fetch_s > (first - 1) * REQUEST_S


def test_a_fetch_waits_for_those_of_other_weights_with_requests():
    bench = bench_with(e0=(A, B, C), e1=(A,))
    assert send(bench, "b0", "b") == "e1"
    assert send(bench, "a0") == "e0", "one request there against none, and equal fetches"
    assert send(bench, "d0", "d") in ("e0", "e1")
    bench = bench_with(e0=(A, B), e1=(A, B))
    assert send(bench, "b0", "b") == "e0"
    assert send(bench, "a0") == "e1", "at e0 it would wait for the weights of b"


def test_weights_that_another_request_fetches_cost_nothing_more():
    bench = bench_with(e0=(A,), e1=(A,))
    assert [send(bench, f"r{number}") for number in range(4)] == ["e0"] * 4
    bench.emit(WeightsMoved("e0", 1, ()))  # they come
    assert send(bench, "r4") == "e0"
    for number in range(5):
        bench.end(f"r{number}")
    bench.emit(WeightsMoved("e0", 1, (A,)), WeightsMoved("e1", 1, ()))
    assert send(bench, "r5") == "e1"


def test_services_on_the_same_weights_have_one_fetch():
    shared = AbsentWeights(("a", "b"), 0.5)
    bench = bench_with(e0=(shared,), e1=(shared,))
    assert send(bench, "b0", "b") == "e0"
    assert send(bench, "a0", "a") == "e0"


def test_an_engine_that_fails_to_fetch_comes_last():
    failing = AbsentWeights(("a",), 0.001, failing=True)
    bench = bench_with(e0=(failing,), e1=(A, B))
    assert [send(bench, f"r{number}") for number in range(20)] == ["e1"] * 20


def test_reports_of_an_earlier_start_are_ignored_and_a_start_begins_with_all_weights():
    bench = bench_with(e0=(A,))
    bench.die("e0", 1)
    bench.wait(2, ("e1", 1))
    bench.ready("e0", 2)
    bench.emit(WeightsMoved("e0", 1, (A,)))
    bench.emit(WeightsMoved("e1", 1, (A,)))
    assert send(bench, "r0") == "e0"


def test_the_estimate_is_right_in_all_states():
    for absent, requests in product(product((False, True), repeat=3), product((0, 1, 2), repeat=3)):
        all_weights = dict(zip("abc", (A, B, C), strict=True))
        away = [name for name, is_away in zip("abc", absent, strict=True) if is_away]
        load = EngineLoad("e0")
        load.weights_moved(tuple(all_weights[name] for name in away))
        for name, count in zip("abc", requests, strict=True):
            for number in range(count):
                call = Submitted(f"{name}{number}", name, prompt_tokens=20, most_tokens=10)
                load.add(UnassignedRequest(call, tokens=10, turn=0, now_ns=0))
        wanted = {name for name, count in zip("abc", requests, strict=True) if count}
        for name in "abc":
            expected_s = 0.0
            if name in away and name not in wanted:
                expected_s = sum(all_weights[each].fetch_s for each in away if each == name or each in wanted)
            assert load.fetch_ns(name) == expected_s * SECOND


def test_a_request_whose_weights_cannot_be_loaded_goes_on_at_another_engine():
    bench = bench_with("least-requests")
    assert send(bench, "r0") == "e0"
    actions = bench.emit(WeightsFailed("r0", "no disk"))
    assert Withdraw("r0") in actions
    assert dispatched(actions) == [("r0", "e1", 2)]
    [refused] = bench.emit(WeightsFailed("r0", "no disk either"))
    assert refused == Refuse("r0", refused.kind, "service 'a' cannot be served now: no disk either")
    assert send(bench, "r1") == "e0", "other requests may try"


def test_it_waits_for_an_engine_that_is_started_again_and_not_for_ever():
    bench = bench_with("least-requests")
    bench.die("e1", 1)
    send(bench, "r0")
    assert dispatched(bench.emit(WeightsFailed("r0", "no disk"))) == []
    assert bench.manager.waiting("a") == 1
    bench.wait(2, ("e0", 1))
    assert dispatched(bench.ready("e1", 2)) == [("r0", "e1", 2)]
    bench = bench_with("least-requests")
    bench.die("e1", 1)
    send(bench, "r0")
    bench.emit(WeightsFailed("r0", "no disk"))
    actions = bench.wait(bench.options.wait_for_engine_s + 1, ("e0", 1))
    assert [action.request for action in actions if isinstance(action, Refuse)] == ["r0"]


def test_later_requests_of_the_service_do_not_wait_behind_it():
    bench = bench_with("least-requests")
    bench.die("e1", 1)
    send(bench, "r0")
    bench.emit(WeightsFailed("r0", "no disk"))
    assert send(bench, "r1") == "e0"


def test_a_migration_of_it_ends():
    bench = Bench()
    bench.kv_format = "f"
    bench.add("e0", "e1")
    send(bench, "r0")
    [reserve] = bench.emit(MigrationWanted("r0", "e1", MigrationMethod.LIVE))
    assert isinstance(reserve, Reserve)
    actions = bench.emit(WeightsFailed("r0", "no disk"))
    assert Drop(reserve.migration, "r0", "e1") in actions
    assert dispatched(actions) == [("r0", "e1", 2)]
    assert all(engine.leases == 0 for engine in bench.manager.engines)
