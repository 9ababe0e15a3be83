"""Weights that come and go: which are fetched and evicted, and what happens to requests meanwhile."""

import pytest
from replay_executor import STEP_NS
from schedule_builders import make_pool, make_request, make_scheduler
from weights_builders import FETCH_NS, Eager, Never, WeightsMachine, finished, memory_for

from shoal.core import ConfigError, FinishReason
from shoal.schedule.policies.residency import Place, ResidencyDecision


def make(services="abc", *, count=1, blocks=64, policy=None, memory=None, **options):
    pool = make_pool(blocks, per_merged=dict.fromkeys(services, 1), alike=True)
    return make_scheduler(pool, memory=memory or memory_for(count, policy), **options)


def test_weights_are_fetched_before_a_step_in_plans_without_rows():
    machine = WeightsMachine(make("ab"))
    run = machine.go([(0, make_request(10, 2, service="b"))])
    assert run.fetched == ["b"]
    assert not run.plans[0].seq_ids
    assert finished(run) == set(run.ends)
    assert min(run.first_tokens_ns.values()) == FETCH_NS + STEP_NS


def test_free_memory_is_filled_in_the_order_of_declaration_and_pinned_weights_come_first():
    machine = WeightsMachine(make("abcd", count=3, pinned=("d",)))
    machine.go()
    assert machine.run.fetched == ["d", "a", "b"]
    assert machine.resident == {"a", "b", "d"}


def test_all_requests_of_resident_weights_are_served_before_they_leave():
    scheduler = make("abc")
    machine = WeightsMachine(scheduler)
    machine.go([(0, make_request(4, 1, service="a"))])
    machine.run.fetched.clear()
    requests = [make_request(4, 3, service=service) for service in "abcabc"]
    run = machine.go([(machine.now_ns + at, request) for at, request in enumerate(requests)])
    assert run.fetched == ["b", "c"]
    assert finished(run) >= {request.id for request in requests}


def test_streams_keep_their_kv_while_their_weights_are_absent():
    scheduler = make("ab", memory=memory_for(1, Eager(), quantum_steps=3), preemption_mode="swap")
    machine = WeightsMachine(scheduler)
    long = make_request(8, 200, service="a")
    others = [make_request(8, 2, service="b") for _ in range(4)]
    run = machine.go([(0, long), *[(40 * STEP_NS * n, request) for n, request in enumerate(others)]])
    assert finished(run) == {long.id, *[request.id for request in others]}
    assert len(run.fetched) > 3
    stats = scheduler.stats().services
    assert stats["a"].preemptions == 0
    assert stats["a"].recomputed_tokens == 0
    assert sum(stats[name].swapped_tokens for name in "ab") == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_weights_may_leave_as_soon_as_they_owe_no_step(depth):
    """Not only at the end of a quantum, or when a request arrives or ends."""
    memory = memory_for(1, Eager(), quantum_steps=1000)
    machine = WeightsMachine(make("ab", memory=memory, depth=depth))
    run = machine.go([(0, make_request(8, 6, service=name)) for name in "ab"])
    assert len(run.fetched) >= 4
    assert machine.now_ns <= 12 * (FETCH_NS + depth * STEP_NS)


def test_decodes_run_on_though_a_request_waits_for_longer_than_a_quantum():
    """Weights owe it no step any more then, so plans of several steps need not stop after each one."""
    memory = memory_for(1, quantum_steps=5)
    scheduler = make("ab", memory=memory, max_running=1, max_iterations=4)
    requests = [make_request(8, length, service="a") for length in (100, 4)]
    run = WeightsMachine(scheduler).go([(0, request) for request in requests])
    assert finished(run) == {request.id for request in requests}
    assert sum(plan.iterations for plan in run.plans if plan.iterations > 1) > 80


def test_a_quantum_covers_recomputing_and_a_token():
    """Each time the other weights take the memory for KV, so a prompt takes twelve steps again."""
    memory = memory_for(1, Eager(), quantum_steps=3)
    scheduler = make(
        "ab", memory=memory, blocks=12, max_batched_tokens=3, preemption_mode="recompute", starvation_s=1e6
    )
    requests = [make_request(36, 8, service=name) for name in "ab"]
    machine = WeightsMachine(scheduler)
    run = machine.go([(0, request) for request in requests])
    assert finished(run) == {request.id for request in requests}
    fetches_by_token = len(run.fetched) / 16
    assert fetches_by_token < 2


def test_a_policy_that_wants_to_decide_in_the_past_is_asked_again_later():
    calls = []

    class Past:
        def decide(self, view, now_ns):
            calls.append(now_ns)
            return ResidencyDecision((), max(0, now_ns - 5))

    machine = WeightsMachine(make("ab", memory=memory_for(1, Past()), starvation_s=1.0))
    machine.go([(0, make_request(8, 2, service=name)) for name in "ab"])
    assert len(calls) <= 2 * 1_000 + 10  # once each millisecond until requests of a, then of b starve


def test_kv_of_absent_weights_gives_way_to_waiting_requests_and_is_swapped():
    scheduler = make("ab", memory=memory_for(1, Eager(), quantum_steps=3), blocks=12, preemption_mode="swap")
    machine = WeightsMachine(scheduler)
    first = make_request(32, 12, service="a")  # 11 blocks of 12 at its end: also the oldest gives way
    second = make_request(24, 6, service="b")
    run = machine.go([(0, first), (FETCH_NS + 2 * STEP_NS, second)])
    assert finished(run) == {first.id, second.id}
    assert scheduler.stats().services["a"].preemptions >= 1
    assert scheduler.stats().services["a"].recomputed_tokens == 0
    assert run.ends_ns[second.id] < run.ends_ns[first.id]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("preempt", ["never", "gain", "less-urgent"])
def test_kv_of_absent_weights_gives_way_in_every_mode(mode, preempt):
    scheduler = make(
        "ab",
        memory=memory_for(1, Eager(), quantum_steps=8),
        blocks=12,
        preemption_mode=mode,
        preempt_for_waiting=preempt,
    )
    requests = [(n * 3 * STEP_NS, make_request(30, 10, service="ab"[n % 2])) for n in range(8)]
    run = WeightsMachine(scheduler).go(requests)
    assert finished(run) == {request.id for _, request in requests}


def test_stats_tell_where_weights_are_and_what_waiting_for_them_cost():
    scheduler = make("ab")
    machine = WeightsMachine(scheduler)
    machine.go([(0, make_request(4, 1, service="a"))])
    begin_ns = machine.now_ns
    machine.go([(begin_ns, make_request(4, 1, service="b"))])
    stats = {name: counted.weights for name, counted in scheduler.stats().services.items()}
    assert stats["a"].place is Place.ABSENT
    assert stats["b"].place is Place.RESIDENT
    assert (stats["a"].fetches, stats["a"].evictions, stats["b"].fetches) == (1, 1, 1)
    assert stats["b"].waits == 1
    assert stats["b"].waiting_s == stats["b"].longest_wait_s == FETCH_NS / 1e9
    assert make_scheduler().stats().services["a"].weights is None


def test_a_failed_fetch_is_tried_again():
    machine = WeightsMachine(make("ab"), fails=lambda number: number in (0, 1))
    request = make_request(4, 2, service="b")
    run = machine.go([(0, request)])
    assert run.failed_fetches.total() == 2
    assert finished(run) == {request.id}


def test_after_three_failed_fetches_in_a_row_requests_end():
    machine = WeightsMachine(make("ab"), fails=lambda number: True)
    request = make_request(4, 2, service="b")
    run = machine.go([(0, request)], until_ns=20_000_000_000)
    assert run.ends == {request.id: FinishReason.UNLOADED}
    assert run.failed_fetches["b"] >= 3


def test_weights_beyond_the_budget_are_refused_with_numbers():
    pins = r"weights\.memory: .* are less than the .* of 'a' \(.*, pinned\), 'b' \(.*, pinned\), 'c' \("
    with pytest.raises(ConfigError, match=pins):
        make("abc", count=2, pinned=("a", "b"))
    with pytest.raises(ConfigError, match=r"of 'b' \(.* MiB\), which must be in memory at once"):
        make("ab", count=2, weight_bytes={"a": 1, "b": 3})


def test_weights_pinned_at_run_time_come_at_once_and_stay_until_they_are_unpinned():
    scheduler = make("abc", count=2)
    machine = WeightsMachine(scheduler)
    machine.go()
    assert machine.resident == {"a", "b"}
    scheduler.pin_service("c", True)
    machine.go()
    assert "c" in machine.resident
    work = [(machine.now_ns + n * STEP_NS, make_request(4, 3, service="ab"[n % 2])) for n in range(20)]
    run = machine.go(work)
    assert finished(run) == {request.id for _, request in work}
    stats = scheduler.stats().services
    assert (stats["c"].weights.evictions, stats["c"].weights.pinned) == (0, True)
    assert stats["a"].weights.evictions > 0
    scheduler.pin_service("c", False)
    begin_ns = machine.now_ns
    machine.go([(begin_ns + n * STEP_NS, make_request(4, 3, service="ab"[n % 2])) for n in range(20)])
    assert scheduler.stats().services["c"].weights.evictions == 1
    assert machine.resident == {"a", "b"}


def test_a_pin_that_leaves_too_little_for_the_others_changes_nothing():
    scheduler = make("abc", count=2, pinned=("a",))
    with pytest.raises(ConfigError, match=r"'a' \(.*, pinned\), 'b' \(.*, pinned\), 'c' \("):
        scheduler.pin_service("b", True)
    with pytest.raises(ConfigError, match="there is no service 'x'; there are: a, b, c"):
        scheduler.pin_service("x", True)
    assert [scheduler.is_pinned(name) for name in "abc"] == [True, False, False]
    scheduler.pin_service("a", False)
    scheduler.pin_service("b", True)
    assert [scheduler.is_pinned(name) for name in "abc"] == [False, True, False]


def test_weights_stay_pinned_while_one_of_their_services_pins_them():
    scheduler = make("abc", count=2, weights={"a": "w", "b": "w"}, pinned=("a",))
    scheduler.pin_service("b", True)
    scheduler.pin_service("a", False)
    stats = scheduler.stats().services
    assert [stats[name].weights.pinned for name in "abc"] == [True, True, False]
    scheduler.pin_service("b", False)
    assert not scheduler.stats().services["a"].weights.pinned


def test_a_starved_request_comes_before_the_policy():
    starvation_s = 100 * STEP_NS / 1e9
    scheduler = make("ab", policy=Never(), starvation_s=starvation_s)
    long, other = make_request(8, 1000, service="a"), make_request(8, 3, service="b")
    run = WeightsMachine(scheduler).go([(0, long), (STEP_NS, other)])
    assert finished(run) == {long.id, other.id}
    # Both starve, and a comes first, for a turn as long as its fetch.
    bound_ns = 100 * STEP_NS + FETCH_NS + FETCH_NS + FETCH_NS + STEP_NS
    assert run.first_tokens_ns[other.id] <= bound_ns


def test_weights_stay_for_a_turn_though_others_are_demanded():
    """Else requests that have waited too long, as most have under overload, would cut each turn to a step."""
    memory = memory_for(1, Never(), quantum_steps=1, max_absence_steps=5)
    machine = WeightsMachine(make("abc", memory=memory, starvation_s=5 * STEP_NS / 1e9))
    run = machine.go([(0, make_request(8, 40, service=name)) for name in "abc"])
    steps = sum(bool(plan.seq_ids) for plan in run.plans)
    assert len(run.fetched) <= steps * STEP_NS / FETCH_NS + 3  # a turn is as long as a fetch


def test_services_on_the_same_weights_come_together():
    scheduler = make("abc", weights={"a": "w", "b": "w"})
    requests = [(0, make_request(6, 3, service=service)) for service in "ab"]
    run = WeightsMachine(scheduler).go(requests)
    assert run.fetched.count("w") == 1
    assert finished(run) == {request.id for _, request in requests}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("iterations", [1, 8])
def test_every_depth_and_number_of_iterations(depth, iterations):
    if depth > 1 and iterations > 1:
        pytest.skip("not possible together")
    scheduler = make(
        "abcd", count=2, policy=Eager(), depth=depth, max_iterations=iterations, preemption_mode="swap"
    )
    requests = [(n * 2 * STEP_NS, make_request(6, 9, service="abcd"[n * 3 % 4])) for n in range(20)]
    run = WeightsMachine(scheduler).go(requests)
    assert finished(run) == {request.id for _, request in requests}
